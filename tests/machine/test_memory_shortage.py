"""What an out of memory says of itself, and which other processes hold the GPU's memory."""

import os

import pytest
import torch
from fake_nvml import FakeNvml

from hotlap.core.errors import first_line
from hotlap.machine.cuda import GpuProcess, read_driver
from hotlap.machine.memory_shortage import Shortage, held_bytes, others_among, shortage

CPU = torch.device("cpu")
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56 GiB of which 1.21 GiB is "
    "free. Including non-PyTorch memory, this process has 13.35 GiB memory in use. Of the allocated memory 9.70 GiB is "
    "allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. If reserved but unallocated memory is …"
)


@pytest.mark.parametrize(("unused", "is_so"), [("3.50 GiB", True), ("800.00 MiB", False), ("0 bytes", False)])
def test_memory_is_fragmented_if_what_torch_holds_unused_would_be_enough(unused, is_so):
    found = shortage(torch.OutOfMemoryError(FULL.format(unused=unused)), CPU)
    assert found.asked_bytes == 2 * 2**30
    assert found.is_fragmented is is_so


def test_the_note_of_fragmentation_names_the_setting_unless_it_is_on(monkeypatch):
    found = Shortage(asked_bytes=2**31, unused_bytes=7 * 2**29)
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert found.notes == [f"torch holds 3.5 GiB in pieces too small for 2.0 GiB, which {setting} avoids"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert found.notes == ["torch holds 3.5 GiB in pieces too small for 2.0 GiB"]


def test_the_figures_of_a_full_host_are_read_too():
    text = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 20480000 bytes. Error code 12 (Cannot allocate memory)"
    )
    assert shortage(RuntimeError(text), CPU) == Shortage(asked_bytes=20_480_000)
    assert first_line(RuntimeError(text)).startswith("DefaultCPUAllocator: can't allocate memory")


def test_other_processes_are_named_with_pid_and_bytes_the_largest_first():
    gpu = read_driver(lambda: FakeNvml(running={os.getpid(): 4 * 2**30, os.getppid(): 2**30, 2**22 + 1: 3 * 2**30}))
    (listed,) = [one.processes for one in gpu.gpus]
    others = others_among(listed, os.getpid())
    assert [(one.pid, one.bytes) for one in others] == [(2**22 + 1, 3 * 2**30), (os.getppid(), 2**30)]
    name = others[1].name
    assert name
    assert Shortage(others=others).notes == [
        f"other processes hold memory of this GPU: a process of another user or container (pid {2**22 + 1}) 3.0 GiB, "
        f"{name} (pid {os.getppid()}) 1.0 GiB"
    ]


def test_no_process_is_named_where_the_driver_does_not_list_this_one():
    assert others_among((GpuProcess(pid=1, bytes=5, name=None), GpuProcess(pid=2, bytes=5, name=None)), 3) == ()


def test_what_the_process_holds_grows_and_falls_with_its_tensors():
    before = held_bytes(CPU)
    large = torch.ones(2**26)
    assert held_bytes(CPU) - before >= 2**28
    del large
    assert held_bytes(CPU) - before < 2**27
