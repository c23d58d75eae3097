"""The catalogue of GPUs."""

from __future__ import annotations

import pytest

from hotlap.core.errors import MachineError
from hotlap.machine import CATALOGUE, Support, find_gpu
from hotlap.machine.catalogue import recognise

MIB = 1024**2


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("T4", "t4"),
        ("Tesla T4", "t4"),
        ("rtx4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX-4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("a100-80", "a100-80"),
        ("A100 80GB", "a100-80"),
        ("A100-SXM4-40GB", "a100-40"),
        ("v100-sxm2-16gb", "v100"),
        ("a10", "a10"),
        ("H100", "h100"),
    ],
)
def test_a_gpu_is_found_however_it_is_spelled(asked, key):
    assert find_gpu(asked).key == key


def test_an_ambiguous_name_is_refused_naming_both():
    with pytest.raises(MachineError, match="a100-40 or a100-80"):
        find_gpu("a100")


@pytest.mark.parametrize("asked", ["", "x", "rtx5090", "v100 32gb"])
def test_an_unknown_name_is_refused_in_one_line(asked):
    with pytest.raises(MachineError, match="unknown GPU") as caught:
        find_gpu(asked)
    assert "\n" not in str(caught.value)


def test_a_near_miss_is_answered_with_the_name_meant():
    with pytest.raises(MachineError, match="did you mean 'rtx4090'"):
        find_gpu("rtx409")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("p100", {"fp32": "hardware", "tf32": "absent", "bf16": "absent", "fp16": "hardware"}),
        ("v100", {"fp32": "hardware", "tf32": "absent", "bf16": "emulated", "fp16": "hardware"}),
        ("t4", {"fp32": "hardware", "tf32": "absent", "bf16": "emulated", "fp16": "hardware"}),
        ("a10", dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), "hardware")),
        ("h200", dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), "hardware")),
    ],
)
def test_each_gpu_has_the_formats_its_architecture_has(key, expected):
    assert find_gpu(key).supports == expected


def test_all_the_gpus_promised_are_listed_once():
    keys = [model.key for model in CATALOGUE]
    assert sorted(keys) == sorted(
        ["p100", "v100", "t4", "a10", "l4", "rtx3080", "rtx3090", "rtx4090", "a100-40", "a100-80", "h100", "h200"]
    )


@pytest.mark.parametrize("model", CATALOGUE, ids=lambda model: model.key)
def test_figures_of_every_gpu_hang_together(model):
    assert 0.85 < model.usable_bytes / model.memory_bytes <= 1
    assert 200e9 < model.bandwidth_bytes_per_s < 5e12
    assert model.source
    for dtype, support in model.supports.items():
        assert (model.flops(dtype) is None) == (support is not Support.HARDWARE)
    # What training gets: dense, and fp32 accumulation; twice that would be a sparse figure.
    ratio = model.fp16_flops / model.fp32_flops
    geforce = model.key.startswith("rtx")
    assert ratio == pytest.approx(2, rel=0.01) if geforce or model.key == "p100" else 3 < ratio <= 16.1


def test_the_p100_says_that_it_has_no_tensor_cores():
    assert not find_gpu("p100").tensor_cores
    assert "no tensor cores" in find_gpu("p100").source


@pytest.mark.parametrize(
    ("name", "mib", "key"),
    [
        ("Tesla T4", 15109, "t4"),
        ("NVIDIA A100-SXM4-80GB", 81251, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 40536, "a100-40"),
        ("NVIDIA H100 80GB HBM3", 81082, "h100"),
        ("NVIDIA H200", 143156, "h200"),
        ("NVIDIA GeForce RTX 3090", 24259, "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 24259, None),
        ("NVIDIA GeForce RTX 3080", 12044, None),
        ("Tesla V100-SXM2-32GB", 32510, None),
        ("NVIDIA H100 PCIe", 81070, None),
        ("NVIDIA A10G", 22589, None),
    ],
)
def test_a_card_is_recognised_by_name_and_memory_and_its_sisters_are_not(name, mib, key):
    found = recognise(name, mib * MIB)
    assert (found.key if found else None) == key
