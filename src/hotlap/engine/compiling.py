"""torch.compile of the model, or of its repeated blocks: put in for a step, and taken out after it.

Between steps the model is as the user gave it: its identity, state, hooks and pickled form show no compiler, and
evaluation runs as before. Changing to another plan and back costs nothing, since compiled code is kept.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import FunctionType
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from hotlap.core.errors import first_line
from hotlap.core.plan import Execution
from hotlap.core.terminal import logger
from hotlap.core.torch_private import (
    COMPILE_WORKERS,
    COMPILED_MODULE,
    BatchNormBase,
    forward_hooks_of_all,
    forward_pre_hooks_of_all,
    or_none,
)
from hotlap.core.units import show_seconds
from hotlap.core.warning_filters import filtered
from hotlap.data.batches import Batch
from hotlap.engine.blocks import repeated_blocks
from hotlap.engine.capture.captured_step import BatchError, shape_of, signature
from hotlap.engine.capture.recording import Watch, intended_wait, settle_dropout
from hotlap.engine.objective import Scored
from hotlap.engine.snapshot import Randomness
from hotlap.engine.step import EagerStep, Window
from hotlap.engine.time_limit import Alarm, TooLongError

log = logger(__name__)

BACKEND: Any = "inductor"
"""The compiler backend, by torch's name."""
MOST_S = 120.0
"""Seconds that compiling one window may take before hotlap gives up."""
LEADER_S = 3.0
"""Seconds that torch's compiler processes may take to end."""
MOST_BREAKS = 8
"""Graph breaks that one forward pass may have."""
MOST_RECOMPILES = 8
"""Recompilations for known shapes before hotlap gives up."""
MOST_SHAPES = 12
"""Most shapes of windows that are compiled; the others run uncompiled. It is also the most widths of sequences."""
RARE = 20
"""A shape is rare, and not compiled, if fewer than one window in 20 has it. The last, shorter batch of an epoch is
one."""
LEAST_CAPABILITY = (7, 0)
"""Compute capability that Triton needs."""

_CALL = "_compiled_call_impl"
"""The attribute that a module calls instead of its own forward pass."""
_SETTINGS = {"recompile_limit": 256, "skip_nnmodule_hook_guards": False}
"""Settings of torch's compiler inside steps. hotlap counts recompilations itself, and a hook that is added later
runs."""


EARLY_BACKWARD = "force_non_lazy_backward_lowering"
"""torch's setting by which a backward pass is compiled together with its forward pass."""


def why_not_compiled(model: nn.Module, what: str, device: torch.device) -> str | None:
    """Why the model, or its blocks, cannot be compiled here; None if nothing speaks against it beforehand."""
    from hotlap.core.torch_private import functorch_config

    if not hasattr(functorch_config, EARLY_BACKWARD):
        return f"torch {torch.__version__} compiles backward passes only while they run; newer ones compile them before"
    if any(vars(layer).get(_CALL) is not None or _is_compiled(layer) for layer in model.modules()):
        return "the model is compiled already"
    if what == "blocks" and not repeated_blocks(model):
        return "the model repeats no blocks that could be compiled"
    if sys.platform == "win32":
        return "torch.compile is not tried on Windows"
    if device.type == "cpu":
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            return f"torch.compile needs a C++ compiler on a CPU, and {compiler} was not found; install it, or set CXX"
        return None
    if device.type != "cuda":
        return f"torch.compile needs a CPU or a CUDA GPU; this training runs on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton on a GPU, and it is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"torch.compile needs a GPU of compute capability 7.0, and this one has {capability[0]}.{capability[1]}"
    return None


def _is_compiled(layer: nn.Module) -> bool:
    # By name: importing the class would load torch's compiler, which takes seconds.
    return any((kind.__module__, kind.__name__) == COMPILED_MODULE for kind in type(layer).__mro__)


_NUMBERS = itertools.count()


class Compiling:
    """The compiled code of one model, whole or by blocks, and what is known about it."""

    def __init__(
        self, model: nn.Module, device: torch.device, *, steps: Callable[[], int], write_down: Callable[..., None]
    ) -> None:
        """`steps` returns the number of updates so far; `write_down` adds an entry to the ledger."""
        self._model, self._device = model, device
        self.steps, self._write_down = steps, write_down
        self._reasons: dict[str, str | None] = {}
        self._parts: dict[str, list[tuple[nn.Module, Callable[..., Any]]]] = {}
        self._before: list[tuple[nn.Module, Any]] = []
        self.warmup_steps = 0
        """Warm-up windows: those in which something was compiled."""
        self.given_up: dict[str, str] = {}
        """Why the model, or its blocks, run uncompiled though the plan asks for it, once that is known."""

    def why_not(self, what: str) -> str | None:
        """As `why_not_compiled`, computed once."""
        if what not in self._reasons:
            self._reasons[what] = why_not_compiled(self._model, what, self._device)
        return self._reasons[what]

    @contextmanager
    def put_in(self, what: str) -> Iterator[None]:
        """Inside, calls of the model or of its blocks are compiled."""
        for module, compiled in self._compiled(what):
            self._before.append((module, vars(module).get(_CALL)))
            vars(module)[_CALL] = compiled
        try:
            yield
        finally:
            self.take_out()

    def take_out(self) -> None:
        """Restore what every module calls."""
        while self._before:
            module, before = self._before.pop()
            if before is None:
                vars(module).pop(_CALL, None)
            else:
                vars(module)[_CALL] = before

    def _compiled(self, what: str) -> list[tuple[nn.Module, Callable[..., Any]]]:
        if what not in self._parts:
            modules = [self._model] if what == "model" else repeated_blocks(self._model)
            # The first shape gets its own code, the second makes code for all widths, as torch does by itself. hotlap
            # captures CUDA graphs.
            self._parts[what] = [(module, torch.compile(call, backend=_made)) for module, call in _calls_of(modules)]
        return self._parts[what]

    def made(self, what: str, watch: CompilerWatch, took_s: float) -> None:
        """Write to the ledger that something was compiled, and how long it took."""
        self.warmup_steps += 1
        why = f"torch.compile of the {what} took {show_seconds(took_s)}"
        figures = {"graphs": float(watch.graphs), "breaks": float(watch.breaks)}
        self._write_down("compile", "measured", why, figures=figures, cost_s=took_s)

    def give_up(self, what: str, reason: str, cost_s: float = 0.0) -> None:
        """Run uncompiled from now on, and write the reason to the ledger."""
        self.warmup_steps += 1
        self.given_up[what] = reason
        self._write_down("compile", "fault", f"runs uncompiled, since {reason}", cost_s=cost_s)


def _calls_of(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Calls of modules as functions of hotlap: torch's compiler does not start at functions of torch.

    They share one code object, and so the code that is compiled for it. Other models have another, with its own name:
    torch remembers by name which shapes have varied.
    """
    code = _call_of(modules[0]).__code__.replace(co_name=f"call_{next(_NUMBERS)}")
    for module in modules:
        call = _call_of(module)
        call.__code__ = code
        yield module, call


def _call_of(module: nn.Module) -> FunctionType:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    assert isinstance(call, FunctionType)
    return call


def _made(graph: Any, inputs: list[Tensor]) -> Any:
    """Compile a graph and its backward pass.

    The backward pass is compiled at once. Later, an update would be half done, and on a GPU in another thread.
    """
    from hotlap.core.torch_private import functorch_config, lookup_backend

    with functorch_config.patch({EARLY_BACKWARD: True}):
        return lookup_backend(BACKEND)(graph, inputs)


class CompiledStep(EagerStep):
    """Updates whose forward and backward passes are compiled, if that pays.

    If the compiler fails, the update runs uncompiled, from the same state and with the same draws.
    """

    warm_later = 2
    """A shape that comes once more is compiled, and recorded after that."""

    def __init__(self, compiling: Compiling, *parts: Any, execution: Execution, **settings: Any) -> None:
        super().__init__(*parts, execution=execution, **settings)
        self._compiling, self._what = compiling, execution.compile
        self._windows: Counter[Hashable] = Counter()
        self._compiled: set[Hashable] = set()
        """Compiled windows; `_batches` holds the batches that they consist of."""
        self._batches: set[Hashable] = set()
        self._sizes: Counter[tuple[int, ...]] = Counter()
        """Number of compiled windows whose pieces have these sizes."""
        self._is_new = False
        self._recompiles = 0
        self._since = compiling.steps()
        layers = [layer for module in self.modules for layer in module.modules() if isinstance(layer, BatchNormBase)]
        counters = [(layer, layer.num_batches_tracked) for layer in layers]
        self._counters = [(layer, torch.zeros_like(one)) for layer, one in counters if isinstance(one, Tensor)]

    def gradients(
        self, pieces: list[Batch], sizes: list[int], all_count: bool, of: int = 0
    ) -> tuple[Tensor, list[Scored]]:
        """As `EagerStep` does, with compiled passes."""

        def plainly() -> tuple[Tensor, list[Scored]]:
            return EagerStep.gradients(self, pieces, sizes, all_count)

        compiling, what = self._compiling, self._what
        if what in compiling.given_up:
            return plainly()
        if self._is_recording():
            with compiling.put_in(what), self._counting():
                return plainly()
        key = signature(Window(pieces, sizes))
        is_new = key not in self._compiled
        # A watch sees layers through hooks, for which code would have to be compiled.
        if self._is_rare(key, tuple(sizes)) if is_new else self.look is not None:
            return plainly()
        before = _ForwardState(self.modules, self._device) if is_new else None
        watch, reason, began = CompilerWatch(), None, time.perf_counter()
        self._is_new = is_new
        try:
            with _unwatched() if is_new else nullcontext(), compiling.put_in(what), watch:
                made = plainly()
        except (Exception, TooLongError) as error:
            if not watch.compiles and not _is_compilers(error):
                raise
            reason = _reason_of(error)
            if isinstance(error, TooLongError):
                end_compile_workers()
        finally:
            self._is_new = False
        took_s = time.perf_counter() - began
        if reason is not None:
            if before is not None:
                before.restore()
            made = plainly()  # a user's error is raised again, as without compiling
            compiling.give_up(what, reason, took_s)
            return made
        self._compiled.add(key)
        self._sizes[tuple(sizes)] += is_new
        if watch.compiles:
            compiling.made(what, watch, took_s)
            self._recompiles += not is_new
            self._stop_storms(watch)
        return made

    def _stop_storms(self, watch: CompilerWatch) -> None:
        if watch.breaks > MOST_BREAKS:
            why = f"it has {watch.breaks} graph breaks in one forward pass, one of them: {watch.break_reason}"
            self._compiling.give_up(self._what, why)
        elif self._recompiles > MOST_RECOMPILES:
            why = f"it was recompiled {self._recompiles} times for known shapes"
            self._compiling.give_up(self._what, why)

    def _on_device(self, batch: Batch) -> tuple[Batch, bool]:
        ready, same_target = super()._on_device(batch)
        if self._is_recording():
            # Nothing can be compiled during a recording.
            if _shape(ready) not in self._batches:
                self._compiling.take_out()
        elif self._is_new:
            self._batches.add(_shape(ready))
        return ready, same_target

    def _is_rare(self, key: Hashable, sizes: tuple[int, ...]) -> bool:
        self._windows[key] += 1
        if not self._compiled:
            return False
        if self._sizes[sizes] > 1 and len(self._compiled) < MOST_SHAPES:
            return False  # there is code for all widths with this number of samples
        here = self._compiling.steps() - self._since
        return len(self._compiled) >= MOST_SHAPES or self._windows[key] < 2 or RARE * self._windows[key] < here

    def _is_recording(self) -> bool:
        return self._moves and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Inside, batch norms get a counter if a recording has removed theirs: compiled code needs one."""
        gone = [(layer._buffers, one) for layer, one in self._counters if layer._buffers["num_batches_tracked"] is None]
        for buffers, one in gone:
            buffers["num_batches_tracked"] = one
        try:
            yield
        finally:
            for buffers, _ in gone:
                buffers["num_batches_tracked"] = None


def _shape(batch: Batch) -> Hashable:
    try:
        return shape_of(batch)
    except BatchError:
        return None


class _ForwardState:
    """What a forward pass changes besides gradients: buffers and generators."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._modules, self._device = modules, device
        self._buffers = [(one, one.detach().clone()) for module in modules for one in module.buffers()]
        self._randomness = Randomness(device)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore it."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        settle_dropout(self._modules, self._device)  # torch's compiler sets the generator
        self._randomness.restore()


@contextmanager
def _unwatched() -> Iterator[None]:
    """Inside, a `Watch` sees nothing: its hooks must not be compiled, and the compiler is no part of the step."""
    everywhere = (forward_pre_hooks_of_all, forward_hooks_of_all)
    found = [(hooks, number, hook) for hooks in everywhere for number, hook in hooks.items()]
    found = [one for one in found if isinstance(getattr(one[2], "__self__", None), Watch)]
    for hooks, number, _ in found:
        del hooks[number]
    try:
        with intended_wait():
            yield
    finally:
        for hooks, number, hook in found:
            hooks[number] = hook


# --- the compiler ------------------------------------------------------------------------------------


class CompilerWatch:
    """Watches torch's compiler. Compiling for longer than MOST_S ends in a TooLongError.

    The limit needs the main thread, a compiler that runs in Python or waits for a process, and no alarm of the user's.
    """

    def __init__(self) -> None:
        self.compiles = 0
        """Pieces of code that the compiler has started on."""
        self._spent_s = 0.0
        self._alarm = Alarm()
        self._quiet = ExitStack()

    def __enter__(self) -> CompilerWatch:
        from hotlap.core.torch_private import compile_counters, compile_handler, dynamo_config

        self._handler, self._counters, self._config = compile_handler, compile_counters, dynamo_config
        self._graphs, self._breaks = self._counted()
        self._settings = {name: getattr(self._config, name) for name in _SETTINGS}
        self._set(_SETTINGS)
        self._handler.register_start_callback(self._begins)
        self._handler.register_end_callback(self._ends)
        return self

    def __exit__(self, *_: object) -> None:
        self._clear_alarm()
        self._handler.remove_start_callback(self._begins)
        self._handler.remove_end_callback(self._ends)
        self._set(self._settings)

    @property
    def graphs(self) -> int:
        """Compiled graphs."""
        return self._counted()[0] - self._graphs

    @property
    def breaks(self) -> int:
        """Graph breaks."""
        # torch counts a place again for each function that calls the one with the break.
        return max(0, min(self._counted()[1] - self._breaks, self.graphs - 1))

    @property
    def break_reason(self) -> str:
        """The reason of the last graph break, in one line."""
        lines = str(next(reversed(self._counters["graph_break"]), "")).strip().splitlines()
        return lines[0].strip() if lines else "the reason is not known"

    def _counted(self) -> tuple[int, int]:
        return self._counters["stats"]["unique_graphs"], sum(self._counters["graph_break"].values())

    def _set(self, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            setattr(self._config, name, value)

    def _begins(self, _: Any) -> None:
        self.compiles += 1
        self._began = time.perf_counter()
        # Parts of torch warn of things that no user can change. If warnings are errors, nothing would compile.
        self._quiet.enter_context(filtered())
        self._alarm.set(max(1e-3, MOST_S - self._spent_s))

    def _ends(self, _: Any) -> None:
        self._clear_alarm()
        self._spent_s += time.perf_counter() - self._began

    def _clear_alarm(self) -> None:
        self._alarm.clear()
        self._quiet.close()


def _is_compilers(error: BaseException) -> bool:
    from hotlap.core.torch_private import TorchDynamoException

    return isinstance(error, (TorchDynamoException, TooLongError))


def _reason_of(error: BaseException) -> str:
    if isinstance(error, TooLongError):
        return f"compiling took longer than {show_seconds(MOST_S)}"
    inner = getattr(error, "inner_exception", error)
    return f"the compiler failed with {type(inner).__name__}: {first_line(inner)}"


def end_compile_workers() -> None:
    """End the processes in which torch compiles: one of them may hang. torch starts others when it needs them."""
    if COMPILE_WORKERS not in sys.modules:  # torch has started none
        return
    from hotlap.core.torch_private import compile_pools, shut_down_compile_workers

    if or_none(compile_pools) is None or or_none(shut_down_compile_workers) is None:
        return
    leaders = [pool.process for pool in compile_pools if hasattr(pool, "process")]
    # torch waits up to five minutes for a leader, and a leader for its workers.
    timers = [threading.Timer(LEADER_S, leader.kill) for leader in leaders]
    for leader, timer in zip(leaders, timers, strict=True):
        with suppress(psutil.Error):
            for worker in psutil.Process(leader.pid).children(recursive=True):
                with suppress(psutil.Error):
                    worker.kill()
        timer.daemon = True
        timer.start()
    try:
        shut_down_compile_workers()
    except Exception as error:  # the training goes on all the same
        log.info("torch's compiler processes were not shut down: %s", first_line(error))
    finally:
        for timer in timers:
            timer.cancel()
