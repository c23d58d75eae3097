"""What kind of run a folder holds, and its files: perhaps a stranger's, so what does not fit is left out and named."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotlap.core.errors import HotlapError, StoreError
from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.core.terminal import clean
from hotlap.core.units import MIB
from hotlap.store.files import from_json, load_plan, read_bytes, read_text
from hotlap.store.run_folder import ABOUT, MOST_LEDGER_BYTES, is_locked_here
from hotlap.store.telemetry import read_live, read_samples, still_runs

FIT, SCRIPT, TREES, RECIPE, SEARCH, MANY = "fit", "script", "trees", "recipe", "search", "many"
MOST_BYTES, MOST_HISTORY_BYTES = 16 * MIB, 64 * MIB
MOST_TRAININGS = 24
"""Trainings of one run that are read; a recipe has a handful, and of a search the best."""
LONGEST = 2000
"""Characters of one text."""
JOB = re.compile(r"[0-9]{4,6}")
"""The folder of a training that `fit_many` made."""
MOST_RUNS = 2000
"""Runs of a folder that are listed."""
MOST_NUMBER = 1e150
"""Larger numbers are left out: their squares have no place in a float."""
ABOUT_RECIPES = {
    "options.toml": "what was asked for; repeats the run",
    "recipe.json": "everything that predictions need",
    "report.json": "scores of all models and simple rules",
    "predictions.csv": "answers for --test",
    "curves.svg": "learning curves",
    "confusion.svg": "how classes were confused",
    "tokenizer.json": "pieces of words",
    "model.onnx": "the best model for other programs",
    "search.json": "all trials",
    "trials.journal": "all trials, as Optuna reads them",
    "history.svg": "scores of the trials",
    "importance.svg": "what mattered",
}


@dataclass(kw_only=True)
class Training:
    """One training: the files of its folder, as far as they can be read."""

    name: str
    path: Path
    ledger: Ledger | None = None
    plan: Plan | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    started: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    live: dict[str, Any] = field(default_factory=dict)
    """How it stands, or stood last."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the training was."""
        return mapping(self.record.get("facts"))

    @property
    def job(self) -> dict[str, Any]:
        """The settings of its job."""
        return mapping(self.environment.get("job"))

    @property
    def ended(self) -> dict[str, Any]:
        """How it ended; empty where it has not."""
        return mapping(self.record.get("ended")) or mapping(self.facts.get("ended"))

    @property
    def tree_plan(self) -> dict[str, Any]:
        """The plan of trees; empty for networks."""
        return mapping(self.facts.get("plan")) if "at_once" in mapping(self.facts.get("plan")) else {}


@dataclass(kw_only=True)
class RunFiles:
    """A run: its kind, its trainings, and what else its folder holds."""

    path: Path
    kind: str
    trainings: list[Training]
    whole: Training | None = None
    """What was measured of all trainings together, by a search or `fit_many`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of a recipe."""
    scores: dict[str, Any] = field(default_factory=dict)
    """A recipe's `report.json`."""
    state: dict[str, Any] = field(default_factory=dict)
    """A recipe's `recipe.json`, once it is finished."""
    search: dict[str, Any] = field(default_factory=dict)
    """A search's `search.json`."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, with the reason."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return clean(self.path.resolve().name)

    @property
    def is_live(self) -> bool:
        """Whether a process is at work on it."""
        return any(map(is_at_work, (self.path, self.path / "search", *(training.path for training in self.trainings))))

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end."""
        if self.kind == RECIPE:
            return bool(self.state)
        if self.kind == SEARCH:
            return bool(self.search.get("best"))
        if self.kind == MANY:
            return all(training.ended for training in self.trainings)
        return self.kind == SCRIPT or bool(self.trainings and self.trainings[0].ended)


def kind_of_run(path: Path) -> str | None:
    """What kind of run a folder holds; None where it holds none, or may not be looked into."""
    if _is_file(path / "options.toml"):
        return RECIPE
    if _is_file(path / "search.json"):
        return SEARCH
    if not _is_file(path / "plan.toml"):
        return MANY if _jobs(path) else None
    if any((path / name).exists() for name in ("trees.json", "grown.jsonl", "boosters")):
        return TREES
    return SCRIPT if _json(path / "started.json", []).get("command") == "run" else FIT


def read_run(path: Path) -> RunFiles:
    """The run in a folder. Raises StoreError where it holds none."""
    kind = kind_of_run(path)
    if kind is None:
        what = (
            "is not a run folder: it has no plan.toml, options.toml or search.json"
            if path.is_dir()
            else (
                "is a file; name the folder of a run" if path.exists() else "does not exist; name the folder of a run"
            )
        )
        raise StoreError(f"{path} {what}")
    run = RunFiles(path=path, kind=kind, trainings=[])
    if kind == RECIPE:
        run.options = _toml(path / "options.toml", run.problems)
        run.scores = _json(path / "report.json", run.problems)
        run.state = _json(path / "recipe.json", run.problems)
        run.search = _json(path / "search" / "search.json", run.problems)
        inner = [folder for part in ("models", "folds") for folder in _folders(path / part)]
        inner += _best_trial(run, path / "search")
    elif kind == SEARCH:
        run.search = _json(path / "search.json", run.problems)
        inner = _best_trial(run, path)
    elif kind == MANY:
        inner = _jobs(path)
    else:
        inner = [path, *(folder for folder in _folders(path) if folder.name.startswith("training-"))]
    if kind in (SEARCH, MANY):
        run.whole = _training(path, run.problems, path)
    run.trainings = [_training(folder, run.problems, path) for folder in inner[:MOST_TRAININGS]]
    return run


def runs_in(folder: Path) -> list[Path]:
    """The runs of a folder, each in a folder of its own, the newest first; those inside of runs are parts of them."""
    if not folder.is_dir():
        raise StoreError(f"{folder} {'is a file' if folder.exists() else 'does not exist'}; name a folder of runs")
    try:
        inner = [one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")]
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror or error}") from None
    found = [one for one in inner if kind_of_run(one) is not None]
    return sorted(found, key=began_s, reverse=True)[:MOST_RUNS]


def began_s(path: Path) -> float:
    """About when a run began, as seconds since 1970: when the first of its files was written that stays as it is."""
    times = []
    for name in ("started.json", "environment.json", "options.toml", "search.json", "trials.journal", "plan.toml"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return min(times, default=0.0)


def is_at_work(path: Path) -> bool:
    """Whether a process is at work in a folder. This takes no lock: a run may be about to begin."""
    if is_locked_here(path):
        return True
    state = read_live(path)
    if state is not None and not state.get("ended") and still_runs(state["pid"], state["at"]):
        return True
    try:
        lock = path / "lock"
        return still_runs(int(read_bytes(lock, 64).decode()), lock.stat().st_mtime)
    except (OSError, ValueError, HotlapError):
        return False


# --- values --------------------------------------------------------------------------------------------


def mapping(value: object) -> dict[str, Any]:
    """A dict with printable names as keys, or an empty one."""
    return {clean(str(name)): one for name, one in value.items()} if isinstance(value, dict) else {}


def number(value: object) -> float | None:
    """A finite number that is not too large, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and abs(found) < MOST_NUMBER else None


def words(value: object) -> str:
    """A text in one line that is not too long; numbers and lists as JSON has them."""
    if value is None:
        return "–"
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return "–"
    line = clean(" ".join(value[: 4 * LONGEST].split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 2]} …"


def listing(value: object) -> list[Any]:
    """A list, or an empty one."""
    return list(value) if isinstance(value, (list, tuple)) else []


# --- files ---------------------------------------------------------------------------------------------


def artefacts(path: Path) -> list[tuple[str, int, str]]:
    """The files of a run with sizes and what they are, those of its parts in one line a part."""
    found: dict[str, int] = {}
    try:
        for file in sorted(path.iterdir()):
            if file.name.startswith(".") or file.name == "lock" or file.is_symlink():
                continue
            if file.is_file():
                found[file.name] = file.stat().st_size
            elif file.is_dir():
                sizes = [one.stat().st_size for one in file.rglob("*") if one.is_file() and not one.is_symlink()]
                if sizes:
                    found[f"{file.name}/"] = sum(sizes)
    except OSError:
        return []
    about = {**ABOUT, **ABOUT_RECIPES}
    return [(clean(name), size, about.get(name, "")) for name, size in found.items()]


def _training(path: Path, problems: list[str], whole: Path) -> Training:
    name = clean(path.name) if path != whole else clean(path.resolve().name)
    if path.parent.name == "trials" and path.name.isdecimal():
        name = f"trial {int(path.name)}"
    elif path != whole and JOB.fullmatch(path.name):
        name = f"job {int(path.name) + 1}"
    found = Training(name=name, path=path)
    if (path / "ledger.jsonl").is_file():
        found.ledger = _ledger(path / "ledger.jsonl", problems)
    if (path / "plan.toml").is_file():
        try:
            found.plan = load_plan(path / "plan.toml")
        except HotlapError as error:
            problems.append(str(error))
    found.history = _lines(path / "metrics.jsonl", problems)
    found.samples, found.live = read_samples(path), read_live(path) or {}
    for part in ("environment", "started", "record", "trees", "result"):
        setattr(found, part, _json(path / f"{part}.json", problems))
    return found


def _best_trial(run: RunFiles, folder: Path) -> list[Path]:
    best = number(run.search.get("best"))
    path = folder / "trials" / f"{int(best or 0):04d}"
    return [path] if best is not None and (path / "plan.toml").is_file() else []


def _jobs(path: Path) -> list[Path]:
    """The trainings of a call of `fit_many`."""
    return [folder for folder in _folders(path) if JOB.fullmatch(folder.name)]


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(one for one in path.iterdir() if _is_file(one / "plan.toml"))
    except OSError:
        return []


def _is_file(path: Path) -> bool:
    """Whether a file is there; not where the folder is another user's own."""
    try:
        return path.is_file()
    except OSError:
        return False


def _ledger(file: Path, problems: list[str]) -> Ledger | None:
    try:
        text = read_text(file, MOST_LEDGER_BYTES)
        return Ledger.from_lines(text)
    except HotlapError as error:
        problems.append(f"{file.name}: {error}")
    return None


def _lines(file: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, without a last one that is being written, and those that are none."""
    if not file.is_file():
        return []
    try:
        lines = read_text(file, MOST_HISTORY_BYTES).split("\n")[:-1]
    except HotlapError as error:
        problems.append(str(error))
        return []
    found, broken = [], 0
    for line in lines:
        try:
            found.append(mapping(json.loads(line)))
        except (ValueError, RecursionError):
            broken += 1
    if broken:
        problems.append(f"{file.name}: {broken} of {len(lines)} lines are not JSON")
    return [record for record in found if record]


def _json(file: Path, problems: list[str]) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = from_json(read_bytes(file, MOST_BYTES), file.name)
    except HotlapError as error:
        problems.append(str(error))
        return {}
    if not isinstance(found, dict):
        problems.append(f"{file.name} is not an object")
    return mapping(found)


def _toml(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return mapping(tomllib.loads(read_text(file, MOST_BYTES)))
    except (HotlapError, ValueError, RecursionError) as error:
        problems.append(f"{file.name}: {error}")
    return {}
