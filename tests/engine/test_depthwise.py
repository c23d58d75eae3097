"""Depthwise convolutions without cuDNN: the same numbers, and which kernels torch is asked for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotlap import Plan, PlanError, Rig
from hotlap.core.plan import Numerics
from hotlap.engine.depthwise import depthwise_directly, depthwise_kinds
from hotlap.engine.precision import precision_context

CASES = {
    "plain": {},
    "strided": {"stride": 2},
    "dilated": {"dilation": 2, "padding": 2},
    "wide, without a bias": {"kernel_size": 5, "padding": 2, "bias": False},
    "of several outputs a channel": {"out_channels": 16},
    "padded by name": {"padding": "same"},
}


def layer_of(case, memory_format=torch.channels_last):
    torch.manual_seed(0)
    settings = {"in_channels": 8, "out_channels": 8, "kernel_size": 3, "padding": 1, "groups": 8, **CASES[case]}
    return nn.Conv2d(**settings).to(memory_format=memory_format)


@pytest.fixture(params=[torch.channels_last, torch.contiguous_format], ids=["channels last", "channels first"])
def images(request):
    torch.manual_seed(1)
    return torch.randn(4, 8, 10, 10).to(memory_format=request.param)


def passes(layer, x, precision, depthwise):
    """Output and gradients of one pass."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    with precision_context(Numerics(precision=precision, depthwise=depthwise), torch.device("cpu"), [layer])():
        made = layer(x)
    (made.float() * torch.linspace(-1, 1, made.numel()).view(made.shape)).sum().backward()
    return made, x.grad, *(p.grad for p in layer.parameters())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_passes_are_those_of_torch_and_lie_in_memory_as_they_would(images, case, precision):
    layer = layer_of(case)
    truth = passes(layer, images, precision, "library")
    made = passes(layer, images, precision, "direct")
    near = {"rtol": 2e-2, "atol": 2e-2} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-5}
    for one, other in zip(made, truth, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other, **near)
    if images.is_contiguous(memory_format=torch.channels_last):
        assert all(one.is_contiguous(memory_format=torch.channels_last) for one in made[:2])


def strides(shape):
    return torch.empty(shape).stride()


@pytest.mark.parametrize("size", [10, 1])
def test_torch_is_asked_for_channels_first_whose_strides_leave_nothing_open(monkeypatch, size):
    """By strides torch chooses its kernels, also by those of dimensions that are 1."""
    seen, own = [], F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *given: (seen.append(given), own(*given))[1])
    layer = layer_of("plain")
    assert layer.weight.stride() != strides(layer.weight.shape)
    passes(layer, torch.randn(4, 8, size, size).to(memory_format=torch.channels_last), "bf16", "direct")
    for tensor in seen[0][:2]:
        assert tensor.stride() == strides(tensor.shape)


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=2)], ids=["dense", "of groups"])
def test_other_convolutions_are_what_they_were(monkeypatch, layer):
    seen, own = [], F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *given: (seen.append(given), own(*given))[1])
    x = torch.randn(4, 8, 10, 10).to(memory_format=torch.channels_last)
    with depthwise_directly():
        layer(x)
    assert seen[0][0] is x
    assert seen[0][1] is layer.weight


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_comes_out_may_be_changed_in_place(images, precision):
    block = nn.Sequential(layer_of("plain"), nn.ReLU(inplace=True))
    truth, made = (passes(block, images, precision, depthwise) for depthwise in ("library", "direct"))
    for one, other in zip(made, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_gradients_of_gradients_are_those_of_torch():
    layer, x = layer_of("plain").double(), torch.randn(2, 8, 6, 6, dtype=torch.float64, requires_grad=True)

    def penalty():
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, layer.weight])

    truth = penalty()
    with depthwise_directly():
        made = penalty()
    for one, other in zip(made, truth, strict=True):
        torch.testing.assert_close(one, other)


def test_under_vmap_all_is_left_to_torch():
    layer, x = layer_of("plain"), torch.randn(3, 2, 8, 6, 6)
    truth = torch.vmap(layer)(x)
    with depthwise_directly():
        torch.testing.assert_close(torch.vmap(layer)(x), truth)


def test_torchs_function_is_back_whatever_happens_inside():
    before = F.conv2d
    with pytest.raises(KeyError), depthwise_directly():
        raise KeyError
    assert F.conv2d is before


def test_kinds_are_counted_once_and_other_convolutions_not_at_all():
    layers = [nn.Conv2d(8, 8, kernel, groups=8) for kernel in (3, 3, 5)]
    assert depthwise_kinds([nn.Sequential(*layers)]) == 2
    assert depthwise_kinds([nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Linear(4, 4)]) == 0


def test_models_without_them_run_in_no_context_more():
    numerics, device = Numerics(depthwise="direct"), torch.device("cpu")
    with precision_context(numerics, device, [nn.Conv2d(8, 8, 3)])():
        assert F.conv2d is torch.conv2d


def test_a_training_obeys_and_refuses_it_where_its_model_is_compiled():
    def losses(**choices):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(3, 8, 1), layer_of("plain"), nn.Flatten(), nn.Linear(8 * 36, 2))
        rig = Rig(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), device="cpu")
        rig.use(Plan().but(**choices))
        x, y = torch.randn(8, 3, 6, 6), torch.randint(0, 2, (8,))
        return torch.stack([rig.step((x, y)) for _ in range(4)])

    plain = {"kind": "loader"}
    torch.testing.assert_close(losses(layout="channels_last", depthwise="direct"), losses(layout="channels_last"))
    with pytest.raises(PlanError, match="not compiled"):
        losses(**plain, depthwise="direct", compile="model")
