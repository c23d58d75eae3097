"""`hotlap batch` of somebody's script: its loader is found and made with other sizes, in a process each time."""

import json
import textwrap

import pytest
from typer.testing import CliRunner

from hotlap.cli import app
from hotlap.core.errors import TrainingError
from hotlap.kit import batch as kit
from hotlap.kit.probe import ProbeRequest, run_probe
from hotlap.script.running import Target

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

limit = int(sys.argv[1])
model = nn.Linear(8, 2)
optimizer = torch.optim.Adam(model.parameters())
held_out = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=2)
loader = DataLoader(TensorDataset(torch.randn(512, 8), torch.randint(2, (512,))), 8, True)
for epoch in range(10_000):
    with torch.no_grad():
        for _ in held_out:
            pass
    for number, (x, y) in enumerate(loader):
        if len(x) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        nn.functional.cross_entropy(model(x), y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_a_scripts_loader_is_found_and_made_with_another_batch_size(script):
    target = Target(path=str(script), args=["1000"])
    other = run_probe(target, ProbeRequest(loader=1, change={"batch_size": 32}, laps=2, lap_s=0.0, counts=True))
    assert (other.loader, other.batch_size, other.samples) == (1, 32, 512)
    assert [samples for _, samples in other.laps] == [64, 64]
    assert other.peak_bytes > 3 * 8 * 2 * 4
    full = run_probe(Target(path=str(script), args=["20"]), ProbeRequest(loader=1, change={"batch_size": 32}))
    assert full.out_of_memory == "CUDA out of memory."


def test_the_command_answers_for_a_script_in_json(script):
    done = CliRunner().invoke(app, ["batch", "--json", "--quiet", "--seconds", "1", str(script), "1000"])
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["own_batch"], found["effective_batch"]) == (8, 16)
    assert 8 in {one["size"] for one in found["trials"]}
    assert found["ended"] == "1 s were spent"
    assert "batch_size=" in found["write"]


RAGGED = """
import torch
from torch import nn
from torch.utils.data import DataLoader

texts = [([1] * n, n % 2) for n in [3, 4, 50, 5, 30] + [6] * 59]

def padded(rows):
    ids = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    return ids, torch.tensor([label for _, label in rows])

model = nn.Sequential(nn.Embedding(5, 16), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(texts, batch_size=2, shuffle=True, collate_fn=padded, num_workers=0)
for epoch in range(10_000):
    for ids, labels in loader:
        assert LEAST <= ids.shape[1]
        nn.functional.cross_entropy(model(ids).mean(1), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_scripts_batches_are_of_its_longest_samples_where_lengths_can_be_read(tmp_path):
    path = tmp_path / "ragged.py"
    path.write_text(RAGGED.replace("LEAST", "3"))
    first = run_probe(Target(path=str(path)), ProbeRequest(laps=1, lap_s=0.0, counts=True, lengths=True))
    assert first.varies
    assert first.longest == "batches hold the longest of all 64 samples"
    path.write_text(RAGGED.replace("LEAST", "50"))
    request = ProbeRequest(loader=first.loader, change={"batch_size": 4}, longest=True, laps=1, lap_s=0.0, counts=True)
    seen = run_probe(Target(path=str(path)), request)
    assert seen.batch_size == 4
    assert seen.peak_bytes > 4 * 50 * 16 * 4


UNEVEN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(8, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sizes = SIZES
starts = [sum(sizes[:n]) for n in range(len(sizes))]
batches = [list(range(start, start + size)) for start, size in zip(starts, sizes)]
loader = DataLoader(TensorDataset(torch.randn(sum(sizes), 8)), batch_sampler=batches)
for epoch in range(10_000):
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("sizes", [[64, 3], [3, 64], [64, 64, 3], [64, 3, 64], [3, 64, 64]])
def test_memory_is_that_of_a_whole_batch_and_not_of_an_epochs_last(tmp_path, sizes):
    path = tmp_path / "uneven.py"
    path.write_text(UNEVEN.replace("SIZES", str(sizes)))
    seen = run_probe(Target(path=str(path)), ProbeRequest(laps=1, lap_s=0.0, counts=True))
    assert seen.samples_an_update == 64
    assert seen.peak_bytes > 64 * 512 * 4


def test_a_sampler_of_the_scripts_own_is_left_to_it(tmp_path):
    path = tmp_path / "ragged.py"
    sampler = "sampler=torch.utils.data.SubsetRandomSampler(range(64))"
    path.write_text(RAGGED.replace("LEAST", "3").replace("shuffle=True", sampler))
    found = kit.batch_of_script(Target(path=str(path)), seconds=0.1)
    assert "note       the lengths of samples are unknown, so batches are the first that came" in found.summary()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('nothing')", "ended without an update of a torch optimizer"),
        ("raise ValueError('mine')", "ended by an error: ValueError: mine"),
    ],
)
def test_a_script_that_does_not_train_is_told_in_one_line(tmp_path, text, said):
    path = tmp_path / "idle.py"
    path.write_text(text)
    with pytest.raises(TrainingError, match=said):
        run_probe(Target(path=str(path)), ProbeRequest())
