"""The rival by hand on texts: a graph a width, the numbers of eager steps, and nothing that waits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.text_rivals import BertByHand, PricedByHand, bucketed
from tiny_texts import bert_work, deberta_work
from waiting import no_waiting

from benchmarks import quality, texts, trainings

pytest.importorskip("transformers")
DEVICE = torch.device("cuda")
ROOT = Path(__file__).parents[2]
EITHER = pytest.mark.parametrize("make", [bert_work, deberta_work], ids=["bert", "deberta"])


def hand_of(work):
    model = quality.without_dropout(work.build())
    return (PricedByHand if work.task is texts.PRICES else BertByHand)(work, model, work.data(), DEVICE)


def losses_of(hand, work, *, captured, epochs=4):
    found = []
    for epoch in range(epochs):
        batches, widths = bucketed(work.data().train.lengths, work.batch, epoch)
        for chosen, width in zip(batches.to(DEVICE), widths, strict=True):
            before = hand.running.clone()
            hand.indices.copy_(chosen)
            (hand.step if captured else hand.update)(width)
            found.append(hand.running - before)
    return torch.stack(found)


@EITHER
def test_captured_steps_by_hand_have_the_losses_of_eager_ones(make):
    work = make(precision="fp32", lr=1e-3)
    captured, eager = hand_of(work), hand_of(work)
    mine, theirs = losses_of(captured, work, captured=True), losses_of(eager, work, captured=False)
    assert len(captured._graphs) == 3
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@EITHER
def test_hotlap_has_the_losses_of_the_rival_by_hand_on_the_same_batches(make):
    work = make(precision="fp32", lr=1e-3)
    batches, widths = bucketed(work.data().train.lengths, work.batch, 0)
    theirs = losses_of(hand_of(work), work, captured=True, epochs=1)
    model = quality.without_dropout(work.build())
    rig = trainings.make_rig(work, model, trainings.fast_plan(work, DEVICE), DEVICE)
    given = work.data().train.sequences(widths=sorted(set(widths)))
    settings = {"batch_size": work.batch, "epochs": 1, "drop_last": True, "order": batches.flatten().tolist()}
    mine = torch.stack([rig.step(window).double() for window in rig.feed(given, **settings)])
    assert rig.given_up is None
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@EITHER
def test_a_replay_by_hand_waits_for_nothing(make):
    work = make()
    hand = hand_of(work)
    losses_of(hand, work, captured=True)
    width = max(hand._graphs)
    with no_waiting():
        hand.step(width)
    assert bool(hand.running.isfinite())


@EITHER
@pytest.mark.parametrize("column", ["guide_before", "dynamic", "by_hand", "hotlap", "one_width", "by_width"])
def test_every_column_of_texts_trains_on_a_gpu(make, column):
    work, rigs = make(), []
    steps = trainings.steps_of(column, work, DEVICE, rigs.append)
    assert [next(steps) for _ in range(14)] == [work.batch] * 14
    steps.close()
    assert "not as planned" not in trainings.told_by(rigs)


def test_rivals_with_workers_train_on_a_gpu(tmp_path):
    """In a process of their own: workers forked after a capture may die of what they inherit."""
    pytest.importorskip("accelerate")
    file = tmp_path / "found.json"
    given = ["--columns", "guide_after,hf_trainer", "--seconds", "0.05", "--warm-seconds", "0", "--laps", "1"]
    code = (
        "import sys; from tiny_texts import bert_work, deberta_work; from benchmarks import fast_path\n"
        f"sys.exit(fast_path.main([*{given}, '--json', {str(file)!r}], [bert_work(), deberta_work()]))"
    )
    places = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests/support")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(file.read_text())["works"].values():
        assert row["samples_per_s"].keys() == {"guide_after", "hf_trainer"}
