"""A stand-in for `evaluate` without a network: accuracy, and F1 where there are two classes."""

from __future__ import annotations

from typing import Any

__version__ = "0.4.0"


class Metric:
    """Collects predictions and scores them."""

    def __init__(self, *, f1: bool) -> None:
        self._f1 = f1
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._pairs += [(int(one), int(other)) for one, other in zip(predictions, references, strict=True)]

    def compute(self, *, predictions: Any = (), references: Any = ()) -> dict[str, float]:
        self.add_batch(predictions=predictions, references=references)
        pairs, self._pairs = self._pairs, []
        scores = {"accuracy": sum(one == other for one, other in pairs) / max(1, len(pairs))}
        if self._f1:
            hits = sum(one == other == 1 for one, other in pairs)
            scores["f1"] = 2 * hits / max(1, sum(one for one, _ in pairs) + sum(other for _, other in pairs))
        return scores


def load(path: str, config_name: str | None = None, **_: Any) -> Metric:
    """The metric of a task."""
    return Metric(f1=config_name in ("mrpc", "qqp"))
