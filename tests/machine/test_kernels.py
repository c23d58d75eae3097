"""The kernel that proves a device can compute."""

from __future__ import annotations

import pytest
import torch

from hotlap.machine.kernels import first_line, run_kernel, times_as_long

NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_a_kernel_runs_on_the_cpu(dtype):
    assert run_kernel("cpu", dtype) is None


def test_a_format_is_timed_beside_fp32_once(monkeypatch):
    times_as_long.cache_clear()
    made, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, right: made.append(left.dtype) or mm(left, right))
    assert times_as_long("fp16") > 0
    assert set(made) == {torch.float16, torch.float32}
    made.clear()
    assert times_as_long("fp16") > 0
    assert made == []


def test_an_error_is_answered_with_its_first_line(monkeypatch):
    def fail(self, other):
        raise RuntimeError(f"{NO_KERNEL}\nCUDA kernel errors might be asynchronous")

    monkeypatch.setattr(torch.Tensor, "__matmul__", fail)
    assert run_kernel("cpu", "fp32") == NO_KERNEL


def test_a_full_gpu_is_told_without_torchs_account_of_it():
    full = "CUDA out of memory. Tried to allocate 66.00 MiB."
    account = "GPU 0 has a total capacity of 139.80 GiB of which 124.41 GiB is free. Process 545 has 66.00 MiB in use."
    assert first_line(torch.OutOfMemoryError(f"{full} {account}\nand more")) == full


def test_a_kernel_that_computes_nonsense_is_found_out(monkeypatch):
    def nonsense(left, right):
        return torch.mm(left, right) * (1.0 if left.dtype is torch.float64 else 1.05)

    monkeypatch.setattr(torch.Tensor, "__matmul__", nonsense)
    assert "wrong" in run_kernel("cpu", "fp32")
    assert run_kernel("cpu", "fp64") is None


def test_a_kernel_that_gives_nan_is_found_out(monkeypatch):
    def empty(left, right):
        return torch.mm(left, right) * (1.0 if left.dtype is torch.float64 else float("nan"))

    monkeypatch.setattr(torch.Tensor, "__matmul__", empty)
    assert "wrong" in run_kernel("cpu", "fp32")


@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_the_tf32_switch_is_put_back(dtype):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for on in (True, False):
            matmul.allow_tf32 = on
            run_kernel("cpu", dtype)
            assert matmul.allow_tf32 is on
    finally:
        matmul.allow_tf32 = before


def test_the_switch_is_on_while_tf32_is_probed_and_off_for_fp32(monkeypatch):
    seen = []
    real = torch.Tensor.__matmul__

    def watch(left, right):
        if left.dtype is torch.float32:
            seen.append(torch.backends.cuda.matmul.fp32_precision)
        return real(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watch)
    assert run_kernel("cpu", "tf32") is None
    assert run_kernel("cpu", "fp32") is None
    assert seen == ["tf32", "ieee"]


def test_the_global_random_state_is_not_touched():
    before = torch.get_rng_state()
    run_kernel("cpu", "fp32")
    assert torch.equal(before, torch.get_rng_state())
