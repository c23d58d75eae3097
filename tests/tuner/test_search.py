"""The search, driven by laps that a test makes up: what it asks for, keeps, refuses and writes down."""

import dataclasses
import math
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from plain import Computed, class_data, small_mlp
from torch import nn

from hotlap import Rig
from hotlap.core.plan import Feed, Plan
from hotlap.machine import DtypeFact, Support
from hotlap.moves import CAPTURED, FUSED, MOVES, PRECISION, RESIDENT
from hotlap.tuner import search as search_room
from hotlap.tuner.budget import Budget, Length, check_allowed
from hotlap.tuner.known import Found
from hotlap.tuner.laps import Lap
from hotlap.tuner.probe import CountingProbe
from hotlap.tuner.search import Search
from hotlap.tuner.trials import Rest, TrialError, Trials


class Memory:
    """What is known of a training, without a cache."""

    def __init__(self, known=None):
        self.known = known

    def found(self):
        return self.known

    def remember(self, found):
        self.known = found

    def forget(self):
        self.known = None


@dataclass
class Outcome:
    ok: bool = True
    why: str = "same maths"
    figures: dict = field(default_factory=dict)


class Gatekeeper:
    """Lets everything through but what the test names, and remembers what it was asked."""

    updates = 16

    def __init__(self, refuses=lambda plan: False):
        self.refuses, self.asked = refuses, []

    def check(self, plan):
        self.asked.append(plan)
        return Outcome(ok=False, why="gradients differ") if self.refuses(plan) else Outcome()


def rig_for(data=None, plan=None):
    rig = Rig(small_mlp(), lambda p: torch.optim.AdamW(p, lr=0.01), nn.CrossEntropyLoss(), device="cpu", plan=plan)
    rig.feed(Computed() if data is None else data, batch_size=8, epochs=1000)
    return rig


def searching(rig, updates, *, probe=None, **settings):
    return Search(rig, length=lambda: Length(updates), probe=probe or CountingProbe(rig), **settings)


def cost_of(plan, *, feed=None, fused=1.0, base=0.01):
    """Seconds a step under a plan: what the feed takes, and the rest, which a fused optimizer makes so much faster."""
    kinds = {"loader": 0.006, "gather": 0.001, "resident": 0.0008, **(feed or {})}
    feed_s = kinds["workers"] if plan.feed.workers and "workers" in kinds else kinds[plan.feed.kind]
    return feed_s, base * (fused if plan.numerics.optimizer == "fused" else 1.0)


def drive(search, step, *, seed=0, spread=0.005, fails=lambda plan: False, setup_s=0.0, slower_rests=1.0):
    """Answer a search with laps; the plans it asked for, in order."""
    rig, rng, asked, asks = search._rig, random.Random(seed), [], search.run()
    wanted = next(asks)
    for _ in range(5000):
        asked.append(wanted)
        try:
            if isinstance(wanted, Rest):
                rig.use(search.plan)
                rig.steps += wanted.updates
                feed_s, rest_s = step(search.plan)
                took = slower_rests * (feed_s + rest_s) * wanted.updates
                search.budget.made(wanted.updates, took)
                wanted = asks.send(lap_of(feed_s, rest_s, wanted.updates))
                continue
            moved = wanted != rig.plan
            if moved and fails(wanted):
                wanted = asks.throw(TrialError("out of memory"))
                continue
            rig.use(wanted, outcome="measured")
            feed_s, rest_s = step(wanted)
            factor = rng.lognormvariate(0, spread)
            updates = 6
            rig.steps += updates
            lap = lap_of(feed_s * factor, rest_s * factor, updates, setup_s if moved else 0.0)
            wanted = asks.send(lap)
        except StopIteration:
            return asked
    raise AssertionError("the search does not end")


def lap_of(feed_s, rest_s, updates, setup_s=0.0):
    step_s = feed_s + rest_s
    return Lap(step_s=step_s, updates=updates, wall_s=step_s * updates + setup_s, feed_s=feed_s, issue_s=rest_s)


def outcomes(rig):
    """The last word on each move."""
    return {e.what: (e.outcome, e.why, e.figures) for e in rig.ledger if e.outcome not in ("measured",)}


class Clock:
    """Stands still but for what a test lets pass."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """What the search times itself takes as long as a test says: on a busy machine it may take seconds."""
    made = Clock()
    for name in ("search", "trials", "search_state"):
        monkeypatch.setattr(f"hotlap.tuner.{name}.time", made)
    return made


@pytest.fixture(autouse=True)
def no_calibration(monkeypatch):
    """The machine's own rates have no say here."""
    monkeypatch.setattr("hotlap.tuner.probe.calibration", lambda device, known_only: None)
    monkeypatch.setattr("hotlap.tuner.trials.Random", lambda: random.Random(0))
    monkeypatch.setattr(Rig, "holding_s", lambda self, feed: 0.01)


@pytest.fixture
def has_16_bits(monkeypatch):
    """As a CPU has them that computes in bf16 and fp16."""
    fact = DtypeFact(support=Support.HARDWARE, reason="", kernel="ran")
    has = SimpleNamespace(dtype_fact=lambda device, dtype: fact, Support=Support)
    monkeypatch.setattr("hotlap.moves.machine", has)


def test_what_pays_is_kept_with_its_share_and_the_plan_is_in_force_at_the_end():
    rig, gate = rig_for(), Gatekeeper()
    search = searching(rig, 100_000, gate=gate)
    drive(search, lambda plan: cost_of(plan, fused=0.8, feed={"workers": 0.012}))
    found = outcomes(rig)
    assert rig.plan.feed.kind == "resident"
    assert rig.plan.numerics.optimizer == "fused"
    assert found["data held on the device"][0] == "kept"
    share = found["data held on the device"][2]
    assert share["low"] < 0.014 / 0.0088 < share["high"]
    assert share["without_s"] == pytest.approx(0.014, rel=0.03)
    assert found["fused optimizer"][0] == "kept"
    assert found["workers that fetch ahead"][0] == "rejected"
    assert found["workers that fetch ahead"][2]["ratio"] == pytest.approx(0.0088 / 0.02, rel=0.03)
    total = found["tuned"][2]
    assert total["low"] < 0.016 / 0.0088 < total["high"]


@pytest.mark.parametrize("fused_pays", [True, False])
def test_a_plan_that_was_timed_against_the_users_own_is_not_once_more_at_the_end(fused_pays):
    rig = rig_for()
    search = searching(rig, 100_000, gate=Gatekeeper())
    asked = drive(search, lambda plan: cost_of(plan, fused=0.8 if fused_pays else 1.1))
    together = next(entry.figures for entry in rig.ledger if entry.figures.get("together"))
    total = outcomes(rig)["tuned"][2]
    # What was kept together is what is left, unless one of it made it slower and went.
    assert (total["ratio"] == together["ratio"]) is fused_pays
    assert (search.baseline in asked[-4:]) is not fused_pays


def test_nothing_helped_is_a_result():
    rig = rig_for(class_data(256))
    search = searching(rig, 100_000, gate=Gatekeeper())
    own = rig.plan
    drive(search, lambda plan: (0.0, 0.01))
    found = outcomes(rig)
    assert rig.plan == own
    assert found["tuned"][1] == "nothing helped"
    assert not any(outcome == "kept" and what != "" and figures for what, (outcome, _, figures) in found.items())


def test_a_move_that_hides_behind_a_slow_feed_is_found():
    """By itself a step twice as fast shows little where batches take most of the time."""
    rig = rig_for()
    search = searching(rig, 100_000, gate=Gatekeeper())

    def step(plan):  # what is slower, the feed or the step, decides
        feed_s, rest_s = cost_of(plan, fused=0.5, feed={"loader": 0.05, "workers": 0.06})
        return max(0.0, feed_s - rest_s), rest_s

    drive(search, step)
    assert rig.plan.numerics.optimizer == "fused"
    assert rig.plan.feed.kind in ("resident", "gather")


def test_a_move_that_makes_the_plan_slower_beside_the_others_is_taken_out_again():
    rig = rig_for()
    search = searching(rig, 100_000, gate=Gatekeeper())
    drive(search, lambda plan: cost_of(plan, fused=1.1, feed={"workers": 0.012}))
    found = outcomes(rig)
    assert rig.plan.numerics.optimizer == "plain"
    assert found["fused optimizer"][:2] == ("rejected", "no faster beside the others")


@pytest.mark.parametrize("fused", [1.0, 0.99, 0.985])
def test_a_kept_move_stays_unless_the_plan_without_it_is_shown_to_be_no_slower(fused):
    """It costs nothing, and weak evidence is none against it; nor is it said to give what it was not seen to give."""
    rig = rig_for()
    search = searching(rig, 100_000, gate=Gatekeeper())
    drive(search, lambda plan: cost_of(plan, fused=fused, feed={"workers": 0.012}), spread=0.01)
    outcome, _, figures = outcomes(rig)["fused optimizer"]
    assert rig.plan.numerics.optimizer == "fused"
    assert outcome == "kept"
    assert figures["low"] > 1.02
    assert figures["share_low"] <= 1.02
    assert figures["share_high"] > 1


@pytest.mark.parametrize("seed", range(6))
def test_kept_is_only_said_of_an_interval_above_the_least_gain(seed):
    rng = random.Random(seed)
    rig = rig_for()
    gain, spread = rng.uniform(0.9, 1.0), rng.choice([0.005, 0.05])
    drive(searching(rig, 100_000, gate=Gatekeeper()), lambda plan: cost_of(plan, fused=gain), seed=seed, spread=spread)
    kept = [entry.figures for entry in rig.ledger if entry.outcome == "kept"]
    assert all(figures["low"] > 1.02 for figures in kept)


def test_what_a_gate_holds_back_is_never_timed_and_says_why():
    rig = rig_for()
    gate = Gatekeeper(refuses=lambda plan: plan.numerics.optimizer == "fused")
    asked = drive(searching(rig, 100_000, gate=gate), lambda plan: cost_of(plan, fused=0.1, feed={"workers": 0.012}))
    assert not any(isinstance(plan, Plan) and plan.numerics.optimizer == "fused" for plan in asked)
    assert outcomes(rig)["fused optimizer"][:2] == ("rejected", "gradients differ")
    assert rig.plan.feed.kind == "resident"


def test_a_plan_that_breaks_a_step_is_out_and_the_search_goes_on():
    rig = rig_for()
    asked = drive(
        searching(rig, 100_000, gate=Gatekeeper()),
        lambda plan: cost_of(plan, fused=0.8),
        fails=lambda plan: plan.feed.workers > 0,
    )
    assert "a step failed: out of memory" in outcomes(rig)["workers that fetch ahead"][1]
    assert rig.plan.numerics.optimizer == "fused"
    assert asked


def test_a_short_run_is_left_alone():
    rig = rig_for()
    own = rig.plan
    asked = drive(searching(rig, 300, gate=Gatekeeper()), lambda plan: cost_of(plan, fused=0.1))
    assert set(asked) == {own}
    assert outcomes(rig)["all moves"][0] == "not tried"


@pytest.mark.parametrize("feed_s", [0.07, 0.0], ids=["batches are slow", "batches are quick"])
def test_a_run_of_few_slow_updates_is_looked_at_where_its_batches_are_slow(feed_s):
    rig = rig_for()
    feed = {"loader": feed_s, "gather": feed_s / 10, "resident": feed_s / 10}
    gate = Gatekeeper()
    gate.updates = 4
    asked = drive(searching(rig, 900, gate=gate), lambda plan: cost_of(plan, feed=feed, base=0.1 - feed_s))
    assert any(plan != asked[0] for plan in asked) is (feed_s > 0)
    assert (rig.plan.feed.kind == "resident") is (feed_s > 0)


def test_what_feeding_cannot_give_is_not_tried():
    rig = rig_for()
    step = lambda plan: cost_of(plan, feed={"loader": 0.0001, "gather": 0.0001, "resident": 0.0001})  # noqa: E731
    asked = drive(searching(rig, 100_000, gate=Gatekeeper()), step)
    outcome, why, figures = outcomes(rig)["workers that fetch ahead"]
    assert outcome == "not tried"
    assert "1.0 % of a step" in why
    assert not figures
    assert not any(isinstance(plan, Plan) and plan.feed.workers for plan in asked)


def test_costs_stay_within_the_budget_where_trials_are_dear():
    rig = rig_for()
    search = searching(rig, 20_000, gate=Gatekeeper())
    drive(search, lambda plan: (0.006, 0.01) if plan.feed.workers == 0 else (0.03, 0.01), setup_s=0.2)
    assert search.budget.spent_s < 0.015 * 20_000 * 0.016 + 0.25 * search.budget.saved_s + 2.5


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_what_cannot_be_paid_for_yet_waits_until_enough_is_saved(slower, monkeypatch):
    """Also where less is saved in the meantime than was thought."""
    dear = dataclasses.replace(FUSED, setup_s=lambda plan, rig: 35.0)
    monkeypatch.setattr("hotlap.tuner.search.MOVES", (dear, RESIDENT))
    monkeypatch.setattr("hotlap.tuner.search.OTHERS", ())
    rig = rig_for()
    search = searching(rig, 40_000, gate=Gatekeeper())
    asked = drive(search, lambda plan: cost_of(plan, fused=0.5), slower_rests=slower)
    assert rig.plan.numerics.optimizer == "fused"
    rests = [number for number, plan in enumerate(asked) if isinstance(plan, Rest)]
    assert len(rests) > 1 if slower > 1 else rests
    firsts = [n for n, plan in enumerate(asked) if isinstance(plan, Plan) and plan.numerics.optimizer == "fused"]
    assert rests[-1] < firsts[0]


@pytest.mark.parametrize("most_s", [30.0, None])
def test_what_can_never_be_paid_for_is_not_waited_for(most_s, monkeypatch):
    dear = dataclasses.replace(FUSED, setup_s=lambda plan, rig: 70.0)
    monkeypatch.setattr("hotlap.tuner.search.MOVES", (dear, RESIDENT))
    monkeypatch.setattr("hotlap.tuner.search.OTHERS", ())
    rig = rig_for()
    asked = drive(searching(rig, 10_000_000, gate=Gatekeeper(), most_s=most_s), lambda plan: cost_of(plan, fused=0.5))
    assert not any(isinstance(plan, Rest) for plan in asked)
    assert outcomes(rig)["fused optimizer"][0] == "not tried"
    assert rig.plan.feed.kind == "resident"


@pytest.mark.parametrize("seed", range(8))
def test_what_is_kept_is_never_slower_than_the_users_own(seed):
    """Random costs, some moves harmful: the plan in the end is at least as fast as the first, beyond noise."""
    rng = random.Random(seed)
    feeds = {kind: rng.uniform(0.0005, 0.02) for kind in ("loader", "gather", "resident", "workers")}
    fused = rng.uniform(0.5, 1.5)
    rig = rig_for()
    own = rig.plan
    step = lambda plan: cost_of(plan, fused=fused, feed=feeds)  # noqa: E731
    drive(searching(rig, 100_000, gate=Gatekeeper()), step, seed=seed, spread=0.01)
    assert sum(step(rig.plan)) <= 1.01 * sum(step(own))


def test_a_drifting_machine_fools_nobody():
    rig = rig_for(class_data(256))
    own, made = rig.plan, [0]

    def step(plan):
        made[0] += 1
        return 0.0, 0.01 * (1 + 0.001 * made[0])

    drive(searching(rig, 100_000, gate=Gatekeeper()), step)
    assert rig.plan == own


def test_the_ledger_names_the_plan_of_every_lap():
    rig = rig_for()
    drive(searching(rig, 100_000, gate=Gatekeeper()), lambda plan: cost_of(plan, fused=0.8))
    measured = [entry for entry in rig.ledger if entry.outcome == "measured"]
    assert {entry.plan.feed for entry in measured} > {Feed(kind="resident")}
    assert rig.ledger.plan_at(10**6) == rig.plan


def test_a_precision_that_a_gate_holds_back_at_first_is_judged_again_later(has_16_bits):
    rig = rig_for()
    seen = []

    class Late(Gatekeeper):
        def check(self, plan):
            if plan.numerics.precision == "bf16":
                seen.append(rig.steps)
                return Outcome(ok=len(seen) > 1, why="gradients agree to 0.9")
            return super().check(plan)

    def step(plan):
        feed_s, rest_s = cost_of(plan, feed={"workers": 0.012})
        return feed_s, rest_s * (0.5 if plan.numerics.precision == "bf16" else 1.0)

    asked = drive(searching(rig, 100_000, gate=Late()), step)
    assert seen[1] - seen[0] >= 200
    assert rig.plan.numerics.precision == "bf16"
    assert any(isinstance(plan, Rest) for plan in asked)


@pytest.fixture
def bound_to_pay(monkeypatch):
    """As where products in fp32 take much of a step."""
    monkeypatch.setattr(CountingProbe, "is_bound_to_pay", lambda self, plan, proposed: True)


def in_16_bits(plan):
    return plan.numerics.precision == "bf16"


def test_a_precision_that_is_bound_to_pay_is_judged_and_timed_beside_all_else(has_16_bits, bound_to_pay):
    rig, gate = rig_for(), Gatekeeper()
    search = searching(rig, 100_000, gate=gate)
    asked = drive(search, lambda plan: (cost_of(plan)[0], 0.002 if in_16_bits(plan) else 0.01))
    first = gate.asked[0]
    assert (first.numerics.precision, first.numerics.optimizer, first.feed.kind) == ("bf16", "fused", "resident")
    assert next(plan for plan in asked if plan != search.baseline) == first
    assert in_16_bits(rig.plan)
    assert len(gate.asked) == len(set(gate.asked))


def test_the_others_of_such_a_bundle_are_said_to_be_the_same_maths(has_16_bits, bound_to_pay):
    class Words(Gatekeeper):
        def check(self, plan):
            return Outcome(why="gradients agree to 0.9999" if in_16_bits(plan) else "same maths")

    rig = rig_for()
    drive(
        searching(rig, 100_000, gate=Words()),
        lambda plan: cost_of(plan, fused=0.8, base=0.002 if in_16_bits(plan) else 0.01),
    )
    found = outcomes(rig)
    assert found["16-bit precision"][:2] == ("kept", "gradients agree to 0.9999")
    assert found["fused optimizer"][:2] == ("kept", "same maths")


def test_where_a_gate_holds_such_a_bundle_back_the_others_are_judged_without_the_precision(has_16_bits, bound_to_pay):
    rig, gate = rig_for(), Gatekeeper(refuses=in_16_bits)
    drive(searching(rig, 2_000, gate=gate), lambda plan: cost_of(plan, fused=0.5, feed={"workers": 0.012}))
    assert [in_16_bits(plan) for plan in gate.asked][:2] == [True, False]
    assert (gate.asked[1].numerics.optimizer, gate.asked[1].feed.kind) == ("fused", "resident")
    assert rig.plan.feed.kind == "resident"
    assert not in_16_bits(rig.plan)


def test_what_is_recorded_for_many_shapes_is_dear_to_record_again(monkeypatch):
    rig = rig_for()
    search = searching(rig, 2_000, gate=Gatekeeper())
    drive(search, lambda plan: cost_of(plan, fused=0.5))
    captured = rig.plan.but(mode="captured")
    one_s = search._now.recording_s(captured)
    assert one_s == pytest.approx(4 * search.budget.base_s)
    monkeypatch.setattr(type(rig), "shapes", 11)
    assert search._now.recording_s(captured) == pytest.approx(11 * one_s)
    assert search._now.recording_s(rig.plan) == 0.0


@pytest.mark.parametrize(
    ("bound", "is_precision"), [("arithmetic", True), ("memory traffic", True), ("feeding", False)]
)
def test_where_the_device_bounds_a_training_what_makes_it_faster_comes_first(
    bound, is_precision, has_16_bits, monkeypatch
):
    monkeypatch.setattr(CountingProbe, "bound", bound)
    rig, gate = rig_for(), Gatekeeper()
    drive(searching(rig, 5_000, gate=gate), lambda plan: (0.001, 0.005 if plan.numerics.precision == "bf16" else 0.01))
    assert (gate.asked[0].numerics.precision == "bf16") == is_precision
    assert (gate.asked[0].feed.kind == "resident") != is_precision
    assert rig.plan.numerics.precision == "bf16"


def test_a_bundle_that_did_not_pay_is_not_timed_again(has_16_bits, monkeypatch):
    monkeypatch.setattr(CountingProbe, "bound", "arithmetic")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(4))
    model(torch.zeros(1, 3, 8, 8))
    rig = Rig(model, lambda p: torch.optim.AdamW(p, fused=True), nn.CrossEntropyLoss(), device="cpu")
    rig.feed((torch.randn(64, 3, 8, 8), torch.randint(4, (64,))), batch_size=8, epochs=1000)
    drive(searching(rig, 100_000, gate=Gatekeeper()), lambda plan: (0.0, 0.01))
    assert [entry.what for entry in rig.ledger].count("16-bit precision, channels last") == 1


def test_a_dear_move_is_left_out_of_the_bundle_and_not_out_of_the_search(monkeypatch):
    """What cannot be paid for beside the others is tried by itself once it can."""
    dear = RESIDENT.__class__(**{**vars(RESIDENT), "setup_s": lambda plan, rig: 10.0})
    moves = tuple(dear if move is RESIDENT else move for move in MOVES)
    monkeypatch.setattr("hotlap.tuner.search.MOVES", moves)
    rig = rig_for()
    drive(searching(rig, 200_000, gate=Gatekeeper()), lambda plan: cost_of(plan, fused=0.4, feed={"workers": 0.012}))
    assert rig.plan.numerics.optimizer == "fused"
    assert rig.plan.feed.kind == "resident"


def test_a_run_of_unknown_length_is_tuned_once_it_has_gone_on_for_long_enough():
    rig = rig_for()
    search = Search(
        rig, length=lambda: Length(2 * rig.steps + 10, final=False), gate=Gatekeeper(), probe=CountingProbe(rig)
    )
    asked = drive(search, lambda plan: cost_of(plan, fused=0.5))
    first = next(number for number, one in enumerate(asked) if isinstance(one, Rest))
    assert all(one == search.baseline for one in asked[:first])
    assert search.plan.numerics.optimizer == "fused"


def test_a_run_that_ends_before_its_length_is_known_says_so():
    rig = rig_for()
    search = Search(rig, length=lambda: Length(rig.steps + 1, final=False), gate=Gatekeeper(), probe=CountingProbe(rig))
    asks = search.run()
    wanted = next(asks)
    while not isinstance(wanted, Rest):
        rig.steps += 6
        wanted = asks.send(lap_of(0.001, 0.009, 6))
    search.cut_short()
    assert outcomes(rig)["baseline"][0] == "chosen"
    outcome, why, _ = outcomes(rig)["all moves"]
    assert (outcome, why) == (
        "not tried",
        "240 ms in 24 updates is too short for tuning to pay: trials may take 3.6 ms",
    )


def test_moves_whose_laps_a_run_ended_too_early_for_are_said_to_be_undecided():
    rig = rig_for()
    search = searching(rig, 200_000, gate=Gatekeeper())
    asks = search.run()
    wanted = next(asks)
    while wanted == search.baseline:
        wanted = asks.send(lap_of(0.001, 0.009, 6))
    search.cut_short()
    undecided = {what for what, (outcome, *_) in outcomes(rig).items() if outcome == "undecided"}
    assert "fused optimizer" in undecided


def test_compiling_is_tried_last_and_on_top_of_what_was_found(has_16_bits):
    rig = rig_for()
    search = searching(rig, 50_000_000, gate=Gatekeeper(), most_s=1e6)

    def step(plan):
        feed_s, rest_s = cost_of(plan, fused=0.8)
        return feed_s, rest_s * (0.7 if plan.execution.compile != "no" else 1.0)

    asked = [plan for plan in drive(search, step) if not isinstance(plan, Rest)]
    assert search.plan.execution.compile == "model"
    first = next(number for number, plan in enumerate(asked) if plan.execution.compile != "no")
    assert asked[first].numerics.optimizer == "fused"
    assert asked[first].feed.kind == "resident"
    assert any(plan.numerics.precision == "bf16" for plan in asked[:first])


# --- what an earlier run has found ---------------------------------------------------------------


def found_by(rig, *, gate_s=0.0, rejected=None):
    """A plan as an earlier run may have left it: the data held, and nothing else."""
    plan = rig.plan.with_feed(Feed(kind="resident"))
    return Found(plan=plan, moves=(RESIDENT.name,), gain=2.0, gate_s=gate_s, rejected=rejected or {})


def pays(plan):
    return cost_of(plan, fused=0.6, feed={"loader": 0.01, "workers": 0.03})


def test_what_an_earlier_run_could_not_pay_for_is_still_tried():
    rig = rig_for()
    memory = Memory(found_by(rig))
    asked = drive(searching(rig, 100_000, gate=Gatekeeper(), known=memory), pays)
    assert next(plan for plan in asked if plan != asked[0]) == found_by(rig_for()).plan
    assert (rig.plan.feed.kind, rig.plan.numerics.optimizer) == ("resident", "fused")
    assert set(memory.known.moves) == {"data held on the device", "fused optimizer"}
    assert memory.known.plan == rig.plan
    assert memory.known.gain == pytest.approx(0.02 / 0.0068, rel=0.05)
    assert "workers that fetch ahead" in memory.known.rejected


def test_a_plan_found_before_whose_laps_a_run_ended_too_early_for_is_undecided():
    rig = rig_for()
    search = searching(rig, 200_000, gate=Gatekeeper(), known=Memory(found_by(rig)))
    asks = search.run()
    wanted = next(asks)
    while wanted == search.baseline:
        wanted = asks.send(lap_of(0.001, 0.009, 6))
    assert wanted == found_by(rig).plan
    search.cut_short()
    assert outcomes(rig)[RESIDENT.name][0] == "undecided"


def test_what_an_earlier_run_has_rejected_is_not_tried_again():
    rig = rig_for()
    memory = Memory(found_by(rig, rejected={"fused optimizer": "no gain worth having"}))
    asked = drive(searching(rig, 100_000, gate=Gatekeeper(), known=memory), pays)
    assert not any(isinstance(plan, Plan) and plan.numerics.optimizer == "fused" for plan in asked)
    assert outcomes(rig)["fused optimizer"][:2] == ("rejected", "no gain worth having")
    assert memory.known.rejected["fused optimizer"] == "no gain worth having"


def test_a_plan_that_is_known_to_take_longer_to_try_than_it_saves_waits_for_a_longer_run():
    rig = rig_for()
    memory = Memory(found_by(rig, gate_s=1000.0))
    drive(searching(rig, 5_000, gate=Gatekeeper(), known=memory), pays)
    outcome, why, _ = outcomes(rig)["the plan found before"]
    assert outcome == "not tried"
    assert why.startswith("trying takes 16 min 40 s, and ")
    assert memory.known == found_by(rig_for(), gate_s=1000.0)


def test_a_known_plan_too_is_tried_for_as_many_seconds_as_the_user_allows_at_most():
    rig, gate = rig_for(), Gatekeeper()
    memory = Memory(found_by(rig, gate_s=3.0))
    drive(searching(rig, 100_000, gate=gate, known=memory, most_s=2.0), pays)
    outcome, why, _ = outcomes(rig)["the plan found before"]
    assert (outcome, why) == ("not tried", "trying takes 3 s, and 2 s may be spent")


def test_a_move_that_was_let_through_at_last_is_not_remembered_as_rejected(has_16_bits):
    rig, memory, seen = rig_for(), Memory(), []

    class Late(Gatekeeper):
        def check(self, plan):
            seen.extend([plan] if in_16_bits(plan) else [])
            return Outcome(ok=not in_16_bits(plan) or len(seen) > 1, why="gradients agree to 0.9")

    def step(plan):
        feed_s, rest_s = cost_of(plan, feed={"workers": 0.012})
        return feed_s, rest_s * (0.5 if in_16_bits(plan) else 1.0)

    drive(searching(rig, 100_000, gate=Late(), known=memory), step)
    assert in_16_bits(rig.plan)
    assert "16-bit precision" in memory.known.moves
    assert "16-bit precision" not in memory.known.rejected


def test_a_plan_that_does_not_hold_any_more_is_said_to_and_forgotten():
    rig = rig_for()
    memory = Memory(found_by(rig))
    drive(searching(rig, 100_000, gate=Gatekeeper(), known=memory), lambda plan: (0.0, 0.01))
    assert outcomes(rig)["the plan found before"][:2] == ("rejected", "no gain worth having")
    assert memory.known is None


def test_a_plan_that_a_gate_holds_back_now_is_said_to_be():
    rig = rig_for()
    gate = Gatekeeper(refuses=lambda plan: plan.feed.kind == "resident")
    drive(searching(rig, 100_000, gate=gate, known=Memory(found_by(rig))), pays)
    assert outcomes(rig)["the plan found before"][:2] == ("rejected", "gradients differ")
    assert rig.plan.numerics.optimizer == "fused"


# --- what hides, and what money hides ------------------------------------------------------------


def test_what_gave_nothing_while_the_host_was_slow_is_tried_again_once_steps_are_recorded(has_16_bits, monkeypatch):
    """In 16 bits the device is faster, which shows only where nobody waits for the host any more."""
    recorded = dataclasses.replace(CAPTURED, propose=lambda plan, rig: plan.but(mode="captured"))
    monkeypatch.setattr("hotlap.tuner.search.MOVES", (PRECISION, recorded))
    monkeypatch.setattr("hotlap.tuner.search.OTHERS", ())
    monkeypatch.setattr(CountingProbe, "bound", "arithmetic")
    # No step is made here, and without a GPU none could be recorded.
    monkeypatch.setattr(Rig, "supports", lambda self, plan: None)
    monkeypatch.setattr(Rig, "use", lambda self, plan, **words: setattr(self, "plan", plan))
    rig = rig_for()

    def step(plan):
        device_s = 0.004 if in_16_bits(plan) else 0.009
        return 0.0, max(device_s, 0.0 if plan.execution.mode == "captured" else 0.01)

    asked = drive(searching(rig, 100_000, gate=Gatekeeper()), step)
    firsts = [next(n for n, plan in enumerate(asked) if is_it(plan)) for is_it in (in_16_bits, is_recorded)]
    assert firsts == sorted(firsts)
    assert (rig.plan.execution.mode, rig.plan.numerics.precision) == ("captured", "bf16")


def is_recorded(plan):
    return plan.execution.mode == "captured"


def test_laps_of_what_looks_faster_go_on_though_all_that_may_be_spent_was():
    """A gate may take longer than was thought; what it has let through is not thrown away."""

    class Slow(Gatekeeper):
        def check(self, plan):
            search.budget.made(0, 1000.0)
            return super().check(plan)

    rig = rig_for()
    search = searching(rig, 100_000, gate=Slow())
    drive(search, lambda plan: cost_of(plan, fused=0.6, feed={"workers": 0.03}))
    assert rig.plan.feed.kind == "resident"
    assert outcomes(rig)["data held on the device"][0] == "kept"


@pytest.mark.parametrize(("look_s", "tried"), [(0.0, True), (0.5, False)])
def test_what_it_took_to_look_around_is_a_cost_as_any_other(look_s, tried, clock):
    class Slow(CountingProbe):
        def look(self, lap, *, may_s):
            clock.now_s += look_s

    rig, gate = rig_for(), Gatekeeper()
    search = searching(rig, 2_000, gate=gate, probe=Slow(rig))
    drive(search, lambda plan: cost_of(plan))
    told = next(entry for entry in rig.ledger if entry.kind == "tuned").figures
    assert told["cost_s"] == search.budget.spent_s >= look_s
    assert bool(gate.asked) is tried


# --- a glance ------------------------------------------------------------------------------------


class Glancing(CountingProbe):
    """Has a glance at plans whose pace a test makes up."""

    def __init__(self, rig, step, while_looking=lambda: None):
        super().__init__(rig)
        self._pace, self._while_looking, self.glanced = step, while_looking, []

    def glance(self, plan):
        self.glanced.append(plan)
        self._while_looking()
        return sum(self._pace(plan))


@pytest.fixture
def dear_moves(has_16_bits, monkeypatch):
    """As on a GPU, where what pays takes seconds to try: more than a small share of a run allows."""
    held = dataclasses.replace(RESIDENT, setup_s=lambda plan, rig: 6.0)
    narrow = dataclasses.replace(PRECISION, setup_s=lambda plan, rig: 2.0)
    monkeypatch.setattr("hotlap.tuner.search.MOVES", (FUSED, held, narrow))
    monkeypatch.setattr("hotlap.tuner.search.OTHERS", ())


def narrower(gain):
    """Costs of which another precision makes the step so many times faster."""
    return lambda plan: (cost_of(plan)[0] / gain, 0.01 / gain) if in_16_bits(plan) else cost_of(plan)


def test_what_is_much_faster_at_a_glance_may_cost_more_to_try(dear_moves):
    rig, gate = rig_for(), Gatekeeper()
    probe = Glancing(rig, narrower(4.0))
    search = searching(rig, 20_000, gate=gate, probe=probe)
    drive(search, narrower(4.0))
    seen = probe.glanced[0]
    assert (seen.numerics.precision, seen.numerics.optimizer, seen.feed.kind) == ("bf16", "fused", "loader")
    assert len(probe.glanced) == 1
    first = gate.asked[0]
    assert (first.numerics.precision, first.numerics.optimizer, first.feed.kind) == ("bf16", "fused", "resident")
    assert in_16_bits(rig.plan)
    assert search.budget.hoped_s == 0.0
    assert "at a glance 4x by fused optimizer, 16-bit precision" in outcomes(rig)["baseline"][1]


def test_what_was_made_for_a_glance_is_not_paid_for_again(dear_moves, monkeypatch):
    """Its kernels are loaded, and what it holds or has recorded stays: a trial of it takes its gate alone."""
    rig, gate, needed = rig_for(), Gatekeeper(), []
    search = searching(rig, 20_000, gate=gate, probe=Glancing(rig, narrower(4.0)))
    check = gate.check

    def costs(plan):
        needed.append({move.name: search._now.setup_s(move) for move in search_room.MOVES if move is not FUSED})
        return check(plan)

    gate.check = costs
    drive(search, narrower(4.0))
    assert needed[0] == {"16-bit precision": 0.0, "data held on the device": 6.0}, "held data was not part of it"


@pytest.mark.parametrize("gain", [1.0, 1.2])
def test_where_a_glance_shows_little_nothing_more_is_spent(gain, dear_moves):
    rig, gate = rig_for(), Gatekeeper()
    search = searching(rig, 20_000, gate=gate, probe=Glancing(rig, narrower(gain)))
    most = []
    drive(search, lambda plan: (most.append(search.budget and search.budget.hoped_s), narrower(gain)(plan))[1])
    assert {hoped for hoped in most if hoped is not None} == {0.0}
    assert not in_16_bits(gate.asked[0])
    assert "glance" not in outcomes(rig)["baseline"][1]


def test_a_glance_is_paid_for(dear_moves, clock):
    rig, gate, spent = rig_for(), Gatekeeper(), []

    def passes():
        spent.append(search.budget.spent_s)
        clock.now_s += 0.2

    check = gate.check
    gate.check = lambda plan: (spent.append(search.budget.spent_s), check(plan))[1]
    search = searching(rig, 20_000, gate=gate, probe=Glancing(rig, narrower(1.0), passes))
    drive(search, narrower(1.0))
    assert spent[1] - spent[0] == pytest.approx(0.2), "nothing else was timed between the glance and the first gate"


@pytest.mark.parametrize("is_wide", [True, False])
def test_fp32_on_a_device_that_has_16_bits_is_hope_enough_for_a_glance_and_for_no_more(
    is_wide, dear_moves, monkeypatch
):
    monkeypatch.setattr(Search, "_is_wide_arithmetic", lambda self: is_wide)
    rig, gate, hoped = rig_for(), Gatekeeper(), []
    probe = Glancing(rig, narrower(1.1), lambda: hoped.append(search.budget.hoped_s))
    search = searching(rig, 3_000, gate=gate, probe=probe)
    drive(search, lambda plan: (hoped.append(search.budget and search.budget.hoped_s), narrower(1.1)(plan))[1])
    assert len(probe.glanced) == is_wide
    assert any(hoped) == is_wide
    assert not hoped[-1]
    assert not any(in_16_bits(plan) for plan in gate.asked)


def test_a_run_that_cannot_pay_for_a_glance_has_none(dear_moves):
    rig = rig_for()
    probe = Glancing(rig, narrower(4.0))
    drive(searching(rig, 2_000, gate=Gatekeeper(), probe=probe), narrower(4.0))
    assert probe.glanced == []


@pytest.mark.parametrize(("setup_s", "looks"), [(0.1, 1), (4.0, 1), (100.0, 0)])
def test_nobody_looks_where_a_recorded_step_cannot_be_among_what_is_seen(setup_s, looks, dear_moves, monkeypatch):
    """Beside launches that take as long as ever, another precision shows little."""
    recorded = dataclasses.replace(
        FUSED, name="whole step captured", setup_s=lambda plan, rig: setup_s, at_a_glance="stays"
    )
    narrow = dataclasses.replace(PRECISION, setup_s=lambda plan, rig: 2.0)
    monkeypatch.setattr("hotlap.tuner.search.MOVES", (narrow, recorded))
    rig = rig_for()
    probe = Glancing(rig, narrower(4.0))
    drive(searching(rig, 20_000, gate=Gatekeeper(), probe=probe), narrower(4.0))
    assert len(probe.glanced) == looks


def test_where_a_plan_was_found_before_there_is_nothing_to_glance_at(dear_moves):
    rig = rig_for()
    probe = Glancing(rig, pays)
    drive(searching(rig, 20_000, gate=Gatekeeper(), probe=probe, known=Memory(found_by(rig))), pays)
    assert probe.glanced == []


@pytest.mark.parametrize(("gain", "goes_on"), [(4.0, True), (1.2, False)])
def test_a_gate_of_what_was_seen_at_a_glance_may_take_longer_than_was_thought(gain, goes_on, dear_moves, monkeypatch):
    rig, gate, may = rig_for(), Gatekeeper(), []
    monkeypatch.setattr("hotlap.tuner.trials.allowed", lambda seconds: (may.append(seconds), nullcontext())[1])
    check = gate.check
    gate.check = lambda plan: (may.append(search.budget.left_s), check(plan))[1]
    search = searching(rig, 20_000, gate=gate, probe=Glancing(rig, narrower(gain)))
    drive(search, narrower(gain))
    assert (may[0] > may[1]) == goes_on
    assert all(allowed == pytest.approx(left) for allowed, left in zip(may[2::2], may[3::2], strict=True))


@pytest.fixture
def stopped(clock, monkeypatch):
    """A gate that takes for ever, and is stopped once what may be spent is over; the seconds that pass are planted."""
    monkeypatch.setattr("hotlap.tuner.budget.time", clock)

    def check(plan):
        for _ in range(1_000_000):
            clock.now_s += 0.001
            check_allowed()
        raise AssertionError("nothing stops the gate")

    return check


@pytest.mark.parametrize("updates", [3_000, 20_000])
@pytest.mark.parametrize("gain", [1.3, 4.0, 20.0])
def test_a_hopeful_gate_that_fails_costs_no_more_of_a_script_than_may_be_lost(updates, gain, dear_moves, stopped):
    lost = {}
    for most_lost in (0.02, math.inf):
        rig, gate = rig_for(), Gatekeeper()
        gate.check = stopped
        probe = Glancing(rig, narrower(gain))
        search = searching(rig, updates, gate=gate, probe=probe, most_lost=most_lost)
        drive(search, narrower(gain))
        run_s = updates * sum(narrower(gain)(search.baseline))
        lost[most_lost] = (search.budget.spent_s - search.budget.saved_s) / run_s
    assert lost[0.02] <= 0.0201
    if gain == 4.0 and updates == 20_000:
        assert lost[math.inf] > 0.1, "without a bound, hope costs a tenth of the run"


@pytest.mark.parametrize("slower", [1.5, 10.0])
def test_laps_that_belie_a_glance_cost_no_more_of_a_script_than_may_be_lost(slower, dear_moves):
    rig, updates = rig_for(), 20_000
    real = narrower(1 / slower)
    search = searching(rig, updates, gate=Gatekeeper(), probe=Glancing(rig, narrower(8.0)), most_lost=0.02)
    drive(search, real, setup_s=0.3)
    run_s, a_lap_s = updates * sum(real(search.baseline)), 6 * sum(real(search.baseline)) * slower
    assert search.budget.spent_s - search.budget.saved_s <= 0.02 * run_s + a_lap_s + 0.3
    assert rig.plan.numerics.precision == search.baseline.numerics.precision


def test_what_was_saved_may_be_spent_beyond_what_may_be_lost():
    budget = Budget(base_s=0.01, length=lambda: Length(1000), most_lost=0.02)
    budget.is_hopeful = budget.is_seen = True
    budget.hoped_s = 8.0
    assert budget.left_s == pytest.approx(0.2)
    assert budget.overdraft_s == pytest.approx(0.0)
    budget.made(10, 0.25)  # 0.15 s beyond the user's own pace
    assert budget.left_s == pytest.approx(0.05)
    budget.made(100, 0.5)  # 0.5 s less
    assert budget.left_s == pytest.approx(0.55)
    named = Budget(base_s=0.01, length=lambda: Length(1000), most_s=5.0, most_lost=0.02)
    assert named.left_s == 5.0, "what the user names is what may be spent"


def test_hope_is_for_one_trial_and_told_where_it_came_to_nothing(dear_moves):
    rig, gate, hoped = rig_for(), Gatekeeper(refuses=lambda plan: True), []
    search = searching(rig, 20_000, gate=gate, probe=Glancing(rig, narrower(4.0)))
    check = gate.check
    gate.check = lambda plan: (hoped.append(search.budget.hoped_s), check(plan))[1]
    drive(search, narrower(4.0))
    assert hoped[0] > 0
    assert not any(hoped[1:])
    assert rig.plan == search.baseline
    assert "at a glance 4x" in outcomes(rig)["baseline"][1]


def test_a_device_that_is_seen_to_wait_gives_hope_for_one_trial_without_a_glance(dear_moves, monkeypatch):
    def looked(self, lap, *, may_s):
        self.busy_s = lap.step_s / 4

    monkeypatch.setattr(CountingProbe, "look", looked)
    rig, gate, hoped = rig_for(), Gatekeeper(refuses=lambda plan: True), []
    search = searching(rig, 20_000, gate=gate, probe=CountingProbe(rig))
    check = gate.check
    gate.check = lambda plan: (hoped.append((search.budget.hoped_s, plan)), check(plan))[1]
    drive(search, narrower(1.0))
    assert hoped[0][0] > 0
    assert hoped[0][1].feed.kind == "resident"  # which a small share of the run does not pay for
    assert search.budget.hoped_s == 0.0
    assert not any(one for one, plan in hoped if in_16_bits(plan))


def test_a_plan_that_is_known_to_be_too_dear_is_not_found_by_a_glance(dear_moves):
    rig = rig_for()
    probe, known = Glancing(rig, pays), Memory(dataclasses.replace(found_by(rig), gate_s=1e6))
    drive(searching(rig, 20_000, gate=Gatekeeper(), probe=probe, known=known), pays)
    assert probe.glanced == []


def test_where_a_gate_holds_back_what_a_glance_has_shown_the_others_are_still_tried(dear_moves):
    rig, gate = rig_for(), Gatekeeper(refuses=in_16_bits)
    step = lambda plan: cost_of(plan, fused=0.5) if not in_16_bits(plan) else (0.001, 0.001)  # noqa: E731
    drive(searching(rig, 20_000, gate=gate, probe=Glancing(rig, step)), step)
    assert rig.plan.numerics.optimizer == "fused"
    assert not in_16_bits(rig.plan)


# --- data that is kept as it comes by ------------------------------------------------------------


class Learning:
    """Data that takes so long to hold, and nothing once the training has come so far."""

    def __init__(self, monkeypatch, rig, *, whole_s, until):
        self.rig, self.whole_s, self.until, self.asked = rig, whole_s, until, 0
        monkeypatch.setattr(Rig, "holding_s", lambda rig, feed: 0.0 if rig.steps >= self.until else whole_s)
        monkeypatch.setattr(Rig, "keep_samples", self.learn)

    def learn(self, rig=None, epochs_left=None):
        self.asked += 1
        return self.until - self.rig.steps if self.rig.steps < self.until else None


def hidden(plan):
    """A fused optimizer shows once the data is held."""
    held = plan.feed.kind == "resident"
    return (0.001, 0.005 if plan.numerics.optimizer == "fused" else 0.01) if held else (0.05, 0.01)


def test_data_that_was_too_dear_to_hold_is_held_once_the_samples_have_come_by(monkeypatch):
    rig, gate = rig_for(), Gatekeeper()
    learning = Learning(monkeypatch, rig, whole_s=50.0, until=600)
    monkeypatch.setattr(Rig, "epoch_windows", 600)
    monkeypatch.setattr(CountingProbe, "bound", "launching")
    drive(searching(rig, 4_000, gate=gate), hidden)
    assert learning.asked
    assert rig.plan.feed.kind == "resident"
    assert rig.plan.numerics.optimizer == "fused", "it is tried again, beside data that is held"
    held = next(entry for entry in rig.ledger if entry.what == "data held on the device" and entry.outcome == "kept")
    assert held.step >= 600
    assert all(plan.feed.kind == "loader" for plan in gate.asked[:1])


def test_data_that_takes_longer_to_hold_than_it_saves_is_held_once_the_samples_have_come_by(monkeypatch):
    rig = rig_for()
    Learning(monkeypatch, rig, whole_s=50.0, until=600)
    monkeypatch.setattr(Rig, "epoch_windows", 600)
    monkeypatch.setattr(CountingProbe, "bound", "launching")
    most_gain = CountingProbe.most_gain

    def least(self, plan, proposed, lap):
        return (1.2, "") if proposed.feed != plan.feed else most_gain(self, plan, proposed, lap)

    monkeypatch.setattr(CountingProbe, "most_gain", least)
    drive(searching(rig, 4_000, gate=Gatekeeper()), hidden)
    assert rig.plan.feed.kind == "resident"
    whys = [entry.why for entry in rig.ledger if entry.what == "data held on the device"]
    assert "can save" in whys[0]


def test_where_bringing_batches_bounds_a_training_nothing_is_spent_before_the_samples_have_come_by(monkeypatch):
    rig, gate = rig_for(), Gatekeeper()
    check = gate.check
    asked_at = []
    gate.check = lambda plan: (asked_at.append(rig.steps), check(plan))[1]
    Learning(monkeypatch, rig, whole_s=50.0, until=600)
    monkeypatch.setattr(Rig, "epoch_windows", 600)
    monkeypatch.setattr(CountingProbe, "bound", "feeding")
    drive(searching(rig, 4_000, gate=gate), hidden)
    assert min(asked_at) >= 600
    assert rig.plan.feed.kind == "resident"


def brought_by_workers(plan):
    """Workers take as long as the step: neither a faster step nor held data shows anything alone."""
    return (0.0, 0.001) if plan.feed.kind == "resident" and plan.numerics.optimizer == "fused" else (0.0, 0.01)


@pytest.mark.parametrize(("workers", "until", "is_waited_for"), [(2, 300, True), (0, 300, False), (2, 3_000, False)])
def test_where_workers_bring_batches_samples_that_soon_have_come_by_are_waited_for(
    workers, until, is_waited_for, monkeypatch
):
    rig = rig_for(plan=Plan().but(kind="loader", workers=workers))
    asked = []
    gate = Gatekeeper()
    check = gate.check
    gate.check = lambda plan: (asked.append(rig.steps), check(plan))[1]
    Learning(monkeypatch, rig, whole_s=50.0, until=until)
    monkeypatch.setattr(Rig, "epoch_windows", 300)
    monkeypatch.setattr(CountingProbe, "bound", "launching")
    monkeypatch.setattr(CountingProbe, "most_gain", lambda self, plan, proposed, lap: (math.inf, ""))  # as on a GPU
    drive(searching(rig, 6_000, gate=gate), brought_by_workers)
    assert (min(asked) >= until) == is_waited_for
    assert not is_waited_for or rig.plan.feed.kind == "resident"


@pytest.mark.parametrize("epoch", [100, 1_000, 3_000])
def test_whether_samples_are_kept_depends_on_the_epochs_that_are_left(epoch, monkeypatch):
    rig, asked = rig_for(), []
    Learning(monkeypatch, rig, whole_s=50.0, until=10**9)
    monkeypatch.setattr(Rig, "keep_samples", lambda rig, epochs_left: asked.append((rig.steps, epochs_left)))
    monkeypatch.setattr(Rig, "epoch_windows", epoch)
    drive(searching(rig, 4_000, gate=Gatekeeper()), hidden)
    assert asked
    assert all(epochs_left == pytest.approx((4_000 - steps) / epoch, abs=0.1) for steps, epochs_left in asked)
    assert rig.plan.feed.kind == "loader"


def test_data_that_was_fetched_while_others_were_tried_is_held(monkeypatch):
    rig = rig_for()
    learning = Learning(monkeypatch, rig, whole_s=50.0, until=10**9)
    compare = Trials.compare

    def slow(self, *plans, **options):
        learning.until = 0  # all samples are there by the end of the first trial
        return compare(self, *plans, **options)

    monkeypatch.setattr(Trials, "compare", slow)
    monkeypatch.setattr(Rig, "keep_samples", lambda rig, epochs_left: 1 if learning.until else None)
    monkeypatch.setattr(Rig, "epoch_windows", 600)
    monkeypatch.setattr(CountingProbe, "bound", "launching")
    drive(searching(rig, 4_000, gate=Gatekeeper()), hidden)
    assert learning.until == 0
    assert rig.plan.feed.kind == "resident"


def test_nothing_is_kept_of_data_that_can_be_held_at_once(monkeypatch):
    rig = rig_for()
    learning = Learning(monkeypatch, rig, whole_s=0.01, until=600)
    monkeypatch.setattr(Rig, "epoch_windows", 600)
    drive(searching(rig, 4_000, gate=Gatekeeper()), hidden)
    assert not learning.asked
    assert rig.plan.feed.kind == "resident"


def test_what_comes_by_is_not_fetched_for_a_gain_that_is_only_hoped_for(monkeypatch):
    rig, gate, busy = rig_for(), Gatekeeper(), lambda self, lap, *, may_s: setattr(self, "busy_s", lap.step_s / 50)
    Learning(monkeypatch, rig, whole_s=20.0, until=600)
    monkeypatch.setattr(Rig, "epoch_windows", 600)
    monkeypatch.setattr(CountingProbe, "look", busy)
    monkeypatch.setattr(CountingProbe, "bound", "launching")
    search = searching(rig, 4_000, gate=gate, probe=CountingProbe(rig))
    may_s = []
    check = gate.check
    gate.check = lambda plan: (may_s.append((rig.steps, search.budget.left_s, plan.feed.kind)), check(plan))[1]
    drive(search, hidden)
    assert may_s[0][1] > 20.0, "it could be paid for"
    assert all(kind == "loader" for steps, _, kind in may_s if steps < 600)
    assert rig.plan.feed.kind == "resident"


def test_once_samples_have_come_by_holding_them_may_take_part_of_what_the_feed_takes(monkeypatch):
    rig, gate = rig_for(), Gatekeeper()
    Learning(monkeypatch, rig, whole_s=50.0, until=600)
    monkeypatch.setattr(Rig, "epoch_windows", 600)
    monkeypatch.setattr(CountingProbe, "bound", "launching")
    search, check = searching(rig, 4_000, gate=gate), gate.check

    def checked(plan):
        if rig.steps < 600:
            search.budget.spent_s = search.budget.all_s  # on trials that came to nothing
        return check(plan)

    gate.check = checked
    drive(search, hidden)
    assert rig.plan.feed.kind == "resident"
