"""Number formats by design, by proof and by pretence."""

from __future__ import annotations

import pytest
import torch

from hotlap.core.errors import first_line
from hotlap.machine.dtypes import Support, on_cpu, on_cuda, paced, pretended, proven, run_kernel, times_as_long

NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"


def supports(facts):
    return {name: str(fact.support) for name, fact in facts.items()}


@pytest.mark.parametrize(
    ("flags", "bf16", "fp16"),
    [
        ({"avx2"}, "emulated", "emulated"),
        ({"avx512_bf16"}, "hardware", "emulated"),
        ({"amx_bf16", "avx512_fp16"}, "hardware", "hardware"),
        ({"bf16", "asimdhp"}, "hardware", "hardware"),
    ],
)
def test_a_cpu_has_half_formats_only_where_it_has_the_instructions(flags, bf16, fp16):
    design = on_cpu(flags)
    assert {name: str(fact[0]) for name, fact in design.items()} == {
        "fp32": "hardware",
        "tf32": "absent",
        "bf16": bf16,
        "fp16": fp16,
    }


def test_what_torch_makes_no_use_of_counts_as_emulated():
    facts = proven(on_cpu({"avx512_bf16", "avx512_fp16"}), {"fp32": None, "bf16": None, "fp16": None})
    timed = []
    left = paced(facts, lambda dtype: timed.append(dtype) or {"bf16": 0.6, "fp16": 14.2}[dtype])
    assert supports(left) == {"fp32": "hardware", "tf32": "absent", "bf16": "hardware", "fp16": "emulated"}
    assert "avx512_fp16, of which torch makes no use: a product takes 14 times as long" in left["fp16"].reason
    assert left["fp16"].kernel == "ran"
    assert timed == ["bf16", "fp16"]


def test_what_a_cpu_has_no_instructions_for_or_cannot_compute_is_not_timed():
    facts = proven(on_cpu({"avx512_bf16"}), {"fp32": None, "bf16": "boom", "fp16": None})
    assert paced(facts, None) == facts


@pytest.mark.parametrize(
    ("capability", "bf16", "tf32"),
    [
        ((6, 0), "absent", "absent"),
        ((7, 0), "emulated", "absent"),
        ((7, 5), "emulated", "absent"),
        ((8, 0), "hardware", "hardware"),
        ((12, 0), "hardware", "hardware"),
    ],
)
def test_bf16_and_tf32_begin_with_compute_capability_8(capability, bf16, tf32):
    design = on_cuda(capability)
    assert (str(design["bf16"][0]), str(design["tf32"][0])) == (bf16, tf32)


def test_a_failed_kernel_makes_a_format_absent_with_the_errors_line():
    facts = proven(on_cuda((8, 0)), {"fp32": None, "bf16": "boom", "tf32": None, "fp16": None})
    assert facts["bf16"].support is Support.ABSENT
    assert (facts["bf16"].reason, facts["bf16"].kernel) == ("boom", "failed")
    assert (facts["fp16"].support, facts["fp16"].kernel) == (Support.HARDWARE, "ran")


def test_an_emulated_format_whose_kernel_fails_is_absent():
    assert proven(on_cuda((7, 5)), {"bf16": "boom"})["bf16"].support is Support.ABSENT


def test_pretending_a_lesser_gpu_takes_formats_away():
    real = proven(on_cuda((9, 0)), dict.fromkeys(("fp32", "tf32", "bf16", "fp16")))
    t4 = {name: fact[0] for name, fact in on_cuda((7, 5)).items()}
    assert supports(pretended(real, t4, "T4")) == {
        "fp32": "hardware",
        "tf32": "absent",
        "bf16": "emulated",
        "fp16": "hardware",
    }


def test_pretending_a_better_gpu_adds_nothing():
    real = proven(on_cuda((7, 5)), dict.fromkeys(("fp32", "bf16", "fp16")))
    h200 = {name: fact[0] for name, fact in on_cuda((9, 0)).items()}
    assert supports(pretended(real, h200, "H200")) == supports(real)


def test_pretending_does_not_hide_a_failed_kernel():
    real = proven(on_cuda((9, 0)), {"fp32": None, "tf32": None, "bf16": None, "fp16": "boom"})
    t4 = {name: fact[0] for name, fact in on_cuda((7, 5)).items()}
    assert pretended(real, t4, "T4")["fp16"].kernel == "failed"


# --- the kernels that prove it


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
