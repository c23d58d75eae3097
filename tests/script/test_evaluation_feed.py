"""Loaders of evaluations inside a training loop: they come by its feed too, and to the script nothing differs."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from hotlap.core.plan import Feed, Plan
from hotlap.script.feed import evaluation_feed as evaluation_feed
from hotlap.script.feed import held_samples
from hotlap.script.feed.device_copies import DeviceCopies
from hotlap.script.feed.evaluation_feed import WHAT
from hotlap.script.feed.held_samples import KeptSamples
from hotlap.script.feed.loader_proxy import LoaderProxy
from hotlap.script.session import Session, Settings
from hotlap.script.tuning import ScriptTuning
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder

EPOCHS = 5


class Rows(Dataset):
    def __init__(self, count=96, seed=5):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Augmented(Rows):
    def __getitem__(self, index):
        return self.x[index] + torch.randn(6), self.y[index]


def evaluated(model, loader, *, most=None):
    """What a script does once in a while: predictions, and what it saw of the batches."""
    model.eval()
    seen = []
    with torch.no_grad():
        for number, (x, y) in enumerate(loader):
            seen.append((x, y, model(x), torch.get_rng_state()))
            if number + 1 == most:
                break
    model.train()
    return seen


def validate(model, loaders):
    return [seen for loader in loaders for seen in evaluated(model, loader)]


def train(loaders, *, epochs=EPOCHS, evaluate=validate, every=None):
    """A loop as people write it, with an evaluation after every epoch or every so many steps; all that it saw."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_loader = DataLoader(Rows(), batch_size=16, shuffle=True)
    seen, step = [], 0
    for _ in range(epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            seen.append((x, loss.detach()))
            step += 1
            if every is not None and step % every == 0:
                seen += evaluate(model, loaders)
        if every is None:
            seen += evaluate(model, loaders)
    seen.append((torch.get_rng_state(), torch.tensor(random.random()), torch.tensor(np.random.random())))
    return seen, [p.detach().clone() for p in model.parameters()]


def assert_same(one, other):
    for parts, others in zip([*one[0], one[1]], [*other[0], other[1]], strict=True):
        assert len(parts) == len(others)
        assert all(torch.equal(a, b) for a, b in zip(parts, others, strict=True))


@pytest.fixture
def held_for_nothing(monkeypatch):
    """Holding costs nothing, and what it brings is not doubted: nothing in here hangs on a clock."""
    monkeypatch.setattr(LoaderProxy, "holding_s", lambda self, feed=None: 0.0)
    monkeypatch.setattr(evaluation_feed, "PROBED", 0)
    monkeypatch.setattr(evaluation_feed, "LEAST_S", 0.0)
    monkeypatch.setattr(evaluation_feed._Epochs, "batch_s", property(lambda self: 1.0))


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))

    def opened(kind="gather", **settings):
        save_plan(Plan(feed=Feed(kind=kind)), tmp_path / "plan.toml")
        settings = {"plan": str(tmp_path / "plan.toml"), **settings}
        return Session(Settings(name="test", out=tmp_path / "run", **settings))

    return opened


@pytest.fixture
def told(tmp_path):
    """What the ledger says of evaluations."""

    def entries(run="run"):
        return [entry for entry in RunFolder.open(tmp_path / run).read_ledger() if entry.what == WHAT]

    return entries


@pytest.fixture
def feeds(monkeypatch):
    """The feed of every epoch of every loader, by loader in the order in which they were first iterated."""
    found: dict[int, list[str]] = {}
    begin = LoaderProxy.begin

    def noted(self, loader):
        begun = begin(self, loader)
        found.setdefault(id(self), []).append(self.feed.kind)
        return begun

    monkeypatch.setattr(LoaderProxy, "begin", noted)
    return lambda: list(found.values())


def loader_of(data=None, **settings):
    return DataLoader(data if data is not None else Rows(80, seed=6), batch_size=8, **settings)


LOADERS = {
    "in order": lambda: [loader_of()],
    "shuffled": lambda: [loader_of(shuffle=True)],
    "by a generator": lambda: [loader_of(shuffle=True, generator=torch.Generator().manual_seed(4))],
    "tensors": lambda: [loader_of(TensorDataset(*Rows(80)[:]))],
    "with workers": lambda: [loader_of(num_workers=1)],
    "two of them": lambda: [loader_of(), loader_of(Rows(40, seed=7))],
}


@pytest.mark.usefixtures("held_for_nothing")
@pytest.mark.parametrize("loaders", LOADERS)
def test_an_evaluation_comes_by_the_feed_of_the_loop_from_its_second_epoch_on(session, told, feeds, loaders, capsys):
    alone = train(LOADERS[loaders]())
    with session():
        fed = train(LOADERS[loaders]())
    assert_same(fed, alone)
    beside = feeds()[1:]
    assert beside == [["loader", *["gather"] * (EPOCHS - 1)]] * len(beside)
    assert [(entry.outcome, entry.plan.feed.kind) for entry in told()] == [("chosen", "gather")] * len(beside)
    assert all(entry.figures["batches"] in (5, 10) for entry in told())
    assert capsys.readouterr().err.count(f"{WHAT} by feed gather") == len(beside)


@pytest.mark.usefixtures("held_for_nothing")
def test_it_waits_until_the_loop_has_a_feed_that_is_kept(session, told, feeds, monkeypatch):
    searching, plan = [True], ScriptTuning.plan
    monkeypatch.setattr(
        ScriptTuning, "plan", property(lambda self: self.training.own if searching[0] else plan.fget(self))
    )
    count = []

    def evaluate(model, loaders):
        count.append(model)
        searching[0] = len(count) < 3
        return validate(model, loaders)

    alone = train([loader_of()], epochs=6, evaluate=validate)
    with session():
        fed = train([loader_of()], epochs=6, evaluate=evaluate)
    assert_same(fed, alone)
    assert feeds()[1] == ["loader", "loader", *["gather"] * 4]
    assert len(told()) == 1


@pytest.mark.usefixtures("held_for_nothing")
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_an_evaluation_are_kept_while_those_of_the_loop_are(session, feeds, monkeypatch, workers):
    monkeypatch.setattr(held_samples, "MOST_SHARE", float("inf"))
    is_settled, plan, missing = [False], ScriptTuning.plan, []
    monkeypatch.setattr(
        ScriptTuning, "plan", property(lambda self: plan.fget(self) if is_settled[0] else self.training.own)
    )
    columns = KeptSamples.columns
    monkeypatch.setattr(KeptSamples, "columns", lambda self: (missing.append(self.missing), columns(self))[1])

    def evaluate(model, loaders):
        seen = validate(model, loaders)
        is_settled[0] = True
        return seen

    alone = train([loader_of(num_workers=workers)])
    with session():
        fed = train([loader_of(num_workers=workers)], evaluate=evaluate)
    assert_same(fed, alone)
    assert feeds()[1] == ["loader", *["gather"] * (EPOCHS - 1)]
    assert missing == [pytest.approx(2 * workers / 10)], "of an epoch, the batches that a worker begins with"


@pytest.mark.usefixtures("held_for_nothing")
def test_samples_of_an_evaluation_are_let_go_of_with_those_of_the_loop(session, monkeypatch):
    found = []

    def evaluate(model, loaders):
        seen = validate(model, loaders)
        proxy = next(one for one in opened._proxies.values() if one.batch_size == 8)
        found.append(proxy.kept_samples is not None)
        for one in opened._tuning.training.proxies:
            monkeypatch.setattr(type(one), "keeps_samples", property(lambda self: self is proxy))
        return seen

    monkeypatch.setattr(ScriptTuning, "plan", property(lambda self: self.training.own))
    with session() as opened:
        train([loader_of()], evaluate=evaluate)
    assert found == [True, *[False] * (EPOCHS - 1)]


def test_a_tuned_training_evaluates_on_the_same_batches(session, monkeypatch):
    monkeypatch.setattr(LoaderProxy, "holding_s", lambda self, feed=None: 0.0)
    monkeypatch.setattr(evaluation_feed, "LEAST_S", 0.0)
    alone = train([loader_of()], epochs=40)
    with session(plan=None, tune_s=5.0):
        tuned = train([loader_of()], epochs=40)
    batches = [[seen for seen in found[0] if len(seen) == 4] for found in (alone, tuned)]
    assert len(batches[0]) == 400
    for (x, y, _, state), (x_alone, y_alone, _, state_alone) in zip(*reversed(batches), strict=True):
        assert torch.equal(x, x_alone)
        assert torch.equal(y, y_alone)
        assert torch.equal(state, state_alone)


OWN = {
    "a random transform": lambda: loader_of(Augmented(80)),
    "a collate function": lambda: loader_of(collate_fn=lambda samples: default_collate(samples)),
}


@pytest.mark.usefixtures("held_for_nothing")
@pytest.mark.parametrize("loader", OWN)
def test_a_loader_whose_batches_cannot_be_gathered_keeps_its_own(session, told, feeds, loader, capsys):
    alone = train([OWN[loader]()])
    with session():
        fed = train([OWN[loader]()])
    assert_same(fed, alone)
    assert feeds()[1] == ["loader"] * EPOCHS
    assert [entry.why.startswith("the script's own feed; gather: ") for entry in told()] == [True]
    assert WHAT not in capsys.readouterr().err


@pytest.mark.usefixtures("held_for_nothing")
def test_a_loader_that_is_iterated_once_keeps_its_own(session, told, feeds):
    def evaluate(model, loaders):
        return evaluated(model, loader_of())

    alone = train([], evaluate=evaluate)
    with session():
        assert_same(train([], evaluate=evaluate), alone)
    assert feeds()[1:] == [["loader"]] * EPOCHS
    assert told() == []


@pytest.mark.usefixtures("held_for_nothing")
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(LoaderProxy, "holding_s", lambda self, feed=None: 3600.0), (evaluation_feed, "LEAST_S", 3600.0)],
)
def test_what_costs_more_than_it_saves_is_not_done(session, told, feeds, monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    with session():
        train([loader_of()])
    assert feeds()[1] == ["loader"] * EPOCHS
    assert told() == []


@pytest.mark.usefixtures("held_for_nothing")
def test_a_feed_that_proves_slower_is_given_back(session, told, feeds, monkeypatch):
    monkeypatch.setattr(
        evaluation_feed._Epochs, "batch_s", property(lambda self: 1.0 if self.own_batch_s is None else 2.0)
    )
    alone = train([loader_of()])
    with session():
        fed = train([loader_of()])
    assert_same(fed, alone)
    assert feeds()[1] == ["loader", "gather", "gather", "loader", "loader"]
    assert [entry.why.split(":")[0] for entry in told()] == ["by feed gather", "by the script's own feed again"]


@pytest.mark.usefixtures("held_for_nothing")
@pytest.mark.parametrize("order", ["in order", "shuffled", "by a generator"])
def test_an_evaluation_that_is_broken_off_in_the_middle(session, feeds, order):
    def evaluate(model, loaders):
        return evaluated(model, loaders[0], most=3)

    alone = train(LOADERS[order](), evaluate=evaluate)
    with session():
        assert_same(train(LOADERS[order](), evaluate=evaluate), alone)
    assert feeds()[1] == ["loader", *["gather"] * (EPOCHS - 1)]


@pytest.mark.usefixtures("held_for_nothing")
@pytest.mark.parametrize("order", ["in order", "shuffled", "by a generator"])
def test_an_evaluation_in_the_middle_of_an_epoch_of_the_training(session, feeds, order):
    alone = train(LOADERS[order](), every=5)
    with session():
        assert_same(train(LOADERS[order](), every=5), alone)
    assert feeds()[1] == ["loader", *["gather"] * 5]


@pytest.mark.usefixtures("held_for_nothing")
def test_loaders_that_are_iterated_inside_of_each_other_and_of_themselves(session, feeds):
    def evaluate(model, loaders):
        seen = []
        for outer, inner in ((0, 0), (0, 1), (1, 0)):
            for x, y in loaders[outer]:
                seen.append((x, y, torch.get_rng_state()))
                seen += evaluated(model, loaders[inner], most=2)
                torch.rand(())
        return seen

    def loaders():
        return [loader_of(Rows(24), shuffle=True), loader_of(Rows(16), shuffle=True)]

    alone = train(loaders(), evaluate=evaluate)
    with session():
        assert_same(train(loaders(), evaluate=evaluate), alone)
    assert all("gather" in kinds for kinds in feeds()[1:])


@pytest.mark.usefixtures("held_for_nothing")
def test_data_that_the_script_changes_between_evaluations_is_seen(session):
    def evaluate(model, loaders):
        seen = validate(model, loaders)
        loaders[0].dataset.x += 1
        return seen

    alone = train([loader_of()], evaluate=evaluate)
    with session():
        assert_same(train([loader_of()], evaluate=evaluate), alone)


@pytest.mark.usefixtures("held_for_nothing")
def test_when_a_training_ends_its_evaluation_goes_back_and_another_one_begins_anew(session, told, feeds):
    loader = loader_of()
    alone = [train([loader]), train([loader])]
    with session():
        fed = [train([loader]), train([loader])]
    for one, other in zip(fed, alone, strict=True):
        assert_same(one, other)
    # The second training is known after a few steps, and its first evaluation is the first that is counted.
    assert feeds()[1] == [*["loader", *["gather"] * (EPOCHS - 1)] * 2]
    assert len(told("run/training-2")) == 1
    assert list(map(len, loader)) == [2] * 10


@pytest.mark.usefixtures("held_for_nothing")
def test_a_loader_that_the_script_lets_go_of_is_not_kept(session):
    gone = []

    def evaluate(model, loaders):
        if len(gone) == 3 and loaders:
            gone.append(weakref.ref(loaders[0].dataset))
            loaders.clear()
            gc.collect()
            assert gone[-1]() is None
        gone.append(None)
        return validate(model, loaders)

    with session():
        train([loader_of()], evaluate=evaluate)
    assert any(gone)


def test_samples_that_turn_out_to_be_no_columns_are_left_alone(session, told, feeds, monkeypatch):
    class Late(Rows):
        """Draws now and then, where nobody looks for it."""

        def __getitem__(self, index):
            return (self.x[index] + (torch.randn(6) if index == 37 else 0)), self.y[index]

    monkeypatch.setattr(LoaderProxy, "holding_s", lambda self, feed=None: 0.0)
    monkeypatch.setattr(evaluation_feed, "PROBED", 0)
    monkeypatch.setattr(evaluation_feed, "LEAST_S", 0.0)
    alone = train([loader_of(Late(80))])
    with session():
        assert_same(train([loader_of(Late(80))]), alone)
    assert feeds()[1] == ["loader"] * EPOCHS
    assert "draws" in told()[0].why


@pytest.mark.usefixtures("held_for_nothing")
@pytest.mark.parametrize("broken", ["epoch_began", "batch_given", "_consider", "close"])
def test_whatever_breaks_in_here_the_script_goes_on(session, monkeypatch, broken):
    alone = train([loader_of()])

    def breaks(*args, **kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(evaluation_feed.EvaluationFeed, broken, breaks)
    with session():
        assert_same(train([loader_of()]), alone)


# --- on the device -----------------------------------------------------------------------------------


@pytest.fixture
def pretended_gpu(monkeypatch):
    """The host in the place of a GPU that has no room for data of some length."""
    device_copies, why_not, too_long = DeviceCopies(torch.device("cpu")), LoaderProxy._why_not, set()

    def pretended(self, feed):
        if feed.kind == "resident" and len(self._like.dataset) in too_long:
            return "it does not fit"
        return why_not(self, Feed(kind="gather"))

    monkeypatch.setattr(LoaderProxy, "_why_not", pretended)
    monkeypatch.setattr(Session, "_device_copies_on", lambda self, device: device_copies)
    yield device_copies, too_long
    device_copies.remove()


def sends(model, loaders):
    return [(x.to("cpu"), y.to("cpu"), *rest) for x, y, *rest in validate(model, loaders)]


@pytest.mark.usefixtures("held_for_nothing")
def test_what_an_evaluation_sends_to_the_device_is_there_already(session, feeds, pretended_gpu):
    device_copies, _ = pretended_gpu
    loaders = [loader_of(shuffle=True)]
    alone = train([loader_of(shuffle=True)], evaluate=sends)
    with session("resident"):
        assert_same(train(loaders, evaluate=sends), alone)
    assert feeds()[1] == ["loader", *["resident"] * (EPOCHS - 1)]
    # Of the batches that were kept before they were sent, the last few were answered for.
    assert device_copies.answered


@pytest.mark.usefixtures("held_for_nothing")
def test_data_that_does_not_fit_on_the_device_is_gathered_on_the_host(session, feeds, told, pretended_gpu):
    _, too_long = pretended_gpu
    too_long.add(80)
    alone = train([loader_of(), loader_of(Rows(40))])
    with session("resident"):
        assert_same(train([loader_of(), loader_of(Rows(40))]), alone)
    assert [kinds[1:] for kinds in feeds()[1:]] == [["gather"] * (EPOCHS - 1), ["resident"] * (EPOCHS - 1)]


@pytest.mark.usefixtures("held_for_nothing", "pretended_gpu")
def test_data_that_takes_too_long_to_hold_on_the_device_is_gathered_on_the_host(session, feeds, monkeypatch):
    monkeypatch.setattr(LoaderProxy, "holding_s", lambda self, feed=None: 3600.0 if feed.kind == "resident" else 0.0)
    with session("resident"):
        train([loader_of()])
    assert feeds()[1] == ["loader", *["gather"] * (EPOCHS - 1)]


@pytest.mark.usefixtures("held_for_nothing", "pretended_gpu")
def test_in_inference_mode_nothing_is_held_on_the_device(session, feeds):
    def evaluate(model, loaders):
        with torch.inference_mode():
            return validate(model, loaders)

    alone = train([loader_of()], evaluate=evaluate)
    with session("resident"):
        assert_same(train([loader_of()], evaluate=evaluate), alone)
    assert feeds()[1] == ["loader", *["gather"] * (EPOCHS - 1)]
