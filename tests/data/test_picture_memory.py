"""Decoded pictures in memory that processes share."""

import os
import signal

import pytest

from hotlap.data import picture_memory
from hotlap.data.picture_memory import PictureMemory, State, key_of
from hotlap.machine.limits import HostMemory

A, B = key_of(b"a"), key_of(b"b")


def in_child(work):
    """Run `work` in a forked process, and give its exit code, or minus its signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def memory():
    return PictureMemory(1 << 20)


def test_what_a_child_adds_its_parent_and_its_other_children_find(memory):
    assert in_child(lambda: memory.add(A, "RGB", (2, 1), 7, b"abcdef") or os._exit(2)) == 0
    found = memory.find(A)
    assert (found.mode, found.size, found.end) == ("RGB", (2, 1), 7)
    assert bytes(memory.pixels(found)) == b"abcdef"

    def look():
        assert bytes(memory.pixels(memory.find(A))) == b"abcdef"
        assert memory.find(B) is None

    assert in_child(look) == 0


def test_a_picture_may_be_known_before_its_pixels_are(memory):
    assert memory.add(A, "L", (3, 1), 0, None)
    assert memory.find(A).at is None
    assert memory.add(A, "L", (3, 1), 0, b"xyz")
    assert bytes(memory.pixels(memory.find(A))) == b"xyz"
    memory.add(A, "L", (3, 1), 0, None)
    assert memory.find(A).at is not None


def test_a_process_that_is_killed_while_it_adds_stops_no_other(memory):
    def killed():
        with picture_memory._Alone(memory) as alone:
            assert alone.holds
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == -signal.SIGKILL
    assert memory.add(A, "L", (1, 1), 0, b"x")


def test_while_another_process_holds_the_lock_nothing_is_added_and_nothing_waits_for_it(memory):
    go, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with picture_memory._Alone(memory):
            os.write(go[1], b"x")
            os.read(done[0], 1)
        os._exit(0)
    os.read(go[0], 1)
    assert not memory.add(A, "L", (1, 1), 0, b"x")
    assert memory.find(A) is None
    os.write(done[1], b"x")
    os.waitpid(pid, 0)
    assert memory.add(A, "L", (1, 1), 0, b"x")


def test_a_thread_that_holds_the_lock_at_a_fork_does_not_stop_the_child(memory):
    with memory._in_process:
        assert in_child(lambda: memory.add(A, "L", (1, 1), 0, b"x") or os._exit(2)) == 0
    assert memory.find(A) is not None


def test_it_takes_no_more_than_its_share(memory):
    assert memory.add(A, "L", (1 << 19, 2), 0, bytes(1 << 20))
    assert not memory.add(B, "L", (1, 1), 0, b"x")
    assert memory.add(B, "L", (1, 1), 0, None)  # takes no room
    assert memory.bytes_taken == 1 << 20


def test_it_stops_growing_when_the_machine_runs_short_of_memory(monkeypatch):
    free = [8 << 30]
    monkeypatch.setattr(
        picture_memory, "read_memory", lambda: HostMemory(allowed_bytes=1 << 40, host_bytes=1 << 40, free_bytes=free[0])
    )
    monkeypatch.setattr(picture_memory, "CHECKED", 4)
    memory = PictureMemory()
    assert memory.most_bytes == (8 << 30) // 3
    assert memory.add(A, "L", (5, 1), 0, b"12345")
    free[0] = picture_memory.RESERVE - 1
    assert not memory.add(B, "L", (1, 1), 0, b"x")
    free[0] = picture_memory.RESERVE // 2
    with pytest.raises(OSError, match="too little memory is free"):
        PictureMemory()


def test_counts_of_all_processes_add_up(memory):
    memory.count(0.5)
    assert in_child(lambda: memory.count_compared(0.25, 2.0, is_same=True)) == 0
    assert in_child(lambda: memory.count_remembered(4.0, 3.0)) == 0
    counts = memory.counts
    assert (counts.recalled, counts.recall_s, counts.compared) == (2, 0.75, 1)
    assert (counts.made_s, counts.compared_s, counts.remember_s) == (2.0, 0.25, 4.0)
    assert memory.recalled_here == 1
    assert (counts.remembered, counts.first_s) == (1, 3.0)
    assert (counts.each_made_s, counts.each_recalled_s) == (2.0, 0.375)
    memory.count_remembered(4.0, 0.0)
    assert memory.counts.each_made_s == 1.5  # new pictures were faster than the compared one


def test_keys_tell_parts_apart():
    assert key_of(b"ab", b"c") != key_of(b"a", b"bc")


def test_its_state_is_one_thing_for_all_processes(memory):
    assert (memory.state, memory.is_on) == (State.WAITING, False)

    def turn_on():
        memory.state = State.ON

    assert in_child(turn_on) == 0
    assert (memory.state, memory.is_on) == (State.ON, True)


def test_it_ends_early_where_few_of_the_pictures_would_fit(monkeypatch, memory):
    monkeypatch.setattr(picture_memory, "SAMPLE", 2)
    pixels = bytes(1 << 16)  # 16 of them fit
    memory.state = State.ON
    memory.expect(16 * 5)
    for at in range(4):
        assert memory.add(key_of(bytes([at])), "L", (1 << 16, 1), 0, pixels)
    memory.expect(16 * 5 + 1)
    assert not memory.add(A, "L", (1 << 16, 1), 0, pixels)
    assert memory.state is State.TOO_MANY
