"""Gradients from what comes in at outputs on: torch's own, without what torch loads to compare shapes."""

import pytest
import torch
from torch import nn

from hotlap.engine import differentiating
from hotlap.engine.differentiating import gradients


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("how", [{}, {"retain_graph": True}, {"create_graph": True}], ids=str)
def test_gradients_are_torchs_own(how, is_loaded, monkeypatch):
    monkeypatch.setattr(differentiating, "_CHECKS", "sys" if is_loaded else "no such module")
    torch.manual_seed(1)
    layer, unused, x = nn.Linear(4, 3), torch.randn(2, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    inputs = [x, *layer.parameters(), unused]

    def outputs():
        return [torch.tanh(layer(x)), layer(x).square().sum(1)]

    coming = [torch.randn(5, 3), torch.randn(5)]
    made, truth = outputs(), torch.autograd.grad(outputs(), inputs, coming, allow_unused=True, **how)
    found = gradients(made, inputs, coming, **how)
    assert found[-1] is None
    for one, other in zip(found[:-1], truth[:-1], strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
    if how:
        gradients(made, inputs, coming)
    else:
        with pytest.raises(RuntimeError, match="a second time"):
            gradients(made, inputs, coming)


def test_shapes_that_do_not_fit_get_torchs_own_words():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        gradients([x * 2], [x], [torch.ones(2)])


def test_torch_loads_nothing_more_for_it(torch_forks, tmp_path):
    code = (
        "import sys, torch; from hotlap.engine.differentiating import _CHECKS, gradients\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "assert gradients([x * 2], [x], [torch.ones(3)])[0].tolist() == [2, 2, 2]\n"
        "assert _CHECKS not in sys.modules"
    )
    done = torch_forks.run("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
