"""Is plan B faster than plan A? Laps in quads A B B A, and an interval that may be looked at many times.

A quad gives one figure, the mean of log(a1 / b1) and log(a2 / b2): what drifts in a straight line cancels in it.
The interval is Student's, around a mean from which the lowest and the highest fifth of the quads are left out, once
there are five. The 5 % by which it may miss the truth are shared out over all the looks that can be taken, so that
stopping at the look that decides costs nothing of it. How often all this errs: `python -m benchmarks.tuner_stats`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hotlap.core.chance import student_t as student_t

LEAST_GAIN = 1.02
MOST_QUADS = 16

MISSES = 0.05  # how often the interval may miss the truth, over all looks together
TRIMMED = 5  # one quad in so many is left out at each end
LARGEST = 700.0  # exp of more than this overflows

Outcome = Literal["accepted", "rejected", "slower", "no difference seen"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How many times faster B is than A."""

    ratio: float
    low: float
    high: float
    noise: float
    """Spread of a lap, as a fraction of it, whatever a few odd laps did."""
    quads: int


class Comparison:
    """Takes quads until they decide; `verdict` stays None for as long as another one is wanted.

    `accepted`: faster by `least` or more. `rejected`: not faster by `least`. `slower`: B loses.
    `no difference seen`: the most quads were taken and the interval still holds `least`.
    """

    def __init__(self, *, least: float = LEAST_GAIN, most_quads: int = MOST_QUADS) -> None:
        if not (math.isfinite(least) and least > 0):
            raise ValueError(f"the least gain is a ratio of times, finite and above 0, not {least}")
        self._least = math.log(least)
        self._shares = shares(most_quads)
        self._gains: list[float] = []
        self._gaps: list[float] = []
        self._verdict: Outcome | None = None

    def add(self, a1: float, b1: float, b2: float, a2: float) -> None:
        """Take a quad, in seconds a step; one run as B A A B is given as its pairs (a1, b1) and (a2, b2) too.

        Raises ValueError where a time is not finite and above 0, RuntimeError once there is a verdict.
        """
        for name, seconds in (("a1", a1), ("b1", b1), ("b2", b2), ("a2", a2)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"seconds a step are finite and above 0; {name} is {seconds}")
        if self._verdict is not None:
            raise RuntimeError(f"the comparison has ended ({self._verdict}); start another one")
        a1, b1, b2, a2 = math.log(a1), math.log(b1), math.log(b2), math.log(a2)
        self._gains.append((a1 - b1 + a2 - b2) / 2)
        # The difference of two like laps has the variance of both: halved, each stands for one lap, and so for one
        # quad, whose figure has the variance of a lap.
        self._gaps += (abs(a1 - a2) / math.sqrt(2), abs(b1 - b2) / math.sqrt(2))
        if len(self._gains) in self._shares:
            self._verdict = self._judge()

    @property
    def estimate(self) -> Estimate:
        """What the quads so far say; at the verdict, what it was given on. Raises ValueError without a quad."""
        if not self._gains:
            raise ValueError("no quad yet: nothing to estimate from")
        centre, half = self._interval()
        return Estimate(
            ratio=math.exp(centre),
            low=math.exp(centre - half),
            high=math.exp(centre + half) if centre + half < LARGEST else math.inf,
            # Half of all normal values lie within 0.6745 standard deviations.
            noise=statistics.median(self._gaps) / 0.6745,
            quads=len(self._gains),
        )

    @property
    def verdict(self) -> Outcome | None:
        """The end of it, or None: go on."""
        return self._verdict

    def _judge(self) -> Outcome | None:
        centre, half = self._interval()
        if centre - half > self._least:
            return "accepted"
        if centre + half < self._least:
            return "slower" if centre + half < 0 else "rejected"
        return "no difference seen" if len(self._gains) == max(self._shares) else None

    def _interval(self) -> tuple[float, float]:
        """Centre and half width, as logarithms."""
        quads = len(self._gains)
        if quads == 1:
            return self._gains[0], math.inf
        cut = quads // TRIMMED
        kept = quads - 2 * cut
        gains = sorted(self._gains)
        centre = math.fsum(gains[cut : quads - cut]) / kept
        # Two views of the noise, and the larger counts. Only what differs between quads shows that the gain itself
        # varies, but two or three of them agree by chance all too often. Like laps of one quad give twice as many
        # figures, and drift, jumps and stumbles that come at random part them at least as much as they move the gain.
        near = clipped(gains, cut, cut)
        middle = math.fsum(near) / quads
        between = math.fsum((gain - middle) ** 2 for gain in near) / (quads - 1)
        within = math.fsum(gap**2 for gap in clipped(sorted(self._gaps), 0, 4 * cut)) / (2 * quads)
        error = math.sqrt(max(between, within) * (quads - 1) / (kept * (kept - 1)))
        # A plan may have nearly all of the noise, so the two gaps of a quad count as one.
        freedom = 2 * kept - 1
        # Between looks nothing is decided; a search that must stop there spends what the next look would have spent.
        share = self._shares[min(look for look in self._shares if look >= quads)]
        return centre, student_t(freedom, share) * error


def clipped(values: Sequence[float], below: int, above: int) -> list[float]:
    """Sorted values, so many at either end replaced by the nearest one that stays."""
    low, high = values[below], values[len(values) - 1 - above]
    return [min(max(value, low), high) for value in values]


@lru_cache
def shares(most_quads: int) -> dict[int, float]:
    """After how many quads to look (2, 3, 4, 6, 8, 12, 16 …, the last at `most_quads`), and how often each may err.

    In proportion to the quads: an early look that errs little still sees what is large.
    """
    if most_quads < 2:
        raise ValueError(f"a comparison takes 2 quads or more, not {most_quads}")
    looks = [n for n in range(2, most_quads) if n // (n & -n) in (1, 3)] + [most_quads]
    return {look: MISSES * look / sum(looks) for look in looks}
