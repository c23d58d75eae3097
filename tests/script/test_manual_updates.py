"""Trainings whose weights the script updates itself, without an optimizer."""

import functools
import gc
import weakref

import numpy as np
import pytest
import torch
from by_hand_loops import RATE, WAYS, in_its_data, judged, read, reader, with_other_data
from calling import CAPTURED, FakeRecorder, Scripted, batches, net
from made_up_time import make_up_time
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.plan import Feed, Plan
from hotlap.script import training as script_training
from hotlap.script.calls.call import ModuleCall
from hotlap.script.loop_finder import PATIENCE, WAITED, WHY, BackwardPasses, ManualUpdates
from hotlap.script.session import Session, Settings
from hotlap.script.tuning import ScriptTuning
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder

STEPS = 28
"""Updates that `read` makes."""
LEISURE_S = 600.0
"""What tuning may take here, on a machine that may be busy."""


@pytest.fixture(autouse=True)
def torch_as_it_is():
    def state():
        return torch.Tensor.backward, nn.Module.__call__, DataLoader.__iter__

    before = state()
    yield
    assert state() == before


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))

    def opened(**settings):
        # Nothing is tried unless a test asks for it: what pays depends on the clock.
        return Session(Settings(name="test", out=tmp_path / "run", **{"tune_s": 0.0, **settings}))

    return opened


def plan_file(tmp_path, *, kind="loader", **choices):
    plan = Plan(feed=Feed(kind=kind))
    save_plan(plan.but(**choices) if choices else plan, tmp_path / "plan.toml")
    return str(tmp_path / "plan.toml")


def train(epochs=8, *, update=in_its_data, accumulate=1, dropout=0.1):
    """A loop over a loader."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
    losses = []
    for _ in range(epochs):
        for number, (inputs, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            if (number + 1) % accumulate == 0:
                update(model)
            losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def assert_equal(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


# --- found and counted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("update", WAYS, ids=lambda way: way.__name__)
def test_weights_that_the_script_updates_itself_are_a_training(session, capsys, update):
    alone = read(reader(), update=update)
    with session():
        seen = read(reader(), update=update)
    assert_equal(alone, seen)
    assert f"{STEPS} updates, all but the first {WAITED + 3} in " in capsys.readouterr().err


def test_batches_cut_from_a_tensor_tell_how_long_it_takes(session, monkeypatch):
    known = []

    def found(self, *args, length, **kwargs):
        known.append(length().updates)
        original(self, *args, length=length, **kwargs)

    original = ScriptTuning.__init__
    monkeypatch.setattr(ScriptTuning, "__init__", found)
    with session():
        read(reader(), epochs=5)
    assert known == [35]


def test_several_backward_passes_before_an_update_are_one_step(session, capsys):
    alone = train(accumulate=4)
    with session():
        seen = train(accumulate=4)
    assert_equal(alone, seen)
    assert f"{len(alone[0]) // 4} updates, " in capsys.readouterr().err


def test_two_models_that_are_updated_in_turns_are_one_training(session, capsys):
    def adversaries():
        torch.manual_seed(0)
        maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        for _ in range(20):
            made = maker(torch.randn(5, 3))
            judge(torch.randn(5, 4)).mean().backward()
            judge(made.detach()).square().mean().backward()
            in_its_data(judge)
            judge(made).mean().backward()
            in_its_data(maker)
            judge.zero_grad()
        return [], [p.detach().clone() for p in (*maker.parameters(), *judge.parameters())]

    alone = adversaries()
    with session():
        assert_equal(adversaries(), alone)
    assert "20 updates, " in capsys.readouterr().err


def test_weights_without_a_module_are_a_training(session, capsys):
    def loop():
        torch.manual_seed(0)
        weight = torch.randn(3, requires_grad=True)
        for _ in range(30):
            (weight * torch.randn(3)).sum().square().backward()
            with torch.no_grad():
                weight -= RATE * weight.grad
            weight.grad = None
        return [], [weight.detach()]

    alone = loop()
    with session():
        assert_equal(loop(), alone)
    assert "30 updates" in capsys.readouterr().err


def test_an_update_in_a_hook_on_gradients_is_seen(session, capsys):
    def hooked():
        model = reader()

        def update(p):
            p.data.add_(p.grad, alpha=-RATE)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        return read(model, update=lambda _: None)

    alone = hooked()
    with session():
        assert_equal(hooked(), alone)
    assert f"{STEPS} updates" in capsys.readouterr().err


def test_a_second_training_without_an_optimizer_is_found_too(session, capsys):
    with session():
        first, second = read(reader(), 20), train(20)
    assert_equal(first, read(reader(), 20))
    assert_equal(second, train(20))
    told = capsys.readouterr().err
    assert "140 updates, all but the first" in told
    assert f"{len(second[0])} updates, all but the first" in told


# --- what is no such training ----------------------------------------------------------------------------


def test_passes_that_change_no_weights_are_no_training(session, capsys):
    original = torch.Tensor.backward
    with session():
        assert torch.Tensor.backward is not original
        train(epochs=1 + (WAITED + PATIENCE) // 8, update=lambda model: model.zero_grad())
        assert torch.Tensor.backward is original
        assert nn.Module.__call__.__module__.startswith("torch.")
    assert "no training found" in capsys.readouterr().err


@pytest.mark.parametrize("micro_batches", [1, 6, 2 * PATIENCE])
def test_passes_are_not_looked_at_once_an_optimizer_makes_a_step(session, capsys, micro_batches):
    original, found = torch.Tensor.backward, []
    with session():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            for x, y in batches(micro_batches):
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(torch.Tensor.backward is original)
    assert all(found)
    assert "8 updates, all but the first 4 in " in capsys.readouterr().err


def test_passes_inside_an_optimizers_step_are_its_own(session, capsys):
    with session():
        model, (x, y) = net(), batches(1)[0]
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=20)

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(6):
            optimizer.step(closure)
    told = capsys.readouterr().err
    assert "6 updates, " in told
    assert told.count(" updates, ") == 1, told


def test_a_training_with_an_optimizer_after_one_without(session, capsys):
    with session():
        read(reader())
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    told = capsys.readouterr().err
    assert f"{STEPS} updates, " in told
    assert "10 updates, all but the first 4 in " in told


COMPILES = """
import sys
from pathlib import Path
import torch
from torch import nn
from hotlap.script.session import Session, Settings

with Session(Settings(name="test", out=Path(sys.argv[1]))) as session:
    assert "torch._dynamo" not in sys.modules
    model = nn.Linear(3, 1)
    compiled = torch.compile(model, backend="eager") if sys.argv[2] == "early" else model
    for number in range(20):
        if number == 10 and sys.argv[2] == "late":
            compiled = torch.compile(model, backend="eager")
        compiled(torch.ones(2, 3)).sum().backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
        model.zero_grad()
    assert session._compile_watch.has_begun
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_compiled_modules_are_left_alone_though_no_optimizer_is_made(tmp_path, torch_forks, when):
    done = torch_forks.run("-c", COMPILES, tmp_path / "run", when, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "20 updates" in done.stderr
    assert "hotlap failed" not in done.stderr


def test_whatever_breaks_while_passes_are_looked_at_the_script_goes_on(session, monkeypatch, capsys):
    def breaks(*_):
        raise ZeroDivisionError("planted")

    alone = read(reader())
    monkeypatch.setattr(BackwardPasses, "passed", breaks)
    with session():
        assert_equal(read(reader()), alone)
    assert capsys.readouterr().err.count("planted") == 2  # in the headline, and below


# --- plans -----------------------------------------------------------------------------------------------


def test_a_gathered_feed_changes_no_bit(session, tmp_path):
    alone = train()
    with session(plan=plan_file(tmp_path, kind="gather")):
        assert_equal(train(), alone)
    assert list(RunFolder.open(tmp_path / "run").read_ledger())[-1].plan.feed.kind == "gather"


def test_a_fused_optimizer_is_refused(session, tmp_path, capsys):
    alone = train()
    with session(plan=plan_file(tmp_path, optimizer="fused")):
        assert_equal(train(), alone)
    assert WHY in capsys.readouterr().err


def test_everything_leaves_the_update_alone(session, tmp_path, capsys):
    alone = train(20)
    with session(plan="max"):
        seen = train(20)
    assert len(seen[0]) == len(alone[0])
    np.testing.assert_allclose(np.mean(seen[0][-16:]), np.mean(alone[0][-16:]), rtol=0.2)
    assert RunFolder.open(tmp_path / "run").read_plan().numerics.optimizer == "plain"
    assert "hotlap failed" not in capsys.readouterr().err


def test_tuned_training_trains_the_same(session, monkeypatch, capsys):
    alone = train(40)
    with session(tune_s=LEISURE_S), monkeypatch.context() as patch:
        make_up_time(patch)
        tuned = train(40)
    told = capsys.readouterr().err
    np.testing.assert_allclose(np.mean(tuned[0][-64:]), np.mean(alone[0][-64:]), rtol=0.2)
    assert f"{len(alone[0])} updates" in told
    assert "hotlap failed" not in told


def test_the_gate_judges_gradients_where_no_optimizer_is():
    found = judged(reader(), precision="bf16")
    assert found.ok, found.why
    assert found.why.startswith("gradients agree to ")


# --- captured calls, where recordings are pretended -------------------------------------------------------


@pytest.mark.parametrize("update", WAYS, ids=lambda way: way.__name__)
def test_a_state_that_is_carried_on_keeps_its_numbers_in_captured_calls(update):
    # On the CPU, dropping draws from the randomness of the host, which is not captured.
    alone, model = read(reader(dropout=0.0), update=update), reader(dropout=0.0)
    call = Scripted(model, CAPTURED)
    assert_equal(read(model, call=call, update=update), alone)
    replays = sum(graph.replays for recorder in call.recorders for graph in recorder.graphs)
    assert (replays > 20) == (update is not with_other_data)


def test_a_captured_training_counts_every_update(session, monkeypatch, tmp_path, capsys):
    found, plan = [], plan_file(tmp_path, mode="captured")

    def chosen(training):
        found.append(training)
        return plan

    monkeypatch.setattr(script_training, "ModuleCall", functools.partial(ModuleCall, make_recorder=FakeRecorder))
    alone = train(20, dropout=0.0)
    with session(plan=chosen):
        seen = train(20, dropout=0.0)
    np.testing.assert_allclose(seen[0], alone[0], rtol=1e-4, atol=1e-6)
    assert found[0].loss_replay.made > 100  # without autograd
    told = capsys.readouterr().err
    assert f"{len(alone[0])} updates" in told
    assert "hotlap failed" not in told


# --- the stand-in itself ---------------------------------------------------------------------------------


def passed_through(model, *frozen):
    one = ManualUpdates()
    for x, y in batches(6):
        loss = nn.functional.cross_entropy(sum(frozen, start=model(x)), y)
        loss.backward()
        one.passed(loss)
        in_its_data(model)
    return one, one.settle()


def test_the_stand_in_has_the_weights_that_change_and_no_others():
    model = net()
    one, updates = passed_through(model, nn.Parameter(torch.zeros(3)))
    found = {id(p) for p in one.param_groups[0]["params"]}
    assert updates == 6
    # What is added before a normalisation hardly ever changes.
    assert {id(p) for p in model.parameters() if p is not model[0].bias} <= found <= {*map(id, model.parameters())}


def test_the_stand_in_holds_nothing_that_the_script_lets_go_of():
    model = net()
    one, _ = passed_through(model)
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None
    assert one.param_groups == [{"params": []}]
