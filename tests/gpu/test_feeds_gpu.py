"""Feeds on a real GPU: the data that a step reads is right, copies overlap steps, and nobody waits."""

import gc
import json
import warnings
from collections import deque, namedtuple
from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset
from waiting import no_waiting

from hotlap.core.plan import Feed
from hotlap.data import feeds
from hotlap.data.dataset import as_source
from hotlap.data.feeds import CudaCopier, PinnedBuffers, open_feed, why_not
from hotlap.data.pure.proof import why_not_pure
from hotlap.data.resident import hold_on_device, why_not_held
from hotlap.data.windows import Windows

DEVICE = torch.device("cuda")
MILLISECOND = 1_700_000
"""Cycles of the clock that `torch.cuda._sleep` counts, nearly."""
LONG = 500 * MILLISECOND
X = torch.arange(303.0).reshape(101, 3)
Y = torch.arange(101)
Pair = namedtuple("Pair", "x y")
LOADERS = [
    Feed(kind="loader", pinned=True),
    Feed(kind="loader", workers=2, pinned=True),
    Feed(kind="loader", workers=2, pinned=True, persistent=True, prefetch=3),
]


class Nested(Dataset):
    def __len__(self):
        return 101

    def __getitem__(self, index):
        return {"pair": Pair(X[index], index), "words": f"sample {index}", "list": [X[index].half(), (index / 3,)]}


def same(a, b):
    if isinstance(a, torch.Tensor):
        assert a.is_cuda, "a batch was left on the host"
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def fed(source, plan, indices, epochs=1):
    feeding = open_feed(source, plan, seed=5, device=DEVICE)
    try:
        return [batch for epoch in range(epochs) for batch in feeding.pieces(indices, epoch)]
    finally:
        feeding.close()


# --- the same batches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        X,
        (X, Y),
        {"x": X, "y": Y},
        (X.numpy(), Y.numpy()),
        (X.to(torch.uint8), Y.bool(), X.half(), X.bfloat16(), X.double(), Y.to(torch.int16), X.to(torch.complex64)),
        (torch.randn(101, 1, 7, 13), torch.randn(101, 0, 4), torch.randn(101)),
        (X.T.contiguous().T, X[:, 1]),
        Subset(TensorDataset(X, Y), range(3, 90)),
        Windows(X, 7, ahead=2),
        Windows([X, X[:20] + 1000, X[:5]], 7, target=[Y, Y[:20], Y[:5]], stride=3),
    ],
    ids=["tensor", "tuple", "dict", "arrays", "dtypes", "shapes", "strided", "Subset", "Windows", "several series"],
)
def test_the_stream_gives_what_gather_gives(data):
    source = as_source(data)
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(1))
    indices = [*order.split(8), order[:1], order]  # also a shorter last batch, then a larger one
    wanted = list(map(source.gather, indices)) * 2
    assert same(fed(source, Feed(kind="stream"), indices, epochs=2), wanted)


@pytest.mark.parametrize("plan", LOADERS, ids=str)
@pytest.mark.parametrize("data", [(X, Y), {"x": X, "y": Y}, Nested()], ids=["tuple", "dict", "nested"])
def test_page_locked_batches_of_a_loader_are_copied_ahead_and_are_the_same(data, plan):
    source, indices = as_source(data), list(torch.randperm(101).split(8))
    assert same(fed(source, plan, indices, epochs=2), [source.fetch(i.tolist(), 5, 0) for i in indices] * 2)


def test_data_that_is_on_the_gpu_is_not_streamed():
    assert "there already" in why_not(as_source((X.cuda(), Y.cuda())), Feed(kind="stream"), device=DEVICE)


# --- memory ------------------------------------------------------------------------------------------


class Poisoned(PinnedBuffers):
    """Page-locked memory whose old content is ruined as soon as it is given out again."""

    def allocate(self, shape, dtype):
        return super().allocate(shape, dtype).fill_(-5)


@pytest.fixture
def poisoned(monkeypatch):
    monkeypatch.setattr(feeds, "PinnedBuffers", Poisoned)


@pytest.fixture
def slow_copies(monkeypatch):
    """Every copy begins a millisecond late."""
    send = CudaCopier.send

    def late(copier, batch):
        with torch.cuda.stream(copier._stream):
            torch.cuda._sleep(MILLISECOND)
        return send(copier, batch)

    monkeypatch.setattr(CudaCopier, "send", late)


def wrongs(plan, *, step, together=1, keep=0, batches=200, size=64, features=2048):
    """How many numbers a consumer reads wrong, counted on the device; freed memory is poisoned at once."""
    count = batches * size - 17  # the last batch is shorter
    x, y = torch.arange(count * 8, dtype=torch.int32).reshape(count, 8).repeat(1, features // 8), torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    truth, here = x.to(DEVICE), order.to(DEVICE)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    kept = deque(maxlen=keep)
    feeding = open_feed(as_source((x, y)), plan, device=DEVICE)
    served = feeding.pieces(order.split(size), 0)
    at = 0

    def check(batch, start):
        expected = here[start : start + len(batch[1])]
        return (batch[1] != expected).sum() + (batch[0] != truth.index_select(0, expected)).sum()

    while window := list(islice(served, together)):
        for batch in window:
            if step:
                torch.cuda._sleep(step)
            wrong += check(batch, at)
            kept.append((batch, at))
            at += len(batch[1])
        del batch, window
        for _ in range(2):
            torch.full((size, features), -7, dtype=torch.int32, device=DEVICE)
    for batch, start in kept:
        wrong += check(batch, start)
    feeding.close()
    assert at == count
    return int(wrong)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("together", [1, 5], ids=["one at a time", "five at a time"])
@pytest.mark.parametrize("keep", [0, 20], ids=["dropped", "kept"])
@pytest.mark.parametrize("step", [0, MILLISECOND], ids=["fast steps", "slow steps"])
def test_every_step_reads_its_own_batch(step, keep, together):
    assert wrongs(Feed(kind="stream"), step=step, keep=keep, together=together) == 0


@pytest.mark.usefixtures("poisoned", "slow_copies")
@pytest.mark.parametrize("together", [1, 5], ids=["one at a time", "five at a time"])
@pytest.mark.parametrize("step", [0, MILLISECOND // 4], ids=["fast steps", "slower steps"])
def test_every_step_reads_its_own_batch_though_copies_are_late(step, together):
    assert wrongs(Feed(kind="stream"), step=step, together=together) == 0


@pytest.mark.parametrize("step", [0, MILLISECOND], ids=["fast steps", "slow steps"])
def test_every_step_reads_its_own_batch_of_a_loader(step):
    assert wrongs(LOADERS[1], step=step, batches=60) == 0


@pytest.mark.usefixtures("slow_copies")
def test_every_step_reads_its_own_batch_of_a_loader_though_copies_are_late():
    assert wrongs(LOADERS[0], step=0, batches=60) == 0


@pytest.mark.usefixtures("poisoned", "slow_copies")
def test_a_consumer_on_another_stream_reads_the_right_data_too():
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        assert wrongs(Feed(kind="stream"), step=MILLISECOND // 4) == 0


@pytest.mark.usefixtures("slow_copies")
def test_a_consumer_that_changes_its_stream_reads_the_right_data_too():
    """Of three streams in turn, so that a batch is sent from one and taken on another."""
    x = torch.arange(200 * 4096, dtype=torch.int32).reshape(200, 4096)
    truth, wrong = x.to(DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    main = torch.cuda.current_stream()
    streams = [main, torch.cuda.Stream(), torch.cuda.Stream()]
    feeding = open_feed(as_source(x), Feed(kind="stream"), device=DEVICE)
    batches = feeding.pieces(torch.arange(200).split(4), 0)
    for number in range(50):
        here = streams[number % 3]
        here.wait_stream(main)
        with torch.cuda.stream(here):
            batch = next(batches)
            torch.cuda._sleep(MILLISECOND // 2)
            bad = (batch != truth[number * 4 : number * 4 + 4]).sum()
            del batch
            torch.full((4, 4096), -7, dtype=torch.int32, device=DEVICE)
        bad.record_stream(main)
        main.wait_stream(here)
        wrong += bad
    assert int(wrong) == 0


@pytest.mark.usefixtures("slow_copies")
def test_memory_of_a_batch_that_nobody_came_for_is_not_written_after_it_is_free():
    x = torch.full((40, 65536), 3, dtype=torch.int32)
    for _ in range(5):
        feeding = open_feed(as_source(x), Feed(kind="stream"), device=DEVICE)
        batches = feeding.pieces(torch.arange(40).split(8), 0)
        next(batches)
        batches.close()
        feeding.close()
        others = [torch.full((8, 65536), 5, dtype=torch.int32, device=DEVICE) for _ in range(6)]
        torch.cuda.synchronize()
        assert all(bool((other == 5).all()) for other in others)


def test_a_feed_leaves_no_memory_behind():
    def run():
        feeding = open_feed(as_source((torch.randn(400, 4096),)), Feed(kind="stream"), device=DEVICE)
        for batch in feeding.pieces(torch.arange(400).split(16), 0):
            del batch
        feeding.close()
        torch.cuda.synchronize()

    run()
    before = torch.cuda.memory_allocated()
    run()
    assert torch.cuda.memory_allocated() == before


# --- time --------------------------------------------------------------------------------------------


def test_neither_the_gpu_nor_a_stream_is_waited_for():
    source, indices = as_source((X, Y)), torch.arange(101).split(8)
    feeding = open_feed(source, Feed(kind="stream"), device=DEVICE)
    list(feeding.pieces(indices, 0))
    torch.cuda.synchronize()
    with no_waiting():
        for x, y in feeding.pieces(indices, 1):
            x.sum() + y.sum()
    feeding.close()


def test_the_host_goes_on_while_the_gpu_is_busy():
    feeding = open_feed(as_source((torch.randn(400, 4096),)), Feed(kind="stream"), device=DEVICE)
    indices = torch.arange(400).split(16)
    list(feeding.pieces(indices, 0))  # memory that is locked for the first time makes the driver wait
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    ended = torch.cuda.Event()
    ended.record()
    batches = feeding.pieces(indices, 1)
    next(batches)
    next(batches)
    assert not ended.query()
    torch.cuda.synchronize()
    batches.close()
    feeding.close()


def traced(tmp_path, work):
    """Copies to the GPU and kernels, as the profiler saw them: name, stream, start, end."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    def rows(kind, words=""):
        return [
            (e["args"]["stream"], e["ts"], e["ts"] + e["dur"])
            for e in events
            if e.get("cat") == kind and words in e["name"]
        ]

    return rows("gpu_memcpy", "HtoD"), rows("kernel")


@pytest.mark.parametrize("plan", [Feed(kind="stream"), LOADERS[1]], ids=str)
def test_copies_run_on_another_stream_than_kernels_and_at_the_same_time(plan, tmp_path):
    x = torch.randn(16 * 16, 65536)  # 4 MiB a batch, which fits into the shared memory that containers have
    square = torch.randn(8192, 8192, device=DEVICE)
    feeding = open_feed(as_source((x,)), plan, device=DEVICE)

    def work():
        for (batch,) in feeding.pieces(torch.arange(len(x)).split(16), 0):
            for _ in range(3):
                square @ square
            batch.sum()

    work()
    copies, kernels = traced(tmp_path, work)
    feeding.close()
    assert len(copies) >= 16
    assert {s for s, _, _ in copies}.isdisjoint({s for s, _, _ in kernels})
    overlapped = [any(a < end and start < b for _, a, b in kernels) for _, start, end in copies]
    print(f"\n{sum(overlapped)} of {len(copies)} copies overlap a kernel")
    assert sum(overlapped) > len(copies) / 2


# --- data held on the GPU ----------------------------------------------------------------------------


class Computed(Dataset):
    def __len__(self):
        return 101

    def __getitem__(self, index):
        return X[index], {"y": index}


@pytest.mark.parametrize(
    "data",
    [
        (X.to(torch.uint8), Y),
        {"x": X, "y": Y.bool()},
        Subset(TensorDataset(X, Y), [5, -1, 5]),
        Windows(X, 7, ahead=2, stride=2),
        Windows([X, X[:20] + 1000], 7, target=[Y, Y[:20]]),
        Subset(Windows([X, X[:20] + 1000], 7, target=torch.arange(109)), range(80, 109)),
        Computed(),
    ],
    ids=["tuple", "dict", "Subset", "Windows", "several series", "Subset of Windows", "computed"],
)
def test_what_is_held_is_gathered_on_the_gpu_without_a_wait_and_inside_a_capture(data):
    source = as_source(data)
    assert why_not_held(source, DEVICE, reserve_bytes=2**20) is None
    columns = hold_on_device(source, DEVICE)
    assert columns.holding_cost.bytes > 0
    indices = [torch.randint(len(source), (9,)) for _ in range(3)]
    wanted = [source.fetch(i.tolist(), 0, 0) for i in indices]
    there = [i.to(DEVICE) for i in indices]
    torch.cuda.synchronize()
    with no_waiting():
        got = [columns.gather(i) for i in there]
    assert same(got, wanted)
    slot, graph = there[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = columns.gather(slot)
    for chosen, expected in zip(there, wanted, strict=True):
        slot.copy_(chosen)
        graph.replay()
        assert same(batch, expected)


@pytest.mark.parametrize("can_pin", [True, False])
@pytest.mark.parametrize("rows", [None, list(range(100, 2, -3)), [7] * 50])
@pytest.mark.parametrize("data", [X, X.t().contiguous().t(), X.to(torch.uint8)])
def test_what_is_held_in_many_chunks_is_what_was_given(data, rows, can_pin, monkeypatch):
    """By way of page-locked memory, where there is any: no chunk may be overwritten while it is under way."""
    monkeypatch.setattr("hotlap.data.resident.CHUNK_BYTES", 40)
    if not can_pin:

        def refused(*parts, pin_memory=False, made=torch.empty, **named):
            if pin_memory:
                raise RuntimeError("CUDA error: out of memory")
            return made(*parts, **named)

        monkeypatch.setattr(torch, "empty", refused)
    whole = TensorDataset(data, Y)
    source = as_source(whole if rows is None else Subset(whole, rows))
    torch.cuda._sleep(LONG // 5)  # what is sent waits for it
    columns = hold_on_device(source, DEVICE)
    chosen = torch.arange(101) if rows is None else torch.tensor(rows)
    x, y = columns.gather(torch.arange(len(chosen), device=DEVICE))
    assert torch.equal(x.cpu(), data.detach()[chosen])
    assert torch.equal(y.cpu(), Y[chosen])


@pytest.mark.parametrize(
    ("data", "most"),
    [
        ((X, Y), 2),
        (Windows(X, 7, ahead=2), 2),
        (Windows([X, X], 7, target=[Y, Y]), 3),
        (Subset(Windows(X, 7, ahead=2), range(50)), 3),
    ],
    ids=["columns", "Windows", "several series", "Subset of Windows"],
)
def test_a_gather_takes_so_many_kernels(data, most, tmp_path):
    columns, indices = hold_on_device(as_source(data), DEVICE), torch.randint(40, (32,), device=DEVICE)
    columns.gather(indices)
    copies, kernels = traced(tmp_path, lambda: columns.gather(indices))
    assert (len(copies), len(kernels)) == (0, most)


def test_windows_of_a_series_take_the_memory_of_the_series():
    series = torch.randn(100_000, 16)
    before = torch.cuda.memory_allocated()
    columns = hold_on_device(as_source(Windows(series, 512, ahead=1)), DEVICE)  # 3 GiB, were each window stored
    assert columns.holding_cost.bytes == series.nbytes
    torch.cuda.reset_peak_memory_stats()
    x, y = columns.gather(torch.tensor([0, 99_000], device=DEVICE))
    assert torch.equal(x[1].cpu(), series[99_000:99_512])
    assert torch.equal(y[1].cpu(), series[99_512])
    assert torch.cuda.max_memory_allocated() - before < 2 * series.nbytes
    del columns, x, y
    assert torch.cuda.memory_allocated() == before


def test_data_that_is_there_is_not_copied():
    x = X.cuda()
    columns = hold_on_device(as_source((x, Y)), DEVICE)
    assert columns.tensors[0].data_ptr() == x.data_ptr()
    assert columns.holding_cost.bytes == Y.nbytes


def test_data_that_does_not_fit_beside_the_training_is_refused_with_figures():
    free, _ = torch.cuda.mem_get_info()
    said = why_not_held(as_source((X, Y)), DEVICE, reserve_bytes=free + 2**30)
    assert said.startswith(f"the data needs 2.0 KiB on {DEVICE} beside")
    assert said.endswith("free")


def test_memory_that_torch_keeps_for_itself_counts_as_free():
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    keeps = torch.empty(free // 2, dtype=torch.uint8, device=DEVICE)
    del keeps
    assert why_not_held(as_source((X, Y)), DEVICE, reserve_bytes=free // 10 * 9) is None
    torch.cuda.empty_cache()


def test_a_dataset_that_draws_on_the_gpu_is_not_pure():
    class Drawing(Computed):
        def __getitem__(self, index):
            return torch.rand(2, device="cuda").cpu() * 0 + index

    torch.cuda.init()
    state = torch.cuda.get_rng_state()
    assert why_not_pure(as_source(Drawing())).startswith("Drawing draws from torch's generator")
    assert torch.equal(torch.cuda.get_rng_state(), state)


# --- workers -----------------------------------------------------------------------------------------


class Collecting(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        gc.collect()
        return index


@pytest.mark.parametrize("pinned", [False, True])
def test_workers_live_though_they_were_forked_after_a_capture_with_graphs_as_garbage(pinned):
    def leave_garbage():
        graph, tensor = torch.cuda.CUDAGraph(), torch.zeros(8, device=DEVICE)
        with torch.cuda.graph(graph):
            out = tensor * 2
        cycle = {"graph": graph, "out": out, "event": torch.cuda.Event(), "stream": torch.cuda.Stream()}
        cycle["event"].record()
        cycle["itself"] = cycle

    plan = Feed(kind="loader", workers=2, pinned=pinned)
    for _ in range(3):
        gc.collect()
        gc.disable()
        try:
            leave_garbage()
            feeding = open_feed(as_source(Collecting()), plan, device=DEVICE)
            batches = list(feeding.pieces(torch.arange(40).split(8), 0))
        finally:
            gc.enable()
        assert torch.equal(torch.cat(batches).cpu(), torch.arange(40))
        feeding.close()
