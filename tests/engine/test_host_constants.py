"""Constants made on the host and copied elsewhere in each pass; the meta device stands in for the GPU."""

import numpy as np
import pytest
import torch

from hotlap.engine.capture.host_constants import HostConstants
from hotlap.engine.capture.recording import NotRecordedError
from hotlap.script.advice import Waits
from hotlap.script.feed.device_copies import DeviceCopies

GPU = torch.device("meta")
HELD, ASKED = torch.ones(3), torch.overrides.has_torch_function
X = torch.empty(4, 5, device=GPU)
COPIED = {
    "a mask": lambda: torch.triu(torch.full((3, 3), float("-inf")), diagonal=1).to(X.device),
    "in another precision": lambda: torch.ones(3).to(X.device, torch.bfloat16),
    "like another tensor": lambda: torch.ones(3).to(X),
    "of its type": lambda: torch.arange(3.0).type_as(X),
    "numbers": lambda: torch.tensor([0.2, 0.8], device=X.device),
    "one number": lambda: torch.tensor(0.5).to(X.device),
    "numbers of its kind": lambda: X.new_tensor([1, 2]),
    "filled in place": lambda: torch.zeros(3).fill_(2).add_(torch.ones(3)).to(X.device),
    "a part": lambda: torch.arange(12).view(3, 4)[1:, ::2].to(X.device),
    "of the shape of what is there": lambda: torch.zeros(X.shape[0], 2).to(X.device),
    "an index": lambda: X[:, torch.tensor([0, 2])],
    "a list as an index": lambda: X[..., [0, 2, 3]],
    "into a tensor that is there": lambda: torch.empty_like(X).copy_(torch.ones(5)),
}
OTHERS = {
    "from before": lambda: HELD.to(X.device),
    "made of one from before": lambda: (torch.zeros(3) + HELD).to(X.device),
    "written from one from before": lambda: torch.zeros(3).copy_(HELD).to(X.device),
    "of numpy": lambda: torch.from_numpy(np.ones(3)).to(X.device),
    "numbers of numpy": lambda: torch.tensor(np.ones(3)).to(X.device),
    "lent to numpy": lambda: lent(torch.zeros(3)).to(X.device),
    "with a gradient": lambda: torch.zeros(3, requires_grad=True).to(X.device),
    "made elsewhere": lambda: torch.FloatTensor([1.0, 2.0]).to(X.device),
}


def lent(tensor):
    tensor.numpy()[0] = 5
    return tensor


@pytest.mark.parametrize("kind", COPIED)
def test_a_constant_is_copied_once_and_given_anew_each_time(kind):
    constants = HostConstants(GPU)
    with constants:
        first = COPIED[kind]()
    ((_, kept),) = filter(None, constants._copies)
    for _ in range(2):  # as in a window of two updates
        with constants:
            one = COPIED[kind]()
        assert (one.shape, one.dtype, one.stride(), one.device) == (first.shape, first.dtype, first.stride(), GPU)
        assert one is not kept


def test_a_constant_is_known_where_torchs_functions_are_patched():
    waits = Waits()
    waits.install()
    sending = DeviceCopies(GPU)
    sending.install()
    constants = HostConstants(GPU)
    try:
        for _ in range(2):
            with constants:
                torch.ones(3).to(GPU)
    finally:
        waits.remove()
        sending.remove()
    assert len(constants._copies) == 1
    assert None not in constants._copies


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_constant_is_left_alone(kind):
    constants = HostConstants(GPU)
    for _ in range(2):
        with constants:
            OTHERS[kind]()
    assert not any(constants._copies)


def test_what_stays_on_the_host_is_what_it_was():
    constants = HostConstants(torch.device("meta"))
    for _ in range(2):
        with constants:
            made = torch.ones(3).to(torch.float64), torch.tensor([1, 2]), torch.arange(4).type_as(HELD)
        torch.testing.assert_close(made, (torch.ones(3).double(), torch.tensor([1, 2]), torch.arange(4.0)))
    assert constants._copies == [None] * 3


def test_the_kept_copy_is_not_what_the_pass_writes_to():
    constants = HostConstants(torch.device("cpu"))  # where numbers can be looked at
    with constants:
        torch.ones(3).to("cpu", copy=True).zero_()
    for _ in range(2):
        with constants:
            made = torch.ones(3).to("cpu", copy=True)
            assert torch.equal(made, torch.ones(3))
            made.zero_()


@pytest.mark.parametrize("make", [lambda n: torch.full((3,), n).to(GPU), lambda n: torch.tensor([n], device=GPU)])
def test_a_constant_that_differs_from_call_to_call_is_refused(make):
    constants = HostConstants(GPU)
    with constants:
        make(1.0)
    with constants, pytest.raises(NotRecordedError, match="differs from call to call"):
        make(2.0)


def test_constants_that_come_up_later_are_refused():
    constants = HostConstants(GPU)
    with constants:
        pass
    with constants, pytest.raises(NotRecordedError, match="some calls only"):
        torch.ones(3).to(GPU)


def test_constants_that_are_left_out_later_are_refused():
    """Those behind them would get the copy of another one."""
    constants = HostConstants(GPU)
    with constants:
        torch.ones(3).to(GPU, torch.bfloat16)
        torch.ones(3).to(GPU)
    with pytest.raises(NotRecordedError, match="some calls only"), constants:
        torch.ones(3).to(GPU)


def test_an_error_inside_is_the_one_that_is_raised():
    constants = HostConstants(GPU)
    with constants:
        torch.ones(3).to(GPU)
    with pytest.raises(KeyError), constants:
        raise KeyError


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_numbers_of_a_tensors_kind_have_the_dtype_that_torch_gives_them(dtype):
    like = torch.zeros(2, dtype=torch.bfloat16)
    own = like.new_tensor([1, 2], dtype=dtype)
    with HostConstants(GPU):
        made = like.new_tensor([1, 2], dtype=dtype)
    assert made.dtype == own.dtype
    assert torch.equal(made, own)


def test_what_lies_where_a_constant_once_was_is_none():
    """`set_` and `resize_` give memory up, which another tensor may get."""
    constants = HostConstants(GPU)
    with constants:
        constant = torch.zeros(3)
        (place,) = constants._constants
        constant.set_(torch.zeros(1))
        constants._constants[HELD.data_ptr()] = constants._constants[place]
        HELD.to(GPU)
    assert not constants._copies


def test_layers_take_their_fast_path_as_without_it(monkeypatch):
    taken = []
    own = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *given: taken.append(1) or own(*given))
    layer, x = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = layer(x)
        with HostConstants(GPU):
            assert torch.equal(layer(x), plain)
        assert len(taken) == 2
        with torch.device("cpu"), HostConstants(GPU):  # a mode of the script's own
            layer(x)
        assert len(taken) == 2
    assert torch.overrides.has_torch_function is ASKED
