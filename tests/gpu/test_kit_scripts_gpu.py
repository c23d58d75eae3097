"""The kit on a real GPU, of scripts as they are: each look is a process of its own."""

import pytest

from hotlap.kit.batch import batch_of_script
from hotlap.kit.memory import memory_of_script
from hotlap.kit.probe import ProbeRequest, run_probe
from hotlap.script.running import Target

GIB = 2**30
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(2**30 / total)
model = nn.Sequential(nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 4)).cuda()
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(40_000, 1024), torch.randint(4, (40_000,)))
loader = DataLoader(data, batch_size=2048, shuffle=True)
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
"""


def test_a_scripts_largest_batch_is_found_in_processes_of_its_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    found = batch_of_script(Target(path=str(path)), seconds=150)
    assert found.searched.found_largest, found.summary()
    assert 2048 < found.largest.size < 32_000
    assert 0.9 * GIB < found.room_bytes < 1.1 * GIB
    assert found.effective_batch == 2048


def test_a_scripts_account_adds_up(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT.replace("batch_size=2048", "batch_size=4096"))
    found = memory_of_script(Target(path=str(path)))
    assert found.device.startswith("cuda")
    assert abs(found.peak_bytes - found.counted_bytes) < 0.05 * found.peak_bytes, found.summary()
    assert found.kinds["libraries"] > 0
    assert found.held == ()
    half = next(one for one in found.savings if "autocast" in one.what)
    assert half.why_not is None, half
    assert half.step_s > 0
    assert half.peak_bytes < found.peak_bytes


@pytest.mark.parametrize("kind", ["gather", "stream", "resident"])
def test_a_scripts_batches_come_as_hotlap_run_brings_them(tmp_path, kind):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    seen = run_probe(Target(path=str(path)), ProbeRequest(laps=2, lap_s=0.05, feed=kind))
    assert seen.why_not is None
    assert seen.refused == {}
    assert len(seen.laps) == 2
    assert seen.device.startswith("cuda")
