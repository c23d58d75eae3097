"""`hotlap batch` on a job and on a script: real updates, the longest samples, and nothing left behind."""

import copy
import gc
import json
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from plain import parameters_of
from torch import nn

import hotlap
from hotlap import Job, Sequences
from hotlap.core.errors import TrainingError
from hotlap.kit import batch as kit
from hotlap.kit import start_size as catalogue
from hotlap.kit.batch import BatchFound
from hotlap.kit.bench import only_new_garbage, opened
from hotlap.kit.samples import longest_in, size_of
from hotlap.kit.search import MemoryLine, Searched, SizeSearch, Trial
from hotlap.kit.start_size import StartSize, keep_measured, start_size


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Timing is not what these are about."""
    monkeypatch.setattr("hotlap.kit.bench.BLOCK_S", 0.001)
    monkeypatch.setattr("hotlap.kit.bench.BLOCKS", 1)


def job(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 3))
    settings = {
        "model": model,
        "data": (torch.randn(256, 12), torch.randint(3, (256,))),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch_size": 16,
        "accumulate": 4,
        "epochs": 1,
        "device": "cpu",
    }
    return Job(**{**settings, **changes})


def test_nothing_is_left_in_the_job():
    mine = job()
    mine.model[3].eval()
    first = parameters_of(mine.model).clone()
    buffers = [one.clone() for one in mine.model.buffers()]
    chance = torch.get_rng_state()
    hotlap.batch(mine, progress=False)
    assert torch.equal(parameters_of(mine.model), first)
    assert all(map(torch.equal, buffers, mine.model.buffers()))
    assert torch.equal(torch.get_rng_state(), chance)
    assert not mine.optimizer.state
    assert [layer.training for layer in mine.model] == [True, True, True, False, True]
    assert all(p.grad is None for p in mine.model.parameters())


def test_an_optimizer_that_has_state_keeps_it():
    mine = job()
    mine.loss(mine.model(mine.data[0]), mine.data[1]).backward()
    mine.optimizer.step()
    before = [state["exp_avg"].clone() for state in mine.optimizer.state.values()]
    grads = [p.grad.clone() for p in mine.model.parameters()]
    hotlap.batch(mine, most=32, progress=False)
    assert all(map(torch.equal, before, [state["exp_avg"] for state in mine.optimizer.state.values()]))
    assert all(map(torch.equal, grads, [p.grad for p in mine.model.parameters()]))
    assert all(state["step"] == 1 for state in mine.optimizer.state.values())


def test_the_curve_has_real_figures_and_the_effective_batch_stays():
    found = hotlap.batch(job(), progress=False)
    assert found.effective_batch == 64
    assert found.own_batch == 16
    sizes = [one.size for one in found.searched.trials]
    assert sizes == sorted(sizes)
    assert min(sizes) >= 2  # one sample has no variance
    peaks = {one.size: one.peak_bytes for one in found.searched.trials}
    assert peaks[max(sizes)] > peaks[min(sizes)]
    told = found.summary()
    for word in ("knee", "fastest", "effective  64 (16 at once)", "batch_size="):
        assert word in told
    assert json.loads(json.dumps(found.to_dict()))["effective_batch"] == 64


def test_what_to_write_keeps_the_effective_batch():
    found = hotlap.batch(job(batch_size=250, accumulate=1), most=100, progress=False)
    sizes = {one.size: one for one in found.searched.trials}
    assert max(sizes) <= 100
    size = found.knee.size
    part = max(n for n in range(1, size + 1) if 250 % n == 0)
    assert f"batch_size={part}, accumulate={250 // part}" in found.advice
    assert "batch norms see micro-batches" in found.summary()


class Full(nn.Module):
    """Has memory for so many samples."""

    def __init__(self, most):
        super().__init__()
        self.layer, self.most, self.seen = nn.Linear(12, 3), most, []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.layer(x)


def test_out_of_memory_is_caught_and_the_largest_that_trains_is_found(monkeypatch):
    monkeypatch.setattr(kit, "SizeSearch", lambda **how: SizeSearch(**{**how, "by_speed": False}))  # as on a GPU
    model = Full(77)
    found = hotlap.batch(job(model=model, optimizer=lambda p: torch.optim.Adam(p)), progress=False)
    assert found.largest.size == 77
    assert found.searched.found_largest
    assert "78 does not train: CUDA out of memory" in found.searched.ended
    assert 78 in model.seen


def test_garbage_of_a_search_is_found_and_somebodys_own_frozen_objects_stay_so():
    class Ring:
        def __init__(self):
            self.me = self

    gc.unfreeze()  # as a process has it that is no test
    with only_new_garbage():
        assert gc.get_freeze_count() > 0
        gone = weakref.ref(Ring())
        gc.collect()
        assert gone() is None
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with only_new_garbage():
        pass
    assert gc.get_freeze_count() > 0


def test_an_error_that_is_no_lack_of_memory_is_the_users_to_see():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hotlap.batch(job(model=Broken(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), progress=False)


def test_every_size_is_tried_as_by_a_training_that_begins():
    mine = job()
    for _ in range(3):
        mine.model(torch.randn(4, 12)).sum().backward()
        mine.optimizer.step()
    before = copy.deepcopy(mine.optimizer.state_dict())
    with opened(mine) as bench:
        for size in (8, 4):
            assert bench.trains(bench.window(size), updates=2) is None
            assert {int(one["step"]) for one in bench.rig.optimizer.state.values()} == {2}
    assert str(mine.optimizer.state_dict()) == str(before)


def test_what_an_optimizer_keeps_is_let_go_of_afterwards_even_where_the_bench_is_held():
    with opened(job(optimizer=lambda parameters: torch.optim.AdamW(parameters))) as bench:
        assert bench.trains(bench.window(8)) is None
        assert bench.rig.optimizer.state
    assert not bench.rig.optimizer.state


def test_sequences_are_tried_at_their_longest():
    lengths = [3] * 40 + [17] + [5] * 20
    data = Sequences({"x": [torch.ones(n, dtype=torch.long) for n in lengths]}, columns={"y": torch.zeros(61)})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.widths = nn.Embedding(4, 2), []

        def forward(self, batch):
            self.widths.append(batch["x"].shape[1])
            return self.table(batch["x"]).mean((1, 2))

    model = Model()
    forward = lambda model, batch: (model(batch), batch["y"])  # noqa: E731
    mine = job(model=model, data=data, loss=nn.MSELoss(), forward=forward, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    with opened(mine) as bench:
        assert bench.trains(bench.window(4)) is None
    assert set(model.widths) == {24}  # 17 in multiples of 8


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        ({"ids": [1, 2, 3], "label": 1}, 4),
        (("four", torch.ones(2, 3)), 10),
        ([np.zeros((2, 2)), b"ab"], 6),
        (type("Picture", (), {"size": (4, 5)})(), 20),
        (3.5, 1),
    ],
)
def test_samples_of_any_form_have_a_length(sample, size):
    assert size_of(sample) == size


def test_what_batches_hold_is_told():
    class Ragged:
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            return [0] * (5 + index % 7)

    assert longest_in(Ragged()).words == "batches hold the longest of the 256 samples that hotlap read, of 1,000"
    assert longest_in([Ragged()[n] for n in range(1000)]).words == "batches hold the longest of all 1,000 samples"
    assert "are of one size" in longest_in(list(torch.ones(10, 3))).words
    assert longest_in(iter([1])) is None


def test_samples_out_of_code_are_tried_at_the_longest_that_were_seen():
    samples = [(torch.ones(n), n) for n in (2, 9, 4, 30, 1)]
    collate = lambda rows: (  # noqa: E731
        nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True),
        torch.tensor([y for _, y in rows]),
    )
    with opened(job(data=samples, collate=collate, batch_size=2)) as bench:
        inputs, sizes = bench.batch(2)
    assert sizes.tolist() == [30, 9]
    assert inputs.shape == (2, 30)


# --- where it begins --------------------------------------------------------------------------------------

GIB, MIB = 2**30, 2**20


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))


def pictures(side):
    return torch.zeros(1, 3, side, side), torch.zeros(1)


def kinds():
    convolving = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(5)))
    attending = nn.TransformerEncoderLayer(8, 2)
    return {
        catalogue.CONVOLUTIONS: (convolving, pictures(224), 224),
        catalogue.VISION: (nn.Sequential(convolving, attending), pictures(96), 96),
        catalogue.TEXT: (attending, {"ids": torch.zeros(1, 512, dtype=torch.long)}, 512),
        catalogue.RECURRENT: (nn.GRU(29, 8), (torch.zeros(1, 20, 29), torch.zeros(1)), 20),
        catalogue.DENSE: (nn.Linear(7, 2), (torch.zeros(1, 7), torch.zeros(1)), 7),
    }


@pytest.mark.parametrize("name", list(catalogue.UNITS))
def test_a_model_is_known_by_its_layers_and_its_samples(name):
    model, sample, size = kinds()[name]
    kind = catalogue.kind_of_model(model, sample)
    assert (kind.name, kind.size) == (name, size)
    assert kind.parameters == sum(p.numel() for p in model.parameters())
    assert catalogue.example_of(kind).kind == name


def test_the_first_size_follows_the_gpu_the_kind_of_model_and_the_samples(cache):
    network = kinds()[catalogue.CONVOLUTIONS][0]
    assert catalogue.example_of(catalogue.kind_of_model(network, pictures(224))).bytes_a_sample == round(5.65 * MIB)
    assert start_size(network, pictures(224), 16 * GIB, "a T4").size == 2048  # 2,900 of 5.65 MiB
    assert start_size(network, pictures(448), 16 * GIB, "a T4").size == 512
    assert start_size(network, pictures(224), 64 * GIB, "an A100").size == 8192
    attending, tokens, _ = kinds()[catalogue.TEXT]
    assert start_size(attending, tokens, 16 * GIB, "a T4").size < start_size(attending, tokens, 32 * GIB, "a T4").size


def test_attention_over_rows_of_numbers_is_known_by_their_count():
    attending = kinds()[catalogue.TEXT][0]
    assert catalogue.kind_of_model(attending, (torch.zeros(1, 20, 8), torch.zeros(1))).sample == "20 tokens"


def test_the_weights_and_what_an_update_needs_of_them_are_taken_off_first(cache):
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB, four times
    one = catalogue.example_of(catalogue.kind_of_model(model, (torch.zeros(1, 1024),))).bytes_a_sample
    assert start_size(model, (torch.zeros(1, 1024),), 16 * MIB + 4.5 * one, "a T4").size == 4
    assert start_size(model, (torch.zeros(1, 1024),), MIB, "a T4").size == 1


def test_a_larger_model_of_a_kind_is_likened_to_a_larger_example():
    examples = [one for one in catalogue.EXAMPLES if one.kind == catalogue.VISION]
    for one in examples:
        like = catalogue.Kind(name=one.kind, size=one.size, parameters=round(1.1 * one.parameters))
        assert catalogue.example_of(like) is one
    assert examples[0].bytes_at(2 * examples[0].size) == 4 * examples[0].bytes_a_sample


def test_what_was_measured_before_is_where_the_next_search_begins(cache):
    network, sample, _ = kinds()[catalogue.CONVOLUTIONS]
    kind = catalogue.kind_of_model(network, sample)
    keep_measured(kind, "a T4", MemoryLine(bytes_a_sample=GIB, rest_bytes=3 * GIB))
    begun = start_size(network, sample, 16 * GIB, "a T4")
    assert begun.size == 8  # of 13 that fit
    assert "1.0 GiB a sample were measured on a T4 before" in begun.why
    assert "a guess" in start_size(network, sample, 16 * GIB, "an A100").why
    assert "a guess" in start_size(network, pictures(96), 16 * GIB, "a T4").why


def test_a_cache_that_cannot_be_used_stops_no_search(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "file"))
    network, sample, _ = kinds()[catalogue.CONVOLUTIONS]
    keep_measured(catalogue.kind_of_model(network, sample), "a T4", MemoryLine(bytes_a_sample=1.0, rest_bytes=0.0))
    assert "a guess" in start_size(network, sample, 16 * GIB, "a T4").why
    assert "not a folder" in caplog.text


def test_a_search_corrects_the_guess_and_the_next_one_begins_where_it_ended(cache, monkeypatch):
    """As on a GPU, on which 200 samples fit."""
    monkeypatch.setattr("hotlap.kit.bench.Bench.memory_ends", True)
    monkeypatch.setattr("hotlap.kit.bench.room_on", lambda device: 40 * 1024)
    first, second = (
        hotlap.batch(job(model=Full(200), optimizer=lambda p: torch.optim.Adam(p)), progress=False) for _ in range(2)
    )
    assert "a guess for the CPU from" in first.summary()
    assert first.largest.size == second.largest.size == 200
    line = first.searched.line
    assert f"measured   {line.bytes_a_sample:.0f} B for each further sample" in first.summary()
    assert "were measured on the CPU before" in second.summary()
    fits = line.size_at(second.allowed_bytes)
    assert second.began.size <= fits < 2 * second.began.size
    assert first.to_dict()["measured"]["bytes_a_sample"] == line.bytes_a_sample


def test_an_optimizer_that_calls_the_model_by_itself_is_refused():
    with pytest.raises(TrainingError, match="LBFGS"):
        hotlap.batch(job(optimizer=lambda p: torch.optim.LBFGS(p)), progress=False)


def test_a_batch_norm_is_not_advised_to_train_with_one_sample():
    found = hotlap.batch(job(batch_size=1, accumulate=1), progress=False)
    assert found.advice.startswith("a batch norm cannot train with 1 sample at once, as you have it: 2 at least")


# --- advice ----------------------------------------------------------------------------------------------


def found_of(speeds, *, effective, own, writes=lambda size, times: f"{times} times {size}", proven=True):
    """What was found where sizes have these speeds."""
    trials = tuple(Trial(size=size, samples_per_s=speed, taken_bytes=size) for size, speed in speeds.items())
    return BatchFound(
        name="x",
        device="cpu",
        own_batch=own,
        effective_batch=effective,
        searched=Searched(trials=trials, ended="enough", found_largest=proven),
        began=StartSize(size=own, why="your own"),
        room_bytes=10**6,
        writes=writes,
    )


def test_an_effective_batch_that_is_nearly_the_fastest_is_not_cut():
    speeds = {16: 150.0, 41: 224.0, 64: 229.0, 128: 230.0}
    assert found_of(speeds, effective=64, own=64).advice == "the effective batch of 64 stays as it is"
    # One that was not timed itself is as fast as the slower of its neighbours.
    assert found_of(speeds, effective=50, own=50).advice == "the effective batch of 50 stays as it is"
    assert "10 times 10" in found_of({16: 230.0, 64: 229.0, 128: 100.0}, effective=100, own=100).advice
    # One that is larger than all that keep the reserve has to be cut.
    assert "2 times 128" in found_of({64: 100.0, 128: 230.0}, effective=256, own=256).advice


def test_a_training_that_accumulates_is_told_not_to_where_its_batch_goes_through_at_once():
    mine = job(batch_size=4, accumulate=2)
    found = hotlap.batch(mine, progress=False, seconds=5)
    assert found.effective_batch == 8
    whole = found_of({8: 100.0}, effective=8, own=4, writes=found.writes)
    assert whole.advice == "the effective batch of 8 goes through in one piece: batch_size=8, accumulate=1"
    script = found_of({8: 100.0}, effective=8, own=4, writes=partial(kit._script_words, True))
    assert script.advice.endswith("the loader's batch_size=8, and an update with every batch")


def test_a_curve_that_still_rises_where_the_search_ends_is_said_to():
    speeds = {16: 100.0, 32: 200.0}
    assert (
        "that of 32; larger ones may be faster still" in found_of(speeds, effective=16, own=16, proven=False).summary()
    )
    assert "may be faster" not in found_of(speeds, effective=16, own=16).summary()
    assert "may be faster" not in found_of({**speeds, 64: 90.0}, effective=16, own=16, proven=False).summary()
