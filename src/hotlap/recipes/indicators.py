"""Features of bars (technical indicators), and the direction of prices to predict.

No feature looks ahead. Every sum adds numbers in an order that does not depend on how many rows there are: the features
of a bar stay the same to the last bit, whatever comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, kind_of, shown
from hotlap.core.job_checks import is_whole
from hotlap.recipes.bars import Bars, Numbers, frame_name, last_complete, resampled

DAY = 86400
SWING_SIDE = 3
"""Bars on each side of a swing high, all below it. A swing is known this many bars later."""
SWINGS_COUNTED = 4
"""Swings that `higher_highs` and `lower_lows` look back over."""
LONGEST_SINCE_SWING = 50
SMALLEST_WEIGHT = 1e-18
"""An exponential average leaves out smaller weights."""

DOWN, FLAT, UP, UNKNOWN = 0, 1, 2, -1


@dataclass(frozen=True, eq=False, kw_only=True)
class Features:
    """The features of each bar, known when the bar is complete."""

    names: tuple[str, ...]
    values: Numbers
    """float32, bars × features; NaN in the warm-up."""
    first: int
    """The first bar after the warm-up, with all features; the number of bars where none has them yet."""


def features(bars: Bars, frames: Sequence[int] = (3600, 14400)) -> Features:
    """30 features of each bar, and 4 of the last complete bar of each longer frame (in seconds).

    The warm-up is 50 bars, and 20 bars of the longest frame.
    """
    columns = {name: feature(bars) for name, feature in BAR_FEATURES.items()}
    for seconds in frames:
        longer = resampled(bars, seconds)
        places = last_complete(bars, longer)
        for name, feature in FRAME_FEATURES.items():
            columns[f"{frame_name(seconds)}_{name}"] = np.where(places >= 0, feature(longer)[places], np.nan)
    values = np.stack(list(columns.values()), axis=1, dtype=np.float32, casting="same_kind")
    complete = np.isfinite(values).all(axis=1)
    first = int(complete.argmax()) if complete.any() else len(bars)
    return Features(names=tuple(columns), values=values, first=first)


def direction(bars: Bars, ahead: int, threshold: float, *, volatility_window: int | None = None) -> Numbers:
    """The direction of the close over the next `ahead` bars: 0 down, 1 flat, 2 up, -1 where it is unknown; int64.

    Down and up are changes by more than `threshold`, a share of the price such as 0.002. With `volatility_window` the
    threshold is a multiple of volatility: the standard deviation of as many returns up to the bar, times the square
    root of `ahead`.
    """
    mistakes = [
        f"{name}={shown(value)} must be a whole number of at least {least}"
        for name, value, least in (("ahead", ahead, 1), ("volatility_window", volatility_window, 2))
        if value is not None and (not is_whole(value) or value < least)
    ]
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold < np.inf:
        mistakes.append(f"threshold={shown(threshold)} must be a number above zero")
    if mistakes:
        raise DataError("; ".join(mistakes))
    change = np.full(len(bars), np.nan)
    change[:-ahead] = bars.close[ahead:] / bars.close[:-ahead] - 1
    bound = np.full(len(bars), float(threshold))
    if volatility_window is not None:
        bound *= rolling_offset_and_std(past_return(bars, 1), volatility_window)[1] * np.sqrt(ahead)
    labels = np.where(change > bound, UP, np.where(change < -bound, DOWN, FLAT))
    return np.where(np.isnan(change) | np.isnan(bound), UNKNOWN, labels).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Scaler:
    """Scales features to mean 0 and standard deviation 1, as scikit-learn's StandardScaler does."""

    mean: Numbers
    std: Numbers

    @classmethod
    def fit(cls, values: Numbers) -> Scaler:
        """The scaler of these rows × features; pass training rows only."""
        if not isinstance(values, np.ndarray) or values.ndim != 2 or not len(values):
            raise DataError(f"training rows must be an array of rows × features, not {kind_of(values)}")
        rows = values.astype(np.float64)
        if not np.isfinite(rows).all():
            row = int(np.isfinite(rows).all(axis=1).argmin())
            raise DataError(
                f"row {row + 1} of the training has features that are not known; begin at the features' first row"
            )
        std = rows.std(axis=0)
        # The mean of equal numbers can be off by a rounding error, which their standard deviation would be, too.
        is_constant = (rows.max(axis=0) == rows.min(axis=0)) | (std == 0)
        return cls(rows.mean(axis=0), np.where(is_constant, 1.0, std))

    def transform(self, values: Numbers) -> Numbers:
        """Rows of the same features, scaled; float32."""
        if values.ndim != 2 or values.shape[1] != len(self.mean):
            raise DataError(
                f"features have the shape {values.shape}; those of the training had {len(self.mean)} columns"
            )
        return ((values - self.mean) / self.std).astype(np.float32)

    def to_dict(self) -> dict[str, list[float]]:
        """As JSON can hold it, to the last bit."""
        return {"mean": self.mean.tolist(), "spread": self.std.tolist()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Scaler:
        """The scaler that `to_dict` wrote."""
        try:
            mean, std = (np.asarray(state[name], dtype=np.float64) for name in ("mean", "spread"))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{shown(state)} does not hold lists of numbers as mean and spread: {error!r}") from None
        if mean.ndim != 1 or mean.shape != std.shape or not (np.isfinite(mean + std) & (std > 0)).all():
            raise DataError("mean and spread must be as many finite numbers, and spreads above zero; train again")
        return cls(mean, std)


# --- features ------------------------------------------------------------------------------------------
# Each function returns float64, a value for each bar, NaN in its warm-up.


def past_return(bars: Bars, period: int) -> Numbers:
    """Return of the close over `period` bars."""
    return _after_warm_up(bars.close[period:] / bars.close[:-period] - 1, len(bars))


def log_range(bars: Bars) -> Numbers:
    """Logarithm of high / low."""
    ranges: Numbers = np.log(bars.high / bars.low)
    return ranges


def body(bars: Bars) -> Numbers:
    """(Close - open) / (high - low); 0 where high equals low."""
    return _ratio(bars.close - bars.open, bars.high - bars.low, 0.0)


def upper_wick(bars: Bars) -> Numbers:
    """(High - max(open, close)) / (high - low); 0 where high equals low."""
    return _ratio(bars.high - np.maximum(bars.open, bars.close), bars.high - bars.low, 0.0)


def lower_wick(bars: Bars) -> Numbers:
    """(min(open, close) - low) / (high - low); 0 where high equals low."""
    return _ratio(np.minimum(bars.open, bars.close) - bars.low, bars.high - bars.low, 0.0)


def relative_volume(bars: Bars, period: int) -> Numbers:
    """Volume / its mean over `period` bars - 1; 0 where that mean is 0."""
    mean = rolling_sum(bars.volume, period) / period
    return _ratio(bars.volume, mean, 1.0) - 1


def rsi(bars: Bars, period: int) -> Numbers:
    """Relative strength index: 100 × mean rise / (mean rise + mean fall), by Wilder's smoothing; 50 without changes."""
    change = _after_warm_up(np.diff(bars.close), len(bars))
    rise, fall = (wilder(np.maximum(moved, 0), period) for moved in (change, -change))
    return 100 * _ratio(rise, rise + fall, 0.5)


def ema_ratio(bars: Bars, period: int) -> Numbers:
    """Close / its exponential moving average - 1."""
    ratio: Numbers = bars.close / ema(bars.close, period) - 1
    return ratio


def macd(bars: Bars) -> Numbers:
    """(EMA of 12 closes - EMA of 26 closes) / close."""
    share: Numbers = _macd(bars) / bars.close
    return share


def macd_signal(bars: Bars) -> Numbers:
    """The EMA over 9 bars of the MACD in prices, / close."""
    share: Numbers = ema(_macd(bars), 9) / bars.close
    return share


def bollinger_position(bars: Bars, period: int) -> Numbers:
    """%B: where the close lies between the lower (0) and upper (1) Bollinger band; 0.5 where they meet."""
    offset, std = rolling_offset_and_std(bars.close, period)
    return _ratio(2 * std - offset, 4 * std, 0.5)


def bollinger_width(bars: Bars, period: int) -> Numbers:
    """The distance between the Bollinger bands / the mean of closes."""
    offset, std = rolling_offset_and_std(bars.close, period)
    width: Numbers = 4 * std / (bars.close + offset)
    return width


def atr_ratio(bars: Bars, period: int) -> Numbers:
    """Average true range, by Wilder's smoothing, / close."""
    before = bars.close[:-1]
    true_range = np.maximum(bars.high[1:], before) - np.minimum(bars.low[1:], before)
    share: Numbers = wilder(_after_warm_up(true_range, len(bars)), period) / bars.close
    return share


def stochastic(bars: Bars, period: int) -> Numbers:
    """%K: where the close lies between the lowest low (0) and the highest high (100) of `period` bars."""
    low, high = rolling_min(bars.low, period), rolling_max(bars.high, period)
    return 100 * _ratio(bars.close - low, high - low, 0.5)


def below_highest(bars: Bars, period: int) -> Numbers:
    """Close / the highest high of `period` bars - 1."""
    distance: Numbers = bars.close / rolling_max(bars.high, period) - 1
    return distance


def above_lowest(bars: Bars, period: int) -> Numbers:
    """Close / the lowest low of `period` bars - 1."""
    distance: Numbers = bars.close / rolling_min(bars.low, period) - 1
    return distance


def higher_highs(bars: Bars) -> Numbers:
    """How many of the last 4 known swing highs are above the one before."""
    return _rising_swings(bars.high)


def lower_lows(bars: Bars) -> Numbers:
    """How many of the last 4 known swing lows are below the one before."""
    return _rising_swings(-bars.low)


def since_swing(bars: Bars) -> Numbers:
    """Bars since the last known swing, high or low; at most 50, and 50 where there is none."""
    places = np.union1d(swing_highs(bars.high), swing_highs(-bars.low))
    last = np.append(-LONGEST_SINCE_SWING, places)[_known_swings(places, len(bars))]
    since: Numbers = np.minimum(np.arange(len(bars)) - last, LONGEST_SINCE_SWING).astype(np.float64)
    return since


def time_of_day(bars: Bars, wave: np.ufunc) -> Numbers:
    """Sine or cosine of the time of day when the bar begins, UTC."""
    return np.asarray(wave(2 * np.pi * (bars.times % DAY) / DAY))


def weekday(bars: Bars, wave: np.ufunc) -> Numbers:
    """Sine or cosine of the weekday when the bar begins, UTC; Monday is 0."""
    return np.asarray(wave(2 * np.pi * ((bars.times // DAY + 3) % 7) / 7))


BAR_FEATURES: dict[str, Callable[[Bars], Numbers]] = {
    **{f"return_{period}": partial(past_return, period=period) for period in (1, 3, 6, 12)},
    "log_range": log_range,
    "body": body,
    "upper_wick": upper_wick,
    "lower_wick": lower_wick,
    "volume_20": partial(relative_volume, period=20),
    "rsi_14": partial(rsi, period=14),
    **{f"ema_{period}": partial(ema_ratio, period=period) for period in (10, 20, 50)},
    "macd": macd,
    "macd_signal": macd_signal,
    "bollinger_position": partial(bollinger_position, period=20),
    "bollinger_width": partial(bollinger_width, period=20),
    "atr_14": partial(atr_ratio, period=14),
    "stochastic_14": partial(stochastic, period=14),
    **{f"below_high_{period}": partial(below_highest, period=period) for period in (20, 50)},
    **{f"above_low_{period}": partial(above_lowest, period=period) for period in (20, 50)},
    "higher_highs": higher_highs,
    "lower_lows": lower_lows,
    "since_swing": since_swing,
    "hour_sin": partial(time_of_day, wave=np.sin),
    "hour_cos": partial(time_of_day, wave=np.cos),
    "weekday_sin": partial(weekday, wave=np.sin),
    "weekday_cos": partial(weekday, wave=np.cos),
}
"""The features of the bars of the file."""

FRAME_FEATURES: dict[str, Callable[[Bars], Numbers]] = {
    "return_1": BAR_FEATURES["return_1"],
    "rsi_14": BAR_FEATURES["rsi_14"],
    "ema_20": BAR_FEATURES["ema_20"],
    "atr_14": BAR_FEATURES["atr_14"],
}
"""The features of the bars of each longer frame."""


# --- rolling windows, exponential averages and swings ---------------------------------------------------


def exponential_average(values: Numbers, period: int, alpha: float) -> Numbers:
    """s += alpha × (value - s), starting from the mean of the first `period` known values.

    Sums by doubling, over 1 row, 2, 4 and so on, since a loop over rows is slow; it stops where weights are negligible.
    Each row adds the same numbers in the same order, however many rows follow.
    """
    average = np.full(len(values), np.nan)
    start = int(np.isnan(values).sum()) + period - 1  # only values at the beginning are NaN
    if start >= len(values):
        return average
    sums = alpha * values[start:]
    sums[0] = values[start - period + 1 : start + 1].mean()
    reach, weight = 1, 1 - alpha
    while weight > SMALLEST_WEIGHT:
        sums[reach:] += weight * sums[:-reach]
        reach, weight = 2 * reach, weight * weight
    average[start:] = sums
    return average


def wilder(values: Numbers, period: int) -> Numbers:
    """Wilder's smoothing: an exponential average with alpha = 1 / period."""
    return exponential_average(values, period, 1 / period)


def ema(values: Numbers, period: int) -> Numbers:
    """Exponential moving average, with alpha = 2 / (period + 1)."""
    return exponential_average(values, period, 2 / (period + 1))


def rolling_sum(values: Numbers, period: int) -> Numbers:
    """The sum of the last `period` values."""
    rows = max(len(values) - period + 1, 0)
    total = np.zeros(rows)
    for back in range(period if rows else 0):
        total += values[back : back + rows]
    return _after_warm_up(total, len(values))


def rolling_offset_and_std(values: Numbers, period: int) -> tuple[Numbers, Numbers]:
    """Of the last `period` values: their mean minus the last one, and their (population) standard deviation."""
    # Differences to the last value lose no precision where values are large, and are 0 where they are constant.
    rows = max(len(values) - period + 1, 0)
    total, squares = np.zeros(rows), np.zeros(rows)
    for back in range(period if rows else 0):
        difference = values[back : back + rows] - values[period - 1 :]
        total += difference
        squares += difference * difference
    offset = total / period
    std = np.sqrt(np.maximum(squares / period - offset * offset, 0))
    return _after_warm_up(offset, len(values)), _after_warm_up(std, len(values))


def rolling_max(values: Numbers, period: int) -> Numbers:
    """The highest of the last `period` values, by doubling: ten times as fast as over numpy's `sliding_window_view`."""
    reach, top = 1, values
    while reach < period:
        step = min(reach, period - reach)
        top = np.maximum(top[step:], top[:-step])
        reach += step
    return _after_warm_up(top, len(values))


def rolling_min(values: Numbers, period: int) -> Numbers:
    """The lowest of the last `period` values."""
    return -rolling_max(-values, period)


def swing_highs(values: Numbers) -> Numbers:
    """The rows whose value is above the 3 before and not below the 3 after."""
    top = rolling_max(values, SWING_SIDE)
    here = np.arange(SWING_SIDE, max(len(values) - SWING_SIDE, SWING_SIDE))
    found: Numbers = here[(values[here] > top[here - 1]) & (values[here] >= top[here + SWING_SIDE])]
    return found


def _known_swings(swings: Numbers, rows: int) -> Numbers:
    """How many of these swings are known at each row."""
    known: Numbers = np.searchsorted(swings + SWING_SIDE, np.arange(rows), side="right")
    return known


def _rising_swings(values: Numbers) -> Numbers:
    """How many of the last 4 swing highs known at each row are above the one before."""
    swings = swing_highs(values)
    rises = np.append(0, np.cumsum(np.diff(values[swings], prepend=np.inf) > 0))
    known = _known_swings(swings, len(values))
    counts: Numbers = (rises[known] - rises[np.maximum(known - SWINGS_COUNTED, 0)]).astype(np.float64)
    return counts


def _macd(bars: Bars) -> Numbers:
    difference: Numbers = ema(bars.close, 12) - ema(bars.close, 26)
    return difference


def _ratio(part: Numbers, whole: Numbers, default: float) -> Numbers:
    """part / whole; `default` where the whole is not above 0, NaN where it is unknown."""
    ratio = np.where(np.isnan(whole), np.nan, default)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio


def _after_warm_up(values: Numbers, rows: int) -> Numbers:
    """These values as the last of `rows`, NaN before them."""
    padded = np.full(rows, np.nan)
    if len(values):
        padded[-len(values) :] = values
    return padded
