"""What a script sends to its device: answered with a copy that is there, or by torch as ever."""

import gc
import weakref

import pytest
import torch

from hotlap.script.feed.device_copies import KEPT, DeviceCopies

META = torch.device("meta")
CPU = torch.device("cpu")


class Copied:
    """A copy that is there, and who came for it."""

    def __init__(self, tensor):
        self.tensor, self.asked, self.given_up = tensor, 0, 0

    def on_device(self):
        self.asked += 1
        return self.tensor

    def discard(self):
        self.given_up += 1


@pytest.fixture(params=[META, CPU], ids=str)
def device_copies(request):
    before = torch.Tensor.to, torch.Tensor.cuda
    device_copies = DeviceCopies(request.param)
    device_copies.on_fault = lambda error: pytest.fail(repr(error))
    device_copies.install()
    yield device_copies
    device_copies.remove()
    assert (torch.Tensor.to, torch.Tensor.cuda) == before
    assert "to" not in vars(torch.Tensor)
    assert "cuda" not in vars(torch.Tensor)


def is_of(tensor, copy):
    """Whether a tensor is what somebody was given of a copy: it has the copy's memory."""
    return tensor.untyped_storage()._cdata == copy.tensor.untyped_storage()._cdata


def given(device_copies, tensor=None):
    """A tensor as the script gets it, and its copy."""
    tensor = torch.arange(6.0).reshape(2, 3) if tensor is None else tensor
    copy = Copied(torch.empty_like(tensor, device=device_copies.device))
    device_copies.serve([(tensor, copy)])
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
def test_what_asks_for_the_device_alone_is_answered_with_the_copy(device_copies, call):
    tensor, copy = given(device_copies)
    assert is_of(CALLS[call](tensor, device_copies.device), copy)
    assert device_copies.answered == 1


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
def test_what_asks_for_anything_else_is_torchs_to_answer(device_copies, call):
    tensor, copy = given(device_copies)
    wanted = OTHERS[call](tensor.clone(), device_copies.device)
    made = OTHERS[call](tensor, device_copies.device)
    assert not is_of(made, copy)
    assert (made.dtype, made.device, made.stride()) == (wanted.dtype, wanted.device, wanted.stride())
    assert device_copies.answered == 0
    assert copy.asked == 0
    assert is_of(tensor.to(device_copies.device), copy), "it is still there"


def test_another_device_is_torchs_to_reach():
    device_copies = DeviceCopies(META)
    device_copies.install()
    try:
        tensor, copy = given(device_copies)
        assert tensor.to("cpu") is tensor
        with pytest.raises(RuntimeError):
            tensor.to("nowhere")
        with pytest.raises(TypeError):
            tensor.to(META, nothing=1)
        assert is_of(tensor.to(META), copy)
    finally:
        device_copies.remove()


def test_a_copy_counts_no_writes_though_it_was_written_once(device_copies):
    tensor, copy = given(device_copies)
    copy.tensor.copy_(tensor)
    assert copy.tensor._version == 1
    made = tensor.to(device_copies.device)
    assert made._version == 0
    assert made.is_leaf
    assert made._base is None
    made.add_(1)
    assert made._version == 1


def test_a_copy_is_given_out_once(device_copies):
    tensor, copy = given(device_copies)
    first = tensor.to(device_copies.device)
    second = tensor.to(device_copies.device)
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
def test_a_tensor_that_was_written_to_is_sent_as_it_is(device_copies, write):
    tensor, copy = given(device_copies)
    write(tensor)
    made = tensor.to(device_copies.device)
    assert not is_of(made, copy)
    assert made.shape == tensor.shape
    assert made.requires_grad == tensor.requires_grad
    assert (copy.asked, copy.given_up) == (0, 1)


def test_data_that_is_put_in_its_place_is_seen(device_copies):
    tensor, copy = given(device_copies)
    tensor.data = torch.ones(2, 3)
    assert not is_of(tensor.to(device_copies.device), copy)


def test_a_copy_goes_with_its_tensor(device_copies):
    tensor, copy = given(device_copies)
    known = weakref.ref(copy.tensor)
    del tensor
    assert copy.given_up == 1
    del copy
    assert known() is None


def test_a_copy_that_was_given_out_is_the_scripts_alone(device_copies):
    tensor, copy = given(device_copies)
    made = tensor.to(device_copies.device)
    known = weakref.ref(made)
    del made, copy
    assert known() is None
    assert tensor is not None


def test_of_tensors_that_the_script_keeps_only_the_last_copies_are_kept(device_copies):
    kept = [given(device_copies) for _ in range(KEPT + 3)]
    assert [copy.given_up for _, copy in kept] == [1] * 3 + [0] * KEPT
    assert not is_of(kept[0][0].to(device_copies.device), kept[0][1])
    assert is_of(kept[-1][0].to(device_copies.device), kept[-1][1])


def test_tensors_that_come_and_go_in_the_same_place_are_told_apart(device_copies):
    for _ in range(5 * KEPT):
        tensor, copy = given(device_copies)
        assert is_of(tensor.to(device_copies.device), copy)
        del tensor
    gc.collect()
    assert not device_copies._served


def test_inference_tensors_are_never_answered_for(device_copies):
    with torch.inference_mode():
        tensor, copy = given(device_copies)
        made = tensor.to(device_copies.device)
    assert not is_of(made, copy)
    assert copy.given_up == 1
    outside = torch.arange(3.0)
    with torch.inference_mode():
        inside = Copied(torch.empty(3, device=device_copies.device))
    device_copies.serve([(outside, inside)])
    made = outside.to(device_copies.device)
    assert not made.is_inference()


def test_a_copy_that_cannot_be_had_is_torchs_to_make(device_copies):
    faults = []
    device_copies.on_fault = faults.append

    class Fails(Copied):
        def on_device(self):
            raise ValueError("gone")

    tensor = torch.ones(3)
    device_copies.serve([(tensor, Fails(None))])
    assert tensor.to(device_copies.device).shape == (3,)
    assert [str(fault) for fault in faults] == ["gone"]
    wrong = torch.ones(3)
    device_copies.serve([(wrong, Copied(torch.ones(4, device=device_copies.device)))])
    assert wrong.to(device_copies.device).shape == (3,)


def test_cuda_is_answered_on_its_device_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device_copies = DeviceCopies(torch.device("cuda"))
    device_copies.install()
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
            device_copies.serve([(tensor, copy)])
            assert is_of(call(tensor), copy)
        tensor, copy = torch.ones(3), Copied(torch.zeros(3))
        device_copies.serve([(tensor, copy)])
        for call in (lambda t: t.cuda(0), lambda t: t.to("cuda:0")):
            with pytest.raises((AssertionError, RuntimeError)):  # torch's own, without a GPU
                call(tensor)
        assert is_of(tensor.cuda(), copy)
    finally:
        device_copies.remove()


def test_what_is_served_while_nobody_answers_is_given_up():
    device_copies = DeviceCopies(META)
    _, copy = given(device_copies)
    assert copy.given_up == 1
    device_copies.install()
    device_copies.install()
    tensor, copy = given(device_copies)
    device_copies.remove()
    device_copies.remove()
    assert copy.given_up == 1
    assert tensor.to(META).device == META


def test_who_has_put_something_else_in_its_place_since_is_left_alone():
    device_copies = DeviceCopies(META)
    device_copies.install()
    ours = torch.Tensor.to

    def theirs(tensor, *args, **kwargs):
        return ours(tensor, *args, **kwargs)

    torch.Tensor.to = theirs
    try:
        device_copies.remove()
        assert torch.Tensor.to is theirs
        assert torch.ones(2).to(META).device == META
    finally:
        del torch.Tensor.to


def test_other_classes_modes_and_compiled_functions_are_as_ever(device_copies):
    class Own(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Own).to(torch.float64)) is Own
    assert torch.nn.Parameter(torch.ones(2)).to(torch.float64).dtype == torch.float64
    with torch.device("meta"):
        assert torch.ones(2, device="cpu").to(torch.float64).device == CPU
    assert torch.nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64
    doubled = torch.compile(lambda t: t.to(torch.float64) * 2, backend="eager", fullgraph=True)
    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
