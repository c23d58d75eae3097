"""Several trainings of one script, one after the other: each is counted right, and none ends hotlap for the next."""

import gc
import json
import sys
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from hotlap.core.plan import Feed, Plan
from hotlap.script.session import MOST_FAULTS, Session, Settings
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder
from hotlap.tuner.trials import Rest
from hotlap.tuner.tuner import Tuner


class Counting(torch.optim.Adam):
    """Its step makes that of Adam."""

    def step(self, closure=None):
        return super().step(closure)


class Training:
    """A small model with its optimizer and loader, of 8 batches an epoch."""

    def __init__(self, kind=torch.optim.SGD, data=None, **loader):
        torch.manual_seed(1)
        self.model = nn.Linear(4, 2)
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        data = data or TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
        self.loader = DataLoader(data, batch_size=4, **loader)

    def epochs(self, count=1, each=lambda: None):
        for _ in range(count):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                (self.model(x) - y).square().mean().backward()
                self.optimizer.step()
                each()
        return self


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """Runs something in a session; what the session then tells, as JSON has it."""
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(work, *, feed="loader"):
        save_plan(Plan(feed=Feed(kind=feed)), tmp_path / "plan.toml")
        with Session(Settings(name="test", plan=str(tmp_path / "plan.toml"), as_json=True)) as session:
            work(session)
        return json.loads(capsys.readouterr().err)

    return run


def updates(told):
    return [training["updates"] for training in told["trainings"]]


# --- counts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feed", ["loader", "gather"])
def test_a_step_that_makes_the_step_of_the_class_beneath_is_one_update(told, feed):
    torch.optim.Adam(nn.Linear(1, 1).parameters())  # from here on torch runs hooks for its step too
    assert updates(told(lambda session: Training(Counting).epochs(2), feed=feed)) == [16]


def test_all_updates_of_each_of_two_trainings_are_counted(told):
    def both(session):
        for _ in range(2):
            Training().epochs(1)

    assert updates(told(both)) == [8, 8]


@pytest.mark.parametrize("feed", ["loader", "gather"])
def test_trainings_by_turns_are_counted_as_what_they_are(told, feed):
    def by_turns(session):
        one, other = Training(), Training()
        for _ in range(3):
            one.epochs(1)
            other.epochs(1)

    assert updates(told(by_turns, feed=feed)) == [24, 24]


def test_a_script_leaves_one_run_folder_however_many_trainings_it_has(told, tmp_path):
    def folds(session):
        for _ in range(5):
            Training().epochs(1)

    found = told(folds, feed="gather")
    (folder,) = (tmp_path / "runs").iterdir()
    inner = [folder, *(folder / f"training-{number}" for number in range(2, 6))]
    assert [training["run_folder"] for training in found["trainings"]] == [str(one) for one in inner]
    assert [RunFolder.open(one).read_plan().feed.kind for one in inner] == ["gather"] * 5


# --- what goes wrong ------------------------------------------------------------------------------------


def test_a_training_that_cannot_obey_the_plan_leaves_the_next_one_to_hotlap(told):
    def two(session):
        Training(collate_fn=lambda samples: default_collate(samples)).epochs(2)
        Training().epochs(2)

    found = told(two, feed="gather")
    assert len(found["refusals"]) == 1
    assert updates(found) == [16]


class Raising(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 25:
            raise KeyError("the script's own")
        return torch.full((4,), float(index)), torch.ones(2)


@pytest.mark.parametrize("feed", ["loader", "gather"])
def test_a_dataset_that_raises_leaves_the_next_training_to_hotlap(told, feed):
    def two(session):
        first = Training(data=Raising())
        for _ in range(3):
            with pytest.raises(KeyError, match="the script's own"):
                first.epochs(1)
        Training().epochs(2)

    found = told(two, feed=feed)
    assert updates(found)[-1] == 16
    assert not found["faults"]
    assert ["the script's own" in reason for reason in found["refusals"]] == [True] * (feed == "gather")


def test_a_fault_of_hotlap_ends_it_for_one_training(told, monkeypatch):
    faults = []

    def breaks(self, *args):
        faults.append(1)
        raise ZeroDivisionError(f"planted {len(faults)}")

    def trainings(session):
        with monkeypatch.context() as patch:
            patch.setattr("hotlap.script.tuning.ScriptTuning.stepped", breaks)
            Training().epochs(4)
        Training().epochs(2)

    found = told(trainings, feed="gather")
    assert len(found["faults"]) == 1
    assert updates(found)[-1] == 16


def test_after_some_faults_the_script_is_left_alone(told, monkeypatch):
    faults = []

    def breaks(self, *args):
        faults.append(1)
        raise ZeroDivisionError(f"planted {len(faults)}")

    monkeypatch.setattr("hotlap.script.tuning.ScriptTuning.stepped", breaks)

    def trainings(session):
        for _ in range(MOST_FAULTS + 2):
            Training().epochs(2)

    found = told(trainings, feed="gather")
    assert len(faults) == len(found["faults"]) == MOST_FAULTS


# --- rest -----------------------------------------------------------------------------------------------


def hotlap_calls(work):
    """Calls of functions of hotlap's while something runs."""
    seen = []

    def note(frame, event, arg):
        if event == "call" and "/hotlap/" in frame.f_code.co_filename:
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def test_once_nothing_more_is_to_be_tried_nothing_of_hotlap_is_in_the_way(told):
    own = nn.Module.__call__, torch.Tensor.to, torch.Tensor.item
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)

    def rests(session):
        training = Training().epochs(2)
        assert (nn.Module.__call__, torch.Tensor.to, torch.Tensor.item) == own
        # What is left counts steps, and sees another training begin.
        assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == (hooks[0], hooks[1] + 1)
        calls = hotlap_calls(lambda: training.epochs(10))
        steps, epochs = 80, 10
        assert sum(count // steps for count in Counter(calls).values()) <= 9, Counter(calls)
        assert len(calls) <= 9 * steps + 46 * epochs, Counter(calls)

    assert updates(told(rests)) == [96]


def test_a_search_that_finds_nothing_ends_in_rest(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    with Session(Settings(name="test", out=tmp_path / "run")) as session:
        training = Training().epochs(1)
        session._tuning._tuner.done = True
        training.epochs(1)
        assert session._tuning is None
        assert session.is_tuning
    assert "16 updates" in capsys.readouterr().err


def test_while_a_run_seems_too_short_for_trials_nothing_of_hotlap_is_in_the_way(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    own, hooks = nn.Module.__call__, len(_global_optimizer_pre_hooks)
    with Session(Settings(name="test", out=tmp_path / "run")) as session:
        training = Training().epochs(1)
        tuning = session._tuning
        tuning._tuner._search.is_waiting, tuning._tuner._rest = True, Rest(83)
        training.epochs(1)
        assert (nn.Module.__call__, len(_global_optimizer_pre_hooks)) == (own, hooks)
        calls = hotlap_calls(lambda: training.epochs(9))
        assert len(calls) <= 72 * 9 + 9 * 300, calls[:100]
        assert (tuning.training.steps, tuning._tuner._rested) == (5, 1)  # it is asleep
        training.epochs(1)
        assert (tuning.training.steps, tuning._tuner._rest) == (92, None)
        assert len(_global_optimizer_pre_hooks) == hooks + 1
        tuning._tuner._search.is_waiting, tuning._tuner._rest, tuning._tuner._rested = True, Rest(80), 0
        training.epochs(2)
        assert tuning.training.steps == 93
    assert "112 updates" in capsys.readouterr().err


def test_epochs_that_pass_meanwhile_are_known_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hotlap.script.session.LOOK_SHARE", 1e-12)  # once, and then for all time
    with Session(Settings(name="test", out=tmp_path / "run")) as session:
        training = Training()

        def each():
            if len(session._run_length._now.whole) == 1:
                session._tuning._tuner._search.is_waiting, session._tuning._tuner._rest = True, Rest(37)

        training.epochs(8, each=each)
        # Without the four before the loop was known.
        assert session._run_length._now.whole == [4, *[8] * 6]
        assert session._run_length.updates() == 60


def test_a_script_can_let_go_of_a_model_that_is_left_alone(told):
    def lets_go(session):
        training = Training().epochs(2)
        model = weakref.ref(training.model)
        del training
        gc.collect()
        assert model() is None

    told(lets_go)


def test_steps_of_a_lap_are_counted_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    own, told = nn.Module.__call__, []
    monkeypatch.setattr(Tuner, "stepped", lambda self, updates=1, windows=1: told.append((updates, windows)))
    with Session(Settings(name="test", out=tmp_path / "run")) as session:
        training = Training().epochs(1)  # 4 of its 8 steps are before it is known
        assert told == [(1, 1)] * 4
        monkeypatch.setattr(Tuner, "quiet", 15)
        training.epochs(1)
        assert nn.Module.__call__ is own
        calls = hotlap_calls(lambda: training.epochs(1))
        assert len(calls) <= 8 * 45 + 250, calls[:100]
        assert session._tuning.training.steps == 20, "counted as they are made"
        assert told[4:] == [(1, 1)], "and told of together"
        training.epochs(1)
        assert told[4:] == [(1, 1), (16, 16), (1, 1)], "after which a call is looked at"
    assert "32 updates" in capsys.readouterr().err


def test_an_epochs_end_inside_of_quiet_steps_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    pauses = []
    monkeypatch.setattr(Tuner, "paused", lambda self, seconds: pauses.append(seconds))
    with Session(Settings(name="test", out=tmp_path / "run")) as session:
        training = Training().epochs(1)
        session._tuning._quiet_steps = 1000
        training.epochs(3)
        assert len(pauses) == 3
        assert session._run_length._steps == session._tuning.training.steps - 8
