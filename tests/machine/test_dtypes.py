"""Number formats by design, by proof and by pretence."""

from __future__ import annotations

import pytest

from hotlap.machine.dtypes import Support, on_cpu, on_cuda, paced, pretended, proven


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
