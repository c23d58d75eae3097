"""Saving beside the training: it overlaps, it costs what it may, and it never takes the training down."""

import errno
import os
import threading

import pytest
import torch
from plain import class_data, parameters_of, small_mlp
from torch import nn

from hotlap import Job, fit
from hotlap.guard import saver as module
from hotlap.guard.saver import COST_SHARE, LEAST_S, Saver
from hotlap.store import disk
from hotlap.store.checkpoints import Checkpoints


def job(**changes):
    settings = {
        "model": small_mlp(),
        "data": class_data(),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01),
        "batch_size": 8,
        "epochs": 3,
        "device": "cpu",
    }
    return Job(**{**settings, **changes})


@pytest.fixture
def told():
    return []


@pytest.fixture
def saver(tmp_path, told):
    return Saver(Checkpoints(tmp_path / "checkpoints"), None, told.append)


def files(text=b"{}"):
    return {"training.json": [text]}


# --- beside the training -------------------------------------------------------------------------


def test_training_steps_go_on_while_a_checkpoint_is_being_written(tmp_path):
    """The write of the first checkpoint waits until seven steps were made: without overlap it would wait for ever."""
    enough, waited = threading.Event(), []
    counted = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_mlp()

        def forward(self, x):
            counted.append(threading.current_thread().name)
            if len(counted) == 7:
                enough.set()
            return self.inner(x)

    def watch(moment):
        if moment == "before write" and not waited:
            waited.append(enough.wait(timeout=60))

    with disk.watched(watch):
        run = fit(job(model=Counting()), out=tmp_path / "run", progress=False)
    assert waited == [True]
    assert run.problems == ()


def test_what_is_written_is_the_state_when_it_was_saved_not_when_it_was_written(tmp_path):
    """The first checkpoint is held back until training has changed every weight."""
    model = small_mlp()
    before = parameters_of(model).clone()
    late = threading.Event()
    held, seen = [], {}

    def watch(moment):
        if moment == "before open" and not held:
            held.append(late.wait(timeout=60))
        if moment == "after rename" and not seen:
            folder = tmp_path / "run/checkpoints"
            found = Checkpoints(folder).read(folder / "step-000000000")
            seen.update(found.files)

    class Slow(nn.CrossEntropyLoss):
        def forward(self, output, target):
            if not torch.equal(parameters_of(model), before):
                late.set()
            return super().forward(output, target)

    with disk.watched(watch):
        fit(job(model=model, loss=Slow()), out=tmp_path / "run", progress=False)
    assert held == [True]
    from safetensors.torch import load

    stored = load(seen["model.safetensors"])
    assert torch.equal(torch.cat([stored[name].flatten() for name in dict(model.named_parameters())]), before)
    assert b'"history",[]' in seen["training.json"].replace(b" ", b"")


def test_only_one_checkpoint_is_written_at_a_time(saver):
    gate, order = threading.Event(), []

    def pieces(number):
        order.append(f"{number} begins")
        if number == 1:
            gate.wait(60)
        order.append(f"{number} ends")
        yield b"{}"

    saver.save(1, lambda: {"training.json": pieces(1)}, {})
    threading.Timer(0.05, gate.set).start()
    saver.save(2, lambda: {"training.json": pieces(2)}, {}, wait=True)
    assert order == ["1 begins", "1 ends", "2 begins", "2 ends"]
    assert saver.saved == 2


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", ["make folder", "write", "sync", "rename"])
def test_a_disk_that_fails_lets_training_go_on_and_is_told_once_each_time(tmp_path, number, name):
    """The checkpoints at steps 0, 6 and 12 are written; those at 18 and at the end, step 21, fail."""
    whole = fit(job(), out=tmp_path / "whole", progress=False)
    state = {"saves": 0}

    def watch(moment):
        state["saves"] += moment == "before make folder" and (tmp_path / "run/checkpoints").is_dir()
        if state["saves"] > 3 and moment == f"before {name}":
            raise OSError(number, os.strerror(number))

    with disk.watched(watch):
        run = fit(job(), out=tmp_path / "run", save_every=6, progress=False)
    assert len(run.problems) == 2
    assert all(os.strerror(number) in problem and "training goes on" in problem for problem in run.problems)
    assert torch.equal(parameters_of(run.model), parameters_of(whole.model))
    found, damaged = Checkpoints(run.path / "checkpoints").newest_good()
    assert (found.step, damaged) == (12, [])
    assert sorted(f.name for f in (run.path / "checkpoints").iterdir()) == ["step-000000006", "step-000000012"]


def test_after_a_failure_the_next_save_works_again(saver, told):
    def broken():
        yield b"half"
        raise OSError(errno.ENOSPC, "No space left on device")

    saver.save(1, lambda: {"training.json": broken()}, {})
    saver.save(2, lambda: files(), {}, wait=True)
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert saver.saved == 1
    assert saver._checkpoints.newest_good()[0].step == 2


def test_any_error_of_the_writing_thread_is_told_and_does_not_end_the_training(saver, told):
    def broken():
        raise RuntimeError("a bug")
        yield b""

    saver.save(1, lambda: {"training.json": broken()}, {}, wait=True)
    assert len(told) == 1
    assert "RuntimeError: a bug" in told[0]


def test_state_that_no_file_can_hold_is_told_and_training_goes_on(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_mlp()

        def forward(self, x):
            return self.inner(x)

        def get_extra_state(self):
            return {"handle": object()}

        def set_extra_state(self, state):
            pass

    run = fit(job(model=Odd(), epochs=1), out=tmp_path / "run", progress=False)
    assert run.updates == 7
    assert "step 0 is not saved" in run.problems[0]
    assert "object, which no file that is safe to read can hold" in run.problems[0]


def test_an_error_in_the_users_own_code_is_not_hidden(saver):
    def export():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        saver.save(1, export, {})


# --- when ----------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def timed(saver, clock, *, copying_s, writing_s):
    def pieces():
        clock.now += writing_s
        yield b"{}"

    def export():
        clock.now += copying_s
        return {"training.json": pieces()}

    saver.save(1, export, {}, wait=True)


def test_a_cheap_save_comes_every_half_minute(clock, tmp_path, told):
    saver = Saver(Checkpoints(tmp_path / "checkpoints"), None, told.append)
    clock.now += LEAST_S - 0.1
    assert not saver.due(5)
    clock.now += 0.1
    assert saver.due(5)
    timed(saver, clock, copying_s=0.001, writing_s=0.01)
    assert not saver.due(6)
    clock.now += LEAST_S
    assert saver.due(7)


@pytest.mark.parametrize(("copying_s", "writing_s"), [(0.0, 6.0), (6.0, 0.0), (2.0, 4.0)])
def test_a_dear_save_comes_so_seldom_that_all_of_it_stays_within_its_share(
    clock, tmp_path, told, copying_s, writing_s
):  # fmt: skip
    saver = Saver(Checkpoints(tmp_path / "checkpoints"), None, told.append)
    timed(saver, clock, copying_s=copying_s, writing_s=writing_s)
    clock.now += 6.0 / COST_SHARE - 0.1
    assert not saver.due(5)
    clock.now += 0.2
    assert saver.due(5)


def test_no_save_is_due_while_one_is_being_written(clock, saver):
    gate = threading.Event()

    def pieces():
        gate.wait(60)
        yield b"{}"

    saver.save(1, lambda: {"training.json": pieces()}, {})
    clock.now += LEAST_S
    assert saver.busy
    assert not saver.due(5)
    gate.set()
    saver.finish()
    clock.now += LEAST_S / COST_SHARE
    assert saver.due(5)


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_saves_come_every_so_many_updates_when_asked(tmp_path, told, every, steps):
    saver = Saver(Checkpoints(tmp_path / "checkpoints"), every, told.append)
    assert [step for step in range(1, 7) if saver.due(step)] == steps


def test_seconds_that_training_stood_still_and_seconds_of_writing_are_counted(clock, saver):
    timed(saver, clock, copying_s=0.5, writing_s=2.0)
    assert saver.spent_s == pytest.approx(2.5)
    assert saver.writing_s == pytest.approx(2.0)
