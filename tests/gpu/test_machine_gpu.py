"""The doctor and the device on a real CUDA GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hotlap

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "HOTLAP_PRETEND"}
    environ["PYTHONPATH"] = str(Path(hotlap.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code], env={**environ, **variables}, capture_output=True, text=True, check=False
    )


def doctor(*arguments: str, **variables: str):
    command = f"import sys; sys.argv = ['hotlap', 'doctor', '--json', *{arguments!r}]; import hotlap.cli as c; c.main()"
    result = python(command, **variables)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def test_the_doctor_says_fit_and_ran_a_kernel_for_each_format(tmp_path):
    code, report = doctor("--require-gpu")
    assert code == 0
    assert (report["fit"], report["device"]) == (True, "cuda:0")
    gpu = report["gpus"][0]
    capability = torch.cuda.get_device_capability(0)
    assert gpu["compute_capability"] == f"{capability[0]}.{capability[1]}"
    assert gpu["memory_bytes"] == torch.cuda.get_device_properties(0).total_memory
    assert 0 < gpu["free_bytes"] <= 1.05 * gpu["memory_bytes"]
    for name, fact in gpu["dtypes"].items():
        assert fact["kernel"] == "ran" or fact["support"] == "absent", (name, fact)
    if capability >= (8, 0):
        assert {fact["support"] for fact in gpu["dtypes"].values()} == {"hardware"}
    assert report["versions"]["cuda"] == torch.version.cuda
    assert report["versions"]["driver"]
    assert f"sm_{capability[0]}{capability[1]}" in report["architectures"]


def test_the_doctors_own_process_is_not_another_process():
    _, report = doctor()
    listed = report["gpus"][0]["processes"]
    assert listed is not None
    # This test's process may itself hold a context; the doctor's must never be counted.
    assert len(listed) <= 1


def test_pretending_a_t4_leaves_the_t4s_formats():
    code, report = doctor("--pretend", "t4")
    assert code == 0
    assert {name: fact["support"] for name, fact in report["dtypes"].items()} == {
        "fp32": "hardware",
        "tf32": "absent",
        "bf16": "emulated",
        "fp16": "hardware",
    }


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_pretending_a_t4_caps_memory_for_real(how):
    if torch.cuda.get_device_properties(0).total_memory < 20 * 1024**3:
        pytest.skip("needs a GPU with more than 20 GiB")
    code = f"""
import torch
from hotlap.machine import choose_device
device = choose_device({"pretend='t4'" if how == "argument" else ""})
assert device == torch.device("cuda:0"), device
torch.empty(12 * 1024**3, dtype=torch.uint8, device=device)
torch.cuda.empty_cache()
try:
    torch.empty(17 * 1024**3, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError:
    print("capped")
"""
    result = python(code, **({} if how == "argument" else {"HOTLAP_PRETEND": "t4"}))
    assert result.stdout.strip() == "capped", result.stderr


def test_without_pretending_memory_is_not_capped():
    if torch.cuda.mem_get_info(0)[0] < 20 * 1024**3:
        pytest.skip("needs 20 GiB of free GPU memory")
    code = """
import torch
from hotlap.machine import choose_device
torch.empty(17 * 1024**3, dtype=torch.uint8, device=choose_device())
print("fits")
"""
    assert python(code).stdout.strip() == "fits"


def test_an_empty_cuda_visible_devices_leaves_the_cpu_and_is_told():
    code, report = doctor(CUDA_VISIBLE_DEVICES="")
    assert code == 0
    assert report["device"] == "cpu"
    assert report["hidden_gpus"]
    (problem,) = [p for p in report["problems"] if p["key"] == "gpu-hidden"]
    assert "CUDA_VISIBLE_DEVICES=''" in problem["what"]
    code, report = doctor("--require-gpu", CUDA_VISIBLE_DEVICES="")
    assert code == 1
    assert not report["fit"]


def test_the_device_is_the_gpu_and_its_formats_are_proven():
    from hotlap.machine import choose_device, detect, dtype_facts, environment

    device = choose_device(require_gpu=True)
    assert device == torch.device("cuda:0")
    facts = dtype_facts(device)
    assert facts["fp32"].kernel == "ran"
    assert detect().gpus[0].name == torch.cuda.get_device_name(0)
    assert environment()["gpus"][0]["name"] == torch.cuda.get_device_name(0)


def test_tf32_really_is_on_while_it_is_probed_and_put_back_afterwards():
    from hotlap.machine.dtypes import run_kernel
    from hotlap.machine.tf32 import Tf32

    if torch.cuda.get_device_capability(0) < (8, 0):
        pytest.skip("TF32 begins with compute capability 8.0")
    before = torch.backends.cuda.matmul.allow_tf32
    left = torch.randn(1024, 1024, dtype=torch.float64)
    truth = left @ left
    on_gpu = left.to("cuda:0", torch.float32)

    def error():
        return float(((on_gpu @ on_gpu).to("cpu", torch.float64) - truth).norm() / truth.norm())

    with Tf32(True):
        coarse = error()
    with Tf32(False):
        fine = error()
    assert fine < 1e-5 < coarse < 3e-3
    assert run_kernel("cuda:0", "tf32") is None
    assert torch.backends.cuda.matmul.allow_tf32 is before
