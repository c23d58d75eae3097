"""Loaders beside the training loop, those of evaluations above all: they get the loop's feed too, where that pays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from hotlap.core.errors import first_line
from hotlap.core.plan import Feed
from hotlap.core.units import show_seconds
from hotlap.script.feed.serving import Serving
from hotlap.script.training import ScriptTraining
from hotlap.tuner.budget import Length

WHAT = "evaluation batches"
GATHER = Feed(kind="gather")
PROBED = 64
"""Samples that are read, nearly, to see whether another feed gives the same batches."""
SAVED = 0.5
"""Of what the script waits for batches, at the least what another feed saves."""
MOST_TOLD = 3
"""Loaders that are told of."""
LEAST_S = 0.01
"""Seconds of waiting an epoch below which nothing is done: that much may go by to see that data is as it was."""


@dataclass
class _Epochs:
    """What is known of the epochs of one loader."""

    first_at: int
    """Updates of the training before the first one."""
    begun: int = 0
    waited_s: float = 0.0
    """How long the script waited for batches in the epoch that was begun last."""
    batches: int = 0
    own_waited_s: float = 0.0
    """The same of the last one by the script's own feed."""
    own_batch_s: float | None = None
    """What a batch took by the script's own feed; None as long as no other one was given."""
    others: int = 0
    """Epochs by another feed; the first of them also holds the samples."""
    is_left_alone: bool = False
    why: str = ""
    """Why it has the script's own feed again."""

    @property
    def batch_s(self) -> float:
        """What a batch took in the epoch that was begun last."""
        return self.waited_s / max(1, self.batches)

    def begin(self) -> None:
        self.begun, self.waited_s, self.batches = self.begun + 1, 0.0, 0

    def still_to_come(self, steps: int, length: Length) -> float:
        """Epochs, with the one that begins now, at the pace of those so far; after so many updates."""
        between = (steps - self.first_at) / max(1, self.begun)
        return 1.0 + (max(0, length.updates - steps) / between if between else 0.0)


class Evaluating:
    """Told of the loaders of a script that are no part of its loop, gives them the feed that its loop has been given.

    From the second epoch of a loader on, and only where the holding of its samples costs less than it saves. While the
    samples of the loop are kept as they come by, so are those of the evaluation.
    """

    def __init__(self, training: ScriptTraining, length: Callable[[], Length]) -> None:
        self._training, self._length = training, length
        self._epochs: WeakKeyDictionary[Serving, _Epochs] = WeakKeyDictionary()
        self._given_to: list[tuple[Feed, _Epochs]] = []

    @property
    def lines(self) -> list[str]:
        """What was done, for people."""
        found = []
        for feed, epochs in self._given_to[:MOST_TOLD]:
            own, now = show_seconds(epochs.own_waited_s), show_seconds(epochs.waited_s)
            if epochs.is_left_alone:
                found.append(f"{WHAT} by the script's own feed: {epochs.why or f'{feed.kind} was no faster'}")
            else:
                found.append(f"{WHAT} by feed {feed.kind}: {own} of waiting an epoch before, {now} in the last one")
        return found

    def begun(self, serving: Serving, feed: Feed) -> None:
        """Told that a loader begins an epoch, and the feed that was settled on for the training so far."""
        epochs = self._epochs.setdefault(serving, _Epochs(self._training.steps))
        try:
            if epochs.batches and not epochs.is_left_alone:
                self._settle(serving, epochs, feed)
            if feed == self._training.own.feed and not epochs.is_left_alone:
                self._follow(serving)
        except Exception as error:  # whatever the user's dataset makes of being held
            epochs.is_left_alone = True
            serving.close()
            self._training.write_down(WHAT, "chosen", f"the script's own feed: {first_line(error)}")
        finally:
            epochs.begin()

    def served(self, serving: Serving, seconds: float) -> None:
        """Told that a loader gave a batch, for which the script waited so long."""
        epochs = self._epochs.get(serving)
        if epochs is not None:
            epochs.waited_s += seconds
            epochs.batches += 1

    def changed(self, serving: Serving, why: str) -> None:
        """Told that a loader has the script's own feed again, since its data changed."""
        epochs = self._epochs.get(serving)
        if epochs is not None:
            epochs.is_left_alone, epochs.own_batch_s, epochs.why = True, None, f"the data changed: {why}"
            self._training.write_down(WHAT, "chosen", f"the script's own feed again: {epochs.why}")

    def close(self) -> None:
        """Leave all of them as the script made them."""
        for serving in list(self._epochs):
            serving.close()
        self._epochs.clear()

    # --- one loader ------------------------------------------------------------------------------

    def _follow(self, serving: Serving) -> None:
        """Keep the samples that come by as long as those of the loop are kept, which may be held before long."""
        if any(one.keeps_samples for one in self._training.servings):
            self._place(serving)
            serving.learn()
        elif serving.keeps_samples:
            serving.tidy()

    def _place(self, serving: Serving) -> None:
        """Have its batches answered for where those of the loop are."""
        first = self._training.servings[0]
        serving.device, serving.sending = first.device, first.sending

    def _settle(self, serving: Serving, epochs: _Epochs, feed: Feed) -> None:
        if epochs.own_batch_s is None:
            if feed != self._training.own.feed:
                self._consider(serving, epochs, feed)
            return
        epochs.others += 1
        is_slower = epochs.others > 1 and epochs.batch_s > epochs.own_batch_s
        if feed == self._training.own.feed or is_slower:
            self._give_back(serving, epochs)

    def _consider(self, serving: Serving, epochs: _Epochs, wanted: Feed) -> None:
        began, coming = time.perf_counter(), epochs.still_to_come(self._training.steps, self._length())
        saved_s = SAVED * epochs.waited_s * coming
        check_s = epochs.batch_s / (serving.batch_size or 1) * PROBED
        if epochs.waited_s < LEAST_S or saved_s <= check_s:
            return
        self._place(serving)
        reasons, may_pay_later = [], False
        for feed in self._feeds(wanted):
            reason = serving.supports(feed)
            if reason is None and serving.holding_s(feed) + check_s >= saved_s:
                may_pay_later = True  # a training may be longer than it seems
                continue
            reason = reason or serving.why_other(feed)
            if reason is None:
                serving.use(feed)
                serving.tidy()
                self._given(serving, epochs, coming, time.perf_counter() - began)
                return
            reasons.append(f"{feed.kind}: {reason}")
        serving.close()
        epochs.is_left_alone = not may_pay_later
        if reasons and epochs.is_left_alone:
            self._training.write_down(WHAT, "chosen", f"the script's own feed; {'; '.join(reasons)}")

    def _feeds(self, feed: Feed) -> list[Feed]:
        """The feeds to try, best first; workers of its own are not worth an evaluation."""
        if feed.kind == "loader":
            return []
        # What is made in inference mode is not answered for on the device: nobody counts who writes to it.
        return [GATHER] if feed.kind == "gather" or torch.is_inference_mode_enabled() else [feed, GATHER]

    def _given(self, serving: Serving, epochs: _Epochs, coming: float, cost_s: float) -> None:
        self._given_to.append((serving.wanted, epochs))
        why = f"by feed {serving.wanted.kind}: {show_seconds(epochs.waited_s)} of waiting an epoch by the script's own"
        figures = {"waited_s": epochs.waited_s, "batches": epochs.batches, "epochs_to_come": coming}
        self._training.write_down(WHAT, "chosen", why, figures=figures, cost_s=cost_s)
        epochs.own_waited_s, epochs.own_batch_s = epochs.waited_s, epochs.batch_s

    def _give_back(self, serving: Serving, epochs: _Epochs) -> None:
        figures = {"batch_s": epochs.batch_s, "own_batch_s": epochs.own_batch_s or 0.0}
        serving.close()
        epochs.is_left_alone, epochs.own_batch_s = True, None
        self._training.write_down(WHAT, "chosen", "by the script's own feed again", figures=figures)
