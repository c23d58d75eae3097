"""The trainings that are timed: a work under hotlap's plan for it, and its rivals."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotlap
from benchmarks import rivals, text_rivals
from benchmarks.rivals import Steps
from benchmarks.texts import TextWork
from benchmarks.work import Normalise, Work
from hotlap.core.tricks import ATTENTION_KERNEL, ATTENTION_MASKS, CAST_TOGETHER, OVERLAPPED_GRADIENTS

LEFT_OUT = {
    "torch_attention": (ATTENTION_KERNEL, ATTENTION_MASKS),
    "not_overlapped": (OVERLAPPED_GRADIENTS, CAST_TOGETHER),
}
"""Names of what the plans of some columns leave out."""


def fast_plan(work: Work, device: torch.device) -> hotlap.Plan:
    """The plan that suits a work; on the CPU whole batches out of memory and the fused optimizer."""
    if device.type != "cuda":
        return hotlap.Plan().but(kind="gather", optimizer="fused")
    return hotlap.Plan().but(
        kind="resident",
        precision=work.precision,
        optimizer="fused",
        mode="captured",
        replay_steps=work.plan_steps or work.replay_steps,
        layout=work.layout,
        autotune=work.images,
    )


def prepare_of(work: Work, plan: hotlap.Plan, device: torch.device) -> dict[str, Any]:
    """The `prepare` of a Rig or Job, where the work has one; in the numbers that the plan computes in."""
    if not work.images:
        return {}
    return {"prepare": Normalise(device, torch.bfloat16 if plan.numerics.precision == "bf16" else torch.float32)}


def make_rig(work: Work, model: nn.Module, plan: hotlap.Plan, device: torch.device) -> hotlap.Rig:
    """A work under a plan."""
    return hotlap.Rig(
        model,
        work.optimizer(model),
        work.loss,
        plan=plan,
        device=str(device),
        **prepare_of(work, plan, device),
    )


def engine(
    work: Work,
    model: nn.Module,
    device: torch.device,
    plan: hotlap.Plan,
    *,
    column: str = "hotlap",
    made: Callable[[hotlap.Rig], None] = lambda rig: None,
) -> Steps:
    """The work trained by hotlap; who wants to ask its rig anything is given it when it is `made`."""
    rig = make_rig(work, model, plan.but(without=LEFT_OUT.get(column, ())), device)
    made(rig)
    given, settings = work.fed(column)
    try:
        for window in rig.feed(given, batch_size=work.batch, steps=10**9, drop_last=True, **settings):
            before = rig.samples
            rig.step(window)
            yield rig.samples - before
    finally:
        rig.close()


def steps_of(
    column: str,
    work: Work,
    device: torch.device,
    made: Callable[[hotlap.Rig], None] = lambda rig: None,
    *,
    model: nn.Module | None = None,
) -> Steps:
    """A column's training, from the work's first weights, or from those of a model that somebody wants to have."""
    model = model if model is not None else work.build()
    if isinstance(work, TextWork):
        if column in ("guide_before", "guide_after", "dynamic", "by_hand"):
            steps: Steps = getattr(text_rivals, column)(work, model, work.data(), device)
            return steps
    else:
        theirs: dict[str, Callable[..., Steps]] = {
            "guide_before": rivals.guide_before,
            "guide_after": rivals.guide_after,
            "loader": rivals.plain_loader,
            "by_hand": rivals.by_hand,
        }
        if column == "by_hand" and device.type == "cpu":
            work = replace(work, replay_steps=1)  # with nothing to replay, a batch is best gathered when it is needed
        if column in theirs:
            return theirs[column](work, model, work.data(), device)
    plan = fast_plan(work, device)
    if column in ("gather", "resident"):
        plan = plan.but(kind=column)
    elif column == "compiled":
        plan = plan.but(compile=work.compiles)
    return engine(work, model, device, plan, column=column, made=made)


def told_by(rigs: Sequence[hotlap.Rig]) -> str:
    """What a column's rig has to say beside its pace: what compiling took, kernels, what is not as planned."""
    told = []
    for rig in rigs:
        compiled_s = [entry.cost_s for entry in rig.ledger if entry.what == "compile"]
        told += [f"compiling took {sum(compiled_s):.1f} s, which no lap has"] if compiled_s else []
        kernels = [entry.why for entry in rig.ledger if entry.what == "attention"]
        told += [f"attention: {kernels[-1]}"] if kernels else []
        told += [f"not as planned: {rig.given_up}"] if rig.given_up else []
    return "; ".join(told)


def whole_fit(work: Work, device: torch.device, steps: int) -> dict[str, float]:
    """One call of `fit`: samples a second after its first epoch, which captures, and from call to return."""
    model, plan = work.build(), fast_plan(work, device)
    given, settings = work.fed()
    job = hotlap.Job(
        model=model,
        data=given,
        loss=work.loss,
        optimizer=work.optimizer(model),
        batch_size=work.batch,
        steps=steps,
        drop_last=True,
        device=str(device),
        **prepare_of(work, plan, device),
        **settings,
    )
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        run = hotlap.fit(job, plan=plan, out=Path(folder) / "run", save_every=None, progress=False)
        whole_s = time.perf_counter() - begun
    return {
        "steps": run.steps,
        "samples": run.samples,
        "train_s": run.train_s,
        "whole_s": whole_s,
        "steady": _steady(run),
        "whole": run.samples / whole_s,
    }


def _steady(run: hotlap.Run) -> float:
    """Samples a second from the end of the first epoch on, by its own record; in all, where that is one alone."""
    first, last = run.history[0], run.history[-1]
    if first["step"] == last["step"]:
        return run.samples / run.train_s
    rate: float = (last["samples"] - first["samples"]) / (last["elapsed_s"] - first["elapsed_s"])
    return rate
