"""Versions of what matters to a run, and what a run writes down about where it ran."""

from __future__ import annotations

import importlib.metadata
import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import __version__
from hotlap.core.errors import TESTED_TORCH
from hotlap.machine.detect import Machine, World, detect
from hotlap.machine.problems import Problem, Severity
from hotlap.machine.variables import recorded


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """What torch.compile needs."""

    triton: str | None
    compiler: str | None
    """A C compiler on the path (or CC)."""
    headers: bool
    """Python.h, which Triton and C++ kernels are compiled against."""


def environment() -> dict[str, Any]:
    """JSON-able facts for a run's record: versions, hardware, and an allow-list of variables.

    No host name, no user name, no path, and no variable outside the list.
    """
    machine, world = detect(), World()
    return {
        "versions": versions(machine),
        "gpus": [
            {
                "name": gpu.name,
                "compute_capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
                "memory_bytes": gpu.memory_bytes,
            }
            for gpu in machine.gpus
        ],
        "pretend": machine.pretended.key if machine.pretended else None,
        "cpu": {
            "model": machine.cpu.model,
            "cores": machine.cpu.cores,
            "host_cores": machine.cpu.host_cores,
        },
        "memory_bytes": machine.memory.allowed_bytes,
        "runtime": machine.runtime.name if machine.runtime else None,
        "variables": recorded(world.environ),
    }


def versions(machine: Machine) -> dict[str, str | None]:
    """Versions by name; None where a thing is not here."""
    return {
        "hotlap": __version__,
        "python": platform.python_version(),
        "torch": machine.torch,
        "cuda": machine.cuda,
        "cudnn": machine.cudnn,
        "driver": machine.driver,
        "driver_cuda": machine.driver_cuda,
        "triton": _installed("triton"),
        "numpy": _installed("numpy"),
        "os": f"{platform.system()}-{platform.release()}",  # `platform.platform` starts a process
        "machine": platform.machine(),
    }


def read_toolchain(world: World) -> Toolchain:
    """Triton, a compiler and Python's headers."""
    named = world.environ.get("CC", "").strip()
    compilers = [named] if named else ["cc", "gcc", "clang", "cl"]
    found = next((name for name in compilers if world.which(name)), None)
    return Toolchain(
        triton=_installed("triton"),
        compiler=Path(found).name if found else None,
        headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
    )


def version_problems(machine: Machine, tools: Toolchain) -> list[Problem]:
    """An untested torch, and what torch.compile lacks."""
    found = []
    if machine.torch is not None and (problem := _untested(machine.torch)):
        found.append(problem)
    lacks = []
    if machine.gpus and tools.triton is None:
        lacks.append(("Triton", "pip install triton"))
    if tools.compiler is None:
        lacks.append(("a C compiler", "install gcc (apt install build-essential)"))
    if not tools.headers:
        lacks.append(("Python's headers", "install them (apt install python3-dev)"))
    if lacks:
        found.append(
            Problem(
                key="compiler",
                severity=Severity.SLOWS if machine.gpus else Severity.NOTE,
                what=f"not found: {', '.join(name for name, _ in lacks)}",
                costs="torch.compile cannot build kernels, so it will not be tried",
                do="; ".join(cure for _, cure in lacks),
            )
        )
    return found


def private_problems(missing: Mapping[str, str]) -> list[Problem]:
    """Private names of torch that are missing, given with what needs each of them."""
    if not missing:
        return []
    return [
        Problem(
            key="torch-private",
            severity=Severity.SLOWS,
            what=f"torch lacks private names that hotlap uses: {', '.join(missing)}",
            costs=f"plans that need them fail: {', '.join(sorted(set(missing.values())))}",
            do=f"pip install 'torch=={TESTED_TORCH[-1]}.*', or train with --plan off",
        )
    ]


def _untested(torch: str) -> Problem | None:
    series = tuple(int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdecimal())
    tested = [tuple(int(part) for part in version.split(".")) for version in TESTED_TORCH]
    if series in tested:
        return None
    old = series < min(tested)
    return Problem(
        key="torch-untested",
        severity=Severity.SLOWS if old else Severity.NOTE,
        what=f"torch {torch} is not among the versions hotlap is tested with ({', '.join(TESTED_TORCH)})",
        costs="what is missing in it is left untried" if old else "nothing known",
        do=f"torch {TESTED_TORCH[0]} or later, when it suits you; hotlap never replaces the one installed",
    )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
