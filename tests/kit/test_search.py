"""The search for a batch: it finds the largest that trains, wherever it begins, and stops where it should."""

from hypothesis import given
from hypothesis import strategies as st

from hotlap.kit.search import KNEE, Search, Searched, Trial, fastest, knee


def search(attempt, **how):
    return Search(attempt=attempt, **how).run()


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


@given(limit=st.integers(200, 5000), share=st.floats(0.3, 0.95))
def test_the_largest_that_keeps_the_reserve_is_timed(limit, share):
    attempt, _ = trials_of(limit, bytes_of=lambda size: 50 + 3 * size)
    room = share * (50 + 3 * limit)
    found = search(attempt, start=32, most=10**6, room_bytes=room, by_speed=False)
    kept = max(found.within(room), key=lambda one: one.size)
    assert kept.size >= 0.95 * (room - 50) // 3 - 1
    assert kept.taken_bytes <= room


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


def test_time_that_is_up_ends_it_and_says_so():
    attempt, asked = trials_of()
    found = search(
        attempt, start=1, most=10**6, room_bytes=10**9, by_speed=False, enough=lambda: "up" if len(asked) > 3 else None
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
