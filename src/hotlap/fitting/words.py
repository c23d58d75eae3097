"""What a training says of itself: its settings before it begins, its figures as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hotlap import __version__
from hotlap.core.job import Job
from hotlap.data.dataset import Course
from hotlap.engine.rig import Rig
from hotlap.fitting.views import View


class Voice:
    """Speaks to the user through a view, and remembers the problems it told of."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.problems: list[str] = []
        """What went wrong without ending the training."""

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self.view.say(line)

    def warn(self, problem: str) -> None:
        """Tell of a problem."""
        self.problems.append(problem)
        self.say(f"warning: {problem}")


def banner(job: Job, rig: Rig, course: Course, total: int, folder: Path) -> list[str]:
    """The settings in force, before the first step."""
    trained = sum(p.numel() for p in rig.model.parameters() if p.requires_grad)
    device = (
        torch.cuda.get_device_name(rig.device)
        if rig.device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    batch = f"batch {course.batch_size}"
    if job.accumulate > 1:
        batch += f" × {job.accumulate} accumulated = {course.batch_size * job.accumulate} per update"
    length = (
        f"{job.epochs} epoch{'s' if job.epochs > 1 else ''} = {total:,} updates"
        if job.epochs is not None
        else f"{total:,} updates"
    )
    return [
        f"hotlap {__version__} on {device}, torch {torch.__version__}",
        f"model  {type(job.model).__name__}, {trained:,} parameters in training",
        f"data   {len(course.source):,} samples, {batch}, {length}",
        *([f"       {course.padding.line}"] if course.padding is not None else []),
        f"plan   {rig.plan}",
        f"run    {folder}",
    ]


def told(record: dict[str, Any], *, by_step: bool = False) -> str:
    """An evaluation in one line: what changes, and nothing that the run folder holds anyway."""
    names = {"train_loss": "train", "valid_loss": "valid"}
    aside = ("step", "epoch", "samples", "elapsed_s", "lr")
    rest = [f"{names.get(name, name)} {value:.4g}" for name, value in record.items() if name not in aside]
    return " · ".join([f"step {record['step']:,}" if by_step else f"epoch {record['epoch']}", *rest])
