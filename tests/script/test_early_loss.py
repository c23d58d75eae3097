"""Losses read by way of early copies: the same numbers, and torch's own answer wherever something is odd."""

import functools
import gc
import threading
import warnings
import weakref

import pytest
import torch
from calling import CAPTURED, CPU, FakeRecorder, net
from torch import Tensor, nn

from hotlap.script.calls import early_loss as early_losses
from hotlap.script.calls.call import ModuleCall
from hotlap.script.calls.early_loss import MOST, MOST_KEPT_COPIES, SEEN_READS, EarlyLoss, PinnedNumber
from hotlap.script.calls.loss_replay import LossReplay


class Copied:
    """A place that says how often it was written to and read."""

    taken = read = 0

    def take(self, number):
        Copied.taken += 1
        self._number = number.detach().clone()

    def value(self):
        Copied.read += 1
        return self._number.tolist()


def of_torch():
    """What may be patched."""
    methods = [vars(Tensor).get(name) for name in ("item", "__float__", "__bool__", "isnan", "to", "cuda", "backward")]
    functions = [torch.isnan, torch.isinf, torch.isfinite, torch.amp.GradScaler.scale, torch.cuda.CUDAGraph.replay]
    return [*methods, *functions]


@pytest.fixture
def early_loss():
    before = of_torch()
    Copied.taken = Copied.read = 0
    made = EarlyLoss(CPU, Copied)
    loss_replay = LossReplay(made)
    loss_replay.put()
    made.use(early=True)
    yield made
    loss_replay.take_out()
    made.close()
    assert of_torch() == before


def losses(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        weights = torch.randn(5, generator=generator, requires_grad=True)
        yield (weights * weights).sum()


def kept_samples():
    for loss in losses(SEEN_READS):
        loss.backward()
        loss.item()


def test_a_loss_that_is_read_behind_its_backward_pass_is_copied_before_it_from_then_on(early_loss):
    for number, loss in enumerate(losses(10)):
        own = loss.detach().clone().item()
        loss.backward()
        assert Copied.taken == max(0, number + 1 - SEEN_READS)
        assert loss.item() == own
    assert early_loss.answered == Copied.read == 10 - SEEN_READS


@pytest.mark.parametrize("read", [lambda loss: loss.item(), float, lambda loss: round(float(loss), 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_number_is_the_one_that_torch_gives(early_loss, read, dtype):
    kept_samples()
    (loss,) = (loss.to(dtype) for loss in losses(1, seed=3))
    own = read(loss.detach().clone())
    loss.backward()
    found = read(loss)
    assert found == own
    assert type(found) is type(own)
    assert early_loss.answered == 1


@pytest.mark.parametrize("read", [lambda loss: loss.detach().item(), "{:.6f}".format, lambda loss: loss.tolist()])
def test_what_is_read_otherwise_is_read_by_torch(early_loss, read):
    kept_samples()
    (loss,) = losses(1, seed=3)
    own = read(loss.detach().clone())
    loss.backward()
    assert read(loss) == own


def test_a_warning_of_torchs_own_reading_names_the_scripts_line(early_loss):
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            number = float(next(losses(1)))
    finally:
        torch.set_warn_always(before)
    assert number == float(next(losses(1)).detach())
    assert [one.filename for one in found] == [__file__]


def test_what_was_written_to_since_is_read_as_it_is_now(early_loss):
    kept_samples()
    (loss,) = losses(1)
    own = loss.item()
    loss.backward()
    with torch.no_grad():
        loss.mul_(2)
    assert loss.item() == 2 * own
    assert early_loss.answered == 0


def test_a_second_reading_waits_no_more_than_the_first(early_loss):
    kept_samples()
    for loss in losses(3 * MOST_KEPT_COPIES):
        own = loss.detach().clone().item()
        loss.backward()
        assert (loss.item(), float(loss)) == (own, own)
    assert early_loss.answered == 2 * 3 * MOST_KEPT_COPIES


def test_losses_that_are_read_in_every_second_step_are_no_habit(early_loss):
    for number, loss in enumerate(losses(40)):
        loss.backward()
        if number % 2:
            for _ in range(3):
                loss.item()
    assert Copied.taken == 0


def test_on_another_stream_than_the_copy_torch_reads(early_loss, monkeypatch):
    """There the loss may have been made after it was copied."""
    kept_samples()
    here = ["one"]
    monkeypatch.setattr(early_losses, "current_stream", lambda _: here[0])
    monkeypatch.setattr(early_losses, "is_stream_capturing", lambda: False)
    first, second = losses(2)
    first.backward()
    here[0] = "other"
    assert first.item() == first.detach().clone().item()
    assert (Copied.taken, early_loss.answered) == (1, 0)
    second.backward()  # copies of two streams could overtake each other
    assert second.item() == second.detach().clone().item()
    assert (Copied.taken, early_loss.answered) == (1, 0)
    here[0] = "one"
    first.item()
    assert early_loss.answered == 1


def test_losses_of_calls_on_another_stream_than_their_backward_pass_are_read_by_torch(early_loss, monkeypatch):
    """That pass waits for the other stream, and a copy before it would not."""
    here = ["one"]
    monkeypatch.setattr(early_losses, "current_stream", lambda _: here[0])
    monkeypatch.setattr(early_losses, "is_stream_capturing", lambda: False)
    kept_samples()

    def taken_after(*streams):
        before, pair = Copied.taken, list(losses(2))
        for here[0] in streams:
            early_loss.called()
        here[0] = "one"
        for loss in pair:
            loss.backward()
        assert [loss.item() for loss in pair] == [loss.detach().clone().item() for loss in pair]
        return Copied.taken - before

    assert [taken_after("one"), taken_after("other"), taken_after("one", "other"), taken_after("one")] == [2, 0, 0, 2]


def test_a_loss_that_is_no_plain_number_is_left_alone(early_loss):
    kept_samples()
    loss = torch.tensor(1 + 2j, requires_grad=True) * 1
    loss.backward(torch.ones_like(loss))
    assert loss.item() == 1 + 2j
    with pytest.raises(RuntimeError, match="cannot be converted"):
        float(loss)
    assert Copied.taken == 0


@pytest.mark.parametrize(
    ("send", "answered"),
    [
        (lambda out: out.to("cpu", torch.float64, non_blocking=True), 0),
        (lambda out: out.to("cpu", torch.float64, True), 0),
        (lambda out: torch.zeros(3).copy_(out, non_blocking=True), 0),
        (lambda out: torch.zeros(3).copy_(other=out, non_blocking=True), 0),
        (lambda out: torch.zeros(3).copy_(out, True), 0),
        (lambda out: torch.zeros(3).copy_(out), 1),
        (lambda out: out.to("cpu", torch.float64), 1),
        (lambda out: out.to("meta", non_blocking=True), 1),
    ],
)
def test_behind_what_was_sent_to_the_host_and_not_waited_for_torch_reads(early_loss, send, answered):
    """Its reading waits for all of it, as the script may count on."""
    kept_samples()
    (loss,) = losses(1)
    own = loss.detach().clone().item()
    loss.backward()
    send(torch.ones(3))
    assert loss.item() == own
    assert early_loss.answered == answered


def test_where_something_is_sent_in_every_step_nothing_is_copied_any_more(early_loss):
    kept_samples()
    for loss in losses(20):
        loss.backward()
        torch.ones(3).to(torch.float64, non_blocking=True)
        loss.item()
    assert Copied.taken == 1


def test_the_end_of_a_copy_is_noted_on_the_stream_of_its_own_device(monkeypatch):
    """torch's current device may be another, and its stream knows nothing of the copy."""

    class Event:
        def record(self, stream=None):
            noted.append(stream)

        def synchronize(self):
            pass

    noted = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("hotlap.script.calls.early_loss.current_stream", lambda device: f"stream of {device}")
    unlocked = functools.partial(torch.zeros, ())
    monkeypatch.setattr(torch, "empty", lambda *_, dtype, device, pin_memory: unlocked(dtype=dtype, device=device))
    place = PinnedNumber()
    place.take(torch.tensor(2.5, requires_grad=True))
    assert noted == ["stream of cpu"]
    assert place.value() == 2.5


def test_a_time_between_events_is_told_once_the_second_is_over(monkeypatch):
    """Behind `loss.item()` it was over; torch raises where it is not."""

    class Event:
        is_over = False

        def synchronize(self):
            self.is_over = True

        def elapsed_time(self, end_event):
            assert end_event.is_over
            return 2.5

    own = Event.elapsed_time
    monkeypatch.setattr(torch.cuda, "Event", Event)
    early_loss = EarlyLoss(CPU, Copied)
    early_loss.use(early=True)
    assert Event().elapsed_time(Event()) == Event().elapsed_time(end_event=Event()) == 2.5
    early_loss.close()
    assert Event.elapsed_time is own


def test_losses_that_are_read_later_keep_their_numbers(early_loss):
    """A GAN reads both of its losses at the end; what is read too late for its place is read by torch."""
    kept_samples()
    kept = []
    for loss in losses(3 * MOST_KEPT_COPIES):
        kept.append((loss, loss.detach().clone().item()))
        loss.backward()
    assert all(loss.item() == own for loss, own in kept)


@pytest.mark.parametrize("together", range(1, MOST_KEPT_COPIES + 1))
def test_several_losses_of_a_step_are_all_copied(early_loss, together):
    every = list(losses(20 * together))
    for at in range(0, len(every), together):
        step = every[at : at + together]
        own = [loss.detach().clone().item() for loss in step]
        for loss in step:
            loss.backward()
        assert [loss.item() for loss in step] == own
    assert early_loss.answered >= (20 - SEEN_READS) * together


def test_one_loss_that_is_never_read_takes_no_place_from_another(early_loss):
    kept_samples()
    (unread,) = losses(1, seed=9)
    own = unread.detach().clone().item()
    unread.backward()
    for loss in losses(3 * MOST_KEPT_COPIES):
        value = loss.detach().clone().item()
        loss.backward()
        assert loss.item() == value
    assert unread.item() == own


def test_where_losses_are_read_no_more_nothing_is_copied_any_more(early_loss):
    for loss in losses(2 * MOST):
        loss.backward()
        loss.item()
    copied = Copied.taken
    for loss in losses(100):
        loss.backward()
    assert Copied.taken - copied <= MOST - SEEN_READS + MOST_KEPT_COPIES


def test_a_loss_read_before_its_backward_pass_is_not_copied(early_loss):
    for loss in losses(20):
        loss.item()
        loss.backward()
    assert Copied.taken == 0


def test_other_tensors_are_torchs_own(early_loss):
    kept_samples()
    (loss,) = losses(1)
    loss.backward()
    assert torch.tensor(3.5).item() == 3.5
    assert torch.tensor([2]).item() == 2
    assert float(torch.tensor(7)) == 7.0
    with pytest.raises(RuntimeError, match="cannot be converted"):
        torch.ones(2).item()
    assert early_loss.answered == 0


def test_a_mode_sees_every_reading(early_loss):
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    kept_samples()
    (loss,) = losses(1)
    loss.backward()
    with Mode():
        loss.item()
    assert torch._C.TensorBase.item in seen


def test_a_tensor_that_takes_the_place_of_a_loss_in_memory_is_another(early_loss):
    kept_samples()
    for _ in range(30):
        (loss,) = losses(1)
        loss.backward()
        del loss
        others = [torch.tensor(float(number)) for number in range(20)]
        assert [other.item() for other in others] == list(range(20))


def test_without_memory_that_is_page_locked_torch_reads(early_loss):
    def fails():
        raise RuntimeError("no more page-locked memory")

    early_loss._make_place = fails
    for loss in losses(10):
        own = loss.detach().clone().item()
        loss.backward()
        assert loss.item() == own
    assert early_loss.answered == 0


def test_nothing_is_copied_while_the_plan_is_another(early_loss):
    kept_samples()
    early_loss.use(early=False)
    for loss in losses(3):
        loss.backward()
        loss.item()
    assert Copied.taken == 0
    early_loss.use(early=True)
    (loss,) = losses(1)
    loss.backward()
    assert loss.item() > 0
    assert early_loss.answered == 1


def test_a_training_of_captured_calls_reads_the_losses_of_a_plain_one(early_loss, monkeypatch):
    # The device is the host here: what is copied into a recording would be taken for something sent to the host.
    monkeypatch.setattr(early_loss, "_note_sent", lambda source, made: None)

    def trained(call):
        torch.manual_seed(0)
        module = net()
        forward = call(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        generator, seen = torch.Generator().manual_seed(1), []
        for _ in range(30):
            x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(forward(x), y)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    def captured(module):
        call = ModuleCall(module, device=CPU, make_recorder=FakeRecorder)
        call.use(*CAPTURED)
        return lambda *args: call(functools.partial(nn.Module.__call__, module), args, {})

    first, answered = trained(lambda module: module), early_loss.answered
    assert trained(captured) == first
    assert early_loss.answered - answered == 30


# --- tests of losses, losses that are scaled, and other views of them -----------------------------------

TESTED = {
    "isnan": lambda loss: torch.isnan(loss),
    "isinf": lambda loss: torch.isinf(loss),
    "isfinite": lambda loss: torch.isfinite(loss),
    "method isnan": lambda loss: loss.isnan(),
    "method isfinite": lambda loss: loss.isfinite(),
}


@pytest.mark.parametrize("test", TESTED)
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf"), float("-inf")])
def test_a_test_of_the_loss_is_answered_early_and_as_torch_does(early_loss, test, value):
    kept_samples()
    (loss,) = losses(1)
    loss = loss * 0 + value
    own = TESTED[test](loss.detach().clone())
    loss.backward()
    found = TESTED[test](loss.detach())
    assert bool(found) is bool(own)
    assert (found.item(), float(found)) == (own.item(), float(own))
    assert torch.equal(found, own)
    assert early_loss.answered == 3


def test_a_test_whose_result_was_written_to_is_read_as_it_is_now(early_loss):
    kept_samples()
    (loss,) = losses(1)
    loss.backward()
    found = torch.isnan(loss)
    found.logical_not_()
    assert bool(found)
    assert early_loss.answered == 0


def test_a_trainer_that_looks_at_a_detached_loss_is_answered_from_its_copy(early_loss):
    """As that of transformers does, behind a function that returns `loss.detach()`."""

    def step(loss):
        loss = loss * 2
        loss.backward()
        return loss.detach()

    for number, loss in enumerate(losses(10)):
        detached = step(loss)
        assert Copied.taken == max(0, number + 1 - SEEN_READS)
        found = torch.isnan(detached) or torch.isinf(detached)
        assert not found
    assert early_loss.answered == 2 * (10 - SEEN_READS)


def test_a_loss_that_is_scaled_is_read_as_it_was_before(early_loss):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, loss in enumerate(losses(10)):
        own = loss.detach().clone().item()
        scaler.scale(loss).backward()
        assert Copied.taken == max(0, number + 1 - SEEN_READS)
        assert loss.item() == own
    assert early_loss.answered == Copied.read == 10 - SEEN_READS


def test_a_scaler_that_is_off_changes_nothing(early_loss):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for loss in losses(10):
        own = loss.detach().clone().item()
        scaler.scale(loss).backward()
        assert loss.item() == own
    assert Copied.taken == 10 - SEEN_READS


def test_scaled_losses_and_others_of_a_step_keep_their_numbers(early_loss):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled, others = list(losses(40)), list(losses(40, seed=1))
    for one, other in zip(scaled, others, strict=True):
        own = one.detach().clone().item(), other.detach().clone().item()
        scaler.scale(one).backward()
        other.backward()
        assert (one.item(), other.item()) == own
    assert early_loss.answered >= 2 * (40 - SEEN_READS - 2)


def test_a_number_that_only_shares_its_place_is_read_by_torch(early_loss):
    kept_samples()
    (loss,) = losses(1)
    loss.backward()
    for other in (torch._neg_view(loss.detach()), loss.detach().view(torch.int32)):
        assert other.item() == other.clone().item()
    assert early_loss.answered == 0


def test_a_loss_in_large_memory_is_not_held_on_to(early_loss):
    for _ in range(10):
        weights = torch.randn(4096, requires_grad=True)
        loss = (weights * 2)[7]
        loss.backward()
        assert loss.item() == 2 * weights[7].item()
    assert Copied.taken == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_transforms_and_scripts_of_torch_are_left_alone(early_loss):
    kept_samples()
    (loss,) = losses(1)
    loss.backward()
    assert torch.func.vmap(torch.isnan)(torch.ones(3)).tolist() == [False] * 3

    @torch.jit.script
    def tested(x):
        return torch.isnan(x).any() or torch.isinf(x).any() or not bool(torch.isfinite(x).all())

    assert tested(torch.tensor([1.0, float("inf")]))
    with torch.inference_mode():
        assert not torch.isnan(loss)


# --- writes that torch does not count, other threads, and what must not be held -------------------------


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("is_own", [False, True])
def test_a_number_that_a_graph_of_the_scripts_overwrites_is_read_as_it_is_now(is_own, monkeypatch):
    """`make_graphed_callables` gives the same memory each time. hotlap's own replays write to no loss."""

    class Graph:
        def replay(self):
            loss.data.fill_(7.0)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(early_losses, "is_own_recording", lambda graph: is_own)
    early_loss = EarlyLoss(CPU, Copied)
    early_loss.use(early=True)
    for loss in losses(SEEN_READS + 1):
        early_loss.backward_begins(loss)
        own = loss.item()
    Graph().replay()
    assert loss.item() == (own if is_own else 7.0)
    assert early_loss.answered == (2 if is_own else 1)
    early_loss.close()


def test_where_processes_train_together_torch_reads(early_loss, monkeypatch):
    """`torch.distributed.all_reduce(loss)` writes to it, which torch does not count."""
    kept_samples()
    monkeypatch.setattr(early_losses, "trains_with_others", lambda: True)
    (loss,) = losses(1)
    loss.backward()
    loss.data.mul_(2)
    assert loss.item() == loss.detach().clone().item()
    assert (Copied.taken, early_loss.answered) == (0, 0)


def test_torch_reads_for_another_thread(early_loss):
    """While it waits, the thread that trains may put another number in the same place."""
    kept_samples()
    (loss,) = losses(1)
    own = loss.detach().clone().item()
    loss.backward()
    found = torch.isnan(loss)
    assert in_a_thread(lambda: (loss.item(), bool(found), bool(torch.isnan(loss)))) == (own, False, False)
    assert early_loss.answered == 0
    assert loss.item() == own
    assert early_loss.answered == 1


def test_losses_of_another_thread_are_not_copied(early_loss):
    kept_samples()
    for loss in losses(5):
        in_a_thread(loss.backward)
        loss.item()
    assert Copied.taken == 0


def test_a_scaled_loss_that_is_never_differentiated_holds_no_graph(early_loss):
    """As for a gradient penalty: `torch.autograd.grad(scaler.scale(loss), …)`."""
    scaler = torch.amp.GradScaler("cpu")
    weights = torch.randn(5, requires_grad=True)
    loss = (weights * weights).sum()
    torch.autograd.grad(scaler.scale(loss), weights, create_graph=True)
    held = weakref.ref(loss)
    del loss
    gc.collect()
    assert held() is None


class Kept:
    """A number on the host for a device without memory."""

    def take(self, number):
        pass

    def value(self):
        return 2.5


@pytest.mark.parametrize(
    ("again", "is_answered"),
    [
        (lambda room, number: room, False),
        (lambda room, number: room[number % 2 :], False),
        (lambda room, number: torch.zeros(3), True),
    ],
    ids=["the same memory", "parts of it", "new memory"],
)
@pytest.mark.parametrize("is_copied", [False, True])
def test_behind_pinned_memory_that_is_sent_in_every_step_torch_reads(again, is_answered, is_copied, monkeypatch):
    """The script may fill it anew once it has read the loss, since torch has sent it by then."""
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    device, room = torch.device("meta"), torch.zeros(3)
    early_loss = EarlyLoss(device, Kept)
    early_loss.use(early=True)
    own, found = [], []
    for number in range(10):
        loss = torch.ones((), device=device, requires_grad=True) * 2
        early_loss.backward_begins(loss)
        sent = again(room, number)
        if is_copied:
            torch.empty(sent.shape, device=device).copy_(sent, non_blocking=True)
        else:
            sent.to(device, non_blocking=True)
        try:
            found.append(loss.item())
        except RuntimeError:  # torch's own answer on this device
            own.append(number)
    early_loss.close()
    assert (found[-3:] == [2.5] * 3) is is_answered
    assert (own == list(range(10))) is not is_answered


def test_pinned_tensors_without_an_address_are_sent_as_ever(monkeypatch):
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    early_loss = EarlyLoss(torch.device("meta"), Kept)
    early_loss.use(early=True)
    for _ in range(2):
        assert torch.eye(3).to_sparse().to("meta", non_blocking=True).is_sparse
    early_loss.close()


def test_patches_that_torch_scripts_know_end_with_them():
    table = torch.jit._builtins._get_builtin_table()

    def patch_once():
        early_loss = EarlyLoss(CPU, Copied)
        early_loss.use(early=True)
        early_loss.close()
        return weakref.ref(early_loss)

    before = len(table)
    gone = patch_once()
    gc.collect()
    assert gone() is None
    assert len(table) == before
