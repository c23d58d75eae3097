"""Captured steps with one of their tricks left out, on a real GPU: the same training to rounding."""

import pytest
import torch
from plain import parameters_of
from torch import nn

from hotlap import Plan, Rig
from hotlap.core.tricks import CAPTURED_UPDATE, FIT_TRICKS, LOSS_WITHOUT_WAITING
from hotlap.engine.capture.captured_step import CapturedStep

CAPTURED = Plan().but(mode="captured", kind="resident", replay_steps=4, optimizer="fused", precision="bf16")


class Model(nn.Module):
    """An encoder of torch and a batch norm, so that each trick has something to do."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x).mean(1)))


def trained(*without):
    """The rig after some epochs, its losses, and what an evaluation comes to."""
    torch.manual_seed(0)
    model = Model()
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(256, 8, 32, generator=generator), torch.randint(3, (256,), generator=generator)
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1)
    rig = Rig(model, lambda p: torch.optim.AdamW(p, lr=1e-3), loss, plan=CAPTURED.but(without=without), device="cuda")
    losses = [rig.step(window) for window in rig.feed(data, batch_size=16, epochs=4)]
    scores = [rig.evaluate(data, ["accuracy"], batch_size=16) for _ in range(2)]
    return rig, torch.stack(losses).float(), scores[-1]["loss"]


@pytest.mark.parametrize("trick", sorted(FIT_TRICKS))
def test_a_captured_training_without_one_of_its_tricks_is_the_same(trick):
    (rig, losses, score), (own, others, other_score) = trained(trick), trained()
    assert isinstance(rig._step, CapturedStep)
    if trick == LOSS_WITHOUT_WAITING:  # a step that waits cannot be recorded
        assert "read back from the device" in rig.given_up
    else:
        assert rig._step.recorded
        assert rig.given_up is None
    assert rig._step.split == (trick == CAPTURED_UPDATE)
    torch.testing.assert_close(losses[-4:], others[-4:], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(parameters_of(rig.model), parameters_of(own.model), rtol=5e-2, atol=5e-2)
    assert score == pytest.approx(other_score, rel=3e-2)
    rig.close()
    own.close()
