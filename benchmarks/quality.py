"""What a fast plan does to the numbers: the loss of a training, and the gradient of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotlap
from benchmarks import rivals
from benchmarks.trainings import fast_plan, make_rig
from benchmarks.work import Work, channels_last

LAST = 20
"""Steps at the end of a quality run whose mean loss is told."""


def trained(work: Work, plan: hotlap.Plan, device: torch.device, *, steps: int, masks: int) -> tuple[Any, nn.Module]:
    """The work after so many steps from its first weights: mean loss of the last 20, and of samples held out.

    `masks` seeds what dropout leaves out; the order of samples is always the same.
    """
    model = work.build()
    given, settings = work.fed()
    torch.manual_seed(masks)
    rig = make_rig(work, model, plan, device)
    for some in (max(0, steps - LAST), min(LAST, steps)):
        rig.totals.reset()
        for window in rig.feed(given, batch_size=work.batch, steps=some, drop_last=True, **settings) if some else ():
            rig.step(window)
    figures = {"steps": rig.steps, "last": rig.totals.mean(), "held_out": held_out(work, rig.model, device)}
    rig.close()
    return figures, rig.model


def held_out(work: Work, model: nn.Module, device: torch.device) -> float:
    """The loss over the samples kept apart, in evaluation mode and fp32 whatever the plan was."""
    model.eval()
    loss, samples = 0.0, 0
    with torch.no_grad(), rivals.switches(tf32=False, cudnn_tf32=False, benchmark=False):
        for batch, count in work.held_batches(device):
            loss += count * float(work.judge(model, batch))
            samples += count
    model.train()
    return loss / samples


def gradient(work: Work, weights: dict[str, Tensor], precision: str, device: torch.device) -> Tensor:
    """The gradient of one batch in a precision, all parameters in a row; no dropout, so that nothing is drawn."""
    model = work.build()
    model.load_state_dict(weights)
    without_dropout(model.to(device)).train()
    batch = work.first_batch(device)
    if work.images and precision != "fp32":
        model, batch = channels_last(model), (batch[0].to(memory_format=torch.channels_last), batch[1])
    with rivals.switches(tf32=precision == "tf32", cudnn_tf32=precision != "fp32", benchmark=False):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = work.judge(model, batch)
        torch.autograd.backward(loss)
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout at 0."""
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return model


def has_dropout(model: nn.Module) -> bool:
    """Whether training draws masks."""
    return any(getattr(layer, "dropout", 0.0) or isinstance(layer, nn.Dropout) for layer in model.modules())


def quality(work: Work, device: torch.device, steps: int) -> dict[str, Any]:
    """What the fast plan does to the numbers: losses after `steps`, and the gradient's cosine."""
    plain = hotlap.Plan().but(kind="gather")
    fast = fast_plan(work, device)
    found: dict[str, Any] = {"steps": steps}
    found["fp32"], model = trained(work, plain, device, steps=steps, masks=0)
    first = {name: value.clone() for name, value in work.build().state_dict().items()}
    last = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    del model
    found["fast"], _ = trained(work, fast, device, steps=steps, masks=0)
    if has_dropout(work.build()):
        # How far chance alone takes it.
        found["fp32, other masks"], _ = trained(work, plain, device, steps=steps, masks=1)
    precision = fast.numerics.precision
    if precision != "fp32":
        found["cosine"] = {
            when: float(
                F.cosine_similarity(
                    gradient(work, weights, precision, device), gradient(work, weights, "fp32", device), dim=0
                )
            )
            for when, weights in (("first weights", first), (f"after {steps} steps", last))
        }
    return found


def quality_lines(name: str, found: dict[str, Any]) -> Iterator[str]:
    """The quality of a work, for people."""
    ways = [way for way in ("fp32", "fast", "fp32, other masks") if way in found]
    steps, indent = found["steps"], " " * len(name)
    last, held = (", ".join(f"{way} {found[way][key]:.4f}" for way in ways) for key in ("last", "held_out"))
    yield f"{name}: loss of steps {max(0, steps - LAST) + 1}–{steps}: {last}"
    yield f"{indent}  loss held out: {held}"
    if "cosine" in found:
        told = ", ".join(f"{value:.6f} ({when})" for when, value in found["cosine"].items())
        yield f"{indent}  cosine of the gradient, fast against fp32: {told}"
