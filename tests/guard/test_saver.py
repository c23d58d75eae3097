"""Saving beside the training: it overlaps, it costs what it may, and it never takes the training down."""

import errno
import os
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain import class_data, parameters_of, small_mlp
from torch import nn

from hotlap import Job, fit
from hotlap.guard import saving as module
from hotlap.guard.saving import CAUTION, COST_SHARE, FIRST_BYTES_S, FIRST_SYNCS_S, LEAST_S, Saver
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
            waited.append(enough.wait(timeout=600))

    with disk.watched(watch):
        run = fit(job(model=Counting()), out=tmp_path / "run", save_every=100, progress=False)
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
            held.append(late.wait(timeout=600))
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
        fit(job(model=model, loss=Slow()), out=tmp_path / "run", save_every=100, progress=False)
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
            gate.wait(600)
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

    run = fit(job(model=Odd(), epochs=1), out=tmp_path / "run", save_every=100, progress=False)
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
    """Moves only when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class NoDisk:
    """Takes the pieces of a checkpoint and keeps none."""

    def write(self, step, files, facts):
        for pieces in files.values():
            for _ in pieces:
                pass


def timed(saver, clock, *, copying_s=0.0, writing_s=0.0, step=1):
    def pieces():
        clock.now += writing_s
        yield b"{}"

    def export():
        clock.now += copying_s
        return {"training.json": pieces()}

    saver.save(step, export, {}, wait=True)


def first_due(saver, clock, *, step_s=0.1):
    """Seconds until a save is due."""
    begun = clock.now
    while not saver.due(1):
        clock.now += step_s
        assert clock.now - begun < 10_000, "never"
    return clock.now - begun


@pytest.mark.parametrize(("size", "after_s"), [(0, 5.0), (300_000_000, 155.0)])
def test_the_first_save_comes_when_a_cautious_guess_by_its_size_is_within_the_share(clock, told, size, after_s):
    saver = Saver(NoDisk(), None, told.append, size=size)
    assert saver.expected_s == pytest.approx(FIRST_SYNCS_S + size / FIRST_BYTES_S)
    assert first_due(saver, clock) == pytest.approx(after_s, abs=0.11)


def test_what_the_run_took_before_counts_as_its_time(clock, told):
    saver = Saver(NoDisk(), None, told.append, before_s=4.0)
    assert first_due(saver, clock) == pytest.approx(1.0, abs=0.11)


def test_after_the_first_a_cheap_save_comes_every_half_minute(clock, told):
    saver = Saver(NoDisk(), None, told.append, before_s=100.0)
    assert saver.due(5)
    timed(saver, clock, copying_s=0.001, writing_s=0.01)
    assert first_due(saver, clock) == pytest.approx(LEAST_S, abs=0.11)


@pytest.mark.parametrize(("copying_s", "writing_s"), [(0.0, 6.0), (6.0, 0.0), (2.0, 4.0)])
def test_a_dear_save_comes_so_seldom_that_all_of_it_stays_within_its_share(clock, told, copying_s, writing_s):
    """Six seconds are spent, and nine are allowed for the next: 15 s are 2 % of 750 s."""
    saver = Saver(NoDisk(), None, told.append)
    timed(saver, clock, copying_s=copying_s, writing_s=writing_s)
    assert saver.cost_s == 6.0
    assert 6.0 + first_due(saver, clock) == pytest.approx(6.0 * (1 + CAUTION) / COST_SHARE, abs=0.11)


def test_what_is_expected_is_the_larger_of_the_last_and_the_mean(clock, told):
    saver = Saver(NoDisk(), None, told.append)
    timed(saver, clock, writing_s=4.0)
    timed(saver, clock, writing_s=1.0)
    assert saver.expected_s == pytest.approx(CAUTION * 2.5)
    timed(saver, clock, writing_s=7.0)
    assert saver.expected_s == pytest.approx(CAUTION * 7.0)


def test_a_save_that_fails_is_paid_for_and_says_nothing_of_the_next(clock, told):
    def broken():
        clock.now += 0.5
        raise OSError(errno.ENOSPC, "No space left on device")
        yield b""

    saver = Saver(NoDisk(), None, told.append, size=10**9)
    before = saver.expected_s
    saver.save(1, lambda: {"training.json": broken()}, {}, wait=True)
    assert len(told) == 1
    assert (saver.cost_s, saver.saved) == (0.5, 0)
    assert saver.expected_s == before


def test_no_save_is_due_while_one_is_being_written(clock, saver):
    gate = threading.Event()

    def pieces():
        gate.wait(600)
        yield b"{}"

    saver.save(1, lambda: {"training.json": pieces()}, {})
    clock.now += 100 * LEAST_S
    assert saver.busy
    assert not saver.due(5)
    gate.set()
    saver.finish()
    clock.now += saver.cost_s * (1 + CAUTION) / COST_SHARE
    assert saver.due(5)


def test_at_the_end_the_share_decides_and_not_the_half_minute(clock, told):
    saver = Saver(NoDisk(), None, told.append)
    assert not saver.due_at_end(3), "too early"
    clock.now += 20.0
    assert saver.due_at_end(3)
    timed(saver, clock, writing_s=0.01, step=3)
    clock.now += 5.0
    assert not saver.due(4), "half a minute is not over"
    assert saver.due_at_end(4)
    assert not saver.due_at_end(3), "that step is saved"
    timed(saver, clock, writing_s=2.0, step=4)
    assert not saver.due_at_end(5), "too dear"


def test_at_the_end_a_save_under_way_is_waited_for_and_paid_for_first(clock, told):
    saver, gate = Saver(NoDisk(), None, told.append, before_s=20.0), threading.Event()

    def pieces():
        gate.wait(600)
        clock.now += 1.0
        yield b"{}"

    saver.save(1, lambda: {"training.json": pieces()}, {})
    finish = saver.finish
    saver.finish = lambda: (gate.set(), finish())  # it is being written until somebody waits for it
    assert not saver.due_at_end(2)
    assert saver.cost_s == saver.spent_s == 1.0


@pytest.mark.parametrize(
    ("every", "steps", "end"), [(0, [], False), (1, [1, 2, 3, 4, 5, 6], True), (3, [3, 6], True), (7, [], True)]
)
def test_saves_come_every_so_many_updates_and_at_the_end_when_asked(told, every, steps, end):
    saver = Saver(NoDisk(), every, told.append, size=10**12)
    assert [step for step in range(1, 7) if saver.due(step)] == steps
    assert saver.due_at_end(6) == end


def test_seconds_that_training_stood_still_and_seconds_of_writing_are_counted(clock, saver):
    timed(saver, clock, copying_s=0.5, writing_s=2.0)
    assert saver.spent_s == pytest.approx(2.5)
    assert saver.writing_s == pytest.approx(2.0)
    assert saver.cost_s == pytest.approx(2.5)


PAST = settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
STEPS = st.lists(st.tuples(st.floats(0.001, 60.0), st.floats(0.0, 1.0), st.booleans()), min_size=1, max_size=80)
SIZES = st.sampled_from([0, 10**6, 10**8, 10**10])


def share_at_every_moment(clock, saver, steps, cost_of):
    """Train so many steps, save when it is due, and say the largest share of the time that saving ever had."""
    begun, worst, saves = clock.now, 0.0, 0
    for number, (step_s, draw, copies) in enumerate(steps):
        clock.now += step_s
        last = number == len(steps) - 1
        if saver.due_at_end(number) if last else saver.due(number):
            cost_s = cost_of(saver, draw)
            timed(saver, clock, step=number, **{"copying_s" if copies else "writing_s": cost_s})
            saves += 1
        worst = max(worst, saver.cost_s / (clock.now - begun))
    return worst, saves


@PAST
@given(steps=STEPS, size=SIZES)
def test_saving_never_has_more_than_its_share_whatever_steps_and_saves_take(clock, steps, size):
    """As long as no save takes more than half as much again as those before, or the first than the cautious guess."""
    saver = Saver(NoDisk(), None, pytest.fail, size=size)
    worst, _ = share_at_every_moment(clock, saver, steps, lambda saver, draw: draw * saver.expected_s)
    assert worst <= COST_SHARE * (1 + 1e-9)


@PAST
@given(steps=STEPS, size=SIZES)
def test_a_save_that_takes_longer_than_anyone_could_know_is_made_up_for_before_the_next(clock, steps, size):
    """Up to a minute each: what is over the share is never more than what the last one took too long."""
    saver, begun, too_long = Saver(NoDisk(), None, pytest.fail, size=size), clock.now, [0.0]

    def cost_of(saver, draw):
        assert saver.cost_s + saver.expected_s <= COST_SHARE * (clock.now - begun)
        too_long.append(max(0.0, 60.0 * draw - saver.expected_s))
        return 60.0 * draw

    share_at_every_moment(clock, saver, steps, cost_of)
    assert saver.cost_s <= COST_SHARE * (clock.now - begun) + too_long[-1] + 1e-9


@pytest.mark.parametrize(("cost_s", "least", "most"), [(0.1, 34, 35), (2.0, 7, 9)])
def test_the_share_is_used_and_not_only_kept(clock, cost_s, least, most):
    """A thousand seconds: of cheap saves one every half minute, of dear ones as many as 20 s hold, but for one."""
    saver = Saver(NoDisk(), None, pytest.fail)
    steps = [(1.0, 0.0, False)] * 1000
    _, saves = share_at_every_moment(clock, saver, steps, lambda saver, draw: cost_s)
    assert least <= saves <= most


# --- whole trainings -----------------------------------------------------------------------------


@pytest.fixture
def saved_steps(monkeypatch):
    """The steps of all checkpoints that are written."""
    steps, write = [], Checkpoints.write

    def noted(self, step, *rest):
        steps.append(step)
        return write(self, step, *rest)

    monkeypatch.setattr(Checkpoints, "write", noted)
    return steps


def trained(tmp_path, clock, *, hidden):
    """14 steps of a second each, by the saver's clock, in which saving takes no time."""

    class Slow(nn.CrossEntropyLoss):
        def forward(self, output, target):
            clock.now += 1.0
            return super().forward(output, target)

    made = job(model=small_mlp(hidden=hidden), loss=Slow(), epochs=None, steps=14)
    return fit(made, out=tmp_path / "run", progress=False)


def test_a_short_run_of_a_large_model_makes_no_checkpoint(tmp_path, clock, saved_steps):
    """65 MB with the optimizer's state: the first is due after half a minute and more."""
    run = trained(tmp_path, clock, hidden=300_000)
    assert saved_steps == []
    assert not (run.path / "checkpoints").exists()
    assert run.saving_s == 0
    assert (run.path / "model.safetensors").is_file()


def test_a_run_as_short_of_a_small_model_makes_one_after_some_seconds(tmp_path, clock, saved_steps):
    """How long it takes by that clock depends on how fast the steps are, so whether there is another at the end."""
    trained(tmp_path, clock, hidden=8)
    assert saved_steps[0] in (5, 6)


def test_with_an_interval_of_ones_own_the_first_and_the_last_step_are_saved_too(tmp_path, saved_steps):
    fit(job(epochs=1), out=tmp_path / "run", save_every=4, progress=False)
    assert saved_steps == [0, 4, 7]


def test_with_an_interval_of_zero_nothing_is_saved(tmp_path, clock, saved_steps):
    clock.now += 1e6
    fit(job(epochs=1), out=tmp_path / "run", save_every=0, progress=False)
    assert saved_steps == []
