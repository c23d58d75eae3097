"""Saving a training while it runs: when to save, the state as files, and restoring it bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.errors import StoreError, first_line
from hotlap.core.object_memory import Changes, Path
from hotlap.data.order import HostRandomness
from hotlap.engine.rig import Place, Rig
from hotlap.store.checkpoints import Checkpoints
from hotlap.store.disk import Piece
from hotlap.store.encoding import decode, encode, to_json
from hotlap.store.files import from_json
from hotlap.store.tensors import tensor_pieces, tensors_from, why_not_stored
from hotlap.store.weights import load_weights_into, unwrapped

Files = Mapping[str, Iterable[Piece]]

COST_SHARE = 0.02
"""Where hotlap chooses when to save, saving takes at most this share of a run."""
LEAST_S = 30.0
"""Where hotlap chooses, seconds between saves at least: a crash loses half a minute."""
FIRST_BYTES_S = 100e6
"""Bytes a second that the first save is assumed to copy, hash and write: a slow cloud disk. Most are faster."""
FIRST_SYNCS_S = 0.1
"""Seconds that the first save is assumed to wait for a dozen syncs, as on a spinning disk."""
CAUTION = 1.5
"""A save may take so many times as long as earlier ones, and the share still holds."""


class Saver:
    """Writes checkpoints of one training; a thread writes the files while the training goes on.

    `every` is the number of updates between two saves; 0 never saves. With None, hotlap saves only if all saves,
    including this one, stay within 2 % of the time since the run began. Time and saves count from the start of this
    process: if each part of a resumed run keeps to its share, so does the whole run. `before_s` is how long the run
    had taken before, and `size` the approximate size of a checkpoint in bytes.
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
        """Checkpoints that are complete on disk."""
        self.spent_s = 0.0
        """Seconds that training waited for saving."""
        self.copying_s = 0.0
        """Seconds of copying, while training waited."""
        self.writing_s = 0.0
        """Seconds that the thread was writing."""

    @property
    def cost_s(self) -> float:
        """Seconds that all saves took so far. With few cores writing slows training, so all of it counts."""
        return self.copying_s + self.writing_s

    @property
    def expected_s(self) -> float:
        """Seconds that the next save may take: first by its size, then by earlier saves."""
        if not self.saved:
            return self._first_cost_s
        return CAUTION * max(self._last_cost_s, self._whole_cost_s / self.saved)

    def closing_s(self, weights_bytes: int) -> float:
        """Seconds that may pass after the last step: for a checkpoint, if one will be due, and for the weights."""
        files_s = FIRST_SYNCS_S + weights_bytes / FIRST_BYTES_S
        if self.saved:  # a checkpoint holds the weights too, so they take no longer
            files_s = min(files_s, self.expected_s)
        will_save = self._every > 0 if self._every is not None else self._is_within_share()
        return files_s + self.expected_s if will_save else files_s

    def due(self, step: int) -> bool:
        """Whether it is time for a checkpoint before the next step."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        # Do not wait for a save in progress: the next one comes after it.
        if self._last_s is not None and (time.perf_counter() - self._last_s < LEAST_S or self.busy):
            return False
        return self._is_within_share()

    def due_at_end(self, step: int) -> bool:
        """Whether to save after the last step; waits for a save in progress."""
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
        """Whether the thread is writing files."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, export: Callable[[], Files], facts: dict[str, Any], *, wait: bool = False) -> None:
        """Copy the state now and write it in a thread. On failure the user gets a message and training goes on."""
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
        """Wait for the files of the last save; report a failure."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, StoreError):
                self._complain(str(failure))
                return
            # The training itself is fine.
            reason = getattr(failure, "strerror", None) or f"{type(failure).__name__}: {failure}"
            self._complain(
                f"a checkpoint could not be written: {reason}; training goes on, earlier checkpoints are untouched"
            )

    def _write(self, step: int, files: Files, facts: dict[str, Any], copied_s: float) -> None:
        begun = time.perf_counter()
        failure = None
        try:
            self._checkpoints.write(step, files, facts)
        except BaseException as error:
            # Without its traceback, which would keep the copied state alive until the next save.
            failure = error.with_traceback(None)
        wrote_s = time.perf_counter() - begun
        self.writing_s += wrote_s
        self._failure = failure
        # A failed save may have ended early, so its time does not predict the next.
        if failure is None:
            self._last_cost_s = copied_s + wrote_s
            self._whole_cost_s += self._last_cost_s
            self._last_step = step
            self.saved += 1


MODEL, TENSORS, VALUES = "model.safetensors", "training.safetensors", "training.json"
_BY_PLAN = ("fused", "foreach", "capturable")
"""Optimizer settings that the current plan decides, which may differ from the checkpoint's plan."""


def export_state(
    rig: Rig, loop: dict[str, Any], remembered: Sequence[tuple[Path, Any]] = ()
) -> dict[str, Iterable[Piece]]:
    """The files of a training: copied to host memory now, and turned into bytes when written.

    `loop` is the state of the loop around the rig; `remembered` is what `Changes` found. Raises StoreError for state
    that no file can hold.
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
    """Restore a stored training into the rig, and return the loop's state. Raises StoreError if they do not fit.

    `memory` restores what modules, the optimizer and the user's functions remembered; earlier versions stored none.
    """
    missing = [name for name in (MODEL, TENSORS, VALUES) if name not in files]
    if missing:
        raise StoreError(f"the checkpoint has no {missing[0]}")
    rig.settle()  # drop the device's state of the earlier training
    tensors = tensors_from(files[TENSORS], TENSORS)
    state = decode(from_json(files[VALUES], VALUES), tensors, rig.device)
    try:
        _import_module(unwrapped(rig.model), tensors_from(files[MODEL], MODEL), state["model"])
        if isinstance(rig.loss, nn.Module):
            _import_module(rig.loss, *state["loss"])
        _import_optimizer(rig.optimizer, state["optimizer"], moved=state["device"] != rig.device.type)
        if rig.schedule.scheduler is not None:
            rig.schedule.scheduler.load_state_dict(state["schedule"])
        # After the schedule: loading it may change the learning rate.
        _import_groups(rig.optimizer, state["optimizer"]["groups"])
        # Otherwise a schedule that moves before the next update warns that there was none.
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
        raise StoreError(f"the checkpoint does not fit this training: {first_line(error)}") from error
    return loop


def _module_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a state_dict, and everything else that a module remembers."""
    persistent: dict[str, Any] = module.state_dict()
    weights = {name: value for name, value in persistent.items() if isinstance(value, Tensor)}
    return weights, {
        "buffers": {name: b for name, b in module.named_buffers() if name not in persistent},
        "extra": {name: value for name, value in persistent.items() if name not in weights},
        "modes": [layer.training for layer in module.modules()],
        "flags": [p.requires_grad for p in module.parameters()],
    }


def _copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the weights on the CPU; tied weights under each of their names."""
    for name, value in weights.items():
        why = why_not_stored(value)
        if why:  # here, where the training sees the error, not in the writing thread
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
    """Set a non-persistent buffer, also one that training created or reshaped."""
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
        raise StoreError(f"{type(optimizer).__name__} keeps state under {strange[0]!r:.40}, which hotlap cannot store")
    return {
        "kind": type(optimizer).__name__,
        "state": {number[id(p)]: values for p, values in optimizer.state.items()},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }


def _import_optimizer(optimizer: Optimizer, stored: dict[str, Any], *, moved: bool) -> None:
    """Restore the state; `moved` if the device type changed."""
    if stored["kind"] != type(optimizer).__name__:
        raise StoreError(f"the checkpoint has the optimizer {stored['kind']}, this training {type(optimizer).__name__}")
    pairs = zip(optimizer.param_groups, stored["groups"], strict=True)
    owners = [(p, group, bool(was.get("fused"))) for group, was in pairs for p in group["params"]]
    optimizer.state.clear()
    # Not with load_state_dict, which casts every state to its parameter's dtype.
    for n, values in stored["state"].items():
        parameter, group, was_fused = owners[n]
        for name, value in values.items():
            if name == "step" and isinstance(value, Tensor) and (moved or bool(group.get("fused")) != was_fused):
                # The fused kernel reads the step count on the device, the plain loop on the host.
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
        # 625 numbers as one array: as JSON they would take longer than everything else.
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
