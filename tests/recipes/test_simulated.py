"""Bars that nobody traded: a signal of the size that was asked for, and nothing else to find."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hotlap.core.errors import DataError
from hotlap.recipes.indicators import Scaler, direction, features
from hotlap.recipes.simulated_bars import simulated_bars

AHEAD, THRESHOLD = 4, 0.002


def known_trend(bars):
    """Of each bar from the 13th on: the sign of its return over 12 bars, and the next return."""
    logs = np.log(bars.close)
    return np.sign(logs[12:-1] - logs[:-13]), np.diff(logs)[12:]


def balanced_accuracy(signal, seed=0):
    """Of a linear model on rows that come after those it was trained on; each class counts as much as any other."""
    (bars,) = simulated_bars(16_000, seed=seed, signal=signal)
    found = features(bars)
    rows = slice(found.first, len(bars) - AHEAD)
    values, labels = found.values[rows], torch.from_numpy(direction(bars, AHEAD, THRESHOLD)[rows])
    cut = int(0.7 * len(values))
    x = torch.from_numpy(Scaler.fit(values[:cut]).transform(values))
    weight = 1 / torch.bincount(labels[:cut], minlength=3)
    layer = torch.zeros(3, x.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([layer], max_iter=30, line_search_fn="strong_wolfe")

    def scores(part):
        return F.linear(part, layer[:, :-1], layer[:, -1])

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(scores(x[:cut]), labels[:cut], weight=weight) + 1e-3 * layer.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    guesses, truth = scores(x[cut + AHEAD :]).argmax(dim=1), labels[cut + AHEAD :]
    return float(torch.stack([(guesses[truth == kind] == kind).float().mean() for kind in range(3)]).mean())


def test_simulated_bars_are_of_15_minutes_on_working_days():
    first, second = simulated_bars(1000, symbols=2)
    assert (first.symbol, second.symbol, first.seconds, len(first)) == ("SIM1", "SIM2", 900, 1000)
    days = (first.times // 86400 + 3) % 7
    assert set(days.tolist()) == {0, 1, 2, 3, 4}
    assert set(np.diff(first.times).tolist()) == {900, 2 * 86400 + 900}
    assert (first.low <= np.minimum(first.open, first.close)).all()
    assert (first.high >= np.maximum(first.open, first.close)).all()
    assert (first.volume >= 0).all()


def test_a_seed_gives_the_same_bars_however_many_symbols_there_are():
    alone, (_, two) = simulated_bars(300, seed=4), simulated_bars(300, symbols=2, seed=4)
    both = simulated_bars(300, symbols=3, seed=4)
    for name in ("open", "high", "low", "close", "volume"):
        assert np.array_equal(getattr(alone[0], name), getattr(both[0], name))
        assert np.array_equal(getattr(two, name), getattr(both[1], name))
        assert not np.array_equal(getattr(both[0], name), getattr(both[1], name))
        assert not np.array_equal(getattr(alone[0], name), getattr(simulated_bars(300, seed=5)[0], name))


@pytest.mark.parametrize("signal", [0.0, 0.1, 0.3])
def test_the_signal_has_the_size_that_was_asked_for(signal):
    (bars,) = simulated_bars(40_000, seed=1, signal=signal)
    trend, after = known_trend(bars)
    # The spread of a correlation over 40,000 rows is 0.005.
    assert np.corrcoef(trend, after)[0, 1] == pytest.approx(signal, abs=0.02)
    assert np.std(after) == pytest.approx(0.0006, rel=0.05)


@pytest.mark.parametrize("signal", [0.0, 0.1, 0.3])
def test_most_directions_are_flat(signal):
    (bars,) = simulated_bars(20_000, seed=2, signal=signal)
    labels = direction(bars, AHEAD, THRESHOLD)
    down, flat, up = np.bincount(labels[labels >= 0], minlength=3) / (len(labels) - AHEAD)
    assert 0.8 < flat < 0.95
    assert min(down, up) > 0.03


def test_a_linear_model_finds_the_signal():
    assert balanced_accuracy(signal=0.3) > 0.42


def test_without_a_signal_there_is_nothing_to_find():
    assert balanced_accuracy(signal=0.0) < 0.37


def test_the_strongest_signal_keeps_prices_within_bounds():
    (bars,) = simulated_bars(110_000, signal=0.5)
    assert bars.close.min() > 1e-6
    assert bars.close.max() < 1e10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rows": 0}, "rows=0 must be a whole number of at least 1"),
        ({"rows": 10, "symbols": 0}, "symbols=0 must be a whole number of at least 1"),
        ({"rows": 10, "seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"rows": 10, "signal": 0.6}, "signal=0.6 must be a number from 0 to 0.5"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, said):
    with pytest.raises(DataError, match=said):
        simulated_bars(**arguments)
