"""Trainings that take turns in one process, as on a GPU: here on the CPU, where each step is a turn."""

import functools
import gc
import os
import random
import signal
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from many_jobs import alone, job, many, scores
from plain import parameters_of
from torch import nn

import hotlap
from hotlap import JobError, TrainingError, search
from hotlap.core.ledger import Ledger
from hotlap.core.turns import turn
from hotlap.data.resident import held_once
from hotlap.searching import crews, turns
from hotlap.searching.at_once import Ahead, Copies, how_many
from hotlap.searching.turns import Turns

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def in_turns(monkeypatch):
    """On the CPU too, a turn being a step."""
    monkeypatch.setattr(crews, "takes_turns", lambda device: True)
    monkeypatch.setattr(turns, "TURN_S", 0.0)


class Drawing(nn.Module):
    """Draws from all generators of the host, in a module and in place."""

    def __init__(self, order, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inside, self._order, self._seed = nn.Linear(5, 3).double(), order, seed

    def forward(self, x):
        if self.training:
            self._order.append((self._seed, threading.get_ident()))
            x = x + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * torch.rand(())
        return self.inside(x)


def drawing(order, seed, **changes):
    return job(seed, model=Drawing(order, seed), **changes)


def test_each_step_is_followed_by_one_of_another_and_draws_the_same_numbers_as_alone(tmp_path):
    order = []
    expected = [hotlap.fit(drawing([], seed), plan="off", progress=False) for seed in range(3)]
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    runs = many([drawing(order, seed) for seed in range(3)], tmp_path / "many", at_once=3)
    assert scores(runs) == scores(expected)
    for run, other in zip(runs, expected, strict=True):
        assert torch.equal(parameters_of(run.model), parameters_of(other.model))
    changes = sum(one != other for one, other in pairwise(order))
    assert changes > len(order) / 2
    assert len({thread for _, thread in order}) == 3
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_a_training_that_ends_leaves_its_place_to_the_next(tmp_path):
    order = []
    jobs = [drawing(order, seed, epochs=1 if seed else 4) for seed in range(4)]
    runs = many(jobs, tmp_path / "many", at_once=2)
    assert scores(runs) == [
        record
        for seed in range(4)
        for record in scores([hotlap.fit(drawing([], seed, epochs=1 if seed else 4), plan="off", progress=False)])
    ]
    assert len({thread for _, thread in order}) == 2


def test_one_may_be_ended_by_its_evaluations_which_are_judged_in_the_callers_thread(tmp_path):
    threads = set()

    def judged(number, record):
        threads.add(threading.get_ident())
        return "worse than the others" if number == 1 else None

    runs = many([job(seed) for seed in range(3)], tmp_path / "many", at_once=2, on_evaluation=judged)
    assert [len(run.history) for run in runs] == [3, 1, 3]
    assert runs[1].stopped == "early: worse than the others"
    assert threads == {threading.get_ident()}


def test_an_error_ends_one_training_and_the_others_go_on(tmp_path):
    def broken(model, batch):
        raise ValueError("no such class")

    with pytest.raises(TrainingError, match="job 2 of 3 failed: ValueError: no such class; the others have ended in"):
        many([job(0), job(1, loss=broken), job(2)], tmp_path / "many", at_once=3)
    assert sorted(path.parent.name for path in (tmp_path / "many").glob("*/model.safetensors")) == ["0000", "0002"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_after_a_checkpoint_and_a_resumed_call_comes_to_the_same(tmp_path, number):
    class Stopping(nn.Module):
        """Sends the signal in the midst of a step, once there is this file."""

        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.inside = nn.Linear(5, 3).double()

        def forward(self, x):
            if (tmp_path / "now").exists() and self.training:
                (tmp_path / "now").unlink()
                os.kill(os.getpid(), number)
            return self.inside(x)

    def jobs():
        return [job(seed, model=Stopping(seed), epochs=4) for seed in range(3)]

    def second(_, record):
        if record["epoch"] == 2:
            (tmp_path / "now").touch()

    before = signal.signal(number, signal.SIG_DFL)  # `nohup` leaves SIGINT ignored
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            many(jobs(), tmp_path / "many", at_once=3, save_every=100, on_evaluation=second)
    finally:
        signal.signal(number, before)
    assert not list((tmp_path / "many").glob("*/model.safetensors"))
    runs = many(jobs(), None, resume=tmp_path / "many", at_once=2, save_every=100)
    assert all(any("resumed at step" in entry.what for entry in run.ledger) for run in runs)
    assert scores(runs) == scores([hotlap.fit(one, plan="off", progress=False) for one in jobs()])


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from many_jobs import job, many
from hotlap.searching import crews

def deadly(number, record):
    if number == 1 and record["epoch"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)

crews.takes_turns = lambda device: True
many([job(seed) for seed in range(3)], sys.argv[1], at_once=3, save_every=2, on_evaluation=deadly)
"""


def test_a_call_that_was_killed_goes_on_from_its_checkpoints(tmp_path, forks):
    here = Path(__file__).parent
    killed = forks.run("-c", KILLED, tmp_path / "many", here.parent / "support", cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    runs = many([job(seed) for seed in range(3)], None, resume=tmp_path / "many", at_once=3)
    assert scores(runs) == scores(alone(range(3)))
    assert any("resumed at step" in entry.what for run in runs for entry in run.ledger)


# --- a search -------------------------------------------------------------------------------------------


def of_values(values):
    return job(optimizer=functools.partial(torch.optim.SGD, lr=values["lr"]), epochs=4)


def test_trials_in_turns_are_pruned_and_memory_is_flat(tmp_path):
    held = []

    def counted(values):
        gc.collect()
        held.append(sum(isinstance(thing, nn.Linear) for thing in gc.get_objects()))
        return of_values(values)

    found = search(
        {"lr": [0.05, 1e-9]},
        counted,
        trials=14,
        out=tmp_path / "s",
        plan="off",
        progress=False,
        save_every=0,
        at_once=3,
    )
    assert {trial.state for trial in found.trials} == {"complete", "pruned"}
    assert all(trial.values == {"lr": 1e-9} for trial in found.trials if trial.state == "pruned")
    # Two layers in each model: at most three that train, one that has just ended, and the best.
    assert max(held) - held[0] <= 2 * 5
    lanes = [thread for thread in threading.enumerate() if thread.name == "hotlap training"]
    assert len(lanes) <= 3 + len(turns._idle[CPU])


# --- how many -------------------------------------------------------------------------------------------


def test_no_more_take_turns_than_a_gpu_has_streams_for(tmp_path):
    with pytest.raises(JobError, match="at_once=17 is too many for this machine: at most 16"):
        many([job(seed) for seed in range(2)], tmp_path / "many", at_once=17)


def test_copies_take_turns_in_laps_only_and_leave_the_job_and_the_generators_as_they_were():
    mine = job()
    before, drawn = parameters_of(mine.model).clone(), torch.get_rng_state()
    one, three = Copies(mine, "off", 1, 1), Copies(mine, "off", 3, 1)
    try:
        for copies in (one, three, three, one):
            assert 0 < copies.lap(0.01) < 1e9
    finally:
        one.close()
        three.close()
    assert torch.equal(parameters_of(mine.model), before)
    assert torch.equal(torch.get_rng_state(), drawn)


class Planted:
    """Copies that make as many updates a second as they are said to."""

    def __init__(self, count, step_s):
        self.count, self._step_s = count, step_s

    def lap(self, seconds):
        return self._step_s

    def bytes_each(self):
        return 1

    def close(self):
        pass


def test_up_to_16_turns_are_tried_however_few_cores_there_are():
    ledger, paces = Ledger(), {1: 1.0, 16: 0.1, 8: 0.2}
    ahead = Ahead(count=50, each_s=100.0, step_s=0.001)
    assert how_many(job(), ahead, ledger, lambda count, _: Planted(count, paces[count]), device=CPU) == 16
    assert [(entry.what, entry.outcome) for entry in ledger] == [
        ("16 trainings at once", "kept"),
        ("8 trainings at once", "rejected"),
    ]


def test_a_model_that_cannot_be_copied_is_trained_one_after_the_other():
    class Single(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("there is one of me")

    ledger, mine = Ledger(), job(model=Single(5, 3).double())
    ahead = Ahead(count=50, each_s=100.0, step_s=0.001)
    assert how_many(mine, ahead, ledger, functools.partial(Copies, mine, "off"), device=CPU) == 1
    assert [(entry.outcome, entry.why) for entry in ledger] == [
        ("rejected", "the model cannot be copied: TypeError: there is one of me")
    ]


# --- turns ----------------------------------------------------------------------------------------------


def worked(*works, alone=()):
    """What so many works in turns have sent, in order."""
    crew, sent = Turns(CPU), []
    for number, work in enumerate(works):
        crew.start(work, threads=1, alone=number in alone)
    try:
        while crew.running:
            for worker in crew.wait():
                while worker._sent:
                    sent.append(worker.receive())
                if worker.has_ended:
                    crew.forget(worker)
    finally:
        crew.close()
    return sent


def steps(name):
    def work(pipe):
        for number in range(3):
            pipe.send((name, number))
            turn.get().pass_on()

    return work


def test_one_that_is_alone_goes_on_to_its_end():
    assert worked(steps("a"), steps("b"), alone={0, 1}) in (
        [(name, number) for name in names for number in range(3)] for names in ("ab", "ba")
    )
    mixed = worked(steps("a"), steps("b"))
    assert sorted(mixed) == sorted(worked(steps("a"), steps("b")))
    assert [name for name, _ in mixed] in (list("ababab"), list("bababa"))


def test_a_training_that_waits_for_its_turn_does_not_count_as_hanging():
    seen = []

    def first(pipe):
        mine.append(turn.get())
        turn.get().pass_on()

    def second(pipe):
        turn.get().pass_on()
        seen.append([one.is_waiting for one in mine])

    mine = []
    worked(first, second)
    assert seen == [[True]]


def test_columns_that_are_the_same_are_held_once():
    kept = []

    def work(column):
        def inside(pipe):
            kept.append(held_once(column))

        return inside

    same = [torch.arange(12.0).reshape(4, 3) for _ in range(2)]
    worked(*map(work, [*same, torch.zeros(4, 3), torch.arange(12).reshape(4, 3)]))
    assert len(kept) == 4
    assert len({tensor.data_ptr() for tensor in kept}) == 3
    assert held_once(same[1]) is same[1]  # with no others there is nothing to share
