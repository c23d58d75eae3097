"""Recording work as a CUDA graph, and watching an eager step for what a replay would get wrong."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hotlap.core.torch_private import (
    clear_cublas_workspaces,
    current_graph_task_id,
    current_raw_stream,
    dispatch_mode_count,
    end_allocate_to_pool,
    or_none,
    peek_interpreter_stack,
    top_saved_tensors_hooks,
)
from hotlap.core.turns import turn
from hotlap.core.units import show_seconds
from hotlap.core.warning_filters import filtered
from hotlap.data.order import HostRandomness
from hotlap.engine.capture.fingerprint import memory, what_changed
from hotlap.engine.time_limit import TooLongError, at_most

MOST_S = 120.0
"""Seconds that recording one piece of work may take before hotlap gives up."""
_WAITED = "called a synchronizing CUDA operation"
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_intended_waits = 0


class Watch:
    """Inside, notes what cannot be replayed; `reason` holds it afterwards, or None.

    A replay repeats kernels and nothing else. It would freeze or break on a value read back from the device, a draw
    from the host's generators, or Python state that a module updates. Watching changes nothing. It costs some tenths of
    a millisecond per layer.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, functions: Sequence[Callable[..., Any] | None] = ()
    ) -> None:
        """`functions` are the user's functions that run inside."""
        self._modules, self._functions, self._on_gpu = modules, functions, device.type == "cuda"
        self.reason: str | None = None
        self.waits = False
        """Whether the reason is that the host waits for the device: perhaps for constants that it copies there."""
        self.changed = False
        """Whether a module's Python state has changed. It may cache what it makes for a shape, such as masks, and the
        reason may lie in making it."""
        self._open: list[HostRandomness] = []
        self._watcher: types.FrameType | None = None

    def __enter__(self) -> Watch:
        self._watcher = sys._getframe(1)
        self._before = HostRandomness()
        self._memory = memory(self._modules, self._functions)
        self._hooks = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        self._filters = ExitStack()
        self._filters.enter_context(filtered(message="Synchronization debug mode is a prototype"))
        self._filters.enter_context(filtered("always", message=_WAITED))
        self._shown, warnings.showwarning = warnings.showwarning, self._on_warning
        if self._on_gpu:
            self._mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watcher = None
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode(self._mode)
        warnings.showwarning = self._shown
        self._filters.close()
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            changed = what_changed(self._memory, memory(self._modules, self._functions))
            self.changed = changed is not None
            if self.reason is None and not self._before.same_as(HostRandomness()):
                self.reason = "the loss, or a function on batches, draws from the host's randomness"
            self.reason = self.reason or changed

    def _on_warning(self, message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if _WAITED not in str(message):
            self._shown(message, category, *rest, **more)
        elif self.reason is None and not _intended_waits:
            self.waits = True
            self.reason = f"a value is read back from the device{_location(_users_line(self._watcher))}"

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        self._open.append(HostRandomness())

    def _after_forward(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._open and not self._open.pop().same_as(HostRandomness()) and self.reason is None:
            self.reason = f"{type(module).__name__} draws from the host's randomness{_location(_forward_line(module))}"


def unknown_leaf(loss: Tensor, known: Sequence[Tensor], *, parameters_only: bool = True) -> str | None:
    """A description of a parameter that gets a gradient and is not among the known; None if there is none.

    A replay would write to the address that it once had. Without `parameters_only`, any tensor counts.
    """
    ours, seen, ahead = {id(p) for p in known}, set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        wanted = nn.Parameter if parameters_only else Tensor
        if isinstance(leaf, wanted) and id(leaf) not in ours:
            kind, shape = "parameter" if isinstance(leaf, nn.Parameter) else "tensor", tuple(leaf.shape)
            return f"a gradient goes to a {kind} of shape {shape} that is neither the model's nor the optimizer's"
        ahead += [before for before, _ in node.next_functions]
    return None


def is_observed() -> bool:
    """Whether torch functions observe what runs now, or compute it twice, as checkpointed layers do."""
    if peek_interpreter_stack() is not None or dispatch_mode_count():
        return True
    is_again = current_graph_task_id() != -1
    # A checkpointed layer first runs with hooks on saved tensors.
    return is_again or top_saved_tensors_hooks(True) is not None


def why_recording_failed(error: BaseException) -> str:
    """The message of an error during a recording, and the user's line that raised it."""
    text = str(error).strip().splitlines()
    message = text[0] if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    line = next(((f.filename, f.lineno or 0) for f in reversed(frames) if not f.filename.startswith(_OWN)), None)
    return f"{message}{_location(line)}"


@contextmanager
def intended_wait() -> Iterator[None]:
    """Inside, hotlap waits for the device on purpose, in a part of the step that is not recorded."""
    global _intended_waits
    _intended_waits += 1
    try:
        yield
    finally:
        _intended_waits -= 1


def _users_line(watcher: types.FrameType | None) -> tuple[str, int] | None:
    """The innermost line outside of torch and hotlap, among the calls of the watcher's frame."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OWN) and not frame.f_code.co_filename.endswith("warnings.py"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back if frame is not watcher else None
    return None


def _forward_line(module: nn.Module) -> tuple[str, int] | None:
    try:
        return inspect.getsourcefile(type(module)) or "", inspect.getsourcelines(type(module).forward)[1]
    except (OSError, TypeError):
        return None


def _location(line: tuple[str, int] | None) -> str:
    return f" ({Path(line[0]).name}:{line[1]})" if line else ""


# --- dropout of recurrent layers -----------------------------------------------------------------------


def drops_in_recurrence(modules: Iterable[nn.Module], device: torch.device) -> bool:
    """Whether one of these modules has a recurrent layer whose dropout cuDNN draws.

    torch keeps a state for that, one for each GPU, and makes it again after the generator was set, which waits for the
    GPU.
    """
    layers = (layer for module in modules for layer in module.modules())
    return device.type == "cuda" and any(map(_drops, layers))


_RECURRENT = frozenset(("RNN", "LSTM", "GRU"))
"""Names of torch's recurrent layers: a scripted layer keeps nothing else of its class."""


def _drops(layer: nn.Module) -> bool:
    is_recurrent = isinstance(layer, nn.RNNBase) or getattr(layer, "original_name", None) in _RECURRENT
    rate = getattr(layer, "dropout", 0)
    return is_recurrent and layer.training and isinstance(rate, (int, float)) and rate > 0


def settle_dropout(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Make the state of cuDNN's dropout again if that is due, so that the next call does not wait for it."""
    if drops_in_recurrence(modules, device):
        _dropped_once(device)


def dropout_state_to_hold(modules: Iterable[nn.Module], device: torch.device) -> Tensor | None:
    """The state of cuDNN's dropout, if these modules use it; hold it as long as the recordings that are made next.

    When anything sets the generator, such as `torch.manual_seed`, torch.compile or a checkpointed layer, torch makes
    another state and releases this one. Replays go on reading and writing this one. Raises NotRecordedError.
    """
    if not drops_in_recurrence(modules, device):
        return None
    # What torch saves for the backward pass is the state itself. Outer hooks could save a copy. A saved output that
    # is not detached would hold the node that holds it, for good.
    with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(Tensor.detach, Tensor.detach):
        state = dropout_state_of(_dropped_once(device))
    if state is None and torch.backends.cudnn.enabled:
        raise NotRecordedError("a recurrent layer does not show where cuDNN keeps the state of its dropout")
    return state


def dropout_state_of(output: Tensor) -> Tensor | None:
    """The state of cuDNN's dropout that made the output of a recurrent layer; None if another library made it."""
    state: Tensor | None = getattr(output.grad_fn, "_saved_dropout_state", None)
    return state


def _dropped_once(device: torch.device) -> Tensor:
    """The output of a smallest recurrent layer that drops out."""
    place = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
    # A state made in inference mode could not be saved for any backward pass.
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        # Without the hooks that a script may have on every module.
        output, _ = _smallest_dropping(place).forward(torch.zeros(1, 1, 1, device=place, dtype=torch.float32))
    made: Tensor = output
    return made


@cache
def _smallest_dropping(device: torch.device) -> nn.LSTM:
    with torch.inference_mode(False), torch.random.fork_rng(devices=()):
        return nn.LSTM(1, 1, num_layers=2, dropout=0.5, dtype=torch.float32, device="cpu").to(device)


# --- recording -----------------------------------------------------------------------------------------


_raw_stream = or_none(current_raw_stream)
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """torch's current stream of a GPU, asked for cheaply; the same object each time for the same stream.

    None for other devices.
    """
    if device.type != "cuda":
        return None
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device)
    key = device.index, _raw_stream(device.index)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(device)
    return _streams[key]


def is_recording() -> bool:
    """Whether this stream records what runs now, instead of executing it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class NotRecordedError(Exception):
    """Work could not be recorded; the message gives the reason and the user's line."""


_recordings: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
"""All recordings of hotlap in this process."""


def is_own_recording(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether a graph is a recording of hotlap's, not of the script's."""
    return graph in _recordings


def release_cublas_workspaces() -> None:
    """Release cuBLAS's workspaces, which it takes again at its next use; not while recordings may write to them."""
    if not _recordings:
        clear_cublas_workspaces()


class Recorder:
    """Records graphs that share their memory, on a stream that nothing else uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _recording_stream(self._number) if turn.get() is None else torch.cuda.current_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._made: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, work runs on the recording stream, in order with all other work."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the work as a graph, without executing it. Raises NotRecordedError if it cannot be recorded."""
        generator = torch.cuda.default_generators[self._number]
        before = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        if not self._made:
            # Without graphs, a memory pool no longer exists.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with self.aside(), _no_collection(), _own_casts(), _no_pinned_copies():
                # Other threads, such as a checkpoint or a loader that pins memory, may call CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    _in_time(work)
                except BaseException:
                    with suppress(RuntimeError), filtered():  # for example that the graph is empty
                        graph.capture_end()
                    raise
                graph.capture_end()
        except Exception as error:  # the user's code may raise anything
            # After a failed recording, torch's generator and allocator still act as if it went on.
            generator.graphsafe_set_state(before)
            with suppress(RuntimeError):
                end_allocate_to_pool(self._number, self._pool)
            torch.cuda.synchronize(self._device)
            if isinstance(error, NotRecordedError):
                raise
            raise NotRecordedError(why_recording_failed(error)) from error
        self._made.add(graph)
        _recordings.add(graph)
        return graph

    @property
    def _number(self) -> int:
        return self._device.index if self._device.index is not None else torch.cuda.current_device()


def _in_time(work: Callable[[], None]) -> None:
    """Do work that may hang, such as a function of the user's that waits for a lock. Raises NotRecordedError."""
    try:
        with at_most(MOST_S):
            work()
    except TooLongError:
        raise NotRecordedError(f"recording it took longer than {show_seconds(MOST_S)}") from None


@cache
def _recording_stream(number: int) -> torch.cuda.Stream:
    # One for the process, since cuBLAS keeps memory for each stream that it has used. Work on it has priority over work
    # beside it, which waits.
    return another_stream(torch.device("cuda", number), priority=-1)


_given_out: set[int] = set()


def another_stream(device: torch.device, *, priority: int = 0) -> torch.cuda.Stream:
    """A stream that this has not given out before: torch gives out the same 32 again and again."""
    for _ in range(32):
        stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        if stream.cuda_stream not in _given_out:
            break
    _given_out.add(stream.cuda_stream)
    return stream


@contextmanager
def _own_casts() -> Iterator[None]:
    """Inside, autocast casts weights anew, and what it has cast is not used afterwards.

    Within an autocast of the user's, it would take casts that it made before, whose memory is released at the end.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _no_pinned_copies() -> Iterator[None]:
    """Inside, this thread's copies from or to pinned memory raise NotRecordedError.

    A replay would use that memory again, whatever lies there by then. torch itself refuses other memory of the host.
    """
    names, here = ("to", "cuda", "copy_"), threading.get_ident()
    before = {name: vars(Tensor).get(name) for name in names}

    def checked(own: Callable[..., Tensor], source: int) -> Callable[..., Tensor]:
        @functools.wraps(own)
        def copies(*args: Any, **kwargs: Any) -> Tensor:
            made = own(*args, **kwargs)
            given: Any = args[source] if len(args) > source else kwargs.get("other")
            crosses = isinstance(given, Tensor) and given.device.type != made.device.type
            if crosses and (made.device.type == "cpu" or given.is_pinned()) and threading.get_ident() == here:
                raise NotRecordedError("it copies from or to pinned memory, which a replay would use again")
            return made

        return copies

    for name in names:
        setattr(Tensor, name, checked(getattr(Tensor, name), source=name == "copy_"))
    try:
        yield
    finally:
        for name, own in before.items():
            if own is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, own)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, Python collects no garbage: freeing device memory or a graph would break a recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
