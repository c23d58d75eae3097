"""Data that changes while a script or a Rig trains: every batch is what the loop without hotlap would have."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from hotlap import Plan, Rig
from hotlap.core.plan import Feed
from hotlap.core.table import rows, table
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder

COUNT, SIZE, EPOCHS = 48, 8, 6
X = torch.randn(COUNT, 5, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


class Held(Dataset):
    """Samples out of tensors, scaled."""

    def __init__(self):
        self.x, self.y, self.scale = X.clone(), Y.clone(), 1.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] * self.scale, self.y[index]


class OfArrays(Held):
    """The same out of arrays, with its labels in a list."""

    def __init__(self):
        super().__init__()
        self.x, self.y = self.x.numpy().copy(), self.y.tolist()

    def __getitem__(self, index):
        return self.x[index] * np.float32(self.scale), self.y[index]


class Harder(Held):
    """Counts its fetches, and grows harder."""

    def __init__(self):
        super().__init__()
        self.fetched = 0

    def __getitem__(self, index):
        self.fetched += 1
        return self.x[index] / (1 + self.fetched / COUNT), self.y[index]


class Turned(Held):
    """The same with the other sign."""

    def __getitem__(self, index):
        return -self.x[index], self.y[index]


def tensors():
    return TensorDataset(X.clone(), Y.clone())


def replace_tensors(data):
    data.tensors = (X / 2, 1 - Y)


def correct_some(data):
    for index in np.random.default_rng(int(data.y[0])).integers(0, COUNT, 2):
        data.y[index] = 1 - data.y[index]


def reverse(data):
    data.indices.reverse()


# What changes, and at which batch: at the beginning of an epoch, or within one.
CHANGES = {
    "labels corrected half way": (Held, lambda data: data.y.copy_(1 - Y), (3 * COUNT // SIZE,)),
    "labels of arrays corrected": (OfArrays, correct_some, tuple(range(6, 36, 6))),
    "labels of tensors corrected": (Held, correct_some, tuple(range(6, 36, 6))),
    "an array written to": (OfArrays, lambda data: data.x.__imul__(0.5), (12,)),
    "an attribute flipped within an epoch": (Held, lambda data: setattr(data, "scale", -1.0), (15,)),
    "another class within an epoch": (Held, lambda data: setattr(data, "__class__", Turned), (15,)),
    "a tensor written to within an epoch": (Held, lambda data: data.x.mul_(2), (15,)),
    "a tensor replaced within an epoch": (Held, lambda data: setattr(data, "x", X + 1), (15,)),
    "other tensors": (tensors, replace_tensors, (12,)),
    "other tensors within an epoch": (tensors, replace_tensors, (15,)),
    "tensors written to within an epoch": (tensors, lambda data: data.tensors[1].copy_(1 - Y), (15,)),
    "other rows": (lambda: Subset(tensors(), list(range(COUNT))), reverse, (12,)),
    "other tensors beneath a subset": (
        lambda: Subset(tensors(), list(range(COUNT))),
        lambda data: replace_tensors(data.dataset),
        (15,),
    ),
    "another part of several": (
        lambda: ConcatDataset([Held(), Held()]),
        lambda data: setattr(data.datasets[1], "scale", 3.0),
        (15,),
    ),
    "a dataset that counts its fetches": (Harder, lambda data: None, ()),
}


class Script:
    """A loop as people write it: what it saw, and where its data changes."""

    def __init__(self, name):
        self.make, self.change, self.when = CHANGES[name]

    def train(self, epochs=EPOCHS):
        torch.manual_seed(1)
        data, model = self.make(), nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader, seen, number = DataLoader(data, batch_size=SIZE, shuffle=True), [], 0
        for _ in range(epochs):
            # Before the epoch, or between two batches of it.
            for x, y in self._changing(loader, data, number):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                seen.append((x.clone(), y.clone(), loss.item()))
            number += len(loader)
        return seen

    def _changing(self, loader, data, number):
        if number in self.when:
            self.change(data)
        for batch in loader:
            yield batch
            number += 1
            if number in self.when and number % len(loader):
                self.change(data)


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))

    def opened(kind=None, plan=None):
        if kind is not None:
            save_plan(Plan(feed=Feed(kind=kind, workers=int(kind == "loader"))), tmp_path / "plan.toml")
            plan = str(tmp_path / "plan.toml")
        return Session(Settings(name="test", out=tmp_path / "run", plan=plan, tune_s=2.0))

    return opened


def assert_same(seen, wanted):
    assert len(seen) == len(wanted)
    for number, (mine, theirs) in enumerate(zip(seen, wanted, strict=True)):
        assert torch.equal(mine[0], theirs[0]), f"batch {number} has other samples"
        assert torch.equal(mine[1], theirs[1]), f"batch {number} has other labels"
        assert mine[2] == theirs[2], f"another loss at batch {number}"


@pytest.mark.parametrize("name", CHANGES)
def test_a_script_whose_data_changes_trains_as_without_hotlap(session, name):
    wanted = Script(name).train()
    with session("gather"):
        assert_same(Script(name).train(), wanted)


@pytest.mark.parametrize("name", ["an attribute flipped within an epoch", "labels of arrays corrected"])
def test_workers_that_hotlap_starts_do_not_keep_old_data(session, name):
    wanted = Script(name).train()
    with session("loader"):
        assert_same(Script(name).train(), wanted)


@pytest.mark.parametrize("name", CHANGES)
def test_under_max_a_script_whose_data_changes_sees_the_same_batches(session, name):
    wanted = Script(name).train()
    with session(plan="max"):
        seen = Script(name).train()
    for number, (mine, theirs) in enumerate(zip(seen, wanted, strict=True)):
        assert torch.equal(mine[0], theirs[0]), number
        assert torch.equal(mine[1], theirs[1]), number


def test_a_feed_that_was_left_is_told_in_the_table(session, tmp_path):
    with session("gather"):
        Script("an attribute flipped within an epoch").train()
    ledger = RunFolder.open(tmp_path / "run").read_ledger()
    (told,) = [row for row in rows(ledger) if row.what == "data changed"]
    assert told.sign == "!"
    assert told.why.startswith("'scale' has changed")
    assert list(ledger)[-1].plan.feed.kind == "loader"
    assert any("data changed" in line for line in table(ledger))


def test_a_kept_feed_that_is_left_becomes_rejected_in_the_table(session, tmp_path, monkeypatch):
    from hotlap.moves import GATHER
    from hotlap.script.training import ScriptTraining

    used = ScriptTraining.use

    def kept(self, plan, **words):
        used(self, plan, **words)
        if plan.feed.kind == "gather":
            self.write_down(GATHER.name, "kept", "same maths", figures={"ratio": 3.4})

    monkeypatch.setattr(ScriptTraining, "use", kept)
    with session("gather"):
        Script("labels of arrays corrected").train()
    found = {row.what: row for row in rows(RunFolder.open(tmp_path / "run").read_ledger())}
    assert found[GATHER.name].outcome == "rejected"
    assert "the data changed" in found[GATHER.name].why


def test_an_evaluation_whose_data_changes_sees_it(session, monkeypatch):
    from hotlap.script.feed import evaluation_feed as evaluation_feed
    from hotlap.script.feed.loader_proxy import LoaderProxy

    monkeypatch.setattr(LoaderProxy, "holding_s", lambda self, feed=None: 0.0)
    monkeypatch.setattr(evaluation_feed, "PROBED", 0)
    monkeypatch.setattr(evaluation_feed, "LEAST_S", 0.0)

    def run():
        torch.manual_seed(1)
        model, tested, seen = nn.Linear(5, 2), Held(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader, valid = DataLoader(tensors(), batch_size=SIZE), DataLoader(tested, batch_size=SIZE)
        for epoch in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            for number, (x, y) in enumerate(valid):
                seen.append((x.clone(), y.clone(), 0.0))
                if (epoch, number) == (4, 2):
                    tested.scale = 5.0
        return seen

    wanted = run()
    with session("gather"):
        assert_same(run(), wanted)


# --- the same in a Rig -------------------------------------------------------------------------------


def rigged(name, plan, loaded):
    """What a Rig's steps see, batch by batch; without a plan, by the job's own feed."""
    make, change, when = CHANGES[name]
    torch.manual_seed(1)
    data, model, seen = make(), nn.Linear(5, 2), []

    def loss(model, batch):
        x, y = batch
        seen.append((x.clone(), y.clone(), 0.0))
        return nn.functional.cross_entropy(model(x), y)

    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), loss, plan=plan)
    given = DataLoader(data, batch_size=SIZE, shuffle=True) if loaded else data
    settings = {} if loaded else {"batch_size": SIZE}
    for number, window in enumerate(rig.feed(given, epochs=EPOCHS, **settings), 1):
        rig.step(window)
        if number in when:
            change(data)
    return seen, rig


@pytest.mark.parametrize("kind", ["resident", "gather"])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "a dataset that counts its fetches"])
def test_a_rig_whose_data_changes_trains_as_by_its_own_feed(name, loaded, kind):
    wanted, rig = rigged(name, None, loaded)
    if rig.supports(Plan(feed=Feed(kind=kind))) is not None:
        assert kind == "gather"  # which needs tensors
        return
    seen, rig = rigged(name, Plan(feed=Feed(kind=kind)), loaded)
    assert_same(seen, wanted)
    told = [entry for entry in rig.ledger if entry.what == "data changed"]
    assert bool(told) == (kind == "resident")


@pytest.mark.parametrize("kind", [None, "resident", "gather"])
@pytest.mark.parametrize("name", CHANGES)
def test_each_batch_of_a_rig_is_what_the_dataset_gives_by_then(name, kind):
    make, change, when = CHANGES[name]
    if name == "a dataset that counts its fetches":
        return  # to ask it is to change it
    data, seen = make(), []

    def loss(model, batch):
        # What comes next changes behind the step, so this is the data that the batch was made of.
        start = len(seen) % (len(data) // SIZE) * SIZE
        x, y = default_collate([data[index] for index in range(start, start + SIZE)])
        seen.append(torch.equal(batch[0], x) and torch.equal(batch[1], y))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    rig = Rig(nn.Linear(5, 2), lambda p: torch.optim.SGD(p, lr=0.1), loss)
    windows = rig.feed(data, epochs=EPOCHS, batch_size=SIZE, order="as given")
    for number, window in enumerate(windows, 1):
        rig.step(window)
        plan = Plan(feed=Feed(kind=kind or "loader"))
        if number == 3 and kind is not None and rig.supports(plan) is None:
            rig.use(plan)
        if number in when:
            change(data)
    assert all(seen), seen.index(False)


def test_data_that_keeps_changing_is_left_to_the_jobs_own_feed():
    data = Held()
    rig = Rig(nn.Linear(5, 2), lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(),
              plan=Plan(feed=Feed(kind="resident")))  # fmt: skip
    for number, window in enumerate(rig.feed(data, batch_size=SIZE, epochs=3)):
        rig.step(window)
        data.scale = float(number)
    assert rig.plan.feed.kind == "loader"
    assert [entry.why for entry in rig.ledger if entry.what == "data changed"][-1].endswith("by the job's own")


def test_a_dataset_that_counts_its_fetches_is_not_held():
    rig = Rig(nn.Linear(5, 2), lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss())
    next(iter(rig.feed(Harder(), batch_size=SIZE, epochs=1)))
    assert "Harder sets self.fetched" in rig.supports(Plan(feed=Feed(kind="resident")))
