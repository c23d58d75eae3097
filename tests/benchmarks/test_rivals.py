"""The fast-path benchmark compares trainings that are the same, counts whole steps, and survives a failing column."""

from __future__ import annotations

import itertools
import json
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from benchmarks.work import WORKS, Data, Lstm, Normalise, Transformer, Work, images, rows, windows
from torch import nn

import hotlap
from benchmarks import fast_path, laps, quality, rivals, trainings
from hotlap.data.order import mix
from hotlap.engine import compiling

CPU = torch.device("cpu")


def small_model():
    # No bias before the batch norm: its gradient is rounding alone, which Adam makes as large as any other.
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def small_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 6, generator=generator)
    y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
    return Data(x[:50], y[:50], x[50:], y[50:])


# 50 samples make 6 whole batches of 8 an epoch, so that replays of 4 steps do not end with it.
WORK = Work(
    name="MLP, small",
    model=small_model,
    data=small_data,
    batch=8,
    lr=1e-2,
    precision="tf32",
    replay_steps=4,
    small=True,
)


def plain_loop(work, model, data, steps, normalise=None):
    """What all of them are: whole shuffled batches, forward, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr)
    losses = []
    for epoch in range(-(-steps // (len(data.x) // work.batch))):
        generator = torch.Generator().manual_seed(mix(0, epoch))
        for chosen in torch.randperm(len(data.x), generator=generator).split(work.batch):
            if len(chosen) < work.batch or len(losses) == steps:
                break
            x = data.x[chosen] if normalise is None else normalise(data.x[chosen])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), data.y[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def weights(model):
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


def after_plain_loop(work, data, steps, **settings):
    """Weights and losses of the plain loop, from the seed that rivals begin with too."""
    model = work.build()
    return plain_loop(work, model, data, steps, **settings), weights(model)


@pytest.mark.parametrize("rival", [rivals.guide_before, rivals.plain_loader])
def test_loader_rivals_train_the_same_numbers_as_a_plain_loop(rival):
    data = WORK.data()
    _, wanted = after_plain_loop(WORK, data, 14)
    model = WORK.build()
    steps = rival(WORK, model, data, CPU)
    assert [next(steps) for _ in range(14)] == [WORK.batch] * 14
    torch.testing.assert_close(weights(model), wanted, rtol=1e-5, atol=1e-6)


def test_what_the_rival_by_hand_records_trains_the_same_numbers_over_the_ends_of_epochs():
    data = WORK.data()
    losses, wanted = after_plain_loop(WORK, data, 16)
    model = WORK.build()
    hand = rivals.ByHand(WORK, model, data, CPU)
    for chosen in itertools.islice(hand.order(), 4):
        hand.indices.copy_(chosen)
        hand.updates()
    assert float(hand.running) == pytest.approx(sum(losses), rel=1e-5)
    torch.testing.assert_close(weights(model), wanted, rtol=1e-5, atol=1e-6)


def test_by_hand_counts_the_samples_of_all_its_steps():
    steps = rivals.by_hand(WORK, WORK.build(), WORK.data(), CPU)
    assert [next(steps) for _ in range(3)] == [4 * WORK.batch] * 3


def test_images_by_hand_are_gathered_and_normalised_as_those_of_a_loader():
    def model():
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 8 * 8, 10))

    work = replace(WORK, model=model, data=lambda: images(40, 8), images=True, replay_steps=2)
    data = work.data()
    assert data.x.dtype == torch.uint8
    normalise = Normalise(CPU).images
    _, wanted = after_plain_loop(work, data, 6, normalise=normalise)
    by_hand, by_loader = work.build(), work.build()
    for _ in itertools.islice(rivals.by_hand(work, by_hand, data, CPU), 3):
        pass
    for _ in itertools.islice(rivals.guide_before(work, by_loader, data, CPU), 6):
        pass
    torch.testing.assert_close(weights(by_hand), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(by_loader), wanted, rtol=1e-4, atol=1e-5)


def test_normalised_pixels_have_the_stated_mean_and_spread():
    normalise = Normalise(CPU)
    x = torch.tensor([124, 116, 104], dtype=torch.uint8).view(1, 3, 1, 1)
    assert normalise.images(x).abs().max() < 0.01
    step = normalise.images(x + 57) - normalise.images(x)
    assert step.flatten() == pytest.approx([57 / 58.4, 57 / 57.1, 57 / 57.4], rel=1e-4)


def test_rivals_see_the_batches_that_hotlap_sees():
    samples, batch = 50, 8
    seen = []

    def loss(model, given):
        seen.extend(given[1].tolist())
        return model(given[0]).mean()

    model = nn.Linear(1, 1)
    rig = hotlap.Rig(model, torch.optim.SGD(model.parameters()), loss, device="cpu")
    for window in rig.feed(
        (torch.zeros(samples, 1), torch.arange(samples)), batch_size=batch, epochs=2, drop_last=True
    ):
        rig.step(window)
    assert seen == list(itertools.islice(rivals.EndlessOrder(samples, batch), 96))
    hand = rivals.ByHand(replace(WORK, batch=batch), WORK.build(), WORK.data(), CPU)
    assert seen == torch.cat(list(itertools.islice(hand.order(), 3))).tolist()


def test_the_engine_tells_the_samples_of_every_step():
    plan = trainings.fast_plan(WORK, CPU)
    steps = trainings.engine(WORK, WORK.build(), CPU, plan)
    assert sum(next(steps) for _ in range(7)) == 7 * WORK.batch
    steps.close()


def test_a_gpu_work_has_the_plan_that_suits_it():
    plans = {work.name: trainings.fast_plan(work, torch.device("cuda")) for work in WORKS}
    assert all(plan.feed.kind == "resident" and plan.execution.mode == "captured" for plan in plans.values())
    mlp, resnet = plans["MLP, batch 256"], plans["ResNet-18, batch 32"]
    assert (mlp.numerics.precision, mlp.execution.replay_steps) == ("tf32", 32)
    assert (resnet.numerics.layout, resnet.execution.autotune) == ("channels_last", True)


@pytest.mark.parametrize(("make", "data"), [(Lstm, windows), (Transformer, windows)])
def test_models_without_dropout_draw_nothing(make, data):
    x = data(8).x
    model = quality.without_dropout(make()).train()
    assert quality.has_dropout(make())
    assert torch.equal(model(x), model(x))


def test_quality_compares_trainings_that_learn():
    found = quality.quality(WORK, CPU, 60)
    assert found["fp32"]["steps"] == found["fast"]["steps"] == 60
    assert found["fast"]["last"] == pytest.approx(found["fp32"]["last"], rel=0.05)
    assert found["fp32, other masks"] != found["fp32"]
    assert found["fp32"]["held_out"] < quality.held_out(WORK, WORK.build(), CPU)


def test_gradients_of_lower_precision_point_the_same_way():
    given = WORK.build().state_dict()
    bf16, fp32 = (quality.gradient(WORK, given, precision, CPU) for precision in ("bf16", "fp32"))
    assert not torch.equal(bf16, fp32)
    assert F.cosine_similarity(bf16, fp32, dim=0) > 0.99
    assert torch.equal(fp32, quality.gradient(WORK, given, "fp32", CPU))


def test_a_lap_has_whole_steps_and_all_their_samples():
    some = laps.Laps(itertools.repeat(24), CPU, lap_s=0.0, warm_s=0.0, rounds=3)
    assert some.lap().samples == 3 * 24


def test_laps_of_both_sides_come_in_turn():
    calls = []

    class Fixed:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, seconds

        def lap(self):
            calls.append(self.name)
            return laps.Lap(100, self.seconds)

    theirs, ours, ratio = laps.in_turn(Fixed("a", 2.0), Fixed("b", 1.0), 4)
    assert "".join(calls) == "abbaabba"
    assert (len(theirs), len(ours), ratio.value, ratio.low, ratio.high) == (4, 4, 2.0, 2.0, 2.0)


SHORT = ["--device", "cpu", "--seconds", "0.05", "--warm-seconds", "0", "--laps", "1", "--pairs", "2"]


def test_a_failing_column_is_told_and_the_others_go_on(monkeypatch, capsys, tmp_path):
    def broken(*_):
        raise ValueError("no luck\nat all")

    monkeypatch.setattr(rivals, "by_hand", broken)
    file = tmp_path / "found.json"
    options = [*SHORT, "--columns", "loader,by_hand,gather", "--json", str(file)]
    assert fast_path.main(options, [WORK]) == 1
    told = capsys.readouterr().out
    assert "failed: MLP, small, by_hand: ValueError: no luck\n" in told
    found = json.loads(file.read_text())["works"]["MLP, small"]
    assert len(found["columns"]["gather"]["laps"]) == 2
    assert found["samples_per_s"].keys() == {"loader", "gather"}
    assert found["ratios"]["gather/loader"]["pairs"] == 2


def test_a_rival_that_fails_in_a_contest_does_not_take_hotlap_with_it(monkeypatch, capsys):
    def broken(*_):
        raise ValueError("no luck")
        yield

    monkeypatch.setattr(rivals, "plain_loader", broken)
    assert fast_path.main([*SHORT, "--columns", "loader,gather"], [WORK]) == 1
    told = capsys.readouterr()
    assert "failed: MLP, small, loader: ValueError: no luck\n" in told.out
    assert "gather: " not in told.out
    assert "gather/loader" not in told.out


def test_without_lightning_its_column_says_so_and_nothing_fails(monkeypatch, capsys):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(rivals.importlib, "import_module", absent)
    assert fast_path.main([*SHORT, "--columns", "lightning,by_hand"], [WORK]) == 0
    assert "MLP, small, lightning: not installed" in capsys.readouterr().out


def test_a_work_that_is_not_there_is_one_line_with_those_that_are(capsys):
    assert fast_path.main(["--device", "cpu", "--only", "nobody"], [WORK]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == f"no work here is called nobody; there are {WORK.name}\n"


def test_lightning_is_timed_in_whole_rounds_of_its_workers(monkeypatch):
    class Trainer:
        """As much of Lightning's as the clock sees."""

        def __init__(self, callbacks, **_):
            self.should_stop, self._clock = False, callbacks[0]

        def fit(self, module, loader):
            optimizer = module.configure_optimizers()
            for number, batch in enumerate(loader):
                optimizer.zero_grad()
                module.training_step(batch, number).backward()
                optimizer.step()
                self._clock.on_train_batch_end(self, module, None, batch, number)
                if self.should_stop:
                    return

    fake = types.SimpleNamespace(LightningModule=nn.Module, Callback=object, Trainer=Trainer)
    monkeypatch.setattr(rivals, "_lightning", lambda: fake)
    monkeypatch.setattr(rivals, "loader_of", lambda work, data, *_: itertools.repeat([data.x[:8], data.y[:8]]))
    found = rivals.lightning(WORK, WORK.build(), WORK.data(), CPU, laps=3, lap_s=0.0, warm_s=0.0)
    assert [samples for samples, _ in found] == [8 * WORK.batch] * 3


def test_what_compiling_took_is_told_apart_from_laps(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    works = [replace(WORK, compiles="model"), replace(WORK, name="another")]
    assert fast_path.main([*SHORT, "--columns", "compiled"], works) == 0
    told = capsys.readouterr().out
    assert "MLP, small, compiled: compiling took " in told
    assert "another, compiled" not in told


def test_what_is_not_compiled_after_all_is_told(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "BACKEND", lambda graph, inputs: 1 / 0)
    assert fast_path.main([*SHORT, "--columns", "compiled"], [replace(WORK, compiles="model")]) == 0
    assert "not as planned: " in capsys.readouterr().out


def test_targets_of_every_work_depend_on_its_inputs():
    for data in (windows(300), rows(300)):
        x = torch.cat([data.x, data.held_x]).flatten(1)
        y = torch.cat([data.y, data.held_y])
        means = torch.stack([x[y == k].mean(0) for k in range(3)])
        assert ((x @ means.T).argmax(1) == y).float().mean() > 0.6
    assert len(images(64, 8).y.unique()) > 3
