"""Weights that become NaN under another plan: the training goes back, and on in fp32 under the user's own."""

import math
import time
from unittest.mock import ANY

import pytest
import torch
from plain import class_data, parameters_of
from torch import nn

import hotlap
from hotlap import Ledger, TrainingError
from hotlap.core.ledger import Entry
from hotlap.fitting import session


class Fragile(nn.Module):
    """Gives NaN in 16 bits from a number of training calls on, or always from then on."""

    def __init__(self, first, *, in_any=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.first, self.in_any, self.calls = nn.Linear(5, 3), first, in_any, 0

    def forward(self, x):
        out = self.layer(x)
        if not self.training:
            return out
        self.calls += 1
        breaks = self.calls > self.first and (self.in_any or out.dtype == torch.bfloat16)
        return out * math.nan if breaks else out


def as_floats(data):
    return data[0].float(), data[1]


PER_EPOCH = len(class_data()[1]) // 10


def trained(first, *, in_any=False, save_every=4, plan=None, **changes):
    given = {
        "model": Fragile(first, in_any=in_any),
        "data": as_floats(class_data()),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05),
        "batch_size": 10,
        "epochs": 4,
        "device": "cpu",
    }
    job = hotlap.Job(**{**given, **changes})
    return hotlap.fit(job, plan=plan or {"precision": "bf16"}, save_every=save_every, progress=False)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("first", [PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 1, 4 * PER_EPOCH - 1])
def test_it_goes_back_to_finite_weights_and_on_in_fp32(first, valid):
    changes = {"valid": as_floats(class_data(20, seed=3))} if valid else {}
    run = trained(first, **changes)
    assert run.stopped == "after all epochs"
    assert run.steps == 4 * PER_EPOCH
    assert [record["step"] for record in run.history] == [PER_EPOCH * number for number in (1, 2, 3, 4)]
    assert all(math.isfinite(record["train_loss"]) for record in run.history)
    assert bool(parameters_of(run.model).isfinite().all())
    assert run.plan.numerics.precision == "fp32"
    (told,) = [entry.why for entry in run.ledger if entry.what == "weights not finite"]
    assert "gone back to step" in told
    assert told in run.problems


def test_no_sample_of_the_steps_that_count_is_left_out():
    undisturbed = trained(10**9)
    run = trained(13)
    assert (run.steps, run.samples) == (undisturbed.steps, undisturbed.samples)


def test_weights_that_become_nan_in_fp32_too_end_it():
    with pytest.raises(TrainingError, match="the weights are not finite"):
        trained(13, in_any=True)


def test_without_a_checkpoint_it_goes_back_to_the_first_weights():
    run = trained(5, save_every=0)
    assert run.steps == 4 * PER_EPOCH
    assert run.plan.numerics.precision == "fp32"
    assert any("gone back to step 0, on" in problem for problem in run.problems)
    assert run.history == [{**record, "elapsed_s": ANY} for record in trained(10**9, plan="off").history]


def test_without_anything_to_go_back_to_it_ends(monkeypatch):
    monkeypatch.setattr(session, "KEPT_BYTES", 0)
    with pytest.raises(TrainingError, match="the weights are not finite"):
        trained(5, save_every=0)


class InPieces(nn.Module):
    """Gives NaN for fewer than ten samples, from a number of training calls on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x) * (math.nan if self.training and len(x) < 10 else 1.0)


def test_of_several_moves_only_the_newest_is_left():
    job = {"model": InPieces()}
    earlier = trained(0, plan="off", **job)
    held = earlier.plan.but(kind="resident")
    ledger = Ledger()
    for step, plan in ((0, earlier.plan), (4, held), (9, held.but(micro_batch=5))):
        ledger.record(Entry(step=step, what="a move", outcome="chosen", plan=plan))
    earlier.files.write_ledger(ledger)
    run = trained(0, plan=earlier.folder, **job)
    assert run.plan == held
    assert run.steps == 4 * PER_EPOCH
    assert any("micro_batch 5 → None" in problem for problem in run.problems)


def test_the_clock_of_a_run_that_went_back_counts_each_second_once():
    began = time.perf_counter()
    run = trained(4 * PER_EPOCH - 1)
    assert run.total_s <= time.perf_counter() - began


def test_under_the_users_own_plan_in_fp32_it_ends_at_once():
    with pytest.raises(TrainingError, match="the weights are not finite") as raised:
        trained(5, in_any=True, plan="off")
    assert "gone back" not in str(raised.value)
