"""Filters around hotlap's own work: the user's warnings are shown as often as without hotlap."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.warning_filters import filtered
from hotlap.engine.capture.recording import Watch
from hotlap.script.session import Session, Settings


@pytest.fixture
def shown():
    """The warnings that a user sees with Python's own filters."""
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        yield found


def warn():
    warnings.warn("of the user's", stacklevel=1)


def test_a_warning_is_shown_once_before_and_after(shown):
    warn()
    with filtered():
        pass
    warn()
    assert len(shown) == 1


def test_what_it_ignores_is_shown_later(shown):
    with filtered():
        warn()
    assert shown == []
    warn()
    assert len(shown) == 1


def test_other_warnings_inside_are_shown(shown):
    with filtered(message="of torch"), filtered(category=DeprecationWarning):
        warn()
    assert len(shown) == 1


def test_filters_that_code_inside_sets_stay(shown):
    with filtered():
        warnings.simplefilter("error")
    with pytest.raises(UserWarning):
        warn()


def test_nothing_stays_behind_where_code_inside_puts_other_filters_there(shown):
    before = [*warnings.filters]
    with filtered():
        warnings.filters = [*warnings.filters]
    assert warnings.filters == before


def test_watching_a_call_shows_its_warning_once(shown):
    for _ in range(2):
        with Watch([], torch.device("cpu")):
            warn()
    assert len(shown) == 1


class Odd(nn.Linear):
    def forward(self, x):
        warn()
        return super().forward(x)


@pytest.mark.parametrize("plan", ["auto", "max"])
def test_a_scripts_warning_is_shown_once_under_hotlap(shown, tmp_path, monkeypatch, plan):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    with Session(Settings(name="test", out=tmp_path / "run", plan=plan, tune_s=5)):
        model = Odd(4, 2)
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(TensorDataset(torch.randn(160, 4), torch.randn(160, 2)), batch_size=4)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    assert [str(one.message) for one in shown] == ["of the user's"]
