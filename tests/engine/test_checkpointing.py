"""Checkpointed blocks: the same numbers to the last bit, less kept for the backward pass, no trace in the model."""

import copy
import pickle
import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain import class_data, parameters_of, small_mlp, twins
from torch import nn

from hotlap import Plan, PlanError, Rig
from hotlap.core.ledger import Ledger
from hotlap.engine.blocks import Checkpointing
from hotlap.script.training import ScriptTraining

BLOCKS = 4
CHECKPOINTED = Plan().but(checkpoint=BLOCKS)


class Encoder(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Named(nn.Module):
    """Takes a keyword named as one of torch's own settings, and gives a tuple."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x, *, scale, debug=None):
        y = torch.tanh(self.linear(x)) * scale
        return self.drop(y), {"sum": y.sum(1)}, debug


class WithKeywords(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Named() for _ in range(BLOCKS))
        self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 3)

    def forward(self, x):
        x, total = x.flatten(1)[:, :8], 0.0
        for number, block in enumerate(self.blocks):
            x, more, said = block(x=x, scale=self.scale, debug=number) if number % 2 else block(x, scale=self.scale)
            assert said == (number if number % 2 else None)
            total = total + more["sum"]
        return self.head(x) + total[:, None]


class Drawing(nn.Module):
    """Draws from all three generators of the host."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.sin(self.linear(x)) * random.random()
        return torch.cos(x * np.random.rand()) * torch.rand(()) + x.exp()


def stack_of(make, *, times=1):
    torch.manual_seed(0)
    blocks = nn.ModuleList(make() for _ in range(BLOCKS))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = blocks, nn.Linear(8, 3)

        def forward(self, x):
            x = x.flatten(1)[:, :8]
            for block in self.blocks:
                for _ in range(times):
                    x = block(x)
            return self.head(x)

    return Stack()


def linear_and(*more):
    return lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *(make() for make in more))


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())


MODELS = {
    "an encoder with dropout": Encoder,
    "keywords and tuples": WithKeywords,
    "a block called twice": lambda: stack_of(linear_and(lambda: nn.Dropout(0.2)), times=2),
    "batch norms": lambda: stack_of(linear_and(lambda: nn.BatchNorm1d(8))),
    "batch norms that average": lambda: stack_of(linear_and(lambda: nn.BatchNorm1d(8, momentum=None))),
    "spectral norms": lambda: stack_of(spectral),
    "draws on the host": lambda: stack_of(Drawing),
}


def data(samples=24, width=4):
    torch.manual_seed(3)
    return torch.randn(samples, width, 8), torch.randint(3, (samples,))


def trained(model, plan, *, epochs=3, between=None, batch_size=8):
    """Losses, and the gradients of every step."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    rig = Rig(model, lambda p: torch.optim.AdamW(p, lr=0.01), nn.CrossEntropyLoss(), plan=plan, device="cpu")
    losses, gradients = [], []
    for number, window in enumerate(rig.feed(data(), batch_size=batch_size, epochs=epochs)):
        losses.append(rig.step(window).clone())
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        if between is not None:
            between(rig, number)
    return torch.stack(losses), gradients


def assert_same(mine, theirs, *models):
    assert torch.equal(mine[0], theirs[0])
    for one, other in zip(mine[1], theirs[1], strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None) is (b is None)
            assert a is None or torch.equal(a, b)
    one, other = (model.state_dict() for model in models)
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def kept_bytes(model, plan):
    """Bytes that are kept for the backward pass of one step."""
    seen = {}

    def look(tensor):
        seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), plan=plan, device="cpu")
    rig.step(data())
    seen.clear()

    def loss_of(m, batch):
        # Only what the forward pass keeps: what is computed again is kept for a moment, block by block.
        with torch.autograd.graph.saved_tensors_hooks(look, lambda t: t):
            return nn.functional.cross_entropy(m(batch[0]), batch[1])

    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), loss_of, plan=plan, device="cpu")
    rig.step(data())
    return sum(seen.values())


# --- the same numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("blocks", [1, BLOCKS])
def test_losses_gradients_weights_and_buffers_are_those_of_a_plain_training(name, blocks):
    mine, theirs = twins(MODELS[name]())
    got = trained(mine, Plan().but(checkpoint=blocks))
    assert_same(got, trained(theirs, Plan()), mine, theirs)


@pytest.mark.parametrize("choices", [{"precision": "bf16"}, {"micro_batch": 3}, {"kind": "loader"}])
def test_they_are_so_under_other_choices_too(choices):
    mine, theirs = twins(Encoder())
    got = trained(mine, CHECKPOINTED.but(**choices))
    assert_same(got, trained(theirs, Plan().but(**choices)), mine, theirs)


def test_checkpointing_comes_and_goes_between_steps():
    mine, theirs = twins(Encoder())

    def between(rig, number):
        rig.use(rig.plan.but(checkpoint=(number + 1) % (BLOCKS + 1)))

    assert_same(trained(mine, Plan(), between=between), trained(theirs, Plan()), mine, theirs)


def test_frozen_blocks_stay_as_they_are_and_hand_gradients_on():
    mine, theirs = twins(Encoder())
    for model in (mine, theirs):
        for frozen in (model.encoder.layers[0], model.encoder.layers[2]):
            frozen.requires_grad_(False)
    got = trained(mine, CHECKPOINTED)
    assert_same(got, trained(theirs, Plan()), mine, theirs)
    assert mine.encoder.layers[0].linear1.weight.grad is None
    assert mine.encoder.layers[1].linear1.weight.grad is not None


def test_a_decoder_of_transformers_with_its_cache_trains_alike():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 8}
    torch.manual_seed(0)
    mine, theirs = twins(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    assert mine.config.use_cache
    tokens = torch.randint(11, (6, 5))

    def steps(model, plan):
        torch.manual_seed(1)
        rig = Rig(model, torch.optim.AdamW, lambda m, b: m(input_ids=b, labels=b).loss, plan=plan, device="cpu")
        return torch.stack([rig.step(tokens).clone() for _ in range(3)])

    torch.testing.assert_close(steps(mine, Plan().but(checkpoint=3)), steps(theirs, Plan()), rtol=1e-6, atol=1e-6)
    # Gradients of what a block reads twice may be added in another order: on some CPUs the last bit differs.
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# --- memory ------------------------------------------------------------------------------------------


def test_less_is_kept_for_the_backward_pass_with_every_block():
    kept = [kept_bytes(Encoder(), Plan().but(checkpoint=blocks)) for blocks in range(BLOCKS + 1)]
    assert all(more > less for more, less in pairwise(kept)), kept
    assert kept[-1] < kept[0] / 3


# --- the model ---------------------------------------------------------------------------------------


def test_between_steps_the_model_is_the_users_own():
    model = Encoder()
    blocks = [*model.encoder.layers]
    before, names = [set(vars(block)) for block in blocks], list(model.state_dict())

    def between(rig, number):
        assert [set(vars(block)) for block in blocks] == before
        assert [*model.encoder.layers] == blocks
        assert list(model.state_dict()) == names
        assert "forward" not in vars(pickle.loads(pickle.dumps(model)).encoder.layers[0])
        assert torch.equal(parameters_of(copy.deepcopy(model)), parameters_of(model))

    trained(model, CHECKPOINTED, epochs=1, between=between)


def test_a_step_that_fails_leaves_the_model_as_it_was():
    model = Encoder()
    rig = Rig(model, torch.optim.AdamW, nn.CrossEntropyLoss(), plan=CHECKPOINTED, device="cpu")
    with pytest.raises((RuntimeError, AssertionError)):
        rig.step((torch.randn(4, 4, 9), torch.zeros(4, dtype=torch.int64)))
    assert all("forward" not in vars(block) for block in model.encoder.layers)


def test_a_forward_that_a_library_has_put_on_a_block_is_called_and_stays():
    model, calls = Encoder(), []
    block = model.encoder.layers[0]
    own = block.forward

    def theirs(*args, **kwargs):
        calls.append(len(args))
        return own(*args, **kwargs)

    block.forward = theirs
    trained(model, CHECKPOINTED, epochs=1)
    assert len(calls) == 6  # three steps, and again in each backward pass
    assert vars(block)["forward"] is theirs


def test_hooks_run_once_a_step():
    model, seen = Encoder(), []
    block = model.encoder.layers[1]
    block.register_forward_pre_hook(lambda *_: seen.append("before"))
    block.register_forward_hook(lambda *_: seen.append("after"))
    block.register_full_backward_hook(lambda *_: seen.append("back"))
    trained(model, CHECKPOINTED, epochs=1)
    assert seen == ["before", "after", "back"] * 3


@pytest.mark.parametrize("how", ["evaluation mode", "without gradients"])
def test_nothing_is_computed_twice_where_there_is_no_backward_pass(how):
    model, calls = Encoder(), []
    model.encoder.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    x = data()[0]
    with Checkpointing(model, BLOCKS):
        if how == "evaluation mode":
            model.eval()
            model(x.requires_grad_()).sum().backward()
        else:
            with torch.no_grad():
                model(x)
    assert len(calls) == 1


# --- what cannot be ----------------------------------------------------------------------------------


def test_a_model_that_repeats_nothing_cannot_be_checkpointed():
    rig = Rig(small_mlp(), torch.optim.AdamW, nn.CrossEntropyLoss(), device="cpu")
    with pytest.raises(PlanError, match="needs repeated blocks, and Sequential has none"):
        rig.use(rig.plan.but(checkpoint=2))
    assert rig.step(class_data(4)).isfinite()


def test_no_more_blocks_than_there_are_can_be_checkpointed():
    rig = Rig(Encoder(), torch.optim.AdamW, nn.CrossEntropyLoss(), device="cpu")
    assert rig.supports(rig.plan.but(checkpoint=BLOCKS)) is None
    reason = rig.supports(rig.plan.but(checkpoint=BLOCKS + 1))
    assert reason == "memory.checkpoint=5 is too large: Encoder repeats 4 blocks"


def test_a_script_checkpoints_its_blocks_itself():
    model = Encoder()
    loop = SimpleNamespace(optimizers=[torch.optim.AdamW(model.parameters())], modules=[], before=4)
    script = ScriptTraining(loop, [], Ledger())
    assert "not in a script" in script.supports(script.plan.but(checkpoint=1))
