"""`fit(finish_in=…)`, on a clock that moves by what the training does and by nothing else."""

from types import SimpleNamespace

import made_up_time
import pytest
import torch
from plain import class_data, parameters_of, small_mlp
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import Subset, TensorDataset

from hotlap import Job, JobError, Rig, fit
from hotlap.core.units import read_seconds
from hotlap.data.dataset import as_source
from hotlap.engine.schedules import make_schedule
from hotlap.fitting import deadline

STEP_S, EVALUATION_S = 0.1, 0.5


@pytest.fixture
def clock(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    made = made_up_time.make_up_time(monkeypatch)
    monkeypatch.setattr(made_up_time, "STEP_S", STEP_S)
    evaluate = Rig.evaluate

    def evaluated(rig, data, *given, **settings):
        made.passes(EVALUATION_S * len(as_source(data)) / 30)
        return evaluate(rig, data, *given, **settings)

    monkeypatch.setattr(Rig, "evaluate", evaluated)
    return made


def job_for(**changes):
    settings = {
        "model": small_mlp(),
        "data": class_data(),
        "valid": class_data(30, seed=9),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "batch_size": 5,
        "epochs": 200,
        "device": "cpu",
    }
    return Job(**{**settings, **changes})


def quiet(job, out, **settings):
    return fit(job, plan="off", out=out, **{"progress": False, **settings})


@pytest.mark.parametrize(("seconds", "eval_every"), [(20, None), (20, 1), (20, 37), ("1m 30s", 37), ("1m 30s", 1000)])
def test_it_ends_in_time_and_uses_at_least_95_percent_of_it(clock, tmp_path, seconds, eval_every):
    all_s, began = read_seconds(seconds), clock()
    run = quiet(job_for(eval_every=eval_every), tmp_path / "run", finish_in=seconds)
    assert 0.95 * all_s - EVALUATION_S <= clock() - began <= all_s
    assert run.steps < 2000
    assert "early: " in run.stopped
    assert "of 2,000 updates fit in" in run.stopped
    assert run.history[-1]["step"] == run.steps
    assert "valid_loss" in run.history[-1]


def test_a_machine_that_becomes_slower_or_faster_changes_nothing_about_the_end(clock, tmp_path, monkeypatch):
    for factor in (0.3, 3):
        monkeypatch.setattr(made_up_time, "STEP_S", STEP_S)
        began = clock()

        def turned(record, factor=factor):
            monkeypatch.setattr(made_up_time, "STEP_S", STEP_S * (factor if record["step"] > 50 else 1))

        job = job_for(schedule=lambda o, updates: CosineAnnealingLR(o, updates))
        quiet(job, tmp_path / f"run-{factor}", finish_in=30, on_evaluation=turned)
        assert 0.95 * 30 - EVALUATION_S <= clock() - began <= 30


def test_a_slow_beginning_does_not_decide_how_long_it_trains(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(made_up_time, "STEP_S", 2.0)
    forward, steps = torch.nn.Tanh.forward, []

    def turned(layer, x):
        steps.append(x)
        monkeypatch.setattr(made_up_time, "STEP_S", 2.0 if len(steps) < 3 else STEP_S)
        return forward(layer, x)

    monkeypatch.setattr(torch.nn.Tanh, "forward", turned)
    began = clock()
    job = job_for(schedule=lambda o, updates: CosineAnnealingLR(o, updates))
    run = quiet(job, tmp_path / "run", finish_in=30)
    assert 0.95 * 30 - EVALUATION_S <= clock() - began <= 30
    assert run.steps > 80


def test_a_training_that_fits_is_the_one_without_a_deadline_to_the_last_bit(clock, tmp_path):
    def of_all(optimizer, updates):
        return CosineAnnealingLR(optimizer, updates)

    run = quiet(job_for(epochs=3, schedule=of_all), tmp_path / "a", finish_in=1000)
    same = quiet(job_for(epochs=3, schedule=of_all), tmp_path / "b")
    assert torch.equal(parameters_of(run.model), parameters_of(same.model))
    assert (run.stopped, run.left_out) == ("after all epochs", ())


def test_what_was_left_out_is_listed_in_the_run_its_summary_and_its_folder(clock, tmp_path):
    run = quiet(job_for(), tmp_path / "run", finish_in=20)
    left = 2000 - run.steps
    assert run.left_out == (f"{left:,} of 2,000 updates, {left / 10:,.1f} of 200 epochs",)
    assert f"left out  {run.left_out[0]}" in run.summary()
    assert run.to_dict()["left_out"] == list(run.left_out)


def test_the_model_has_the_best_weights_so_far(clock, tmp_path):
    job = job_for(optimizer=lambda p: torch.optim.SGD(p, lr=3.0))  # too large: it gets worse again
    run = quiet(job, tmp_path / "run", finish_in=30)
    best = min(run.history, key=lambda record: record["valid_loss"])
    assert run.best == best != run.history[-1]
    scored = Rig(run.model, job.optimizer, job.loss, device="cpu").evaluate(job.valid)
    assert scored["loss"] == pytest.approx(best["valid_loss"])


def test_a_schedule_over_the_whole_run_spans_what_fits_and_says_so(clock, tmp_path, capsys):
    rates = []
    job = job_for(schedule=lambda o, updates: CosineAnnealingLR(o, updates), eval_every=10)
    run = quiet(job, tmp_path / "run", finish_in=60, progress=True, on_evaluation=lambda r: rates.append(r["lr"]))
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.01 * rates[0]
    said = capsys.readouterr().err
    assert "on the schedule spans " in said
    assert "(learning rate 0.1 → 0.09" in said
    assert run.left_out


@pytest.mark.parametrize("per", ["update", "epoch"])
def test_a_schedule_that_is_made_again_is_that_of_a_run_of_this_length(per):
    def rates(schedule, optimizer, moves):
        found = []
        for _ in range(moves):
            found.append(optimizer.param_groups[0]["lr"])
            schedule.move()
        return found

    def made(length):
        optimizer = torch.optim.SGD(small_mlp().parameters(), lr=0.1)
        optimizer._opt_called = True
        return make_schedule(lambda o, n: LambdaLR(o, lambda at: 1 - at / n), optimizer, length, per), optimizer

    mine, theirs = made(100), made(40)
    rates(*mine, 10)
    mine[0].span(40)
    assert rates(*mine, 30) == rates(*theirs, 40)[10:]


def test_a_schedule_that_cannot_span_less_is_named(clock, tmp_path, capsys):
    job = job_for(schedule=lambda o: CosineAnnealingLR(o, 2000))
    run = quiet(job, tmp_path / "run", finish_in=30, progress=True)
    assert "the schedule was made for more and ends on the way" in capsys.readouterr().err
    assert run.history[-1]["lr"] > 0.05


def test_a_shorter_training_is_not_kept_as_the_model_of_the_whole_one(clock, tmp_path):
    torch.manual_seed(0)
    short = quiet(job_for(epochs=60), tmp_path / "a", finish_in=20, reuse=True)
    whole = quiet(job_for(epochs=60), tmp_path / "b", reuse=True)
    assert short.left_out
    assert whole.steps == 600
    assert "cache" not in whole.stopped


def test_what_was_left_out_is_trained_where_the_run_goes_on_and_the_schedule_spans_it_all(clock, tmp_path, capsys):
    def of_all(optimizer, updates):
        return CosineAnnealingLR(optimizer, updates)

    short = quiet(job_for(epochs=60, schedule=of_all), tmp_path / "run", finish_in=20, save_every=50)
    assert short.left_out
    whole = quiet(job_for(epochs=60, schedule=of_all), tmp_path / "run", resume=tmp_path / "run", progress=True)
    assert (whole.steps, whole.stopped, whole.left_out) == (600, "after all epochs", ())
    assert "it spans all 600 again" in capsys.readouterr().err
    at = {record["step"]: record["lr"] for record in whole.history}
    undisturbed = quiet(job_for(epochs=60, schedule=of_all), tmp_path / "other")
    assert {record["step"]: record["lr"] for record in undisturbed.history}[590] == pytest.approx(at[590])


def test_time_for_next_to_nothing_makes_one_step_and_skips_the_evaluation(clock, tmp_path):
    run = quiet(job_for(patience=3), tmp_path / "run", finish_in=0.2)
    assert run.steps == 1
    assert "valid_loss" not in run.best


def test_the_tuner_counts_on_no_more_updates_than_fit(clock, tmp_path, monkeypatch):
    lengths = []
    monkeypatch.setattr("hotlap.fitting.tuning.Tuner.stepped", lambda one, *_: lengths.append(one._search._length()))
    run = fit(job_for(), plan="auto", out=tmp_path / "run", finish_in=30, progress=False)
    assert all(abs(length.updates - run.steps) < 0.1 * run.steps for length in lengths[20:])


@pytest.mark.parametrize("wrong", ["soon", "", 0, -1, "15x", "1 2", True, "nan", float("inf")])
def test_what_is_no_time_is_refused(wrong, tmp_path):
    with pytest.raises(JobError, match=r"finish_in=.* is no time"):
        fit(job_for(), out=tmp_path / "run", finish_in=wrong)
    assert not (tmp_path / "run").exists()


def test_times_are_read_as_people_write_them():
    said = {"15m": 900, "90s": 90, "90": 90, "1.5 h": 5400, "1h 30m": 5400, "2 min": 120, 7: 7, "1h30m10s": 5410}
    assert {words: read_seconds(words) for words in said} == said


def test_a_part_of_a_time_ends_before_the_rest_of_it(monkeypatch):
    monkeypatch.setattr(deadline, "time", SimpleNamespace(perf_counter=lambda: 50.0))
    limit = deadline.TimeLimit(20.0, 60.0, evaluations_after=2.0)
    assert limit.part(1) is limit
    assert limit.part(0.25) == deadline.TimeLimit(2.5, 52.5, evaluations_after=2.0)


FORMS = {
    "columns": lambda x, y: (x, y),
    "named columns": lambda x, y: {"x": x, "y": y},
    "a dataset": lambda x, y: list(zip(x, y, strict=True)),
    "a part of a dataset": lambda x, y: Subset(TensorDataset(x, y), range(30)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_an_evaluation_says_what_the_first_one_and_all_after_it_take(clock, tmp_path, monkeypatch, form):
    evaluation_s, after = 20 * STEP_S, 2.0
    monkeypatch.setitem(globals(), "EVALUATION_S", evaluation_s)
    began = clock()
    limit = deadline.TimeLimit(20.0, clock() + 20.0, evaluations_after=after)
    settings = {"valid": FORMS[form](*class_data(30, seed=9)), "eval_every": 1000}
    if form == "named columns":
        settings["forward"] = lambda model, batch: (model(batch["x"]), batch["y"])
        settings["data"] = FORMS[form](*class_data())
    run = quiet(job_for(**settings), tmp_path / "run", finish_in=limit)
    assert 0.9 * 20 <= clock() - began + after * evaluation_s <= 20
    assert "valid_loss" in run.history[-1]


@pytest.mark.parametrize("spans", [True, False])
def test_where_the_first_evaluation_takes_less_than_expected_the_rest_of_the_time_is_used(
    clock, tmp_path, monkeypatch, spans
):
    expected = deadline.Deadline.try_evaluation

    def tried(self):
        expected(self)
        self._tried_s = 10.0

    monkeypatch.setattr(deadline.Deadline, "try_evaluation", tried)
    began = clock()
    schedule = (lambda o, updates: CosineAnnealingLR(o, updates)) if spans else None
    run = quiet(job_for(eval_every=1000, schedule=schedule), tmp_path / "run", finish_in=20)
    assert 0.95 * 20 - EVALUATION_S <= clock() - began <= 20
    assert len(run.history) == 2
    assert "early: " in run.stopped


def test_what_fails_in_an_evaluation_fails_where_it_is_due(clock, tmp_path, monkeypatch):
    asked = []

    def refused(*given, **settings):
        asked.append(clock())
        raise RuntimeError("no evaluation")

    monkeypatch.setattr(Rig, "evaluate", refused)
    with pytest.raises(RuntimeError, match="no evaluation"):
        quiet(job_for(), tmp_path / "run", finish_in=20)
    assert len(asked) == 2
    assert asked[1] - asked[0] > 9 * STEP_S
