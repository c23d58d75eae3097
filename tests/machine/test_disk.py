"""Shared memory and the disk."""

from __future__ import annotations

import itertools
import os

import pytest

from hotlap.machine.disk import DiskSpeed, Room, disk_problems, measure_disk, read_room, shm_problems

GIB = 1024**3
MIB = 1024**2
FAST = DiskSpeed(write_bytes_per_s=1e9, read_bytes_per_s=1e9)


def test_the_disk_is_measured_and_nothing_is_left_behind(tmp_path):
    speed = measure_disk(tmp_path)
    assert speed.write_bytes_per_s > 0
    assert speed.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_no_more_than_64_mib_are_written(tmp_path, monkeypatch):
    written = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)) or real(fd, data))
    measure_disk(tmp_path, clock=lambda: 0.0)
    assert sum(written) == 64 * MIB


def test_a_slow_disk_ends_the_measurement_early(tmp_path, monkeypatch):
    written = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)) or real(fd, data))
    ticks = itertools.count()
    measure_disk(tmp_path, clock=lambda: next(ticks) * 0.3)
    assert sum(written) < 16 * MIB


def test_a_folder_that_cannot_be_written_is_a_problem_and_not_a_crash(tmp_path):
    speed = measure_disk(tmp_path / "missing")
    assert speed.error
    (problem,) = disk_problems(None, speed)
    assert (problem.severity, problem.key) == ("stops", "disk-not-writable")


def test_a_disk_that_fills_up_while_measured_is_a_problem_and_not_a_crash(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    speed = measure_disk(tmp_path)
    assert speed.error == "No space left on device"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "expected"),
    [(100 * GIB, []), (2 * GIB, [("disk-short", "note")]), (10 * MIB, [("disk-full", "stops")])],
)
def test_little_room_is_told_and_no_room_stops(free, expected):
    found = disk_problems(Room(total_bytes=200 * GIB, free_bytes=free), FAST)
    assert [(problem.key, problem.severity) for problem in found] == expected


def test_a_slow_disk_slows():
    speed = DiskSpeed(write_bytes_per_s=3e6, read_bytes_per_s=1e9)
    (problem,) = disk_problems(None, speed)
    assert (problem.key, problem.severity) == ("disk-slow", "slows")


def test_a_containers_default_shared_memory_is_too_small_and_the_cure_is_named():
    (problem,) = shm_problems(Room(total_bytes=64 * MIB, free_bytes=64 * MIB), expected=True)
    assert problem.severity == "slows"
    assert "--shm-size" in problem.do


def test_enough_shared_memory_is_no_problem_and_none_is_only_where_one_is_expected():
    assert shm_problems(Room(total_bytes=8 * GIB, free_bytes=8 * GIB), expected=True) == []
    assert shm_problems(None, expected=False) == []
    assert len(shm_problems(None, expected=True)) == 1


def test_room_in_a_folder_that_is_not_there_is_unknown(tmp_path):
    assert read_room(tmp_path / "missing") is None
    assert read_room(tmp_path).free_bytes > 0
