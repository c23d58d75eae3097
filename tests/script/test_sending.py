"""What a script sends to its device: answered with a copy that is there, or by torch as ever."""

import gc
import weakref

import pytest
import torch

from hotlap.script.feed.sending import KEPT, Sending

META = torch.device("meta")
CPU = torch.device("cpu")


class Copied:
    """A copy that is there, and who came for it."""

    def __init__(self, tensor):
        self.tensor, self.asked, self.given_up = tensor, 0, 0

    def landed(self):
        self.asked += 1
        return self.tensor

    def abandoned(self):
        self.given_up += 1


@pytest.fixture(params=[META, CPU], ids=str)
def sending(request):
    before = torch.Tensor.to, torch.Tensor.cuda
    sending = Sending(request.param)
    sending.on_fault = lambda error: pytest.fail(repr(error))
    sending.install()
    yield sending
    sending.remove()
    assert (torch.Tensor.to, torch.Tensor.cuda) == before
    assert "to" not in vars(torch.Tensor)
    assert "cuda" not in vars(torch.Tensor)


def is_of(tensor, copy):
    """Whether a tensor is what somebody was given of a copy: it has the copy's memory."""
    return tensor.untyped_storage()._cdata == copy.tensor.untyped_storage()._cdata


def given(sending, tensor=None):
    """A tensor as the script gets it, and its copy."""
    tensor = torch.arange(6.0).reshape(2, 3) if tensor is None else tensor
    copy = Copied(torch.empty_like(tensor, device=sending.device))
    sending.serve([(tensor, copy)])
    return tensor, copy


CALLS = {
    "a device": lambda t, d: t.to(d),
    "its name": lambda t, d: t.to(str(d)),
    "by keyword": lambda t, d: t.to(device=d),
    "without blocking": lambda t, d: t.to(d, non_blocking=True),
    "in positions": lambda t, d: t.to(d, torch.float32, True, False),
    "its own dtype": lambda t, d: t.to(d, dtype=torch.float32),
    "preserved": lambda t, d: t.to(d, memory_format=torch.preserve_format),
    "like another": lambda t, d: t.to(torch.empty(1, device=d)),
    "like another by keyword": lambda t, d: t.to(other=torch.empty(1, device=d), non_blocking=True),
    "by the class": lambda t, d: torch.Tensor.to(t, d),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_asks_for_the_device_alone_is_answered_with_the_copy(sending, call):
    tensor, copy = given(sending)
    assert is_of(CALLS[call](tensor, sending.device), copy)
    assert sending.answered == 1


OTHERS = {
    "a dtype": lambda t, d: t.to(torch.float64),
    "another dtype there": lambda t, d: t.to(d, torch.float64),
    "a copy": lambda t, d: t.to(d, copy=True),
    "another layout": lambda t, d: t.to(d, memory_format=torch.contiguous_format),
    "like another dtype": lambda t, d: t.to(torch.empty(1, dtype=torch.float64, device=d)),
    "more after another": lambda t, d: t.to(torch.empty(1, device=d), True, True),
    "a view of it": lambda t, d: t[:1].to(d),
    "another tensor": lambda t, d: t.clone().to(d),
}


@pytest.mark.parametrize("call", OTHERS)
def test_what_asks_for_anything_else_is_torchs_to_answer(sending, call):
    tensor, copy = given(sending)
    wanted = OTHERS[call](tensor.clone(), sending.device)
    made = OTHERS[call](tensor, sending.device)
    assert not is_of(made, copy)
    assert (made.dtype, made.device, made.stride()) == (wanted.dtype, wanted.device, wanted.stride())
    assert sending.answered == 0
    assert copy.asked == 0
    assert is_of(tensor.to(sending.device), copy), "it is still there"


def test_another_device_is_torchs_to_reach():
    sending = Sending(META)
    sending.install()
    try:
        tensor, copy = given(sending)
        assert tensor.to("cpu") is tensor
        with pytest.raises(RuntimeError):
            tensor.to("nowhere")
        with pytest.raises(TypeError):
            tensor.to(META, nothing=1)
        assert is_of(tensor.to(META), copy)
    finally:
        sending.remove()


def test_a_copy_counts_no_writes_though_it_was_written_once(sending):
    tensor, copy = given(sending)
    copy.tensor.copy_(tensor)
    assert copy.tensor._version == 1
    made = tensor.to(sending.device)
    assert made._version == 0
    assert made.is_leaf
    assert made._base is None
    made.add_(1)
    assert made._version == 1


def test_a_copy_is_given_out_once(sending):
    tensor, copy = given(sending)
    first = tensor.to(sending.device)
    second = tensor.to(sending.device)
    assert is_of(first, copy)
    assert second is not first
    assert copy.asked == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.mul_(2),
        lambda t: t[0].zero_(),
        lambda t: t.detach().add_(1),
        lambda t: t.requires_grad_(),
        lambda t: t.set_(torch.ones(2, 3)),
        lambda t: t.unsqueeze_(0),
        lambda t: t.__setitem__(0, 5.0),
    ],
)
def test_a_tensor_that_was_written_to_is_sent_as_it_is(sending, write):
    tensor, copy = given(sending)
    write(tensor)
    made = tensor.to(sending.device)
    assert not is_of(made, copy)
    assert made.shape == tensor.shape
    assert made.requires_grad == tensor.requires_grad
    assert (copy.asked, copy.given_up) == (0, 1)


def test_data_that_is_put_in_its_place_is_seen(sending):
    tensor, copy = given(sending)
    tensor.data = torch.ones(2, 3)
    assert not is_of(tensor.to(sending.device), copy)


def test_a_copy_goes_with_its_tensor(sending):
    tensor, copy = given(sending)
    known = weakref.ref(copy.tensor)
    del tensor
    assert copy.given_up == 1
    del copy
    assert known() is None


def test_a_copy_that_was_given_out_is_the_scripts_alone(sending):
    tensor, copy = given(sending)
    made = tensor.to(sending.device)
    known = weakref.ref(made)
    del made, copy
    assert known() is None
    assert tensor is not None


def test_of_tensors_that_the_script_keeps_only_the_last_copies_are_kept(sending):
    kept = [given(sending) for _ in range(KEPT + 3)]
    assert [copy.given_up for _, copy in kept] == [1] * 3 + [0] * KEPT
    assert not is_of(kept[0][0].to(sending.device), kept[0][1])
    assert is_of(kept[-1][0].to(sending.device), kept[-1][1])


def test_tensors_that_come_and_go_in_the_same_place_are_told_apart(sending):
    for _ in range(5 * KEPT):
        tensor, copy = given(sending)
        assert is_of(tensor.to(sending.device), copy)
        del tensor
    gc.collect()
    assert not sending._served


def test_inference_tensors_are_never_answered_for(sending):
    with torch.inference_mode():
        tensor, copy = given(sending)
        made = tensor.to(sending.device)
    assert not is_of(made, copy)
    assert copy.given_up == 1
    outside = torch.arange(3.0)
    with torch.inference_mode():
        inside = Copied(torch.empty(3, device=sending.device))
    sending.serve([(outside, inside)])
    made = outside.to(sending.device)
    assert not made.is_inference()


def test_a_copy_that_cannot_be_had_is_torchs_to_make(sending):
    faults = []
    sending.on_fault = faults.append

    class Fails(Copied):
        def landed(self):
            raise ValueError("gone")

    tensor = torch.ones(3)
    sending.serve([(tensor, Fails(None))])
    assert tensor.to(sending.device).shape == (3,)
    assert [str(fault) for fault in faults] == ["gone"]
    wrong = torch.ones(3)
    sending.serve([(wrong, Copied(torch.ones(4, device=sending.device)))])
    assert wrong.to(sending.device).shape == (3,)


def test_cuda_is_answered_on_its_device_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    sending = Sending(torch.device("cuda"))
    sending.install()
    try:
        for call in (
            lambda t: t.cuda(),
            lambda t: t.cuda(1),
            lambda t: t.cuda(device="cuda:1", non_blocking=True),
            lambda t: t.to("cuda"),
            lambda t: t.to("cuda:1"),
            lambda t: t.to(1),
        ):
            tensor = torch.ones(3)
            copy = Copied(torch.zeros(3))
            sending.serve([(tensor, copy)])
            assert is_of(call(tensor), copy)
        tensor, copy = torch.ones(3), Copied(torch.zeros(3))
        sending.serve([(tensor, copy)])
        for call in (lambda t: t.cuda(0), lambda t: t.to("cuda:0")):
            with pytest.raises((AssertionError, RuntimeError)):  # torch's own, without a GPU
                call(tensor)
        assert is_of(tensor.cuda(), copy)
    finally:
        sending.remove()


def test_what_is_served_while_nobody_answers_is_given_up():
    sending = Sending(META)
    _, copy = given(sending)
    assert copy.given_up == 1
    sending.install()
    sending.install()
    tensor, copy = given(sending)
    sending.remove()
    sending.remove()
    assert copy.given_up == 1
    assert tensor.to(META).device == META


def test_who_has_put_something_else_in_its_place_since_is_left_alone():
    sending = Sending(META)
    sending.install()
    ours = torch.Tensor.to

    def theirs(tensor, *args, **kwargs):
        return ours(tensor, *args, **kwargs)

    torch.Tensor.to = theirs
    try:
        sending.remove()
        assert torch.Tensor.to is theirs
        assert torch.ones(2).to(META).device == META
    finally:
        del torch.Tensor.to


def test_other_classes_modes_and_compiled_functions_are_as_ever(sending):
    class Own(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Own).to(torch.float64)) is Own
    assert torch.nn.Parameter(torch.ones(2)).to(torch.float64).dtype == torch.float64
    with torch.device("meta"):
        assert torch.ones(2, device="cpu").to(torch.float64).device == CPU
    assert torch.nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64
    doubled = torch.compile(lambda t: t.to(torch.float64) * 2, backend="eager", fullgraph=True)
    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
