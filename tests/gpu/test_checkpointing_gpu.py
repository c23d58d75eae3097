"""Checkpointed blocks and out-of-memory errors on a real GPU: memory really falls, captures included."""

import gc
import itertools

import pytest
import torch
from gpu_memory import memory_limited
from plain import parameters_of, twins
from torch import nn

from hotlap import Job, Plan, Rig, fit
from hotlap.engine.capture.captured_step import CapturedStep

DEVICE = "cuda"
BLOCKS, WIDTH, LENGTH, BATCH, SAMPLES = 4, 128, 128, 32, 96
CAPTURED = Plan().but(kind="resident", mode="captured", optimizer="fused")
MIB = 2**20


class Encoder(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(BLOCKS))
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.blocks(x.mean(1)))


def data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, LENGTH, WIDTH, generator=generator), torch.randint(3, (samples,), generator=generator)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def trained(model, plan, *, epochs=4):
    """Losses, weights, how many shapes were recorded, and why none, where none were."""
    torch.cuda.manual_seed(7)
    rig = Rig(model, sgd, nn.CrossEntropyLoss(), plan=plan, device=DEVICE)
    losses = [rig.step(window).clone() for window in rig.feed(data(), batch_size=BATCH, epochs=epochs)]
    step = rig._step
    recorded = (step.recorded, step.given_up) if isinstance(step, CapturedStep) else (0, None)
    rig.close()
    return torch.stack(losses), parameters_of(model), recorded


def assert_same(mine, theirs, rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(mine[0], theirs[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(mine[1], theirs[1], rtol=rtol, atol=atol)


def peak(model, plan):
    """Bytes at most in a step beside what was there before, after the first ones."""
    rig = Rig(model, sgd, nn.CrossEntropyLoss(), plan=plan, device=DEVICE)
    batch = tuple(column[:BATCH].to(DEVICE) for column in data())
    for _ in range(2):
        rig.step(batch)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rig.step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# --- checkpointing -----------------------------------------------------------------------------------


def test_the_peak_falls_with_every_block_but_the_last():
    """The last block is computed again as soon as it was left, so that it is there in full at the peak anyway."""
    *peaks, last = [peak(Encoder(), Plan().but(checkpoint=blocks)) for blocks in range(BLOCKS + 1)]
    assert all(more > less for more, less in itertools.pairwise(peaks)), peaks
    assert last < 1.2 * peaks[-1], (peaks, last)
    assert last < peaks[0] / 2, (peaks, last)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [Encoder, Norms])
def test_eager_steps_have_the_numbers_of_plain_ones(make, precision):
    mine_model, theirs_model = twins(make())
    mine = trained(mine_model, Plan().but(checkpoint=BLOCKS, precision=precision))
    theirs = trained(theirs_model, Plan().but(precision=precision))
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if precision == "fp32" else {"rtol": 1e-2, "atol": 1e-3}
    assert_same(mine, theirs, **tolerance)
    for one, other in zip(mine_model.buffers(), theirs_model.buffers(), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("make", [Encoder, Norms])
def test_captured_steps_have_the_numbers_of_plain_captured_ones(make, steps):
    """Dropout too: what is computed again draws the masks of the first pass, in every replay."""
    mine_model, theirs_model = twins(make())
    plan = CAPTURED.but(replay_steps=steps)
    mine = trained(mine_model, plan.but(checkpoint=BLOCKS), epochs=8)
    theirs = trained(theirs_model, plan, epochs=8)
    assert mine[2][1] is None, mine[2]
    assert mine[2][0] >= 1
    assert_same(mine, theirs)
    for one, other in zip(mine_model.buffers(), theirs_model.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_captured_steps_have_the_numbers_of_eager_ones():
    mine_model, theirs_model = twins(Encoder())
    mine = trained(mine_model, CAPTURED.but(checkpoint=BLOCKS), epochs=8)
    theirs = trained(theirs_model, Plan(), epochs=8)
    assert mine[2][0] >= 1, mine[2]
    assert_same(mine, theirs)


def test_masks_differ_from_replay_to_replay():
    rig = Rig(Encoder(0.5), lambda p: torch.optim.SGD(p, lr=0.0), nn.CrossEntropyLoss(), device=DEVICE)
    rig.use(rig.plan.but(mode="captured", checkpoint=BLOCKS))
    batch = tuple(column[:BATCH].to(DEVICE) for column in data())
    losses = torch.stack([rig.step(batch).clone() for _ in range(50)])
    assert rig.given_up is None, rig.given_up
    assert len(losses.unique()) > 45


def test_recurrent_layers_that_drop_out_are_refused():
    class Recurrent(nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(8, 8, 2, dropout=dropout) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(x)
            return x

    def supports(dropout):
        rig = Rig(Recurrent(dropout), sgd, nn.MSELoss(), device=DEVICE)
        return rig.supports(rig.plan.but(checkpoint=1))

    assert supports(0.0) is None
    assert "recurrent layers with dropout" in supports(0.5)


# --- out of memory -----------------------------------------------------------------------------------


@pytest.fixture
def memory_of(monkeypatch, tmp_path):
    """Sets how many bytes more than now torch may take."""
    monkeypatch.chdir(tmp_path)

    with memory_limited(DEVICE) as limit:
        yield limit


def fitted(model, plan, batch=BATCH):
    job = Job(
        model=model,
        data=data(2 * batch),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        batch_size=batch,
        epochs=3,
        device=DEVICE,
    )
    return fit(job, plan=plan, save_every=0, progress=False)


def reserved_by(model, plan, batch):
    """Bytes that torch takes at most in a whole run, beside what it had."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    run = fitted(model, plan, batch)
    return torch.cuda.max_memory_reserved() - before, run


def test_a_run_that_runs_out_of_memory_ends_with_the_weights_of_one_that_does_not(memory_of):
    plan, batch = {"kind": "gather"}, 128
    most, theirs = reserved_by(Encoder(), plan, batch)
    least, _ = reserved_by(Encoder(), {**plan, "checkpoint": BLOCKS}, batch)
    weights = parameters_of(theirs.model).clone()
    assert most > 1.5 * least, (most / MIB, least / MIB)
    memory_of((least + most) // 2)
    mine = fitted(Encoder(), plan, batch)
    faults = [entry.why for entry in mine.ledger if entry.outcome == "fault"]
    assert faults
    assert all(why.startswith("out of memory: ") for why in faults), faults
    assert mine.plan.memory.checkpoint > 0
    assert mine.plan.memory.micro_batch is None
    assert mine.steps == theirs.steps
    torch.testing.assert_close(parameters_of(mine.model), weights, rtol=1e-3, atol=1e-4)


def test_a_captured_run_with_too_little_memory_comes_to_its_end(memory_of):
    """A recording that finds no memory is given up; steps that find none are made again under a smaller plan."""
    plan, batch = {"kind": "resident", "mode": "captured", "optimizer": "fused"}, 128
    most, theirs = reserved_by(Encoder(0.0), plan, batch)
    least, _ = reserved_by(Encoder(0.0), {**plan, "checkpoint": BLOCKS}, batch)
    weights = parameters_of(theirs.model).clone()
    assert most > 1.5 * least, (most / MIB, least / MIB)
    memory_of((least + most) // 2)
    mine = fitted(Encoder(0.0), plan, batch)
    assert [entry for entry in mine.ledger if entry.outcome == "fault"], mine.ledger.to_lines()
    assert mine.steps == theirs.steps
    torch.testing.assert_close(parameters_of(mine.model), weights, rtol=1e-3, atol=1e-4)


def test_a_model_that_repeats_nothing_is_given_smaller_pieces(memory_of):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 4096), nn.GELU(), nn.Linear(4096, 8), nn.Flatten(), nn.Linear(1024, 3))

    batch = 512
    most, theirs = reserved_by(make(), {"kind": "gather"}, batch)
    weights = parameters_of(theirs.model).clone()
    memory_of(int(0.7 * most))
    mine = fitted(make(), {"kind": "gather"}, batch)
    assert mine.plan.memory.micro_batch in (256, 128, 64)
    assert mine.steps == theirs.steps
    torch.testing.assert_close(parameters_of(mine.model), weights, rtol=1e-3, atol=1e-4)
