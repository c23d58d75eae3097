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
"""Feeds other than a DataLoader."""
SETTLES = 3
"""Updates under the plan before timing."""
MOST_UNFOUND = 16
"""Updates within which hotlap has to find the loop."""


class PlanProbe:
    """Runs a script under a plan as `hotlap run --plan FILE` does, and reports whether it obeys."""

    def __init__(self, name: str, request: ProbeRequest, folder: Path) -> None:
        """`folder` holds the run folder, and goes with the probe."""
        self._request, self._folder = request, folder
        self._session = Session(Settings(name=name, plan=self._named, out=folder / "run"))
        self._training: ScriptTraining | None = None
        self._plan = Plan()
        self._refusal: str | None = None
        self._asked_at = 0.0
        self._held_s: float | None = None
        self._updates = self._settled = 0
        self.refused: dict[str, str] = {}
        """Feeds that hotlap cannot bring its batches by, with reasons."""
        self.start_s: float | None = None
        """Seconds until the first batch under the plan, with the time to hold data; None before that."""

    def start(self) -> None:
        """Start the session. Hooks that have to run after the session's come later."""
        self._session.start()

    def _named(self, training: ScriptTraining) -> str:
        """Give the session a plan file, once it has found the training."""
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
        """Note an update of the script."""
        self._updates += 1
        training = self._training
        if training is None:
            return
        if self._held_s is None:
            self._held_s = time.perf_counter() - self._asked_at
        elif not any(proxy.waiting for proxy in training.proxies):
            self._settled += 1

    def gave(self, seconds: float) -> None:
        """Note a batch of the script, and how long the script has waited for it."""
        training = self._training
        if training is None or self._held_s is None or self.start_s is not None:
            return
        if not any(proxy.waiting for proxy in training.proxies):
            self.start_s = self._held_s + seconds

    @property
    def has_settled(self) -> bool:
        """Whether the script has made some updates under the plan, so that laps are of the plan alone."""
        training = self._training
        # On a GPU a session looks for waits first, which takes time.
        looks = WATCHED_STEPS if training is not None and training.device.type == "cuda" else 0
        return self._settled >= SETTLES + looks

    def cast_here(self) -> None:
        """Cast the modules from here on: a session leaves their calls alone while operations are counted."""
        precision, training = self._request.precision, self._training
        if precision is not None and training is not None:
            numerics = Numerics(precision=precision)
            for module in training.modules:
                vars(module)["forward"] = _cast(module.forward, precision_context(numerics, training.device, [module]))

    def why_given_up(self) -> str | None:
        """Why the script does not obey, if that shows at once; None if it does, or still may."""
        if self._refusal is not None:
            return self._refusal
        if self._session.is_tuning or (self._training is None and self._updates < MOST_UNFOUND):
            return None
        return "hotlap does not find its training loop" if self._training is None else self._session.so_far()[-1]

    def why_not_probed(self) -> str | None:
        """Why the probe has not seen the script under the plan; None if it has."""
        training, plan = self._training, self._plan
        reason = self.why_given_up()
        if reason is not None:
            return reason
        if training is None or not self.has_settled:
            return "the script ended before it ran under the plan"
        # The precision of a call shows only at the call: the script may have its own autocast.
        reason = training.supports(plan) or training.given_up
        if reason is None and self._request.feed is not None:
            if any(proxy.feed != plan.feed for proxy in training.proxies):
                return "its batches still come by its own loader"
            reason = next(filter(None, (proxy.why_other(plan.feed) for proxy in training.proxies)), None)
        return reason


def _cast(forward: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """A forward pass under autocast, with outputs in the script's own precision."""

    @functools.wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with context():
            outputs = forward(*args, **kwargs)
        return map_tensors(outputs, _widened)

    return cast


def _widened(output: Tensor) -> Tensor:
    return output.float() if output.is_floating_point() and output.element_size() < 4 else output
