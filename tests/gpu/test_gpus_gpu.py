"""On a real GPU the work of an update is that counted on the CPU, and its own time corrects the predictions."""

import pytest
import torch
from torch import nn

import hotlap
from hotlap import Job


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.recurrent, self.head = nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.recurrent(self.blocks(x))[0].mean(1))


def found(device):
    model = Encoder()
    data = (torch.randn(256, 32, 64), torch.randint(3, (256,)))
    made = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.AdamW(model.parameters())}
    return hotlap.gpus(Job(model=model, data=data, **made, batch_size=32, epochs=2, device=device), progress=False)


def test_work_counted_on_the_gpu_is_that_counted_on_the_cpu_and_its_time_corrects():
    on_gpu, on_cpu = found("cuda"), found("cpu")
    assert on_gpu.work.least_step_bytes == on_cpu.work.least_step_bytes
    assert on_gpu.work.total_flops == pytest.approx(on_cpu.work.total_flops, rel=0.1)
    for name in ("operations", "launches", "bytes", "narrow_bytes"):
        assert getattr(on_gpu.work, name) == pytest.approx(getattr(on_cpu.work, name), rel=0.4), name
    assert not on_gpu.work.unfused
    here = [row for row in on_gpu.rows if row.is_here]
    assert [row.gpu.key for row in here] == ([] if on_gpu.here is None else [on_gpu.here])
    for row in here:
        assert row.as_it_is_s == pytest.approx(on_gpu.step_s)
