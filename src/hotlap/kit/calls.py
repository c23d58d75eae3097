"""`hotlap.batch`, `workers`, `memory`, `gpus` and `diagnose`, for a Job or a training that a command line names."""

from __future__ import annotations

import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from hotlap.core.errors import HotlapError, UsageError, did_you_mean, shown
from hotlap.core.job import Job
from hotlap.core.terminal import Say, say, silent
from hotlap.kit import diagnose as diagnoses
from hotlap.kit.batch import MOST_S, BatchFound, batch_of_job, batch_of_script
from hotlap.kit.gpus import GpusFound, gpus_of_job, gpus_of_script
from hotlap.kit.memory import MemoryFound, memory_of_job, memory_of_script
from hotlap.kit.workers import WorkersFound, workers_of_job, workers_of_script
from hotlap.machine.limits import warn_if_busy
from hotlap.monitor.aftermath import diagnose_named
from hotlap.monitor.findings import Findings
from hotlap.trees.job import TreeJob

if TYPE_CHECKING:
    from hotlap.script.running import Target


COMMANDS_OWN = frozenset({"seconds", "most", "json", "quiet", "picture", "job"})
"""Options of `hotlap batch`, `workers`, `memory`, `gpus` and `diagnose`, which stand before the training."""

Training = Job | str | Sequence[str]
"""A job, or the words behind `hotlap batch`, in one string or a list."""


def batch(training: Training, *, most: int | None = None, seconds: float = MOST_S, progress: bool = True) -> BatchFound:
    """Find which micro-batch of a training fits and which is fastest, by real updates with its longest samples.

    Takes a Job, or its name: "module:job", "text --data FILE", "train.py ARGS", "-m module ARGS". hotlap tries no batch
    above `most`, and starts no new try after `seconds`. A job is as before afterwards; a script runs anew each time.
    The effective batch never changes. Raises HotlapError if hotlap cannot run the training.
    """
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise UsageError(f"most={shown(most)} must be a whole number of at least 1, or None")
    chosen, show_progress = _begun(training, seconds, progress)
    if chosen.target is not None:
        return batch_of_script(chosen.target, most=most, seconds=seconds, say=show_progress)
    return batch_of_job(chosen.make_job(), name=chosen.name, most=most, seconds=seconds, say=show_progress)


def workers(training: Training, *, seconds: float = MOST_S, progress: bool = True) -> WorkersFound:
    """Find how the batches of a training should come: by workers, gathered, streamed or held on the device.

    Takes a training as `batch` does. hotlap times each setting with real updates, start-up apart, and then compares the
    best with the training's own in turns. It starts no new try after `seconds`. A job is as before afterwards.
    """
    chosen, show_progress = _begun(training, seconds, progress)
    if chosen.target is not None:
        return workers_of_script(chosen.target, seconds=seconds, say=show_progress)
    return workers_of_job(chosen.make_job(), name=chosen.name, seconds=seconds, say=show_progress)


def memory(training: Training, *, seconds: float = MOST_S, progress: bool = True) -> MemoryFound:
    """Find where the memory of a training goes, at its own batch size with its longest samples, after the first update.

    Takes a training as `batch` does. A job is as before afterwards; a script has to make its first update within
    `seconds`. Raises TrainingError if not even one update fits.
    """
    chosen, show_progress = _begun(training, seconds, progress)
    if chosen.target is not None:
        return memory_of_script(chosen.target, seconds=seconds, say=show_progress)
    return memory_of_job(chosen.make_job(), name=chosen.name, say=show_progress)


def gpus(training: Training, *, seconds: float = MOST_S, progress: bool = True) -> GpusFound:
    """Predict how long a training takes on each GPU of the catalogue, and find out on which it fits.

    Takes a training as `batch` does. hotlap counts the work and the memory of its updates here, on a GPU or the CPU. A
    job is as before afterwards; a script has to make its first update within `seconds`.
    """
    chosen, show_progress = _begun(training, seconds, progress)
    if chosen.target is not None:
        return gpus_of_script(chosen.target, seconds=seconds, say=show_progress)
    return gpus_of_job(chosen.make_job(), name=chosen.name, say=show_progress)


def diagnose(training: Training | int | Path, *, seconds: float = diagnoses.MOST_S, progress: bool = True) -> Findings:
    """Find what is wrong with a training, what that costs, and what to change, the costliest first.

    Takes a training as `batch` does, the folder of a run, or the number of a process. hotlap watches some updates of a
    training, and an evaluation if one comes within `seconds`. A job is as before afterwards; of a script a copy runs.
    """
    one = training[0] if isinstance(training, (list, tuple)) and len(training) == 1 else training
    found = diagnose_named(one)
    if found is not None:
        return found
    chosen, show_progress = _begun(
        training if not isinstance(training, (int, Path)) else str(training), seconds, progress
    )
    if chosen.target is not None:
        return diagnoses.diagnose_script(chosen.target, seconds=seconds, say=show_progress)
    return diagnoses.diagnose_job(chosen.make_job(), name=chosen.name, seconds=seconds, say=show_progress)


def _begun(training: Training, seconds: float, progress: bool) -> tuple[Named, Say]:
    """The training, and where to show progress. Raises UsageError if either argument is wrong."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
        raise UsageError(f"seconds={shown(seconds)} must be a number above 0")
    show_progress = say if progress else silent
    chosen = _chosen(training, show_progress)
    warn_if_busy(show_progress)
    return chosen, show_progress


def _chosen(training: Training, show_progress: Say) -> Named:
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
    return named(words, say=show_progress)


# --- the training that a command line names ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Named:
    """A named training: a job, or a script."""

    name: str
    job: Callable[[], Job] | None = None
    """Makes the job anew, for trials in this process."""
    target: Target | None = None
    """The script. Each probe runs some of its updates in a new process."""

    def make_job(self) -> Job:
        """The job of a training that is no script."""
        assert self.job is not None, "a script has no job"
        return self.job()


def named(words: Sequence[str], *, say: Say = silent) -> Named:
    """The training that these words name. Reads or runs nothing but the file of a script.

    Raises UsageError if they name none.
    """
    from hotlap.recipes import NAMES
    from hotlap.script.running import NoScriptError, Target, check_syntax, look

    module = list(words[:1]) == ["-m"]
    if len(words) == module:
        raise UsageError("which training? name module:job, a recipe with its options, train.py ARGS, or -m MODULE ARGS")
    first, *rest = words[module:]
    if module or first.endswith(".py") or (first not in (*NAMES, "demo") and Path(first).exists()):
        target = Target(args=rest, **{"module" if module else "path": first})
        try:
            look(target)
            check_syntax(target)
        except NoScriptError as error:
            raise UsageError(str(error)) from None
        except SyntaxError as error:
            raise HotlapError(f"{_not_python(error)}; correct it: {(error.text or '').strip()}") from None
        return Named(name=target.name, target=target)
    if ":" in first:
        if rest:
            raise UsageError(f"{first} takes no arguments; drop {' '.join(rest)!r:.60}")
        return Named(name=first, job=lambda: named_job(first))
    if first == "demo":
        from hotlap.demo import digits_job

        return Named(name="demo", job=digits_job)
    if first in NAMES:
        return Named(name=first, job=lambda: recipe_job(first, rest, say))
    raise UsageError(
        f"{first!r:.60} is no training: name a file, module:job or a recipe{did_you_mean(first, (*NAMES, 'demo'))}"
    )


def named_job(name: str) -> Job:
    """The Job `module:job`, seen from the current folder, or the Job that a function of that name returns."""
    job = named_training(name)
    if not isinstance(job, Job):
        raise UsageError(f"{name} is a {type(job).__name__}, not a hotlap.Job")
    return job


def named_training(name: str) -> Job | TreeJob:
    """The Job or TreeJob `module:job`, or the one that a function of that name returns."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py") and not attribute:
        raise UsageError(f"{name!r:.60} is a script; give a job as module:job, or run the script with: hotlap run")
    if module.endswith(".py") or not all(word.isidentifier() for word in (*module.split("."), attribute)):
        raise UsageError(f"{name!r:.60} is no module:job; name a module in this folder, as train:job{_meant(name)}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"{name}: {module} imports {error.name!r}, which is missing; install it") from None
        raise UsageError(f"{name}: {error}; name a module in this folder, as module:job") from None
    except SyntaxError as error:
        raise UsageError(f"{name}: {_not_python(error)}; correct it") from None
    if not hasattr(made, attribute):
        raise UsageError(
            f"{name}: {module} has no {attribute!r}; name a hotlap.Job in it, or a function that returns one"
        )
    found = getattr(made, attribute)
    if callable(found) and not isinstance(found, Job):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError):  # it takes arguments, or has no signature
            raise UsageError(f"{name} is neither a Job nor a function without arguments that returns one") from None
        found = found()
    if not isinstance(found, (Job, TreeJob)):
        raise UsageError(f"{name} is a {type(found).__name__}, not a hotlap.Job")
    return found


def _not_python(error: SyntaxError) -> str:
    return f"{Path(error.filename or '').name}:{error.lineno} is not valid Python: {error.msg}"


def _meant(name: str) -> str:
    """The module:job that the name of a file may mean, in words."""
    file, _, attribute = name.rpartition(":")
    parts = Path(file.removesuffix(".py")).parts
    is_one = bool(parts) and all(part.isidentifier() for part in (*parts, attribute))
    return f"; did you mean {'.'.join(parts)}:{attribute}?" if is_one else ""


def recipe_job(name: str, words: Sequence[str], say: Say) -> Job:
    """The job of a recipe's first model, with options as `hotlap train` takes them."""
    from hotlap.recipes import recipe_named
    from hotlap.recipes.options import from_words, options_of

    recipe = recipe_named(name)
    given = from_words(list(words))
    for option in sorted(COMMANDS_OWN & given.keys() - {one.name for one in fields(recipe.options_type)}):
        raise UsageError(f"--{option} is no option of the recipe {name}; put it before the recipe: --{option} … {name}")
    file = given.pop("options", None)
    options = options_of(recipe.options_type, None if file is None else Path(file), given)
    if not options.data:
        raise UsageError(f"name the data with --data FILE ({recipe.expects})")
    prepared = recipe.prepare(options, say)
    if not prepared.candidates:
        raise UsageError(f"the recipe {name} has no single network to measure; it trains several models by itself")
    first, *others = prepared.candidates
    if others:
        say(f"model     {first.name}; the recipe also has {', '.join(other.name for other in others)}")
    return first.job()
