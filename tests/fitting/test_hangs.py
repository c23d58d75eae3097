"""Trainings that really hang: what is waited for is shown, and workers that hang are replaced."""

import itertools
import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from plain import parameters_of
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from worker_training import BATCH, EPOCHS, HARMFUL, SAMPLES, Numbers, trained

from hotlap.engine.rig import Rig


@pytest.fixture(autouse=True)
def _hangs_are_seen_soon(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLAP_HANG_S", "0.4")
    monkeypatch.setattr("hotlap.guard.processes.GRACE_S", 0.2)
    monkeypatch.setattr("hotlap.fitting.training.SIGNAL_S", 0.1)
    # How long torch's loader waits before it looks whether workers are alive.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


def once(hang):
    """Hang the first worker that comes here, in this test."""
    flag = Path.cwd() / "hung"

    def hangs(is_worker):
        if is_worker:
            try:
                os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            hang()

    return hangs


def block():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def in_every_worker(is_worker):
    if is_worker:
        block()


def faults(run):
    return [entry for entry in run.ledger if entry.kind == "fault"]


def kinds(run):
    return [entry.what for entry in faults(run)]


@pytest.mark.parametrize(("hang", "state"), [(block, "is asleep"), (stop, "is stopped")])
def test_a_worker_that_hangs_is_ended_and_each_sample_comes_once(hang, state):
    all_seen, seen = [], []
    expected = trained(Numbers(), seen=all_seen)
    run = trained(Numbers(once(hang)), workers=2, seen=seen)
    assert seen == all_seen
    assert Counter(itertools.chain(*seen)) == dict.fromkeys(range(SAMPLES), EPOCHS)
    assert torch.equal(parameters_of(run.model), parameters_of(expected.model))
    assert kinds(run) == ["hang", "workers died"]
    assert run.plan.feed.workers == 2
    told = faults(run)[0].why
    assert "the training waits for a batch from worker processes" in told
    assert state in told
    assert ("block: lock.acquire()" in told) == (hang is block)
    assert any("a batch from worker processes" in problem for problem in run.problems)


def test_workers_that_hang_again_become_fewer_and_then_none():
    all_seen, seen = [], []
    trained(Numbers(), seen=all_seen)
    run = trained(Numbers(in_every_worker), workers=2, seen=seen)
    assert seen == all_seen
    assert kinds(run) == ["hang", "workers died"] * 3
    assert run.plan.feed.workers == 0


def test_an_evaluation_whose_workers_hang_is_made_again():
    def valid(hang):
        return DataLoader(Numbers(hang), batch_size=BATCH, num_workers=1)

    expected = trained(Numbers(), valid=valid(lambda is_worker: None))
    run = trained(Numbers(), valid=valid(once(block)))
    assert [one["valid_loss"] for one in run.history] == [one["valid_loss"] for one in expected.history]
    assert kinds(run) == ["hang"]


class Released(logging.Handler):
    """A lock that another thread holds until hotlap has told of a hang."""

    def __init__(self):
        super().__init__()
        self.held, self.told = threading.Lock(), []
        self.held.acquire()

    def emit(self, record):
        self.told.append(record.getMessage())
        if "no progress for" in self.told[-1]:
            self.held.release()


@pytest.fixture
def released():
    handler, log = Released(), logging.getLogger("hotlap")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def test_a_dataset_that_hangs_in_this_process_is_reported_with_its_sample_and_goes_on(released):
    def hang(is_worker):
        if released.held.locked():
            with released.held:
                pass

    seen = []
    run = trained(Numbers(hang), seen=seen)
    assert Counter(itertools.chain(*seen)) == dict.fromkeys(range(SAMPLES), EPOCHS)
    assert kinds(run) == ["hang"]
    wanted = (
        f"the training waits for a batch from the dataset, in this process (sample {HARMFUL} of Numbers), "
        "which waits for a lock or another thread"
    )
    assert wanted in faults(run)[0].why
    assert any("hang: with released.held:" in line for line in released.told)


def test_a_deadlock_in_a_model_is_reported_and_kept_in_the_folder_while_it_hangs(released):
    kept = []

    def in_loss():
        if released.held.locked():
            with released.held:
                pass
            while not kept:
                kept.extend(line for line in open_ledger() if line["what"] == "hang")
                time.sleep(0.01)

    run = trained(Numbers(), in_loss=in_loss)
    assert kinds(run) == ["hang"]
    assert "the training waits for a lock or another thread" in kept[0]["why"]
    assert "thread MainThread" in kept[0]["why"]


def test_a_training_that_does_not_let_go_of_its_workers_at_the_end_is_reported_and_leaves_no_thread(
    released, monkeypatch
):
    own, before = Rig.close, threading.active_count()

    def close(rig):
        if released.held.locked():
            with released.held:
                pass
        own(rig)

    monkeypatch.setattr(Rig, "close", close)
    run = trained(Numbers())
    assert kinds(run) == ["hang"]
    assert any("the training waits for a lock or another thread" in line for line in released.told)
    assert threading.active_count() == before


def open_ledger():
    (run,) = Path("runs").iterdir()
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


END = """
import sys, threading, torch, hotlap
told = threading.Event()
class Words:
    closed = False
    def write(self, text):
        sys.__stderr__.write(text)
        if "has not for" in text:
            told.set()
    def flush(self): ...
sys.stderr = Words()
threading.Thread(target=told.wait, name="lingering").start()
x = torch.randn(64, 4)
model = torch.nn.Linear(4, 1)
hotlap.fit(hotlap.Job(model=model, data=(x, x[:, :1]), loss=torch.nn.MSELoss(), batch_size=32, epochs=1, device="cpu",
    optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)), progress=False)
print("trained")
"""


def test_a_program_that_has_ended_and_whose_process_has_not_says_what_it_waits_for(forks, tmp_path):
    (tmp_path / "train.py").write_text(END)
    done = forks.run("train.py", cwd=tmp_path, timeout_s=120, HOTLAP_HANG_S="0.3")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert (
        "the program has ended, and its process has not for 300 ms: "
        "it waits for threads that still run after its end (lingering)" in done.stderr
    )
