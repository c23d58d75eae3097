"""Bars that nobody traded: shaped like real ones, with a signal in them whose size is known."""

from __future__ import annotations

import numpy as np

from hotlap.core.errors import DataError, shown
from hotlap.core.job_checks import is_whole
from hotlap.recipes.bar_columns import Numbers
from hotlap.recipes.bars import MONDAY, Bars

SECONDS = 900
START = MONDAY + 2608 * 7 * 86400
"""Monday, 30 December 2019."""
SPREAD = 0.0006
"""Of returns from bar to bar."""
LOOKBACK = 12
"""Bars over which the trend is taken that the signal follows."""
MOST_SIGNAL = 0.5
"""Above it, trends feed themselves for so long that prices leave all bounds."""


def simulated_bars(rows: int, symbols: int = 1, seed: int = 0, signal: float = 0.1) -> list[Bars]:
    """So many bars of 15 minutes of each symbol, from Monday to Friday; the same for the same seed.

    `signal` is the correlation of the return from one bar to the next with the sign of the return over the 12 bars
    before: what a model can find, and all that it can find. With 0 the direction of prices is pure chance. Returns have
    fat tails and a spread of 0.0006, so that over 4 bars some nine in ten stay within a threshold of 0.002.
    """
    wrong = [
        f"{name}={shown(value)} must be a whole number of at least {least}"
        for name, value, least in (("rows", rows, 1), ("symbols", symbols, 1), ("seed", seed, 0))
        if not is_whole(value) or value < least
    ]
    if isinstance(signal, bool) or not isinstance(signal, (int, float)) or not 0 <= signal <= MOST_SIGNAL:
        wrong.append(f"signal={shown(signal)} must be a number from 0 to {MOST_SIGNAL}")
    if wrong:
        raise DataError("; ".join(wrong))
    return [_one(rows, f"SIM{at + 1}", np.random.default_rng([seed, at]), signal) for at in range(symbols)]


def _one(rows: int, symbol: str, chance: np.random.Generator, signal: float) -> Bars:
    places = np.arange(rows)
    a_week = 5 * 86400 // SECONDS
    times = START + places // a_week * 7 * 86400 + places % a_week * SECONDS
    shocks = chance.standard_t(5, rows) * np.sqrt(3 / 5)  # of spread 1
    logs = _walk(SPREAD * signal, SPREAD * np.sqrt(1 - signal**2) * shocks)
    closes = 100 * np.exp(logs)
    opens = np.append(100.0, closes[:-1])
    above, below = np.exp(SPREAD / 2 * chance.exponential(size=(2, rows)))
    busy = 1.5 + np.sin(2 * np.pi * (times % 86400) / 86400 - np.pi / 2)
    return Bars(
        times=times,
        open=opens,
        high=np.maximum(opens, closes) * above,
        low=np.minimum(opens, closes) / below,
        close=closes,
        volume=np.round(1000 * busy * chance.lognormal(sigma=0.5, size=rows)),
        seconds=SECONDS,
        symbol=symbol,
    )


def _walk(push: float, shocks: Numbers) -> Numbers:
    """A random walk that is pushed, at each step, the way it went over the last steps."""
    at = [0.0]
    for shock in shocks.tolist():
        then = at[-1 - LOOKBACK] if len(at) > LOOKBACK else 0.0
        towards = push if at[-1] > then else -push if at[-1] < then else 0.0
        at.append(at[-1] + towards + shock)
    return np.array(at[1:])
