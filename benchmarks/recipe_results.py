"""What is known of a recipe that was run by `benchmarks.recipes`, and how it is told."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hotlap.core.units import show_seconds
from hotlap.tuner.stats import student_t

METRICS = {"accuracy": "accuracy", "macro_f1": "macro-F1"}
"""Of the epoch that was best by macro-F1."""
LATE = {f"late_{metric}": f"{words}, later epochs" for metric, words in METRICS.items()}
"""In the mean over the later half of the epochs: does not depend on which was best, as that of one epoch does."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A whole `hotlap train`."""

    seconds: float
    machine: str
    models: dict[str, dict[str, Any]]
    """By name: samples and steps that were made, seconds of training, scores, plan, and the tuner's table."""
    said: list[str]

    @property
    def from_cache(self) -> list[str]:
        """The lines that tell what was read from the cache, and what that saved."""
        return [" ".join(line.split()) for line in self.said if "which saved" in line]


@dataclass
class Result:
    """All that is known of a recipe."""

    epochs: int
    wanted: float
    rows: dict[str, int] = field(default_factory=dict)
    """Of each file."""
    rival: dict[str, dict[str, Any]] | None = None
    """By model and setting, the last of which is how the guides end."""
    cold: Ran | None = None
    again: Ran | None = None
    band: dict[str, Any] | None = None
    failures: list[str] = field(default_factory=list)

    def _rival_s(self, chosen: Callable[[Mapping[str, float]], float]) -> dict[str, float]:
        if self.rival is None or self.cold is None:
            return {}
        found = {}
        for name, model in self.cold.models.items():
            whole = {
                setting: one["step_s"] * model["steps"] + one["evaluation_s"] * self.epochs
                for setting, one in self.rival[name].items()
            }
            found[name] = chosen(whole)
        return found

    @property
    def rival_s(self) -> dict[str, float]:
        """What the guides' loop, as they end, would take for as much as hotlap made, by model: extrapolated."""
        return self._rival_s(lambda whole: list(whole.values())[-1])

    @property
    def fastest_s(self) -> dict[str, float]:
        """The same in the setting that is fastest."""
        return self._rival_s(lambda whole: min(whole.values()))

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the guides' loop the whole command was; None where it is not known."""
        return sum(self.rival_s.values()) / self.cold.seconds if self.rival_s and self.cold else None

    @property
    def ratio_to_fastest(self) -> float | None:
        """The same for the fastest of its settings."""
        return sum(self.fastest_s.values()) / self.cold.seconds if self.fastest_s and self.cold else None

    @property
    def saved_s(self) -> float | None:
        """What the cache saved the second time."""
        return self.cold.seconds - self.again.seconds if self.cold and self.again else None

    def to_dict(self) -> dict[str, Any]:
        """For the file."""
        return {
            **asdict(self),
            "rival_s_extrapolated": self.rival_s,
            "ratio_extrapolated": self.ratio,
            "ratio_to_fastest_extrapolated": self.ratio_to_fastest,
            "saved_s": self.saved_s,
        }


def banded(eager: Sequence[float], tuned: Sequence[float]) -> dict[str, Any]:
    """The scores of as many seeds: how far the tuned mean lies outside of the others, and how the means differ."""
    low, high, mean = min(eager), max(eager), statistics.fmean(tuned)
    spread = math.sqrt((statistics.variance(eager) + statistics.variance(tuned)) / len(eager))
    half = student_t(2 * len(eager) - 2, 0.05) * spread
    more = mean - statistics.fmean(eager)
    return {
        "eager": list(eager),
        "low": low,
        "high": high,
        "tuned": list(tuned),
        "mean": mean,
        "outside": max(low - mean, mean - high, 0.0),
        "more": more,
        "interval": [more - half, more + half],
    }


def late(evaluations: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric in the mean over the later half of what was evaluated."""
    half = evaluations[len(evaluations) // 2 :]
    return {f"late_{metric}": statistics.fmean(one[metric] for one in half) for metric in METRICS}


# --- for people ----------------------------------------------------------------------------------------


def lines(name: str, result: Result) -> list[str]:
    """A recipe, for people."""
    files = ", ".join(f"{file} {rows:,} rows" for file, rows in result.rows.items())
    told = [f"{name}: {_epochs(result.epochs)} asked for" + (f"; {files}" if files else "")]
    if cold := result.cold:
        samples = next(iter(cold.models.values()))["training_samples"]
        training_s = sum(model["train_s"] for model in cold.models.values())
        told.append(
            f"  hotlap        {cold.seconds:.1f} s from command to predictions, {training_s:.1f} s of it training "
            f"on {samples:,} samples"
        )
        for model, said in cold.models.items():
            scores = ", ".join(f"{words} {said[metric]:.3f}" for metric, words in METRICS.items())
            pace = f"{show_seconds(said['train_s'] / said['steps'])} a step"
            told.append(f"    {model:<12}{said['steps']:>8,} steps {said['train_s']:8.1f} s, {pace}; {scores}")
            told.append(f"    {'':<12}{said['stopped']}; {said['plan']}")
    if result.rival:
        told.append("  guides' loop  its steps and an evaluation an epoch, extrapolated from those that were timed")
        for model, by_setting in result.rival.items():
            timed = next(iter(by_setting.values()))["steps"]
            told.append(f"    {model:<12}{timed:>8,} steps timed")
            for setting, one in by_setting.items():
                took = f"{show_seconds(one['step_s'])} a step, {show_seconds(one['evaluation_s'])} an evaluation"
                told.append(f"      {setting:<22}{took}")
            if model in result.rival_s:
                ends, fastest = result.rival_s[model], result.fastest_s[model]
                told.append(
                    f"      as much as hotlap did {ends:.1f} s as the guides end, {fastest:.1f} s at its fastest"
                )
    if result.ratio is not None and result.ratio_to_fastest is not None:
        reached = "reached" if result.ratio >= result.wanted else "not reached"
        told.append(
            f"  ratio         {result.ratio:.2f}x, extrapolated; on one H200 {result.wanted:g}x wanted: {reached}; "
            f"{result.ratio_to_fastest:.2f}x to its fastest setting"
        )
    if result.again and result.saved_s is not None:
        saved = f"{abs(result.saved_s):.1f} s {'less' if result.saved_s >= 0 else 'more'}"
        told.append(f"  again         {result.again.seconds:.1f} s, {saved}")
        told += [f"    {line}" for line in result.again.from_cache]
    if band := result.band:
        seeds, named = ", ".join(map(str, band["seeds"])), METRICS | LATE
        told.append(f"  band          seeds {seeds}, {_epochs(band['epochs'])}: eager fp32, and under the tuned plan")
        for model, scores in band["models"].items():
            told += [f"    {model:<12}{named[metric]:<23} {_compared(one)}" for metric, one in scores.items()]
    told += [f"  failed        {failure}" for failure in result.failures]
    for model, said in result.cold.models.items() if result.cold else ():
        told += [f"  {model}", *(f"    {line}" for line in said["table"])] if said["table"] else []
    return told


def _compared(scores: Mapping[str, Any]) -> str:
    where = f"outside by {scores['outside']:.4f}" if scores["outside"] else "within"
    low, high = scores["interval"]
    clear = "no difference seen" if low <= 0 <= high else "a difference"
    return (
        f"[{scores['low']:.4f}, {scores['high']:.4f}], tuned {scores['mean']:.4f} in the mean: {where}; "
        f"{scores['more']:+.4f} [{low:+.4f}, {high:+.4f}]: {clear}"
    )


def _epochs(count: int) -> str:
    return f"{count} epoch{'s'[: count > 1]}"
