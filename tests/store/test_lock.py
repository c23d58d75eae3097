"""One training per run folder, and no lock outlives its holder."""

import os
import signal
import subprocess
import threading
import time

import pytest
import torch
from killed import code_of, forked, in_a_child
from torch.utils.data import DataLoader, Dataset

from hotlap.core.errors import StoreError
from hotlap.store.run_folder import RunLock

HOLD = "import sys, pathlib; from hotlap.store.run_folder import RunLock; RunLock(pathlib.Path(sys.argv[1]))"


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path`, and its child: their numbers."""
    reading, writing = os.pipe()

    def hold():
        lock = RunLock(tmp_path)
        child = os.fork()
        if child != 0:
            os.write(writing, str(child).encode())
        time.sleep(600)
        lock.release()

    pid = forked(hold)
    os.close(writing)
    child = int(os.read(reading, 16))
    os.close(reading)
    yield pid, child
    os.kill(child, signal.SIGKILL)


def test_a_second_process_is_refused_and_told_who_has_it_and_a_kill_sets_it_free_though_its_child_lives_on(
    tmp_path, holder
):
    pid, child = holder
    with pytest.raises(StoreError, match=f"in use by process {pid}; wait for it, or name another folder"):
        RunLock(tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert code_of(pid) == -signal.SIGKILL
    os.kill(child, 0)  # it is there
    RunLock(tmp_path).release()


def test_the_same_process_is_refused_until_it_lets_go(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(StoreError, match="another training in this process"):
        RunLock(tmp_path)
    with pytest.raises(StoreError, match="another training in this process"):
        RunLock(tmp_path / "." / ".." / tmp_path.name)
    lock.release()
    lock.release()
    RunLock(tmp_path).release()


def test_letting_go_twice_does_not_set_free_what_another_holds(tmp_path):
    first = RunLock(tmp_path)
    first.release()
    second = RunLock(tmp_path)
    first.release()
    with pytest.raises(StoreError, match="in use"):
        RunLock(tmp_path)
    second.release()


def test_of_many_threads_one_gets_it(tmp_path):
    got, refused = [], []
    ready = threading.Barrier(8)

    def try_it():
        ready.wait()
        try:
            got.append(RunLock(tmp_path))
        except StoreError:
            refused.append(1)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    got[0].release()


def test_a_child_of_the_holder_is_refused_and_cannot_let_go_for_it(tmp_path):
    lock = RunLock(tmp_path)

    def child():
        lock.release()
        with pytest.raises(StoreError, match=f"in use by process {os.getppid()}"):
            RunLock(tmp_path)

    assert in_a_child(child) == 0
    assert in_a_child(child) == 0
    lock.release()


def test_a_child_may_take_it_once_its_parent_let_go(tmp_path):
    lock = RunLock(tmp_path)

    def child():
        os.read(gate, 1)
        RunLock(tmp_path)

    gate, opened = os.pipe()
    pid = forked(child)
    lock.release()
    os.write(opened, b"x")
    assert code_of(pid) == 0


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index)


def test_loader_workers_neither_keep_the_lock_nor_set_it_free(tmp_path, forks):
    lock = RunLock(tmp_path)
    loader = DataLoader(Numbers(), num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 4
    other = forks.run("-c", HOLD, tmp_path, cwd=tmp_path)
    assert other.returncode == 1
    assert f"in use by process {os.getpid()}" in other.stderr
    lock.release()
    assert in_a_child(lambda: RunLock(tmp_path)) == 0  # while the workers still live
    loader._iterator._shutdown_workers()


def test_a_folder_that_cannot_be_locked_is_told_with_the_reason(tmp_path):
    with pytest.raises(StoreError, match=r"cannot lock .*No such file"):
        RunLock(tmp_path / "missing")
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot lock"):
        RunLock(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_still_locks(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotlap.store.run_folder.os.write", full)
    lock = RunLock(tmp_path)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="in use"):
        RunLock(tmp_path)
    lock.release()


def test_a_program_started_by_the_holder_does_not_inherit_it(tmp_path):
    lock = RunLock(tmp_path)
    sleeper = subprocess.Popen(["sleep", "600"])
    lock.release()
    RunLock(tmp_path).release()
    sleeper.kill()
    sleeper.wait()
