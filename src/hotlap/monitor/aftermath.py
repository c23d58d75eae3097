"""What is wrong with a run by its files, or with a process by what shows from outside."""

from __future__ import annotations

from pathlib import Path

from hotlap.core.errors import UsageError
from hotlap.monitor.findings import Findings


def diagnose_run(folder: Path) -> Findings:
    """What went wrong in the run of this folder. Raises UsageError if it is no run."""
    raise UsageError(f"hotlap cannot diagnose the folder {folder} yet; name its training, as train.py ARGS")


def diagnose_process(pid: int) -> Findings:
    """What is wrong with a running process, as far as it shows from outside. Raises UsageError if there is none."""
    raise UsageError(f"hotlap cannot diagnose the process {pid} yet; name its training, as train.py ARGS")
