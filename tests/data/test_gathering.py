"""Rows gathered on the host: the same whoever gathers them."""

import multiprocessing
import threading
import time

import numpy as np
import pytest
import torch

from hotlap.data import sources
from hotlap.data.sources import Columns, HostRows

COUNT = 40
X = torch.randn(COUNT, 3, 4, generator=torch.Generator().manual_seed(1)) * 50
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.complex64),
]
INDICES = torch.tensor([3, 0, 39, 3, 17, 38, 0])


@pytest.fixture(autouse=True)
def few_by_numpy(monkeypatch):
    """The borders between torch, one thread of numpy's and several, where a few samples meet them."""
    monkeypatch.setattr(sources, "TORCH_GRAIN", 8)
    monkeypatch.setattr(sources, "SINGLE_THREAD_BYTES", 256)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.fixture
def takes(monkeypatch):
    """How often torch gathered."""
    found, select_rows = [], sources.select_rows

    def noted(*args):
        found.append(args)
        return select_rows(*args)

    monkeypatch.setattr(sources, "select_rows", noted)
    return found


def same(rows, tensor, indices):
    found, truth = rows.at(indices, None), tensor.index_select(0, indices)
    assert found.dtype == truth.dtype
    assert found.stride() == truth.stride()
    assert found.is_inference() == truth.is_inference()
    assert found.is_inference() or found._version == 0
    return torch.equal(found, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_kind_of_number(dtype):
    tensor = X.to(dtype)
    rows = HostRows(tensor)
    assert all(same(rows, tensor, INDICES[:count]) for count in range(len(INDICES) + 1))


@pytest.mark.parametrize(
    "tensor",
    [X[:, 0, 0], X.transpose(1, 2), X[::2], X[:, :0], X[:1].expand(40, 3, 4), X[5:], X.permute(1, 0, 2).contiguous()],
)
def test_rows_however_the_tensor_lies(tensor):
    indices = INDICES % len(tensor)
    assert all(same(HostRows(tensor), tensor, indices[:count]) for count in range(len(indices) + 1))


def test_numpy_gathers_where_torch_would_wake_its_threads(takes):
    def by_numpy(tensor):
        found = []
        for count in range(1, 16):
            takes.clear()
            assert same(HostRows(tensor), tensor, torch.arange(count))
            found += [] if takes else [count]
        return found

    assert by_numpy(X) == list(range(1, 16))
    assert by_numpy(X[:, 0, 0].clone()) == list(range(9, 16))


@pytest.mark.parametrize(("count", "hands"), [(5, 1), (6, 3), (7, 3), (40, 3)])
def test_what_is_large_is_shared_by_as_many_threads_as_torch_may_have(count, hands, monkeypatch):
    parts, shared = [], sources._shared

    def noted(work, *rest):
        def done(start, end):
            parts.append((start, end))
            work(start, end)

        shared(done, *rest)

    monkeypatch.setattr(sources, "_shared", noted)
    assert same(HostRows(X), X, torch.arange(count).flip(0))
    assert len(parts) == hands
    assert [start for start, _ in sorted(parts)[1:]] == [end for _, end in sorted(parts)[:-1]]


def test_a_process_that_was_forked_off_has_threads_of_its_own():
    assert same(HostRows(X), X, torch.arange(COUNT))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(same, (HostRows(X), X, torch.arange(COUNT))).get(timeout=600)


@pytest.mark.parametrize("breaks", [0, 13])
def test_what_breaks_is_told_once_nobody_writes_any_more(breaks):
    """Into memory that may be another batch's by then."""
    at_work, begun = [], threading.Barrier(3)

    def broken(start, end):
        begun.wait(timeout=600)
        if start == breaks:
            raise MemoryError(f"{start}")
        at_work.append(start)
        time.sleep(0.2)
        at_work.remove(start)

    with pytest.raises(MemoryError):
        sources._shared(broken, 40, 1000)
    assert at_work == []


def test_a_thread_that_outlives_the_main_one_gathers_alone(forks, tmp_path):
    """Nobody may start threads by then."""
    code = """
import threading, torch
from hotlap.data import sources
sources.TORCH_GRAIN, sources.SINGLE_THREAD_BYTES = 8, 256
torch.set_num_threads(2)
X = torch.arange(400.0).view(40, 10)
def late():
    threading.main_thread().join()
    found = sources.HostRows(X).at(torch.arange(39, -1, -1), None)
    print("same" if torch.equal(found, X.flip(0)) else "other")
threading.Thread(target=late).start()
"""
    done = forks.run("-c", code, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("same\n", "")


def test_it_can_be_left_to_torch(takes, monkeypatch):
    monkeypatch.setattr(sources, "GATHER_THREADS", 0)
    assert same(HostRows(X), X, INDICES)
    assert len(takes) == 1


@pytest.mark.parametrize("wrong", [[0, COUNT], [-1, 3], [2**40, 0], [-(2**62), 0]])
def test_places_that_are_none_are_told_as_torch_tells_it(wrong):
    with pytest.raises(IndexError):
        HostRows(X).at(torch.tensor(wrong), None)


def test_other_indices_are_torchs(takes):
    assert same(HostRows(X), X, INDICES.int())
    assert same(HostRows(X), X, INDICES[::2])
    assert len(takes) == 1


def test_rows_go_into_the_room_that_is_given():
    room = torch.zeros(len(INDICES), 3, 4)
    found = HostRows(X).at(INDICES, lambda shape, dtype: room)
    assert found is room
    assert torch.equal(room, X[INDICES])


def test_inference_mode_makes_its_tensors_in_either_way():
    with torch.inference_mode():
        assert all(same(HostRows(X), X, INDICES[:count]) for count in (0, 5, 7))
        inside = X.clone()
    assert same(HostRows(inside), inside, INDICES)


def test_a_tensor_that_was_given_other_memory_is_read_there():
    tensor = X.clone()
    rows = HostRows(tensor)
    tensor.set_(X.clone() + 1)
    assert torch.equal(rows.at(INDICES, None), X[INDICES] + 1)


def test_what_numpy_may_not_write_to_is_read():
    array = X.numpy().copy()
    array.flags.writeable = False
    columns = Columns((array, np.arange(COUNT)))
    x, y = columns.gather(INDICES)
    assert torch.equal(x, X[INDICES])
    assert torch.equal(y, INDICES)
