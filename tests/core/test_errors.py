"""Every error is one family, says what was seen, and hints at what was meant."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap.core import errors
from hotlap.core.errors import HotlapError, JobError, PlanError, did_you_mean, kind_of, listed, shown


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("JobError", ValueError),
        ("PlanError", ValueError),
        ("DataError", ValueError),
        ("MachineError", RuntimeError),
        ("StoreError", OSError),
        ("TrainingError", RuntimeError),
    ],
)
def test_every_error_is_a_hotlap_error_and_the_builtin_one_it_resembles(name, builtin):
    kind = getattr(errors, name)
    assert issubclass(kind, HotlapError)
    assert issubclass(kind, builtin)
    assert f"{name} " in errors.__doc__
    assert str(kind("what happened")) == "what happened"


def test_one_problem_is_told_as_it_is_and_several_as_a_counted_list():
    assert str(JobError(["a is wrong"])) == "a is wrong"
    assert str(JobError(["a", "b"])) == "the job has 2 mistakes:\n  - a\n  - b"
    assert str(PlanError("a", "b")) == "the plan has 2 mistakes:\n  - a\n  - b"
    assert listed("x has", "fault", ("a",)) == "a"


@pytest.mark.parametrize("error", [JobError(["a", "b"]), PlanError("a", "b"), JobError(["ab"]), PlanError("ab")])
def test_an_error_comes_out_of_another_process_as_it_went_in(error):
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.problems) == (type(error), str(error), error.problems)


def test_an_error_made_anew_from_its_text_keeps_the_text():
    assert JobError("the text").problems == ("the text",)


def test_a_close_name_is_suggested_whatever_its_case():
    assert did_you_mean("presicion", ["precision", "mode"]) == "; did you mean 'precision'?"
    assert did_you_mean("T4X", ["t4", "L4"]) == "; did you mean 't4'?"
    assert did_you_mean("l4", ["t4", "L4"]) == "; did you mean 'L4'?"


@pytest.mark.parametrize("seen", ["zzz", "", 3, None, ["b"]])
def test_without_a_close_name_all_are_listed_in_order(seen):
    assert did_you_mean(seen, ["b", "a"]) == "; known: a, b"


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    ["x\ny", Rude(), {"a": "b" * 999}, [[[[[[1]]]]]], "é" * 99, pytest.param(10**5000, id="huge"), list(range(10**6))],
)
def test_any_value_is_shown_in_one_short_line(value):
    text = shown(value)
    assert 0 < len(text) <= 60
    assert text.isprintable()
    assert 0 < len(kind_of(value)) <= 80


@given(st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=5))
def test_a_short_value_is_shown_as_python_writes_it(value):
    assert shown(value).split() == repr(value).split()


def test_a_class_is_told_from_its_instances():
    assert kind_of(int) == "the class int"
    assert kind_of(3) == "int 3"
