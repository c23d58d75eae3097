"""Scripts that use torch.compile on a real GPU: torch compiles as often as by itself, whatever hotlap has captured."""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.plan import Feed, Plan
from hotlap.script.idle import WHY
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder

DEVICE = torch.device("cuda")
EPOCHS = 8
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:`torch.jit.script_method` is deprecated")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def train(*, compiled_from):
    """Train by a compiled module from one epoch on; the losses, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    network = Net().to(DEVICE)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(128, 8, generator=generator), torch.randint(2, (128,), generator=generator))
    loader, losses = DataLoader(data, batch_size=16), []
    for epoch in range(EPOCHS):
        if epoch == compiled_from:
            network = torch.compile(network, backend=backend, fullgraph=True)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert graphs
    return losses, len(graphs)


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))

    def opened(plan):
        save_plan(plan, tmp_path / "plan.toml")
        return Session(Settings(name="test", out=tmp_path / "run", plan=str(tmp_path / "plan.toml")))

    return opened


def test_a_compiled_module_is_compiled_as_often_when_its_data_is_held(session, tmp_path):
    alone = train(compiled_from=0)
    with session(Plan(feed=Feed(kind="resident")).but(optimizer="fused")):
        fed = train(compiled_from=0)
    assert fed[1] == alone[1]
    assert fed[0] == pytest.approx(alone[0], rel=1e-3)
    assert RunFolder.open(tmp_path / "run").read_plan().feed.kind == "resident"


def test_a_captured_training_ends_so_when_the_script_begins_to_compile(session, tmp_path):
    own = F.cross_entropy, torch.Tensor.item, torch.Tensor.backward, nn.Module.__call__
    alone = train(compiled_from=5)
    with session(Plan(feed=Feed(kind="loader")).but(mode="captured", optimizer="fused")):
        captured = train(compiled_from=5)
        assert (F.cross_entropy, torch.Tensor.item, torch.Tensor.backward, nn.Module.__call__) == own
    assert captured[1] == alone[1]
    assert captured[0] == pytest.approx(alone[0], rel=1e-2)
    entries = list(RunFolder.open(tmp_path / "run").read_ledger())
    assert "captured" in {entry.plan.execution.mode for entry in entries}
    assert WHY in [entry.why for entry in entries]
