"""How a training stands, as others see it while it runs and after it has ended."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sampling import sample_eagerly, when
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotlap
from hotlap import Job
from hotlap.core.errors import MachineError
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.engine.objective import Totals
from hotlap.fitting.live import LAST_ENTRIES, MOST_LOSSES, FirstEpochWatch, LossCurve, Mark, ledger_lines
from hotlap.store.telemetry import LIVE, SAMPLES, read_live, read_samples


@pytest.fixture
def sampled(monkeypatch):
    sample_eagerly(monkeypatch)


def job(**changes):
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return Job(
        **{"model": model, "data": (x, y), "valid": (x, y), "loss": nn.CrossEntropyLoss(), "batch_size": 16,
           "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "epochs": 4, **changes}
    )  # fmt: skip


def test_a_training_lays_out_how_it_stands_while_it_runs_and_how_it_ended(sampled, tmp_path):
    out, seen = tmp_path / "run", []

    def looks(record):
        when(lambda: ((read_live(out) or {}).get("metrics") or {}).get("step") == record["step"])
        seen.append(read_live(out))

    hotlap.fit(job(), out=out, progress=False, on_evaluation=looks)
    assert [(state["step"], state["epoch"], state["ended"]) for state in seen[1:3]] == [(12, 2, False), (18, 3, False)]
    assert seen[1]["metrics"]["step"] == 12
    ended = read_live(out)
    assert ended["ended"] is True
    assert (ended["stopped"], ended["step"], ended["steps"], ended["epoch"]) == ("after all epochs", 24, 24, 4)
    assert ended["kind"] == "fit"
    assert ended["name"] == "Sequential"
    assert ended["plan"].startswith("gather")
    samples = read_samples(out)
    assert len(samples) >= 4
    assert samples[-1]["host"]["ram_bytes"] > 0
    assert samples[-1]["step"] <= 24


def test_its_files_are_listed_with_the_others(sampled, tmp_path):
    run = hotlap.fit(
        job(), out=tmp_path / "run", progress=False, on_evaluation=lambda _: when((tmp_path / "run" / LIVE).is_file)
    )
    assert {LIVE, SAMPLES} <= {artefact.name for artefact in run.artefacts()}


def test_a_training_that_fails_says_so_to_who_watches(sampled, tmp_path):
    out = tmp_path / "run"

    def fails(record):
        when((out / LIVE).is_file)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        hotlap.fit(job(), out=out, progress=False, on_evaluation=fails)
    live = read_live(out)
    assert (live["ended"], live["stopped"]) == (True, "by an error: RuntimeError")


def test_sampling_changes_no_bit_of_the_training(sampled, tmp_path, monkeypatch):
    sampled_run = hotlap.fit(job(), out=tmp_path / "one", progress=False)
    monkeypatch.setenv("HOTLAP_SAMPLES", "off")
    plain = hotlap.fit(job(), out=tmp_path / "other", progress=False)
    assert not (tmp_path / "other" / SAMPLES).exists()
    weights = zip(sampled_run.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_workers_that_are_forked_beside_the_sampler_bring_the_same_batches(sampled, tmp_path, monkeypatch):
    def trained(name):
        seen = job()
        loader = DataLoader(TensorDataset(*seen.data), batch_size=16, num_workers=2)
        given = replace(seen, data=loader, batch_size=None)
        return hotlap.fit(given, out=tmp_path / name, progress=False, plan="off")

    beside = trained("one")
    assert read_samples(tmp_path / "one")
    monkeypatch.setenv("HOTLAP_SAMPLES", "off")
    plain = trained("other")
    assert [record["train_loss"] for record in beside.history] == [record["train_loss"] for record in plain.history]


def test_a_word_for_the_variable_that_is_not_known_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_SAMPLES", "sometimes")
    with pytest.raises(MachineError, match="HOTLAP_SAMPLES"):
        hotlap.fit(job(), out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_the_curve_has_the_mean_between_looks_and_begins_anew_where_the_sum_did():
    curve = LossCurve()
    for step, summed, count, resets in (
        (2, 4.0, 2, 0),
        (4, 6.0, 4, 0),
        (6, 9.0, 3, 1),
        (8, 9.0, 3, 1),
        (9, 10.0, 4, 1),
    ):
        curve.add(step, summed, count, resets)
    assert curve.points() == [(2, 2.0), (4, 1.0), (6, 3.0), (9, 1.0)]
    assert (curve.first, curve.last) == (2.0, 1.0)


def test_the_curve_stays_short_and_keeps_its_shape():
    curve = LossCurve()
    for step in range(1, 5000):
        curve.add(step, float(step * step), float(step), 0)
    points = curve.points()
    assert MOST_LOSSES / 2 <= len(points) < MOST_LOSSES
    assert points == sorted(points)
    assert math.isclose(points[-1][1], 2 * points[-1][0], rel_tol=0.05)


def test_the_loss_of_a_look_is_read_at_the_next_one_when_the_device_has_come_to_it():
    totals, curve = Totals(torch.device("cpu")), LossCurve()
    totals._sum.add_(6.0)
    totals.count(3)
    curve.look(3, totals.peek(), totals.resets)
    assert curve.points() == []
    curve.look(4, totals.peek(), totals.resets)
    assert curve.points() == [(3, 2.0)]


def mark(at_s, steps, **more):
    return Mark(**{"at_s": at_s, "steps": steps, "samples": 0, "fed_s": 0.0, "aside_s": 0.0, "saving_s": 0.0, **more})


@pytest.fixture
def watch(monkeypatch):
    """A watch that began at 0, over a training of 4 epochs of 100 steps."""
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    rig = SimpleNamespace(steps=0, device=torch.device("cpu"))
    return FirstEpochWatch(SimpleNamespace(rig=rig, total=400))


def test_the_first_epoch_is_compared_with_what_its_early_steps_promised(watch):
    curve = LossCurve()
    assert watch.look(mark(2.0, 20), curve, Ledger()) == []
    assert watch.look(mark(4.0, 40), curve, Ledger()) == []
    watch.epoch_over(mark(25.0, 100, fed_s=9.0))
    lines = watch.look(mark(27.0, 101, aside_s=1.5), curve, Ledger())
    assert lines == [
        "first epoch: 25 s, expected 10 s; 1 min 20 s for the rest at this pace",
        "steps became slower: 2.5 times as long as the first ones; batches were waited for 9 s",
    ]
    assert watch.look(mark(29.0, 120), curve, Ledger()) == []


def test_where_the_users_own_pace_was_timed_that_is_what_was_expected(watch):
    ledger = Ledger()
    figures = {"step_s": 0.2}
    ledger.record(Entry(step=8, what="baseline", outcome="chosen", kind="baseline", plan=Plan(), figures=figures))
    for at_s in (2.0, 4.0):
        watch.look(mark(at_s, int(10 * at_s)), LossCurve(), ledger)
    watch.epoch_over(mark(9.0, 100))
    (line,) = watch.look(mark(11.0, 110), LossCurve(), ledger)
    assert line.startswith("first epoch: 9 s, expected 20 s")


def test_an_epoch_that_is_over_before_its_pace_is_known_is_not_judged(watch):
    watch.look(mark(2.0, 50), LossCurve(), Ledger())
    watch.epoch_over(mark(3.0, 100))
    assert watch.look(mark(4.0, 101), LossCurve(), Ledger()) == []


def test_of_the_ledger_the_last_entries_are_shown_and_no_laps():
    ledger = Ledger()
    for step in range(20):
        outcome = "measured" if step % 2 else "kept"
        ledger.record(Entry(step=step, what=f"move {step}", outcome=outcome, plan=Plan(), figures={"ratio": 1.5}))
    lines = ledger_lines(ledger)
    assert [line["what"] for line in lines] == [f"move {step}" for step in range(20 - 2 * LAST_ENTRIES, 20, 2)]
    assert lines[0]["ratio"] == 1.5
