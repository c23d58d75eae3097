"""Out of memory in a script: hotlap makes the forward pass again in pieces, or says what would help.

A backward pass that has failed cannot be repeated: it has added to some gradients, run hooks and freed its graph. So
where memory is tight, hotlap rehearses it before the script gets the outputs of the first calls of a size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.errors import TrainingError, first_line
from hotlap.core.terminal import logger
from hotlap.core.torch_private import dispatch_mode_count, frame_callback, or_none, peek_interpreter_stack
from hotlap.engine.step import is_out_of_memory, let_go_of_frames
from hotlap.machine.memory_shortage import free_bytes, has_returned, held_bytes, release_unused, shortage
from hotlap.script.calls.call import is_checkpointed
from hotlap.script.calls.module_state import ModuleState
from hotlap.script.calls.pieces import batch_of, fits, in_pieces, rehearse_backward, why_not_in_pieces
from hotlap.script.calls.trees import leaves
from hotlap.script.patches import Patches, untraced

log = logger(__name__)
TRIES = 2
"""Calls of the largest size so far that have to go through before hotlap no longer notes the state before them: at the
first there is no state of the optimizer yet."""
WAIT = 32
"""Calls in pieces until memory is read again, to see whether it has returned; twice as many after each try."""
NOTED = 8
"""Calls of a module that have to go through before only their errors are looked at."""


class _Known:
    """What is known of the calls of one module, with or without gradients; their size is that of the arguments."""

    def __init__(self) -> None:
        self.fitted, self.times = -1, 0
        """The largest size that went through, and how often."""
        self.calls = 0
        """Calls that went through."""
        self.failed: int | None = None
        """The smallest size that ran out of memory."""
        self.pieces = 0
        """The pieces that this size needs."""
        self.free_bytes = self.in_pieces = 0
        """What was free when memory ran out, and calls in pieces since it was read last."""
        self.wait = WAIT
        self.may_be_cut: bool | None = None
        """Whether such calls can be made in pieces; None until memory was tight."""

    def went_through(self, size: int) -> None:
        self.times = self.times + 1 if size == self.fitted else 1
        self.fitted = size

    def needs(self, pieces: int, size: int) -> None:
        """Note that calls of this size need so many pieces."""
        if self.failed is None or size <= self.failed:
            self.failed, self.pieces = size, pieces
        else:
            self.pieces = -(-pieces * self.failed // size)

    def fits_again(self, device: torch.device) -> bool:
        """Whether calls may be whole from here on, since memory has returned; asked before each call in pieces."""
        self.in_pieces += 1
        if self.in_pieces < self.wait:
            return False
        self.in_pieces = 0
        if not has_returned(self.free_bytes, free_bytes(device), None):
            return False
        self.wait *= 2
        self.fitted, self.times, self.calls, self.failed, self.pieces = -1, 0, 0, None, 0
        return True

    def pieces_for(self, size: int) -> int:
        """In how many pieces to make a call of this size; 0 for whole."""
        if self.failed is None or size < self.failed:
            return 0
        return -(-self.pieces * size // self.failed)


class ForwardRescue:
    """Makes calls of a script's modules in pieces once they have run out of memory.

    Until the loop is known it watches all calls from the first optimizer on, then those of the trained modules alone.
    """

    def __init__(self, is_ours: Callable[[], bool], note: Callable[[str], None]) -> None:
        """`is_ours`: whether hotlap may act at this moment. `note` gets a line on each change."""
        self._is_ours, self._note = is_ours, note
        self._patches, self._depth = Patches(), 0
        self._known: WeakKeyDictionary[nn.Module, tuple[_Known, _Known]] = WeakKeyDictionary()
        self._compiled_by = or_none(frame_callback) or (lambda: None)
        self._quick: dict[int, int] = {}
        """Modules, by their id, of whose calls up to this size only errors are looked at any more, which takes a tenth
        of the time."""
        self.why_not: str | None = None
        """Why the last call that ran out of memory could not be made in pieces."""
        self.watches = False
        """Whether it watches calls at this time."""

    # --- which calls ---------------------------------------------------------------------------

    def start(self) -> None:
        """Wait for the script's first optimizer: a script that trains nothing pays nothing."""
        self._patches.put(Optimizer, "__init__", self._patched_init)

    def watch_all(self) -> None:
        """Watch every outermost call."""
        self.watches = True
        self._patches.put(nn.Module, "__call__", self._patched_call)

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Watch the calls of these modules alone, by their classes."""
        self.remove()
        for kind in {type(module) for module in modules}:
            own = next(base for base in kind.__mro__ if "__call__" in vars(base))
            if own is nn.Module and kind is not nn.Module:
                self._patches.put(kind, "__call__", lambda _: self._patched_call(None))
                self.watches = True

    def remove(self) -> None:
        """Watch nothing from here on."""
        self.watches = False
        self._patches.take_out_all()

    def _patched_init(self, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            if self._is_ours() and self._patches.has("Optimizer.__init__"):
                self._patches.take_out("Optimizer.__init__")
                self.watch_all()

        return made

    def _patched_call(self, beneath: Callable[..., Any] | None) -> Callable[..., Any]:
        """`beneath` None: what `nn.Module` has at the time, which other patches may have replaced."""

        quick = self._quick

        def called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            original = nn.Module.__call__ if beneath is None else beneath
            if id(module) in quick and (_size(args, kwargs) <= quick[id(module)] or not torch.is_grad_enabled()):
                try:
                    return original(module, *args, **kwargs)
                except Exception as error:
                    if not is_out_of_memory(error) or self._depth or not self._is_ours():
                        raise
                    quick.pop(id(module), None)
                    known, own = self._known_of(module), functools.partial(self._own, original, module)
                    answer = None if known is None else self._answer(error, known, module, own, args, kwargs, None)
                    if answer is None:
                        raise
                    return answer[0]
            if self._depth or self._compiled_by() is not None or not self._is_ours():
                return original(module, *args, **kwargs)
            return self._called(module, functools.partial(self._own, original, module), args, kwargs)

        return untraced(called, beneath=False)

    def _own(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """The script's own call; those of the modules inside are part of it, also when it is computed again."""
        self._depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self._depth -= 1

    # --- a call ----------------------------------------------------------------------------------

    def _called(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, known, size = None, self._known_of(module), _size(args, kwargs)
        if known is None:
            return original(*args, **kwargs)
        pieces, held = known.pieces_for(size), 0
        if pieces and known.fits_again(_device_of(module)):
            pieces = 0
            self._note(f"the forward pass of {type(module).__name__} runs whole again, since memory has returned")
        if not pieces and (size > known.fitted or (size == known.fitted and known.times < TRIES)):
            before, held = _state_of(module), held_bytes(_device_of(module))
        try:
            made = in_pieces(module, original, args, kwargs, pieces) if pieces else original(*args, **kwargs)
            if before is not None and torch.is_grad_enabled() and _is_tight(module, held):
                if not self._goes_back(made, known, module, original, args, kwargs):
                    made = None  # its graph has to go first
                    made = self._made_to_go_back(known, module, original, args, kwargs, before)
                pieces = known.pieces_for(size)
        except Exception as error:
            if pieces and isinstance(error, TrainingError):  # this call's pieces do not go together
                return original(*args, **kwargs)
            if not is_out_of_memory(error):
                raise
            answer = self._answer(error, known, module, original, args, kwargs, before)
            if answer is None:
                raise
            return answer[0]
        if not pieces and known.failed is None:
            known.calls += 1
            if known.calls >= NOTED:
                self._quick[id(module)] = max(size, known.fitted)
        if size >= known.fitted and not pieces:
            known.went_through(size)
        return made

    def _goes_back(
        self, made: Any, known: _Known, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> bool:
        """Whether the backward pass from these outputs fits though their graph stays, or pieces are no answer."""
        try:
            if known.may_be_cut is None:
                reason = _why_not_here() or why_not_in_pieces(module, original, args, kwargs, _device_of(module))
                known.may_be_cut = reason is None
            if known.may_be_cut:
                rehearse_backward(module, made, retain_graph=True)
        except Exception as error:
            let_go_of_frames(error)
            return not is_out_of_memory(error)
        return True

    def _made_to_go_back(
        self,
        known: _Known,
        module: nn.Module,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
        before: ModuleState,
    ) -> Any:
        """The outputs of a call, whole if its backward pass fits as the graph goes, else in pieces that fit."""
        before.restore()
        release_unused(_device_of(module))
        try:
            rehearse_backward(module, original(*args, **kwargs))
        except Exception as error:
            if is_out_of_memory(error):
                unfit = ", which would have run out of memory"
                answer = self._answer(error, known, module, original, args, kwargs, before, unfit)
                if answer is not None:
                    return answer[0]
        before.restore()
        return original(*args, **kwargs)

    def _known_of(self, module: nn.Module) -> _Known | None:
        """None for a module without weights, such as a loss, and where calls are not what they seem."""
        try:
            both = self._known.get(module)
            if both is None:
                if next(module.parameters(), None) is None:
                    return None
                both = self._known[module] = (_Known(), _Known())
        except TypeError:  # the script's own __eq__ or __hash__
            return None
        return both[torch.is_grad_enabled()]

    def _answer(
        self,
        error: Exception,
        known: _Known,
        module: nn.Module,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
        before: ModuleState | None,
        unfit: str = "",
    ) -> tuple[Any] | None:
        """The outputs of a call that ran out of memory, made in pieces; None if it has to fail."""
        let_go_of_frames(error)
        try:
            if before is not None:
                before.restore()
            if (reason := _why_not_here()) is not None:
                self.why_not = reason
                return None
            made = self._in_fewest_pieces(known, module, original, args, kwargs)
        except Exception as fault:
            let_go_of_frames(fault)
            self.why_not = str(fault) if isinstance(fault, TrainingError) else first_line(fault)
            log.info("a forward pass is not made in pieces: %s", self.why_not)
            return None
        finally:
            release_unused(_device_of(module))
        self.why_not = None
        what = f", computed again in the backward pass{unfit}" if torch.is_grad_enabled() else " (without gradients)"
        undone = "" if before is not None else "; what the failed call had drawn stays drawn"
        pieces = known.pieces_for(_size(args, kwargs))
        self._note(f"the forward pass of {type(module).__name__} runs in {pieces} pieces{what}{undone}")
        return (made,)

    def _in_fewest_pieces(
        self, known: _Known, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """The outputs of a call in 2, 4, 8, … pieces, from what is known on. Raises TrainingError where none help."""
        device, samples, size = _device_of(module), batch_of(args, kwargs), _size(args, kwargs)
        release_unused(device)
        known.free_bytes, known.in_pieces = free_bytes(device), 0
        pieces = 2 * known.pieces_for(size)
        if not pieces:
            if (reason := why_not_in_pieces(module, original, args, kwargs, device)) is not None:
                raise TrainingError(reason)
            pieces = 2
        state = ModuleState(module, device)
        while True:
            pieces = min(pieces, samples)
            try:
                if torch.is_grad_enabled():
                    fits(module, original, args, kwargs, pieces, device)
                made = in_pieces(module, original, args, kwargs, pieces)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                let_go_of_frames(error)
                if pieces >= samples:
                    raise TrainingError("memory is too small even for one sample at a time") from None
            else:
                known.needs(pieces, size)
                return made
            state.restore()
            release_unused(device)
            pieces *= 2


def advice(error: BaseException, why_not: str | None, words: Sequence[str]) -> str:
    """One line on what would help a script that has ended by an out of memory."""
    why = (
        f"hotlap cannot make the forward pass in pieces, because {why_not}"
        if why_not is not None
        else "it did not happen in a forward pass, and nothing else can be made again"
    )
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")  # type: ignore[no-untyped-call]
    command = " ".join(("hotlap memory", *(words or ("train.py",))))
    return "; ".join([f"out of memory: {why}", *shortage(error, device).notes, f"what would help: {command}"])


def _why_not_here() -> str | None:
    is_under_mode = peek_interpreter_stack() is not None or dispatch_mode_count() > 0 or is_checkpointed()
    return "a transform or mode of torch is active" if is_under_mode else None


def _is_tight(module: nn.Module, held: int) -> bool:
    """Whether less is free than the gradients and once more what this call has taken; `held` was taken before it."""
    device = _device_of(module)
    weights = (weight for weight in module.parameters() if weight.requires_grad and weight.is_leaf)
    gradients = sum(weight.nbytes for weight in weights if weight.grad is None)
    return free_bytes(device) < gradients + max(0, held_bytes(device) - held)


def _size(args: Any, kwargs: Any) -> int:
    """Numbers in a call's tensors; those inside of containers are counted only where there are no others."""
    found = 0
    for one in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(one, Tensor):
            found += one.numel()
    return found or max(1, sum(one.numel() for one in leaves((args, kwargs))))


def _state_of(module: nn.Module) -> ModuleState | None:
    try:
        return ModuleState(module, _device_of(module))
    except Exception as error:  # such as an attribute that raises: the call goes without
        log.info("the state of %s cannot be noted: %s", type(module).__name__, first_line(error))
        return None


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
