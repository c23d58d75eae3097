"""`fit` with a tuner: what is found is written down, replayed, gone on with, and never changes what is trained."""

import functools
import json
import math

import pytest
import torch
from made_up_time import make_up_time
from plain import Computed, parameters_of, small_mlp
from torch import nn
from typer.testing import CliRunner

import hotlap
from hotlap import Job, PlanError, fit, moves
from hotlap.cli import app
from hotlap.core.table import rows
from hotlap.engine.rig import Rig
from hotlap.fitting.task import Found
from hotlap.fitting.tuning import tune
from hotlap.moves import Move
from hotlap.tuner import budget, tuner
from hotlap.tuner.gates import Gate, Judgement
from hotlap.tuner.stats import Comparison


def job_for(steps=600, **settings):
    torch.manual_seed(0)
    model = small_mlp()
    given = {
        "model": model,
        "data": Computed(),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "batch_size": 16,
        "steps": steps,
        "device": "cpu",
    }
    return Job(**(given | settings))


@pytest.fixture
def at_leisure(monkeypatch, tmp_path):
    """Tuning may cost whatever it likes, and finds nothing that was known before. Loaders take most of the time."""
    make_up_time(monkeypatch)
    monkeypatch.setattr(budget, "SHARE", 100.0)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hotlap.tuner.laps.LAP_S", 0.005)
    # What is planted is large: few laps are enough, and many would need a long run.
    monkeypatch.setattr("hotlap.tuner.trials.Comparison", functools.partial(Comparison, most_quads=4))


def outcomes(run):
    return {row.what: row for row in rows(run.ledger)}


def test_a_run_too_short_to_tune_is_the_users_own_to_the_last_bit(tmp_path):
    mine = fit(job_for(40), plan="auto", out=tmp_path / "auto", progress=False)
    theirs = fit(job_for(40), plan="off", out=tmp_path / "off", progress=False)
    assert mine.plan == theirs.plan
    assert torch.equal(parameters_of(mine.model), parameters_of(theirs.model))


def test_a_tuned_run_finds_what_pays_and_trains_the_same(tmp_path, at_leisure):
    mine = fit(job_for(800), plan="auto", out=tmp_path / "auto", progress=False)
    theirs = fit(job_for(800, data=Computed()), plan="off", out=tmp_path / "off", progress=False)
    found = outcomes(mine)
    assert mine.plan.feed.kind == "resident", mine.summary()
    assert found["data held on the device"].outcome == "kept"
    assert found["baseline"].step_s > 0
    assert mine.steps == theirs.steps == 800
    assert mine.samples == theirs.samples
    for name in ("train_loss",):
        assert mine.history[-1][name] == pytest.approx(theirs.history[-1][name], rel=0.2, abs=0.02)
    assert "data held on the device" in mine.summary()
    assert mine.to_dict()["tuning"]["moves"]
    stored = json.loads((mine.path / "ledger.jsonl").read_text().splitlines()[-1])
    assert hotlap.Plan.from_dict(stored["plan"]) == mine.plan


def test_a_tuned_run_is_replayed_to_the_last_bit(tmp_path, at_leisure):
    tuned = fit(job_for(600), plan="auto", out=tmp_path / "auto", progress=False)
    assert len({entry.plan for entry in tuned.ledger}) > 1
    again = fit(job_for(600), plan=tuned.path, out=tmp_path / "again", progress=False)
    assert torch.equal(parameters_of(tuned.model), parameters_of(again.model))
    assert [entry.plan for entry in again.ledger][-1] == tuned.plan


def test_what_was_found_is_used_at_once_the_next_time(tmp_path, at_leisure):
    first = fit(job_for(800), plan="auto", out=tmp_path / "one", progress=False)
    assert any(entry.kind == "tuned" for entry in first.ledger), first.summary()
    second = fit(job_for(800), plan="auto", out=tmp_path / "two", progress=False)
    known = [entry for entry in second.ledger if entry.known]
    kept = {entry.what for entry in first.ledger if entry.outcome == "kept"}
    assert kept
    # A move that the first run has rejected is rejected again: 16 bits, on a CPU that has them.
    assert {entry.what: entry.outcome for entry in known} == {
        entry.what: "kept" if entry.what in kept else "rejected" for entry in known
    }
    assert kept >= {entry.what for entry in known if entry.outcome == "kept"} != set()
    own = next(entry.plan for entry in second.ledger if entry.kind == "baseline")
    measured = {entry.plan for entry in second.ledger if entry.outcome == "measured"}
    assert measured == {own, first.plan}  # how often each is timed depends on the machine's noise


def test_a_plan_that_breaks_a_step_is_dropped_and_no_step_is_lost(tmp_path, at_leisure, monkeypatch):
    broken = Move(name="a broken one", word="broken", kind="A", propose=lambda plan, rig: plan.but(micro_batch=7))
    monkeypatch.setattr(moves, "MOVES", ())
    monkeypatch.setattr("hotlap.tuner.search.MOVES", (broken,))
    monkeypatch.setattr("hotlap.tuner.search.OTHERS", ())
    monkeypatch.setattr(Gate, "check", lambda self, plan: Judgement(ok=True, why=""))
    job, seen = job_for(400), []

    def forward(model, batch):
        seen.append(len(batch[0]))
        if len(batch[0]) < 16:
            raise RuntimeError("out of memory, say")
        return model(batch[0]), batch[1]

    run = fit(Job(**{**vars(job), "forward": forward}), plan="auto", out=tmp_path / "run", progress=False)
    assert min(seen) < 16, run.summary()
    assert run.steps == 400
    assert "out of memory, say" in outcomes(run)["a broken one"].why
    own = fit(job_for(400, data=Computed()), plan="off", out=tmp_path / "off", progress=False)
    assert torch.equal(parameters_of(run.model), parameters_of(own.model))


def test_an_error_of_the_users_own_is_still_an_error(tmp_path, at_leisure):
    def forward(model, batch):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fit(Job(**{**vars(job_for(50)), "forward": forward}), plan="auto", out=tmp_path / "run", progress=False)


def test_a_resumed_run_does_not_search_again(tmp_path, at_leisure):
    first = fit(job_for(800), plan="auto", out=tmp_path / "run", save_every=400, progress=False)
    assert any(entry.kind == "tuned" for entry in first.ledger)
    more = fit(job_for(1000), plan="auto", resume=tmp_path / "run", progress=False, allow_changes=True)
    assert more.steps == 1000
    assert more.plan == first.plan
    assert not [entry for entry in more.ledger if entry.outcome == "measured" and entry.step > 800]


def test_a_plan_that_drifts_away_is_left_and_the_run_goes_back_to_a_checkpoint(tmp_path, at_leisure, monkeypatch):
    monkeypatch.setattr(tuner, "FIRST_S", 0.0)
    monkeypatch.setattr(tuner, "SHARE", 1.0)
    real, after = Gate.check, []

    def check(self, plan):
        if any(entry.kind == "tuned" for entry in self._rig.ledger):
            after.append(self._rig.steps)
            if len(after) > 3:
                return Judgement(ok=False, why="gradients differ")
        return real(self, plan)

    monkeypatch.setattr(Gate, "check", check)
    run = fit(job_for(1000), plan="auto", out=tmp_path / "run", save_every=100, progress=False)
    assert run.steps == 1000
    assert run.plan == fit(job_for(1), plan="off", out=tmp_path / "off", progress=False).plan
    assert any("gone back to the checkpoint" in problem for problem in run.problems), (after, run.summary())
    steps = [record["step"] for record in run.history]
    assert steps == sorted(set(steps))
    assert any(row.sign == "!" for row in rows(run.ledger))


class Brittle(nn.Module):
    """Gives NaN while a plan that holds the data is on trial, until it has done so once."""

    def __init__(self, is_on_trial):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.is_on_trial = small_mlp(), is_on_trial

    def forward(self, x):
        return self.inner(x) * (math.nan if self.training and self.is_on_trial() else 1.0)


def test_weights_that_become_nan_during_a_trial_cost_the_tuning_and_not_the_run(tmp_path, at_leisure, monkeypatch):
    real, trial = Rig.use, []

    def use(self, plan, **more):
        real(self, plan, **more)
        trial[:] = [plan] if more.get("outcome") == "measured" and plan.feed.kind == "resident" else []

    monkeypatch.setattr(Rig, "use", use)
    model = Brittle(lambda: bool(trial))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job = job_for(600, model=model, optimizer=optimizer)
    run = fit(job, plan="auto", out=tmp_path / "run", save_every=50, progress=False)
    assert run.steps == 600
    assert run.plan == fit(job_for(1), plan="off", out=tmp_path / "off", progress=False).plan
    assert bool(parameters_of(run.model).isfinite().all())
    assert any("gone back to step" in problem and "moves on trial" in problem for problem in run.problems)


def test_it_goes_back_to_a_time_that_was_good_however_long_ago(tmp_path, at_leisure, monkeypatch):
    monkeypatch.setattr(tuner, "FIRST_S", 0.0)
    monkeypatch.setattr(tuner, "SHARE", 1e9)
    real, tuned, good = Gate.check, [], []

    def check(self, plan):
        if any(entry.kind == "tuned" for entry in self._rig.ledger):
            tuned.append(self._rig.steps)
            if len(tuned) > 2:
                return Judgement(ok=False, why="gradients differ")
            good.append(self._rig.steps)
        return real(self, plan)

    def stepped(self):
        if not tuned or len(tuned) < 2 or self._rig.steps > good[-1] + 500:  # checkpoints come and go meanwhile
            looks(self)

    looks = tuner.Canary.stepped
    monkeypatch.setattr(Gate, "check", check)
    monkeypatch.setattr(tuner.Canary, "stepped", stepped)
    run = fit(job_for(1200), plan="auto", out=tmp_path / "run", save_every=100, progress=False)
    assert run.steps == 1200
    step = good[-1] // 100 * 100
    told = f"gone back to the checkpoint of step {step:,}"
    assert any(told in problem for problem in run.problems), (good, run.problems)


def test_tuning_alone_leaves_the_model_as_it_was(tmp_path, at_leisure):
    job = job_for(10, schedule=lambda o, n: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=n + 1))
    before = parameters_of(job.model).clone()
    found = tune(job, most_s=5, progress=False)
    assert torch.equal(before, parameters_of(job.model))
    assert found.plan.feed.kind == "resident"
    assert not job.optimizer.state
    assert found.updates > 10


def test_the_command_tunes_and_writes_a_plan_that_is_never_written_over(tmp_path, at_leisure, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\nimport hotlap\n"
        "x, y = torch.randn(64, 5), torch.randint(3, (64,))\nmodel = nn.Linear(5, 3)\n"
        "job = hotlap.Job(model=model, data=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8), "
        "loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epochs=1, device='cpu')\n"
    )
    done = CliRunner().invoke(app, ["tune", "mine:job", "--out", "p.toml", "--seconds", "3", "--quiet"])
    assert done.exit_code == 0, done.output
    assert "baseline" in done.output
    assert hotlap.load_plan("p.toml").feed.kind in ("loader", "gather", "resident")
    again = CliRunner().invoke(app, ["tune", "mine:job", "--out", "p.toml", "--quiet"])
    assert "p.toml" in str(again.exception)
    assert "exists" in str(again.exception)


def test_the_environment_names_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_PLAN", "max")
    assert fit(job_for(3), out=tmp_path / "max", progress=False).plan.feed.kind == "resident"
    monkeypatch.setenv("HOTLAP_PLAN", "nonsense")
    with pytest.raises((PlanError, hotlap.HotlapError), match="nonsense"):
        fit(job_for(3), out=tmp_path / "x", progress=False)


def test_a_model_that_was_tuned_is_not_taken_for_one_trained_as_it_is(tmp_path, at_leisure):
    first = fit(job_for(60), plan="auto", reuse=True, out=tmp_path / "a", progress=False)
    other = fit(job_for(60), plan="off", reuse=True, out=tmp_path / "b", progress=False)
    again = fit(job_for(60), plan="auto", reuse=True, out=tmp_path / "c", progress=False)
    assert "cache" not in first.stopped
    assert "cache" not in other.stopped
    assert "cache" in again.stopped


@pytest.mark.parametrize("wrong", [-1, float("nan"), "soon"])
def test_a_limit_that_is_no_time_is_refused_before_a_folder_is_made(wrong, tmp_path):
    with pytest.raises(PlanError, match="tune_s"):
        fit(job_for(3), plan="auto", tune_s=wrong, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_plan_that_was_found_is_begun_with_and_looked_after(tmp_path, at_leisure):
    first = fit(job_for(600), plan="auto", out=tmp_path / "first", progress=False)
    assert first.plan.feed.kind == "resident", first.summary()
    found = Found(plan=first.plan, ledger=first.ledger, updates=first.steps)
    second = fit(job_for(40), plan=found, out=tmp_path / "second", progress=False)
    assert second.plan == first.plan
    assert [entry.plan for entry in second.ledger if entry.step == 0][-1] == first.plan
    assert not [entry for entry in second.ledger if entry.kind in ("move", "lap")]


def test_a_found_plan_that_this_job_cannot_obey_is_left_out(tmp_path):
    impossible = hotlap.Plan().but(precision="tf32")
    found = Found(plan=impossible, ledger=hotlap.Ledger(), updates=1)
    run = fit(job_for(20), plan=found, out=tmp_path / "run", progress=False)
    assert run.plan.numerics.precision == "fp32"


def test_a_plan_that_serves_many_trainings_may_be_tuned_for_all_of_them(tmp_path, monkeypatch):
    lengths = []
    monkeypatch.setattr("hotlap.fitting.tuning.Tuner.stepped", lambda one, *_: lengths.append(one._search._length()))
    fit(job_for(20), plan="auto", out=tmp_path / "run", progress=False, repeats=50)
    assert {length.updates for length in lengths} == {1000}
    with pytest.raises(PlanError, match="repeats=0 must be"):
        fit(job_for(20), repeats=0)
