"""What the table says was tried, was tried; what it says a trial takes is marked where it was only estimated."""

from clocked import OWN_S, Clocked

from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.core.table import rows, table
from hotlap.core.units import show_about
from hotlap.moves import COMPILED, RESIDENT
from hotlap.tuner.search_state import Doubt, SearchState


def ledger_of(*entries):
    ledger = Ledger()
    for what, outcome, figures in (("baseline", "chosen", {"step_s": 0.01}), *entries, ("tuned", "chosen", {})):
        known = bool(figures.get("known"))
        ledger.record(Entry(step=0, what=what, outcome=outcome, plan=Plan(), figures=figures, known=known))
    return ledger


def test_a_move_that_arithmetic_leaves_no_room_for_was_not_tried(monkeypatch):
    training = Clocked(monkeypatch, pace=lambda plan: OWN_S, moves=(RESIDENT,))
    monkeypatch.setattr(type(training.tuner._search.probe), "most_gain", lambda *_: (1.01, "at most 1.01x"))
    training.train(500)
    assert training.tuner.done
    assert training.gate.asked == []
    assert "nothing was tried" in table(training.rig.ledger)[-1]


def test_what_an_earlier_run_rejected_was_not_tried_in_this_one():
    lines = table(ledger_of(("fused optimizer", "rejected", {"known": 1.0})), 200)
    assert "known from an earlier run" in "\n".join(lines)
    assert lines[-1] == "nothing was tried"


def test_moves_of_a_bundle_are_counted_once_each():
    lines = table(ledger_of(("bf16, channels last", "rejected", {}), ("bf16", "rejected", {})), 200)
    assert lines[-1] == "nothing helped: 2 moves tried, none kept"


def test_what_a_trial_would_take_is_told_as_an_estimate(monkeypatch):
    training = Clocked(monkeypatch, updates=3000, pace=lambda plan: OWN_S, moves=(RESIDENT, COMPILED))
    training.train(3000)
    line = next(line for line in table(training.rig.ledger, 200) if "torch.compile" in line)
    assert "not tried  estimated to take about 44 s to try, can save " in line
    assert show_about(52.13) == "about 52 s"
    assert show_about(112.0) == "about 1 min 50 s"


def test_a_trial_that_may_not_be_paid_for_says_what_it_needs_and_one_that_cannot_help_does_not(monkeypatch):
    doubts = {RESIDENT: Doubt("too dear", 7.5), COMPILED: Doubt("at most 1.01x")}
    monkeypatch.setattr(SearchState, "why_not_worth", lambda self, move, beside_s=0.0: doubts[move])
    training = Clocked(monkeypatch, updates=3000, pace=lambda plan: OWN_S, moves=(*doubts,))
    training.train(3000)
    needs = {row.what: row.needs_s for row in rows(training.rig.ledger) if row.outcome == "not tried"}
    assert needs == {RESIDENT.name: 7.5, COMPILED.name: None}
