"""The ledger keeps every change of plan in order, and reads back what it wrote."""

import json
import math
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotlap.core.errors import HotlapError
from hotlap.core.ledger import OUTCOMES, Entry, Ledger
from hotlap.core.plan import Plan

PLANS = [Plan(), Plan().but(precision="bf16"), Plan().but(kind="loader", workers=2), Plan().but(micro_batch=3)]

finite = st.floats(allow_nan=False, allow_infinity=False)
entries = st.builds(
    Entry,
    step=st.integers(0, 2**63 - 1),
    what=st.text(),
    outcome=st.sampled_from(OUTCOMES),
    plan=st.sampled_from(PLANS),
    why=st.text(),
    figures=st.dictionaries(
        st.text(), st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9), max_size=3
    ),
    cost_s=st.floats(allow_nan=False, allow_infinity=False),
)


def entry(step=0, plan=PLANS[0], **rest):
    return Entry(**{"step": step, "what": "start", "outcome": "chosen", "plan": plan, **rest})


def ledger_of(*rows):
    ledger = Ledger()
    for row in rows:
        ledger.record(row)
    return ledger


def line(**changes):
    return json.dumps({**entry().to_dict(), **changes})


def test_entries_come_back_in_the_order_in_which_they_were_recorded():
    rows = [entry(0), entry(0, PLANS[1], what="bf16"), entry(7, PLANS[2])]
    ledger = ledger_of(*rows)
    assert list(ledger) == rows
    assert len(ledger) == 3


def test_steps_never_run_backwards():
    ledger = ledger_of(entry(5))
    with pytest.raises(ValueError, match="step 4 comes before step 5"):
        ledger.record(entry(4))
    assert len(ledger) == 1
    ledger.record(entry(5))


def test_the_plan_at_a_step_is_the_last_one_recorded_up_to_it():
    ledger = ledger_of(entry(0, PLANS[0]), entry(3, PLANS[1]), entry(3, PLANS[2]), entry(9, PLANS[3]))
    assert [ledger.plan_at(step) for step in (0, 2, 3, 8, 9, 10**6)] == [PLANS[i] for i in (0, 0, 2, 2, 3, 3)]


def test_before_the_first_entry_no_plan_is_known():
    with pytest.raises(HotlapError, match="no plan at step 1"):
        ledger_of(entry(2)).plan_at(1)
    with pytest.raises(HotlapError, match="no plan at step 0"):
        Ledger().plan_at(0)


@given(st.lists(entries, max_size=5))
@example([entry(what="a\u2028b\x85c\x1ed\n")])
def test_a_ledger_round_trips_through_its_lines(rows):
    ledger = ledger_of(*sorted(rows, key=lambda row: row.step))
    text = ledger.to_lines()
    assert text.count("\n") == len(rows)
    assert list(Ledger.from_lines(text)) == list(ledger)


def test_only_a_line_end_ends_a_line():
    text = line(what="@").replace("@", "a\u2028b\x85c")
    assert [row.what for row in Ledger.from_lines(text)] == ["a\u2028b\x85c"]


def test_no_text_is_a_ledger_without_entries():
    assert Ledger().to_lines() == ""
    assert len(Ledger.from_lines("")) == 0


def test_a_figure_that_is_no_number_is_valid_json_and_read_back_as_such():
    text = ledger_of(entry(figures={"speedup": math.nan, "worst": math.inf, "step_s": 0.5})).to_lines()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (row,) = Ledger.from_lines(text)
    assert math.isnan(row.figures["speedup"])
    assert math.isnan(row.figures["worst"])
    assert row.figures["step_s"] == 0.5


def test_figures_of_any_kind_of_number_and_mapping_can_be_written():
    row = entry(figures=MappingProxyType({"a": np.float32(0.5), "b": 2, "c": np.int64(3)}), cost_s=np.float32(0.25))
    (back,) = Ledger.from_lines(ledger_of(row).to_lines())
    assert back.figures == {"a": 0.5, "b": 2.0, "c": 3.0}
    assert back.cost_s == 0.25


def test_an_entry_keeps_its_own_copy_of_the_figures():
    figures = {"step_s": 1.0}
    row = entry(figures=figures)
    figures["step_s"] = 2.0
    assert row.figures == {"step_s": 1.0}


def test_an_unknown_outcome_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match="outcome 'keeped' is none of chosen, kept, rejected, undecided, not tried, measured, fault"
    ):
        entry(outcome="keeped")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": "3"}, "step='3'"),
        ({"step": True}, "step=True"),
        ({"step": -1}, "step=-1"),
        ({"step": 1.0}, "step=1.0"),
        ({"what": None}, "what=None must be text"),
        ({"why": 3}, "why=3 must be text"),
        ({"outcome": ["kept"]}, "outcome ['kept']"),
        ({"cost_s": "1"}, "cost_s='1' must be a finite number"),
        ({"cost_s": math.inf}, "cost_s=inf must be a finite number"),
        ({"figures": [1]}, "figures=[1]"),
        ({"figures": {"a": "fast"}}, "figures={'a': 'fast'}"),
        ({"figures": {"a": True}}, "figures={'a': True}"),
        ({"plan": 3}, "a plan must be a table of parts, not 3"),
        ({"plan": {"feed": {"worker": 1}}}, "feed has no choice 'worker'; did you mean 'workers'?"),
        ({"plan": {"feed": {"workers": -1}, "memory": 1}}, "at least 0; memory must be a table"),
        ({"outcom": "kept"}, "no field is called 'outcom'; did you mean 'outcome'?"),
    ],
)
def test_a_line_with_a_wrong_value_is_refused_with_its_number_and_the_value(changes, said):
    with pytest.raises(HotlapError) as caught:
        Ledger.from_lines(f"{line()}\n{line(**changes)}\n")
    assert str(caught.value).startswith("line 2 of the ledger cannot be read: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        ("not json", "no JSON at column 1"),
        ("", "no JSON at column 1"),
        ('{"step": 0', "no JSON at column 11"),
        ("[]", "an entry must be an object, not []"),
        ("null", "an entry must be an object, not None"),
        ("{}", "step is missing; what is missing; outcome is missing; plan is missing"),
        ("[" * 100_000, "nested too deeply"),
        ('{"step": ' + "9" * 5000 + "}", "digits"),
        (line().replace('"cost_s": 0.0', '"cost_s": 1' + "0" * 400), "cost_s="),
    ],
)
def test_a_garbage_line_is_refused_with_its_number(garbage, said):
    with pytest.raises(HotlapError) as caught:
        Ledger.from_lines(f"{line()}\n{garbage}\n{line()}\n")
    assert str(caught.value).startswith("line 2 of the ledger cannot be read: ")
    assert said in str(caught.value)


def test_a_line_whose_step_runs_backwards_is_refused():
    with pytest.raises(HotlapError, match=r"line 2 .* step 1 comes before step 4"):
        Ledger.from_lines(f"{line(step=4)}\n{line(step=1)}\n")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.text()
    | json_values.map(json.dumps)
    | st.dictionaries(st.sampled_from(list(entry().to_dict())), json_values).map(lambda changes: line(**changes))
)
def test_any_text_is_a_ledger_or_a_clear_error(text):
    try:
        ledger, said = Ledger.from_lines(text), ""
    except HotlapError as error:
        ledger, said = None, str(error)
    if ledger is None:
        assert said.startswith("line ")
        assert "\n" not in said
    else:
        assert Ledger.from_lines(ledger.to_lines()).to_lines() == ledger.to_lines()


def test_an_entry_says_what_it_is_about():
    assert entry(0, what="baseline", outcome="chosen").kind == "baseline"
    assert entry(0, what="bf16", outcome="rejected").kind == "move"
    assert entry(0, what="a lap", outcome="measured").kind == "lap"
    assert entry(0, what="start", outcome="chosen").kind == "change"
    with pytest.raises(ValueError, match="kind 'other' is none of change, baseline"):
        entry(0, kind="other")
    with pytest.raises(ValueError, match="known=1 must be true or false"):
        entry(0, known=1)


def test_flags_that_an_earlier_hotlap_kept_among_the_figures_are_read():
    old = entry(0, what="bf16", outcome="rejected", figures={"ratio": 1.5, "known": 1.0}).to_dict()
    old = {name: value for name, value in old.items() if name not in ("kind", "known", "unfit")}
    found = next(iter(Ledger.from_lines(json.dumps(old) + "\n")))
    assert (found.kind, found.known, found.unfit) == ("move", True, False)
    assert found.figures == {"ratio": 1.5}
