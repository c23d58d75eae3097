"""Encoders of `transformers` under captured steps on a real GPU: recorded whole, with the numbers of eager steps."""

import functools

import pytest
import torch
from plain import parameters_of
from tiny_encoders import WAYS, batch, tiny
from torch import nn

from hotlap import Plan, Rig
from hotlap.core.plan import Execution, Numerics
from hotlap.engine import step_cache as steps_module
from hotlap.engine.capture.captured_step import CapturedStep
from hotlap.script.calls.call import ModuleCall

pytest.importorskip("transformers")
DEVICE = torch.device("cuda")
EAGER = Plan().but(optimizer="fused")
CAPTURED = EAGER.but(mode="captured")
WIDTHS = (12, 16)
STEPS = 24
# The first DeBERTa fills its scores in bf16 with the lowest number of fp32, which fails by itself.
KINDS = [(*way, "fp32") for way in WAYS] + [(*way, "bf16") for way in WAYS if way[0] != "deberta"]
ROUNDING = {"fp32": 1e-4, "bf16": 2e-2}
"""Sums that many threads add to, as in the gradients of embeddings and of gathered scores, come in any order."""
BLOWN_UP = {"modernbert": 5}
"""How much more of it a model makes: this one begins with large gradients."""


def without_dropout(model):
    """A mask that hides nothing sends fused attention to another kernel, which draws its dropout in another order."""
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


def batches(*, padded):
    return [batch(WIDTHS[number % 2], padded=padded, samples=8, seed=number) for number in range(STEPS)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def trained(model, plan, *, padded=True):
    """The losses of all steps, and the rig."""
    torch.manual_seed(7)
    rig = Rig(model, sgd, lambda model, batch: model(**batch).loss, plan=plan, device="cuda")
    losses = torch.stack([rig.step(given) for given in batches(padded=padded)])
    return losses.float(), rig


def recorded(rig):
    return sum(step.recorded for step in rig._steps.values() if isinstance(step, CapturedStep))


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize(("name", "attention", "precision"), KINDS)
def test_an_encoder_is_recorded_for_each_width_and_learns_as_it_does_eagerly(name, attention, precision, padded):
    theirs, eager = trained(without_dropout(tiny(name, attention)), EAGER.but(precision=precision), padded=padded)
    mine, rig = trained(without_dropout(tiny(name, attention)), CAPTURED.but(precision=precision), padded=padded)
    works = "captured" if rig.given_up is None else f"eager, since {rig.given_up}"
    print(f"{name}, {attention} attention, {precision}, {'padded' if padded else 'full'} batches: {works}")
    assert rig.given_up is None
    assert recorded(rig) == len(WIDTHS), rig.ledger.to_lines()
    loose = ROUNDING[precision] * BLOWN_UP.get(name, 1)
    torch.testing.assert_close(mine, theirs, rtol=loose, atol=loose)
    torch.testing.assert_close(parameters_of(rig.model), parameters_of(eager.model), rtol=10 * loose, atol=10 * loose)
    rig.close()


@pytest.mark.parametrize(("name", "attention"), [("bert", "eager"), ("deberta-v3", "eager"), ("mpnet", "eager")])
def test_dropout_in_an_encoder_draws_what_it_would_have_drawn_eagerly(name, attention):
    theirs, _ = trained(tiny(name, attention), EAGER)
    mine, rig = trained(tiny(name, attention), CAPTURED)
    assert rig.given_up is None
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "attention"), [("bert", "sdpa"), ("deberta", "eager"), ("deberta-v3", "eager")])
def test_an_encoder_as_the_library_has_it_cannot_be_recorded(name, attention, monkeypatch):
    monkeypatch.setattr(steps_module, "rewire", lambda *models: None)
    _, rig = trained(tiny(name, attention), CAPTURED)
    assert rig.given_up is not None


@pytest.mark.parametrize("name", ["bert", "deberta-v3"])
def test_plans_taken_in_turn_keep_what_was_recorded_and_leave_the_model_as_it_was(name):
    theirs, _ = trained(without_dropout(tiny(name)), EAGER)
    model = without_dropout(tiny(name))
    torch.manual_seed(7)
    rig = Rig(model, sgd, lambda model, batch: model(**batch).loss, plan=CAPTURED, device="cuda")
    rig.keep_plans()
    attributes = [list(vars(layer)) for layer in model.modules()]
    losses = []
    for number, given in enumerate(batches(padded=True)):
        rig.use(EAGER if number in (18, 19) else CAPTURED)
        losses.append(rig.step(given))
        if number == 17:
            firsts = rig.warmup_steps
    assert rig.given_up is None
    assert rig.warmup_steps == firsts  # nothing had to be recorded again
    assert [list(vars(layer)) for layer in model.modules()] == attributes
    torch.testing.assert_close(torch.stack(losses).float(), theirs, rtol=1e-4, atol=1e-4)
    rig.close()


@pytest.mark.parametrize("name", ["bert", "deberta-v3"])
def test_an_encoder_in_a_script_of_the_users_own_is_recorded_too(name):
    def run(plan):
        torch.manual_seed(7)
        model = without_dropout(tiny(name)).to(DEVICE)
        optimizer = sgd(model.parameters())
        call = ModuleCall(model, device=DEVICE)
        call.use(*plan)
        losses = []
        for given in batches(padded=True):
            given = {key: tensor.to(DEVICE) for key, tensor in given.items()}
            optimizer.zero_grad()
            loss = call(functools.partial(nn.Module.__call__, model), (), given).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        return torch.stack(losses), call

    theirs, _ = run((Numerics(), Execution()))
    mine, call = run((Numerics(), Execution(mode="captured")))
    assert call.given_up is None
    assert call._way.recorded == len(WIDTHS)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
