"""Rates of a device: measured once, kept, checked when read."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from hotlap.core.errors import StoreError
from hotlap.data.order import HostRandomness
from hotlap.monitor import calibration as room
from hotlap.monitor.calibration import KIND, Calibration, calibration, measure
from hotlap.store.cache import Cache

RATES = Calibration(
    matmul_flops={"fp32": 1e11, "bf16": 2e11}, copy_bytes=1e10, cache_bytes=0.0, pinned_bytes=None,
    pageable_bytes=None, launch_s=1e-6, sync_s=0.0,
)  # fmt: skip


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def measured(monkeypatch):
    """How often it was measured; each time it is a little faster."""
    times = []

    def pretended(device):
        times.append(device)
        return replace(RATES, copy_bytes=1e10 + len(times))

    monkeypatch.setattr(room, "measure", pretended)
    monkeypatch.setattr(room, "_waited_s", lambda: 0.0)
    return times


def test_every_figure_of_this_cpu_is_there_and_sensible():
    rates = measure(torch.device("cpu"))
    assert 1e8 < rates.matmul_flops["fp32"] < 1e15
    assert "tf32" not in rates.matmul_flops
    assert 1e8 < rates.copy_bytes < 1e14
    assert 1e-8 < rates.launch_s < 1e-2
    assert (rates.sync_s, rates.pinned_bytes, rates.pageable_bytes) == (0.0, None, None)
    assert rates.cache_bytes >= 0
    assert not rates.queued


def test_measuring_leaves_generators_and_settings_as_they_are():
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before, threads = HostRandomness(), torch.get_num_threads()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measure(torch.device("cpu"))
    assert before.same_as(HostRandomness())
    assert torch.equal(before.torch, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


def test_it_is_measured_once_and_then_read(cache, measured):
    first = calibration("cpu", cache=cache)
    assert calibration(torch.device("cpu"), cache=cache) == first
    assert len(measured) == 1
    assert [item.facts["kind"] for item in cache.list(KIND)] == ["cpu"]


def test_nothing_is_measured_where_only_what_is_known_is_wanted(cache, measured):
    assert calibration("cpu", cache=cache, known_only=True) is None
    assert measured == []
    first = calibration("cpu", cache=cache)
    assert calibration("cpu", cache=cache, known_only=True) == first


def test_measured_afresh_it_replaces_what_is_kept(cache, measured):
    first = calibration("cpu", cache=cache)
    second = calibration("cpu", cache=cache, afresh=True)
    assert second != first
    assert calibration("cpu", cache=cache) == second
    assert len(measured) == 2


def test_the_default_cache_is_used_where_none_is_given(tmp_path, measured, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "mine"))
    calibration("cpu")
    calibration("cpu")
    assert len(measured) == 1
    assert len(Cache().list(KIND)) == 1


def test_a_damaged_entry_is_measured_again(cache, measured, caplog):
    calibration("cpu", cache=cache)
    (entry,) = cache.list(KIND)
    (entry.path / "values.json").write_bytes(b"{")
    again = calibration("cpu", cache=cache)
    assert len(measured) == 2
    assert calibration("cpu", cache=cache) == again
    assert "removed the damaged cache entry" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"copy_bytes": 0.0},
        {"copy_bytes": -1.0},
        {"copy_bytes": math.nan},
        {"copy_bytes": math.inf},
        {"copy_bytes": True},
        {"copy_bytes": "fast"},
        {"copy_bytes": None},
        {"launch_s": 0},
        {"sync_s": -1e-6},
        {"pinned_bytes": 0.0},
        {"matmul_flops": {}},
        {"matmul_flops": {"fp32": 0.0}},
        {"matmul_flops": {"fp32": 1e9, "fp8": 1e9}},
        {"matmul_flops": 1e9},
        {"unheard_of": 1.0},
    ],
)
def test_a_kept_figure_that_no_device_can_have_is_measured_again(wrong, cache, measured, caplog):
    calibration("cpu", cache=cache)
    (item,) = cache.list(KIND)
    cache.drop(KIND, item.key)
    cache.put(KIND, item.key, values=RATES.to_dict() | wrong, facts={})
    again = calibration("cpu", cache=cache)
    assert len(measured) == 2
    assert calibration("cpu", cache=cache) == again
    assert "not used" in caplog.text


@pytest.mark.parametrize("values", [None, 3, [], {}, {"copy_bytes": 1.0}])
def test_what_is_no_calibration_is_refused(values):
    with pytest.raises(ValueError, match="not a calibration"):
        Calibration.from_dict(values)


def test_a_cache_that_cannot_be_used_stops_nothing(tmp_path, measured, monkeypatch, caplog):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("HOTLAP_CACHE", str(file))
    assert calibration("cpu").launch_s == RATES.launch_s
    assert "not cached" in caplog.text

    def full(*_, **__):
        raise StoreError("the disk is full")

    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr(cache, "put", full)
    assert calibration("cpu", cache=cache).launch_s == RATES.launch_s


def test_what_was_measured_on_a_busy_machine_is_not_kept(cache, measured, monkeypatch):
    waits = iter([0.0, 1e6])
    monkeypatch.setattr(room, "_waited_s", lambda: next(waits))
    calibration("cpu", cache=cache)
    assert cache.list(KIND) == []


def test_another_gpu_to_act_as_or_another_number_of_threads_is_measured_anew(cache, measured, monkeypatch):
    calibration("cpu", cache=cache)
    monkeypatch.setenv("HOTLAP_PRETEND", "t4")
    calibration("cpu", cache=cache)
    monkeypatch.delenv("HOTLAP_PRETEND")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        calibration("cpu", cache=cache)
    finally:
        torch.set_num_threads(threads)
    calibration("cpu", cache=cache)
    assert len(measured) == 3
    assert len(cache.list(KIND)) == 3


def test_a_cpu_that_acts_as_a_gpu_measures_only_what_it_has_itself(monkeypatch):
    own = set(room._precisions(torch.device("cpu")))
    monkeypatch.setenv("HOTLAP_PRETEND", "t4")
    acted = set(room._precisions(torch.device("cpu")))
    assert {"fp32"} <= acted <= own
    assert not acted & {"tf32", "bf16"}


def test_figures_survive_being_written_as_plain_values():
    assert Calibration.from_dict(RATES.to_dict()) == RATES
