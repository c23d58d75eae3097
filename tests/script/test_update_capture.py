"""Steps and clippings of a script made by replays: the numbers of its own, whatever the script does in between."""

import copy
import itertools
import warnings

import pytest
import torch
from optimizing import FakeGraph, FakeRecorder, at_work
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_

from hotlap.core.plan import Feed, Plan
from hotlap.core.torch_private import CLIP_NORM, CLIP_SCALE
from hotlap.engine.capture.recording import NotRecordedError
from hotlap.script.session import Session, Settings
from hotlap.script.update import capture
from hotlap.script.update.capture import CHECKS, FOR_GOOD, PATIENCE, WARM, CapturedUpdate, UpdateGraph
from hotlap.script.update.clipping import MOST_LIMITS
from hotlap.script.update.updates import Updates
from hotlap.store.files import save_plan

STEPS = 12


class Scripted:
    """The optimizers of a script under hotlap."""

    def __init__(self, *optimizers):
        self.recorders = []
        self.updates = Updates(optimizers, make_recorder=self._recorder)

    def _recorder(self, device):
        self.recorders.append(FakeRecorder(device))
        return self.recorders[-1]

    def replays(self, kind=UpdateGraph):
        """Of steps; of clippings for None."""
        return sum(g.replays for r in self.recorders for g in r.graphs if type(g.of) is (kind or type(None)))

    @property
    def recordings(self):
        return len({id(g.of) for r in self.recorders for g in r.graphs if isinstance(g.of, UpdateGraph)})

    def at_work(self):
        return at_work(self.updates)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.99))


def trained(
    optimizer_of=adamw, plan=None, *, steps=STEPS, model=None, before=None, between=None, clip=None, schedule=None
):
    """A plain loop as people write it, under a plan from its third step on.

    `before` and `between` are told the step, the model and the optimizer before and after each step.
    """
    model = model or net()
    optimizer = optimizer_of(model.parameters())
    scheduler = schedule(optimizer) if schedule else None
    scripted = Scripted(optimizer)
    generator = torch.Generator().manual_seed(1)
    with scripted.at_work():
        for number in range(steps):
            if number == 2 and plan is not None:
                scripted.updates.use(plan, captured=True)
            optimizer.zero_grad()
            model(torch.randn(16, 4, generator=generator)).square().mean().backward()
            if clip is not None:
                clip(number, model)
            if before is not None:
                before(number, model, optimizer)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if between is not None:
                between(number, model, optimizer)
    return model, optimizer, scripted


def assert_same(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


KINDS = {
    "adamw": adamw,
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}
CASES = [(kind, "plain") for kind in KINDS] + [(kind, "fused") for kind in ("adamw", "amsgrad", "sgd", "plain sgd")]


@pytest.mark.parametrize(("kind", "plan"), CASES)
def test_replays_follow_the_rate_and_the_script_finds_its_own_settings(kind, plan):
    def decay(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def found(number, model, optimizer):
        assert type(optimizer.param_groups[0]["lr"]) is float

    plain, own, _ = trained(KINDS[kind], schedule=decay)
    model, optimizer, scripted = trained(KINDS[kind], plan, schedule=decay, between=found)
    assert scripted.replays() == STEPS - 2 - WARM
    assert scripted.updates.uncaptured is None
    assert_same(plain, model)
    assert own.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for one, other in zip(own.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-6)
    assert vars(own).keys() == vars(optimizer).keys() - {"_need_device_dtype_check_for_fused"}


@pytest.mark.parametrize("kind", [*KINDS, "asgd", "rprop", "muon"])
def test_an_idle_optimizer_makes_no_step(kind):
    more = {"asgd": torch.optim.ASGD, "rprop": torch.optim.Rprop, "muon": getattr(torch.optim, "Muon", None)}
    optimizer_of = KINDS.get(kind) or more[kind]
    if optimizer_of is None:
        pytest.skip("torch has no Muon here")
    weights = [torch.ones(2, 2, requires_grad=True)]
    weights[0].grad = torch.ones(2, 2)
    optimizer = optimizer_of(weights)
    idle = CapturedUpdate(optimizer, make_recorder=FakeRecorder, shared_inputs=None).idle
    assert type(optimizer).step.__wrapped__(idle) is None
    assert torch.equal(weights[0], torch.ones(2, 2))


def test_steps_that_are_no_replays_are_counted():
    _, _, scripted = trained(plan="fused")
    assert scripted.updates.warmup_steps == WARM + 1
    scripted.updates.use("plain")
    assert scripted.updates.warmup_steps == 0


def test_gradients_that_stay_where_they_are_are_read_there_and_followed_where_they_go(monkeypatch):
    copied, original = [], torch._foreach_copy_

    def noted(rooms, tensors, *rest, **more):
        copied.append(step)
        return original(rooms, tensors, *rest, **more)

    (model, own), steps = (net(), net()), 40
    optimizer, other = adamw(model.parameters()), adamw(own.parameters())
    scripted = Scripted(optimizer)
    draw = torch.Generator().manual_seed(1)
    with scripted.at_work():
        scripted.updates.use("plain", captured=True)
        monkeypatch.setattr(capture, "foreach_copy_", noted)
        for step in range(steps):
            x = torch.randn(6, 4, generator=draw)
            for one, made in ((model, optimizer), (own, other)):
                made.zero_grad(set_to_none=False)
                if step == 15:
                    for p in one.parameters():
                        p.grad = p.grad.clone()
                one(x).pow(2).sum().backward()
                made.step()
            for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert scripted.recordings == 2
    laid = sorted({step for step in copied if step >= 5})
    assert laid == list(range(15, 15 + len(laid)))
    assert FOR_GOOD <= len(laid) <= FOR_GOOD + 6


def test_gradients_that_lie_here_and_there_in_turn_are_read_in_both_places(monkeypatch):
    copied, original = [], torch._foreach_copy_

    def noted(rooms, tensors, *rest, **more):
        copied.append(step)
        return original(rooms, tensors, *rest, **more)

    (model, own), steps, lap = (net(), net()), 160, 20
    optimizer, other = adamw(model.parameters()), adamw(own.parameters())
    rooms = {one: [[torch.zeros_like(p) for p in one.parameters()] for _ in range(2)] for one in (model, own)}
    scripted = Scripted(optimizer)
    draw = torch.Generator().manual_seed(1)
    with scripted.at_work():
        scripted.updates.use("plain", captured=True)
        monkeypatch.setattr(capture, "foreach_copy_", noted)
        for step in range(steps):
            x = torch.randn(6, 4, generator=draw)
            for one, made in ((model, optimizer), (own, other)):
                for p, room in zip(one.parameters(), rooms[one][step // lap % 2], strict=True):
                    p.grad = room.zero_()
                one(x).pow(2).sum().backward()
                made.step()
            for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert scripted.recordings == 2
    assert set(range(2 * lap, steps, lap)) <= set(copied)
    assert len([step for step in set(copied) if step >= 2 * lap]) == steps // lap - 2


def test_parameters_that_have_no_gradient_in_some_steps():
    def some_missing(number, model, optimizer):
        if number in (6, 7, 10):
            model[0].weight.grad = None

    plain, _, _ = trained(before=some_missing, steps=16)
    model, _, scripted = trained(plan="fused", before=some_missing, steps=16)
    assert_same(plain, model)
    assert scripted.recordings == 1
    assert scripted.replays() == 16 - 2 - WARM - 3


def test_a_parameter_that_gets_a_gradient_later():
    def frozen(number, model, optimizer):
        model[0].weight.requires_grad_(number >= 6)

    plain, _, _ = trained(between=frozen, steps=20)
    model, _, scripted = trained(plan="fused", between=frozen, steps=20)
    assert_same(plain, model)
    assert scripted.recordings == 2


def load(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def add_group(model, optimizer):
    extra = nn.Parameter(torch.ones(3))
    extra.grad = torch.ones(3)
    model.register_parameter("extra", extra)
    optimizer.add_param_group({"params": [extra], "lr": 0.5})


def move(model, optimizer):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def replace_state(model, optimizer):
    kept = optimizer.state[model[0].weight]
    kept["exp_avg"] = torch.zeros_like(kept["exp_avg"])


def reset_state(model, optimizer):
    optimizer.state.clear()


def move_state(model, optimizer):
    for kept in optimizer.state.values():
        kept["exp_avg"].data = kept["exp_avg"].data * 2


def decay_more(model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize("change", [load, add_group, move, replace_state, reset_state, move_state, decay_more])
def test_whatever_a_script_changes_in_between_is_noticed(change):
    def at_seven(number, model, optimizer):
        if number == 7:
            change(model, optimizer)

    plain, own, _ = trained(between=at_seven, steps=16)
    model, optimizer, scripted = trained(plan="fused", between=at_seven, steps=16)
    assert_same(plain, model)
    assert scripted.recordings == 2
    assert scripted.replays() == 16 - 2 - 2 * WARM
    assert own.param_groups[0]["weight_decay"] == optimizer.param_groups[0]["weight_decay"]


def test_a_schedule_that_moves_more_than_the_rate_leaves_it_to_the_optimizer():
    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)

    plain, _, _ = trained(schedule=cycle, steps=30)
    model, _, scripted = trained(plan="fused", schedule=cycle, steps=30)
    assert_same(plain, model)
    assert scripted.replays() == 0
    assert "keep changing" in scripted.updates.uncaptured
    assert scripted.updates.warmup_steps == PATIENCE + 1


@pytest.mark.parametrize("groups", [2, 6])
def test_rates_of_several_groups(groups):
    def grouped(parameters):
        several = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1 * n} for n in range(1, groups)]
        for group in several:
            group["params"][0].grad = torch.ones(2)
        return torch.optim.AdamW([{"params": list(parameters)}, *several], lr=0.01)

    def keep_grads(number, model, optimizer):
        for group in optimizer.param_groups[1:]:
            group["params"][0].grad = torch.full((2,), float(number + 1))

    def decay(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n, g=g: 0.9**n + g for g in range(groups)])

    plain, own, _ = trained(grouped, schedule=decay, before=keep_grads)
    model, optimizer, scripted = trained(grouped, "fused", schedule=decay, before=keep_grads)
    assert scripted.replays()
    assert_same(plain, model)
    for one, other in zip(own.param_groups[1:], optimizer.param_groups[1:], strict=True):
        torch.testing.assert_close(one["params"][0], other["params"][0], rtol=1e-4, atol=1e-6)


def test_a_hook_of_the_scripts_own_runs_before_its_step():
    def halve(optimizer, *_):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    def halving(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        optimizer.register_step_pre_hook(halve)
        return optimizer

    own, _, _ = trained(halving, steps=25)
    model, _, scripted = trained(halving, "fused", steps=25)
    assert scripted.replays() == 0
    assert_same(own, model)


def test_optimizers_of_unknown_kinds_make_their_steps():
    class Mine(torch.optim.AdamW):
        pass

    _, _, scripted = trained(lambda p: Mine(p, lr=0.01), "plain")
    assert scripted.replays() == 0
    assert scripted.updates.uncaptured == "Mine is not one of torch's own optimizers"


@pytest.mark.parametrize("optimizer_of", [adamw, lambda p: torch.optim.LBFGS(p, lr=0.1)])
def test_a_closure_is_called(optimizer_of):
    def run(plan):
        model = net()
        optimizer = optimizer_of(model.parameters())
        scripted = Scripted(optimizer)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            return loss

        with scripted.at_work():
            losses = [optimizer.step(closure).item() for _ in range(2)]
            if plan:
                assert scripted.updates.why_other(plan, captured=True) is None
                scripted.updates.use(plan, captured=True)
            losses += [optimizer.step(closure).item() for _ in range(6)]
        return model, losses, scripted

    own, made = run(None), run("plain")
    assert own[1] == pytest.approx(made[1])
    assert_same(own[0], made[0])
    assert made[2].replays() <= 1  # by the gate


def test_weights_count_as_changed():
    model, optimizer, scripted = trained(plan="fused")
    with scripted.at_work():
        before = [p._version for p in model.parameters()]
        loss = model(torch.ones(3, 4)).square().mean()
        replays = scripted.replays()
        optimizer.step()
        assert scripted.replays() == replays + 1
        assert all(p._version > version for p, version in zip(model.parameters(), before, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients_that_are_themselves_differentiable():
    model, optimizer, scripted = trained(plan="fused")
    with scripted.at_work():
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using backward")
            model(torch.ones(3, 4)).square().mean().backward(create_graph=True)
        replays = scripted.replays()
        optimizer.step()
        optimizer.zero_grad()
        assert scripted.replays() == replays + 1
    assert not any(room.requires_grad for room in scripted.updates._shared_inputs._buffers.values())


def test_a_recording_that_fails_leaves_the_steps_to_the_optimizer(monkeypatch):
    def broken(self, work):
        raise NotRecordedError("no room")

    monkeypatch.setattr(FakeRecorder, "record", broken)
    plain, _, _ = trained()
    model, _, scripted = trained(plan="fused")
    assert_same(plain, model)
    assert scripted.updates.uncaptured == "it cannot be recorded: no room"


def test_a_replay_that_fails_leaves_the_steps_to_the_optimizer(monkeypatch):
    def broken(self):
        raise RuntimeError("no launch")

    monkeypatch.setattr(FakeGraph, "replay", broken)
    plain, _, _ = trained(clip=lambda number, model: clip_grad_norm_(model.parameters(), 0.1))
    model, _, scripted = trained(plan="fused", clip=lambda number, model: clip_grad_norm_(model.parameters(), 0.1))
    assert_same(plain, model)
    assert scripted.updates.uncaptured == "no launch"


def test_a_step_that_raises_leaves_nothing_behind(monkeypatch):
    _, optimizer, scripted = trained(plan="fused", steps=3)
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    with scripted.at_work():
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_fused_adamw_", lambda *args, **settings: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
        optimizer.step()
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == settings
    assert not vars(optimizer).keys() & set(CHECKS)


def test_nothing_is_left_after_closing():
    own = trained()[1]
    _, optimizer, scripted = trained(plan="fused", clip=lambda number, model: clip_grad_norm_(model.parameters(), 0.1))
    assert scripted.updates._shared_inputs._buffers
    scripted.updates.close()
    assert not scripted.updates._shared_inputs._buffers
    assert not scripted.updates._recorders
    assert not any(update.recorded for update in scripted.updates._captures.values())
    assert vars(optimizer).keys() == vars(own).keys()
    assert not optimizer._optimizer_state_dict_pre_hooks


def test_plans_in_turn():
    def turned(plan_of):
        model = net()
        optimizer = adamw(model.parameters())
        scripted = Scripted(optimizer)
        with scripted.at_work():
            for number in range(32):
                if plan_of is not None:
                    scripted.updates.use(*plan_of(number))
                optimizer.zero_grad()
                model(torch.ones(3, 4) * number).square().mean().backward()
                optimizer.step()
        return model, scripted

    class Plans:
        def __call__(self, number):
            return [("plain", False), ("fused", True), ("plain", True), ("fused", False)][number // 4 % 4]

    model = net()
    optimizer = adamw(model.parameters())
    scripted = Scripted(optimizer)
    plans = Plans()
    with scripted.at_work():
        for number in range(32):
            kind, captured = plans(number)
            scripted.updates.use(kind, captured=captured)
            optimizer.zero_grad()
            model(torch.ones(3, 4) * number).square().mean().backward()
            optimizer.step()
    assert_same(turned(None)[0], model)
    assert scripted.recordings == 2


def test_the_gate_leaves_no_trace():
    model, optimizer, scripted = trained()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    assert scripted.updates.why_other("fused", captured=True) is None
    assert scripted.replays() == 1
    after = (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()])
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert not vars(optimizer).keys() & set(CHECKS)
    scripted.updates.use("fused", captured=True)
    assert scripted.updates.uncaptured is None


def test_the_gate_replays_with_the_gradients_of_the_step_before():
    """Which torch's loop over all tensors at once changes in place, for Nesterov's momentum."""
    _, _, scripted = trained(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=True))
    assert scripted.updates.why_other("plain", captured=True) is None
    scripted.updates.use("plain", captured=True)
    assert scripted.updates.uncaptured is None


def test_replays_that_do_something_else_are_not_made(monkeypatch):
    _, _, scripted = trained()
    replay = FakeGraph.replay

    def twice(self):
        replay(self)
        replay(self)

    monkeypatch.setattr(FakeGraph, "replay", twice)
    assert scripted.updates.why_other("fused", captured=True) is None
    scripted.updates.use("fused", captured=True)
    assert "differs by" in scripted.updates.uncaptured


def test_a_session_makes_steps_by_replays_and_leaves_torch_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    recorders = []

    def updates_of(optimizers):
        return Updates(optimizers, make_recorder=lambda device: recorders.append(FakeRecorder(device)) or recorders[-1])

    monkeypatch.setattr("hotlap.script.training.Updates", updates_of)
    save_plan(Plan(feed=Feed(kind="loader")).but(optimizer="fused"), tmp_path / "plan.toml")

    def train(session=None):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(60):
            optimizer.zero_grad()
            model(torch.full((3, 4), number / 60)).square().mean().backward()
            clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            if session is not None and session._tuning is not None:
                session._tuning.training.updates.use("fused", captured=True)
        return model

    parts = getattr(clip_grad, CLIP_NORM), getattr(clip_grad, CLIP_SCALE)
    own = train()
    with Session(Settings(name="test", out=tmp_path / "run", plan=str(tmp_path / "plan.toml"))) as session:
        made = train(session)
    assert_same(own, made)
    assert [sum(g.replays > 20 for g in r.graphs) for r in recorders] == [2]
    assert parts == (getattr(clip_grad, CLIP_NORM), getattr(clip_grad, CLIP_SCALE))


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_training_with_a_scaler(unscaled, fused):
    def run(captured):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scripted = Scripted(optimizer)
        generator = torch.Generator().manual_seed(1)
        with scripted.at_work():
            for number in range(10):
                if captured and number == 2:
                    scripted.updates.use("fused", captured=True)
                optimizer.zero_grad()
                loss = model(torch.randn(16, 4, generator=generator)).square().mean()
                scaler.scale(loss * (float("inf") if number == 6 else 1)).backward()
                if unscaled:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
        return model, scaler.get_scale(), scripted

    own, made = run(False), run(True)
    assert_same(own[0], made[0])
    assert own[1] == made[1]
    assert bool(made[2].replays()) is (fused is None)


# --- clipping ------------------------------------------------------------------------------------


def clipper(totals, limit=0.05, **settings):
    def clip(number, model):
        totals.append(clip_grad_norm_(model.parameters(), limit, **settings))

    return clip


@pytest.mark.parametrize("settings", [{}, {"norm_type": float("inf")}, {"norm_type": 2}, {"foreach": False}])
def test_clipping_gives_the_same_norms_and_gradients(settings):
    own, made, grads = [], [], {}

    def keep(name):
        def kept(number, model, optimizer):
            grads.setdefault(name, []).append([p.grad.clone() for p in model.parameters()])

        return kept

    plain, _, _ = trained(clip=clipper(own, **settings), before=keep("own"))
    model, _, scripted = trained(plan="fused", clip=clipper(made, **settings), before=keep("made"))
    assert scripted.replays(None) == STEPS - 2 - 2
    torch.testing.assert_close(own, made, rtol=1e-5, atol=0)
    torch.testing.assert_close(grads["own"][:5], grads["made"][:5], rtol=1e-5, atol=1e-8)
    assert_same(plain, model)
    assert len({total.data_ptr() for total in made}) == STEPS


def test_gradients_are_clipped_where_they_are():
    held = []

    def clip(number, model):
        grads = [p.grad for p in model.parameters()]
        versions = [grad._version for grad in grads]
        clip_grad_norm_(model.parameters(), 0.01)
        held.append(torch.cat([g.flatten() for g in grads]).norm())
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert all(grad._version > version for grad, version in zip(grads, versions, strict=True))

    _, _, scripted = trained(plan="fused", clip=clip)
    assert scripted.replays(None)
    torch.testing.assert_close(torch.stack(held), torch.full((STEPS,), 0.01), rtol=1e-2, atol=0)


@pytest.mark.parametrize("settings", [{"norm_type": 1.0}, {"error_if_nonfinite": True}])
def test_what_is_not_recorded_is_torchs_own(settings):
    own, made = [], []
    plain, _, _ = trained(clip=clipper(own, **settings))
    model, _, scripted = trained(plan="fused", clip=clipper(made, **settings))
    assert scripted.replays(None) == 0
    assert_same(plain, model)
    torch.testing.assert_close(own, made, rtol=1e-5, atol=0)


def test_a_norm_that_is_not_finite_is_told():
    def clip(number, model):
        if number == 9:
            model[0].weight.grad[0, 0] = float("nan")
            with pytest.raises(RuntimeError, match="non-finite"):
                clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
        assert clip_grad_norm_(model.parameters(), 0.1).isnan() == (number == 9)

    def forgotten(number, model, optimizer):
        if number == 9:
            optimizer.zero_grad()

    assert trained(plan="fused", clip=clip, before=forgotten)[2].replays(None)


def test_limits_that_change():
    limits = [0.1, 0.1, 0.1, 0.1, 0.1, 0.02, 0.02, 0.02, 0.02, *(0.01 * n for n in range(1, 12))]

    def clip(number, model):
        clip_grad_norm_(model.parameters(), limits[number])

    plain, _, _ = trained(clip=clip, steps=len(limits))
    model, _, scripted = trained(plan="fused", clip=clip, steps=len(limits))
    assert_same(plain, model)
    assert scripted.replays(None) == 1 + 1 + 2 + 1  # with 0.1, and once in vain; with 0.02, and once in vain
    assert [kind.given_up for kind in scripted.updates._clipping._kinds.values()] == ["its limit keeps changing"]
    assert MOST_LIMITS == 3


def test_a_gradient_that_is_given_twice_and_sets_of_gradients():
    def clip(number, model):
        clip_grad_norm_([*model[0].parameters(), model[0].weight], 0.01)
        clip_grad_norm_(model[2].parameters(), 0.01)
        clip_grad_norm_(model[2].weight, 0.005)

    plain, _, _ = trained(clip=clip)
    model, _, scripted = trained(plan="fused", clip=clip)
    assert_same(plain, model)
    assert scripted.replays(None) == 2 * (STEPS - 2 - 2)


def test_others_that_use_the_parts_get_torchs_own():
    def clip(number, model):
        parameters = list(model.parameters())
        total = getattr(clip_grad, CLIP_NORM)([p.grad for p in parameters])
        parameters[0].grad.mul_(2)
        getattr(clip_grad, CLIP_SCALE)(parameters, 0.01, total)

    plain, _, _ = trained(clip=clip)
    model, _, scripted = trained(plan="fused", clip=clip)
    assert_same(plain, model)
    assert scripted.replays(None) == 0


def test_nothing_to_clip():
    _, _, scripted = trained(plan="fused")
    with scripted.at_work():
        for _ in range(5):
            assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0.0


def test_two_optimizers_in_turn():
    def run(captured):
        torch.manual_seed(0)
        one, two = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizers = [adamw(one.parameters()), torch.optim.RMSprop(two.parameters(), lr=0.01)]
        scripted = Scripted(*optimizers)
        if captured:
            scripted.updates.use("fused", captured=True)
        with scripted.at_work():
            for number in range(10):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                    (two(one(torch.ones(3, 4) * number))).square().mean().backward()
                    clip_grad_norm_(itertools.chain(one.parameters(), two.parameters()), 0.1)
                    optimizer.step()
        return nn.ModuleList([one, two]), scripted

    own, made = run(False), run(True)
    assert_same(own[0], made[0])
    assert made[1].replays() == 2 * (10 - WARM)
