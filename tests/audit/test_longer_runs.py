"""A run that seemed too short for trials is tuned once it turns out longer; what is said of its length is true."""

import torch
from clocked import OWN_S, Clocked
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.table import rows, table
from hotlap.script.session import Session, Settings
from hotlap.tuner.budget import Length
from hotlap.tuner.probe import CountingProbe


class Guessed:
    """How long a script seems to take; it may change its mind."""

    def __init__(self, updates):
        self.updates = updates

    def __call__(self):
        return Length(self.updates, final=False)


def why(training):
    return {row.what: row.why for row in rows(training.rig.ledger)}


def test_a_run_that_turns_out_longer_is_tuned(monkeypatch):
    """As `train(1); train(40)`."""
    length = Guessed(200)
    training = Clocked(monkeypatch, updates=length)
    training.train(200)
    assert training.gate.asked == []
    length.updates = 8200
    training.train(2000)
    assert training.rig.plan.feed.kind == "resident"
    training.tuner.ended()
    assert "all moves" not in why(training)


def test_a_run_that_outruns_every_guess_is_tuned(monkeypatch):
    length = Guessed(0)
    training = Clocked(monkeypatch, updates=length)
    for _ in range(60):
        length.updates = 2 * training.rig.steps
        training.train(50)
    assert training.rig.plan.feed.kind == "resident"


def test_a_run_in_which_nothing_was_tried_tells_how_long_it_really_was(monkeypatch):
    training = Clocked(monkeypatch, updates=Guessed(100))
    training.train(300)
    training.tuner.ended()
    assert why(training)["all moves"] == "3 s in 300 updates is too short for tuning to pay: trials may take 45 ms"


def test_moves_that_a_short_run_could_not_pay_for_are_tried_once_it_turns_out_longer(monkeypatch):
    """Looking around has taken what there was."""

    class Slow(CountingProbe):
        def look(self, lap, *, may_s):
            super().look(lap, may_s=may_s)
            training.now += 2.0

    length = Guessed(3000)
    training = Clocked(monkeypatch, updates=length)
    training.tuner._search.probe.__class__ = Slow
    training.train(600)
    assert training.gate.asked == []
    assert not training.tuner.done
    length.updates = 60_000
    training.train(2000)
    assert training.rig.plan.feed.kind == "resident"


def test_what_it_cost_to_find_that_nothing_may_be_tried_is_told(monkeypatch):
    training = Clocked(monkeypatch, updates=Guessed(1100))
    training.tuner._search.probe.look = lambda lap, may_s: setattr(training, "now", training.now + 2.0)
    training.train(1100)
    training.tuner.ended()
    assert training.figures()["cost_s"] == 2.0
    assert table(training.rig.ledger)[-1] == "nothing was tried"


def test_while_a_run_seems_short_no_call_has_to_be_looked_at(monkeypatch):
    training = Clocked(monkeypatch, updates=Guessed(100))
    training.train(60)
    watched = set()
    for _ in range(400):
        training.train(1)
        watched.add(training.tuner.looks_soon)
    assert watched == {False}


def test_waiting_costs_and_saves_nothing(monkeypatch):
    """However slow the machine becomes meanwhile."""
    slow = [1.0]
    training = Clocked(monkeypatch, updates=Guessed(100), pace=lambda plan: slow[0] * OWN_S)
    training.train(60)
    slow[0] = 3.0
    training.train(500)
    assert (training.tuner._search.budget.spent_s, training.tuner._search.budget.saved_s) == (0.0, 0.0)


def test_a_run_whose_length_is_certain_is_not_waited_for(monkeypatch):
    training = Clocked(monkeypatch, updates=100)
    training.train(60)
    assert training.tuner.done
    assert why(training)["all moves"] == "1 s in 100 updates is too short for tuning to pay: trials may take 15 ms"


def test_seconds_that_the_user_allows_are_not_waited_for_either(monkeypatch):
    training = Clocked(monkeypatch, updates=Guessed(100), most_s=0.0)
    training.train(60)
    assert training.tuner.done
    assert why(training)["all moves"] == "1 s in 100 updates is too short for trials: trials may take 0 s"


def test_the_length_of_a_script_is_never_certain(tmp_path):
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(Settings(name="test", out=tmp_path / "run"))
    with session:
        for _ in range(3):
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
        assert session._expected_length() == Length(12, final=False)
