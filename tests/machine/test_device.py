"""Which device is chosen, and the line that says why not."""

from __future__ import annotations

import pytest
import torch

from hotlap.core.errors import MachineError
from hotlap.machine import choose_device, detect, dtype_fact, dtype_facts
from hotlap.machine.cuda import Cuda, Driver
from hotlap.machine.detect import assemble
from hotlap.machine.device import facts_on, pick

NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def machine(world):
    def make(*gpus, model=None, **parts):
        made = world(*gpus, **parts)
        return assemble(made, made.driver(), made.cuda(), model)

    return make


def ran(device, dtype):
    return None


def only(*working):
    return lambda device, dtype: None if device in working else NO_KERNEL


def message(machine, asked="auto", *, require_gpu=False, kernel=ran):
    with pytest.raises(MachineError) as caught:
        pick(machine, asked, require_gpu=require_gpu, kernel=kernel)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_auto_takes_the_first_gpu_whose_kernel_ran(machine, card):
    two = machine(card("p100", 0), card("t4", 1))
    assert pick(two, "auto", require_gpu=False, kernel=ran) == "cuda:0"
    assert pick(two, "auto", require_gpu=True, kernel=only("cuda:1")) == "cuda:1"
    assert pick(two, "cuda", require_gpu=False, kernel=only("cuda:1")) == "cuda:1"


def test_auto_falls_back_to_the_cpu_where_no_gpu_works(machine, card):
    assert pick(machine(card("p100")), "auto", require_gpu=False, kernel=only()) == "cpu"
    assert pick(machine(), "auto", require_gpu=False, kernel=ran) == "cpu"


def test_the_cpu_is_taken_when_asked_for(machine, card):
    assert pick(machine(card("t4")), "cpu", require_gpu=False, kernel=ran) == "cpu"


@pytest.mark.parametrize("asked", ["cuda", "cuda:0"])
def test_a_gpu_without_kernels_is_refused_naming_card_build_and_cure(machine, card, asked):
    line = message(machine(card("p100")), asked, kernel=only())
    assert "Tesla P100-PCIE-16GB (sm_60)" in line
    assert "sm_75 sm_80" in line
    assert "another GPU" in line


def test_a_required_gpu_that_does_not_work_is_an_error_under_auto_too(machine, card):
    assert "a GPU is required" in message(machine(card("p100")), require_gpu=True, kernel=only())


def test_a_gpu_number_that_is_not_there_is_refused_with_those_that_are(machine, card):
    assert "cuda:0, cuda:1" in message(machine(card("t4", 0), card("t4", 1)), "cuda:2")


@pytest.mark.parametrize("asked", ["gpu", "cuda:", "cuda:x", "", "mps", "cuda:1:2"])
def test_an_unknown_device_is_refused(machine, asked):
    assert "auto, cpu, cuda or cuda:N" in message(machine(), asked)


def test_requiring_a_gpu_and_asking_for_the_cpu_is_a_contradiction(machine):
    assert "drop one" in message(machine(), "cpu", require_gpu=True)


def test_a_cpu_build_beside_a_gpu_is_named(machine, listed):
    here = machine(driver=Driver(gpus=(listed("t4"),)), cuda=Cuda(torch="2.13.0+cpu"))
    line = message(here, require_gpu=True)
    assert "torch 2.13.0+cpu is a CPU build and cannot use the Tesla T4" in line
    assert "install a CUDA build" in line


@pytest.mark.parametrize("value", ["", "-1", "7", "none"])
def test_a_gpu_hidden_by_the_variable_is_named_with_the_variable(machine, listed, value):
    here = machine(driver=Driver(gpus=(listed("t4"),)), environ={"CUDA_VISIBLE_DEVICES": value})
    assert f"CUDA_VISIBLE_DEVICES={value!r} hides the Tesla T4" in message(here, "cuda")


def test_the_variable_is_not_blamed_where_it_names_a_gpu_that_torch_cannot_use(machine, listed):
    driver = Driver(version="470.1", cuda="11.4", gpus=(listed("t4"),))
    cuda = Cuda(torch="2.13.0+cu130", build="13.0", error="The NVIDIA driver on your system is too old")
    line = message(machine(driver=driver, cuda=cuda, environ={"CUDA_VISIBLE_DEVICES": "0"}), "cuda")
    assert "too old" in line
    assert "driver 470.1 runs CUDA up to 11.4" in line


def test_a_broken_driver_is_not_called_a_missing_gpu(machine):
    cuda = Cuda(torch="2.13.0+cu130", build="13.0", error="CUDA driver initialization failed")
    assert "initialization failed" in message(machine(driver=Driver(error="no NVML"), cuda=cuda), "cuda")


def test_no_gpu_at_all_is_said_plainly(machine):
    cuda = Cuda(torch="2.13.0+cu130", build="13.0", error="Found no NVIDIA driver on your system.")
    assert "there is no NVIDIA GPU here" in message(machine(cuda=cuda), require_gpu=True)


def test_torch_that_does_not_import_is_said_plainly(machine):
    here = machine(cuda=Cuda(error="No module named 'torch'"))
    assert "torch cannot be imported: No module named 'torch'" in message(here)


def test_a_full_gpu_is_told_from_a_broken_one(machine, card):
    line = message(machine(card("t4")), "cuda", kernel=lambda d, t: "CUDA error: out of memory")
    assert "memory of the Tesla T4 is full" in line


def test_a_format_whose_kernel_fails_is_absent(machine, card):
    facts = facts_on(machine(card("h200")), "cuda:0", lambda d, t: "boom" if t == "bf16" else None)
    assert (facts["bf16"].support, facts["bf16"].reason) == ("absent", "boom")
    assert facts["tf32"].support == "hardware"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_of_one_format_no_other_has_to_be_proven(machine, card, device):
    here, asked = machine(card("h200")), []
    facts = facts_on(here, device, lambda d, t: asked.append((d, t)), ("fp16",))
    assert asked == [(device, "fp16")]
    assert facts["fp16"] == facts_on(here, device, ran)["fp16"]
    assert dtype_fact("cpu", "bf16") == dtype_facts("cpu")["bf16"]


def test_formats_are_told_for_cpu_and_cuda_only(machine, card):
    here = machine(card("h200"))
    assert facts_on(here, "cpu:0", ran) == facts_on(here, "cpu", ran)
    assert facts_on(here, "cuda", ran) == facts_on(here, "cuda:0", ran)
    for device in ("meta", "mps", "cuda:1"):
        with pytest.raises(MachineError):
            facts_on(here, device, ran)


@no_gpu_here
def test_on_this_machine_auto_is_the_cpu_and_a_required_gpu_is_refused():
    assert choose_device() == torch.device("cpu")
    with pytest.raises(MachineError, match="a GPU is required"):
        choose_device(require_gpu=True)
    with pytest.raises(MachineError, match="a GPU is required"):
        choose_device(require_gpu=True, pretend="t4")


@no_gpu_here
def test_pretending_without_a_gpu_stays_on_the_cpu_and_answers_formats_as_that_gpu():
    assert choose_device(pretend="t4") == torch.device("cpu")
    facts = dtype_facts(torch.device("cpu"), pretend="t4")
    assert {name: fact.support for name, fact in facts.items()} == {
        "fp32": "hardware",
        "tf32": "absent",
        "bf16": "emulated",
        "fp16": "hardware",
    }


def test_the_variable_pretends_and_the_argument_wins(monkeypatch):
    monkeypatch.setenv("HOTLAP_PRETEND", "V100")
    assert detect().pretended.key == "v100"
    assert detect("t4").pretended.key == "t4"
    monkeypatch.setenv("HOTLAP_PRETEND", " ")
    assert detect().pretended is None
    monkeypatch.setenv("HOTLAP_PRETEND", "a100")
    with pytest.raises(MachineError, match=r"HOTLAP_PRETEND.*a100-40 or a100-80"):
        detect()


def test_the_cpus_formats_are_proven_by_kernels(monkeypatch):
    monkeypatch.delenv("HOTLAP_PRETEND", raising=False)
    facts = dtype_facts("cpu")
    assert {name: fact.kernel for name, fact in facts.items()} == {
        "fp32": "ran",
        "tf32": "not run",
        "bf16": "ran",
        "fp16": "ran",
    }


def test_memory_under_a_pretended_gpu_is_the_lesser_of_the_two(machine, card):
    from hotlap.machine import find_gpu

    big = machine(card("h200"), model=find_gpu("t4")).gpus[0]
    assert big.usable_bytes == find_gpu("t4").usable_bytes < big.memory_bytes
    small = machine(card("t4"), model=find_gpu("h200")).gpus[0]
    assert small.usable_bytes == small.memory_bytes


def test_choosing_a_gpu_under_a_pretended_one_caps_its_memory_once(machine, card, monkeypatch):
    from hotlap.machine import device, find_gpu

    caps = []
    acting = machine(card("h200"), model=find_gpu("t4"))
    monkeypatch.setattr(device, "detect", lambda pretend: acting)
    monkeypatch.setattr(device, "proof", ran)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, i: caps.append((part, i)))
    device._cap_memory.cache_clear()
    try:
        assert device.choose_device(pretend="t4") == torch.device("cuda:0")
        assert device.choose_device(pretend="t4") == torch.device("cuda:0")
    finally:
        device._cap_memory.cache_clear()
    assert caps == [(pytest.approx(14930 / 143156), 0)]
