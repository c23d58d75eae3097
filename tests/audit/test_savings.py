"""What tuning cost and saved is counted when the run ends, from updates that were made."""

import pytest
import torch
from clocked import HELD_S, OWN_S, Clocked
from plain import Computed, class_data, small_mlp
from torch import nn

from hotlap import Job, fit
from hotlap.core.table import as_json, table
from hotlap.fitting.tuning import tune, tuning_line
from hotlap.moves import RESIDENT
from hotlap.store.run_folder import RunFolder
from hotlap.tuner.budget import savings
from hotlap.tuner.tuner import PlanChooser


def test_a_run_that_stops_early_saves_what_its_own_updates_saved(monkeypatch):
    training = Clocked(monkeypatch, gate_s=0.3, updates=10_000_000)
    training.train(3000)
    assert training.tuner.done
    training.tuner.ended()
    # By the clock: what so many updates take at the user's own pace, less what all of it took.
    assert training.figures()["saved_s"] == pytest.approx(3000 * OWN_S - training.took_s, rel=0.02)


def ended(monkeypatch, **settings):
    """A training of 2,000 updates that has ended."""
    training = Clocked(monkeypatch, **settings)
    training.train(2000)
    training.tuner.ended()
    return training


def test_the_time_of_gates_is_a_part_of_what_tuning_cost(monkeypatch):
    free, dear = (ended(monkeypatch, gate_s=gate_s) for gate_s in (0.0, 2.0))
    assert dear.gate.asked
    assert dear.figures()["cost_s"] == pytest.approx(free.figures()["cost_s"] + 2.0 * len(dear.gate.asked))


def test_savings_are_less_what_was_spent(monkeypatch):
    free, dear = (ended(monkeypatch, gate_s=gate_s) for gate_s in (0.0, 2.0))
    assert dear.figures()["saved_s"] == pytest.approx(free.figures()["saved_s"] - 2.0 * len(dear.gate.asked))


def test_while_a_run_goes_on_nothing_is_said_to_be_saved(monkeypatch):
    training = Clocked(monkeypatch)
    training.train(2000)
    assert training.tuner.done
    assert "saved_s" not in training.figures()
    assert "saving" not in tuning_line(training.rig.ledger)
    training.tuner.ended()
    assert "net saving" in tuning_line(training.rig.ledger)


def test_savings_are_counted_once_however_often_the_end_is_told(monkeypatch):
    training = Clocked(monkeypatch)
    training.train(2000)
    training.tuner.ended()
    told = training.rig.ledger.to_lines()
    training.tuner.ended()
    assert training.rig.ledger.to_lines() == told


def test_a_plan_that_is_no_longer_in_force_is_not_said_to_have_saved(monkeypatch):
    training = Clocked(monkeypatch, gate_s=0.5)
    training.train(2000)
    training.rig.use(training.tuner._search.baseline, why="a canary, say")
    training.tuner.ended()
    assert "saved_s" not in training.figures()
    assert training.figures()["cost_s"] > 0


def test_a_search_that_the_end_cuts_short_tells_what_was_saved_so_far(monkeypatch):
    training = Clocked(monkeypatch, updates=10_000_000)
    while "kept" not in {entry.outcome for entry in training.rig.ledger}:
        training.train(1)
    training.train(40)
    training.tuner.ended()
    assert training.figures()["saved_s"] == pytest.approx(training.rig.steps * OWN_S - training.took_s, abs=0.5)


def test_a_plan_that_saved_less_than_it_took_to_find_is_told_as_a_loss():
    figures = savings({"cost_s": 3.0, "net_s": -3.0, "own_s": OWN_S, "found_s": HELD_S}, updates=100, looks_s=0.0)
    assert figures["saved_s"] == pytest.approx(-2.6)


def test_looking_after_the_plan_that_was_found_is_a_cost_of_tuning():
    figures = savings({"cost_s": 1.0, "net_s": -1.0, "own_s": 0.3, "found_s": 0.1}, updates=10, looks_s=0.5)
    assert figures["cost_s"] == pytest.approx(1.5)
    assert figures["saved_s"] == pytest.approx(0.5)


def job_for(**settings):
    torch.manual_seed(0)
    model = small_mlp()
    given = {
        "model": model,
        "data": Computed(effort=40),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "batch_size": 16,
        "device": "cpu",
    }
    return Job(**(given | settings))


@pytest.fixture
def at_leisure(monkeypatch, tmp_path):
    monkeypatch.setattr("hotlap.tuner.budget.SHARE", 100.0)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hotlap.tuner.laps.LAP_S", 0.005)


def test_a_fit_that_patience_ends_tells_its_tuner_before_the_ledger_is_written(tmp_path, monkeypatch):
    class Counting(PlanChooser):
        def __init__(self, task, *_):
            self._rig = task.rig

        def ended(self):
            self._rig.write_down("tuned", "chosen", figures={"cost_s": 0.0, "saved_s": float(self._rig.steps)})

    monkeypatch.setattr("hotlap.fitting.training.chooser_for", Counting)
    job = job_for(epochs=1_000_000, valid=class_data(16), patience=2, eval_every=3)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.0
    run = fit(job, plan="auto", out=tmp_path / "run", progress=False)
    assert "no better" in run.stopped
    assert as_json(RunFolder.open(tmp_path / "run").read_ledger())["total"]["saved_s"] == run.steps == 9


def test_hotlap_tune_saves_nothing_since_its_updates_are_thrown_away(at_leisure, monkeypatch):
    monkeypatch.setattr("hotlap.tuner.search.MOVES", (RESIDENT,))
    monkeypatch.setattr("hotlap.tuner.search.OTHERS", ())
    found = tune(job_for(steps=10), most_s=3, progress=False)
    assert as_json(found.ledger)["total"]["saved_s"] is None
    assert not any("saving" in line for line in table(found.ledger))
