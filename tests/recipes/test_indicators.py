"""Features of bars: those of a plain loop, and the same to the last bit whatever comes after."""

import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotlap
from hotlap.core.errors import DataError
from hotlap.recipes.bars import Bars, bars_from, last_complete, resampled
from hotlap.recipes.indicators import BAR_FEATURES, FRAME_FEATURES, Scaler, direction, features

NUMBERS = ("open", "high", "low", "close", "volume")
START = int(datetime(2024, 1, 8, tzinfo=UTC).timestamp())  # a Monday
NAN = math.nan


def made_bars(rows, seed, *, tick=0.01, gaps=True, symbol=""):
    """Bars by chance: with ties (prices in steps of a tick), flat bars, bars without volume, and missing bars."""
    chance = np.random.default_rng(seed)
    level = np.maximum(10 + np.cumsum(chance.normal(scale=0.03, size=rows)), 1)
    opens, closes = level, np.maximum(level + chance.normal(scale=0.03, size=rows), 0.5)
    tops = np.maximum(opens, closes) + chance.exponential(0.02, rows)
    lows = np.minimum(opens, closes) - np.minimum(chance.exponential(0.02, rows), 0.2)
    prices = [np.maximum(np.round(values / tick), 1) * tick for values in (opens, tops, lows, closes)]
    flat = chance.random(rows) < 0.1
    prices = [np.where(flat, prices[3], values) for values in prices]
    steps = np.where(gaps & (chance.random(rows) < 0.03), chance.integers(2, 9, rows), 1)
    volume = chance.integers(0, 50, rows) * (chance.random(rows) < 0.8)
    times = START + 900 * np.cumsum(steps)
    return Bars(times=times, **dict(zip(NUMBERS, [*prices, volume], strict=True)), seconds=900, symbol=symbol)


def first_rows(bars, rows):
    cut = {name: getattr(bars, name)[:rows] for name in ("times", "rows", *NUMBERS)}
    return replace(bars, **cut)


def with_other_bars(bars, places, seed):
    """The same times, with other prices and volumes at some places."""
    other = made_bars(len(bars), seed + 1000)
    scale = float(np.random.default_rng(seed).choice([0.01, 1, 100]))
    kept = {name: getattr(bars, name).copy() for name in NUMBERS}
    for name, values in kept.items():
        values[places] = getattr(other, name)[places] * scale
    return replace(bars, **kept)


def bits(values):
    """Numbers as they are stored, so that NaN is NaN and nothing else is."""
    return np.ascontiguousarray(values).view(np.uint32)


# Each feature once more: plain loops over lists, as a textbook has them.


def loop_smoothed(values, over, share):
    out, known = [], []
    for value in values:
        if math.isnan(value):
            out.append(NAN)
            continue
        known.append(value)
        if len(known) < over:
            out.append(NAN)
        elif len(known) == over:
            out.append(sum(known) / over)
        else:
            out.append(out[-1] + share * (value - out[-1]))
    return out


def loop_ema(values, over):
    return loop_smoothed(values, over, 2 / (over + 1))


def loop_over(values, over, function):
    return [function(values[at - over + 1 : at + 1]) if at >= over - 1 else NAN for at in range(len(values))]


def loop_return(bars, over):
    close = bars.close.tolist()
    return [close[at] / close[at - over] - 1 if at >= over else NAN for at in range(len(close))]


def loop_rsi(bars, over):
    close = bars.close.tolist()
    change = [NAN, *(b - a for a, b in pairwise(close))]
    rises = loop_smoothed([c if math.isnan(c) else max(c, 0) for c in change], over, 1 / over)
    falls = loop_smoothed([c if math.isnan(c) else max(-c, 0) for c in change], over, 1 / over)
    out = []
    for rise, fall in zip(rises, falls, strict=True):
        if math.isnan(rise):
            out.append(NAN)
        elif fall == 0:
            out.append(100 if rise > 0 else 50)
        else:
            out.append(100 - 100 / (1 + rise / fall))
    return out


def loop_atr(bars, over):
    high, low, close = bars.high.tolist(), bars.low.tolist(), bars.close.tolist()
    ranges = [NAN] + [
        max(high[at] - low[at], abs(high[at] - close[at - 1]), abs(low[at] - close[at - 1]))
        for at in range(1, len(close))
    ]
    return [mean / c for mean, c in zip(loop_smoothed(ranges, over, 1 / over), close, strict=True)]


def loop_ema_ratio(bars, over):
    close = bars.close.tolist()
    return [c / mean - 1 for c, mean in zip(close, loop_ema(close, over), strict=True)]


def loop_macd(bars):
    close = bars.close.tolist()
    return [fast - slow for fast, slow in zip(loop_ema(close, 12), loop_ema(close, 26), strict=True)]


def loop_bollinger(window):
    mean = math.fsum(window) / len(window)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in window) / len(window))
    lower, upper = mean - 2 * spread, mean + 2 * spread
    still = max(window) == min(window)
    return 0.5 if still else (window[-1] - lower) / (upper - lower), 0 if still else (upper - lower) / mean


def loop_candle(bars):
    """Body, upper and lower wick."""
    for o, h, low, c in zip(*(getattr(bars, name).tolist() for name in NUMBERS[:4]), strict=True):
        if h == low:
            yield 0, 0, 0
        else:
            yield (c - o) / (h - low), (h - max(o, c)) / (h - low), (min(o, c) - low) / (h - low)


def loop_stochastic(bars):
    for at in range(len(bars)):
        if at < 13:
            yield NAN
            continue
        low, high = min(bars.low[at - 13 : at + 1]), max(bars.high[at - 13 : at + 1])
        yield 50 if high == low else 100 * (bars.close[at] - low) / (high - low)


def loop_swings(values, upto):
    """Swings that are known when the bars up to this one are."""
    return [
        k
        for k in range(3, upto - 3 + 1)
        if all(values[k] > values[k - d] and values[k] >= values[k + d] for d in (1, 2, 3))
    ]


def loop_steps(values, at):
    places = loop_swings(values, at)
    rose = [False, *(values[b] > values[a] for a, b in pairwise(places))]
    return sum(rose[-4:]) if places else 0


def loop_since(bars, at):
    places = loop_swings(bars.high, at) + loop_swings(-bars.low, at)
    return min(at - max(places), 50) if places else 50


def loop_waves(bars):
    for time in bars.times.tolist():
        moment = datetime.fromtimestamp(time, UTC)
        day = 2 * math.pi * (moment.hour * 60 + moment.minute) / 1440
        week = 2 * math.pi * moment.weekday() / 7
        yield math.sin(day), math.cos(day), math.sin(week), math.cos(week)


def share_of_close(values, bars):
    return [value / close for value, close in zip(values, bars.close.tolist(), strict=True)]


def loop_volume(bars):
    for window in loop_over(bars.volume.tolist(), 20, list):
        if isinstance(window, float):
            yield NAN
        else:
            yield window[-1] / (sum(window) / 20) - 1 if sum(window) else 0


def below(bars, over):
    return [c / top - 1 for c, top in zip(bars.close, loop_over(bars.high.tolist(), over, max), strict=True)]


def above(bars, over):
    return [c / low - 1 for c, low in zip(bars.close, loop_over(bars.low.tolist(), over, min), strict=True)]


def bands(bars, which):
    close = bars.close.tolist()
    return [NAN if isinstance(pair, float) else pair[which] for pair in loop_over(close, 20, loop_bollinger)]


LOOPS = {
    "return_1": lambda bars: loop_return(bars, 1),
    "return_3": lambda bars: loop_return(bars, 3),
    "return_6": lambda bars: loop_return(bars, 6),
    "return_12": lambda bars: loop_return(bars, 12),
    "log_range": lambda bars: [math.log(h / low) for h, low in zip(bars.high, bars.low, strict=True)],
    "body": lambda bars: [candle[0] for candle in loop_candle(bars)],
    "upper_wick": lambda bars: [candle[1] for candle in loop_candle(bars)],
    "lower_wick": lambda bars: [candle[2] for candle in loop_candle(bars)],
    "volume_20": lambda bars: list(loop_volume(bars)),
    "rsi_14": lambda bars: loop_rsi(bars, 14),
    "ema_10": lambda bars: loop_ema_ratio(bars, 10),
    "ema_20": lambda bars: loop_ema_ratio(bars, 20),
    "ema_50": lambda bars: loop_ema_ratio(bars, 50),
    "macd": lambda bars: share_of_close(loop_macd(bars), bars),
    "macd_signal": lambda bars: share_of_close(loop_ema(loop_macd(bars), 9), bars),
    "bollinger_position": lambda bars: bands(bars, 0),
    "bollinger_width": lambda bars: bands(bars, 1),
    "atr_14": lambda bars: loop_atr(bars, 14),
    "stochastic_14": lambda bars: list(loop_stochastic(bars)),
    "below_high_20": lambda bars: below(bars, 20),
    "below_high_50": lambda bars: below(bars, 50),
    "above_low_20": lambda bars: above(bars, 20),
    "above_low_50": lambda bars: above(bars, 50),
    "higher_highs": lambda bars: [loop_steps(bars.high, at) for at in range(len(bars))],
    "lower_lows": lambda bars: [loop_steps(-bars.low, at) for at in range(len(bars))],
    "since_swing": lambda bars: [loop_since(bars, at) for at in range(len(bars))],
    "hour_sin": lambda bars: [wave[0] for wave in loop_waves(bars)],
    "hour_cos": lambda bars: [wave[1] for wave in loop_waves(bars)],
    "weekday_sin": lambda bars: [wave[2] for wave in loop_waves(bars)],
    "weekday_cos": lambda bars: [wave[3] for wave in loop_waves(bars)],
}


def test_every_feature_has_its_plain_loop():
    assert list(LOOPS) == list(BAR_FEATURES)


@pytest.mark.parametrize("name", BAR_FEATURES)
@pytest.mark.parametrize(("rows", "tick"), [(150, 0.05), (150, 1e-6), (7, 0.01), (1, 0.01)])
def test_a_feature_is_that_of_a_plain_loop(name, rows, tick):
    bars = made_bars(rows, seed=rows + len(name), tick=tick)
    # A share of prices that differ little has lost as many digits as they share: 1e-9 of 64 bits is a lot to keep.
    np.testing.assert_allclose(BAR_FEATURES[name](bars), LOOPS[name](bars), rtol=1e-9, atol=1e-12)


def test_the_features_are_those_numbers_in_32_bits_in_their_order():
    bars = made_bars(150, seed=3)
    found = features(bars, frames=(3600,))
    assert found.names == (*BAR_FEATURES, "h1_return_1", "h1_rsi_14", "h1_ema_20", "h1_atr_14")
    assert found.values.dtype == np.float32
    for at, name in enumerate(BAR_FEATURES):
        assert np.array_equal(found.values[:, at], BAR_FEATURES[name](bars).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("seconds", [1800, 3600])
def test_features_of_longer_bars_are_those_of_a_plain_loop_over_what_was_complete(seconds):
    bars = made_bars(180, seed=8)
    found = features(bars, frames=(seconds,))
    longer = resampled(bars, seconds)
    for at, name in enumerate(FRAME_FEATURES, start=len(BAR_FEATURES)):
        by_loop = LOOPS[name](longer)
        for row in range(len(bars)):
            complete = [k for k, begin in enumerate(longer.times) if begin + seconds <= bars.times[row] + 900]
            expected = by_loop[complete[-1]] if complete else NAN
            assert found.values[row, at] == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)
    assert np.isfinite(found.values[found.first :]).all()
    assert found.first < len(bars)


# What comes later changes nothing.

cases = st.tuples(st.integers(330, 420), st.integers(0, 999)).map(lambda case: made_bars(case[0], case[1]))
few = st.tuples(st.integers(1, 90), st.integers(0, 999)).map(lambda case: made_bars(case[0], case[1]))
FRAMES = (1800, 3600)


@settings(max_examples=60, deadline=None)
@given(bars=st.one_of(cases, few), data=st.data())
def test_no_feature_at_or_before_a_bar_changes_with_bars_after_it(bars, data):
    frames = data.draw(st.sampled_from([FRAMES, (3600, 14400)]))
    at = data.draw(st.integers(0, len(bars) - 1))
    seed = data.draw(st.integers(0, 99))
    later = np.flatnonzero((np.arange(len(bars)) > at) & (np.random.default_rng(seed).random(len(bars)) < 0.7))
    before, after = features(bars, frames), features(with_other_bars(bars, later, seed), frames)
    assert np.array_equal(bits(before.values[: at + 1]), bits(after.values[: at + 1]))
    if before.first <= at:
        assert after.first == before.first


@settings(max_examples=60, deadline=None)
@given(bars=st.one_of(cases, few), data=st.data())
def test_features_of_the_first_bars_are_the_first_features(bars, data):
    frames = data.draw(st.sampled_from([FRAMES, (3600, 14400)]))
    rows = data.draw(st.integers(1, len(bars)))
    whole, part = features(bars, frames), features(first_rows(bars, rows), frames)
    assert np.array_equal(bits(whole.values[:rows]), bits(part.values))
    assert part.first == min(whole.first, rows)


def test_every_feature_changes_with_the_bar_itself_or_with_its_time():
    """The tests above would hold for features that look at nothing, too."""
    bars = made_bars(400, seed=5, gaps=False)
    at = 383  # its close ends an hour and four hours
    assert bars.ends[at] % 14400 == 900  # so that the longer bars that end with the row before are seen
    row = at - 1
    changes = [with_other_bars(bars, np.arange(row - 20, row + 1), seed) for seed in range(3)]
    before = features(bars).values[row]
    differs = np.any([features(other).values[row] != before for other in changes], axis=0)
    unmoved = [name for name, moved in zip(features(bars).names, differs, strict=True) if not moved]
    assert unmoved == ["hour_sin", "hour_cos", "weekday_sin", "weekday_cos"]


def test_a_swing_is_not_known_before_three_bars_have_passed():
    tops = np.full(40, 10.0)
    tops[10], tops[20] = 12, 13
    ones = np.full(40, 9.0)
    bars = Bars(times=START + 900 * np.arange(40), open=ones, high=tops, low=ones, close=ones, volume=ones, seconds=900)
    since, steps = BAR_FEATURES["since_swing"](bars), BAR_FEATURES["higher_highs"](bars)
    assert since[12:15].tolist() == [50, 3, 4]
    assert since[22:25].tolist() == [12, 3, 4]
    assert steps[20:24].tolist() == [0, 0, 0, 1]


@settings(max_examples=60, deadline=None)
@given(bars=few, ahead=st.integers(1, 12), over=st.none() | st.integers(2, 20), data=st.data())
def test_no_label_at_or_before_a_bar_changes_with_bars_after_its_future(bars, ahead, over, data):
    threshold = 1.0 if over else 0.002
    at = data.draw(st.integers(0, len(bars) - 1))
    seed = data.draw(st.integers(0, 99))
    labels = direction(bars, ahead, threshold, volatility_window=over)
    later = np.arange(at + ahead + 1, len(bars))
    other = direction(with_other_bars(bars, later, seed), ahead, threshold, volatility_window=over)
    assert np.array_equal(labels[: at + 1], other[: at + 1])
    if at + ahead < len(bars):
        part = direction(first_rows(bars, at + ahead + 1), ahead, threshold, volatility_window=over)
        assert np.array_equal(labels[: at + 1], part[: at + 1])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), rows=st.tuples(st.integers(60, 120), st.integers(60, 120)))
def test_two_symbols_in_one_file_have_the_features_they_have_alone(seed, rows):
    alone = [made_bars(rows[0], seed, symbol="A"), made_bars(rows[1], seed + 1, symbol="B")]
    order = np.random.default_rng(seed).permutation(sum(rows))  # rows of the file in any order
    columns = {name: np.concatenate([getattr(bars, name) for bars in alone])[order] for name in ("times", *NUMBERS)}
    columns["time"] = columns.pop("times")
    columns["symbol"] = np.repeat(["A", "B"], rows)[order]
    for bars in bars_from(columns):
        expected = alone["AB".index(bars.symbol)]
        together, by_itself = features(bars, FRAMES), features(expected, FRAMES)
        assert np.array_equal(bits(together.values), bits(by_itself.values))
        assert together.first == by_itself.first
        assert np.array_equal(direction(bars, 4, 0.002), direction(expected, 4, 0.002))


# What is finite, and from where on.


def test_the_warm_up_ends_with_the_twentieth_bar_of_the_longest_frame():
    bars = made_bars(400, seed=1, gaps=False)
    found = features(bars)
    assert found.values.shape == (400, 38)
    assert last_complete(bars, resampled(bars, 14400))[found.first - 1 : found.first + 1].tolist() == [18, 19]
    assert np.isnan(found.values[found.first - 1]).any()
    assert np.isfinite(found.values[found.first :]).all()


def test_without_longer_frames_the_warm_up_is_fifty_bars():
    found = features(made_bars(60, seed=1), frames=())
    assert (found.first, found.values.shape) == (49, (60, 30))


def test_too_few_bars_end_before_the_warm_up_does():
    assert features(made_bars(100, seed=1)).first == 100


def test_a_market_that_stands_still_has_finite_features():
    still = np.full(400, 1.1)
    bars = Bars(
        times=START + 900 * np.arange(400),
        open=still,
        high=still,
        low=still,
        close=still,
        volume=0 * still,
        seconds=900,
    )
    found = features(bars)
    row = dict(zip(found.names, found.values[-1].tolist(), strict=True))
    assert np.isfinite(found.values[found.first :]).all()
    assert [row[name] for name in ("rsi_14", "stochastic_14", "bollinger_position", "volume_20", "body")] == [
        50,
        50,
        0.5,
        0,
        0,
    ]
    assert row["ema_50"] == pytest.approx(0, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), wild=st.lists(st.sampled_from([1e-15, 1e-7, 1.0, 1e9, 1e15]), min_size=4, max_size=4))
def test_whatever_prices_do_features_are_finite_after_the_warm_up(seed, wild):
    chance = np.random.default_rng(seed)
    a, b, c, d = (chance.choice(wild, 150) for _ in range(4))
    top, bottom = np.maximum(np.maximum(a, b), np.maximum(c, d)), np.minimum(np.minimum(a, b), np.minimum(c, d))
    volume = chance.choice([0, 1, 1e30], 150)
    times = START + 900 * np.arange(150)
    bars = Bars(times=times, open=a, high=top, low=bottom, close=b, volume=volume, seconds=900)
    found = features(bars, frames=(1800, 3600))
    assert found.first == 79  # when the twentieth hour is complete
    assert np.isfinite(found.values[found.first :]).all()


def test_frames_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="bars of 1000 s cannot be made of bars of 900 s"):
        features(made_bars(60, seed=1), frames=(1000,))


# Labels.


@pytest.mark.parametrize("ahead", [1, 4, 70])
@pytest.mark.parametrize("over", [None, 10])
def test_labels_are_those_of_a_plain_loop(ahead, over):
    bars, threshold = made_bars(60, seed=2), 1.2 if over else 0.003
    labels = direction(bars, ahead, threshold, volatility_window=over)
    close = bars.close.tolist()
    returns = [NAN, *(b / a - 1 for a, b in pairwise(close))]
    for at in range(60):
        if at + ahead >= 60 or (over and at < over):
            assert labels[at] == -1
            continue
        bound = threshold
        if over:
            window = returns[at - over + 1 : at + 1]
            bound *= math.sqrt(ahead) * math.sqrt(sum((r - sum(window) / over) ** 2 for r in window) / over)
        moved = close[at + ahead] / close[at] - 1
        assert labels[at] == (2 if moved > bound else 0 if moved < -bound else 1)
    assert labels.dtype == np.int64
    assert ahead == 70 or set(labels.tolist()) == {-1, 0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ahead": 0, "threshold": 0.1}, "ahead=0 must be a whole number of at least 1"),
        ({"ahead": 1.5, "threshold": 0.1}, "ahead=1.5 must be a whole number"),
        ({"ahead": 1, "threshold": -0.1}, "threshold=-0.1 must be a number above zero"),
        ({"ahead": 1, "threshold": "x"}, "threshold='x' must be a number above zero"),
        (
            {"ahead": 1, "threshold": 1.0, "volatility_window": 1},
            "volatility_window=1 must be a whole number of at least 2",
        ),
    ],
)
def test_impossible_settings_of_labels_are_refused(arguments, said):
    with pytest.raises(DataError, match=said):
        direction(made_bars(60, seed=1), **arguments)


# Mean and spread of the training.


def test_mean_and_standard_deviation_are_those_of_the_training_rows_alone():
    chance = np.random.default_rng(0)
    values = chance.normal(5, 3, (200, 4)).astype(np.float32)
    values[:, 2] = 0.1  # says nothing
    scaler = Scaler.fit(values[:100])
    train = scaler.transform(values[:100])
    assert train.dtype == np.float32
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train.std(axis=0), [1, 1, 0, 1], atol=1e-6)
    tell = values[:, [0, 1, 3]].astype(np.float64)
    expected = (tell[100:] - tell[:100].mean(axis=0)) / tell[:100].std(axis=0)
    np.testing.assert_allclose(scaler.transform(values[100:])[:, [0, 1, 3]], expected, rtol=1e-6)
    other = values.copy()
    other[100:] *= 100
    assert Scaler.fit(other[:100]).to_dict() == scaler.to_dict()


def test_a_feature_that_never_changes_becomes_zero():
    values = np.full((10, 2), 0.1)
    assert (values.std(axis=0) > 0).all()  # by a rounding of the mean
    assert abs(Scaler.fit(values).transform(values)).max() < 1e-12


def test_a_scaler_read_from_json_is_the_same_to_the_last_bit():
    values = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    scaler = Scaler.fit(values)
    again = Scaler.from_dict(json.loads(json.dumps(scaler.to_dict())))
    assert np.array_equal(bits(scaler.transform(values)), bits(again.transform(values)))


def test_features_that_cannot_be_scaled_are_refused():
    values = np.ones((5, 2), np.float32)
    with pytest.raises(DataError, match="row 1 of the training has features that are not known"):
        Scaler.fit(np.array([[np.nan, 1.0], [1.0, 2.0]]))
    with pytest.raises(DataError, match="rows × features"):
        Scaler.fit(values[0])
    with pytest.raises(DataError, match=r"shape \(5, 2\); those of the training had 3 columns"):
        Scaler(np.zeros(3), np.ones(3)).transform(values)
    for kept in ({"mean": [0.0]}, {"mean": ["x"], "spread": [1]}, [], None):
        with pytest.raises(DataError, match="does not hold lists of numbers"):
            Scaler.from_dict(kept)
    for kept in ({"mean": [0.0], "spread": [0.0]}, {"mean": [0.0, 1.0], "spread": [1.0]}):
        with pytest.raises(DataError, match="spreads above zero"):
            Scaler.from_dict(kept)


def test_features_and_labels_go_into_windows_by_symbol():
    both = [made_bars(rows, seed=rows) for rows in (120, 140)]
    found = [features(bars, FRAMES) for bars in both]
    ahead = 4
    series = [one.values[one.first : -ahead] for one in found]
    labels = [direction(bars, ahead, 0.002)[one.first : -ahead] for bars, one in zip(both, found, strict=True)]
    windows = hotlap.Windows(series, 20, target=labels)
    assert len(windows) == sum(len(one) - 19 for one in series)
    window, label = windows[len(series[0]) - 19]  # the first of the second symbol
    assert torch.equal(window, torch.from_numpy(series[1][:20]))
    assert label == labels[1][19]
