"""What would make a training fit whose every plan has run out of memory, by counting an update without memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hotlap.core.errors import first_line
from hotlap.core.terminal import logger
from hotlap.core.units import show_bytes
from hotlap.data.batches import Batch, map_tensors
from hotlap.data.resident import PendingRows
from hotlap.data.sources import tensors_in
from hotlap.engine.objective import Objective
from hotlap.engine.rig import Rig
from hotlap.engine.step import Window
from hotlap.machine.memory_shortage import free_bytes
from hotlap.monitor.savings import CHANGES, Saving, Update, checkpointed, half_precision, model_facts, smaller_samples

log = logger(__name__)
META = torch.device("meta")
KEPT = {"Adagrad": 1, "RMSprop": 1, **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta"), 2)}
"""Numbers that torch's optimizers keep for each weight; one more with momentum."""


def what_would_fit(rig: Rig, window: Window) -> list[str]:
    """Lines on the memory that the smallest update needs, and the changes with which it would fit; empty if unknown.

    The training stands before the update, without gradients.
    """
    try:
        update, room = _counted(rig, window), _room(rig)
        if update.peak_bytes <= room:
            return []  # what it lacks is not in the count
        every = _changes(rig, window, update)
        found = [(one, line) for one, line in every if one.predicted_bytes is not None and one.predicted_bytes <= room]
    except Exception as error:  # such as a model that reads its numbers
        log.info("what would fit cannot be counted: %s", first_line(error))
        return []
    width = max((len(line) for _, line in found), default=0)
    end = "with one of these changes it would fit:" if found else "no single change makes it fit: use a smaller model"
    return [
        f"at least {show_bytes(update.peak_bytes)} are needed, {show_bytes(room)} can be had; {end}",
        *(
            f"{line:<{width}}  {show_bytes(one.predicted_bytes or 0)}, {one.what}{one.changes and f' ({one.changes})'}"
            for one, line in found
        ),
    ]


def _room(rig: Rig) -> int:
    """What an update may take in all: what is free, and what the training holds between two of them."""
    return free_bytes(rig.device) + sum(one.nbytes for one in (*_weights(rig).values(), *_states(rig)))


def _changes(rig: Rig, window: Window, update: Update) -> Iterator[tuple[Saving, str]]:
    """What may be changed beside pieces and blocks, which were tried, and how to type it."""
    facts = model_facts(rig.model, _first(window), rig.device)
    if rig.plan.numerics.precision == "fp32":
        yield half_precision(update, facts), f'fit(job, plan={{"precision": "{facts.precision}"}})'
    plain = update.peak_bytes - update.kinds["optimizer"]
    if plain < update.peak_bytes:
        one = Saving(what="an optimizer without state", predicted_bytes=plain, changes=CHANGES)
        yield one, "optimizer=lambda p: torch.optim.SGD(p, lr=…)"
    for one in smaller_samples(update, facts):
        yield one, "data with smaller samples"


def _counted(rig: Rig, window: Window) -> Update:
    """An update with the memory of the plan in force: the pieces of this window, and checkpointed blocks."""
    weights = _weights(rig)
    trained = sum(weight.nbytes for weight in weights.values() if weight.requires_grad)
    states = sum(one.nbytes for one in _states(rig))
    kind, groups = type(rig.optimizer).__name__, rig.optimizer.param_groups
    values = KEPT.get(kind, 0) + any(group.get("momentum") for group in groups)
    batch, samples = _first(window), max(window.sizes)
    layers, outputs = _activations(rig, batch, samples)
    kinds = {
        "parameters": sum(weight.nbytes for weight in weights.values()),
        "gradients": trained,
        "optimizer": max(states, values * trained),
        "activations": sum(layers.values()),
        "batch": sum(one.nbytes for one in tensors_in(batch)),
    }
    update = Update(
        samples=samples,
        effective_batch=sum(window.sizes),
        peak_bytes=sum(kinds.values()),
        step_s=0.0,
        kinds=kinds,
        layers=layers,
        outputs=outputs,
    )
    if not rig.plan.memory.checkpoint:
        return update
    saved = update.peak_bytes - (checkpointed(update, model_facts(rig.model, batch, rig.device)).predicted_bytes or 0)
    kinds["activations"] -= saved
    return replace(update, peak_bytes=update.peak_bytes - saved)


def _activations(rig: Rig, batch: Batch, samples: int) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes that a forward pass keeps for the backward pass, and those of outputs, both by module."""
    whole = _Whole(rig.objective, samples)
    names = {id(part): name for name, part in rig.model.named_modules()}
    weights = {name: one.detach().to(META).requires_grad_(one.requires_grad) for name, one in _weights(rig).items()}
    batch = map_tensors(batch, partial(Tensor.to, device=META))
    known = {_storage_of(one): one for one in (*weights.values(), *tensors_in(batch))}
    layers: dict[str, int] = {}
    outputs: dict[str, int] = {}
    inside: list[str] = []

    def enters(module: nn.Module, inputs: Any) -> None:
        inside.append(names.get(id(module), ""))

    def leaves(module: nn.Module, inputs: Any, output: Any) -> None:
        name = inside.pop()
        outputs[name] = sum(one.nbytes for one in tensors_in(output)) if isinstance(output, (Tensor, tuple)) else 0

    def keep(tensor: Tensor) -> Tensor:
        if _storage_of(tensor) not in known:
            known[_storage_of(tensor)] = tensor  # keeps it alive, so that no other gets its place
            name = next((name for name in reversed(inside) if name), "")
            layers[name] = layers.get(name, 0) + tensor.untyped_storage().nbytes()
        return tensor

    remembered = rig.python_state()
    with ExitStack() as hooks:
        hooks.callback(remembered.restore)
        hooks.callback(register_module_forward_pre_hook(enters).remove)
        hooks.callback(register_module_forward_hook(leaves, always_call=True).remove)
        hooks.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        functional_call(whole, weights, (batch,))
    return layers, outputs


class _Whole(nn.Module):
    """Model and loss as one module, whose weights can be exchanged."""

    def __init__(self, objective: Objective, samples: int) -> None:
        super().__init__()
        self.trained = nn.ModuleList(objective.modules)
        self._of = (objective, samples)

    def forward(self, batch: Batch) -> Any:
        """The loss of a piece."""
        objective, samples = self._of
        return objective.piece(objective.ready(batch, training=True), samples)


def _first(window: Window) -> Batch:
    piece = max(zip(window.sizes, window.pieces, strict=True), key=lambda one: one[0])[1]
    return piece.gathered() if isinstance(piece, PendingRows) else piece


def _weights(rig: Rig) -> dict[str, Tensor]:
    trained = nn.ModuleList(rig.objective.modules)
    found = (*trained.named_parameters("trained"), *trained.named_buffers("trained"))
    return dict(found)


def _states(rig: Rig) -> Sequence[Tensor]:
    return [value for state in rig.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
