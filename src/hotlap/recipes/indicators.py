"""Features of bars that never look ahead, and the direction to predict.

Every sum here adds numbers in an order that does not depend on how many rows there are, so that what is known at a bar
stays the same to the last bit, whatever comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, kind_of, shown
from hotlap.core.job_checks import is_whole
from hotlap.recipes.bars import Bars, Numbers, frame_name, joined, resampled

DAY = 86400
SWING = 3
"""Bars on each side of a swing that do not reach it; a swing is known so many bars after it."""
SWINGS = 4
"""Swings of a kind that structure is counted over."""
LONG_AGO = 50
"""Bars after which a swing no longer counts."""
NEGLIGIBLE = 1e-18
"""hotlap leaves out smaller weights in a running average."""

DOWN, FLAT, UP, UNKNOWN = 0, 1, 2, -1


@dataclass(frozen=True, eq=False, kw_only=True)
class Features:
    """Numbers that are known when a bar is complete."""

    names: tuple[str, ...]
    values: Numbers
    """float32, rows × features: a row for each bar."""
    first: int
    """The first row with all features, from which on all are finite; the number of rows where none has them yet."""


def features(bars: Bars, frames: Sequence[int] = (3600, 14400)) -> Features:
    """The features of each bar: 30 of its own, and 4 of each longer frame (in seconds), as far as complete by then.

    A warm-up of 50 bars, and of 20 bars of the longest frame, lies before the first row with all of them.
    """
    columns = {name: function(bars) for name, function in OWN.items()}
    for seconds in frames:
        longer = resampled(bars, seconds)
        places = joined(bars, longer)
        for name, function in OF_LONGER.items():
            columns[f"{frame_name(seconds)}_{name}"] = np.where(places >= 0, function(longer)[places], np.nan)
    values = np.empty((len(bars), len(columns)), np.float32)
    for at, column in enumerate(columns.values()):
        values[:, at] = column
    known = np.isfinite(values).all(axis=1)
    return Features(names=tuple(columns), values=values, first=int(known.argmax()) if known.any() else len(bars))


def direction(bars: Bars, ahead: int, threshold: float, *, volatility_over: int | None = None) -> Numbers:
    """For each bar whether the close `ahead` bars later is 0 lower, 1 about the same or 2 higher; int64.

    Lower and higher are by more than `threshold`, a share of the price such as 0.002. With `volatility_over` it is a
    multiple of volatility: the spread of the last so many returns from bar to bar, the bar's own included, times the
    root of `ahead`. Where the future, or the volatility, is not known, the label is -1.
    """
    wrong = [
        f"{name}={shown(value)} must be a whole number of at least {least}"
        for name, value, least in (("ahead", ahead, 1), ("volatility_over", volatility_over, 2))
        if value is not None and (not is_whole(value) or value < least)
    ]
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold < np.inf:
        wrong.append(f"threshold={shown(threshold)} must be a number above zero")
    if wrong:
        raise DataError("; ".join(wrong))
    later = np.full(len(bars), np.nan)
    later[:-ahead] = bars.close[ahead:] / bars.close[:-ahead] - 1
    bound = np.full(len(bars), float(threshold))
    if volatility_over is not None:
        bound *= deviation(past_return(bars, 1), volatility_over)[1] * np.sqrt(ahead)
    labels = np.where(later > bound, UP, np.where(later < -bound, DOWN, FLAT))
    return np.where(np.isnan(later) | np.isnan(bound), UNKNOWN, labels).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Standard:
    """Scales features to mean 0 and standard deviation 1 on the training rows."""

    mean: Numbers
    spread: Numbers

    def __call__(self, values: Numbers) -> Numbers:
        """Any rows of the same features, float32."""
        if values.ndim != 2 or values.shape[1] != len(self.mean):
            raise DataError(
                f"features have the shape {values.shape}; those of the training had {len(self.mean)} columns"
            )
        return ((values - self.mean) / self.spread).astype(np.float32)

    def to_dict(self) -> dict[str, list[float]]:
        """As JSON can hold it, to the last bit."""
        return {"mean": self.mean.tolist(), "spread": self.spread.tolist()}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Standard:
        """What `to_dict` gave."""
        try:
            mean, spread = (np.asarray(kept[name], dtype=np.float64) for name in ("mean", "spread"))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{shown(kept)} does not hold lists of numbers as mean and spread: {error!r}") from None
        if mean.ndim != 1 or mean.shape != spread.shape or not (np.isfinite(mean + spread) & (spread > 0)).all():
            raise DataError("mean and spread must be as many finite numbers, and spreads above zero; train again")
        return cls(mean, spread)


def standardised(train_values: Numbers) -> Standard:
    """The scaling that gives these rows mean 0 and standard deviation 1; pass training rows only."""
    if not isinstance(train_values, np.ndarray) or train_values.ndim != 2 or not len(train_values):
        raise DataError(f"training rows must be an array of rows × features, not {kind_of(train_values)}")
    rows = train_values.astype(np.float64)
    if not np.isfinite(rows).all():
        row = int(np.isfinite(rows).all(axis=1).argmin())
        raise DataError(
            f"row {row + 1} of the training has features that are not known; begin at the features' first row"
        )
    spread = rows.std(axis=0)
    # The mean of equal numbers may be off by a rounding, and they would have a spread of that size.
    constant = (rows.max(axis=0) == rows.min(axis=0)) | (spread == 0)
    return Standard(rows.mean(axis=0), np.where(constant, 1.0, spread))


# One function for each feature, in one line what it is. All give float64, NaN where it is not known yet.


def past_return(bars: Bars, over: int) -> Numbers:
    """Close against the close so many bars before, less 1."""
    return _late(bars.close[over:] / bars.close[:-over] - 1, len(bars))


def log_range(bars: Bars) -> Numbers:
    """Logarithm of high over low."""
    ranges: Numbers = np.log(bars.high / bars.low)
    return ranges


def body(bars: Bars) -> Numbers:
    """Close less open, as a share of high less low; 0 where these are equal."""
    return _share(bars.close - bars.open, bars.high - bars.low, 0.0)


def upper_wick(bars: Bars) -> Numbers:
    """What lies above open and close, as a share of high less low; 0 where these are equal."""
    return _share(bars.high - np.maximum(bars.open, bars.close), bars.high - bars.low, 0.0)


def lower_wick(bars: Bars) -> Numbers:
    """What lies below open and close, as a share of high less low; 0 where these are equal."""
    return _share(np.minimum(bars.open, bars.close) - bars.low, bars.high - bars.low, 0.0)


def relative_volume(bars: Bars, over: int) -> Numbers:
    """Volume against its mean over so many bars, less 1; 0 where there was none."""
    mean = sums(bars.volume, over) / over
    return _share(bars.volume, mean, 1.0) - 1


def rsi(bars: Bars, over: int) -> Numbers:
    """Relative strength: 100 × mean rise / (mean rise + mean fall) of closes, by Wilder's smoothing; 50 without any."""
    change = _late(np.diff(bars.close), len(bars))
    rise, fall = (smoothed(np.maximum(moved, 0), over, 1 / over) for moved in (change, -change))
    return 100 * _share(rise, rise + fall, 0.5)


def ema_ratio(bars: Bars, over: int) -> Numbers:
    """Close against its exponential mean, less 1."""
    ratio: Numbers = bars.close / ema(bars.close, over) - 1
    return ratio


def macd(bars: Bars) -> Numbers:
    """Exponential mean of closes over 12 bars less that over 26, as a share of the close."""
    share: Numbers = _macd(bars) / bars.close
    return share


def macd_signal(bars: Bars) -> Numbers:
    """Exponential mean over 9 bars of that difference, as a share of the close."""
    share: Numbers = ema(_macd(bars), 9) / bars.close
    return share


def bollinger_position(bars: Bars, over: int) -> Numbers:
    """Where the close lies between the bands 2 deviations below (0) and above (1) its mean; 0.5 where they meet."""
    offset, spread = deviation(bars.close, over)
    return _share(2 * spread - offset, 4 * spread, 0.5)


def bollinger_width(bars: Bars, over: int) -> Numbers:
    """What lies between the bands, as a share of the mean."""
    offset, spread = deviation(bars.close, over)
    width: Numbers = 4 * spread / (bars.close + offset)
    return width


def atr_share(bars: Bars, over: int) -> Numbers:
    """Mean true range by Wilder's smoothing, as a share of the close."""
    before = bars.close[:-1]
    true_range = np.maximum(bars.high[1:], before) - np.minimum(bars.low[1:], before)
    share: Numbers = smoothed(_late(true_range, len(bars)), over, 1 / over) / bars.close
    return share


def stochastic(bars: Bars, over: int) -> Numbers:
    """%K: where the close lies between the lowest low (0) and the highest high (100) of so many bars."""
    low, high = lowest(bars.low, over), highest(bars.high, over)
    return 100 * _share(bars.close - low, high - low, 0.5)


def below_highest(bars: Bars, over: int) -> Numbers:
    """Close against the highest high of so many bars, less 1."""
    distance: Numbers = bars.close / highest(bars.high, over) - 1
    return distance


def above_lowest(bars: Bars, over: int) -> Numbers:
    """Close against the lowest low of so many bars, less 1."""
    distance: Numbers = bars.close / lowest(bars.low, over) - 1
    return distance


def higher_highs(bars: Bars) -> Numbers:
    """How many of the last 4 known swing highs are above the one before them."""
    return _steps(bars.high)


def lower_lows(bars: Bars) -> Numbers:
    """How many of the last 4 known swing lows are below the one before them."""
    return _steps(-bars.low)


def since_swing(bars: Bars) -> Numbers:
    """Bars since the last known swing, high or low, at most 50; 50 where there is none."""
    places = np.union1d(swings(bars.high), swings(-bars.low))
    last = np.append(-LONG_AGO, places)[_known(places, len(bars))]
    since: Numbers = np.minimum(np.arange(len(bars)) - last, LONG_AGO).astype(np.float64)
    return since


def of_day(bars: Bars, wave: np.ufunc) -> Numbers:
    """Sine or cosine of the time of day at which the bar begins, UTC."""
    return np.asarray(wave(2 * np.pi * (bars.times % DAY) / DAY))


def of_week(bars: Bars, wave: np.ufunc) -> Numbers:
    """Sine or cosine of the day of the week on which the bar begins, UTC; Monday is 0."""
    return np.asarray(wave(2 * np.pi * ((bars.times // DAY + 3) % 7) / 7))


OWN: dict[str, Callable[[Bars], Numbers]] = {
    **{f"return_{over}": partial(past_return, over=over) for over in (1, 3, 6, 12)},
    "log_range": log_range,
    "body": body,
    "upper_wick": upper_wick,
    "lower_wick": lower_wick,
    "volume_20": partial(relative_volume, over=20),
    "rsi_14": partial(rsi, over=14),
    **{f"ema_{over}": partial(ema_ratio, over=over) for over in (10, 20, 50)},
    "macd": macd,
    "macd_signal": macd_signal,
    "bollinger_position": partial(bollinger_position, over=20),
    "bollinger_width": partial(bollinger_width, over=20),
    "atr_14": partial(atr_share, over=14),
    "stochastic_14": partial(stochastic, over=14),
    **{f"below_high_{over}": partial(below_highest, over=over) for over in (20, 50)},
    **{f"above_low_{over}": partial(above_lowest, over=over) for over in (20, 50)},
    "higher_highs": higher_highs,
    "lower_lows": lower_lows,
    "since_swing": since_swing,
    "hour_sin": partial(of_day, wave=np.sin),
    "hour_cos": partial(of_day, wave=np.cos),
    "weekday_sin": partial(of_week, wave=np.sin),
    "weekday_cos": partial(of_week, wave=np.cos),
}
"""The features of the bars themselves."""

OF_LONGER: dict[str, Callable[[Bars], Numbers]] = {
    "return_1": OWN["return_1"],
    "rsi_14": OWN["rsi_14"],
    "ema_20": OWN["ema_20"],
    "atr_14": OWN["atr_14"],
}
"""The features of longer bars."""


def smoothed(values: Numbers, over: int, share: float) -> Numbers:
    """Running average s += share × (value − s), begun with the mean of the first `over` values that are known.

    A loop over rows would be slow, so it is summed by doubling: over 1 row, 2, 4 and so on, until what is older weighs
    nothing. Each row adds up the same numbers in the same order, however many rows follow.
    """
    out = np.full(len(values), np.nan)
    start = int(np.isnan(values).sum()) + over - 1  # only values at the beginning are unknown
    if start >= len(values):
        return out
    running = share * values[start:]
    running[0] = values[start - over + 1 : start + 1].mean()
    reach, weight = 1, 1 - share
    while weight > NEGLIGIBLE:
        running[reach:] += weight * running[:-reach]
        reach, weight = 2 * reach, weight * weight
    out[start:] = running
    return out


def ema(values: Numbers, over: int) -> Numbers:
    """Exponential mean: each new value has the share 2 / (over + 1)."""
    return smoothed(values, over, 2 / (over + 1))


def sums(values: Numbers, over: int) -> Numbers:
    """Sums of so many values up to each one."""
    rows = len(values) - over + 1
    total = np.zeros(max(rows, 0))
    for back in range(over if rows > 0 else 0):
        total += values[back : back + rows]
    return _late(total, len(values))


def deviation(values: Numbers, over: int) -> tuple[Numbers, Numbers]:
    """Of so many values up to each one: their mean less the value itself, and their standard deviation (of all)."""
    # Taken from the value itself, differences lose nothing where values are large, and are 0 where they stand still.
    rows = len(values) - over + 1
    total, squares = np.zeros(max(rows, 0)), np.zeros(max(rows, 0))
    for back in range(over if rows > 0 else 0):
        differs = values[back : back + rows] - values[over - 1 :]
        total += differs
        squares += differs * differs
    offset = total / over
    spread = np.sqrt(np.maximum(squares / over - offset * offset, 0))
    return _late(offset, len(values)), _late(spread, len(values))


def highest(values: Numbers, over: int) -> Numbers:
    """The highest of so many values up to each one."""
    reach, top = 1, values
    while reach < over:
        step = min(reach, over - reach)
        top = np.maximum(top[step:], top[:-step])
        reach += step
    return _late(top, len(values))


def lowest(values: Numbers, over: int) -> Numbers:
    """The lowest of so many values up to each one."""
    return -highest(-values, over)


def swings(values: Numbers) -> Numbers:
    """Where a value is above the 3 before it and not below the 3 after it, with which it is known."""
    top = highest(values, SWING)
    here = np.arange(SWING, max(len(values) - SWING, SWING))
    found: Numbers = here[(values[here] > top[here - 1]) & (values[here] >= top[here + SWING])]
    return found


def _known(places: Numbers, rows: int) -> Numbers:
    """How many swings are known at each row."""
    known: Numbers = np.searchsorted(places + SWING, np.arange(rows), side="right")
    return known


def _steps(values: Numbers) -> Numbers:
    """How many of the last swings that are known at each row rose above the one before."""
    places = swings(values)
    rose = np.append(0, np.cumsum(np.diff(values[places], prepend=np.inf) > 0))
    known = _known(places, len(values))
    counts: Numbers = (rose[known] - rose[np.maximum(known - SWINGS, 0)]).astype(np.float64)
    return counts


def _macd(bars: Bars) -> Numbers:
    difference: Numbers = ema(bars.close, 12) - ema(bars.close, 26)
    return difference


def _share(part: Numbers, whole: Numbers, otherwise: float) -> Numbers:
    """One by the other; `otherwise` where there is nothing to divide by, NaN where it is not known."""
    out = np.where(np.isnan(whole), np.nan, otherwise)
    np.divide(part, whole, out=out, where=whole > 0)
    return out


def _late(values: Numbers, rows: int) -> Numbers:
    """Values that are known only from some row on, with NaN before."""
    out = np.full(rows, np.nan)
    if len(values):
        out[-len(values) :] = values
    return out
