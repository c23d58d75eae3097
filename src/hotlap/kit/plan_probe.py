"""Runs a script under a plan of hotlap for the length of a probe: its own plan, with one thing changed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from hotlap.core.plan import Feed, Numerics, Plan
from hotlap.data.batches import map_tensors
from hotlap.engine.precision import precision_context
from hotlap.kit.probe import ProbeRequest
from hotlap.script.session import WATCHED_STEPS, Session, Settings
from hotlap.script.training import ScriptTraining
from hotlap.store.files import save_plan

FEEDS = ("gather", "stream", "resident")
"""Ways to bring batches that are not a loader's."""
SETTLES = 3
"""Updates under the plan before anything is timed."""
MOST_UNFOUND = 16
"""Updates after which a loop that was not found is no longer waited for."""


class PlanProbe:
    """Has a script obey a plan as `hotlap run --plan FILE` would, and tells whether it does."""

    def __init__(self, name: str, request: ProbeRequest, folder: Path) -> None:
        """`folder` is for what a run leaves, and is thrown away with it."""
        self._request, self._folder = request, folder
        self._session = Session(Settings(name=name, plan=self._named, out=folder / "run"))
        self._training: ScriptTraining | None = None
        self._plan = Plan()
        self._refusal: str | None = None
        self._asked_at = 0.0
        self._held_s: float | None = None
        self._updates = self._settled = 0
        self.refused: dict[str, str] = {}
        """Kinds of feed that its batches cannot come by, and why."""
        self.start_s: float | None = None
        """Until the first batch under the plan was there, with the time to hold data; None where none came yet."""

    def start(self) -> None:
        """Begin. What is to be told of an update after the session was has to be hooked in later than this."""
        self._session.start()

    def _named(self, training: ScriptTraining) -> str:
        """The session has found the training, and asks for a plan file."""
        self._asked_at, self._training = time.perf_counter(), training
        own, request = training.own, self._request
        if request.feed is not None:
            plans = {kind: own.with_feed(Feed(kind=kind)) for kind in FEEDS}
            reasons = {kind: training.supports(plan) for kind, plan in plans.items()}
            self.refused = {kind: reason for kind, reason in reasons.items() if reason is not None}
            self._plan = plans[request.feed]
        else:
            self._plan = own.but(precision=request.precision)
        self._refusal = training.supports(self._plan)
        path = self._folder / "plan.toml"
        save_plan(self._plan if self._refusal is None else own, path)
        return str(path)

    def stepped(self) -> None:
        """Told that the script has made an update."""
        self._updates += 1
        training = self._training
        if training is None:
            return
        if self._held_s is None:
            self._held_s = time.perf_counter() - self._asked_at
        elif not any(proxy.waiting for proxy in training.proxies):
            self._settled += 1

    def gave(self, seconds: float) -> None:
        """Told that the script was given a batch, for which it waited so long."""
        training = self._training
        if training is None or self._held_s is None or self.start_s is not None:
            return
        if not any(proxy.waiting for proxy in training.proxies):
            self.start_s = self._held_s + seconds

    @property
    def has_settled(self) -> bool:
        """Whether the script has trained under the plan for some updates, so that laps are of that alone."""
        training = self._training
        # On a GPU a session looks for waits first, which takes time.
        looks = WATCHED_STEPS if training is not None and training.device.type == "cuda" else 0
        return self._settled >= SETTLES + looks

    def cast_here(self) -> None:
        """From here on modules are cast by this: a session leaves their calls alone while operations are looked at."""
        precision, training = self._request.precision, self._training
        if precision is not None and training is not None:
            numerics = Numerics(precision=precision)
            for module in training.modules:
                vars(module)["forward"] = _cast(module.forward, precision_context(numerics, training.device, [module]))

    def why_given_up(self) -> str | None:
        """Why the script does not obey, as far as that shows at once; None where it does, or may yet."""
        if self._refusal is not None:
            return self._refusal
        if self._session.is_tuning or (self._training is None and self._updates < MOST_UNFOUND):
            return None
        return "hotlap does not find its training loop" if self._training is None else self._session.so_far()[-1]

    def why_not_probed(self) -> str | None:
        """Why what was seen was not the script under the plan, looked at in every way; None where it was."""
        training, plan = self._training, self._plan
        reason = self.why_given_up()
        if reason is not None:
            return reason
        if training is None or not self.has_settled:
            return "the script is over before it could be"
        # What a call is made in shows only once it was made: under an autocast of the script's own, for one.
        reason = training.supports(plan) or training.given_up
        if reason is None and self._request.feed is not None:
            if any(proxy.feed != plan.feed for proxy in training.proxies):
                return "its batches came by its own loader all the same"
            reason = next(filter(None, (proxy.why_other(plan.feed) for proxy in training.proxies)), None)
        return reason


def _cast(forward: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """A forward pass under autocast, which gives the script's own numbers back."""

    @functools.wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with context():
            outputs = forward(*args, **kwargs)
        return map_tensors(outputs, _widened)

    return cast


def _widened(output: Tensor) -> Tensor:
    return output.float() if output.is_floating_point() and output.element_size() < 4 else output
