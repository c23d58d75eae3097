"""Comparisons of two plans: rarely fooled by any machine, quick where the gain is large, honest in their intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
import pytest
from benchmarks.tuner_stats import CALM, Row, broken, compare, row, summed
from hypothesis import given
from hypothesis import strategies as st
from tests.tuner.traces import KINDS, RECORDED, consecutive, quads, recorded

from hotlap.tuner.stats import LEAST_GAIN, MOST_QUADS, Comparison, Estimate, shares, student_t

TIMES = st.floats(1e-6, 1e3)
QUADS = st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES), min_size=1, max_size=MOST_QUADS)


def fed(*given_quads: tuple[float, float, float, float]) -> Comparison:
    comparison = Comparison()
    for quad in given_quads:
        comparison.add(*quad)
    return comparison


def all_of(given_quads: Iterable[tuple[float, float, float, float]]) -> Estimate:
    """The estimate from all quads, by one look at the end, whatever fewer would have decided."""
    laps = list(given_quads)
    comparison = Comparison()
    comparison._shares = {len(laps): 0.05}
    for quad in laps:
        comparison.add(*quad)
    return comparison.estimate


def run(kind: str, ratio: float, spread: float, comparisons: int = 150) -> Row:
    return row(kind, ratio, spread, comparisons, seed=7, tossed=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_plan_is_not_taken_for_a_faster_one(kind):
    for spread in (0.005, 0.02):
        assert run(kind, 1.0, spread).accepted <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_slower_plan_is_never_accepted(kind):
    for ratio in (0.99, 0.95, 0.8):
        assert run(kind, ratio, 0.02, 60).accepted == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_gain_just_at_the_least_is_seldom_accepted(kind):
    found = run(kind, LEAST_GAIN, 0.02)
    assert found.accepted <= 0.05 * found.comparisons
    assert found.covered >= 0.93 * found.comparisons


@pytest.mark.parametrize("kind", CALM)
@pytest.mark.parametrize("ratio", [1.05, 1.1, 2.0, 10.0])
def test_gains_are_found_on_calm_machines(kind, ratio):
    for spread in (0.005, 0.02):
        found = run(kind, ratio, spread, 100)
        assert broken(found) == []
        assert found.quads <= {1.05: 10, 1.1: 4}.get(ratio, 2.2)


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_hold_the_truth(kind):
    for ratio in (1.0, 1.05, 2.0):
        found = run(kind, ratio, 0.01, 80)
        assert found.covered >= 0.93 * found.comparisons


def test_a_tossed_coin_keeps_a_beat_of_four_laps_out_of_the_figures():
    found = row("beating", 1.0, 0.005, 200, seed=7, tossed=True)
    assert found.accepted <= 2
    assert found.covered >= 0.93 * found.comparisons
    # In step with the quads, the same beat is a gain to every test there is.
    assert row("beating", 1.0, 0.005, 200, seed=7, tossed=False).covered < 0.93 * 200


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.iterdir()))
def test_a_recorded_training_is_not_taken_for_faster_than_itself(name):
    ends = [compare(laps) for laps in consecutive(recorded(name), count=MOST_QUADS)]
    found = summed(ends, kind=name, ratio=1.0, spread=math.nan)
    # Neighbouring cuts share all but one lap, so one unlucky stretch counts many times.
    assert found.accepted <= 0.01 * found.comparisons
    assert found.covered >= 0.93 * found.comparisons


def test_a_recorded_training_made_twice_as_fast_is_found():
    ends = [compare(laps) for laps in consecutive(recorded("mlp-1-thread"), count=MOST_QUADS, every=8, ratio=2.0)]
    found = summed(ends, kind="mlp-1-thread", ratio=2.0, spread=math.nan)
    assert found.accepted == found.comparisons
    assert found.quads < 5


@pytest.mark.parametrize(
    ("b", "verdict"),
    [(0.5, "accepted"), (0.97, "accepted"), (0.99, "rejected"), (1.0, "rejected"), (1.01, "slower"), (2.0, "slower")],
)
def test_laps_without_noise_decide_at_the_first_look(b, verdict):
    comparison = fed(*[(1.0, b, b, 1.0)] * 2)
    assert comparison.verdict == verdict
    assert comparison.estimate.low == comparison.estimate.high == pytest.approx(1 / b)
    assert comparison.estimate.noise == 0


def test_the_verdict_follows_from_the_interval():
    rng = np.random.default_rng(3)
    for ratio in (0.97, 1.0, 1.02, 1.04):
        for laps in quads(KINDS["steady"], ratio=ratio, spread=0.02, comparisons=50, count=16, rng=rng):
            verdict, end = compare(laps)
            if verdict == "accepted":
                assert end.low > LEAST_GAIN
            elif verdict == "slower":
                assert end.high < 1
            elif verdict == "rejected":
                assert 1 <= end.high < LEAST_GAIN
            else:
                assert verdict == "no difference seen"
                assert end.quads == MOST_QUADS
                assert end.low <= LEAST_GAIN <= end.high


def test_it_goes_on_while_undecided_and_ends_at_the_most_quads():
    comparison = Comparison(most_quads=6)
    for number in range(6):
        assert comparison.verdict is None
        sign = (-1) ** number
        comparison.add(1.02**sign, 1.0, 1.0, 1.02**sign)
    assert comparison.verdict == "no difference seen"
    with pytest.raises(RuntimeError, match="has ended"):
        comparison.add(1.0, 1.0, 1.0, 1.0)


def test_one_quad_says_how_much_but_not_how_surely():
    comparison = fed((2.0, 1.0, 1.0, 2.0))
    assert comparison.verdict is None
    assert dataclasses.astuple(comparison.estimate) == (pytest.approx(2.0), 0.0, math.inf, 0.0, 1)


def test_no_quad_no_estimate():
    assert Comparison().verdict is None
    with pytest.raises(ValueError, match="no quad"):
        _ = Comparison().estimate


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("place", range(4))
def test_times_that_cannot_be_are_refused_and_leave_no_trace(bad, place):
    comparison = fed((2.0, 1.0, 1.0, 2.0))
    laps = [1.0] * 4
    laps[place] = bad
    with pytest.raises(ValueError, match=("a1", "b1", "b2", "a2")[place]):
        comparison.add(*laps)
    assert comparison.estimate.quads == 1


@pytest.mark.parametrize("options", [{"most_quads": 1}, {"least": 0.0}, {"least": math.nan}, {"least": math.inf}])
def test_limits_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="not"):
        Comparison(**options)


@given(QUADS)
def test_a_and_b_swapped_turn_the_ratio_over(laps):
    there = all_of(laps)
    back = all_of((b1, a1, a2, b2) for a1, b1, b2, a2 in laps)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert (1 / there.low if there.low else math.inf) == pytest.approx(back.high, rel=1e-3)
    assert there.noise == pytest.approx(back.noise)


@given(QUADS, st.floats(1e-3, 1e3))
def test_a_machine_slower_throughout_changes_nothing(laps, factor):
    here = all_of(laps)
    there = all_of(tuple(lap * factor for lap in quad) for quad in laps)
    assert dataclasses.astuple(there) == pytest.approx(dataclasses.astuple(here), rel=1e-3, abs=1e-9)


@given(st.floats(-0.05, 0.05), st.floats(0.5, 2.0))
def test_drift_in_a_straight_line_cancels(drift, ratio):
    times = np.exp(drift * np.arange(4 * MOST_QUADS)).reshape(-1, 4).tolist()
    forth = all_of((first, second / ratio, third / ratio, fourth) for first, second, third, fourth in times)
    back = all_of((second, first / ratio, fourth / ratio, third) for first, second, third, fourth in times)
    assert forth.ratio == pytest.approx(ratio)
    assert back.ratio == pytest.approx(ratio)


def test_the_noise_is_that_of_a_lap_whatever_spikes_do():
    rng = np.random.default_rng(5)
    for kind in ("steady", "spiky"):
        laps = quads(KINDS[kind], ratio=1.5, spread=0.02, comparisons=100, count=16, rng=rng)
        seen = [all_of(of_one.tolist()).noise for of_one in laps]
        assert np.median(seen) == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize(
    ("freedom", "chance", "value"),
    [
        (1, 0.05, 12.706),
        (1, 0.002, 318.309),
        (2, 0.05, 4.303),
        (2, 0.01, 9.925),
        (3, 0.002, 10.215),
        (4, 0.05, 2.776),
        (5, 0.01, 4.032),
        (7, 0.05, 2.365),
        (10, 0.01, 3.169),
        (15, 0.02, 2.602),
        (19, 0.05, 2.093),
        (30, 0.001, 3.646),
    ],
)
def test_t_is_as_in_the_tables(freedom, chance, value):
    assert student_t(freedom, chance) == pytest.approx(value, abs=6e-4)


def test_t_is_as_scipy_has_it():
    t = pytest.importorskip("scipy.stats", reason="scipy is not a dependency").t
    for freedom in range(1, 40):
        for chance in (0.2, 0.05, 0.01, 0.002, 0.0005):
            assert student_t(freedom, chance) == pytest.approx(t.ppf(1 - chance / 2, freedom))


@pytest.mark.parametrize("most_quads", [2, 3, 5, 16, 17, 40])
def test_the_looks_together_miss_in_five_percent_and_end_at_the_most_quads(most_quads):
    assert math.fsum(shares(most_quads).values()) == pytest.approx(0.05)
    assert max(shares(most_quads)) == most_quads


def test_looks_come_less_and_less_often():
    assert list(shares(16)) == [2, 3, 4, 6, 8, 12, 16]


def test_laps_beyond_all_reason_have_an_interval_too():
    end = fed((1e300, 1e-300, 1.0, 1.0), (1e-300, 1e300, 1.0, 1.0)).estimate
    assert end.low == 0
    assert end.high == math.inf
