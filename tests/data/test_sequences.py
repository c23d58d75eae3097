"""Sequences: the batches of a plain loop that pads, however they are gathered; every sample once, in whatever width."""

import gc
import pickle
import re
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Subset

import hotlap
from hotlap.core.errors import DataError, JobError
from hotlap.core.plan import MOST_REPLAY_STEPS, Execution, Feed
from hotlap.data.dataset import as_source, evaluation_dataset, training_dataset
from hotlap.data.feeds import open_feed
from hotlap.data.pure.proof import state_of
from hotlap.data.resident import ResidentFeeding, hold_on_device
from hotlap.data.sequences import LengthOrder, Sequences, choose_widths, lengths_in

CPU = torch.device("cpu")


def ids_of(count, seed=0, longest=40):
    """Token ids of as many texts, most of them short."""
    numbers = np.random.default_rng(seed)
    lengths = np.clip(numbers.geometric(5 / longest, count), 1, longest)
    return [numbers.integers(1, 500, length).tolist() for length in lengths]


def labelled(count=120, seed=0, longest=40, **more):
    columns = {"labels": torch.arange(count) % 3, "row": torch.arange(count)}
    return Sequences({"input_ids": ids_of(count, seed, longest)}, columns=columns, **more)


def padded(ids, width, pad=0):
    return torch.tensor([one + [pad] * (width - len(one)) for one in ids])


class Reader(nn.Module):
    """Averages what is no padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.head = nn.Embedding(500, 8, dtype=torch.float64), nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        return self.head((self.tokens(input_ids) * mask).sum(1) / mask.sum(1))


def loss(model, batch):
    output = model(batch["input_ids"], batch["attention_mask"])
    return nn.functional.cross_entropy(output, batch["labels"])


def job(data, **more):
    model = more.pop("model", None) or Reader()
    settings = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "loss": loss, "batch_size": 8, "epochs": 2}
    return hotlap.Job(model=model, data=data, **(settings | more))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    chosen=st.lists(st.integers(0, 11), min_size=1, max_size=8),
    widths=st.sampled_from([None, (32,), (3, 9, 30), (8, 16, 24, 32)]),
    form=st.sampled_from(["lists", "tensors", "joined"]),
)
def test_a_batch_is_that_of_a_plain_loop_padded_to_its_width(lengths, chosen, widths, form):
    ids = [[1 + (7 * n + k) % 97 for k in range(length)] for n, length in enumerate(lengths)]
    marks = [torch.tensor([[float(k), -1.0] for k in one]) for one in ids]
    fields = {"input_ids": ids, "marks": marks}
    offsets = None
    if form == "tensors":
        fields["input_ids"] = [torch.tensor(one) for one in ids]
    elif form == "joined":
        offsets = np.cumsum([0, *lengths])
        fields = {"input_ids": np.concatenate(ids), "marks": torch.cat(marks)}
    columns, pad = {"y": np.arange(len(ids))}, {"input_ids": 5, "marks": 0.5}
    data = Sequences(fields, columns=columns, offsets=offsets, pad=pad, widths=widths)
    rows = [n % len(ids) for n in chosen]
    source = as_source(data)
    batch = source.gather(torch.tensor(rows))
    longest = max(lengths[n] for n in rows)
    width = batch["input_ids"].shape[1]
    assert width == min(w for w in source.widths if w >= longest)
    assert torch.equal(batch["input_ids"], padded([ids[n] for n in rows], width, 5))
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["attention_mask"], padded([[1] * lengths[n] for n in rows], width))
    for row, n in enumerate(rows):
        assert torch.equal(batch["marks"][row, : lengths[n]], marks[n])
        assert (batch["marks"][row, lengths[n] :] == 0.5).all()
    assert batch["y"].tolist() == rows
    sample = data[rows[0]]
    assert sample["input_ids"].tolist() == ids[rows[0]]
    assert int(sample["y"]) == rows[0]


def brought(dataset, feed, epoch=0):
    """The batches of an epoch by a feed."""
    order = dataset.order.epoch(epoch)
    feeding = (
        ResidentFeeding(hold_on_device(dataset.source, CPU), CPU)
        if feed.kind == "resident"
        else open_feed(dataset.source, feed, seed=dataset.seed)
    )
    indices = [order.pieces(window, None, tickets=feeding.tickets)[0] for window in range(len(order))]
    try:
        return list(feeding.pieces(indices, epoch))
    finally:
        feeding.close()


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 90),
    batch_size=st.integers(1, 17),
    reorder=st.booleans(),
    drop_last=st.booleans(),
    widths=st.sampled_from([None, (40,), (8, 40), (5, 13, 27, 40)]),
    epoch=st.integers(0, 3),
)
def test_every_sample_comes_once_an_epoch_and_whole(count, batch_size, reorder, drop_last, widths, epoch):
    if drop_last and count < batch_size:
        return
    data = labelled(count, widths=widths)
    settings = {"batch_size": batch_size, "drop_last": drop_last, "reorder": reorder}
    dataset = training_dataset(job(data, **settings))
    batches = brought(dataset, Feed(kind="gather"), epoch)
    rows = torch.cat([batch["row"] for batch in batches]).tolist()
    left_out = count % batch_size if drop_last else 0
    assert len(rows) == len(set(rows)) == count - left_out
    assert {len(batch["row"]) for batch in batches[:-1]} <= {batch_size}
    ids = ids_of(count)
    for batch in batches:
        for row, tokens, mask in zip(batch["row"].tolist(), batch["input_ids"], batch["attention_mask"], strict=True):
            assert tokens[mask.bool()].tolist() == ids[row]
    again = training_dataset(job(data, **settings)).order.epoch(epoch)
    assert torch.equal(again.indices, dataset.order.epoch(epoch).indices)


@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_all_feeds_bring_the_same_batches(reorder, workers):
    dataset = training_dataset(job(labelled(60), reorder=reorder))
    truth = brought(dataset, Feed(kind="gather"), 1)
    for feed in (Feed(kind="loader", workers=workers), Feed(kind="resident")):
        for mine, theirs in zip(truth, brought(dataset, feed, 1), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_samples_are_counted_from_the_end_as_in_a_list():
    data = labelled(5)
    for place in range(1, 6):
        for name, part in data[5 - place].items():
            assert torch.equal(data[-place][name], part)
    for outside in (5, -6):
        with pytest.raises(IndexError):
            data[outside]


def test_some_of_them_are_as_many_and_as_long_as_those_rows():
    data, rows = labelled(5), torch.tensor([3, 1])
    some = data.placed(lambda tensor, rows: tensor if rows is None else tensor[rows], rows)
    assert len(some) == 2
    assert all(torch.equal(some[at]["input_ids"], data[row]["input_ids"]) for at, row in enumerate(rows.tolist()))


def test_batches_of_similar_length_are_padded_little_and_told():
    data = labelled(2000, longest=200)
    apart, together = (training_dataset(job(data, reorder=reorder)).padding for reorder in (False, True))
    assert together.share < 0.2 < apart.share < apart.share_at_one_width
    rig = hotlap.Rig(Reader(), lambda p: torch.optim.SGD(p, lr=0.1), loss)
    next(iter(rig.feed(data, batch_size=8, epochs=1, reorder=True)))
    (entry,) = [entry for entry in rig.ledger if entry.what == "batches by length"]
    assert entry.figures["padding"] == together.share
    assert f"{together.share:.0%} of a batch is padding, instead of {together.share_at_one_width:.0%}" in entry.why
    assert f"{len(together.widths)} widths" in entry.why


def test_the_banner_tells_of_the_padding_and_a_resumed_run_keeps_its_order(tmp_path, capfd):
    done = job(labelled(60), reorder=True)
    hotlap.fit(done, out=tmp_path / "run")
    assert training_dataset(done).padding.line in capfd.readouterr().err
    with pytest.raises(hotlap.HotlapError, match="reorder"):
        hotlap.fit(job(labelled(60), epochs=3), resume=tmp_path / "run")


def test_an_order_by_length_is_another_one_in_each_epoch_and_mixes_widths():
    lengths = np.array([len(one) for one in ids_of(2000)])
    order = LengthOrder(lengths, batch_size=8, seed=1)
    first, second = (order.epoch(epoch).indices.numpy() for epoch in (0, 1))
    assert (first != second).mean() > 0.9
    batches = lengths[first].reshape(-1, 8)
    # Hardly any spread within a batch, and short and long batches in turn.
    assert np.median(np.ptp(batches, axis=1)) <= 1
    middle = np.median(batches, axis=1)
    assert abs(np.corrcoef(middle[:-1], middle[1:])[0, 1]) < 0.3
    in_a_row = batches.max(axis=1)[: len(batches) // 8 * 8].reshape(-1, 8)
    by_chance = np.random.default_rng(0).permutation(in_a_row.reshape(-1)).reshape(-1, 8)
    assert in_a_row.mean(axis=1).std() < by_chance.mean(axis=1).std() / 2


def test_the_last_shorter_batch_is_drawn_from_all_lengths():
    lengths = np.arange(1, 1004)
    ends = [LengthOrder(lengths, batch_size=50, seed=seed).epoch(0).indices[-3:] for seed in range(40)]
    drawn = lengths[torch.cat(ends).numpy()]
    assert drawn.min() < 250 < 750 < drawn.max()


@settings(max_examples=100, deadline=None)
@given(longest=st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_the_widths_found_take_every_batch_and_are_nearly_as_good_as_any(longest):
    sizes, lengths = np.full(len(longest), 4), np.array(longest)
    most = -(-int(lengths.max()) // 8) * 8
    widths = choose_widths(lengths, sizes, most)
    assert widths == tuple(sorted(set(widths)))
    assert widths[-1] == most
    assert all(width % 8 == 0 for width in widths)
    assert len(widths) <= 12

    def computed(widths):
        bounds = np.asarray(widths)
        return int((bounds[bounds.searchsorted(lengths)] * sizes).sum())

    numbers = np.random.default_rng(len(longest))
    for _ in range(20):
        others = np.unique([*(numbers.integers(1, most // 8 + 1, len(widths) - 1) * 8), most])
        assert computed(widths) <= 1.02 * computed(others)


def test_few_widths_are_enough_where_lengths_are_few():
    assert choose_widths(np.array([16, 16, 64]), np.array([8, 8, 8]), 64) == (16, 64)
    assert choose_widths(np.array([60, 64, 64]), np.array([8, 8, 8]), 64) == (64,)


def test_what_is_trained_is_the_same_in_every_width_and_under_every_feed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ends = []
    for widths, feed in [(None, "gather"), ((40,), "gather"), ((8, 16, 40), "loader"), (None, "resident")]:
        done = job(labelled(60, widths=widths), valid=labelled(30, seed=4), reorder=True)
        run = hotlap.fit(done, plan=hotlap.Plan(feed=Feed(kind=feed)))
        ends.append((run.history[-1]["valid_loss"], *(p.detach() for p in done.model.parameters())))
    for other in ends[1:]:
        for mine, theirs in zip(ends[0], other, strict=True):
            torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(theirs), rtol=1e-9, atol=1e-11)


def test_several_updates_at_once_are_of_one_width():
    rig = hotlap.Rig(Reader(), lambda p: torch.optim.SGD(p, lr=0.1), loss)
    dataset = training_dataset(job(labelled(200), reorder=True))
    rig.attach(dataset)
    feeding = ResidentFeeding(hold_on_device(dataset.source, CPU), CPU)
    epoch = dataset.order.epoch(0)
    feeding.begin(epoch.indices)
    width = [feeding.at_width_of(*epoch.bounds(window, None)) for window in range(len(epoch))]
    found = [rig._cursor._are_alike(feeding, epoch, window, 2, None) for window in range(len(epoch) - 1)]
    assert found == [width[n] is width[n + 1] and n + 2 <= 200 // 8 for n in range(len(epoch) - 1)]
    assert any(found)
    assert not all(found)


def test_the_widest_batch_holds_the_same_samples_and_is_always_the_same_columns():
    dataset = training_dataset(job(labelled(60), reorder=True))
    feeding = ResidentFeeding(hold_on_device(dataset.source, CPU), CPU)
    feeding.begin(dataset.order.epoch(0).indices)
    for start in (0, 8, 16):
        rows = feeding.rows(start, 8)
        mine, wide = rows.gathered(), rows.widest().gathered()
        assert wide["input_ids"].shape[1] == dataset.padding.widths[-1]
        assert torch.equal(wide["row"], mine["row"])
        width = mine["input_ids"].shape[1]
        assert torch.equal(wide["input_ids"][:, :width], mine["input_ids"])
        assert not wide["attention_mask"][:, width:].any()
        assert rows.widest().columns is feeding.columns.widest
    gc.disable()
    try:
        alive = weakref.ref(feeding.columns)
        del feeding, rows
        assert alive() is None  # without the help of a collector
    finally:
        gc.enable()
    plain = ResidentFeeding(hold_on_device(as_source((torch.ones(4, 2), torch.ones(4))), CPU), CPU)
    plain.begin(torch.arange(4))
    assert plain.rows(0, 2).widest() == plain.rows(0, 2)


def test_an_evaluation_pads_little_and_predictions_keep_the_order_of_the_data():
    data = labelled(100)
    dataset = evaluation_dataset(data, batch_size=16)
    assert dataset.padding.share < dataset.padding.share_at_one_width / 1.5
    model = Reader()
    rig = hotlap.Rig(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1),
        nn.CrossEntropyLoss(),
        forward=lambda m, b: (m(b["input_ids"], b["attention_mask"]), b["labels"]),
    )
    found = rig.predict(data, batch_size=16)
    for row in (0, 1, 57, 99):
        one = as_source(data).gather(torch.tensor([row]))
        torch.testing.assert_close(found[row : row + 1], model(one["input_ids"], one["attention_mask"]).detach())
    scores = rig.evaluate(data, ["accuracy"], batch_size=16)
    assert scores["accuracy"] == (found.argmax(1) == torch.arange(100) % 3).double().mean().item()


def test_outputs_for_each_entry_come_in_one_width():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, ids):
            return (ids * self.scale).unsqueeze(-1)

    data = labelled(40)
    rig = hotlap.Rig(
        Tagger(),
        lambda p: torch.optim.SGD(p, lr=0.1),
        nn.MSELoss(),
        forward=lambda m, b: (m(b["input_ids"]), b["labels"]),
    )
    found = rig.predict(data, batch_size=4)
    for row, ids in enumerate(ids_of(40)):
        assert found[row, : len(ids), 0].tolist() == ids
        assert not found[row, len(ids) :].any()


def test_a_part_of_the_data_is_the_same_rows():
    data = labelled(50)
    rows = [41, 3, 3, 20, 7]
    dataset = training_dataset(job(Subset(data, rows), order="as given", batch_size=5, epochs=1))
    ids = ids_of(50)
    for kind in ("gather", "resident", "loader"):
        (batch,) = brought(dataset, Feed(kind=kind))
        assert batch["row"].tolist() == rows
        for row, tokens, mask in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
            assert tokens[mask.bool()].tolist() == ids[row]
    assert lengths_in(dataset.source).tolist() == [len(ids[row]) for row in rows]


def test_a_data_loader_over_them_is_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = labelled(40)
    shuffled = DataLoader(data, batch_size=8, shuffle=True)
    dataset = training_dataset(job(shuffled, batch_size=None, reorder=True))
    assert dataset.padding.share < dataset.padding.share_at_one_width / 1.5
    rows = torch.cat([batch["row"] for batch in brought(dataset, Feed(kind="loader"))])
    assert sorted(rows.tolist()) == list(range(40))
    run = hotlap.fit(job(shuffled, batch_size=None, epochs=1), plan=hotlap.Plan(feed=Feed(kind="resident")))
    assert run.steps == 5


def test_tokens_are_kept_in_32_bits_and_once():
    data = Sequences({"input_ids": [torch.arange(5), torch.arange(3)], "far": [[2**40] * 5, [1] * 3]})
    assert data.fields["input_ids"].dtype == torch.int32
    assert data.fields["far"].dtype == torch.int64
    assert data.fields["input_ids"].numel() == 8
    assert as_source(data).gather(torch.tensor([0]))["far"][0, 0] == 2**40


def test_a_mask_of_the_users_own_is_left_alone():
    data = Sequences({"input_ids": [[1, 2], [3]], "attention_mask": [[1, 0], [1]]})
    assert as_source(data).gather(torch.tensor([0, 1]))["attention_mask"].tolist() == [[1, 0] + [0] * 6, [1] + [0] * 7]
    assert "attention_mask" not in as_source(Sequences({"x": [[1]]}, mask=None)).gather(torch.tensor([0]))


def test_data_that_was_written_to_is_seen_and_data_can_be_sent_to_workers():
    data = labelled(30)
    source = as_source(data)
    state = state_of(source)
    assert state.why_changed(thorough=True) is None
    data.fields["input_ids"][0] += 1
    assert state.why_changed(thorough=True) is not None
    other = pickle.loads(pickle.dumps(source))
    rows = torch.tensor([3, 4])
    assert torch.equal(other.gather(rows)["input_ids"], source.gather(rows)["input_ids"])


@pytest.mark.parametrize(("value", "is_free"), [(-100, True), (0, False), (2, False), (7, True)])
def test_whether_a_class_is_never_held_counts_padding_too(value, is_free):
    tagged = Sequences({"tags": [[1, 2], [3]]}, columns={"y": torch.tensor([4, 5])})
    assert as_source(tagged).never_holds(value) is is_free


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Sequences([[1]]), "fields must be sequences by name"),
        (lambda: Sequences({}), "fields must be sequences by name"),
        (lambda: Sequences({"x": [1, 2]}), "field 'x' is a list of int 1, …; give a list of sequences"),
        (lambda: Sequences({"x": "abc"}), "field 'x' is str 'abc'; give a list with a sequence for each sample"),
        (lambda: Sequences({"x": []}), "field 'x' is empty"),
        (lambda: Sequences({"x": [[1], [], []]}), "sequence 1 of field 'x' is empty (in all 2)"),
        (lambda: Sequences({"x": [[1], ["a"]]}), "sequence 1 of field 'x' holds 'a'; give numbers"),
        (lambda: Sequences({"x": [[1, 2]], "y": [[1]]}), "sequence 0 has 2 entries in field 'x' and 1 in 'y'"),
        (lambda: Sequences({"x": [[1]], "y": [[1], [2]]}), "field 'y' has 2 sequences, 'x' 1"),
        (lambda: Sequences({"x": [[1]]}, columns={"y": [1, 2]}), "column 'y' has 2 rows, and there are 1 sequences"),
        (lambda: Sequences({"x": [[1]]}, columns={"x": [1]}), "'x' is a field and a column"),
        (lambda: Sequences({"x": [[1]]}, columns=[1]), "columns must be tensors or arrays by name, not list [1]"),
        (lambda: Sequences({"x": torch.arange(5)}), "whose sequences hotlap cannot separate; give offsets too"),
        (lambda: Sequences({"x": torch.arange(5)}, offsets=[0, 3]), "offsets must rise from 0 to the 5 entries"),
        (lambda: Sequences({"x": [[1]]}, pad="0"), "pad='0' must be a number"),
        (lambda: Sequences({"x": [[1]]}, pad={"y": 0}), "pad has no number for field 'x'"),
        (lambda: Sequences({"x": [[1]]}, pad=0.5), "pad=0.5 must be a whole number, like field 'x'"),
        (lambda: Sequences({"x": [[1] * 9]}, widths=[4, 8]), "the largest width is 8, and the longest sequence has 9"),
        (lambda: Sequences({"x": [[1]]}, widths=[8, 4]), "widths=[8, 4] must rise"),
        (lambda: Sequences({"x": [[1]]}, widths=[0.5]), "must be whole numbers above 0"),
        (lambda: labelled(5)[5], "sequence 5 of 5"),
    ],
)
def test_mistakes_are_said_in_one_line(make, said):
    with pytest.raises((DataError, IndexError), match=re.escape(said)) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_leave_to_reorder_without_lengths_or_against_an_order_is_refused():
    with pytest.raises(DataError, match="reorder=True needs samples of known lengths"):
        training_dataset(job({"input_ids": torch.ones(4, 3), "labels": torch.ones(4)}, reorder=True))
    with pytest.raises(JobError, match="reorder=True shuffles by length, and order says otherwise"):
        job(labelled(5), reorder=True, order="as given")
    with pytest.raises(JobError, match="reorder=1 must be True or False"):
        job(labelled(5), reorder=1)


def test_a_capture_of_several_updates_is_not_asked_of_the_cpu():
    plan = hotlap.Plan(feed=Feed(kind="resident"), execution=Execution(mode="captured", replay_steps=2))
    rig = hotlap.Rig(Reader(), lambda p: torch.optim.SGD(p, lr=0.1), loss)
    assert "needs a GPU" in rig.supports(plan)


@pytest.mark.parametrize(
    ("widths", "most"), [((64,), MOST_REPLAY_STEPS), ((32, 64), MOST_REPLAY_STEPS), ((8, 32, 64), 1)]
)
def test_where_batches_have_several_widths_a_plan_makes_one_update_at_a_time(widths, most):
    rows = [torch.arange(1, 1 + length) for length in (3, 20, 60, 5, 30, 50, 2, 9)]
    data = Sequences({"x": rows}, columns={"y": torch.arange(8)}, widths=widths)
    model = nn.Embedding(64, 2)
    rig = hotlap.Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), lambda model, batch: model(batch["x"]).sum())
    for window in rig.feed(data, batch_size=2, steps=1):
        rig.step(window)
    assert rig.most_replay_steps == most
    assert rig.shapes == len(widths)


def test_batches_of_plain_tensors_have_one_shape():
    rig = hotlap.Rig(nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss())
    assert rig.shapes == 1
    rig.feed((torch.zeros(8, 2), torch.zeros(8, 2)), batch_size=2, epochs=1)
    assert (rig.shapes, rig.most_replay_steps) == (1, MOST_REPLAY_STEPS)
