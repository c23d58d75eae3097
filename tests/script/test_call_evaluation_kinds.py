"""Which evaluation calls are of one kind, and in which form what they give comes back from a replay."""

import copy
import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from calling import (
    OfPythonAndNumpy,
    giving_transformers_output,
    net,
)
from evaluations import WARM, Scripted, inputs, moved, warmed
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotlap.core.plan import Execution, Numerics
from hotlap.machine.tf32 import Tf32
from hotlap.script.calls import evaluations as call_evaluations
from hotlap.script.calls.evaluations import MOST_MOVED, MOST_RECORDED


@pytest.fixture(autouse=True)
def dropout_draws_from_the_device(monkeypatch):
    """As it does on a GPU; here the device's generator is the host's."""
    monkeypatch.setattr("hotlap.engine.capture.recording.HostRandomness", OfPythonAndNumpy)


# --- kinds of calls ---------------------------------------------------------------------------------


def test_modes_precisions_and_values_are_kinds_of_their_own():
    class Scales(nn.Linear):
        def forward(self, x, *, scale=1.0):
            return super().forward(x) * scale

    module = Scales(6, 3).eval()
    model, (x,) = Scripted(module), inputs(1)
    calls = {
        "plain": (torch.no_grad, {}),
        "inference": (torch.inference_mode, {}),
        "scaled": (torch.no_grad, {"scale": 2.0}),
        "autocast": (functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16), {}),
    }
    for _ in range(WARM + 2):
        for name, (mode, how) in calls.items():
            with torch.no_grad(), mode():
                made, truth = model(x, **how), module(x, **how)
            assert torch.equal(made, truth)
            assert made.dtype is (torch.bfloat16 if name == "autocast" else torch.float32)
            assert made.is_inference() == (name == "inference")
    assert model.evaluations.recorded == 4
    assert model.replays == 4 * 3


def test_what_asks_for_inference_mode_is_told_of_it_in_a_recording_too():
    class Tells(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (100 if torch.is_inference_mode_enabled() else 0)

    for mode in (torch.no_grad, torch.inference_mode):
        model, (x,) = warmed(Tells(6, 3), mode=mode), inputs(1)
        with mode():
            assert torch.equal(model(x), model.module(x))


def test_switches_of_the_process_are_part_of_the_kind():
    model, (x,) = warmed(), inputs(1)
    with torch.no_grad():
        for switched in (Tf32(), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(deterministic=True)):
            with switched:
                assert moved(model, lambda: model(x))[1] == 0
            assert moved(model, lambda: model(x))[1] == 1


def test_strides_of_arguments_are_kept():
    class Tells(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (100 if x.is_contiguous() else 0)

    module = Tells(6, 3).eval()
    model = Scripted(module)
    with torch.no_grad():
        for x in inputs(WARM + 2, size=6):
            for given_ in (x, x.t(), torch.cat([x, x], 1)[:, ::2], x[:1].expand(6, 6)):
                assert torch.equal(model(given_), module(given_))
    assert model.evaluations.recorded == 3
    assert model.evaluations.refused == ["an argument is expanded"]


def test_arguments_that_are_one_and_the_same_stay_so():
    class Tells(nn.Linear):
        def forward(self, x, y):
            return super().forward(x) * (2 if x is y else 3) + y.sum()

    module = Tells(6, 3).eval()
    model, others = Scripted(module), inputs(WARM + 2, seed=4)
    with torch.no_grad():
        for x, y in zip(inputs(WARM + 2), others, strict=True):
            assert torch.equal(model(x, x), module(x, x))
            assert torch.equal(model(x, y), module(x, y))
    assert model.evaluations.recorded == 2


def test_a_few_kinds_are_held_and_the_one_not_used_for_longest_goes(monkeypatch):
    model = Scripted(net().eval())
    with torch.no_grad():
        for size in range(2, MOST_RECORDED + 4):
            for x in inputs(WARM + 1, size=size):
                assert torch.equal(model(x), model.module(x))
        assert model.evaluations.recorded == MOST_RECORDED
        monkeypatch.setattr(call_evaluations, "PATIENCE", 3 * WARM)
        for x in inputs(2 * WARM, size=3):
            model(x)
        for x in inputs(WARM + 1, size=20):
            model(x)
        assert model.evaluations.recorded == MOST_RECORDED
        replays = [moved(model, lambda x=x: model(x))[1] for size in (2, 3, 20) for x in inputs(1, size=size)]
    assert replays == [0, 1, 1]


def test_no_more_kinds_are_held_where_many_come_in_turn():
    model = Scripted(net().eval())
    with torch.no_grad():
        for _ in range(WARM + 2):
            for size in range(2, 2 * MOST_RECORDED + 2):
                for x in inputs(1, size=size):
                    assert torch.equal(model(x), model.module(x))
    assert model.evaluations.recorded == MOST_RECORDED


def test_kinds_that_take_turns_are_not_recorded_over_and_over(monkeypatch):
    monkeypatch.setattr(call_evaluations, "PATIENCE", WARM)
    model = Scripted(net().eval())
    with torch.no_grad():
        for _ in range(6):
            for size in range(2, MOST_RECORDED + 6):
                for x in inputs(WARM + 1, size=size):
                    assert torch.equal(model(x), model.module(x))
    assert len(model.recorders[0].graphs) == MOST_RECORDED + MOST_MOVED
    assert model.evaluations.recorded == MOST_RECORDED


def test_shapes_that_never_come_again_end_it(monkeypatch):
    monkeypatch.setattr(call_evaluations, "PATIENCE", 10)
    model = Scripted(net().eval())
    with torch.no_grad():
        for size in range(1, 14):
            model(torch.randn(size, 6))
    assert "keep changing" in model.evaluations.given_up


# --- what is given back -----------------------------------------------------------------------------


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    logits: torch.Tensor
    hidden: tuple
    name: str = "result"


class Nested(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.kind = nn.Linear(6, 8), nn.Linear(8, 3), kind

    def forward(self, x):
        hidden = self.first(x)
        logits = self.last(hidden)
        return {
            "tuple": lambda: (logits, [hidden, {"both": (hidden, 3, None)}]),
            "named": lambda: Pair(logits, hidden),
            "dataclass": lambda: Result(logits, (hidden, hidden)),
            "views": lambda: (*hidden.chunk(2, 1), hidden, hidden.t(), logits[:, 1:]),
            "expanded": lambda: logits[:1].expand(4, 3),
            "empty": lambda: (logits, hidden[:0], logits[:0].clone()),
            "nan": lambda: logits / (logits - logits) * logits.sign(),
        }[self.kind]()


def tensors_of(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Result):
        return tensors_of([tree.logits, tree.hidden])
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else []
    return [tensor for part in parts for tensor in tensors_of(part)]


def share_memory(one, other):
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["tuple", "named", "dataclass", "views", "expanded", "empty", "nan", "transformers"])
def test_outputs_come_in_the_containers_and_lie_as_the_scripts_own(kind, mode):
    module = giving_transformers_output(Nested, "transformers") if kind == "transformers" else Nested(kind)
    model = warmed(module, mode=mode)
    (x,) = inputs(1, seed=9)
    with mode():
        (mine, replays), theirs = moved(model, lambda: model(x)), module(x)
    assert replays == 1
    assert type(mine) is type(theirs)
    pairs = list(zip(tensors_of(mine), tensors_of(theirs), strict=True))
    for made, truth in pairs:
        torch.testing.assert_close(made, truth, rtol=0, atol=0, equal_nan=True)
        assert (made.stride(), made.is_inference()) == (truth.stride(), truth.is_inference())
    for one, other in itertools.pairwise(pairs):
        mine_share, theirs_share = map(share_memory, one, other)
        assert mine_share == theirs_share
    if kind == "tuple":
        assert mine[1][0] is mine[1][1]["both"][0]
        assert mine[1][1]["both"][1:] == (3, None)
    if kind == "dataclass":
        assert mine.name == "result"
    if kind == "transformers":
        assert mine.logits is mine["logits"]


def test_outputs_are_the_scripts_to_write_to():
    model, xs = warmed(Nested("views")), inputs(2)
    with torch.no_grad():
        first = model(xs[0])
        first[0].zero_()
        assert not first[2][:, :4].any()  # they share their memory, as the script's own do
        truth = model.module(xs[1])
        assert all(map(torch.equal, model(xs[1]), truth))


def test_a_plan_of_another_layout_gives_what_it_gives_eagerly():
    module = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
    twin = copy.deepcopy(module)
    plan = Numerics(layout="channels_last")
    made = []
    for one, mode in ((module, "captured"), (twin, "eager")):
        model = Scripted(one, (plan, Execution(mode=mode)))
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            made.append([model(torch.randn(2, 3, 6, 6, generator=generator)) for _ in range(WARM + 3)])
        if mode == "captured":
            assert model.replays == 4
    assert all(map(torch.equal, *made))
    assert all(out.is_contiguous() for out in made[0])
