"""A training that is stored and put back goes on to the same bit, whatever it is made of."""

import random

import numpy as np
import pytest
import torch
from plain import class_data
from torch import nn
from torch.optim import lr_scheduler as schedules

from hotlap import Plan, Rig
from hotlap.core.errors import StoreError
from hotlap.guard.saving import MODEL, TENSORS, VALUES, export_state, import_state

STEPS = 5
DATA = class_data(40, dtype=torch.float32)


def written(rig, loop=None):
    return {name: b"".join(bytes(p) for p in pieces) for name, pieces in export_state(rig, loop or {}).items()}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).to(dtype)


def rig_of(optimizer=torch.optim.AdamW, *, model=net, loss=nn.CrossEntropyLoss, plan=None, **settings):
    made = model()
    rig = Rig(made, lambda p: optimizer(p), loss(), device="cpu", plan=plan, **settings)
    windows = rig.feed(DATA, batch_size=8, epochs=4, seed=3)
    return rig, windows


def go(rig, windows, steps):
    for _ in range(steps):
        rig.step(next(windows))


def goes_on_the_same(make, steps=STEPS, between=lambda rig: None):
    """Trained for a while, stored, put into a fresh rig, and both trained on: nothing may differ."""
    first, windows = make()
    go(first, windows, steps)
    between(first)
    files = written(first, {"note": 1})
    # What the training does meanwhile must not matter, nor what happened in the other process.
    go(first, windows, steps)
    after = written(first)
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    second, _ = make()
    assert import_state(second, files) == {"note": 1}
    assert written(second, {"note": 1}) == files
    go(second, second.windows(epochs=4), steps)
    assert {n: len(c) for n, c in written(second).items()} == {n: len(c) for n, c in after.items()}
    assert written(second) == after
    assert after != files
    return second


def with_gradients(optimizer):
    """Optimizers that step without a closure and with dense gradients."""
    return optimizer not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and with_gradients(kind)
]


def matrices_only(kind):
    return kind.__name__ == "Muon"


def made_by(kind, **settings):
    settings = {"lr": 0.01, **settings}

    def make(parameters):
        parameters = list(parameters)
        return kind([p for p in parameters if p.ndim == 2] if matrices_only(kind) else parameters, **settings)

    return make


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_goes_on_to_the_same_bit(kind):
    goes_on_the_same(lambda: rig_of(made_by(kind)))


VARIANTS = {
    "SGD with momentum": made_by(torch.optim.SGD, momentum=0.9, nesterov=True),
    "SGD fused": made_by(torch.optim.SGD, momentum=0.9, fused=True),
    "Adam with amsgrad": made_by(torch.optim.Adam, amsgrad=True),
    "AdamW fused": made_by(torch.optim.AdamW, fused=True, amsgrad=True),
    "AdamW foreach": made_by(torch.optim.AdamW, foreach=True),
    "AdamW one by one": made_by(torch.optim.AdamW, foreach=False),
    "Adagrad fused": made_by(torch.optim.Adagrad, fused=True),
    "RMSprop centered": made_by(torch.optim.RMSprop, momentum=0.9, centered=True),
    "a learning rate that is a tensor": made_by(torch.optim.AdamW, lr=torch.tensor(0.01)),
    "capturable": made_by(torch.optim.NAdam, decoupled_weight_decay=True),
}


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_goes_on_to_the_same_bit(make):
    goes_on_the_same(lambda: rig_of(make))


def test_several_groups_keep_their_own_settings():
    def groups(parameters):
        first, *rest = parameters
        return torch.optim.AdamW(
            [{"params": [first], "lr": 0.1, "weight_decay": 0.0}, {"params": rest, "betas": (0.5, 0.6)}]
        )

    rig = goes_on_the_same(lambda: rig_of(groups))
    assert [group["lr"] for group in rig.optimizer.param_groups] == [0.1, 0.001]
    assert rig.optimizer.param_groups[1]["betas"] == (0.5, 0.6)


class WideState(torch.optim.Optimizer):
    """Keeps its state in float32 whatever the weights are, as people do for bf16 weights."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"], state["count"] = p.float().clone(), 0
                state["master"] -= group["lr"] * p.grad.float()
                state["count"] += 1
                p.copy_(state["master"])


def test_narrow_weights_keep_the_wide_state_of_their_optimizer():
    def model():
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.bfloat16)

    def loss():
        return Narrow()

    class Narrow(nn.CrossEntropyLoss):
        def forward(self, output, target):
            return super().forward(output.float(), target)

    def make():
        torch.manual_seed(0)
        made = model()
        rig = Rig(made, WideState(made.parameters()), loss(), device="cpu")
        return rig, rig.feed((DATA[0].bfloat16(), DATA[1]), batch_size=8, epochs=4, seed=3)

    rig = goes_on_the_same(make)
    assert {s["master"].dtype for s in rig.optimizer.state.values()} == {torch.float32}


def channels_last_net():
    torch.manual_seed(0)
    layers = nn.Linear(5, 48), nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def test_weights_in_another_memory_format_go_on_with_a_fused_optimizer():
    rig = goes_on_the_same(lambda: rig_of(made_by(torch.optim.AdamW, fused=True), model=channels_last_net))
    for parameter, state in rig.optimizer.state.items():
        assert state["exp_avg"].stride() == parameter.stride()


# --- schedules -----------------------------------------------------------------------------------

SCHEDULES = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda n: 0.95),
    "StepLR": lambda o: schedules.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 4, 4, 7], 0.5),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.5, 7),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, 1.0, 8),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.05, total_steps=21),
    "OneCycleLR, linear": lambda o: schedules.OneCycleLR(o, 0.05, total_steps=21, anneal_strategy="linear"),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.001, 0.05, step_size_up=3, mode="exp_range", gamma=0.9),
    "CyclicLR, own scale": lambda o: schedules.CyclicLR(o, 0.001, 0.05, step_size_up=3, scale_fn=lambda x: 0.5),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 4), schedules.CosineAnnealingLR(o, 9)], [7]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 4), schedules.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=7),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_goes_on_to_the_same_bit(schedule):
    goes_on_the_same(lambda: rig_of(made_by(torch.optim.SGD, momentum=0.9), schedule=schedule))


def test_a_schedule_by_epochs_goes_on_across_the_end_of_an_epoch():
    """Stored after the last window of an epoch: the schedule has not moved yet."""
    rig = goes_on_the_same(
        lambda: rig_of(made_by(torch.optim.SGD), schedule=lambda o: schedules.StepLR(o, 1, 0.5), schedule_per="epoch")
    )
    assert rig.place == rig.place._replace(epoch=1, window=5)
    assert rig.optimizer.param_groups[0]["lr"] == 0.005


def test_a_plateau_goes_on_counting():
    def make():
        return rig_of(
            made_by(torch.optim.SGD), schedule=lambda o: schedules.ReduceLROnPlateau(o, factor=0.1, patience=2)
        )

    def score(rig):
        for value in (1.0, 1.0, 1.0):
            rig.schedule.evaluated(value)

    second = goes_on_the_same(make, between=score)
    assert second.schedule.scheduler.num_bad_epochs == 2
    second.schedule.evaluated(1.0)
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_all_schedules_of_torch_are_tried():
    known = {
        name for name, kind in vars(schedules).items()
        if isinstance(kind, type) and issubclass(kind, schedules.LRScheduler) and kind is not schedules.LRScheduler
        and not name.startswith("_")
    }  # fmt: skip
    assert known - {name.partition(",")[0] for name in SCHEDULES} <= {"ReduceLROnPlateau"}


# --- what a model remembers ----------------------------------------------------------------------


class Rememberer(nn.Module):
    """Buffers that no state_dict holds: one counts, one comes to be in training, one grows; and a word of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(5, 3)
        self.frozen = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("grown", torch.zeros(1), persistent=False)
        self.words = {"calls": 0, "history": [(0, 0.5)]}

    def forward(self, x):
        if self.training:
            self.seen += len(x)
            self.late = x.detach().mean(0)
            self.grown = torch.cat([self.grown, x.detach().mean()[None]])
            self.words["calls"] += 1
            self.words["history"].append((self.words["calls"], float(self.seen)))
        bias = 0 if self.late is None else self.late.mean() + self.grown.sum() * 0.01 + self.words["calls"] * 0.001
        return self.norm(self.inner(x) + self.frozen(x)) + bias

    def get_extra_state(self):
        return self.words

    def set_extra_state(self, state):
        self.words = {"calls": state["calls"], "history": list(state["history"])}


def test_buffers_that_no_state_dict_holds_and_extra_state_come_back():
    rig = goes_on_the_same(lambda: rig_of(model=Rememberer))
    assert rig.model.words["calls"] == 2 * STEPS
    assert len(rig.model.grown) == 1 + 2 * STEPS


class Learned(nn.Module):
    """A loss with a weight of its own, a dropout, a frozen part, and a counter that no state_dict holds."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, output, target):
        self.calls += 1
        return nn.functional.cross_entropy(self.drop(output) * self.scale * self.fixed + self.calls, target)


def test_a_loss_with_weights_goes_on_too():
    def make():
        model, loss = net(), Learned()
        optimizer = torch.optim.AdamW([*model.parameters(), loss.scale], lr=0.01)
        rig = Rig(model, optimizer, loss, device="cpu")
        return rig, rig.feed(DATA, batch_size=8, epochs=4, seed=3)

    rig = goes_on_the_same(make)
    assert rig.loss.calls == 2 * STEPS
    assert not torch.equal(rig.loss.scale, torch.ones(3))


def test_modes_and_frozen_weights_come_back_layer_by_layer():
    def freeze(rig):
        rig.model[1].eval()
        rig.model[0].weight.requires_grad_(False)

    rig = goes_on_the_same(rig_of, between=freeze)
    assert [layer.training for layer in rig.model] == [True, False, True, True]
    assert [p.requires_grad for p in rig.model.parameters()] == [False, True, True, True, True, True]


class Drawing(nn.Module):
    """Draws from all three generators of the host."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(5, 3)

    def forward(self, x):
        noise = torch.randn(()) + np.random.randn() + random.gauss(0, 1)
        return self.inner(x + noise)


@pytest.mark.parametrize("steps", [4, 5])
def test_all_generators_of_the_host_go_on_also_between_two_of_a_pair(steps):
    """numpy and Python draw normal numbers in pairs, and keep the second one."""
    goes_on_the_same(lambda: rig_of(model=Drawing), steps=steps)


def test_the_place_in_the_data_the_totals_and_the_counts_come_back():
    first, windows = rig_of()
    go(first, windows, 7)
    second, _ = rig_of()
    import_state(second, written(first))
    assert second.place == first.place
    assert (second.place.epoch, second.place.window) == (1, 2)
    assert (second.steps, second.updates, second.samples) == (7, 7, 56)
    assert second.totals.mean() == first.totals.mean()
    ours, theirs = next(windows), next(second.windows(epochs=4))
    assert all(torch.equal(a, b) for a, b in zip(ours.pieces[0], theirs.pieces[0], strict=True))


PLANS = [Plan().but(precision="bf16"), Plan().but(micro_batch=3), Plan().but(optimizer="fused")]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_it_goes_on_under_any_plan(plan):
    goes_on_the_same(lambda: rig_of(plan=plan))


def test_another_plan_than_the_checkpoints_is_obeyed():
    first, windows = rig_of(plan=Plan())
    go(first, windows, 3)
    second, _ = rig_of(plan=Plan().but(optimizer="fused"))
    import_state(second, written(first))
    assert all(group["fused"] for group in second.optimizer.param_groups)
    go(second, second.windows(epochs=4), 2)


# --- what does not fit ---------------------------------------------------------------------------


def stored():
    rig, windows = rig_of()
    go(rig, windows, 2)
    return written(rig)


@pytest.mark.parametrize("name", [MODEL, TENSORS, VALUES])
def test_a_missing_file_is_named(name):
    files = stored()
    del files[name]
    with pytest.raises(StoreError, match=f"has no {name}"):
        import_state(rig_of()[0], files)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rig_of(torch.optim.SGD), "checkpoint has the optimizer AdamW, this training SGD"),
        (lambda: rig_of(model=Rememberer), "weights do not fit"),
        (lambda: rig_of(model=lambda: nn.Sequential(*net(), nn.Linear(3, 3))), "weights do not fit"),
        (lambda: rig_of(schedule=lambda o: schedules.StepLR(o, 3)), "does not fit"),
    ],
    ids=["optimizer", "model", "one layer more", "schedule"],
)
def test_a_training_it_is_not_of_is_refused(make, words):
    with pytest.raises(StoreError, match=words):
        import_state(make()[0], stored())


@pytest.mark.parametrize("text", [b"{}", b"[]", b'{"$dict":[]}', b'{"$dict":[["model",3]]}', b"7"])
def test_values_of_garbage_are_refused(text):
    with pytest.raises(StoreError):
        import_state(rig_of()[0], {**stored(), VALUES: text})


def test_state_under_keys_that_are_no_weights_is_refused_by_name():
    rig, _ = rig_of()
    rig.optimizer.state["global"] = {"step": 3}
    with pytest.raises(StoreError, match="AdamW keeps state under 'global'"):
        export_state(rig, {})


def test_a_weight_that_no_file_can_hold_is_refused_at_once_not_when_it_is_written():
    def model():
        made = net()
        made.phase = nn.Parameter(torch.ones(2, dtype=torch.complex128))
        return made

    with pytest.raises(StoreError, match=r"phase has dtype torch\.complex128"):
        export_state(rig_of(model=model)[0], {})
