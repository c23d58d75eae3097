"""Trainings that take turns on one GPU: each comes to what it comes to alone, to the last bit."""

import functools

import pytest
import torch
from plain import parameters_of
from torch import nn

import hotlap
from hotlap import TrainingError, fit_many
from hotlap.core.plan import Plan
from hotlap.searching.at_once import Copies

CAPTURED = Plan().but(kind="resident", mode="captured", optimizer="fused")
PLANS = {"eager": Plan(), "captured": CAPTURED, "four a replay": CAPTURED.but(replay_steps=4)}
ROWS, WIDTH = 2048, 32


class Lstm(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, 2, dropout=dropout, batch_first=True), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.lstm(x.view(len(x), 4, 8))[0][:, -1])


def mlp():
    # Deep sums over many rows: matrix products that want cuBLAS's own memory.
    return nn.Sequential(
        nn.Linear(WIDTH, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
    )


def job(seed=0, make=mlp, **changes):
    torch.manual_seed(seed)
    model, draws = make(), torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, WIDTH, generator=draws)
    given = {
        "model": model,
        "data": (x, x.mean(1, keepdim=True).sin()),
        "valid": (x[:512], x[:512].mean(1, keepdim=True).sin()),
        "loss": nn.MSELoss(),
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3),
        "batch_size": 128,
        "epochs": 5,
        "seed": seed,
        "device": "cuda",
    }
    return hotlap.Job(**{**given, **changes})


def many(jobs, out, count, plan, **settings):
    return fit_many(jobs, out=out, at_once=count, plan=plan, progress=False, save_every=0, **settings)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_trainings_in_turns_come_to_what_each_comes_to_alone(tmp_path, plan):
    alone = many([job(seed) for seed in range(4)], tmp_path / "alone", 1, plan)
    turns = many([job(seed) for seed in range(4)], tmp_path / "turns", 3, plan)
    for one, other in zip(alone, turns, strict=True):
        assert torch.equal(parameters_of(one.model), parameters_of(other.model))
        assert [record["valid_loss"] for record in one.history] == [record["valid_loss"] for record in other.history]
    assert plan is PLANS["eager"] or not any("runs eagerly" in entry.why for run in turns for entry in run.ledger)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recurrent_trainings_come_to_what_each_comes_to_alone(tmp_path, dropout):
    make = functools.partial(Lstm, dropout)
    alone = many([job(seed, make) for seed in range(3)], tmp_path / "alone", 1, CAPTURED)
    turns = many([job(seed, make) for seed in range(3)], tmp_path / "turns", 3, CAPTURED)
    for one, other in zip(alone, turns, strict=True):
        assert torch.equal(parameters_of(one.model), parameters_of(other.model))


def test_an_error_in_one_training_ends_that_one_and_the_generator_of_the_caller_stays(tmp_path):
    def broken(model, batch):
        raise ValueError("no such class")

    jobs = [job(0), job(1, loss=broken), job(2), job(3)]
    before = torch.cuda.get_rng_state().clone()
    with pytest.raises(TrainingError, match="job 2 of 4 failed: ValueError: no such class"):
        many(jobs, tmp_path / "many", 2, CAPTURED)
    assert len(list((tmp_path / "many").glob("*/model.safetensors"))) == 3
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_memory_of_the_gpu_is_flat_from_training_to_training(tmp_path):
    taken = []

    def made():
        taken.append(torch.cuda.memory_reserved())
        return job(0, epochs=2)

    judged = many([made] * 12, tmp_path / "many", 3, CAPTURED)
    assert len(judged) == 12
    assert taken[11] <= 1.1 * taken[6], taken


def test_copies_in_laps_leave_the_job_as_it_was_and_give_their_memory_back():
    mine = job()
    torch.cuda.empty_cache()
    before, held = parameters_of(mine.model).clone(), torch.cuda.memory_allocated()
    copies = Copies(mine, CAPTURED, 3, 1)
    try:
        assert copies.lap(0.05) > 0
        assert copies.bytes_each() > 0
    finally:
        copies.close()
    assert torch.equal(parameters_of(mine.model), before)
    # cuBLAS keeps some memory for each stream.
    assert torch.cuda.memory_allocated() - held < 256 * 2**20
