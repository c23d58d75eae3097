"""`hotlap.fit_many`, and trials at once: what processes train is what each training comes to alone."""

import functools
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from many_jobs import alone, job, many, scores
from plain import parameters_of
from torch import nn

import hotlap
from hotlap import JobError, StoreError, TrainingError, fit_many, search
from hotlap.core.ledger import Ledger
from hotlap.searching.at_once import Ahead, Copies, how_many
from hotlap.searching.processes import Processes

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_job_comes_to_what_it_comes_to_alone_to_the_last_bit(tmp_path, monkeypatch, count):
    monkeypatch.chdir(tmp_path)
    jobs = [job(seed) for seed in range(4)]
    runs = many(jobs, tmp_path / "many", at_once=count)
    expected = alone(range(4))
    assert scores(runs) == scores(expected)
    for given, run, other in zip(jobs, runs, expected, strict=True):
        assert run.model is given.model
        assert torch.equal(parameters_of(run.model), parameters_of(other.model))
    assert [run.folder.name for run in runs] == ["0000", "0001", "0002", "0003"]


def test_functions_make_jobs_when_their_turn_comes_and_again_for_their_model(tmp_path):
    made = []

    def maker(seed):
        made.append(seed)
        return job(seed)

    runs = many([functools.partial(maker, seed) for seed in range(3)], tmp_path / "many", at_once=2)
    assert made == [0, 1, 2, 0, 1, 2]
    assert scores(runs) == scores(many([job(seed) for seed in range(3)], tmp_path / "other"))


def test_jobs_train_in_other_processes_at_the_same_time(tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()

    def loss(model, batch):
        (seen / str(os.getpid())).touch()
        while len(list(seen.iterdir())) < 2:  # waits for ever if there is no other training
            time.sleep(0.01)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    many([job(seed, loss=loss) for seed in range(2)], tmp_path / "many", at_once=2)
    assert str(os.getpid()) not in [one.name for one in seen.iterdir()]


def test_a_job_may_be_ended_by_its_evaluations_and_others_go_on(tmp_path):
    told = []

    def judged(number, record):
        told.append(number)
        return "worse than the others" if number == 1 else None

    runs = many([job(seed) for seed in range(3)], tmp_path / "many", at_once=2, on_evaluation=judged)
    assert [len(run.history) for run in runs] == [3, 1, 3]
    assert runs[1].stopped == "early: worse than the others"
    assert sorted(told) == [0, 0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_job_that_fails_is_named_and_the_others_end(tmp_path, count):
    (fault := tmp_path / "fault").touch()

    def loss(model, batch):
        if fault.exists():
            raise ValueError("no such class")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    jobs = [job(0), job(1, loss=loss), job(2)]
    with pytest.raises(TrainingError, match="job 2 of 3 failed: ValueError: no such class; the others have ended in"):
        many(jobs, tmp_path / "many", at_once=count)
    folders = sorted(path.parent.name for path in (tmp_path / "many").glob("*/model.safetensors"))
    assert folders == ["0000", "0002"]
    fault.unlink()
    jobs = [job(0), job(1, loss=loss), job(2)]
    runs = fit_many(jobs, resume=tmp_path / "many", plan="off", progress=False, at_once=count)
    assert [run.stopped for run in runs] == ["after all epochs"] * 3


def test_a_process_that_is_killed_fails_its_job_alone(tmp_path):
    def deadly(model, batch):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(TrainingError, match="job 1 of 2 failed: TrainingError: its process was killed by SIGKILL"):
        many([job(0, loss=deadly), job(1)], tmp_path / "many", at_once=2)
    assert (tmp_path / "many/0001/model.safetensors").is_file()


def test_a_call_that_was_stopped_goes_on_where_each_job_stood(tmp_path):
    def impatient(number, record):
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    settings = {"plan": "off", "progress": False, "save_every": 1}
    with pytest.raises(KeyboardInterrupt):
        fit_many(
            [job(seed) for seed in range(3)], out=tmp_path / "many", at_once=2, on_evaluation=impatient, **settings
        )
    runs = fit_many([job(seed) for seed in range(3)], resume=tmp_path / "many", at_once=2, **settings)
    assert scores(runs) == scores(alone(range(3)))


def test_what_is_no_job_is_refused_before_anything_is_made(tmp_path):
    shared = job()
    for jobs, words in (
        ([], "needs at least one job"),
        ([job(), 3], "job 2 is 3"),
        ([shared, job(model=shared.model)], "jobs 1 and 2 share their model"),
    ):
        with pytest.raises(JobError, match=words):
            many(jobs, tmp_path / "many")
    with pytest.raises(JobError, match="at_once=0 must be a whole number"):
        many([job()], tmp_path / "many", at_once=0)
    with pytest.raises(StoreError, match="is not a folder; name that of an earlier call"):
        fit_many([job()], resume=tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())


# --- a search -------------------------------------------------------------------------------------------


def of_values(values):
    return job(optimizer=functools.partial(torch.optim.SGD, lr=values["lr"]))


def searched(folder, **settings):
    return search({"lr": (1e-3, 1.0, "log")}, of_values, trials=5, out=folder, plan="off", progress=False, **settings)


def test_trials_at_once_are_the_trials_that_one_after_the_other_would_be(tmp_path):
    one, other = searched(tmp_path / "a", at_once=1), searched(tmp_path / "b", at_once=2)
    assert [(trial.values, trial.score) for trial in one.trials] == [
        (trial.values, trial.score) for trial in other.trials
    ]
    assert torch.equal(parameters_of(one.best.model), parameters_of(other.best.model))
    assert other.best.folder == tmp_path / f"b/trials/{one.best.folder.name}"


def test_trials_at_once_are_pruned(tmp_path):
    def steps(values):
        return job(optimizer=functools.partial(torch.optim.SGD, lr=values["lr"]), epochs=6)

    space = {"lr": [0.05, 1e-9]}
    found = search(space, steps, trials=16, out=tmp_path / "s", plan="off", progress=False, at_once=2)
    states = {trial.state for trial in found.trials}
    assert states == {"complete", "pruned"}
    assert all(trial.values == {"lr": 1e-9} for trial in found.trials if trial.state == "pruned")


def test_trees_are_not_trained_at_once(tmp_path):
    pytest.importorskip("xgboost")
    x, y = torch.rand(50, 3).numpy(), torch.rand(50).numpy()

    def trees(values):
        return hotlap.trees.TreeJob(x, y, valid=(x, y), rounds=2, params=values)

    with pytest.raises(JobError, match="at_once=2: trees use all cores"):
        search({"max_depth": [2, 3]}, trees, trials=2, out=tmp_path / "s", progress=False, at_once=2)


# --- how many at once -----------------------------------------------------------------------------------


class Planted:
    """Copies whose laps take what they are said to."""

    open = 0

    def __init__(self, count, threads, step_s, size=1):
        self.count, self.threads, self._step_s, self._size = count, threads, step_s, size
        Planted.open += 1

    def lap(self, seconds):
        return self._step_s

    def bytes_each(self):
        return self._size

    def close(self):
        Planted.open -= 1


def chosen(paces, *, ahead=None, cores=8, size=1, free=10**12):
    """How many are chosen where so many take so long an update; and what was tried."""
    ledger = Ledger()
    count = how_many(
        job(),
        ahead or Ahead(count=100, each_s=100.0, step_s=0.001),
        ledger,
        lambda count, threads: Planted(count, threads, paces[count], size),
        device=CPU,
        cores=cores,
        free_bytes=free,
    )
    assert Planted.open == 0
    return count, [(entry.what.split()[0], entry.outcome) for entry in ledger]


def test_as_many_as_are_fastest_are_chosen():
    assert chosen({1: 1.0, 8: 0.2, 4: 0.3}) == (8, [("8", "kept"), ("4", "rejected")])
    assert chosen({1: 1.0, 8: 0.5, 4: 0.3, 2: 0.6}) == (4, [("8", "kept"), ("4", "kept"), ("2", "rejected")])
    assert chosen({1: 1.0, 8: 1.5, 4: 1.2, 2: 0.6}) == (2, [("8", "rejected"), ("4", "rejected"), ("2", "kept")])


def test_one_after_the_other_stays_where_nothing_is_faster():
    assert chosen({1: 1.0, 8: 1.0, 4: 1.01, 2: 0.995}) == (1, [("8", "rejected"), ("4", "rejected"), ("2", "rejected")])


def test_nothing_is_tried_where_it_cannot_pay():
    short = Ahead(count=4, each_s=1.0, step_s=0.001)
    assert chosen({}, ahead=short) == (1, [("trainings", "not tried")])
    slow_steps = Ahead(count=4, each_s=100.0, step_s=10.0)
    assert chosen({}, ahead=slow_steps) == (1, [("trainings", "not tried")])
    assert chosen({}, cores=1) == (1, [("trainings", "not tried")])
    assert chosen({}, ahead=Ahead(count=1, each_s=1e4, step_s=0.001)) == (1, [("trainings", "not tried")])


def test_no_more_are_tried_than_memory_holds():
    tried = chosen({1: 1.0, 2: 0.6}, size=3 * 10**11, free=14 * 10**11)
    assert tried == (2, [("8", "not tried"), ("4", "not tried"), ("2", "kept")])


def test_copies_step_in_laps_only_and_leave_the_job_as_it_was():
    mine = job()
    before = parameters_of(mine.model).clone()
    copies = Copies(mine, "off", 2, 1)
    try:
        assert 0 < copies.lap(0.01) < 1e9
        assert copies.bytes_each() > 0
        assert copies.lap(0.01) > 0
    finally:
        copies.close()
    assert torch.equal(parameters_of(mine.model), before)


def test_a_copy_that_fails_says_why_and_one_after_the_other_stays():
    def broken(model, batch):
        raise ValueError("no such class")

    ledger = Ledger()
    ahead = Ahead(count=100, each_s=100.0, step_s=0.001)
    side, before = functools.partial(Copies, job(loss=broken), "off"), children()
    assert how_many(job(), ahead, ledger, side, device=CPU, cores=2) == 1
    assert [(entry.outcome, entry.why) for entry in ledger] == [("rejected", "ValueError: no such class")]
    assert children() == before


def test_the_choice_is_made_once_with_what_the_first_job_took(tmp_path, monkeypatch):
    asked = []

    def two(job, ahead, ledger, side, *, device):
        asked.append(ahead.count)
        return 2

    monkeypatch.setattr("hotlap.searching.trainings.how_many", two)
    runs = many([job(seed) for seed in range(4)], tmp_path / "many")
    assert asked == [3]
    assert scores(runs) == scores(alone(range(4)))


# --- processes ------------------------------------------------------------------------------------------


def test_a_fork_computes_with_threads_of_its_own_although_this_process_has_used_its():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.rand(400, 400)
        (x @ x).sum()
        torch.rand(2_000_000).exp().sum()
        processes = Processes()
        try:
            child = processes.start(lambda pipe: pipe.send(float((x @ x).sum())), threads=2)
            assert processes.wait() == [child]
            assert child.receive() == float((x @ x).sum())
        finally:
            processes.close()
    finally:
        torch.set_num_threads(before)


def test_processes_end_with_the_one_that_started_them(tmp_path):
    parent = os.fork()
    if parent == 0:
        child = Processes().start(lambda pipe: time.sleep(1000), threads=1)
        (tmp_path / "pid").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(parent, 0)[1]) == signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(pid)


def children():
    return {child.pid for child in psutil.Process().children()}


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
