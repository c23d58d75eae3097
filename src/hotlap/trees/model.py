"""A TreeModel answers for rows: its boosters in the libraries' own formats, and `trees.json` beside them.

The files may be a stranger's. Neither library checks the nodes of its trees, so hotlap does before it loads them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, StoreError, first_line, library
from hotlap.core.units import MIB
from hotlap.machine.limits import read_cpu
from hotlap.store.disk import read_small
from hotlap.store.files import from_json, read_bytes, write_text
from hotlap.trees.booster_checks import checked_lightgbm, checked_xgboost, need
from hotlap.trees.data import LIBRARIES, Array, features
from hotlap.trees.files import TreeFiles
from hotlap.trees.growing import Grown
from hotlap.trees.job import TASKS, TreeJob, TreePlan
from hotlap.trees.parameters import EXTRA, NEEDS

FILE, BOOSTERS = "trees.json", "boosters"
FORMAT = 1
MOST_BYTES, MOST_BOOSTER_BYTES = 64 * MIB, 4096 * MIB
ENDINGS = {"xgboost": "json", "lightgbm": "txt"}
_NAME = re.compile(r"\d{4,8}\.(json|txt)")


@dataclass(frozen=True, kw_only=True)
class BoosterFile:
    """A booster's file in `boosters/`."""

    name: str
    sha256: str
    first_target: int
    targets: int
    rounds: int
    """Rounds that it keeps."""


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """What `trees.json` says."""

    library: str
    task: str
    features: int
    targets: int
    one_target: bool
    classes: list[list[Any]]
    boosters: list[BoosterFile]
    settings: dict[str, Any]
    """What was asked: params, rounds, patience, seed."""
    ran: dict[str, str]
    """The parameters that the library reported."""
    plan: dict[str, Any]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelRecord:
        """The record of these fields, unchecked."""
        return cls(**{**raw, "boosters": [BoosterFile(**file) for file in raw["boosters"]]})


class TreeModel:
    """A trained model of trees: `predict`, and `probabilities` in classification."""

    def __init__(self, record: ModelRecord, contents: Iterable[bytes], *, trusted: bool = False) -> None:
        """`trusted`: the boosters come from the library itself, and need no checks."""
        self.record = record
        self.threads = read_cpu().cores
        """Threads that answer."""
        self.boosters = [
            _booster(content if trusted else _checked_content(content, file, record), record)
            for content, file in zip(contents, record.boosters, strict=True)
        ]
        """The library's own boosters, in the order of their targets."""

    def predict(self, x: Any) -> Array:
        """A value for each row and target, or labels in classification; one dimension where `y` had one."""
        raw = self._raw(x)
        if self.record.task == "classification":
            columns = [
                np.asarray(labels)[answer.argmax(1)] for labels, answer in zip(self.record.classes, raw, strict=True)
            ]
            answers = np.stack(columns, 1)
        else:
            answers = np.column_stack(raw)
        return answers[:, 0] if self.record.one_target else answers

    def probabilities(self, x: Any) -> Any:
        """Rows × classes, in the order of `classes`; a list of them where `y` had several targets."""
        if self.record.task != "classification":
            raise DataError("probabilities are for classification; this model predicts numbers: use predict")
        raw = self._raw(x)
        return raw[0] if self.record.one_target else raw

    @property
    def classes(self) -> list[list[Any]]:
        """Labels of each target."""
        return self.record.classes

    def _raw(self, x: Any) -> list[Array]:
        wrong: list[str] = []
        array = features(x, "x", wrong)
        if array is not None and array.shape[1] != self.record.features:
            wrong.append(f"x has {array.shape[1]} columns; the model was trained on {self.record.features}")
        if wrong or array is None:
            raise DataError("; ".join(wrong))
        if not len(array):  # which LightGBM refuses
            return [answer[:0] for answer in self._raw(np.zeros((1, self.record.features)))]
        if isinstance(array, TreeFiles):
            parts = [self._raw(piece) for piece in array.pieces()]
            return [np.concatenate(answers) for answers in zip(*parts, strict=True)]
        answers = [self._ask(booster, array) for booster in self.boosters]
        if self.record.task == "classification":
            return [np.stack([1 - a, a], 1) if a.ndim == 1 else a for a in answers]
        return answers

    def _ask(self, booster: Any, x: Array) -> Array:
        if self.record.library == "xgboost":
            booster.set_param({"nthread": self.threads})
            found: Array = booster.inplace_predict(x)
        else:
            found = booster.predict(x, num_threads=self.threads)
        return found


def booster_name(targets: range, library: str) -> str:
    """The file of a booster for these targets."""
    return f"{targets.start:04d}.{ENDINGS[library]}"


def record_of(job: TreeJob, plan: TreePlan, grown: Sequence[Grown], ran: dict[str, str]) -> ModelRecord:
    """What `trees.json` says of a training."""
    files = [
        BoosterFile(
            name=booster_name(booster.targets, job.library),
            sha256=hashlib.sha256(booster.content).hexdigest(),
            first_target=booster.targets.start,
            targets=len(booster.targets),
            rounds=booster.best_round,
        )
        for booster in grown
    ]
    return ModelRecord(
        library=job.library,
        task=job.task,
        features=int(job.x.shape[1]),
        targets=job.targets,
        one_target=job.one_target,
        classes=[list(labels) for labels in job.classes],
        boosters=files,
        settings=settings_of(job),
        ran=ran,
        plan=asdict(plan),
    )


def settings_of(job: TreeJob) -> dict[str, Any]:
    """What a job asks for, as JSON."""
    return {
        "library": job.library,
        "task": job.task,
        "params": json.loads(json.dumps(dict(job.params), default=str)),
        "rounds": int(job.rounds),
        "patience": None if job.patience is None else int(job.patience),
        "seed": int(job.seed),
    }


def write_record(folder: Path, record: ModelRecord) -> None:
    """Write `trees.json`, which makes the boosters a model."""
    write_text(folder / FILE, json.dumps({"format": FORMAT, **asdict(record)}) + "\n")


def read_record(folder: Path) -> ModelRecord:
    """Read `trees.json`, which may be a stranger's. Raises StoreError."""
    raw = from_json(read_small(folder / FILE, MOST_BYTES), FILE)
    try:
        need(raw.pop("format") == FORMAT, "its format is of another hotlap")
        return _checked(ModelRecord.from_dict(raw))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{folder / FILE} is not a record of trees: {error}") from None


def load(folder: str | Path) -> TreeModel:
    """The model in the folder of a run. Raises StoreError in one line if a file is missing, damaged or forged."""
    path = Path(folder)
    if not (path / FILE).is_file():
        raise StoreError(f"{path} holds no trees: it has no {FILE}; a training that was stopped early leaves none")
    record = read_record(path)
    return TreeModel(record, (_content(path, file) for file in record.boosters))


def _content(folder: Path, file: BoosterFile) -> bytes:
    content = read_bytes(folder / BOOSTERS / file.name, MOST_BOOSTER_BYTES)
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise StoreError(f"{folder / BOOSTERS / file.name} differs from what was written; train again")
    return content


def _checked_content(content: bytes, file: BoosterFile, record: ModelRecord) -> bytes:
    targets = range(file.first_target, file.first_target + file.targets)
    return checked_booster(content, targets, record)


def checked_booster(content: bytes, targets: range, of: ModelRecord | TreeJob) -> bytes:
    """A booster of a model or job, as it was understood here. Raises StoreError where it is damaged or forged."""
    check = checked_xgboost if of.library == "xgboost" else checked_lightgbm
    features = of.features if isinstance(of, ModelRecord) else int(of.x.shape[1])
    outputs = len(targets)
    if of.task == "classification":
        classes = len(of.classes[targets.start])
        outputs = 1 if classes == 2 else classes
    return check(content, booster_name(targets, of.library), features=features, outputs=outputs)


def _booster(content: bytes, record: ModelRecord) -> Any:
    """A booster of the library. Raises StoreError if it cannot read the content."""
    try:
        if record.library == "xgboost":
            booster = library("xgboost", NEEDS, EXTRA).Booster({"verbosity": 0})
            booster.load_model(bytearray(content))
            return booster
        return library("lightgbm", NEEDS, EXTRA).Booster(model_str=content.decode())
    except Exception as error:
        if type(error).__module__.partition(".")[0] != record.library:
            raise
        raise StoreError(f"{record.library} cannot read a booster: {first_line(error)}") from None


def _checked(record: ModelRecord) -> ModelRecord:
    """The record, if it does not contradict itself; ValueError if it does."""
    need(record.library in LIBRARIES and record.task in TASKS, "library or task are not known")
    numbers = [record.features, record.targets, *(n for f in record.boosters for n in (f.targets, f.rounds))]
    are_counts = all(type(n) is int and 0 < n < 2**31 for n in numbers) and isinstance(record.one_target, bool)
    need(are_counts and not (record.one_target and record.targets != 1), "its counts are wrong")
    following = 0
    for file in record.boosters:
        is_next = isinstance(file.name, str) and _NAME.fullmatch(file.name) and file.first_target == following
        need(is_next, "its boosters are not one for each target")
        following += file.targets
    need(following == record.targets, "its boosters are not one for each target")
    if record.task == "classification":
        are_labels = _are_labels(record.classes, len(record.boosters), record.targets)
        need(are_labels, "its classes are not those of its targets")
    return record


def _are_labels(classes: Any, *counts: int) -> bool:
    """Whether these are lists of two or more labels, and as many lists as each of the counts."""
    return (
        isinstance(classes, list)
        and all(len(classes) == count for count in counts)
        and all(isinstance(labels, list) and 2 <= len(labels) < 2**20 for labels in classes)
        and all(isinstance(label, (str, int, float)) for labels in classes for label in labels)
    )
