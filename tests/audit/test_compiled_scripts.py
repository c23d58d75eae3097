"""Scripts that use torch.compile: under a session torch compiles what it compiles by itself, and as often."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.plan import Feed, Plan
from hotlap.script.idle import WHY, CompileWatch
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder

EPOCHS = 3
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:`torch.jit.script_method` is deprecated")


class Net(nn.Module):
    def __init__(self, outputs=8):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, outputs)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Broken(nn.Module):
    """Compiled in two parts."""

    def __init__(self):
        super().__init__()
        self.one, self.other = Net(), Net(2)

    def forward(self, x):
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.other(x)


class Graphs:
    """A backend that counts."""

    def __init__(self):
        self.made = 0

    def __call__(self, graph, inputs):
        self.made += 1
        return graph.forward

    def compiled(self, what, fullgraph=True):
        return torch.compile(what, backend=self, fullgraph=fullgraph)


def loaders(samples=48):
    """Of the training and of the evaluation."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(samples, 8, generator=generator), torch.randint(2, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16), DataLoader(TensorDataset(x, y), batch_size=16)


def train(networks, call, *, update=None, optimizer=None):
    """Train with an evaluation after each epoch; the losses."""
    parameters = [p for network in networks for p in network.parameters()]
    optimizer = optimizer or torch.optim.Adam(parameters, lr=0.01)
    update = update or optimizer.step
    training, test = loaders()
    losses = []
    for _ in range(EPOCHS):
        for network in networks:
            network.train()
        for x, y in training:
            optimizer.zero_grad()
            loss = cross_entropy(call(x), y)
            loss.backward()
            update()
            losses.append(loss.item())
        for network in networks:
            network.eval()
        with torch.no_grad():
            losses += [cross_entropy(call(x), y).item() for x, y in test]
    return losses


def gan(graphs):
    maker, judge = graphs.compiled(Net()), graphs.compiled(Net(1))
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (maker, judge)]
    training, test = loaders(40)  # with an uneven last batch
    losses = []
    for _ in range(EPOCHS):
        for network in (maker, judge):
            network.train()
        for x, _ in training:
            fake = maker(torch.randn(len(x), 8))
            loss = judge(x).mean() - judge(fake.detach()).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            loss = judge(fake).mean()
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            losses.append(loss.item())
        for network in (maker, judge):
            network.eval()
        with torch.no_grad():
            losses += [judge(maker(x)).mean().item() for x, _ in test]
    return losses


def five_networks(graphs):
    networks = [graphs.compiled(Net()) for _ in range(5)]

    def call(x):
        for network in networks:
            x = network(x)
        return x

    return train(networks, call)


def a_function_that_calls_modules(graphs):
    network, head = Net(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return train([network, head], graphs.compiled(lambda x: head(network(x))))


def a_sequence(graphs):
    network = graphs.compiled(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)))
    return train([network], network)


def a_module_in_place(graphs):
    network = Net(2)
    network.compile(backend=graphs, fullgraph=True)
    return train([network], network)


def a_module_in_two_parts(graphs):
    network = graphs.compiled(Broken(), fullgraph=False)
    return train([network], network)


def a_module_late(graphs):
    network = Net(2)
    compiled, calls = [], [0]

    def call(x):
        calls[0] += 1
        if calls[0] == 14:
            compiled.append(graphs.compiled(network))
        return (compiled or [network])[0](x)

    return train([network], call)


def the_step_of_an_optimizer(graphs):
    network = Net(2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def update():
        clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    return train([network], network, optimizer=optimizer, update=graphs.compiled(update, fullgraph=False))


SCRIPTS = [
    gan,
    five_networks,
    a_function_that_calls_modules,
    a_sequence,
    a_module_in_place,
    a_module_in_two_parts,
    a_module_late,
    the_step_of_an_optimizer,
]


def ran(script):
    """What a script gives, and what torch compiled for it."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(1)
    graphs = Graphs()
    losses = script(graphs)
    assert graphs.made
    return losses, graphs.made, {kind: dict(counters[kind]) for kind in ("stats", "frames", "graph_break")}


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    return lambda **settings: Session(Settings(name="test", out=tmp_path / "run", **settings))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_compiled_script_compiles_what_it_does_by_itself(session, script):
    alone = ran(script)
    with session(tune_s=1.0):
        watched = ran(script)
    assert watched == alone


@pytest.mark.parametrize("script", [a_function_that_calls_modules, the_step_of_an_optimizer])
def test_the_compiler_may_be_imported_by_the_first_optimizer_only(session, script, monkeypatch):
    alone = ran(script)
    answers = [False]
    monkeypatch.setattr(CompileWatch, "can_be_watched", lambda self: not answers or answers.pop())
    with session(tune_s=1.0):
        watched = ran(script)
    assert watched == alone


def test_a_training_in_another_precision_ends_so_when_the_script_begins_to_compile(session, tmp_path):
    save_plan(Plan(feed=Feed(kind="loader")).but(precision="bf16"), tmp_path / "plan.toml")
    alone = ran(a_module_late)
    with session(plan=str(tmp_path / "plan.toml")):
        watched = ran(a_module_late)
    assert watched[1:] == alone[1:]
    assert watched[0][:4] == alone[0][:4]  # until the training was found
    assert watched[0] == pytest.approx(alone[0], rel=0.1)
    entries = list(RunFolder.open(tmp_path / "run").read_ledger())
    assert {entry.plan.numerics.precision for entry in entries} == {"fp32", "bf16"}
    assert entries[-1].why == WHY


def test_a_compiled_module_can_still_be_fed_otherwise(session, tmp_path):
    save_plan(Plan(feed=Feed(kind="gather")).but(optimizer="fused"), tmp_path / "plan.toml")
    with session(plan=str(tmp_path / "plan.toml")):
        ran(five_networks)
    found = RunFolder.open(tmp_path / "run").read_plan()
    assert (found.feed.kind, found.numerics.optimizer) == ("gather", "fused")


def test_calls_of_compiled_modules_are_refused_with_the_reason(session, tmp_path, capsys):
    save_plan(Plan(feed=Feed(kind="loader")).but(precision="bf16"), tmp_path / "plan.toml")
    with session(plan=str(tmp_path / "plan.toml")):
        ran(five_networks)
    assert WHY in capsys.readouterr().err
