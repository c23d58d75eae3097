"""What would lower the peak memory of a training: predicted from one update, and tried if possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from hotlap.core.units import show_bytes, show_seconds
from hotlap.kit.search import Trial
from hotlap.monitor.savings import (
    ModelFacts,
    Saving,
    Update,
    checkpointed,
    half_precision,
    smaller_pieces,
    smaller_samples,
)


class Trials(Protocol):
    """Tries real updates of a training: a job in this process, or a script in a new process each time.

    A saving that it returns has no prediction.
    """

    def of_size(self, size: int, timed: bool) -> Trial:
        """Updates with so many samples at once."""

    def in_pieces(self, size: int) -> Saving:
        """Updates of the same samples, so many at once."""

    def checkpointed(self, blocks: int) -> Saving:
        """Updates with checkpointed blocks."""

    def in_precision(self, precision: str) -> Saving:
        """Updates under autocast."""


def savings(update: Update, model: ModelFacts, trials: Trials | None = None) -> list[Saving]:
    """What would lower the peak of this update, with reasons for what is impossible; without `trials`, predicted."""
    pieces, half = smaller_pieces(update, model)
    blocks, narrow = checkpointed(update, model), half_precision(update, model)
    if trials is None:
        return [pieces, blocks, narrow, *smaller_samples(update, model)]
    if half:
        pieces = _with(pieces, trials.in_pieces(half))
    if model.why_no_blocks is None:
        blocks = _with(blocks, trials.checkpointed(len(model.blocks)))
    if model.precision is not None and model.why_slow_precision is None:
        narrow = _with(narrow, trials.in_precision(model.precision))
    return [pieces, blocks, narrow, *smaller_samples(update, model)]


def _with(predicted: Saving, tried: Saving) -> Saving:
    return replace(
        tried,
        what=predicted.what,
        predicted_bytes=predicted.predicted_bytes,
        predicted_step_s=predicted.predicted_step_s,
    )


def table(found: Sequence[Saving], peak_bytes: int, step_s: float | None) -> list[str]:
    """The savings in lines for people, beside the unchanged training."""
    width = max(len("what would lower it"), *(2 + len(one.what) for one in found))
    lines = [
        f"{'what would lower it':<{width}}  {'predicted':>21}  {'measured':>21}",
        f"{'  unchanged':<{width}}  {'':>21}  {_figures(peak_bytes, step_s)}",
    ]
    for one in found:
        guess = _figures(one.predicted_bytes, one.predicted_step_s)
        seen = _figures(one.peak_bytes, one.step_s)
        if one.peak_bytes is None:
            seen = f"{'not tried' if one.predicted_bytes is not None else 'impossible'}: {one.why_not}"
        changes = one.changes if one.peak_bytes is not None else ""
        lines.append(f"  {one.what:<{width - 2}}  {guess}  {seen}  {changes}".rstrip())
    return lines


def _figures(count: int | None, seconds: float | None) -> str:
    shown = "" if count is None else show_bytes(count)
    pace = "" if seconds is None else show_seconds(seconds)
    return f"{shown:>10} {pace:>10}"
