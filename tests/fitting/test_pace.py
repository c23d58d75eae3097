"""Rates and the time left, on a clock that the test holds in its hand."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap.fitting import progress
from hotlap.fitting.progress import Pace


class Clock:
    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    held = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=held.perf_counter))
    return held


def read(one, step, samples=None):
    return one.read(step=step, samples=step * 32 if samples is None else samples, epoch=2, loss=0.5)


def test_rates_are_steps_and_samples_per_second(clock):
    one = Pace(100)
    clock.now += 4
    reading = read(one, 10, 300)
    assert (reading.steps_per_s, reading.samples_per_s) == (2.5, 75.0)
    assert reading.eta_s == 90 / 2.5
    assert reading.elapsed_s == 4
    assert (reading.step, reading.total_steps, reading.epoch, reading.loss) == (10, 100, 2, 0.5)


def test_rates_are_those_since_the_last_reading(clock):
    one = Pace(100)
    clock.now += 10
    read(one, 10)
    clock.now += 1
    reading = read(one, 20)
    assert (reading.steps_per_s, reading.samples_per_s) == (10, 320)
    assert reading.eta_s == 8
    assert reading.elapsed_s == 11


def test_paused_time_is_left_out_of_rates_and_of_the_time_left(clock):
    one = Pace(100)
    clock.now += 5
    one.pause(2)
    one.pause(1)
    reading = read(one, 10)
    assert reading.steps_per_s == 5
    assert reading.eta_s == 18
    assert reading.elapsed_s == 5


def test_a_run_that_goes_on_is_not_credited_with_the_steps_before(clock):
    one = Pace(100, step=50, samples=1600)
    clock.now += 2
    reading = read(one, 60)
    assert (reading.steps_per_s, reading.samples_per_s, reading.eta_s) == (5, 160, 8)


def test_a_pause_counts_once(clock):
    one = Pace(100)
    clock.now += 5
    one.pause(4)
    read(one, 10)
    clock.now += 5
    assert read(one, 20).steps_per_s == 2


def test_before_the_first_step_nothing_is_divided_and_no_end_is_promised(clock):
    one = Pace(100)
    for _ in range(2):
        reading = read(one, 0)
        assert (reading.steps_per_s, reading.samples_per_s, reading.eta_s) == (0, 0, None)
        clock.now += 3


def test_steps_in_no_time_at_all_give_no_rate_yet(clock):
    one = Pace(100)
    assert read(one, 5).steps_per_s == 0
    clock.now += 1
    assert read(one, 10).steps_per_s == 10


def test_without_a_new_step_the_last_rate_stands_and_the_wait_counts_later(clock):
    one = Pace(100)
    clock.now += 1
    read(one, 10)
    clock.now += 1
    assert read(one, 10).steps_per_s == 10
    clock.now += 1
    assert read(one, 20).steps_per_s == 5


def test_without_a_known_end_no_time_left_is_told(clock):
    one = Pace(None)
    clock.now += 1
    reading = read(one, 10)
    assert (reading.total_steps, reading.eta_s, reading.steps_per_s) == (None, None, 10)


def test_at_the_end_and_beyond_nothing_is_left(clock):
    one = Pace(10)
    clock.now += 1
    assert read(one, 10).eta_s == 0
    clock.now += 1
    assert read(one, 12).eta_s == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.integers(0, 50)), max_size=8))
def test_whatever_happens_rates_and_times_are_never_negative(happenings):
    held, real = Clock(), progress.time
    progress.time = SimpleNamespace(perf_counter=held.perf_counter)
    try:
        one, step = Pace(100), 0
        for spent, paused, steps in happenings:
            held.now += spent
            one.pause(paused)
            step += steps
            reading = read(one, step)
            assert reading.steps_per_s >= 0
            assert reading.samples_per_s >= 0
            assert reading.eta_s is None or reading.eta_s >= 0
    finally:
        progress.time = real
