"""Out of memory in a step of `fit`: the same window is made again under a plan that needs less, and nothing is doubled.

The device is a pretended one, with real numbers: it counts the bytes that the forward pass keeps for the backward pass,
and raises torch's own error where they are more than it has.
"""

import dataclasses
import functools
import gc
import itertools
import re
import sys

import pytest
import torch
from plain import parameters_of
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from hotlap import Job, Plan, Rig, TrainingError, fit, moves
from hotlap.engine.rig import Place
from hotlap.engine.step import is_out_of_memory
from hotlap.fitting import memory_return, what_would_fit
from hotlap.fitting.rescue import Rescue
from hotlap.machine.cuda import GpuProcess
from hotlap.moves import Move
from hotlap.tuner import budget
from hotlap.tuner.gates import Gate, Judgement

BLOCKS, SAMPLES, BATCH = 4, 24, 8
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 MiB"


class Device:
    """Memory of so many bytes for what a forward pass keeps; a training's `forward`."""

    def __init__(self, bytes_there=float("inf"), *, from_call=0):
        self.there, self.most, self.seen, self._calls, self._from = bytes_there, 0, [], 0, from_call

    def __call__(self, model, batch):
        held = {}
        self._calls += 1

        def keep(tensor):
            held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            self.most = max(self.most, sum(held.values()))
            if sum(held.values()) > self.there and self._calls > self._from:
                raise torch.OutOfMemoryError(MESSAGE)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(batch[0])
        self.seen += batch[0][:, 0].tolist()
        return output, batch[1]


class Blocks(nn.Module):
    def __init__(self, *, dropout=0.0, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 16),
                nn.BatchNorm1d(16) if norm else nn.Identity(),
                nn.Tanh(),
                nn.Dropout(dropout),
                nn.Linear(16, 16),
                nn.Sigmoid(),
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def job_for(device, *, model=None, optimizer=None, **settings):
    model = model or Blocks()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=generator)
    x[:, 0] = torch.arange(SAMPLES) / SAMPLES
    given = {
        "model": model,
        "data": (x, torch.randint(4, (SAMPLES,), generator=generator)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01)),
        "forward": device,
        "batch_size": BATCH,
        "epochs": 2,
        "device": "cpu",
    }
    return Job(**(given | settings))


@functools.cache
def needs(checkpoint=0, micro_batch=None, **model):
    """Bytes that a plan needs."""
    device = Device()
    job = job_for(device, model=Blocks(**model))
    plan = Plan().but(checkpoint=checkpoint, micro_batch=micro_batch)
    Rig(job.model, job.optimizer, job.loss, forward=device, plan=plan, device="cpu").step(
        tuple(column[:BATCH] for column in job.data)
    )
    return device.most


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class FreeMemory:
    """What the pretended device has free between two steps."""

    bytes = 2**30

    def __call__(self, device):
        return self.bytes


@pytest.fixture(autouse=True)
def free(monkeypatch):
    free = FreeMemory()
    monkeypatch.setattr("hotlap.fitting.memory_return.free_bytes", free)
    monkeypatch.setattr("hotlap.engine.evaluate.free_bytes", free)
    monkeypatch.setattr(what_would_fit, "free_bytes", free)
    return free


@pytest.fixture
def soon(monkeypatch):
    """Larger pieces come back after a few windows."""
    monkeypatch.setattr(memory_return, "WAIT", 4)


def trained(device, model=None, plan="off", **settings):
    fit_settings = {name: settings.pop(name) for name in ("resume", "save_every", "tune_s") if name in settings}
    return fit(job_for(device, model=model, **settings), plan=plan, progress=False, **fit_settings)


def faults(run):
    return [entry for entry in run.ledger if entry.outcome == "fault"]


def assert_same_weights(mine, theirs):
    one, other = mine.model.state_dict(), theirs.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


# --- blocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enough", "model"),
    [(1, {}), (2, {"dropout": 0.3}), (4, {"norm": True}), (2, {"dropout": 0.3, "norm": True})],
)
def test_as_many_blocks_as_needed_are_checkpointed_and_the_weights_are_those_of_a_larger_device(enough, model):
    small, large = Device(needs(enough, **model)), Device()
    mine, theirs = trained(small, Blocks(**model)), trained(large, Blocks(**model))
    assert mine.plan == theirs.plan.but(checkpoint=enough)
    assert_same_weights(mine, theirs)
    assert small.seen == large.seen
    assert (mine.steps, mine.samples, mine.updates) == (theirs.steps, theirs.samples, theirs.updates)
    assert [row["train_loss"] for row in mine.history] == [row["train_loss"] for row in theirs.history]
    assert small.most <= large.most


def test_the_ledger_has_every_fault_with_its_reason_and_the_user_is_told():
    run = trained(Device(needs(2)))
    assert [(entry.step, entry.what, entry.why) for entry in faults(run)] == [
        (0, "checkpoint 0 → 1", f"out of memory: {MESSAGE}"),
        (0, "checkpoint 1 → 2", f"out of memory: {MESSAGE}"),
    ]
    assert run.problems == (
        "out of memory at step 0; from here on: 1 block checkpointed, batches whole",
        "out of memory at step 0; from here on: 2 blocks checkpointed, batches whole",
    )


def test_a_plan_of_the_users_own_is_answered_too():
    run = trained(Device(needs(2)), plan={"checkpoint": 1, "optimizer": "fused"})
    assert (run.plan.memory.checkpoint, run.plan.numerics.optimizer) == (2, "fused")
    assert [entry.what for entry in faults(run)] == ["checkpoint 1 → 2"]


@pytest.mark.parametrize(
    ("kind", "call"), [("gather", 1), ("loader", 1), ("loader", 3), ("resident", 1), ("gather", 5)]
)
def test_memory_that_runs_short_later_is_answered_at_that_step(call, kind):
    model = {"dropout": 0.3, "norm": True}
    small, large = Device(needs(1, **model), from_call=call), Device()
    mine, theirs = (trained(device, Blocks(**model), {"kind": kind}) for device in (small, large))
    assert [entry.step for entry in faults(mine)] == [call]
    assert (mine.steps, mine.samples) == (theirs.steps, theirs.samples)
    assert small.seen == large.seen
    if call == 1:  # not known to fit yet
        assert_same_weights(mine, theirs)
    assert ("what the step had drawn and moved in buffers stays so" in faults(mine)[0].why) is (call > 1)


def test_a_longer_batch_is_put_back_though_shorter_ones_went_through():
    """Each shape is known by itself: dropout draws the same masks again."""

    def lengths(samples):
        x = torch.stack([one[0] for one in samples])
        width = 2 if x[0, 0] < 0.5 else 6
        return x.repeat(width, 1), torch.stack([one[1] for one in samples]).repeat(width)

    def run(device):
        model = Blocks(dropout=0.3, norm=True)
        return trained(device, model, collate=lengths, order="as given")

    large = Device()
    theirs = run(large)
    small = Device(large.most - 1)
    mine = run(small)
    assert mine.plan.memory.checkpoint > 0
    assert faults(mine)[0].step > 1
    assert_same_weights(mine, theirs)


# --- micro-batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [4, 2, 1])
def test_then_batches_are_cut_and_the_effective_batch_stays(micro):
    small, large = Device(needs(BLOCKS, micro)), Device()
    mine, theirs = trained(small, clip=1.0), trained(large, clip=1.0)
    assert (mine.plan.memory.checkpoint, mine.plan.memory.micro_batch) == (BLOCKS, micro)
    torch.testing.assert_close(parameters_of(mine.model), parameters_of(theirs.model), rtol=1e-4, atol=1e-6)
    assert small.seen == large.seen
    assert (mine.steps, mine.samples) == (theirs.steps, theirs.samples)


def test_a_model_that_repeats_nothing_is_cut_at_once():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 4))

    large = Device()
    theirs = trained(large, model())
    mine = trained(Device(large.most - 1), model())
    assert (mine.plan.memory.checkpoint, mine.plan.memory.micro_batch) == (0, 4)
    torch.testing.assert_close(parameters_of(mine.model), parameters_of(theirs.model), rtol=1e-4, atol=1e-6)


def test_batch_norms_that_see_micro_batches_are_told_of():
    run = trained(Device(needs(BLOCKS, 4, norm=True)), Blocks(norm=True))
    assert run.plan.memory.micro_batch == 4
    assert "batch norms see micro-batches" in faults(run)[-1].why


def test_where_nothing_helps_one_line_says_what_was_tried():
    with pytest.raises(TrainingError) as caught:
        trained(Device(64))
    (line,) = str(caught.value).splitlines()
    assert line == (
        "out of memory at step 0, whatever was tried (batches whole; 1 block checkpointed, batches whole; 2 blocks "
        "checkpointed, batches whole; 4 blocks checkpointed, batches whole; 4 blocks checkpointed, micro-batches of 4; "
        "4 blocks checkpointed, micro-batches of 2; 4 blocks checkpointed, micro-batches of 1): "
        f"{MESSAGE}; use a smaller model, shorter samples or a GPU with more memory"
    )


class Full(Device):
    """Has no memory for numbers, though shapes can be followed."""

    def __call__(self, model, batch):
        if batch[0].device.type != "meta":
            raise torch.OutOfMemoryError(MESSAGE)
        return model(batch[0]), batch[1]


def test_where_one_change_would_make_it_fit_the_message_has_it_with_its_memory_as_a_line_to_type(free):
    weights = sum(parameter.nbytes for parameter in Blocks().parameters())
    free.bytes = int(1.9 * weights)  # beside the weights: room for gradients, and not for what AdamW keeps
    with pytest.raises(TrainingError) as caught:
        trained(Full())
    first, second, *lines = str(caught.value).splitlines()
    assert first.endswith(MESSAGE)
    assert re.fullmatch(
        r"  at least .*KiB are needed, .*KiB can be had; with one of these changes it would fit:", second
    )
    (line,) = [line for line in lines if "torch.optim.SGD" in line]
    assert line.startswith("  optimizer=lambda p: torch.optim.SGD(p, lr=…)  ")
    assert line.endswith("KiB, an optimizer without state (it changes what the model learns)")


@pytest.mark.parametrize(("kind", "checkpoint"), [("gather", 0), ("resident", 0), ("gather", BLOCKS)])
def test_an_update_is_counted_without_memory_as_it_is_with(kind, checkpoint):
    model, kept = Blocks(norm=True), {}
    plan = Plan().but(kind=kind, checkpoint=checkpoint)
    rig = Rig(model, lambda p: torch.optim.AdamW(p, lr=0.01), nn.CrossEntropyLoss(), plan=plan, device="cpu")
    data = job_for(None).data
    window = next(rig.feed(data, batch_size=BATCH, epochs=1))
    mine = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    before = [buffer.clone() for buffer in model.buffers()]
    counted = what_would_fit._counted(rig, window)
    assert all(map(torch.equal, before, model.buffers()))

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = tuple(column[:BATCH] for column in data)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    others = {*mine, *(column.untyped_storage().data_ptr() for column in batch)}
    real = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in others)
    assert loss.isfinite()
    if checkpoint:
        assert 0 < counted.kinds["activations"] < 0.6 * real
    else:
        assert counted.kinds["activations"] == pytest.approx(real, rel=0.1)  # torch keeps less of a batch norm there
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert counted.kinds["gradients"] == weights
    assert counted.kinds["optimizer"] == 2 * weights


def test_batch_norms_are_never_given_a_piece_of_one_sample():
    with pytest.raises(TrainingError, match="micro-batches of 2\\): CUDA out of memory"):
        trained(Device(64), Blocks(norm=True))


# --- back up -----------------------------------------------------------------------------------------


class Until(Device):
    """Has so little memory from one of its calls up to another, and enough otherwise."""

    def __init__(self, bytes_there, calls, *, free=None):
        super().__init__(bytes_there)
        self.calls, self.free = calls, free

    def __call__(self, model, batch):
        call = next(counted)
        full, self.there = self.there, self.there if call in self.calls else float("inf")
        if self.free is not None and call >= self.calls.stop:
            self.free.bytes = 2**32
        try:
            return super().__call__(model, batch)
        finally:
            self.there = full


def changes(run):
    return [(entry.outcome, entry.what) for entry in run.ledger if "→" in entry.what]


def test_larger_pieces_come_back_one_by_one_once_memory_has_returned(soon, free):
    model = {"dropout": 0.3, "norm": True}
    mine = trained(Until(needs(2, **model), range(5), free=free), Blocks(**model), epochs=None, steps=20)
    theirs = trained(Device(), Blocks(**model), epochs=None, steps=20)
    assert changes(mine) == [
        ("fault", "checkpoint 0 → 1"),
        ("fault", "checkpoint 1 → 2"),
        ("chosen", "checkpoint 2 → 1"),
        ("chosen", "checkpoint 1 → 0"),
    ]
    assert "memory has returned: 4.0 GiB is free, 1.0 GiB was when it ran out" in list(mine.ledger)[-1].why
    assert mine.plan == theirs.plan
    assert_same_weights(mine, theirs)


def test_whole_batches_come_back_with_the_same_update_to_rounding(soon, free):
    mine = trained(Until(needs(BLOCKS, 4), range(8), free=free), epochs=None, steps=30)
    theirs = trained(Device(), epochs=None, steps=30)
    assert mine.plan == theirs.plan
    assert ("chosen", "micro_batch 4 → None") in changes(mine)
    torch.testing.assert_close(parameters_of(mine.model), parameters_of(theirs.model), rtol=1e-3, atol=1e-5)
    assert (mine.steps, mine.samples) == (theirs.steps, theirs.samples)


def test_a_plan_that_never_fitted_is_not_tried_again_while_memory_is_as_short(soon):
    mine = trained(Device(needs(1)), epochs=None, steps=20)
    assert changes(mine) == [("fault", "checkpoint 0 → 1")]


def test_a_plan_that_fitted_before_a_peak_comes_back_without_more_memory(soon):
    model = {"dropout": 0.3}
    mine = trained(Until(needs(1, **model), range(3, 4)), Blocks(**model), epochs=None, steps=12)
    assert changes(mine) == [("fault", "checkpoint 0 → 1"), ("chosen", "checkpoint 1 → 0")]
    assert "tried again, since it fitted before memory ran out" in list(mine.ledger)[-1].why


def test_a_try_that_fails_is_undone_and_the_next_one_waits_twice_as_long(soon, free):
    model = {"dropout": 0.3}

    class Short(Device):
        """Has no memory for whole batches, though more is free from call to call."""

        def __call__(self, model, batch):
            free.bytes += 2**28
            return super().__call__(model, batch)

    mine = trained(Short(needs(1, **model)), Blocks(**model), epochs=None, steps=40)
    theirs = trained(Device(), Blocks(**model), epochs=None, steps=40)
    tries = [entry.step for entry in mine.ledger if entry.what == "checkpoint 1 → 0"]
    failures = [entry.step for entry in mine.ledger if entry.what == "checkpoint 0 → 1"]
    waits = [tried - failed for failed, tried in zip(failures, tries, strict=False)]
    assert waits == [4, 8, 16]
    assert (mine.steps, mine.samples) == (theirs.steps, theirs.samples)


def test_a_resumed_run_tries_the_larger_pieces_that_it_was_begun_with(soon, free):
    first = trained(Until(needs(1), range(5)), epochs=1, save_every=1)
    assert first.plan.memory.checkpoint == 1
    more = trained(Until(needs(1), range(5)), epochs=4, resume=first.path)
    assert changes(more)[-1] == ("chosen", "checkpoint 1 → 0")


def test_an_evaluation_takes_whole_batches_again_once_memory_has_returned(free):
    data, sizes = job_for(None).data, []

    def metric(output, target):
        sizes.append(len(output))
        if len(output) > 12 and free.bytes < 2**31:
            raise torch.OutOfMemoryError(MESSAGE)
        return (output.argmax(1) == target).double().mean()

    job = job_for(None)
    rig = Rig(job.model, job.optimizer, job.loss, device="cpu")
    for free.bytes in (2**30, 2**30, 2**32):
        sizes.append("|")
        rig.evaluate(data, {"right": metric}, batch_size=24)
    assert sizes == ["|", 24, 12, 12, "|", 12, 12, "|", 24]


# --- fragmentation, other processes ----------------------------------------------------------------------

FRAGMENTED = (
    f"{MESSAGE}. Of the allocated memory 9.00 MiB is allocated by PyTorch, and 3.00 MiB is reserved by PyTorch but "
    "unallocated."
)


class Fragmented(Device):
    """Fails at these calls, with room enough in pieces."""

    def __init__(self, *calls):
        super().__init__()
        self.fails = set(calls)

    def __call__(self, model, batch):
        call = next(counted)
        if call in self.fails:
            raise torch.OutOfMemoryError(FRAGMENTED)
        return super().__call__(model, batch)


@pytest.fixture(autouse=True)
def _calls():
    """Counted outside of the training, which puts back what its function remembers."""
    global counted
    counted = itertools.count()


def test_fragmented_memory_is_answered_by_the_same_plan_with_an_empty_cache():
    large = Device()
    theirs = trained(large, Blocks(dropout=0.3))
    small = Fragmented(1)
    mine = trained(small, Blocks(dropout=0.3))
    (fault,) = faults(mine)
    assert (fault.step, fault.what) == (1, "memory freed")
    assert "torch holds 3.0 MiB in pieces too small for 2.0 MiB, which PYTORCH_CUDA_ALLOC_CONF=" in fault.why
    assert mine.plan == theirs.plan
    assert small.seen == large.seen
    assert_same_weights(mine, theirs)


def test_a_plan_that_fails_again_with_an_empty_cache_is_made_smaller():
    run = trained(Fragmented(1, 2))
    assert [(entry.step, entry.what) for entry in faults(run)] == [(1, "memory freed"), (1, "checkpoint 0 → 1")]


def test_a_plan_is_not_made_again_for_ever():
    run = trained(Fragmented(0, 2, 4, 6))
    assert [entry.what for entry in faults(run)] == [*["memory freed"] * 3, "checkpoint 0 → 1"]


def test_other_processes_on_the_gpu_are_named_in_the_ledger_and_the_warning(monkeypatch):
    other = GpuProcess(pid=4711, bytes=10 * 2**30, name="python")
    monkeypatch.setattr("hotlap.machine.memory_shortage.other_processes", lambda *_: (other,))
    run = trained(Device(needs(1)))
    assert "other processes hold memory of this GPU: python (pid 4711) 10.0 GiB" in faults(run)[0].why
    assert "python (pid 4711) 10.0 GiB" in run.problems[0]


# --- evaluation ----------------------------------------------------------------------------------------


def test_an_evaluation_out_of_memory_goes_on_with_halves_and_its_figures_are_the_same():
    """The metric is the last to run, so that what was added before it would count twice."""

    def metric(output, target):
        if output.shape[0] > most:
            raise torch.OutOfMemoryError(MESSAGE)
        return (output.argmax(1) == target).double().mean()

    data = job_for(None).data
    settings = {"valid": data, "metrics": {"right": metric}, "eval_batch": 24, "epochs": 1}
    most = 24
    theirs = trained(Device(), **settings)
    most = 3
    mine = trained(Device(), **settings)
    assert [entry.what for entry in faults(mine)] == [f"evaluation batch {a} → {a // 2}" for a in (24, 12, 6)]
    for name in ("valid_loss", "right"):
        assert mine.history[-1][name] == pytest.approx(theirs.history[-1][name], rel=1e-6)
    assert_same_weights(mine, theirs)


def test_batches_of_a_sampler_are_cut_in_an_evaluation_too():
    x, y = job_for(None).data
    sampler = BatchSampler(SequentialSampler(range(SAMPLES)), 10, drop_last=False)

    class Own(BatchSampler):  # any class but torch's own makes batches that only it knows
        pass

    loader = DataLoader(TensorDataset(x, y), batch_sampler=Own(sampler.sampler, 10, drop_last=False))
    sizes = []

    def forward(model, batch):
        sizes.append(len(batch[0]))
        if len(batch[0]) > 6:
            raise torch.OutOfMemoryError(MESSAGE)
        return model(batch[0]), batch[1]

    job = job_for(forward)
    rig = Rig(job.model, job.optimizer, job.loss, forward=forward, device="cpu")
    rig.evaluate(loader)
    assert sizes == [10, 5, 5, 5, 5, 4]


def test_an_evaluation_of_single_samples_that_does_not_fit_ends_with_one_line():
    def forward(model, batch):
        raise torch.OutOfMemoryError(MESSAGE)

    job = job_for(forward)
    rig = Rig(job.model, job.optimizer, job.loss, forward=forward, device="cpu")
    with pytest.raises(TrainingError, match="out of memory in an evaluation of one sample at a time: CUDA out of mem"):
        rig.evaluate(job.data)


def test_predictions_come_in_order_from_smaller_batches():
    class Short(nn.Linear):
        def forward(self, x):
            if len(x) > 5:
                raise torch.OutOfMemoryError(MESSAGE)
            return super().forward(x)

    rig = Rig(Short(3, 2), lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), device="cpu")
    x = job_for(None).data[0]
    torch.testing.assert_close(rig.predict(x), nn.functional.linear(x, rig.model.weight, rig.model.bias).detach())


# --- the optimizer -----------------------------------------------------------------------------------


def test_state_that_the_optimizer_could_not_make_is_made_again(monkeypatch):
    theirs = trained(Device(), Blocks(dropout=0.3))
    real = torch.optim.AdamW._init_group

    def half_made(self, group, *rest):
        self.state[group["params"][0]]["step"] = torch.tensor(0.0)
        monkeypatch.setattr(torch.optim.AdamW, "_init_group", real)
        raise torch.OutOfMemoryError(MESSAGE)

    monkeypatch.setattr(torch.optim.AdamW, "_init_group", half_made)
    mine = trained(Device(), Blocks(dropout=0.3))
    assert [entry.what for entry in faults(mine)] == ["checkpoint 0 → 1"]
    assert_same_weights(mine, theirs)


def test_an_update_that_has_begun_is_not_made_twice(monkeypatch):
    sgd = sys.modules[torch.optim.SGD.__module__]
    real, calls = sgd.sgd, []

    def half(params, *rest, **more):
        calls.append(1)
        if len(calls) == 2:
            params[0].add_(1.0)
            raise torch.OutOfMemoryError(MESSAGE)
        return real(params, *rest, **more)

    monkeypatch.setattr(sgd, "sgd", half)
    with pytest.raises(TrainingError, match="in the middle of the update of step 1, which can therefore not be made"):
        trained(Device(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert len(calls) == 2


def test_an_optimizer_of_the_users_own_may_have_begun_without_a_trace():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].data.add_(1.0)
            raise torch.OutOfMemoryError(MESSAGE)

    with pytest.raises(TrainingError, match="in the middle of the update of step 0"):
        trained(Device(), optimizer=lambda p: Mine(p, lr=0.1))


def test_of_several_updates_at_once_those_that_were_made_stay_made():
    calls = []

    def forward(model, batch):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError(MESSAGE)
        return model(batch[0]), batch[1]

    job = job_for(forward)
    rig = Rig(job.model, job.optimizer, job.loss, forward=forward, plan=Plan().but(kind="resident"), device="cpu")
    windows = rig.feed(job.data, batch_size=BATCH, epochs=1)
    three = dataclasses.replace(next(windows), updates=3)
    rig.place, rescue = Place(0, 3, 3), Rescue(rig)
    rescue.begins(three)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        rig.advance(three)
    assert rescue.undo(caught.value, three) == rig.place == (0, 2, 2)
    assert (rig.steps, rig.samples) == (2, 2 * BATCH)
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert {int(state["step"]) for state in rig.optimizer.state.values()} == {2}


# --- going on, replaying, tuning -----------------------------------------------------------------------


def test_a_run_that_was_answered_is_gone_on_with_under_the_smaller_plan():
    model = {"dropout": 0.3}
    theirs = trained(Device(), Blocks(**model))
    first = trained(Device(needs(2, **model)), Blocks(**model), epochs=1, save_every=1)
    more = trained(Device(needs(2, **model)), Blocks(**model), resume=first.path)
    assert more.plan == first.plan
    assert len(faults(more)) == 2  # of before
    assert_same_weights(more, theirs)


def test_a_run_that_was_answered_is_replayed_without_a_fault():
    first = trained(Device(needs(2)))
    again = trained(Device(needs(2)), plan=first.path)
    assert faults(again) == []
    assert_same_weights(again, first)


def test_a_replay_on_a_smaller_device_is_answered_once():
    first = trained(Device())
    again = trained(Device(needs(1)), plan=first.path)
    assert [entry.what for entry in faults(again)] == ["checkpoint 0 → 1"]
    assert_same_weights(again, first)


@pytest.fixture
def at_leisure(monkeypatch, tmp_path):
    monkeypatch.setattr(budget, "SHARE", 100.0)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hotlap.tuner.laps.LAP_S", 0.005)
    monkeypatch.setattr("hotlap.tuner.search.OTHERS", ())


def only(monkeypatch, move):
    monkeypatch.setattr(moves, "MOVES", ())
    monkeypatch.setattr("hotlap.tuner.search.MOVES", (move,))
    monkeypatch.setattr(Gate, "check", lambda self, plan: Judgement(ok=True, why=""))


def test_what_is_tuned_from_and_settled_on_is_the_smaller_plan(at_leisure, monkeypatch):
    only(monkeypatch, Move(name="fused", word="fused", kind="A", propose=lambda plan, rig: plan.but(optimizer="fused")))
    mine = trained(Device(needs(2)), plan="auto", epochs=None, steps=200)
    assert mine.plan.memory.checkpoint == 2
    assert {entry.plan.memory.checkpoint for entry in mine.ledger if entry.step > 0} == {2}
    assert any(entry.plan.numerics.optimizer == "fused" for entry in mine.ledger), mine.summary()


def test_a_plan_on_trial_that_runs_out_of_memory_is_rejected_and_leaves_nothing(at_leisure, monkeypatch):
    device = Device(needs(0, dropout=0.3, norm=True))
    move = Move(name="a large one", word="large", kind="A", propose=lambda plan, rig: plan.but(optimizer="fused"))
    only(monkeypatch, move)
    model = Blocks(dropout=0.3, norm=True)
    real = Device.__call__

    def larger(self, given, batch):
        fused = rigs[0].plan.numerics.optimizer == "fused"
        self.there = needed - 1 if fused else needed
        return real(self, given, batch)

    rigs, needed = [], device.there
    monkeypatch.setattr(Device, "__call__", larger)
    monkeypatch.setattr("hotlap.fitting.training.Rescue.__init__", _noting(rigs))
    mine = trained(device, model, plan="auto", epochs=None, steps=200)
    monkeypatch.setattr(Device, "__call__", real)
    theirs = trained(Device(), Blocks(dropout=0.3, norm=True), epochs=None, steps=200)
    rejected = [entry for entry in mine.ledger if entry.what == "a large one"]
    assert rejected, mine.summary()
    assert all(entry.outcome == "rejected" and "out of memory" in entry.why for entry in rejected)
    assert mine.plan.memory.checkpoint == 0
    assert_same_weights(mine, theirs)


def _noting(rigs):
    real = Rescue.__init__

    def noting(self, rig):
        rigs.append(rig)
        real(self, rig)

    return noting


# --- what is memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError(MESSAGE), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("out of memory, says the user"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_only_the_devices_memory_is_answered(error, is_so):
    assert is_out_of_memory(error) is is_so
    with pytest.raises(TrainingError) as wrapped:
        raise TrainingError("more") from error
    assert is_out_of_memory(wrapped.value) is is_so


def test_an_error_of_the_users_own_is_still_an_error():
    def forward(model, batch):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        trained(forward)


def test_what_the_failed_try_has_kept_is_let_go_of_before_the_cache_is_emptied(monkeypatch):
    """Found by its size: what the function of the job notes of it is put back with the rest of the try."""
    size, alive = 1237, []

    class Held(Device):
        def __call__(self, model, batch):
            activation = torch.zeros(size)  # a local of a call that the error comes through
            return super().__call__(model, batch) if len(activation) else None

    def look(device):
        alive.append([one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (size,)])

    monkeypatch.setattr("hotlap.fitting.rescue.release_unused", look)
    run = trained(Held(needs(1)), epochs=1)
    assert len(faults(run)) == 1
    assert alive
    assert not any(alive)


def test_what_the_function_of_a_job_noted_in_a_failed_try_is_put_back():
    noted = []

    class Noting(Device):
        def __call__(self, model, batch):
            noted.append(len(batch[0]))
            return super().__call__(model, batch)

    trained(Noting(), epochs=1)
    undisturbed = list(noted)
    noted.clear()
    run = trained(Noting(needs(1)), epochs=1)
    assert len(faults(run)) == 1
    assert run.plan.memory.checkpoint == 1
    assert noted == undisturbed
