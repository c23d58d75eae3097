"""The search for a batch: it finds the largest that trains, wherever it begins, and stops where it should."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap.kit.search import KNEE, Searched, SizeSearch, TooShortError, Trial, fastest, knee, line_through


def search(attempt, **how):
    return SizeSearch(attempt=attempt, **how).run()


def trials_of(limit=10**9, speed=lambda size: float(size), bytes_of=lambda size: size):
    asked = []

    def attempt(size, timed):
        asked.append((size, timed))
        if size > limit:
            return Trial(size=size, why_not="out of memory")
        return Trial(
            size=size, samples_per_s=speed(size) if timed else None, peak_bytes=size, taken_bytes=bytes_of(size)
        )

    return attempt, asked


@given(limit=st.integers(1, 5000), start=st.integers(1, 8000), most=st.integers(1, 8000), least=st.sampled_from([1, 2]))
def test_the_largest_that_trains_is_found_to_the_sample_from_wherever_it_begins(limit, start, most, least):
    attempt, _ = trials_of(limit)
    found = search(attempt, start=start, least=least, most=most, room_bytes=10**12, by_speed=False)
    expected = min(limit, max(most, least))
    if expected < least:
        assert found.largest is None
        assert "not even 2 samples" in found.ended
    else:
        assert found.largest.size == expected
        assert found.largest.samples_per_s is not None
        assert found.found_largest == (limit < max(most, least))
    assert all(one.size >= least for one in found.trials)


@given(limit=st.integers(1, 3000), later=st.integers(1, 3000), start=st.integers(1, 4000))
def test_the_largest_is_one_that_trains_when_it_is_timed_too(limit, later, start):
    attempt, _ = trials_of(limit)

    def at_edge(size, timed):
        return attempt(size, timed) if size <= later or not timed else Trial(size=size, why_not="memory in pieces")

    found = search(at_edge, start=start, most=10**6, room_bytes=10**12, by_speed=False)
    assert found.largest.size == min(limit, later)
    assert found.largest.samples_per_s is not None
    assert found.found_largest
    assert found.ended.startswith(f"{min(limit, later) + 1:,} does not train: ")


@given(limit=st.integers(200, 5000), share=st.floats(0.3, 0.95))
def test_the_largest_that_keeps_the_reserve_is_timed(limit, share):
    attempt, _ = trials_of(limit, bytes_of=lambda size: 50 + 3 * size)
    room = share * (50 + 3 * limit)
    found = search(attempt, start=32, most=10**6, room_bytes=room, by_speed=False)
    kept = max(found.within(room), key=lambda one: one.size)
    assert kept.size >= 0.95 * (room - 50) // 3 - 1
    assert kept.taken_bytes <= room


@given(edge=st.integers(20, 600), start=st.integers(1, 1000))
def test_the_largest_that_keeps_the_reserve_is_found_where_memory_leaps(edge, start):
    attempt, _ = trials_of(700, speed=float, bytes_of=lambda size: size if size <= edge else 1001)
    found = search(attempt, start=start, most=10**6, room_bytes=1000, by_speed=False)
    kept = fastest(found.within(1000))
    assert 0.94 * edge - 1 <= kept.size <= edge


def test_where_memory_never_ends_two_doublings_without_a_gain_end_it():
    attempt, asked = trials_of(speed=lambda size: float(min(size, 256)))
    found = search(attempt, start=16, most=10**6, room_bytes=10**12, by_speed=True)
    assert max(size for size, _ in asked) == 1024
    assert found.ended == "larger ones are no faster"
    assert not found.found_largest


def test_where_memory_never_ends_no_batch_is_tried_that_would_take_more_than_is_free():
    attempt, asked = trials_of()
    found = search(attempt, start=16, most=10**6, room_bytes=1000, by_speed=True)
    assert max(size for size, _ in asked) == 512
    assert "more memory than is free" in found.ended


def test_smaller_ones_are_timed_until_they_are_clearly_slower():
    attempt, asked = trials_of(speed=lambda size: 100.0 if size <= 64 else 50.0, limit=512)
    search(attempt, start=256, most=512, room_bytes=10**9, by_speed=False)
    assert min(size for size, _ in asked) == 1
    attempt, asked = trials_of(limit=512)
    search(attempt, start=256, most=512, room_bytes=10**9, by_speed=False)
    assert min(size for size, _ in asked) == 64


def test_a_first_size_that_was_far_too_small_is_corrected_by_what_it_took():
    attempt, asked = trials_of(1100, bytes_of=lambda size: 500 + 2 * size)

    def with_rest(size, timed):
        return dataclasses.replace(attempt(size, timed), rest_bytes=500)

    found = search(with_rest, start=4, most=10**6, room_bytes=500 + 2 * 1000, by_speed=False)
    assert [size for size, _ in asked[:3]] == [4, 512, 1024]  # in place of 8, 16, 32 …
    assert found.largest.size == 1100
    timed = {one.size for one in found.trials if one.samples_per_s is not None}
    assert all(any(size / 1.5 <= one <= size * 1.5 for one in timed) for size in (8, 16, 32, 64, 128, 256, 512))
    assert found.line.bytes_a_sample == 2
    assert found.line.rest_bytes == 500
    assert found.line.size_at(2500) == 1000


def test_memory_that_does_not_grow_tells_nothing_of_a_sample():
    flat = [Trial(size=size, taken_bytes=100, rest_bytes=100) for size in (1, 8)]
    assert line_through(flat) is None
    assert line_through(flat[:1]) is None
    assert line_through([]) is None


def test_time_that_is_up_ends_it_and_says_so():
    attempt, asked = trials_of()
    found = search(
        attempt, start=1, most=10**6, room_bytes=1, by_speed=False, enough=lambda: "up" if len(asked) > 3 else None
    )
    assert found.ended == "up"
    assert len(asked) == 4


def test_the_knee_is_the_smallest_that_is_nearly_as_fast_as_the_fastest():
    speeds = {8: 10.0, 16: 90.0, 32: 96.0, 64: 100.0, 128: 99.0}
    trials = [Trial(size=size, samples_per_s=speed, taken_bytes=size) for size, speed in speeds.items()]
    assert fastest(trials).size == 64
    assert knee(trials).size == 32
    assert speeds[32] >= KNEE * speeds[64]
    within = Searched(trials=tuple(trials), ended="", found_largest=False).within(20)
    assert [one.size for one in within] == [8, 16]
    assert fastest([]) is None
    assert knee([]) is None


def test_a_training_that_is_over_too_soon_at_a_size_ends_the_search_with_what_was_seen():
    def attempt(size, timed):
        if size > 200:
            raise TooShortError("mine is over after 5 updates with batch_size=400, too few to be timed")
        return Trial(size=size, samples_per_s=100.0 * size)

    found = SizeSearch(attempt=attempt, start=50, most=10_000, room_bytes=1e9, by_speed=True).run()
    assert [one.size for one in found.trials if one.samples_per_s][-1] == 200
    assert found.ended == "mine is over after 5 updates with batch_size=400, too few to be timed"
    assert not found.found_largest


def test_a_training_that_is_over_too_soon_as_it_is_says_so():
    def attempt(size, timed):
        raise TooShortError("mine is over after 5 updates, too few to be timed")

    with pytest.raises(TooShortError, match="over after 5 updates"):
        SizeSearch(attempt=attempt, start=50, most=10_000, room_bytes=1e9, by_speed=True).run()


@given(limit=st.integers(40, 3000), fastest_at=st.integers(20, 3000))
def test_sizes_between_those_that_are_nearly_the_fastest_are_timed_too(limit, fastest_at):
    attempt, _ = trials_of(limit, speed=lambda size: 100.0 - abs(size - fastest_at) / max(size, fastest_at))
    found = search(attempt, start=32, most=10**6, room_bytes=limit, by_speed=False)
    timed = [one for one in found.trials if one.samples_per_s is not None]
    best = fastest(timed).samples_per_s
    for low, high in itertools.pairwise(timed):
        if max(low.samples_per_s, high.samples_per_s) >= KNEE * best:
            assert high.size <= 1.2 * low.size + 2


def test_a_size_that_is_faster_than_its_neighbours_is_found():
    attempt, asked = trials_of(512, speed=lambda size: 104.0 if size == 96 else 100.0)
    found = search(attempt, start=64, most=10**6, room_bytes=512, by_speed=False)
    assert fastest([one for one in found.trials if one.samples_per_s]).size == 96
    assert len(asked) == len(set(asked))


def test_sizes_that_leave_no_reserve_do_not_say_which_are_nearly_the_fastest():
    attempt, _ = trials_of(512, speed=lambda size: {96: 104.0}.get(size, 100.0 if size <= 300 else 200.0))
    found = search(attempt, start=64, most=10**6, room_bytes=300, by_speed=False)
    assert fastest(found.within(300)).size == 96


def test_between_the_sizes_of_a_script_none_is_timed_since_each_takes_a_process():
    asked_by = {}
    for finer in (None, 8):
        attempt, asked = trials_of(512, speed=lambda size: 100.0)
        search(attempt, start=64, most=10**6, room_bytes=512, by_speed=False, finer=finer)
        asked_by[finer] = {size for size, timed in asked if timed}
    assert {80, 96, 112} <= asked_by[None]
    assert not {80, 96, 112} & asked_by[8]
