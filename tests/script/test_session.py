"""A session in this process: what it finds, what it leaves alone, and that nothing of its own ever reaches a script."""

import json
import random

import numpy as np
import pytest
import torch
from made_up_time import make_up_time
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hotlap.core.plan import Feed, Plan
from hotlap.script.feed.loader_proxy import LoaderProxy
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder
from hotlap.tuner.budget import Length

EPOCHS = 6
LONG = 24
"""Epochs in which tuning on made-up time comes to an end."""
LEISURE_S = 600.0
"""What tuning may take here: on a busy machine a look alone takes seconds. Trainings end long before."""


class Rows(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(256, 6, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def train(epochs=EPOCHS, *, data=None, each=lambda model, optimizer: None, optimizer_of=None):
    """A loop as people write it; the losses it saw, and the weights in the end."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = (optimizer_of or (lambda p: torch.optim.AdamW(p, lr=0.01)))(model.parameters())
    loader = DataLoader(data or Rows(), batch_size=16, shuffle=True)
    criterion, losses = nn.CrossEntropyLoss(), []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            each(model, optimizer)
    return losses, [p.detach().clone() for p in model.parameters()]


def is_equal(one, other):
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.fixture
def torch_as_it_is():
    """What a session may change in torch is the same object afterwards."""

    def state():
        hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
        return DataLoader.__iter__, nn.Module.__call__, torch.Tensor.to, torch.Tensor.item, hooks

    before = state()
    yield
    assert state() == before


@pytest.fixture
def session(tmp_path, monkeypatch, torch_as_it_is):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))

    def opened(**settings):
        return Session(Settings(name="test", out=tmp_path / "run", **settings))

    return opened


def plan_file(tmp_path, **choices):
    feed = Feed(kind=choices.pop("kind", "loader"))
    save_plan(Plan(feed=feed).but(**choices) if choices else Plan(feed=feed), tmp_path / "plan.toml")
    return str(tmp_path / "plan.toml")


def test_a_gathered_feed_changes_no_bit(session, tmp_path):
    alone = train()
    with session(plan=plan_file(tmp_path, kind="gather")):
        fed = train()
    assert is_equal(alone, fed)
    entries = list(RunFolder.open(tmp_path / "run").read_ledger())
    assert entries[-1].plan.feed.kind == "gather"


def test_a_fused_optimizer_differs_by_rounding_and_cannot_be_told(session, tmp_path):
    seen, alone = [], train()

    def each(model, optimizer):
        seen.append((optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"], repr(optimizer)))

    with session(plan=plan_file(tmp_path, optimizer="fused")):
        fused = train(each=each)
    np.testing.assert_allclose(alone[0], fused[0], rtol=1e-3, atol=1e-5)
    assert not is_equal(alone, fused)
    assert len(set(seen)) == 1
    assert seen[0][:2] == (None, None)


@pytest.mark.parametrize(("length", "kind"), [((16,), "gather"), ((15,), "loader"), ((8, False, False), "gather")])
def test_everything_fetches_no_more_samples_than_are_used(session, tmp_path, monkeypatch, length, kind):
    monkeypatch.setattr(LoaderProxy, "holding_s", lambda self, feed=None: 60.0)
    monkeypatch.setattr(Session, "_expected_length", lambda self: Length(*length))
    with session(plan="max"):
        train(1)
    assert RunFolder.open(tmp_path / "run").read_plan().feed.kind == kind


def test_tuned_training_trains_the_same(session):
    alone = train(40)
    with session(tune_s=LEISURE_S):
        tuned = train(40)
    assert len(alone[0]) == len(tuned[0])
    assert np.mean(tuned[0][-64:]) == pytest.approx(np.mean(alone[0][-64:]), rel=0.3, abs=0.05)


def test_generators_are_where_they_would_be(session, tmp_path):
    def states():
        return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    train()
    alone = states()
    with session(plan=plan_file(tmp_path, kind="gather")):
        train()
    fed = states()
    assert torch.equal(alone[0], fed[0])
    assert alone[1:] == fed[1:]


BROKEN = [
    "hotlap.script.feed.loader_proxy.LoaderProxy.use",
    "hotlap.script.feed.loader_proxy.LoaderProxy.begin",
    "hotlap.script.session.Session._on_step",
    "hotlap.script.session.Session._on_batch",
    "hotlap.script.tuning.ScriptTuning.batch_given",
    "hotlap.script.tuning.ScriptTuning.stepped",
    "hotlap.script.training.ScriptTraining.stepped",
    "hotlap.script.update.updates.Updates.before_step",
    "hotlap.script.update.updates.Updates.after_step",
    "hotlap.script.run_length.RunLength.updates",
    "hotlap.tuner.tuner.Tuner.stepped",
    "hotlap.tuner.search.Search._together",
    "hotlap.script.loop_finder.LoopFinder.stepped",
    "hotlap.script.calls.call.ModuleCall.__init__",
]


@pytest.fixture(scope="module")
def long_alone():
    return train(LONG)


@pytest.mark.parametrize("broken", BROKEN)
def test_whatever_breaks_inside_hotlap_the_script_goes_on(session, monkeypatch, capsys, broken, long_alone):
    def breaks(*args, **kwargs):
        raise ZeroDivisionError("planted")

    with session(tune_s=LEISURE_S), monkeypatch.context() as patch:
        make_up_time(patch)  # what the tuner comes to depends on how long things take
        patch.setattr(broken, breaks)
        trained = train(LONG)
    assert len(trained[0]) == len(long_alone[0])
    assert np.mean(trained[0][-16:]) == pytest.approx(np.mean(long_alone[0][-16:]), rel=0.2, abs=0.05)
    said = capsys.readouterr()
    assert "planted" in said.err, said.err
    assert said.err.count("continued without it") == 1, said.err
    assert said.out == ""


def test_a_fault_is_in_the_ledger(session, monkeypatch, tmp_path):
    def breaks(*args, **kwargs):
        raise ZeroDivisionError("planted")

    with session(tune_s=LEISURE_S):
        monkeypatch.setattr("hotlap.tuner.tuner.Tuner.stepped", breaks)
        train()
    faults = [entry for entry in RunFolder.open(tmp_path / "run").read_ledger() if entry.outcome == "fault"]
    assert [(entry.what, entry.why) for entry in faults] == [("hotlap", "planted")]


def test_an_error_of_the_scripts_own_is_the_scripts(session):
    class Broken(Rows):
        def __getitem__(self, index):
            if index == 200:
                raise KeyError("the script's own")
            return super().__getitem__(index)

    with pytest.raises(KeyError, match="the script's own"), session(tune_s=LEISURE_S):
        train(data=Broken())


def test_a_second_training_is_found_too(session, tmp_path, capsys):
    with session(plan=plan_file(tmp_path, kind="gather")):
        first, second = train(), train()
    assert is_equal(first, second)
    assert RunFolder.open(tmp_path / "run" / "training-2").read_plan().feed.kind == "gather"


def test_a_loop_without_a_loader_or_a_module(session, capsys):
    def loop():
        torch.manual_seed(0)
        weight = torch.randn(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(50):
            optimizer.zero_grad()
            (weight * torch.randn(3)).sum().square().backward()
            optimizer.step()
        return weight.detach()

    alone = loop()
    with session():
        assert torch.equal(loop(), alone)
    assert "50 updates" in capsys.readouterr().err


def test_no_training_is_a_result(session, capsys):
    with session():
        list(DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2))
    assert "no training found" in capsys.readouterr().err


def test_evaluation_inside_the_loop_keeps_its_own_precision(session, tmp_path):
    seen = []

    def each(model, optimizer):
        model.eval()
        with torch.no_grad():
            seen.append(model(torch.ones(1, 6)).dtype)
        model.train()

    with session(plan=plan_file(tmp_path, precision="bf16")):
        train(each=each)
    assert set(seen) == {torch.float32}


# --- what it tells at the end ----------------------------------------------------------------------------


def test_the_run_folder_is_where_the_script_was_started_whatever_it_does_then(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Session(Settings(name="test")):
        monkeypatch.chdir(tmp_path / "elsewhere")
        train(2)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"run folder runs/{folder.name}" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())


def test_all_updates_are_counted(session, capsys):
    with session():
        losses, _ = train(3)
    assert f"{len(losses)} updates, all but the first 4 in " in capsys.readouterr().err


def test_json_tells_what_the_words_tell(session, tmp_path, capsys):
    with session(as_json=True):
        losses, _ = train(3)
    (told,) = json.loads(capsys.readouterr().err)["trainings"]
    assert told["updates"] == len(losses)
    assert told["step_s"] > 0
    assert told["run_folder"] == str(tmp_path / "run")
    assert told["notes"] == []
