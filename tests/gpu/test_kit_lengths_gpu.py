"""The kit on a real GPU, of a script whose samples differ in length. By itself: it takes some ten processes."""

from hotlap.kit.batch import batch_of_script
from hotlap.script.running import Target

GIB = 2**30
RAGGED = """
import torch
from torch import nn
from torch.utils.data import DataLoader

texts = [([1] * n, n % 2) for n in [20, 40, 4000] + [30] * 2000]

def padded(rows):
    ids = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    return ids, torch.tensor([label for _, label in rows])

torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.get_device_properties(0).total_memory)
model = nn.Sequential(nn.Embedding(5, 256), nn.Linear(256, 2)).cuda()
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(texts, batch_size=32, shuffle=True, collate_fn=padded)
for epoch in range(10_000):
    for ids, labels in loader:
        nn.functional.cross_entropy(model(ids.cuda()).mean(1), labels.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_scripts_largest_batch_is_one_that_its_longest_samples_fit_in(tmp_path):
    path = tmp_path / "ragged.py"
    path.write_text(RAGGED)
    found = batch_of_script(Target(path=str(path)), seconds=240)
    assert "batches hold the longest of all 2,003 samples" in found.summary()
    # What the embedding gives for a sample, and its gradient: of 4,000 words and not of 30.
    assert found.searched.line.bytes_a_sample > 4000 * 256 * 4
    assert found.searched.found_largest, found.summary()
    assert found.largest.size < GIB / (4000 * 256 * 4)
