"""Gives loaders outside the training loop, such as those of evaluations, the loop's feed where that pays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from hotlap.core.errors import first_line
from hotlap.core.plan import Feed
from hotlap.core.units import show_seconds
from hotlap.script.feed.loader_proxy import LoaderProxy
from hotlap.script.training import ScriptTraining
from hotlap.tuner.budget import Length

WHAT = "evaluation batches"
GATHER = Feed(kind="gather")
PROBED = 64
"""About how many samples a check of another feed reads."""
SAVED = 0.5
"""Share of the waiting time that another feed saves, at least."""
MOST_LISTED = 3
"""Loaders that the report lists."""
LEAST_S = 0.01
"""Seconds of waiting an epoch below which hotlap does nothing: checking the data can cost as much."""


@dataclass
class _Epochs:
    """Measurements of the epochs of one loader."""

    first_at: int
    """Updates of the training before the first epoch."""
    begun: int = 0
    waited_s: float = 0.0
    """Seconds that the script waited for batches in the latest epoch."""
    batches: int = 0
    own_waited_s: float = 0.0
    """The same for the last epoch with the script's own feed."""
    own_batch_s: float | None = None
    """Seconds a batch with the script's own feed; None until another feed is used."""
    others: int = 0
    """Epochs with another feed; the first of them also loads the samples."""
    is_left_alone: bool = False
    why: str = ""
    """Why it has its own feed again."""

    @property
    def batch_s(self) -> float:
        """Seconds a batch in the latest epoch."""
        return self.waited_s / max(1, self.batches)

    def begin(self) -> None:
        self.begun, self.waited_s, self.batches = self.begun + 1, 0.0, 0

    def still_to_come(self, steps: int, length: Length) -> float:
        """Expected epochs from now on, including the one that begins, at the pace so far."""
        between = (steps - self.first_at) / max(1, self.begun)
        return 1.0 + (max(0, length.updates - steps) / between if between else 0.0)


class EvaluationFeed:
    """Follows the loaders outside the training loop, and gives them the loop's feed.

    That begins with a loader's second epoch, and only if loading its samples costs less than it saves. While the loop
    keeps passing samples, so do these loaders.
    """

    def __init__(self, training: ScriptTraining, length: Callable[[], Length]) -> None:
        self._training, self._length = training, length
        self._epochs: WeakKeyDictionary[LoaderProxy, _Epochs] = WeakKeyDictionary()
        self._given_to: list[tuple[Feed, _Epochs]] = []

    @property
    def lines(self) -> list[str]:
        """The results, as lines for the report."""
        found = []
        for feed, epochs in self._given_to[:MOST_LISTED]:
            own, now = show_seconds(epochs.own_waited_s), show_seconds(epochs.waited_s)
            if epochs.is_left_alone:
                found.append(f"{WHAT} by the script's own feed: {epochs.why or f'{feed.kind} was no faster'}")
            else:
                found.append(f"{WHAT} by feed {feed.kind}: {own} of waiting an epoch before, {now} in the last one")
        return found

    def epoch_began(self, proxy: LoaderProxy, feed: Feed) -> None:
        """A loader begins an epoch; `feed` is the training's best feed so far."""
        epochs = self._epochs.setdefault(proxy, _Epochs(self._training.steps))
        try:
            if epochs.batches and not epochs.is_left_alone:
                self._settle(proxy, epochs, feed)
            if feed == self._training.own.feed and not epochs.is_left_alone:
                self._follow(proxy)
        except Exception as error:  # holding the user's dataset may raise anything
            epochs.is_left_alone = True
            proxy.close()
            self._training.write_down(WHAT, "chosen", f"the script's own feed: {first_line(error)}")
        finally:
            epochs.begin()

    def batch_given(self, proxy: LoaderProxy, seconds: float) -> None:
        """A loader gave a batch, after the script waited so many seconds."""
        epochs = self._epochs.get(proxy)
        if epochs is not None:
            epochs.waited_s += seconds
            epochs.batches += 1

    def data_changed(self, proxy: LoaderProxy, why: str) -> None:
        """A loader's data changed, so it uses the script's own feed again."""
        epochs = self._epochs.get(proxy)
        if epochs is not None:
            epochs.is_left_alone, epochs.own_batch_s, epochs.why = True, None, f"the data changed: {why}"
            self._training.write_down(WHAT, "chosen", f"the script's own feed again: {epochs.why}")

    def close(self) -> None:
        for proxy in list(self._epochs):
            proxy.close()
        self._epochs.clear()

    # --- one loader ------------------------------------------------------------------------------

    def _follow(self, proxy: LoaderProxy) -> None:
        """Keep passing samples while the loop does, since the loop may soon hold its samples."""
        if any(one.keeps_samples for one in self._training.proxies):
            self._place(proxy)
            proxy.learn()
        elif proxy.keeps_samples:
            proxy.tidy()

    def _place(self, proxy: LoaderProxy) -> None:
        """Use the device and the copies of the loop's loader."""
        first = self._training.proxies[0]
        proxy.device, proxy.device_copies = first.device, first.device_copies

    def _settle(self, proxy: LoaderProxy, epochs: _Epochs, feed: Feed) -> None:
        if epochs.own_batch_s is None:
            if feed != self._training.own.feed:
                self._consider(proxy, epochs, feed)
            return
        epochs.others += 1
        is_slower = epochs.others > 1 and epochs.batch_s > epochs.own_batch_s
        if feed == self._training.own.feed or is_slower:
            self._give_back(proxy, epochs)

    def _consider(self, proxy: LoaderProxy, epochs: _Epochs, wanted: Feed) -> None:
        began, coming = time.perf_counter(), epochs.still_to_come(self._training.steps, self._length())
        saved_s = SAVED * epochs.waited_s * coming
        check_s = epochs.batch_s / (proxy.batch_size or 1) * PROBED
        if epochs.waited_s < LEAST_S or saved_s <= check_s:
            return
        self._place(proxy)
        reasons, may_pay_later = [], False
        for feed in self._feeds(wanted):
            reason = proxy.supports(feed)
            if reason is None and proxy.holding_s(feed) + check_s >= saved_s:
                may_pay_later = True  # the training may last longer than expected
                continue
            reason = reason or proxy.why_other(feed)
            if reason is None:
                proxy.use(feed)
                proxy.tidy()
                self._given(proxy, epochs, coming, time.perf_counter() - began)
                return
            reasons.append(f"{feed.kind}: {reason}")
        proxy.close()
        epochs.is_left_alone = not may_pay_later
        if reasons and epochs.is_left_alone:
            self._training.write_down(WHAT, "chosen", f"the script's own feed; {'; '.join(reasons)}")

    def _feeds(self, feed: Feed) -> list[Feed]:
        """The feeds to try, best first; extra workers do not pay for an evaluation."""
        if feed.kind == "loader":
            return []
        # DeviceCopies cannot answer for inference tensors: torch does not count writes to them.
        return [GATHER] if feed.kind == "gather" or torch.is_inference_mode_enabled() else [feed, GATHER]

    def _given(self, proxy: LoaderProxy, epochs: _Epochs, coming: float, cost_s: float) -> None:
        self._given_to.append((proxy.wanted, epochs))
        why = f"by feed {proxy.wanted.kind}: {show_seconds(epochs.waited_s)} of waiting an epoch by the script's own"
        figures = {"waited_s": epochs.waited_s, "batches": epochs.batches, "epochs_to_come": coming}
        self._training.write_down(WHAT, "chosen", why, figures=figures, cost_s=cost_s)
        epochs.own_waited_s, epochs.own_batch_s = epochs.waited_s, epochs.batch_s

    def _give_back(self, proxy: LoaderProxy, epochs: _Epochs) -> None:
        figures = {"batch_s": epochs.batch_s, "own_batch_s": epochs.own_batch_s or 0.0}
        proxy.close()
        epochs.is_left_alone, epochs.own_batch_s = True, None
        self._training.write_down(WHAT, "chosen", "by the script's own feed again", figures=figures)
