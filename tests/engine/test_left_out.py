"""Tricks of captured steps: each is set up by default, and only the one whose name a plan leaves out is not."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from plain import class_data
from torch import nn

from hotlap import Job, Plan, Rig, fit
from hotlap.core.errors import PlanError
from hotlap.core.tricks import (
    ATTENTION_KERNEL,
    ATTENTION_MASKS,
    CAPTURED_UPDATE,
    CAST_TOGETHER,
    COUNTED_NORMS,
    FIT_TRICKS,
    GATHERED_TOGETHER,
    LOSS_WITHOUT_WAITING,
    OVERLAPPED_GRADIENTS,
    REPLAYED_EVALUATION,
    REWIRED_LAYERS,
    RUN_TRICKS,
    STEP_TRICKS,
)
from hotlap.engine import evaluate, step_cache
from hotlap.engine.capture import captured_step
from hotlap.engine.evaluate import CapturedOutputs
from hotlap.engine.precision import Switches

CUDA = torch.device("cuda")
CAPTURED = Plan().but(mode="captured", precision="bf16")


class Model(nn.Module):
    """An encoder of torch, which looks into its mask, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1, enable_nested_tensor=False
        )
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x).mean(1)))


class Shared(nullcontext):
    """What weights share, as it was asked for."""

    def __init__(self, device, dtype, *, overlaps, casts_together):
        super().__init__()
        self.overlaps, self.casts_together = overlaps, casts_together


@pytest.fixture
def found(monkeypatch):
    """What a captured plan sets up, where recordings are pretended: the names of the tricks."""
    graphs = []
    monkeypatch.setattr(Rig, "supports", lambda self, plan: None)
    monkeypatch.setattr(step_cache, "Recorder", lambda device: None)
    monkeypatch.setattr(step_cache, "why_not_captured", lambda optimizer: None)
    monkeypatch.setattr(captured_step, "StepGraph", lambda *given, **named: graphs.append(named))
    monkeypatch.setattr(step_cache, "Overlap", Shared)
    monkeypatch.setattr(evaluate, "Recorder", lambda device: None)

    def names(*without):
        plan = CAPTURED.but(without=without)
        rig = Rig(Model(), lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), device="cpu")
        seen = []

        def gradients(*_):
            seen.append((F.cross_entropy, "forward" in vars(rig.model.encoder)))
            raise StopIteration

        monkeypatch.setattr(step_cache.EagerStep, "gradients", gradients)
        rig.use(plan)
        step = rig._step
        step._recorded(None, None)
        with pytest.raises(StopIteration):
            step._eager.gradients([], [], False)
        ((loss, is_rewired),) = seen
        shared = step._eager.overlap
        with rig.attention(plan):
            chooses = F.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention
        evaluating = rig._evaluator._outputs(plan)
        return {
            name
            for name, is_there in {
                OVERLAPPED_GRADIENTS: shared is not None and shared.overlaps,
                CAST_TOGETHER: shared is not None and shared.casts_together,
                ATTENTION_KERNEL: chooses,
                ATTENTION_MASKS: Switches(plan.numerics, plan.execution, CUDA)._masks is not None,
                REWIRED_LAYERS: is_rewired,
                LOSS_WITHOUT_WAITING: loss is not F.cross_entropy,
                COUNTED_NORMS: bool(step._norms._layers()),
                GATHERED_TOGETHER: graphs[-1]["gathers_together"],
                CAPTURED_UPDATE: graphs[-1]["whole"],
                REPLAYED_EVALUATION: isinstance(evaluating, CapturedOutputs),
            }.items()
            if is_there
        }

    return names


def test_all_of_them_are_set_up_by_default(found):
    assert found() == FIT_TRICKS


@pytest.mark.parametrize("trick", sorted(FIT_TRICKS))
def test_one_that_is_left_out_is_not_set_up_and_all_others_are(found, trick):
    assert found(trick) == FIT_TRICKS - {trick}


def test_all_of_them_can_be_left_out(found):
    assert found(*FIT_TRICKS) == set()


def job():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return Job(
        model=model, data=class_data(40), loss=nn.CrossEntropyLoss(), batch_size=8, epochs=2, device="cpu",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip


def test_fit_takes_names_of_steps_and_keeps_them_in_its_plan_and_ledger(tmp_path):
    left_out = ("cast-together", "counted-norms")
    run = fit(job(), plan={"without": [*left_out]}, out=tmp_path / "run", progress=False)
    assert run.plan.execution.without == left_out
    assert 'without = ["cast-together", "counted-norms"]' in (tmp_path / "run" / "plan.toml").read_text()
    assert list(run.ledger)[-1].plan.execution.without == left_out


@pytest.mark.parametrize("trick", sorted({*RUN_TRICKS} - FIT_TRICKS))
def test_fit_refuses_names_of_hotlap_run_with_the_reason(tmp_path, trick):
    with pytest.raises(PlanError, match=rf"execution.without=\['{trick}'\] is for scripts under `hotlap run` alone"):
        fit(job(), plan={"without": [trick, "cast-together"]}, out=tmp_path / "run", progress=False)


def test_every_name_stands_in_one_half_of_the_table():
    assert not {*RUN_TRICKS} & {*STEP_TRICKS}
    assert {*RUN_TRICKS} & FIT_TRICKS == {REPLAYED_EVALUATION}
