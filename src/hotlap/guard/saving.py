"""Saving a training beside its steps: when, and how its whole state becomes files and comes back to the last bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.errors import StoreError
from hotlap.core.object_memory import Changes, Path
from hotlap.data.order import HostRandomness
from hotlap.engine.rig import Place, Rig
from hotlap.store.checkpoints import Checkpoints
from hotlap.store.disk import Piece
from hotlap.store.encoding import decode, encode, from_json, to_json
from hotlap.store.tensors import tensor_pieces, tensors_from, why_not_stored
from hotlap.store.weights import load_weights_into, unwrapped

Files = Mapping[str, Iterable[Piece]]

COST_SHARE = 0.02
"""At most this share of a run goes into saving, as far as hotlap chooses when."""
LEAST_S = 30.0
"""No more often than this, as far as hotlap chooses when: what a crash then loses is half a minute."""
FIRST_BYTES_S = 100e6
"""What the first save is thought to copy, hash and write in a second: a slow disk of a cloud. Most do better."""
FIRST_SYNCS_S = 0.1
"""What the first save is thought to wait for besides: a dozen syncs, on a disk that turns."""
CAUTION = 1.5
"""A save is allowed to take so many times what the ones before took, and the share still holds."""


class Saver:
    """Writes checkpoints of one training.

    `every` is a number of updates between two saves; None leaves it to what saving costs; 0 never saves.
    With None a save is made only where all saves, that one included, stay within 2 % of the time since the run
    began. Time and saves count from this process's beginning on: where each part of a resumed run keeps to its
    share, so does the whole, and nobody has to know how long the parts before took. `before_s` is what the run had
    taken when this was made, `size` about how many bytes a checkpoint has.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        every: int | None,
        complain: Callable[[str], None],
        *,
        before_s: float = 0.0,
        size: int = 0,
    ) -> None:
        self._checkpoints, self._every, self._complain = checkpoints, every, complain
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._began_s = time.perf_counter() - before_s
        self._first_cost_s = FIRST_SYNCS_S + size / FIRST_BYTES_S
        self._last_s: float | None = None
        self._last_cost_s = 0.0
        self._whole_cost_s = 0.0
        self._last_step: int | None = None
        self.saved = 0
        """Checkpoints that are whole on the disk."""
        self.spent_s = 0.0
        """Seconds that training stood still for saving."""
        self.copying_s = 0.0
        """Seconds of copying, while training stood still."""
        self.writing_s = 0.0
        """Seconds that the thread was writing, beside the training or while that waited."""

    @property
    def cost_s(self) -> float:
        """Seconds that all saves took so far. On few cores writing takes time from training, so all of it counts."""
        return self.copying_s + self.writing_s

    @property
    def expected_s(self) -> float:
        """Seconds that the next save may take: by its size at first, then by what those before took."""
        if not self.saved:
            return self._first_cost_s
        return CAUTION * max(self._last_cost_s, self._whole_cost_s / self.saved)

    def due(self, step: int) -> bool:
        """Whether it is time for a checkpoint before the next step."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        # A save that is under way is waited for by nobody: the next one comes when it is done.
        if self._last_s is not None and (time.perf_counter() - self._last_s < LEAST_S or self.busy):
            return False
        return self._is_within_share()

    def due_at_end(self, step: int) -> bool:
        """Whether a checkpoint is to be made after the last step; waits for one that is under way."""
        if self._every is not None:
            return self._every > 0
        begun = time.perf_counter()
        self.finish()
        self.spent_s += time.perf_counter() - begun
        return step != self._last_step and self._is_within_share()

    def _is_within_share(self) -> bool:
        return self.cost_s + self.expected_s <= COST_SHARE * (time.perf_counter() - self._began_s)

    @property
    def busy(self) -> bool:
        """Whether files are being written right now."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, export: Callable[[], Files], facts: dict[str, Any], *, wait: bool = False) -> None:
        """Copy the state now, write it beside the training. A failure is told and training goes on."""
        begun = time.perf_counter()
        self.finish()
        copying = time.perf_counter()
        try:
            files = export()
        except (OSError, MemoryError) as error:
            self.copying_s += time.perf_counter() - copying
            self._complain(f"step {step} is not saved: {error or type(error).__name__}")
        else:
            copied_s = time.perf_counter() - copying
            self.copying_s += copied_s
            self._thread = threading.Thread(
                target=self._write, args=(step, files, facts, copied_s), name="hotlap-save", daemon=True
            )
            self._thread.start()
        if wait:
            self.finish()
        self._last_s = time.perf_counter()
        self.spent_s += self._last_s - begun

    def finish(self) -> None:
        """Wait for the files of the last save; tell if they could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, StoreError):
                self._complain(str(failure))
                return
            # Whatever it was, it happened beside the training, which is sound.
            reason = getattr(failure, "strerror", None) or f"{type(failure).__name__}: {failure}"
            self._complain(f"a checkpoint could not be written: {reason}; training goes on, the last one is untouched")

    def _write(self, step: int, files: Files, facts: dict[str, Any], copied_s: float) -> None:
        begun = time.perf_counter()
        failure = None
        try:
            self._checkpoints.write(step, files, facts)
        except BaseException as error:
            # Without its trace, which would keep the copied state alive until the next save.
            failure = error.with_traceback(None)
        wrote_s = time.perf_counter() - begun
        self.writing_s += wrote_s
        self._failure = failure
        # One that failed may have ended early: what it took says nothing of the next.
        if failure is None:
            self._last_cost_s = copied_s + wrote_s
            self._whole_cost_s += self._last_cost_s
            self._last_step = step
            self.saved += 1


MODEL, TENSORS, VALUES = "model.safetensors", "training.safetensors", "training.json"
_BY_PLAN = ("fused", "foreach", "capturable")
"""Settings of an optimizer that the plan in force decides, which may be another one than the checkpoint's."""


def export_state(
    rig: Rig, loop: dict[str, Any], remembered: Sequence[tuple[Path, Any]] = ()
) -> dict[str, Iterable[Piece]]:
    """Files that hold the training: copied to host memory now, turned into bytes when they are written.

    `loop` is what the loop around the rig needs to go on; `remembered` is what `Changes` has found. Raises StoreError
    for state that is neither numbers nor tensors.
    """
    tensors: dict[str, Tensor] = {}
    rig.settle()
    weights, model = _module_state(unwrapped(rig.model))
    state = {
        "device": rig.device.type,
        "model": model,
        "loss": _module_state(rig.loss) if isinstance(rig.loss, nn.Module) else None,
        "optimizer": _optimizer_state(rig.optimizer),
        "schedule": rig.schedule.scheduler.state_dict() if rig.schedule.scheduler is not None else None,
        "randomness": _randomness(rig.device),
        "totals": rig.totals.saved(),
        "guards": rig.guards.saved(),
        "place": tuple(rig.place),
        "counters": (rig.steps, rig.updates, rig.samples),
        "remembered": [[list(path), form] for path, form in remembered],
        "loop": loop,
    }
    values = to_json(encode(state, tensors, "training"))
    return {
        MODEL: tensor_pieces(_copies(weights), {"format": "pt"}),
        TENSORS: tensor_pieces(tensors),
        VALUES: [values],
    }


def import_state(rig: Rig, files: dict[str, bytes], memory: Changes | None = None) -> dict[str, Any]:
    """Put a stored training into the rig; what the loop had stored. Raises StoreError where they do not fit.

    `memory` takes what modules, the optimizer and the user's functions remembered; an earlier hotlap stored none.
    """
    missing = [name for name in (MODEL, TENSORS, VALUES) if name not in files]
    if missing:
        raise StoreError(f"the checkpoint has no {missing[0]}")
    rig.settle()  # what the device still knows is of the training that was
    tensors = tensors_from(files[TENSORS], TENSORS)
    state = decode(from_json(files[VALUES], VALUES), tensors, rig.device)
    try:
        _import_module(unwrapped(rig.model), tensors_from(files[MODEL], MODEL), state["model"])
        if isinstance(rig.loss, nn.Module):
            _import_module(rig.loss, *state["loss"])
        _import_optimizer(rig.optimizer, state["optimizer"], moved=state["device"] != rig.device.type)
        if rig.schedule.scheduler is not None:
            rig.schedule.scheduler.load_state_dict(state["schedule"])
        # After the schedule: loading one may write its own idea of the learning rate.
        _import_groups(rig.optimizer, state["optimizer"]["groups"])
        # A schedule that moves before the next update would warn that there has been none.
        rig.optimizer._opt_called = True  # type: ignore[attr-defined]
        rig.totals.put_back(state["totals"])
        rig.place = Place(*state["place"])
        rig.steps, rig.updates, rig.samples = state["counters"]
        rig.guards.put_back(state["guards"])
        rig.apply_numerics()
        if memory is not None:
            memory.put_back(state.get("remembered", ()))
        _import_randomness(state["randomness"], rig.device)
        loop: dict[str, Any] = state["loop"]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"the checkpoint does not fit this training: {told}") from error
    return loop


def _module_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that a state_dict holds, and all else that a module remembers."""
    persistent: dict[str, Any] = module.state_dict()
    weights = {name: value for name, value in persistent.items() if isinstance(value, Tensor)}
    return weights, {
        "buffers": {name: b for name, b in module.named_buffers() if name not in persistent},
        "extra": {name: value for name, value in persistent.items() if name not in weights},
        "modes": [layer.training for layer in module.modules()],
        "flags": [p.requires_grad for p in module.parameters()],
    }


def _copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as they are now, on the CPU; tied ones under each of their names."""
    for name, value in weights.items():
        why = why_not_stored(value)
        if why:  # told here, where the training can hear it, not by the thread that writes
            raise StoreError(f"{name} has {why}")
    kept = torch.contiguous_format
    return {name: value.detach().to("cpu", copy=True, memory_format=kept) for name, value in weights.items()}


def _import_module(module: nn.Module, weights: dict[str, Tensor], rest: dict[str, Any]) -> None:
    load_weights_into(module, weights)
    for name, value in rest["buffers"].items():
        _put_buffer(module, name, value)
    if rest["extra"]:
        module.load_state_dict(rest["extra"], strict=False)
    for layer, training in zip(module.modules(), rest["modes"], strict=True):
        layer.training = training
    for parameter, flag in zip(module.parameters(), rest["flags"], strict=True):
        parameter.requires_grad_(flag)


def _put_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a buffer that no state_dict holds, also one that came to be, or changed its shape, in training."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if leaf not in owner._buffers:
        raise KeyError(f"the model has no buffer {name}")
    now = owner._buffers[leaf]
    if now is not None and now.shape == value.shape and now.dtype == value.dtype:
        with torch.no_grad():
            now.copy_(value)
    else:
        owner._buffers[leaf] = value


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    number = {id(p): n for n, p in enumerate(_parameters_of(optimizer))}
    strange = [key for key in optimizer.state if id(key) not in number]
    if strange:
        raise StoreError(f"{type(optimizer).__name__} keeps state under {strange[0]!r:.40}, which cannot be stored")
    return {
        "kind": type(optimizer).__name__,
        "state": {number[id(p)]: values for p, values in optimizer.state.items()},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }


def _import_optimizer(optimizer: Optimizer, stored: dict[str, Any], *, moved: bool) -> None:
    """Put the state back; `moved` from a CPU to a GPU, or the other way."""
    if stored["kind"] != type(optimizer).__name__:
        raise StoreError(f"the checkpoint is of {stored['kind']}, the optimizer is {type(optimizer).__name__}")
    pairs = zip(optimizer.param_groups, stored["groups"], strict=True)
    owners = [(p, group, bool(was.get("fused"))) for group, was in pairs for p in group["params"]]
    optimizer.state.clear()
    # Not by load_state_dict: that casts every state to its parameter's dtype.
    for n, values in stored["state"].items():
        parameter, group, was_fused = owners[n]
        for name, value in values.items():
            if name == "step" and isinstance(value, Tensor) and (moved or bool(group.get("fused")) != was_fused):
                # The fused kernel reads the count on the device, the plain loop on the host.
                values[name] = value.to(parameter.device if group.get("fused") or group.get("capturable") else "cpu")
            elif moved and isinstance(value, Tensor):
                values[name] = value.to(parameter.device)
        optimizer.state[parameter] = values


def _import_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        for name in [name for name in group if name not in stored and name not in ("params", *_BY_PLAN)]:
            del group[name]
        group.update({name: value for name, value in stored.items() if name not in _BY_PLAN})


def _randomness(device: torch.device) -> dict[str, Any]:
    host = HostRandomness()
    version, words, gauss = host.python
    return {
        # 625 numbers as one array: as JSON they would take longer than all the rest.
        "python": (version, np.array(words, dtype=np.int64), gauss),
        "numpy": host.numpy,
        "torch": host.torch,
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _import_randomness(stored: dict[str, Any], device: torch.device) -> None:
    host = HostRandomness()
    version, words, gauss = stored["python"]
    host.python = (version, tuple(words.tolist()), gauss)
    host.numpy, host.torch = stored["numpy"], stored["torch"]
    host.restore()
    if stored["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(stored["cuda"], device)
