"""Trainings found by what they left, and whether they still run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hotlap.core.errors import StoreError, UsageError
from hotlap.monitor import trainings
from hotlap.monitor.trainings import OutsideReader, find, named
from hotlap.store.telemetry import write_live


def leave(folder, **state):
    folder.mkdir(parents=True, exist_ok=True)
    write_live(folder, {"pid": os.getpid(), "at": time.time(), "ended": False, **state})


@pytest.fixture
def gone():
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_training_is_running_until_it_has_ended_and_killed_where_its_process_is_gone(tmp_path, gone):
    leave(tmp_path / "a")
    leave(tmp_path / "b", ended=True)
    leave(tmp_path / "c", pid=gone)
    found = {training.folder.name: training.status for training in find(tmp_path)}
    assert found == {"a": "running", "b": "ended", "c": "killed"}


def test_a_training_that_runs_and_says_nothing_is_silent(tmp_path, monkeypatch):
    leave(tmp_path / "a")
    leave(tmp_path / "b", kind="search")  # it speaks between its trials only
    later = time.time() + 100
    monkeypatch.setattr("time.time", lambda: later)
    assert {training.folder.name: training.status for training in find(tmp_path)} == {"a": "silent", "b": "running"}


def test_a_later_process_of_the_same_number_is_another(tmp_path):
    leave(tmp_path / "a", at=1000.0)  # before this process began
    assert [training.status for training in find(tmp_path)] == ["killed"]


def test_those_that_run_come_first_and_then_the_latest(tmp_path, gone):
    now = time.time()
    leave(tmp_path / "x", ended=True, at=now + 10)
    leave(tmp_path / "y", ended=True, at=now + 50)
    leave(tmp_path / "z", at=now)
    assert [training.folder.name for training in find(tmp_path)] == ["z", "y", "x"]


@pytest.mark.parametrize("place", ["", "a", "a/models/mlp", "a/search/trials/0001"])
def test_trainings_are_found_wherever_recipes_and_searches_put_them(tmp_path, place):
    leave(tmp_path / place)
    assert [training.folder for training in find(tmp_path)] == [tmp_path / place]


def test_neither_checkpoints_nor_hidden_folders_nor_links_are_looked_into(tmp_path):
    for name in ("checkpoints/step-1", ".cache", "1/2/3/4/5/6"):
        leave(tmp_path / name)
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find(tmp_path) == []


def test_of_very_many_folders_the_first_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "MOST_FOLDERS", 3)
    for number in range(9):
        leave(tmp_path / str(number))
    assert len(find(tmp_path)) == 2


def test_where_there_is_no_folder_there_is_no_training(tmp_path):
    assert find(tmp_path / "runs") == []


def test_a_folder_or_a_number_is_watched_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "77").mkdir()
    (tmp_path / "file").write_text("")
    assert str(named(None)) == "runs"
    assert named("77").name == "77"
    assert named("78") == 78
    with pytest.raises(StoreError, match="file is a file; name the folder of a run, or the number of a process"):
        named("file")
    with pytest.raises(StoreError, match="gone does not exist"):
        named("gone")


def test_of_any_process_its_work_its_memory_and_its_children_are_seen():
    reader = OutsideReader(os.getpid())
    sum(range(10**6))
    found = reader.read([{"index": 0, "other_pids": [os.getpid()]}, {"index": 1, "other_pids": [1]}])
    assert found["pid"] == os.getpid()
    assert found["ram_bytes"] > 0
    assert found["cores_busy"] >= 0
    assert found["gpus"] == [0]
    assert "python" in found["command"]


def test_a_process_that_is_gone_is_none_and_one_that_never_was_is_refused(gone):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    reader = OutsideReader(child.pid)
    assert reader.read([])["pid"] == child.pid
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert reader.read([]) is None
    with pytest.raises(UsageError, match=f"no process has the number {gone}"):
        OutsideReader(gone)
