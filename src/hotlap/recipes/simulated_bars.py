"""Bars that nobody traded, with a signal of known size: for measurements and tests of the recipe for prices."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotlap.core.errors import DataError, shown
from hotlap.core.job_checks import is_whole
from hotlap.recipes.bars import FIRST_MONDAY, Bars

Numbers = np.ndarray[Any, Any]

BAR_SECONDS = 900
START = FIRST_MONDAY + 2608 * 7 * 86400
"""Monday, 30 December 2019."""
VOLATILITY = 0.0006
"""The standard deviation of returns from bar to bar."""
LOOKBACK = 12
"""Bars of the trend that the signal follows."""
HIGHEST_SIGNAL = 0.5
"""Above it, trends feed themselves for so long that prices leave all bounds."""


def simulated_bars(rows: int, symbols: int = 1, seed: int = 0, signal: float = 0.1) -> list[Bars]:
    """`rows` bars of 15 minutes for each symbol, from Monday to Friday; the same for the same seed.

    `signal` is the correlation between the next return and the sign of the return over the last 12 bars. Nothing else
    can be learned: with 0 the direction of prices is pure chance. Returns have fat tails and a standard deviation of
    0.0006, so that over 4 bars about nine in ten stay within 0.002.
    """
    mistakes = [
        f"{name}={shown(value)} must be a whole number of at least {least}"
        for name, value, least in (("rows", rows, 1), ("symbols", symbols, 1), ("seed", seed, 0))
        if not is_whole(value) or value < least
    ]
    if isinstance(signal, bool) or not isinstance(signal, (int, float)) or not 0 <= signal <= HIGHEST_SIGNAL:
        mistakes.append(f"signal={shown(signal)} must be a number from 0 to {HIGHEST_SIGNAL}")
    if mistakes:
        raise DataError("; ".join(mistakes))
    return [_simulated(rows, f"SIM{at + 1}", np.random.default_rng([seed, at]), signal) for at in range(symbols)]


def _simulated(rows: int, symbol: str, rng: np.random.Generator, signal: float) -> Bars:
    places = np.arange(rows)
    bars_a_week = 5 * 86400 // BAR_SECONDS
    times = START + places // bars_a_week * 7 * 86400 + places % bars_a_week * BAR_SECONDS
    shocks = rng.standard_t(5, rows) * np.sqrt(3 / 5)  # of standard deviation 1
    log_prices = _trending_walk(VOLATILITY * signal, VOLATILITY * np.sqrt(1 - signal**2) * shocks)
    closes = 100 * np.exp(log_prices)
    opens = np.append(100.0, closes[:-1])
    above, below = np.exp(VOLATILITY / 2 * rng.exponential(size=(2, rows)))
    activity = 1.5 + np.sin(2 * np.pi * (times % 86400) / 86400 - np.pi / 2)
    return Bars(
        times=times,
        open=opens,
        high=np.maximum(opens, closes) * above,
        low=np.minimum(opens, closes) / below,
        close=closes,
        volume=np.round(1000 * activity * rng.lognormal(sigma=0.5, size=rows)),
        seconds=BAR_SECONDS,
        symbol=symbol,
    )


def _trending_walk(drift: float, shocks: Numbers) -> Numbers:
    """A random walk with a drift in the direction of its last steps."""
    walk = [0.0]
    for shock in shocks.tolist():
        before = walk[-1 - LOOKBACK] if len(walk) > LOOKBACK else 0.0
        step = drift if walk[-1] > before else -drift if walk[-1] < before else 0.0
        walk.append(walk[-1] + step + shock)
    return np.array(walk[1:])
