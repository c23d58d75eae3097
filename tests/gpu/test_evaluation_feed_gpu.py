"""An evaluation inside the loop of a script that trains on a real GPU: its batches are there too, and the same."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hotlap.core.plan import Feed, Plan
from hotlap.script.feed import evaluation_feed as evaluation_feed
from hotlap.script.feed.evaluation_feed import WHAT
from hotlap.script.feed.loader_proxy import LoaderProxy
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder

EPOCHS = 5


class Rows(Dataset):
    def __init__(self, count, seed):
        self.x = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.y = self.x.sum((1, 2, 3)) > 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


def train(device, *, pinned, inference):
    """A loop with an evaluation after every epoch: all that it saw of its batches, and of its predictions."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train_loader = DataLoader(Rows(256, 1), batch_size=16, shuffle=True, pin_memory=pinned)
    val_loader = DataLoader(Rows(300, 2), batch_size=32, shuffle=True, pin_memory=pinned)
    seen = []
    for _ in range(EPOCHS):
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        with torch.inference_mode() if inference else torch.no_grad():
            for x, y in val_loader:
                on_device, classes = x.to(device, non_blocking=True), y.cuda()
                seen.append(
                    [part.cpu() for part in (x, y, on_device, classes, model(on_device), torch.get_rng_state())]
                )
    return seen, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("inference", [False, True], ids=["no grad", "inference"])
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("kind", ["resident", "stream"])
def test_an_evaluation_comes_by_the_feed_of_the_loop(kind, pinned, inference, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(LoaderProxy, "holding_s", lambda self, feed=None: 0.0)
    monkeypatch.setattr(evaluation_feed, "PROBED", 0)
    monkeypatch.setattr(evaluation_feed, "LEAST_S", 0.0)
    monkeypatch.setattr(evaluation_feed._Epochs, "batch_s", property(lambda self: 1.0))
    device = torch.device("cuda")
    save_plan(Plan(feed=Feed(kind=kind)), tmp_path / "plan.toml")
    alone = train(device, pinned=pinned, inference=inference)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with Session(Settings(name="test", out=tmp_path / "run", plan=str(tmp_path / "plan.toml"))):
        fed = train(device, pinned=pinned, inference=inference)
    for parts, others in zip([*fed[0], fed[1]], [*alone[0], alone[1]], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(parts, others, strict=True))
    wanted = "gather" if inference else kind
    ledger = RunFolder.open(tmp_path / "run").read_ledger()
    assert [entry.why.split(":")[0] for entry in ledger if entry.what == WHAT] == [f"by feed {wanted}"]
    gc.collect()
    assert torch.cuda.memory_allocated() <= before, "what was held for the training goes with it"
