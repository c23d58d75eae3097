"""A move is kept for a gain that was shown, and dropped for a loss that was shown; the table says which."""

from clocked import HELD_S, OWN_S, Clocked

from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.core.table import table


def uneven(gain):
    """The data held, and a fused optimizer that gives so much beside it, on a machine that stumbles."""
    made = [0]

    def pace(plan):
        made[0] += 1
        step_s = HELD_S if plan.feed.kind == "resident" else OWN_S
        step_s /= gain if plan.numerics.optimizer == "fused" else 1.0
        return step_s * (1.05 if made[0] // 9 % 3 == 0 else 1.0)

    return pace


def test_a_move_that_costs_nothing_is_not_dropped_on_weak_evidence(monkeypatch):
    training = Clocked(monkeypatch, pace=uneven(1.01))
    training.train(3000)
    assert training.tuner.done
    assert training.rig.plan.numerics.optimizer == "fused"


def test_a_move_without_which_the_plan_is_shown_to_be_faster_is_dropped(monkeypatch):
    training = Clocked(monkeypatch, pace=uneven(0.8))
    training.train(3000)
    assert training.tuner.done
    assert training.rig.plan.feed.kind == "resident"
    assert training.rig.plan.numerics.optimizer == "plain"


def test_the_table_tells_a_share_that_shows_no_gain_beside_what_the_move_was_kept_for():
    figures = {"step_s": 0.00067, "ratio": 1.4, "low": 1.3, "high": 1.5, "together": 2.0}
    shares = {"share_ratio": 1.02, "share_low": 1.0, "share_high": 1.04}
    ledger = Ledger()
    ledger.record(Entry(step=0, what="baseline", outcome="chosen", plan=Plan(), figures={"step_s": 0.00094}))
    ledger.record(Entry(step=0, what="held", outcome="kept", plan=Plan(), why="same maths", figures=figures | shares))
    assert (
        "+ held    670 µs/step     1.40x  [1.30, 1.50]   kept  same maths; measured together with others; "
        "beside the others 1.02x [1.00, 1.04], which shows no gain"
    ) in table(ledger, 200)
