"""`hotlap.batch`, `hotlap.workers` and `hotlap.memory`, of a job or of whatever the commands can name."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from hotlap.core.errors import UsageError, shown
from hotlap.core.job import Job
from hotlap.kit.batch import MOST_S, BatchFound, batch_of_job, batch_of_script
from hotlap.kit.memory import MemoryFound, memory_of_job, memory_of_script
from hotlap.kit.naming import Named, named
from hotlap.kit.script_workers import workers_of_script
from hotlap.kit.telling import sayer
from hotlap.kit.workers import WorkersFound, workers_of_job

Training = Job | str | Sequence[str]
"""A job; or what names one, as behind `hotlap batch`: in one string, or its words."""


def batch(training: Training, *, most: int | None = None, seconds: float = MOST_S, progress: bool = True) -> BatchFound:
    """Find which micro-batch of a training fits and which is fastest, by real updates with its longest samples.

    It is a Job, or what names one: "module:job", "text --data FILE", "train.py ARGS", "-m module ARGS". No larger one
    than `most` is tried, and after `seconds` no other. A job is left as it was; its effective batch is shown and never
    changed. A script is run anew for each size. Raises HotlapError where the training will not do.
    """
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise UsageError(f"most={shown(most)} must be a whole number of at least 1, or None")
    _check_seconds(seconds)
    say = sayer(progress)
    chosen = _chosen(training, say)
    if chosen.target is not None:
        return batch_of_script(chosen.target, most=most, seconds=seconds, say=say)
    return batch_of_job(chosen.make_job(), name=chosen.name, most=most, seconds=seconds, say=say)


def workers(training: Training, *, seconds: float = MOST_S, progress: bool = True) -> WorkersFound:
    """Find how the batches of a training should come: by workers, gathered, streamed or held on the device.

    It is a Job, or what names one, as for `batch`. Each way is timed with real updates, start-up apart; the best is
    then compared with the training's own in turns. After about `seconds` no other is tried. A job is left as it was.
    """
    _check_seconds(seconds)
    say = sayer(progress)
    chosen = _chosen(training, say)
    if chosen.target is not None:
        return workers_of_script(chosen.target, seconds=seconds, say=say)
    return workers_of_job(chosen.make_job(), name=chosen.name, seconds=seconds, say=say)


def memory(training: Training, *, seconds: float = MOST_S, progress: bool = True) -> MemoryFound:
    """Find where the memory of a training goes, at its own batch size with its longest samples, after the first update.

    It is a Job, or what names one, as for `batch`. A job is left as it was; a script has to make its first update
    within `seconds`. Raises TrainingError where not even one update fits.
    """
    _check_seconds(seconds)
    say = sayer(progress)
    chosen = _chosen(training, say)
    if chosen.target is not None:
        return memory_of_script(chosen.target, seconds=seconds, say=say)
    return memory_of_job(chosen.make_job(), name=chosen.name, say=say)


def _check_seconds(seconds: float) -> None:
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
        raise UsageError(f"seconds={shown(seconds)} must be a number above 0")


def _chosen(training: Training, say: Callable[[str], None]) -> Named:
    if isinstance(training, Job):
        return Named(name="job", job=lambda: training)
    try:
        words = shlex.split(training) if isinstance(training, str) else training
    except ValueError:
        raise UsageError(
            f"{shown(training)} has a quote that is never closed; close it, or give a list of words"
        ) from None
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{shown(training)} is no training: give a Job, or what names one, as 'train.py --epochs 3'")
    return named(words, say=say)
