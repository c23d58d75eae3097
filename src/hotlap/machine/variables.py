"""Environment variables that matter to training: what each costs, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from hotlap.core.errors import MachineError
from hotlap.machine.harms import HARMS
from hotlap.machine.limits import most_workers
from hotlap.machine.problems import Problem, Severity

RECORDED: Final = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_CACHE_DISABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "HOTLAP_PRETEND",
    "HOTLAP_WORKERS",
    "KAGGLE_KERNEL_RUN_TYPE",
    "COLAB_RELEASE_TAG",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_P2P_DISABLE",
    "NUM_WORKERS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONDEVMODE",
    "PYTHONMALLOC",
    "PYTHONTRACEMALLOC",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TOKENIZERS_PARALLELISM",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "TORCH_CUDA_SANITIZER",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_USE_CUDA_DSA",
)
"""The only variables hotlap ever writes down: none of them can hold a secret."""


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter and are set, cut to a length no setting needs."""
    return {name: environ[name][:200] for name in RECORDED if name in environ}


def workers_wanted(environ: Mapping[str, str] | None = None, cores: int | None = None) -> int | None:
    """How many loader workers the environment asks for: HOTLAP_WORKERS, else NUM_WORKERS, else None.

    Raises MachineError where the value is not a whole number from 0 up, or far more than there are cores.
    """
    seen = os.environ if environ is None else environ
    for name in ("HOTLAP_WORKERS", "NUM_WORKERS"):
        value = seen.get(name, "").strip()
        if not value:
            continue
        if not re.fullmatch(r"[0-9]{1,6}", value):
            raise MachineError(f"{name}={value[:40]!r} is not a number of workers; set it to 0 or more, or unset it")
        count, most = int(value), most_workers(cores)
        if count > most:
            raise MachineError(f"{name}={count} is too many workers for this process; set it to {most} or less")
        return count
    return None


def variable_problems(environ: Mapping[str, str], cores: int) -> list[Problem]:
    """Every variable that is set in a way that harms, given the cores this process may use."""
    found = [
        Problem(
            key=harm.name.lower().replace("_", "-"),
            severity=harm.severity,
            what=f"{harm.name}={environ[harm.name][:60]}",
            costs=harm.costs,
            do=harm.do,
        )
        for harm in HARMS
        if harm.name in environ and harm.when(environ[harm.name])
    ]
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        found += _threads(name, environ.get(name), cores)
    return found + _workers(environ, cores) + _allocator(environ)


def _threads(name: str, value: str | None, cores: int) -> list[Problem]:
    key = name.lower().replace("_", "-")
    if value is None or not value.strip():
        return []
    # OpenMP allows a list, one number per level of nesting; the first is the one that counts.
    count = re.match(r"\s*([0-9]{1,6})\b", value)
    if count is None or int(count[1]) == 0:
        costs, severity = "it is not a number of threads and is ignored", Severity.NOTE
    elif int(count[1]) > cores:
        costs = f"more threads than the {cores} cores allowed here: they push each other aside"
        severity = Severity.SLOWS
    elif int(count[1]) == 1 and cores > 1:
        costs = f"maths on the CPU uses one of {cores} cores (torchrun sets this by itself)"
        severity = Severity.NOTE
    else:
        return []
    return [
        Problem(
            key=key,
            severity=severity,
            what=f"{name}={value.strip()[:60]}",
            costs=costs,
            do=f"unset it, or set it to {cores} or less",
        )
    ]


def _workers(environ: Mapping[str, str], cores: int) -> list[Problem]:
    try:
        wanted = workers_wanted(environ, cores)
    except MachineError as error:
        return [
            Problem(
                key="workers",
                severity=Severity.STOPS,
                what=str(error).partition(";")[0],
                costs="a run would stop at once, since that is no number of workers that can be started",
                do=f"set it to a number from 0 to {max(1, cores - 1)}, or unset it",
            )
        ]
    if wanted is None or wanted <= cores:
        return []
    name = "HOTLAP_WORKERS" if environ.get("HOTLAP_WORKERS", "").strip() else "NUM_WORKERS"
    return [
        Problem(
            key="workers",
            severity=Severity.SLOWS,
            what=f"{name}={wanted}, with {cores} core{'s' if cores > 1 else ''} allowed here",
            costs="workers push each other and the training process aside, and each holds memory",
            do=f"set it to {max(1, cores - 1)} or less, or unset it: hotlap measures how many pay",
        )
    ]


def _allocator(environ: Mapping[str, str]) -> list[Problem]:
    names = [name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in environ]
    found = []
    if len(names) == 2 and environ[names[0]] != environ[names[1]]:
        found.append(
            Problem(
                key="pytorch-alloc-conf",
                severity=Severity.NOTE,
                what=f"{names[0]} and {names[1]} disagree",
                costs="which of them counts depends on the version of torch",
                do="set one of them (PYTORCH_CUDA_ALLOC_CONF is known to every version)",
            )
        )
    for name in names:
        split = re.search(r"max_split_size_mb:(\d+)", environ[name])
        if split and int(split[1]) < 32:
            harm = "blocks above that size are never split: memory is reserved and not used"
        elif "backend:cudaMallocAsync" in environ[name]:
            harm = "torch's own allocator is off: memory cannot be profiled, and some captures fail"
        else:
            continue
        found.append(
            Problem(
                key=name.lower().replace("_", "-"),
                severity=Severity.NOTE,
                what=f"{name}={environ[name][:60]}",
                costs=harm,
                do="unset it; against fragmentation use expandable_segments:True",
            )
        )
    return found
