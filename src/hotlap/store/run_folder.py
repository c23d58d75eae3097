"""The folder of one run: plan, ledger, metrics, environment, model, and the list of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from torch import nn

from hotlap.core.errors import StoreError
from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.store.files import append_line, read_text, write_text
from hotlap.store.plans import load_plan, save_plan
from hotlap.store.weights import save_weights

ABOUT = {
    "plan.toml": "how it was run; use it again with --plan",
    "ledger.jsonl": "every change of plan, with figures",
    "metrics.jsonl": "loss and metrics, a line an evaluation",
    "environment.json": "machine, versions and settings",
    "model.safetensors": "trained weights, for plain PyTorch",
    "artefacts.json": "this list",
}


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A file that a run left."""

    name: str
    bytes: int
    what: str


class RunFolder:
    """A folder that belongs to one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: str | Path | None, name: str = "run") -> Self:
        """A new folder; one that holds files already is refused, so that nothing is overwritten."""
        wanted = Path(path) if path is not None else _fresh(Path("runs"), name)
        if wanted.exists() and not wanted.is_dir():
            raise StoreError(f"cannot use {wanted} as a run folder: it is a file; name a new folder")
        if wanted.is_dir() and any(wanted.iterdir()):
            raise StoreError(f"the run folder {wanted} holds files already; name a new one or remove it")
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the run folder {wanted}: {error.strerror or error}") from error
        return cls(wanted)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The folder of a run that was."""
        if not (Path(path) / "plan.toml").is_file():
            raise StoreError(f"{path} is no run folder: it has no plan.toml")
        return cls(Path(path))

    def write_plan(self, plan: Plan) -> None:
        """Write `plan.toml`."""
        save_plan(plan, self.path / "plan.toml")

    def read_plan(self) -> Plan:
        """The plan that was in force at the end."""
        return load_plan(self.path / "plan.toml")

    def write_ledger(self, ledger: Ledger) -> None:
        """Write `ledger.jsonl`."""
        write_text(self.path / "ledger.jsonl", ledger.to_lines())

    def read_ledger(self) -> Ledger:
        """Every change of plan of the run."""
        return Ledger.from_lines(read_text(self.path / "ledger.jsonl"))

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Add a line to `metrics.jsonl`."""
        # JSON has no NaN: a number that is none is stored as null.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        append_line(self.path / "metrics.jsonl", json.dumps(finite))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines of `metrics.jsonl`."""
        return [json.loads(line) for line in read_text(self.path / "metrics.jsonl").splitlines()]

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write `environment.json`."""
        write_text(self.path / "environment.json", json.dumps(facts, indent=2) + "\n")

    def write_model(self, model: nn.Module) -> None:
        """Write `model.safetensors`."""
        save_weights(model, self.path / "model.safetensors", {"format": "pt", "written_by": "hotlap"})

    def artefacts(self) -> list[Artefact]:
        """The files that are here, with their sizes."""
        files = sorted(file for file in self.path.iterdir() if file.is_file())
        return [Artefact(name=f.name, bytes=f.stat().st_size, what=ABOUT.get(f.name, "")) for f in files]

    def write_artefacts(self) -> None:
        """Write `artefacts.json`: the files with sizes, but for the list itself."""
        rows = [vars(artefact) for artefact in self.artefacts() if artefact.name != "artefacts.json"]
        write_text(self.path / "artefacts.json", json.dumps(rows, indent=2) + "\n")


def _fresh(parent: Path, name: str) -> Path:
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    path = parent / f"{name}-{stamp}"
    number = 2
    while path.exists():
        path = parent / f"{name}-{stamp}-{number}"
        number += 1
    return path
