"""Samples that raise: left out of their batches where a job allows it, and all others seen once an epoch, in order."""

import itertools
import math
import multiprocessing

import pytest
import torch
from plain import parameters_of
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import hotlap
from hotlap.core.errors import DataError, TrainingError
from hotlap.data.dataset import as_source
from hotlap.data.resident import hold_on_device
from hotlap.fitting.fit import fit

COUNT, BATCH, EPOCHS = 37, 5, 3
BAD = {0, 17, 18, 36}


class Files(Dataset):
    """Samples of which some cannot be read."""

    def __init__(self, bad=frozenset(BAD), count=COUNT):
        self.bad, self.count = bad, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"file {index} is broken")
        return torch.tensor([index, index % 3, 1.0]), torch.tensor(float(index))


class InBatches(Files):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Drawing(Files):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.rand(3), y


def trained(data, *, seen=None, plan="off", most=4, model=None, save_every=0, out=None, resume=None, **changes):
    torch.manual_seed(0)
    model = model or nn.Linear(3, 1)

    def loss(model, batch):
        x, y = batch
        if seen is not None and model.training:
            seen.append([round(value) for value in y.tolist()])
        return ((model(x / COUNT)[:, 0] - y / COUNT) ** 2).mean()

    given = {
        "model": model,
        "data": data,
        "loss": loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "epochs": EPOCHS,
        "skip_bad_samples": most,
        "device": "cpu",
    }
    if not isinstance(data, DataLoader):
        given["batch_size"] = BATCH
    job = hotlap.Job(**{**given, **changes})
    return fit(job, plan=plan, save_every=save_every, out=out, resume=resume, progress=False)


def loader(data, workers):
    return DataLoader(data, BATCH, shuffle=True, num_workers=workers)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole():
    """The batches of a training in which no sample raises."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLAP_PROGRESS", "off")
        trained(Files(bad=()), seen=seen, out=None)
    return seen


def without_bad(batches):
    return [kept for batch in batches if (kept := [index for index in batch if index not in BAD])]


FEEDS = {
    "one by one": lambda: (Files(), {}),
    "in workers": lambda: (loader(Files(), 2), {}),
    "in batches": lambda: (InBatches(), {}),
    "in batches, in workers": lambda: (loader(InBatches(), 2), {}),
    "drawing": lambda: (Drawing(), {}),
    "held": lambda: (Files(), {"plan": {"kind": "resident"}}),
    "a part": lambda: (Subset(Files(count=60), range(COUNT)), {}),
    "a part, held": lambda: (Subset(Files(count=60), range(COUNT)), {"plan": {"kind": "resident"}}),
    "tuned": lambda: (Files(), {"plan": "auto"}),
    "everything": lambda: (Files(), {"plan": "max"}),
}


@pytest.mark.parametrize("feed", FEEDS)
def test_all_other_samples_are_seen_once_an_epoch_in_the_same_order(feed, whole):
    data, changes = FEEDS[feed]()
    seen = []
    run = trained(data, seen=seen, **changes)
    if feed not in ("tuned", "everything"):  # gates look at batches too
        assert seen == without_bad(whole)
    assert run.samples == EPOCHS * (COUNT - len(BAD))
    assert run.steps == EPOCHS * math.ceil(COUNT / BATCH)
    lines = [f"sample {index} of data is left out: ValueError: file {index} is broken" for index in BAD]
    for line in lines:
        assert sum(line in problem for problem in run.problems) == 1
        assert sum(line in entry.why for entry in run.ledger) == 1
        assert line in run.summary()


def test_weights_are_those_of_batches_without_the_bad_samples(whole):
    run = trained(Files())
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    good = Files(bad=())
    for batch in without_bad(whole):
        x, y = (torch.stack(column) for column in zip(*map(good.__getitem__, batch), strict=True))
        optimizer.zero_grad()
        ((model(x / COUNT)[:, 0] - y / COUNT) ** 2).mean().backward()
        optimizer.step()
    assert torch.equal(parameters_of(run.model), parameters_of(model))


@pytest.mark.parametrize("plan", [{"micro_batch": 2}, {"kind": "resident", "micro_batch": 2}])
def test_pieces_of_a_batch_count_with_their_true_sizes(plan):
    whole, pieces = trained(Files()), trained(Files(), plan=plan)
    torch.testing.assert_close(parameters_of(pieces.model), parameters_of(whole.model))
    assert pieces.samples == whole.samples


@pytest.mark.parametrize("plan", ["off", {"kind": "resident"}])
def test_a_batch_that_loses_all_samples_makes_no_update(plan):
    bad = frozenset(range(10, 15)) | {36, 35}
    rates = []
    run = trained(
        Files(bad=bad),
        plan=plan,
        most=7,
        order="as given",
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda made: rates.append(made) or 1.0),
    )
    assert (run.steps, run.updates) == (8 * EPOCHS, 6 * EPOCHS)
    assert max(rates) == 6 * EPOCHS
    assert len(run.history) == EPOCHS
    assert "skipped   6 updates whose samples were all left out" in run.summary()
    assert "gradients" not in run.summary()


@pytest.mark.parametrize("make", [Files, lambda **of: loader(Files(**of), 2)])
def test_an_evaluation_counts_them_out_too(make):
    for plan in ("off", {"kind": "resident"}):
        run = trained(Files(bad=()), plan=plan, valid=make(bad=frozenset({2, 9})), eval_batch=3)
        torch.manual_seed(0)
        model, good = run.model, Files(bad=())
        x, y = (torch.stack(column) for column in zip(*(good[i] for i in range(COUNT) if i not in (2, 9)), strict=True))
        expected = ((model(x / COUNT)[:, 0] - y / COUNT) ** 2).mean().item()
        assert run.history[-1]["valid_loss"] == pytest.approx(expected, rel=1e-5)
        told = [problem for problem in run.problems if "of valid is left out" in problem]
        assert [problem.partition(" is")[0] for problem in told] == ["sample 2 of valid", "sample 9 of valid"]


@pytest.mark.parametrize(("workers", "plan"), [(0, "off"), (2, "off"), (0, {"kind": "resident"})])
def test_one_more_than_allowed_is_an_error_that_lists_them(workers, plan):
    data = loader(Files(), workers) if workers else Files()
    with pytest.raises(DataError, match=r"skip_bad_samples=3 allows no more") as raised:
        trained(data, most=3, plan=plan)
    named = {index for index in BAD if str(index) in str(raised.value)}
    assert named == BAD
    assert "ValueError: file" in str(raised.value)


@pytest.mark.parametrize("most", [0, None])
@pytest.mark.parametrize("feed", ["one by one", "in workers", "in batches", "held", "valid"])
def test_unless_asked_nothing_is_left_out_and_the_sample_is_named(feed, most):
    changes = {} if most is None else {"skip_bad_samples": most}
    if feed == "valid":
        data, more = Files(bad=()), {"valid": Files()}
    else:
        data, more = FEEDS[feed]()
    with pytest.raises(ValueError, match="is broken") as raised:
        trained(data, **{**more, "skip_bad_samples": 0, **changes})
    notes = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert any(f"while fetching sample {index} of" in note for index, note in itertools.product(BAD, notes))
    assert not multiprocessing.active_children()


def test_an_interrupted_run_goes_on_once_bad_samples_are_allowed():
    with pytest.raises(ValueError, match="is broken"):
        trained(Files(), most=0, save_every=1, out="run")
    run = trained(Files(), resume="run")
    assert run.samples == EPOCHS * (COUNT - len(BAD))
    assert torch.equal(parameters_of(run.model), parameters_of(trained(Files()).model))


def test_running_out_of_memory_is_no_fault_of_a_sample():
    class Hungry(Files):
        def __getitem__(self, index):
            raise MemoryError("no memory left")

    with pytest.raises(TrainingError, match="out of memory at step 0 while its batch is fetched"):
        trained(Hungry())


def test_held_columns_name_the_samples_that_they_lack():
    columns = hold_on_device(as_source(Subset(Files(), range(3, 20)), skips_bad=True), torch.device("cpu"))
    assert [(one.place, one.sample) for one in columns.left_out] == [(14, 17), (15, 18)]
    x, _ = columns.gather(torch.arange(17))
    assert x[[14, 15]].eq(0).all()
    assert x[:, 2].sum() == 15
