"""Samples fetched by forked processes: the same rows, and nothing left behind whatever goes wrong."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotlap.data import background_fetch
from hotlap.data.background_fetch import CHUNK, BackgroundFetch, free_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
TOTAL = 3 * CHUNK + 5


def rows(positions):
    """Samples of several kinds."""
    numbers = torch.tensor(list(positions))
    return [numbers, numbers[:, None].float() / torch.arange(1, 4), numbers % 2 == 0, torch.zeros(len(numbers), 0)]


def fetch(read=rows, total=TOTAL, processes=3, expected_s=0.0):
    return BackgroundFetch(read, rows([0]), total, processes=processes, expected_s=expected_s)


def is_running(pid):
    """Whether there is such a process; a zombie is none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    return "State:\tZ" not in status


def wait_for_end(pids):
    while any(map(is_running, pids)):
        time.sleep(0.001)


@pytest.mark.parametrize("processes", [1, 2, 3, 16])
@pytest.mark.parametrize("total", [1, CHUNK, TOTAL])
def test_all_samples_are_fetched_in_their_order(total, processes):
    background = fetch(total=total, processes=processes)
    assert background.wait()
    assert background.missing == 0
    assert not background.has_failed
    for column, wanted in zip(background.columns, rows(range(total)), strict=True):
        assert column.dtype == wanted.dtype
        assert torch.equal(column, wanted)


def test_they_come_while_this_process_goes_on(tmp_path):
    gate = tmp_path / "gate"

    def waits(positions):
        while positions[0] and not gate.exists():
            time.sleep(0.001)
        return rows(positions)

    background = fetch(waits, processes=1)
    while background.missing > 1 - 1 / 4:
        time.sleep(0.001)
    assert not background.is_done
    assert background.missing == 1 - 1 / 4
    gate.touch()
    assert background.wait()


def test_rows_outlive_what_fetched_them():
    background = fetch()
    assert background.wait()
    columns = background.columns
    del background
    gc.collect()
    assert torch.equal(columns[0], torch.arange(TOTAL))


def raises(positions):
    raise ValueError("no such sample")


def dies(positions):
    os._exit(7)


def narrower(positions):
    numbers, *others = rows(positions)
    return [numbers.int(), *others] if positions[0] else [numbers, *others]


def fewer(positions):
    return rows(positions)[:2]


@pytest.mark.parametrize("kind", [raises, dies, narrower, fewer])
@pytest.mark.parametrize("processes", [1, 3])
def test_a_process_that_fails_ends_it(kind, processes, capfd):
    def only_in_the_last(positions):
        return kind(positions) if positions[0] >= 2 * CHUNK else rows(positions)

    background = fetch(only_in_the_last, processes=processes)
    assert not background.wait()
    assert background.has_failed
    assert not background.is_done
    assert capfd.readouterr() == ("", "")


def forever(positions):
    while True:
        time.sleep(0.01)


def test_what_takes_far_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(background_fetch, "LEAST_PATIENCE_S", 0.0)
    background = fetch(forever)
    pid = background._pid
    assert not background.wait()
    assert not is_running(pid)


@pytest.mark.parametrize("end", ["close", "forget"])
def test_nothing_runs_on_when_it_is_no_longer_needed(end, tmp_path):
    def notes(positions):
        (tmp_path / str(os.getpid())).touch()
        return forever(positions)

    background = fetch(notes)
    while len(list(tmp_path.iterdir())) < 3:
        time.sleep(0.001)
    if end == "close":
        background.close()
        assert background.has_failed
    else:
        del background
        gc.collect()
    wait_for_end([int(file.name) for file in tmp_path.iterdir()])


def test_processes_end_with_the_one_that_began_them(tmp_path):
    def notes(positions):
        (tmp_path / str(os.getpid())).touch()
        return forever(positions)

    pid = os.fork()
    if pid == 0:
        background = fetch(notes)
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
        background.close()
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    pids = [int(file.name) for file in tmp_path.iterdir()]
    wait_for_end(pids)
    assert len(pids) == 3


def test_a_fork_of_the_process_does_not_end_them():
    background = fetch(forever)
    pid = os.fork()
    if pid == 0:
        background._finalizer()
        os._exit(0)
    os.waitpid(pid, 0)
    assert not background.is_done
    assert not background.has_failed
    background.close()


def test_a_script_that_waits_for_all_of_its_children_disturbs_nothing():
    pid = os.fork()  # this process may have other children
    if pid == 0:
        background = fetch()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        os._exit(0 if background.is_done and torch.equal(background.columns[0], torch.arange(TOTAL)) else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("cores", "busy", "ranks", "processes"),
    [
        (16, 0, None, 15),
        (64, 0, None, 16),
        (4, 1, None, 2),
        (2, 0, None, 0),
        (4, 2, None, 0),
        (4, 8, None, 0),
        (16, 0, "4", 3),
        (16, 0, "8", 0),
        (16, 0, "none", 15),
        (16, 0, "0", 15),
    ],
)
def test_cores_are_left_to_the_training_its_workers_and_other_ranks(cores, busy, ranks, processes, monkeypatch):
    monkeypatch.setattr(background_fetch, "read_cpu", lambda: SimpleNamespace(cores=cores))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert free_cores(busy) == processes


def test_a_script_that_does_not_fork_is_not_forked(monkeypatch):
    monkeypatch.setattr(background_fetch, "read_cpu", lambda: SimpleNamespace(cores=16))
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    assert free_cores(0) == 0
