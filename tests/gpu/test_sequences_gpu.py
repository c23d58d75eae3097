"""Sequences on a real GPU: one captured step a width, the numbers of eager ones, nothing read back."""

import numpy as np
import pytest
import torch
from plain import parameters_of
from torch import nn
from waiting import no_waiting

from hotlap import Job, Plan, Rig, Sequences, fit
from hotlap.engine.capture.captured_step import CapturedStep
from hotlap.tuner import budget

DEVICE = "cuda"


def texts(count=400, longest=64):
    numbers = np.random.default_rng(0)
    lengths = np.clip(numbers.geometric(0.06, count), 1, longest)
    ids = [numbers.integers(1, 200, length).tolist() for length in lengths]
    return Sequences({"input_ids": ids}, columns={"labels": torch.tensor([sum(one) % 3 for one in ids])})


class Reader(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(2)
        self.tokens = nn.Embedding(200, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids, attention_mask):
        hidden = self.encoder(self.tokens(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def loss(model, batch):
    output = model(batch["input_ids"], batch["attention_mask"])
    return nn.functional.cross_entropy(output.float(), batch["labels"])


def trained(plan, *, dropout=0.0, epochs=3, reorder=True):
    torch.manual_seed(7)
    # Not by Adam: keys' biases have no gradient but rounding, which it would blow up to whole steps.
    rig = Rig(Reader(dropout), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), loss, plan=plan, device=DEVICE)
    losses = [rig.step(window) for window in rig.feed(texts(), batch_size=16, epochs=epochs, reorder=reorder)]
    steps = [step for step in rig._steps.values() if isinstance(step, CapturedStep)]
    return torch.stack(losses).double(), parameters_of(rig.model).clone(), rig, steps


@pytest.mark.parametrize("kind", ["resident", "gather", "stream", "loader"])
@pytest.mark.parametrize("reorder", [True, False])
def test_a_captured_step_for_each_width_gives_the_numbers_of_eager_ones(kind, reorder):
    mine = trained(Plan().but(kind=kind, mode="captured"), reorder=reorder)
    theirs = trained(Plan().but(kind="gather"), reorder=reorder)
    torch.testing.assert_close(mine[0], theirs[0], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(mine[1], theirs[1], rtol=2e-3, atol=2e-4)
    (step,) = mine[3]
    assert step.given_up is None
    assert step.recorded > 1


def test_the_widest_is_recorded_first_and_the_others_find_room_in_its_memory():
    plan = Plan().but(kind="resident", mode="captured")
    rig = Rig(Reader(), lambda p: torch.optim.AdamW(p, lr=1e-3), loss, plan=plan, device=DEVICE)
    data = texts()
    for window in rig.feed(data, batch_size=16, epochs=1, reorder=True):
        rig.step(window)
        (step,) = [step for step in rig._steps.values() if isinstance(step, CapturedStep)]
        if step.recorded:
            break
    (graph,) = step._graphs.values()
    assert graph._window.pieces[0].columns is window.pieces[0].columns.widest
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for window in rig.feed(data, batch_size=16, epochs=4, reorder=True):
        rig.step(window)
    torch.cuda.synchronize()
    assert step.recorded > 1
    assert torch.cuda.memory_reserved() <= 1.5 * before


def test_a_replay_of_any_width_waits_for_nothing():
    plan = Plan().but(kind="resident", mode="captured", optimizer="fused")
    rig = Rig(Reader(), lambda p: torch.optim.AdamW(p, lr=1e-3), loss, plan=plan, device=DEVICE)
    data = texts()
    for window in rig.feed(data, batch_size=16, epochs=4, reorder=True):
        rig.step(window)
    for number, window in enumerate(rig.feed(data, batch_size=16, epochs=1, reorder=True)):
        if number in range(2, 20):
            with no_waiting():
                rig.step(window)
        else:
            rig.step(window)
    assert rig._step.recorded > 1
    assert rig.given_up is None


def test_several_updates_a_replay_are_of_one_width():
    mine = trained(Plan().but(kind="resident", mode="captured", replay_steps=2), epochs=4)
    theirs = trained(Plan().but(kind="gather"), epochs=4)
    torch.testing.assert_close(mine[1], theirs[1], rtol=2e-3, atol=2e-4)


def test_fit_tunes_a_training_of_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "SHARE", 100.0)
    monkeypatch.setattr(budget, "HOPEFUL_SHARE", 100.0)
    job = Job(
        model=Reader(0.1),
        data=texts(4000),
        valid=texts(200),
        loss=loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        batch_size=16,
        epochs=12,
        reorder=True,
        device=DEVICE,
    )
    run = fit(job, plan="auto", out=tmp_path / "run", progress=False)
    assert run.plan.execution.mode == "captured", run.summary()
    assert not [entry.why for entry in run.ledger if entry.outcome == "fault"]
