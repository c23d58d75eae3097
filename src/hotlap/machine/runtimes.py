"""Hosted runtimes (Kaggle, Colab) and TPUs: recognised by what they leave in the environment."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotlap.machine.limits import ROOT
from hotlap.machine.problems import Problem, Severity

_TPU_VARIABLES: Final = ("TPU_NAME", "COLAB_TPU_ADDR", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where this machine is hosted, with that platform's own rules."""

    name: str
    """`kaggle`, `colab` or `tpu` (a TPU machine of neither)."""
    tpu: bool
    limit_s: int | None
    """The longest session, as published; platforms change it."""
    limit_source: str | None
    choose: str | None
    """Which accelerator to choose there, and why."""


_KAGGLE_CHOICE: Final = (
    "GPU T4 x2: both cards work with today's torch. Kaggle's image has no kernels for the P100 "
    "(Pascal), which is listed and then fails at the first operation. L4 or newer where offered."
)
_COLAB_CHOICE: Final = "T4 without payment; L4 or A100 with compute units: both add bf16 and TF32. Not a TPU."


def read_runtime(
    environ: Mapping[str, str],
    root: Path = ROOT,
    has_module: Callable[[str], bool] | None = None,
) -> Runtime | None:
    """The hosted runtime this is; None on an ordinary machine."""
    present = has_module or _has_module
    tpu = any(name in environ for name in _TPU_VARIABLES) or _has_tpu_device(root, present)
    # Kaggle first: its image is built on Colab's and carries Colab's variables too.
    if "KAGGLE_KERNEL_RUN_TYPE" in environ or (root / "kaggle/working").is_dir():
        return Runtime(
            name="kaggle",
            tpu=tpu,
            limit_s=(9 if tpu else 12) * 3600,
            limit_source="Kaggle's documentation, Notebooks, technical specifications "
            "(12 h with CPU or GPU, 9 h with TPU), as published, may change",
            choose=_KAGGLE_CHOICE,
        )
    if "COLAB_RELEASE_TAG" in environ or "COLAB_GPU" in environ or present("google.colab"):
        return Runtime(
            name="colab",
            tpu=tpu,
            limit_s=12 * 3600,
            limit_source="Colab's FAQ (at most 12 h free of charge, less when idle; up to 24 h with "
            "Pro+), as published, may change",
            choose=_COLAB_CHOICE,
        )
    if tpu:
        return Runtime(name="tpu", tpu=True, limit_s=None, limit_source=None, choose=None)
    return None


def runtime_problems(runtime: Runtime | None, gpu_names: list[str], *, working_gpu: bool) -> list[Problem]:
    """What to know about training in this runtime."""
    if runtime is None:
        return []
    found = []
    if runtime.tpu and not working_gpu:
        found.append(
            Problem(
                key="tpu-only",
                severity=Severity.SLOWS,
                what="this runtime has a TPU and no GPU; hotlap does not use TPUs and trains on the CPU here",
                costs="the TPU stays idle; training runs on the CPU",
                do=f"choose another accelerator: {runtime.choose}"
                if runtime.choose
                else "use a machine with an NVIDIA GPU",
            )
        )
    elif runtime.choose and not gpu_names:
        found.append(
            Problem(
                key="no-accelerator",
                severity=Severity.SLOWS,
                what=f"this {runtime.name.capitalize()} session has no GPU",
                costs="training runs on the CPU",
                do=f"switch the accelerator on in the session's settings: {runtime.choose}",
            )
        )
    elif runtime.name == "kaggle" and any("P100" in name for name in gpu_names):
        found.append(
            Problem(
                key="kaggle-p100",
                severity=Severity.NOTE,
                what="this Kaggle session has a P100",
                costs="no tensor cores, and no kernels in today's default builds of torch",
                do=f"choose {runtime.choose}",
            )
        )
    if runtime.limit_s is not None:
        found.append(
            Problem(
                key="session-limit",
                severity=Severity.NOTE,
                what=f"a session here ends after {runtime.limit_s // 3600} hours ({runtime.limit_source})",
                costs="a longer run is cut off",
                do="give the run a deadline below that (finish_in), or resume what hotlap saves before",
            )
        )
    return found


def _has_tpu_device(root: Path, present: Callable[[str], bool]) -> bool:
    """Older TPUs are /dev/accel*; newer ones /dev/vfio/N, which other devices use as well."""
    dev = root / "dev"
    return any(dev.glob("accel[0-9]*")) or (present("libtpu") and any(dev.glob("vfio/[0-9]*")))


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
