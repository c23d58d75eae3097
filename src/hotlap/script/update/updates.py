"""The steps of a script's optimizers under a plan, and the comparison of such steps with the script's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotlap.core.errors import first_line
from hotlap.core.object_memory import ObjectMemory
from hotlap.core.torch_private import is_multithreading_enabled, set_multithreading_enabled, step_post_hooks_of_all
from hotlap.engine.capture.recording import Recorder
from hotlap.engine.layout import BufferPool
from hotlap.engine.optimizers import (
    Fusion,
    LayoutCheck,
    has_sparse_gradients,
    is_fused,
    settle_counts,
    start_momenta,
    why_not_fused,
)
from hotlap.engine.snapshot import Randomness
from hotlap.script.calls.eager import TOGETHER, trains_with_others
from hotlap.script.loop_finder import WHY
from hotlap.script.patches import Patches
from hotlap.script.update.capture import (
    CapturedUpdate,
    SharedInputs,
    parameters_of,
    restore_driver_checks,
    skip_driver_checks,
    step_without_hooks,
    why_unknown,
)
from hotlap.script.update.clipping import Clipping
from hotlap.tuner.agreement import GRAIN, SAME, Parts, brought_near, gaps_between, percent

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a step, which a hook before it may replace."""


@dataclass(frozen=True)
class _Way:
    """How the steps of one optimizer are made, if not as the script has set them."""

    fusion: Fusion
    fused: bool
    changes: bool
    """Whether the kind of step differs from the script's own."""
    captured: CapturedUpdate | None
    layout: LayoutCheck

    def set(self, optimizer: Optimizer) -> None:
        """Change the optimizer's settings for its next step."""
        self.fusion.set(self.fused, captured=self.update is not None)
        start_momenta(optimizer)
        skip_driver_checks(optimizer)

    @property
    def update(self) -> CapturedUpdate | None:
        """The captured steps, as long as they work; else None."""
        return self.captured if self.captured is not None and self.captured.given_up is None else None


class Updates:
    """Makes the steps of some optimizers with fused kernels, by replays, or as the script has set them.

    There may be no optimizer: a script that updates its weights itself continues to do so. hotlap changes settings only
    for the time of a step, so the script always finds its own.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        make_recorder: Callable[[torch.device], Recorder] | None = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self.own = "fused" if self.optimizers and all(is_fused(one) for one in self.optimizers) else "plain"
        self._why_not_fused = functools.cache(why_not_fused)
        self._fusions: dict[int, Fusion] = {}
        self._pools: dict[int, BufferPool] = {}
        self._plan = (self.own, False)
        self._ways: dict[int, _Way] = {}
        self._left_alone: set[int] = set()
        self._before: OptimizerSettings | None = None
        self._hooks: list[Any] = []
        self._shared_inputs = SharedInputs()
        self._make_recorder = make_recorder
        self._recorders: dict[torch.device, Recorder] = {}
        self._captures: dict[tuple[int, bool], CapturedUpdate] = {}
        self._clipping = Clipping(self._shared_inputs, self._recorder_on)

    # --- plans -----------------------------------------------------------------------------------

    def supports(self, kind: str) -> str | None:
        """Why no optimizer can make such steps; None if at least one can."""
        if kind == self.own:
            return None
        if not self.optimizers:
            return WHY
        if kind == "plain":
            return "the script has fused its optimizer itself"
        if trains_with_others():
            return TOGETHER
        reasons = [self._why_not_fused(optimizer) for optimizer in self.optimizers]
        return None if None in reasons else reasons[0]

    def use(self, kind: str, *, captured: bool = False) -> None:
        """Make such steps from the next one on; `captured`: by replays where possible."""
        if (kind, captured) == self._plan:
            return
        self._plan = (kind, captured)
        self._put_back()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ways = {}
        self._left_alone.clear()
        for one in self.optimizers:
            fused, changes = self._fuses(one, kind), self._changes(one, kind)
            update = self._capture_of(one, fused) if captured else None
            if update is None and not changes:
                settle_counts(one, self._pool_of(one))
                continue
            if id(one) not in self._fusions:
                self._fusions[id(one)] = Fusion(one, self._pool_of(one))
            self._ways[id(one)] = _Way(self._fusions[id(one)], fused, changes, update, LayoutCheck(one))
            self._hooks.append(one.register_state_dict_pre_hook(self._as_the_script_has_it))

    @property
    def clipping(self) -> Clipping | None:
        """What clips gradients under the plan in force; None if torch does."""
        return self._clipping if self._plan[1] else None

    @property
    def warmup_steps(self) -> int:
        """Steps and clippings so far that ran slower than the plan in force will."""
        updates = [way.captured for way in self._ways.values() if way.captured is not None]
        return sum(update.warmup_steps for update in updates) + (self._clipping.warmup_steps if self._plan[1] else 0)

    @property
    def uncaptured(self) -> str | None:
        """Why some steps are not captured although the plan captures; None if all are."""
        found = [way.captured.given_up for way in self._ways.values() if way.captured is not None]
        return next(filter(None, found), None)

    def tidy(self) -> None:
        """Release everything that belongs to plans other than the one in force."""
        used = [way.captured for way in self._ways.values()]
        for update in self._captures.values():
            if update not in used:
                update.forget()
        if not self._plan[1]:
            self._let_go()

    def close(self) -> None:
        self.use(self.own)
        self._put_back()
        for update in self._captures.values():
            update.forget()
        self._let_go()
        for pool in self._pools.values():
            pool.forget()
        self._pools.clear()
        self._fusions.clear()

    def why_other(self, kind: str, *, captured: bool = False) -> str | None:
        """How a step of that kind, made right after one of the script's, differs from the script's own; None if it does
        not.

        The trial uses the current gradients and has no lasting effects. If only the replay differs or fails, such steps
        will not be captured.
        """
        for one in self.optimizers:
            if self._changes(one, kind):
                reason = why_fused_differs(one)
                if reason is not None:
                    return reason
            fused = self._fuses(one, kind)
            update = self._capture_of(one, fused) if captured else None
            if update is not None and update.given_up is None:
                reason = why_captured_differs(one, update, fused=fused)
                if reason is not None:
                    update.give_up(reason)
        return None

    # --- steps -----------------------------------------------------------------------------------

    def replayed(self, optimizer: Optimizer) -> bool:
        """Make a step by a replay if one fits; False if nothing was done."""
        way = self._ways.get(id(optimizer))
        if way is None or self._before is not None or id(optimizer) in self._left_alone:
            return False
        update = way.update
        return update is not None and update.replayed()

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...] = (), kwargs: Any = None) -> Given | None:
        """Called before a step, with its arguments.

        After a replay, returns arguments that make torch's own step do nothing.
        """
        way = self._ways.get(id(optimizer))
        if way is None or id(optimizer) in self._left_alone:
            return None
        if self._before is not None:
            self._put_back()  # the last step has raised
        if way.changes and has_sparse_gradients(optimizer):
            return None  # fused kernels do not take them
        update = way.update
        is_alone = (len(args) <= 1 and not kwargs) or all(arg is None for arg in (*args[1:], *(kwargs or {}).values()))
        if update is not None and is_alone and update.replayed():
            return (update.idle,), {}
        if way.changes and not way.layout.matches_weights():  # a replay checks addresses of gradients itself
            return None
        self._before = OptimizerSettings(optimizer)
        way.set(optimizer)
        if update is not None and is_alone and self._replayed_after_all(optimizer, way, update):
            return (update.idle,), {}
        if way.update is None and not way.changes:
            self._put_back()
            settle_counts(optimizer, self._pool_of(optimizer))
            self._left_alone.add(id(optimizer))
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        if self._before is not None and self._before.optimizer is optimizer:
            self._put_back()

    def _replayed_after_all(self, optimizer: Optimizer, way: _Way, update: CapturedUpdate) -> bool:
        """Try again to replay a step, with counts where the graph reads them, or after recording it."""
        settings = self._before
        assert settings is not None
        if update.recorded:
            settings.restore()
            if update.replayed_after_all():
                return True
            way.set(optimizer)
        graph = update.prepare()
        if graph is not None:
            settings.restore()
            if update.taken(graph):
                return True
        way.set(optimizer)
        return False

    def _put_back(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.restore()

    # --- optimizers --------------------------------------------------------------------------

    def _changes(self, optimizer: Optimizer, kind: str) -> bool:
        return kind != self.own and self._why_not_fused(optimizer) is None

    def _fuses(self, optimizer: Optimizer, kind: str) -> bool:
        return self._changes(optimizer, kind) or is_fused(optimizer)

    def _capture_of(self, optimizer: Optimizer, fused: bool) -> CapturedUpdate | None:
        """The captured steps of an optimizer; None if it cannot have any."""
        parameters = parameters_of(optimizer)
        if not parameters or (self._make_recorder is None and parameters[0].device.type != "cuda"):
            return None
        if not fused and any(group.get("fused") for group in optimizer.param_groups):
            return None  # the script has fused some of its groups
        key = (id(optimizer), fused)
        if key not in self._captures:
            make = functools.partial(self._recorder_of, optimizer)
            self._captures[key] = CapturedUpdate(optimizer, make_recorder=make, shared_inputs=self._shared_inputs)
        return self._captures[key]

    def _recorder_of(self, optimizer: Optimizer) -> Recorder:
        recorder = self._recorder_on(parameters_of(optimizer)[0].device)
        assert recorder is not None
        return recorder

    def _recorder_on(self, device: torch.device) -> Recorder | None:
        """The recorder of a device; None if it has none."""
        if self._make_recorder is None and device.type != "cuda":
            return None
        if device not in self._recorders:
            self._recorders[device] = (self._make_recorder or Recorder)(device)
        return self._recorders[device]

    def _let_go(self) -> None:
        self._clipping.forget()
        self._recorders.clear()
        self._shared_inputs.clear()

    def _pool_of(self, optimizer: Optimizer) -> BufferPool:
        if id(optimizer) not in self._pools:
            self._pools[id(optimizer)] = BufferPool()
            # Recordings find counts at their addresses, whatever state they were asked for in between.
            self._pools[id(optimizer)].keeps = True
        return self._pools[id(optimizer)]

    def _as_the_script_has_it(self, optimizer: Optimizer) -> None:
        self._put_back()  # the last step has raised
        settle_counts(optimizer, self._pool_of(optimizer))


# --- shortcuts ---------------------------------------------------------------------------
#
# Replayed steps and `zero_grad`, without what torch does around them for profilers and hooks.


class Shortcuts:
    """Replaces `step` and `zero_grad` of some optimizers: torch's code around them costs as much as a replay."""

    def __init__(self, replayed: Callable[[Optimizer], bool]) -> None:
        """`replayed` makes a step by a replay, and reports it; False if it did nothing."""
        self._replayed = replayed
        self._patches = Patches()
        self._ours: dict[int, Optimizer] = {}

    def put(self, optimizers: Sequence[Optimizer]) -> None:
        """Install the patches for those optimizers that are torch's own."""
        if self._ours:
            return
        self._ours = {id(one): one for one in optimizers if why_unknown(one) is None}
        if self._ours:
            self._patches.put(Optimizer, "zero_grad", self._zero_grad)
        for kind in {type(one) for one in self._ours.values()}:
            self._patches.put(kind, "step", self._step)

    def take_out(self) -> None:
        """Restore torch."""
        if self._ours:
            self._patches.take_out_all()
            self._ours = {}

    def _zero_grad(self, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            if set_to_none is not True or id(optimizer) not in self._ours or torch.compiler.is_compiling():
                own(optimizer, set_to_none)
                return
            for parameter in parameters_of(optimizer):
                parameter.grad = None

        return zero_grad

    def _step(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            alone = not args and not kwargs and len(step_post_hooks_of_all) <= 1
            if alone and id(optimizer) in self._ours and self._replayed(optimizer):
                return None
            return own(optimizer, *args, **kwargs)

        step.__wrapped__ = getattr(own, "__wrapped__", own)  # without torch's hooks
        return step


# --- the thread of backward passes -------------------------------------------------------


class BackwardThread:
    """Lets autograd run in the thread that calls it, or as the script has it.

    torch gives each GPU its own thread. Waking it and being woken costs the host more than a replay: 0.2 ms of a step
    of 1.3 ms, measured on an H200. With one GPU, two threads have nothing to do in parallel, except what the script
    does in Python while it waits.
    """

    def __init__(self) -> None:
        self._was: bool | None = None

    def use(self, *, here: bool) -> None:
        """Applies from the next backward pass on; call it in the script's thread."""
        if here and self._was is None:
            self._was = is_multithreading_enabled()
            set_multithreading_enabled(False)
        elif not here and self._was is not None:
            set_multithreading_enabled(self._was)
            self._was = None


# --- comparing steps ---------------------------------------------------------------------


SCALES = "_step_supports_amp_scaling"
"""The attribute that tells GradScaler, before a step, that the optimizer unscales gradients itself."""
TRIED = 2
"""Steps to compare: the second one uses the state that the first leaves."""


class OptimizerSettings:
    """What the script sees of an optimizer: settings of its groups, and what GradScaler reads."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        names = ("fused", "foreach", "capturable")
        self._settings = [{k: group[k] for k in names if k in group} for group in optimizer.param_groups]
        self._scales = vars(optimizer).get(SCALES)

    def restore(self) -> None:
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=False):
            group.update(settings)
        if self._scales is None:
            vars(self.optimizer).pop(SCALES, None)
        else:
            setattr(self.optimizer, SCALES, self._scales)
        restore_driver_checks(self.optimizer)


def why_fused_differs(optimizer: Optimizer) -> str | None:
    """How fused steps differ from plain ones by more than rounding; None if they do not."""
    return _why_differ(optimizer, _moved(optimizer, fused=False), _moved(optimizer, fused=True))


def why_captured_differs(optimizer: Optimizer, update: CapturedUpdate, *, fused: bool) -> str | None:
    """Why replays cannot make such steps, or how they differ from the optimizer's own; None if they are the same."""
    if not any(tensor.grad is not None for _, tensor in _named(optimizer)):
        return None  # nothing to compare yet; recording will tell
    try:
        truth = _moved(optimizer, fused=is_fused(optimizer))
        with _set_aside(optimizer) as aside:
            Fusion(optimizer).set(fused, captured=True)
            skip_driver_checks(optimizer)
            step_without_hooks(optimizer)
            reason = update.why_not()
            if reason is not None:
                return reason
            graph = update.recorded_step()
            graph.settle()
            for _ in range(TRIED - 1):
                aside.renew_gradients()
                graph.replay()
            made = _moves(optimizer, aside.weights)
    except Exception as error:  # any failure is a reason
        return f"it cannot be recorded: {first_line(error)}"
    return _why_differ(optimizer, truth, made)


def _moved(optimizer: Optimizer, *, fused: bool) -> Parts:
    with _set_aside(optimizer) as aside:
        Fusion(optimizer).set(fused)
        skip_driver_checks(optimizer)
        for _ in range(TRIED):
            aside.renew_gradients()
            step_without_hooks(optimizer)
        return _moves(optimizer, aside.weights)


def _moves(optimizer: Optimizer, before: dict[str, Tensor]) -> Parts:
    now, was = brought_near(dict(_named(optimizer)), before)
    return {name: tensor - was[name] for name, tensor in now.items()}


def _why_differ(optimizer: Optimizer, truth: Parts, made: Parts) -> str | None:
    weights = {name: tensor.detach() for name, tensor in _named(optimizer)}
    sizes = gaps_between(weights, {})
    for name, gap in gaps_between(truth, made).items():
        grain = GRAIN * sizes[name].size * torch.finfo(weights[name].dtype).eps
        if not gap.error <= max(SAME * gap.size, grain):
            return f"the update of {name} differs by {percent(gap.relative)}"
    return None


class _SavedWeights:
    """Copies of an optimizer's weights and gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.weights = {name: tensor.detach().clone() for name, tensor in _named(optimizer)}
        self._gradients = {
            name: tensor.grad.detach().clone() for name, tensor in _named(optimizer) if tensor.grad is not None
        }

    @torch.no_grad()
    def renew_gradients(self) -> None:
        """Restore gradients in place: some steps change them (SGD with Nesterov momentum, foreach)."""
        for name, tensor in _named(self._optimizer):
            if name in self._gradients and tensor.grad is not None:
                tensor.grad.copy_(self._gradients[name])


@contextmanager
def _set_aside(optimizer: Optimizer) -> Iterator[_SavedWeights]:
    """Inside, steps may be made; afterwards weights, state, settings and random generators are restored, in place."""
    settings, aside, states, memory = (
        OptimizerSettings(optimizer),
        _SavedWeights(optimizer),
        dict(optimizer.state),
        memory_of(optimizer),
    )
    randomness = Randomness(next((tensor.device for _, tensor in _named(optimizer)), torch.device("cpu")))
    try:
        yield aside
    finally:
        settings.restore()
        for parameter in set(optimizer.state) - set(states):
            del optimizer.state[parameter]
        memory.restore()
        randomness.restore()
        aside.renew_gradients()
        with torch.no_grad():
            for name, tensor in _named(optimizer):
                tensor.copy_(aside.weights[name])


def memory_of(optimizer: Optimizer) -> ObjectMemory:
    """Everything that an optimizer remembers besides its parameters: state, settings of its groups, attributes."""
    roots = {"optimizer": optimizer, "groups": optimizer.param_groups, "state": list(optimizer.state.values())}
    return ObjectMemory(roots, [parameter for _, parameter in _named(optimizer)])


def _named(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield f"parameter {number}.{place}", parameter
