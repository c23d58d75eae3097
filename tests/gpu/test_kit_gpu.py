"""The kit on a real GPU under small memory: the largest batch really is the largest, and the account adds up."""

import gc

import pytest
import torch
from gpu_memory import memory_limited
from plain import parameters_of
from torch import nn

import hotlap
from hotlap import Job, TrainingError
from hotlap.data.sources import tensors_in
from hotlap.kit.bench import opened
from hotlap.monitor.live_tensors import LiveTensors

DEVICE = "cuda"
WIDTH, LENGTH, BLOCKS = 256, 128, 4
MIB, GIB = 2**20, 2**30


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.blocks(x).mean(1))


def job(model=None, *, batch=64, samples=2048, **changes):
    generator = torch.Generator().manual_seed(1)
    settings = {
        "model": model or Encoder(),
        "data": (
            torch.randn(samples, LENGTH, WIDTH, generator=generator),
            torch.randint(3, (samples,), generator=generator),
        ),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.AdamW(p),
        "batch_size": batch,
        "epochs": 1,
        "device": DEVICE,
    }
    return Job(**{**settings, **changes})


@pytest.fixture
def memory_of():
    """Sets how many bytes more than now torch may take."""

    with memory_limited(DEVICE) as limit:
        yield limit


# --- batch -----------------------------------------------------------------------------------------------


def test_the_largest_batch_trains_and_a_twentieth_more_does_not(memory_of):
    memory_of(2 * GIB)
    mine = job()
    found = hotlap.batch(mine, progress=False)
    assert found.searched.found_largest, found.summary()
    largest = found.largest.size
    assert largest < 2048
    assert "out of memory" in found.searched.ended
    with opened(mine) as bench:
        assert bench.trains(bench.window(largest), updates=4) is None
        # How much fits depends a little on what was allocated before: on a fresh bench 2 % more did, once.
        assert bench.trains(bench.window(largest + max(1, largest // 20))) is not None
    kept = found.keeps_reserve
    assert kept.taken_bytes <= found.allowed_bytes
    assert kept.size < largest
    # Memory grows with the batch, so that the reserve is about a tenth of the largest.
    assert kept.size > 0.6 * largest
    assert found.effective_batch == 64


def test_what_trains_does_not_depend_on_what_was_tried_before(memory_of):
    memory_of(2 * GIB)
    mine = job()
    largest = hotlap.batch(mine, progress=False).largest.size
    sizes = range(largest - 2, largest + 4)
    with opened(mine) as bench:
        upwards = [bench.trains(bench.window(size)) is None for size in sizes]
        assert bench.trains(bench.window(min(2 * largest, bench.most))) is not None
        downwards = [bench.trains(bench.window(size)) is None for size in reversed(sizes)]
    assert upwards == downwards[::-1]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def test_recurrent_layers_keep_their_weights_in_one_piece():
    with opened(job(Recurrent())) as bench:
        assert bench.trains(bench.window(8)) is None  # torch warns where they are not, and a warning is an error
        first, *others = bench.rig.model.lstm._flat_weights
        assert {one.untyped_storage().data_ptr() for one in others} == {first.untyped_storage().data_ptr()}


def test_a_step_is_timed_with_its_batch_on_the_device(monkeypatch):
    seen = []
    with opened(job()) as bench:
        advance = bench.rig.advance
        window = bench.window(8, 3)
        assert bench.trains(window) is None
        assert {one.device.type for piece in window.pieces for one in tensors_in(piece)} == {"cpu"}
        monkeypatch.setattr(bench.rig, "advance", lambda window: seen.append(window) or advance(window))
        assert bench.step_s(window) > 0
    pieces = seen[0].pieces
    assert len(pieces) == 3
    assert pieces[0] is pieces[1] is pieces[2], "one batch on the device is enough"
    assert {one.device.type for one in tensors_in(pieces[0])} == {"cuda"}


def test_a_search_begins_by_the_catalogue_and_the_next_one_by_what_was_measured(memory_of, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    memory_of(2 * GIB)
    first, second = (hotlap.batch(job(), progress=False) for _ in range(2))
    assert "a guess for" in first.began.why
    assert "were measured on" in second.began.why
    line = first.searched.line
    assert line.bytes_a_sample > LENGTH * WIDTH * 4
    # Memory is a line of the batch: what it says of the largest is what was found, but for what the allocator leaves
    # between its blocks, which is less where memory is short.
    assert abs(line.size_at(first.allowed_bytes) - first.keeps_reserve.size) <= 0.3 * first.keeps_reserve.size
    assert second.began.size <= line.size_at(second.allowed_bytes) * 1.1 < 2.3 * second.began.size
    assert abs(second.largest.size - first.largest.size) <= 0.05 * first.largest.size


def test_no_memory_and_no_state_is_left_behind(memory_of):
    memory_of(GIB)
    torch.cuda.synchronize()
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    first, before = parameters_of(model).clone(), torch.cuda.memory_allocated()
    chance = torch.cuda.get_rng_state()
    hotlap.batch(job(model, optimizer=optimizer), progress=False)
    assert torch.equal(parameters_of(model), first)
    assert next(model.parameters()).device.type == "cpu"
    assert not optimizer.state
    assert torch.equal(torch.cuda.get_rng_state(), chance)
    gc.collect()
    # What cuBLAS keeps for its work stays.
    assert torch.cuda.memory_allocated() - before < 64 * MIB


def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * WIDTH, 600), nn.Linear(600, 3))


def test_a_model_whose_update_does_not_fit_is_told(memory_of):
    memory_of(200 * MIB)
    found = hotlap.batch(job(wide()), progress=False)
    assert found.largest is None
    assert "not even 1 sample at once" in found.searched.ended
    assert "smaller model" in found.advice


def test_a_model_that_does_not_fit_at_all_is_told_in_one_line(memory_of):
    memory_of(64 * MIB)
    model = wide()
    with pytest.raises(TrainingError, match="the model itself does not fit"):
        hotlap.batch(job(model), progress=False)
    assert all(p.device.type == "cpu" for p in model.parameters())


# --- memory ----------------------------------------------------------------------------------------------


def test_the_account_adds_up_to_the_allocators_peak():
    gc.collect()
    torch.cuda.empty_cache()
    found = hotlap.memory(job(batch=256), progress=False)
    assert found.peak_bytes > GIB
    assert abs(found.peak_bytes - found.counted_bytes) < 0.05 * found.peak_bytes, found.summary()
    weights = sum(p.numel() * 4 for p in Encoder().parameters())
    assert weights <= found.kinds["parameters"] < 1.05 * weights
    assert 2 * weights <= found.kinds["optimizer"] < 2.1 * weights
    assert found.reserved_bytes >= found.peak_bytes
    assert sum(found.kinds.values()) == found.counted_bytes
    smaller, checkpointed = found.savings[:2]
    for one in (smaller, checkpointed):
        assert one.peak_bytes < 0.8 * found.peak_bytes, found.summary()
        assert abs(one.predicted_bytes - one.peak_bytes) < 0.25 * one.peak_bytes, found.summary()
    assert any("autocast" in one.what for one in found.savings)


def test_what_an_operation_takes_for_itself_is_in_the_account():
    x = torch.rand(4 * 2**20, device=DEVICE)
    x.sort()
    live = LiveTensors(torch.device(DEVICE))
    live.know([x], "batch")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x.sort()
    peak = torch.cuda.max_memory_allocated() - before + x.nbytes
    with live:
        x.sort()
    assert live.at_peak["kernels"] > x.nbytes
    assert sum(live.at_peak.values()) == live.peak_bytes
    assert abs(live.peak_bytes - peak) < 0.01 * peak


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.outputs = nn.Linear(WIDTH, 3), []

    def forward(self, x):
        made = self.layer(x.mean(1))
        self.outputs.append(made * 2)
        return made


def test_memory_that_grows_is_found_on_the_gpu_too():
    (held,) = hotlap.memory(job(Keeps()), progress=False).held
    assert held.line.endswith("in forward")
    assert held.holder == "Keeps.outputs"
    assert held.bytes_an_update == -(-64 * 3 * 4 // 512) * 512


class TakesUnseen(nn.Module):
    """Has memory of torch's allocator that is no tensor."""

    def __init__(self):
        super().__init__()
        self.layer, self.taken = nn.Linear(WIDTH, 3), []

    def forward(self, x):
        self.taken.append(torch.cuda.caching_allocator_alloc(MIB))
        return self.layer(x.mean(1))


def test_growth_that_is_no_tensor_is_told_without_a_line():
    model = TakesUnseen()
    try:
        (held,) = hotlap.memory(job(model), progress=False).held
    finally:
        for place in model.taken:
            torch.cuda.caching_allocator_delete(place)
    assert held.line == ""
    assert abs(held.bytes_an_update - MIB) < 0.1 * MIB
    assert "outside of operations" in str(held)


class AddsUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.total = nn.Linear(WIDTH, 3), 0.0

    def forward(self, x):
        made = self.layer(x.mean(1))
        self.total = self.total + made.sum()
        return made


def test_a_loss_that_is_added_up_with_its_history_is_told():
    (held,) = hotlap.memory(job(AddsUp()), progress=False).held
    assert "steps of autograd an update" in str(held)
    assert held.holder == "AddsUp.total"


# --- workers ---------------------------------------------------------------------------------------------


def test_data_in_memory_is_told_that_workers_do_not_pay():
    found = hotlap.workers(job(batch=16), seconds=200, progress=False)
    timed = {one.feed.kind for one in found.settings if one.step_s is not None}
    assert timed == {"loader", "gather", "stream", "resident"}
    # Beside other tests one lap of them may be the quickest by chance; that is not advised.
    assert not (found.matters and found.best.feed.workers), found.advice
    assert max(one.feed.workers for one in found.settings) <= found.cores
    unpinned = any(not one.feed.pinned for one in found.settings if one.feed.kind == "loader")
    assert unpinned or not found.matters or found.best.feed.kind != "loader"
