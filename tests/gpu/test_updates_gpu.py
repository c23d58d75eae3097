"""Steps and clippings of a script by replays on a real GPU: the weights of its own loop, whatever it does."""

import copy
import gc
import threading

import pytest
import torch
from optimizing import at_work
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from waiting import no_waiting

from hotlap.core.plan import Feed, Plan
from hotlap.script.session import Session, Settings
from hotlap.script.update import capture as update_capture
from hotlap.script.update.capture import CHECKS, WARM
from hotlap.script.update.updates import Updates
from hotlap.store.files import save_plan

DEVICE = torch.device("cuda")
STEPS = 20
FROM = 3
"""The step from which on a plan is in force."""


AGAIN = update_capture.MOST_AGAIN


@pytest.fixture(autouse=True)
def recorded_once(monkeypatch):
    """Wherever gradients come to lie: else a step may be recorded anew while others are counted."""
    monkeypatch.setattr(update_capture, "MOST_AGAIN", 0)


class Scripted:
    """The optimizers of a script under hotlap."""

    def __init__(self, *optimizers):
        self.updates = Updates(optimizers)

    def update(self, number=0):
        return self.updates._ways[id(self.updates.optimizers[number])].captured

    @property
    def clippings(self):
        return [kind.recorded is not None for kind in self.updates._clipping._kinds.values()]

    def at_work(self):
        return at_work(self.updates)


def net():
    torch.manual_seed(0)
    # Each layer computes the same bits again: what differs comes from the steps.
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 3)).to(DEVICE)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def batches(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(16, 24, generator=generator).to(DEVICE) for _ in range(steps)]


def trained(optimizer_of=adamw, plan=None, *, steps=STEPS, schedule=None, clip=None, between=None, captured=True):
    """A plain loop as people write it, under a plan after its first steps."""
    model = net()
    optimizer = optimizer_of(model.parameters())
    scheduler = schedule(optimizer) if schedule is not None else None
    scripted = Scripted(optimizer)
    with scripted.at_work():
        for number, x in enumerate(batches(steps)):
            if number == FROM and plan is not None:
                scripted.updates.use(plan, captured=captured)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if clip is not None:
                clip(number, model)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if between is not None:
                between(number, model, optimizer)
    return model, optimizer, scripted


def assert_same(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def assert_same_state(one, other):
    """But for rounding, and where and in which form the script finds it."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for kept, known in zip(mine["state"].values(), theirs["state"].values(), strict=True):
        assert kept.keys() == known.keys()
        for name, value in kept.items():
            assert (value.device, value.dtype, value.shape) == (known[name].device, known[name].dtype, value.shape)
            torch.testing.assert_close(value, known[name], rtol=1e-2, atol=1e-4)


def decay(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


KINDS = {
    "adamw": adamw,
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
CAPTURED = [
    ("adamw", "fused"),
    ("amsgrad", "fused"),
    ("sgd", "fused"),
    ("plain sgd", "fused"),
    ("adamw", "plain"),
    ("amsgrad", "plain"),
    ("rmsprop", "plain"),
    ("nadam", "plain"),
    ("radam", "plain"),
    ("adamax", "plain"),
    ("adadelta", "plain"),
]
OTHERS = [("sgd", "plain"), ("adagrad", "plain"), ("asgd", "plain"), ("rprop", "plain")]


@pytest.mark.parametrize(("kind", "plan"), CAPTURED)
def test_replays_follow_the_rate_and_leave_the_state_of_the_loop(kind, plan):
    model, optimizer, scripted = trained(KINDS[kind], plan, schedule=decay)
    own, theirs, _ = trained(KINDS[kind], schedule=decay)
    assert scripted.updates.uncaptured is None
    assert scripted.update()._replays == STEPS - FROM - WARM
    assert scripted.updates.warmup_steps == WARM + 1
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert_same(own, model)
    assert_same_state(theirs, optimizer)
    assert not vars(optimizer).keys() & set(CHECKS)


@pytest.mark.parametrize(("kind", "plan"), OTHERS)
def test_what_cannot_be_captured_goes_on(kind, plan):
    model, optimizer, scripted = trained(KINDS[kind], plan, schedule=decay)
    own, theirs, _ = trained(KINDS[kind], schedule=decay)
    assert_same(own, model)
    assert_same_state(theirs, optimizer)
    if kind in ("sgd", "adagrad"):
        assert scripted.updates.uncaptured is not None


def test_a_checkpoint_in_between_changes_nothing_and_nothing_is_recorded_again():
    seen = []

    def checkpoint(number, model, optimizer):
        if number in (10, 11, 15):
            kept = optimizer.state_dict()["state"][0]["step"]
            seen.append((kept.device.type, float(kept)))

    model, optimizer, scripted = trained(plan="fused", between=checkpoint)
    own, theirs, _ = trained()
    assert seen == [("cpu", 11.0), ("cpu", 12.0), ("cpu", 16.0)]
    assert scripted.updates.warmup_steps == WARM + 1
    assert scripted.update()._replays == STEPS - FROM - WARM
    assert_same(own, model)
    assert_same_state(theirs, optimizer)


def load(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def move(model, optimizer):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def decay_more(model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize("change", [load, move, decay_more])
def test_whatever_a_script_changes_in_between_is_noticed(change):
    def at_ten(number, model, optimizer):
        if number == 10:
            change(model, optimizer)

    model, optimizer, scripted = trained(plan="fused", between=at_ten)
    own, theirs, _ = trained(between=at_ten)
    assert scripted.updates.warmup_steps == 2 * (WARM + 1)
    assert scripted.updates.uncaptured is None
    assert_same(own, model)
    assert_same_state(theirs, optimizer)


def test_plans_in_turn_keep_what_was_recorded():
    plans = [("plain", False), ("fused", True), ("plain", True), ("fused", False)]
    model = net()
    optimizer = adamw(model.parameters())
    scripted = Scripted(optimizer)
    with scripted.at_work():
        for number, x in enumerate(batches(32)):
            kind, captured = plans[number // 4 % 4]
            scripted.updates.use(kind, captured=captured)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert [update.warmup_steps for update in scripted.updates._captures.values()] == [WARM + 1, WARM + 1]
    own, theirs, _ = trained(steps=32)
    scripted.updates.close()
    assert_same(own, model)
    assert_same_state(theirs, optimizer)


def test_no_step_and_no_clipping_waits_once_recorded():
    model, optimizer, scripted = trained(
        plan="fused", schedule=decay, clip=lambda number, model: clip_grad_norm_(model.parameters(), 0.1)
    )
    replays = scripted.update()._replays
    with scripted.at_work():
        model(batches(1)[0]).square().mean().backward()
        with no_waiting():
            for number in range(5):
                clip_grad_norm_(model.parameters(), 0.1)
                optimizer.param_groups[0]["lr"] = 0.001 * (number + 1)
                optimizer.step()
    assert scripted.update()._replays == replays + 5


@pytest.mark.parametrize("captured", [False, True])
def test_the_driver_is_not_asked_before_steps(monkeypatch, captured):
    _, optimizer, scripted = trained(plan="fused", captured=captured)

    asked = []
    for name in CHECKS:
        monkeypatch.setattr(torch.optim.Optimizer, name, lambda self: asked.append(self), raising=False)
    with scripted.at_work():
        optimizer.step()
    assert not asked


def test_weights_count_as_changed():
    model, optimizer, scripted = trained(plan="fused")
    with scripted.at_work():
        loss = model(batches(1)[0]).square().mean()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_the_gate_leaves_no_trace():
    model, optimizer, scripted = trained()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    for kind in ("fused", "plain"):
        assert scripted.updates.why_other(kind, captured=True) is None
        scripted.updates.use(kind, captured=True)
        assert scripted.updates.uncaptured is None
    scripted.updates.use("plain")
    after = (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()])
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_an_optimizer_that_needs_a_closure_does_not_stand_in_the_way():
    def run(captured):
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        scripted = Scripted(optimizer)
        x = batches(1)[0]

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses = []
        with scripted.at_work():
            for number in range(6):
                losses.append(optimizer.step(closure).item())
                if captured and number == 1:
                    assert scripted.updates.why_other("plain", captured=True) is None
                    scripted.updates.use("plain", captured=True)
        return losses

    assert run(True) == pytest.approx(run(False), rel=1e-3)


@pytest.mark.parametrize("settings", [{}, {"norm_type": float("inf")}, {"foreach": False}])
def test_clipping_gives_the_same_norms(settings):
    norms = {}

    def clipper(name):
        def clip(number, model):
            grads = [p.grad for p in model.parameters()]
            norms.setdefault(name, []).append(clip_grad_norm_(model.parameters(), 0.01, **settings))
            assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))

        return clip

    model, _, scripted = trained(plan="fused", clip=clipper("made"), schedule=decay)
    own, _, _ = trained(clip=clipper("own"), schedule=decay)
    assert scripted.clippings == [True]
    assert len({total.data_ptr() for total in norms["made"]}) == STEPS
    torch.testing.assert_close(norms["own"], norms["made"], rtol=1e-2, atol=1e-6)
    assert_same(own, model)


def test_training_with_a_scaler():
    def run(captured):
        model = net()
        optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cuda", init_scale=1024.0)
        scripted = Scripted(optimizer)
        with scripted.at_work():
            for number, x in enumerate(batches(STEPS)):
                if captured and number == FROM:
                    scripted.updates.use("fused", captured=True)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                scaler.scale(loss * (float("inf") if number == 10 else 1)).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
        if captured:
            assert scripted.update()._replays
        return model, scaler.get_scale()

    own, made = run(False), run(True)
    assert_same(own[0], made[0])
    assert own[1] == made[1]


def test_a_step_on_another_stream_is_the_optimizers_own():
    _, optimizer, scripted = trained(plan="fused")
    replays = scripted.update()._replays
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with scripted.at_work(), torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    assert scripted.update()._replays == replays


def test_closing_gives_memory_back():
    def clip(number, model):
        clip_grad_norm_(model.parameters(), 0.1)

    trained(plan="fused", clip=clip)  # libraries have their workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    model, optimizer, scripted = trained(plan="fused", clip=clip)
    scripted.updates.close()
    del model, optimizer, scripted
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_a_whole_session(tmp_path, monkeypatch):
    """Calls, clippings and steps, all of them replays, and gradients read where backward passes leave them."""
    monkeypatch.setattr(update_capture, "MOST_AGAIN", AGAIN)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    save_plan(Plan(feed=Feed(kind="loader")).but(mode="captured", optimizer="fused"), tmp_path / "plan.toml")
    data = TensorDataset(torch.cat([x.cpu() for x in batches(8)]))

    def train(session=None):
        model = net()
        optimizer = KINDS["sgd"](model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
        loader = DataLoader(data, batch_size=16, shuffle=True)
        torch.manual_seed(3)
        losses, threads = [], set()
        for _ in range(6):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = model(x.to(DEVICE)).square().mean()
                loss.register_hook(lambda grad: threads.add(threading.get_ident()))
                loss.backward()
                clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                losses.append(loss.detach())
        if session is not None:
            assert session._tuning is not None
            updates = session._tuning.training.updates
            assert updates.uncaptured is None
            update = updates._ways[id(optimizer)].captured
            assert update._replays > 20
            assert update._graph._recorded_at[0] == [p.grad.data_ptr() for p in model.parameters()]
            assert threading.get_ident() in threads
        return torch.stack(losses).cpu(), model

    own = train()
    with Session(Settings(name="test", out=tmp_path / "run", plan=str(tmp_path / "plan.toml"))) as session:
        made = train(session)
    assert torch._C._is_multithreading_enabled()
    torch.testing.assert_close(own[0], made[0], rtol=1e-2, atol=1e-4)
    assert_same(own[1], made[1])
