"""Workers that die in a training: it goes on at the same batch, with the same numbers."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from plain import parameters_of
from torch.utils.data import DataLoader
from worker_training import BATCH, Numbers, trained

import hotlap
from hotlap.fitting.lost_workers import LostWorkers, deaths_raised_by_the_feed, is_lost


@pytest.fixture(autouse=True)
def _no_signal_is_waited_for(monkeypatch):
    monkeypatch.setattr("hotlap.fitting.training.SIGNAL_S", 0.1)
    looks = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(looks, "__defaults__", (0.5,))  # torch looks for dead workers every 5 s


@pytest.fixture
def undisturbed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    return trained(Numbers(), workers=2, seen=seen), seen


def faults(run):
    return [entry.why for entry in run.ledger if entry.outcome == "fault"]


def once(file):
    """Kill the worker that fetches sample 20, the first time."""

    def deadly(is_worker):
        if is_worker and not file.exists():
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return deadly


def always(is_worker):
    if is_worker:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_started_again_and_no_sample_is_lost(tmp_path, undisturbed):
    expected, all_seen = undisturbed
    seen = []
    run = trained(Numbers(once(tmp_path / "killed")), workers=2, seen=seen)
    assert (tmp_path / "killed").exists()
    assert torch.equal(parameters_of(run.model), parameters_of(expected.model))
    assert seen == all_seen
    assert [why.partition("; ")[2].partition(" from")[0] for why in faults(run)] == ["2 workers"]
    assert run.plan.feed.workers == 2
    assert any("exited unexpectedly" in problem for problem in run.problems)


def test_workers_that_die_again_become_fewer_and_then_none(tmp_path, undisturbed):
    expected, all_seen = undisturbed
    seen = []
    run = trained(Numbers(always), workers=2, seen=seen)
    assert torch.equal(parameters_of(run.model), parameters_of(expected.model))
    assert seen == all_seen
    told = [why.partition("; ")[2].partition(" from")[0] for why in faults(run)]
    assert told == ["2 workers", "1 worker", "no workers"]
    assert run.plan.feed.workers == 0


def test_a_death_while_a_batch_is_handed_over_is_told_in_words():
    rig = SimpleNamespace(plan=hotlap.Plan().but(kind="loader", workers=2), steps=7, ledger=hotlap.Ledger())
    said = LostWorkers(rig).answer(EOFError())
    assert said == "a worker died while it handed over a batch; 2 workers from step 7 on"


def test_an_evaluation_whose_workers_die_is_made_again(tmp_path, undisturbed):
    def valid(deadly):
        return DataLoader(Numbers(deadly), batch_size=BATCH, num_workers=2)

    scores = [
        [record["valid_loss"] for record in trained(Numbers(), workers=2, valid=valid(deadly)).history]
        for deadly in (lambda is_worker: None, once(tmp_path / "killed"))
    ]
    assert scores[0] == scores[1]


def test_an_error_of_the_dataset_names_the_sample(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 33:
                raise ValueError("not a picture")
            return super().__getitem__(index)

    for workers in (0, 2):
        with pytest.raises(ValueError, match="not a picture") as raised:
            trained(Broken(), workers=workers)
        notes = [str(raised.value), *getattr(raised.value, "__notes__", [])]
        assert any("while fetching sample 33 of Broken" in note for note in notes)


def test_no_shared_memory_is_told_with_its_cure_and_takes_fewer_workers_at_once(tmp_path, undisturbed):
    class Short(Numbers):
        def __getitem__(self, index):
            if os.getpid() != self.parent and not (tmp_path / "short").exists():
                (tmp_path / "short").touch()
                raise RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)")
            return super().__getitem__(index)

    expected, _ = undisturbed
    run = trained(Short(), workers=2)
    assert torch.equal(parameters_of(run.model), parameters_of(expected.model))
    (why,) = faults(run)
    assert "1 worker from step" in why  # 0, or 1 where the other worker came first
    assert "/dev/shm is too small" in why


def test_other_errors_are_none_of_workers():
    assert not is_lost(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_lost(ValueError("Caught ValueError in DataLoader worker process 0: bad"))


def test_torch_raises_no_death_in_the_middle_of_a_step(tmp_path):
    loader = DataLoader(Numbers(always), batch_size=4, num_workers=1, prefetch_factor=12)
    before = signal.getsignal(signal.SIGCHLD)
    with deaths_raised_by_the_feed():
        batches = iter(loader)
        while batches._workers[0].is_alive():
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(batches)
    assert signal.getsignal(signal.SIGCHLD) is before
