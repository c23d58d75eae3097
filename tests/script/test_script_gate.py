"""The gate of scripts: calls with dropout are compared as they are, or without dropout, whichever is likely to tell."""

from types import SimpleNamespace

import pytest
from torch import nn

from hotlap.script import tuning
from hotlap.tuner.agreement import Agreement


@pytest.fixture
def compared(monkeypatch):
    """Compares a call with dropout; gives the rates in force at each comparison, and what came of it."""

    def compare(*, rate=0.3, fails=(), is_precise=True):
        seen, model = [], nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate))

        def judge(call, own, plan):
            seen.append(model[1].p)
            return Agreement(why=f"fails at {model[1].p}" if model[1].p in fails else None)

        monkeypatch.setattr(tuning, "_same_maths" if is_precise else "_agreement", judge)
        call = SimpleNamespace(module=model, last_inputs=((), {}))
        found = tuning._compare(call, None, None, is_precise)
        assert model[1].p == rate
        return seen, found.why

    return compare


@pytest.mark.parametrize(("is_precise", "order"), [(True, [0.3, 0.0]), (False, [0.0, 0.3])])
def test_masks_of_another_precision_are_expected_to_differ(is_precise, order, compared):
    assert compared(is_precise=is_precise) == (order[:1], None)
    assert compared(is_precise=is_precise, fails=order[:1]) == (order, None)
    assert compared(is_precise=is_precise, fails=order) == (order, "fails at 0.0")


@pytest.mark.parametrize("is_precise", [True, False])
def test_a_call_without_dropout_is_compared_once(is_precise, compared):
    assert compared(rate=0.0, is_precise=is_precise) == ([0.0], None)
    assert compared(rate=0.0, is_precise=is_precise, fails=[0.0]) == ([0.0], "fails at 0.0")
