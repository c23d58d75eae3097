"""Gradients of another precision: what agrees, what does not, and what is too little to matter."""

import pytest
import torch

from hotlap.tuner.agreement import IMMATERIAL, Outcome, alike

COUNT = 4096


def outcome(**sizes):
    """Gradients of these sizes, each in a direction of its own, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return {name: size * torch.randn(COUNT, generator=generator) for name, size in sizes.items()}


def judged(change, *, small, **settings):
    truth = outcome(large=1.0, small=small, other=1.0)
    made = {**truth, "small": change(truth["small"])}
    return alike(Outcome(loss=1.0, gradients=truth), Outcome(loss=1.0, gradients=made), None, {}, **settings)


CHANGES = {
    "another direction": lambda grad: grad.roll(1),
    "turned round": lambda grad: -grad,
    "missing": torch.zeros_like,
    "half as long again": lambda grad: 1.5 * grad,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_layer_that_disagrees_is_named_unless_it_hardly_matters(change):
    found = judged(change, small=0.01)
    assert "the gradient of small" in found.why
    assert found.figures["disagreeing"] > IMMATERIAL
    found = judged(change, small=1e-4)
    assert found.why is None
    assert 0 < found.figures["disagreeing"] < IMMATERIAL


def test_a_layer_whose_noise_is_large_matters():
    found = judged(lambda grad: 300 * grad.roll(1), small=1e-4)
    assert "the gradient of small" in found.why


def test_many_that_hardly_matter_do_together():
    sizes = {f"small {number}": 1e-4 for number in range(40)}
    truth = outcome(large=1.0, other=1.0, **sizes)
    made = {name: grad.roll(1) if "small" in name else grad for name, grad in truth.items()}
    assert alike(Outcome(loss=1.0, gradients=truth), Outcome(loss=1.0, gradients=made), None, {}).why is not None


def test_where_nothing_may_disagree_the_smallest_is_named():
    assert judged(CHANGES["missing"], small=1e-4, immaterial=0.0).why is not None


def test_what_agrees_disagrees_nowhere():
    assert judged(lambda grad: grad * 1.001, small=1e-4).figures["disagreeing"] == 0.0
