"""The first line at the end of `hotlap run` says what came of it, in words and figures that anyone understands."""

import json
import re
import time
from types import SimpleNamespace

import pytest

from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.script import report as telling
from hotlap.script.report import Report, headline
from hotlap.script.session import Settings

OWN, FOUND = Plan(), Plan().but(optimizer="fused")
BASELINE = ("baseline", "chosen", {"step_s": 0.01})


def ledger_of(*entries, plan=OWN, why=""):
    ledger = Ledger()
    ledger.record(Entry(step=0, what="start", outcome="chosen", plan=OWN))
    for what, outcome, figures in entries:
        unfit = bool(figures.get("unfit"))
        ledger.record(Entry(step=0, what=what, outcome=outcome, plan=plan, figures=figures, why=why, unfit=unfit))
    return ledger


def kept(saved_s, cost_s=2.0):
    figures = {"cost_s": cost_s, "saved_s": saved_s}
    return ledger_of(BASELINE, ("fused optimizer", "kept", {}), ("tuned", "chosen", figures), plan=FOUND)


UNFOUND = "left as it was: no training found, because the script's main process made too few weight updates"


def test_a_gain_is_told_in_seconds_of_the_whole_script():
    assert headline([kept(97.0)], 61.0) == "2.6x as fast: 61 s instead of about 158 s"
    assert headline([kept(5.0)], 50.0) == "1.10x as fast: 50 s instead of about 55 s"


def test_the_savings_of_all_trainings_count():
    assert headline([kept(50.0), kept(50.0)], 100.0).startswith("2.0x as fast: 100 s instead of about 200 s")


def test_a_loss_is_told_as_one_with_what_tuning_cost():
    told = headline([kept(-1.0, cost_s=3.0)], 20.0)
    assert told.startswith("no faster: 20 s instead of about 19 s")
    assert told.endswith("saved what tuning cost (3 s)")
    told = headline([kept(0.5, cost_s=0.25)], 20.0, start_s=1.0)
    assert told.endswith("saved what hotlap's start and tuning cost (1.25 s)")


def test_a_gain_that_was_not_measured_is_not_claimed():
    ledger = ledger_of(BASELINE, ("fused optimizer", "kept", {}), ("tuned", "chosen", {"cost_s": 1.0}), plan=FOUND)
    assert headline([ledger], 40.0) == "took 40 s with fused optimizer; hotlap did not measure how much that saved"


def test_what_a_move_saved_beside_the_steps_counts_too():
    beside = ("pictures decoded once", "kept", {"saved_s": 40.0})
    assert headline([ledger_of(BASELINE, beside)], 40.0) == "2.0x as fast: 40 s instead of about 80 s"
    assert headline([kept(20.0), ledger_of(beside)], 60.0) == "2.0x as fast: 60 s instead of about 120 s"


def test_under_a_chosen_plan_what_is_kept_beside_it_is_named():
    ledger = ledger_of(("pictures decoded once", "kept", {"saved_s": 40.0}))
    assert headline([ledger], 12.0, is_fixed=True).startswith("took 12 s with pictures decoded once, by the plan")


def test_a_script_without_a_training_is_left_as_it_was():
    assert headline([], 5.0) == UNFOUND


def test_moves_that_did_not_help_are_counted():
    rejected = ledger_of(BASELINE, ("fused optimizer", "rejected", {}), ("bf16", "rejected", {}))
    assert headline([rejected], 60.0) == "left as it was: 2 moves tried, and none of them helped"
    cut = ledger_of(BASELINE, ("fused optimizer", "undecided", {}))
    assert headline([cut], 60.0) == "left as it was: 1 move tried, but the run ended before a gain was shown"


def test_trials_that_cost_too_much_are_named_with_the_option_that_pays_for_them():
    unpaid = ledger_of(
        ("data held on the device", "not tried", {"needs_s": 8.0}), why="estimated to take 8 s, and 1 s may be spent"
    )
    told = headline([unpaid], 60.0)
    assert "trials would cost more than the time allowed: data held on the device, estimated to take 8 s" in told
    assert told.endswith("; to try data held on the device anyway: --tune-seconds 15")


def test_a_run_too_short_for_trials_says_so_and_gets_no_advice_to_tune_for_longer_than_it_takes():
    short = ledger_of(
        BASELINE,
        ("all moves", "not tried", {}),
        why="13 s in 36 updates is too short for tuning to pay: trials may take 195 ms",
    )
    assert headline([short], 13.0) == "13 s in 36 updates is too short for tuning to pay; nothing was changed"
    assert headline([short], 30.0).endswith("; nothing was changed; to try anyway: --tune-seconds 20")
    allowed = headline([short], 30.0, tune_s=20.0)
    assert allowed.endswith("; to try anyway: --tune-seconds 40"), "more than was allowed"


def test_what_cannot_help_needs_no_option():
    unfit = ledger_of(BASELINE, ("fused optimizer", "not tried", {"unfit": 1.0}))
    assert headline([unfit], 60.0).endswith("because no trial would have paid; the table has the reasons")


def test_a_run_that_ends_within_its_first_trial_names_that_as_the_reason():
    cut = ledger_of(BASELINE, ("fused optimizer", "measured", {}))
    assert headline([cut], 6.0) == "left as it was: the run ended before a trial did"


def test_a_plan_that_the_user_chose_is_not_called_faster():
    told = "took 12 s with fused optimizer, by the plan that you chose; what it saves: `hotlap run --compare`"
    assert headline([ledger_of(("plan", "chosen", {}), plan=FOUND)], 12.0, is_fixed=True) == told
    partly = ledger_of(("plan", "chosen", {}), ("feed resident", "not tried", {}), plan=FOUND)
    assert headline([partly], 12.0, is_fixed=True) == told


def test_a_chosen_plan_that_changes_nothing_leaves_the_script_as_it_was():
    told = headline([ledger_of()], 12.0, is_fixed=True)
    assert told == "left as it was, because the plan that you chose changes nothing here"


@pytest.mark.parametrize("as_json", [False, True])
def test_it_is_the_first_line_and_a_field_of_the_json(as_json, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(telling, "say", lambda *lines: print(*lines, sep="\n"))
    Report(Settings(name="train.py", out=tmp_path, as_json=as_json)).tell()
    out = capsys.readouterr().out
    told = json.loads(out)["headline"] if as_json else out.removeprefix("hotlap: ").rstrip("\n")
    assert told == UNFOUND


def test_a_fault_of_hotlaps_comes_first_where_nothing_was_gained(capsys, tmp_path):
    teller = Report(Settings(name="train.py", out=tmp_path))
    teller.fault(RuntimeError("it fell"))
    teller.tell()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "hotlap: left as it was, because hotlap failed: RuntimeError: it fell"
    assert any("hotlap failed: RuntimeError: it fell" in line for line in lines[1:])


@pytest.mark.parametrize(
    ("torch_s", "words"), [(100.0, r"100 s instead of about 200 s"), (60.0, r"100 s instead of about 160 s")]
)
def test_the_seconds_of_a_script_begin_with_its_process_and_those_of_hotlaps_start_are_its_own(
    torch_s, words, monkeypatch
):
    """Who waits for a script waits for its imports, too."""
    began = time.time() - 100
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(create_time=lambda: began))
    teller = Report(Settings(name="train.py", torch_s=torch_s))
    teller._trainings.append((kept(100.0), []))
    assert re.search(words, teller.headline())


def test_a_notebook_began_long_before_its_training(monkeypatch):
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(create_time=lambda: time.time() - 100))
    teller = Report(Settings(name="train.py"))
    teller._trainings.append((kept(100.0), []))
    assert re.search(r"as fast: [\d.]+ (s|ms|µs) instead of about 100 s", teller.headline())
