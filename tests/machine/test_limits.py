"""Cores and memory as the cgroups grant them, on fake trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hotlap.machine.limits import read_cpu, read_memory

GIB = 1024**3


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_v2_quota_of_one_and_a_half_cores_is_two_cores(tmp_path):
    root = plant(tmp_path, {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "150000 100000\n"})
    cpu = read_cpu(root, affinity=16)
    assert (cpu.cores, cpu.quota) == (2, 1.5)


def test_a_v1_quota_counts(tmp_path):
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n1:memory:/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        },
    )
    assert read_cpu(root, affinity=16).cores == 3


def test_a_v1_quota_of_minus_one_is_no_quota(tmp_path):
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    cpu = read_cpu(root, affinity=5)
    assert (cpu.cores, cpu.quota) == (5, None)


@pytest.mark.parametrize(("outer", "inner"), [("200000 100000", "800000 100000"), ("max 100000", "200000 100000")])
def test_of_nested_cgroups_the_tightest_counts(tmp_path, outer, inner):
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/box\n",
            "sys/fs/cgroup/slice/cpu.max": outer,
            "sys/fs/cgroup/slice/box/cpu.max": inner,
        },
    )
    assert read_cpu(root, affinity=16).cores == 2


def test_in_a_container_the_mounted_root_is_read_though_the_path_is_the_hosts(tmp_path):
    root = plant(
        tmp_path,
        {"proc/self/cgroup": "0::/../../kubepods/pod7/abc\n", "sys/fs/cgroup/cpu.max": "400000 100000"},
    )
    assert read_cpu(root, affinity=64).cores == 4


def test_affinity_below_the_quota_counts(tmp_path):
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000"})
    assert read_cpu(root, affinity=2).cores == 2


def test_a_cpuset_counts(tmp_path):
    root = plant(tmp_path, {"proc/self/cgroup": "0::/b\n", "sys/fs/cgroup/b/cpuset.cpus.effective": "0-2,8\n"})
    assert read_cpu(root, affinity=16).cores == 4


@pytest.mark.parametrize("text", ["", "max", "garbage here", "-5 100000", "100000 0", "9" * 40 + " 100000", "\0\xff"])
def test_garbage_in_cpu_max_is_no_limit(tmp_path, text):
    root = plant(tmp_path, {"proc/self/cgroup": "nonsense\n0::/\n", "sys/fs/cgroup/cpu.max": text})
    assert read_cpu(root, affinity=7).cores == 7


def test_a_quota_below_one_core_is_one_core(tmp_path):
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000"})
    assert read_cpu(root, affinity=8).cores == 1


def test_without_any_file_the_affinity_and_the_systems_memory_answer(tmp_path):
    assert read_cpu(tmp_path, affinity=3).cores == 3
    assert read_memory(tmp_path).allowed_bytes > 0


def test_the_real_affinity_is_asked_by_default():
    expected = len(os.sched_getaffinity(0))
    assert read_cpu().cores <= expected


def test_the_cpus_name_and_instructions_are_read(tmp_path):
    root = plant(tmp_path, {"proc/cpuinfo": "model name\t: Fast  Chip 9\nflags\t\t: fpu avx512_bf16\n\nflags : fpu\n"})
    cpu = read_cpu(root, affinity=1)
    assert cpu.model == "Fast Chip 9"
    assert "avx512_bf16" in cpu.flags


def test_v2_memory_is_the_tightest_of_nested_limits_and_free_without_dropped_caches(tmp_path):
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/box\n",
            "sys/fs/cgroup/slice/memory.max": str(8 * GIB),
            "sys/fs/cgroup/slice/memory.current": str(6 * GIB),
            "sys/fs/cgroup/slice/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/slice/box/memory.max": "max",
        },
    )
    memory = read_memory(root)
    assert (memory.allowed_bytes, memory.free_bytes, memory.host_bytes) == (8 * GIB, 3 * GIB, 64 * GIB)


def test_v1_memory_counts_and_its_huge_number_means_no_limit(tmp_path):
    limited = {"sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(4 * GIB)}
    unlimited = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    root = plant(tmp_path, {"proc/self/cgroup": "5:memory:/box\n", **limited, **unlimited})
    assert read_memory(root).allowed_bytes == 4 * GIB
    (root / "sys/fs/cgroup/memory/box/memory.limit_in_bytes").unlink()
    assert read_memory(root).allowed_bytes == 64 * GIB
