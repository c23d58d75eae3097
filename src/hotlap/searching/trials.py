"""The trials of a search: Optuna chooses their values and keeps them in the folder of the search."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hotlap.core.errors import MachineError, StoreError, first_line, install
from hotlap.data.order import mix

JOURNAL = "trials.journal"
"""Optuna's own file, a line of JSON for each change; `optuna.load_study` and optuna-dashboard read it."""
FIRST_TRIALS, FIRST_JUDGED = 5, 2
"""No trial is pruned before so many are complete, nor before this evaluation."""
LEAST_WEIGHED = 4
"""Complete trials from which on importance is more than chance."""
SECONDS, WHY = "seconds", "why"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What became of a trial."""

    number: int
    """Its place in the search, from 1."""
    values: dict[str, Any]
    state: str
    """`complete`, `pruned`, `failed`, or `running` where it was interrupted."""
    score: float | None
    """What it is judged by; of a pruned trial the last one."""
    seconds: float
    why: str
    """Why it ended."""


class Trials:
    """The trials of one search, by Optuna: chosen, pruned, and kept so that a crash loses none."""

    def __init__(self, folder: Path, *, seed: int, prunes: bool, sign: float) -> None:
        self._optuna, self._seed = optuna_or_why_not(), seed
        self.sign = sign
        """-1 where higher scores are better: Optuna minimises."""
        self._study = self._opened(folder / JOURNAL, prunes)

    def _opened(self, journal: Path, prunes: bool) -> Any:
        optuna = self._optuna
        from optuna.storages.journal import JournalFileBackend

        _drop_torn_line(journal)
        with _quiet():
            try:
                storage = optuna.storages.JournalStorage(
                    JournalFileBackend(str(journal), lock_obj=cast(Any, _HeldAlready()))
                )
                return optuna.create_study(
                    storage=storage,
                    study_name="search",
                    direction="minimize",
                    load_if_exists=True,
                    pruner=optuna.pruners.MedianPruner(FIRST_TRIALS, FIRST_JUDGED)
                    if prunes
                    else optuna.pruners.NopPruner(),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{journal} cannot be read: {first_line(error)}; begin a new search") from None

    # --- trials ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._study.get_trials(deepcopy=False))

    def begun(self) -> list[Any]:
        """The trials that were interrupted, to go on with."""
        states = self._optuna.trial.TrialState
        found = self._study.get_trials(deepcopy=False, states=(states.RUNNING, states.WAITING))
        return [self._optuna.trial.Trial(self._study, frozen._trial_id) for frozen in found]

    def ask(self) -> Any:
        """A new trial."""
        # Seeded anew for each: a search that was interrupted goes on with the values that it would have had.
        self._study.sampler = self._optuna.samplers.TPESampler(seed=mix(self._seed, len(self)) % 2**32)
        with _quiet():
            return self._study.ask()

    def report(self, trial: Any, score: float, at: int) -> bool:
        """Take in an evaluation; whether the trial is worse than the median of the others by then."""
        known = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        if at not in known and math.isfinite(score):
            with _quiet():
                trial.report(self.sign * score, at)
        return bool(trial.should_prune())

    def completed(self, trial: Any, score: float, seconds: float, why: str) -> None:
        """Keep the score of a trial; one that is nan has failed."""
        if not math.isfinite(score):
            self.failed(trial, seconds, f"its score is {score}")
            return
        self._ended(trial, "COMPLETE", seconds, why, self.sign * score)

    def pruned(self, trial: Any, seconds: float, why: str) -> None:
        """Keep that a trial was pruned."""
        self._ended(trial, "PRUNED", seconds, why)

    def failed(self, trial: Any, seconds: float, why: str) -> None:
        """Keep why a trial failed."""
        self._ended(trial, "FAIL", seconds, why)

    def _ended(self, trial: Any, state: str, seconds: float, why: str, value: float | None = None) -> None:
        trial.set_user_attr(SECONDS, seconds)
        trial.set_user_attr(WHY, why)
        with _quiet():
            self._study.tell(trial, value, state=self._optuna.trial.TrialState[state])

    # --- what became of them -----------------------------------------------------------------------

    def tried(self) -> list[Tried]:
        """All trials, in their order."""
        return [self._tried(frozen) for frozen in self._study.get_trials(deepcopy=False)]

    def best(self) -> Tried | None:
        """The complete trial with the best score; None where there is none."""
        complete = [tried for tried in self.tried() if tried.state == "complete" and tried.score is not None]
        return min(complete, key=lambda tried: self.sign * (tried.score or 0.0), default=None)

    def again(self, number: int) -> Any:
        """A finished trial that gives its values once more."""
        return self._optuna.trial.FixedTrial(self._study.get_trials(deepcopy=False)[number - 1].params, number - 1)

    def importance(self) -> dict[str, float]:
        """How much of the differences in score each value explains; empty where too few trials say."""
        if sum(tried.state == "complete" for tried in self.tried()) < LEAST_WEIGHED:
            return {}
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        with _quiet():
            try:
                found = get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
            except (ValueError, RuntimeError, ZeroDivisionError):
                return {}
        return {name: float(share) for name, share in found.items() if math.isfinite(share)}

    def _tried(self, frozen: Any) -> Tried:
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        last = frozen.value if frozen.value is not None else frozen.intermediate_values.get(frozen.last_step)
        return Tried(
            number=frozen.number + 1,
            values=dict(frozen.params),
            state=names.get(frozen.state.name, "running"),
            score=None if last is None else self.sign * last,
            seconds=float(frozen.user_attrs.get(SECONDS, 0.0)),
            why=str(frozen.user_attrs.get(WHY, "")),
        )


class _HeldAlready:
    """No lock: the folder's own keeps others out, and a kill leaves none behind that has to be waited for."""

    def acquire(self) -> bool:
        """It is held."""
        return True

    def release(self) -> None:
        """Nothing."""


def optuna_or_why_not() -> Any:
    """Optuna; MachineError where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise MachineError(f"a search needs optuna: {install('[search]')}") from None
    return optuna


def _drop_torn_line(journal: Path) -> None:
    """Cut off a last line that a crash left without its end; Optuna would refuse all that comes after it."""
    try:
        with journal.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
            os.fsync(file.fileno())
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot read {journal}: {error.strerror or error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, Optuna logs nothing below a warning and warns of nothing experimental."""
    log = logging.getLogger("optuna")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
