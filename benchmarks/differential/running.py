"""How scripts are run: each in a fork of a process that has loaded torch and hotlap, in a folder of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

from preloaded import Preloaded  # noqa: E402 -- the path has to be there first

DRIVER = ("-c", "from benchmarks.differential.driver import main; main()")
MODULES = (
    "benchmarks.differential.driver", "hotlap.script.session", "hotlap.fitting.fit", "hotlap.engine.rig",
    "torch._dynamo",
)  # fmt: skip
TIMEOUT_S = 90.0
HOTLAPS = re.compile(r"hotlap|[A-Z]\d{4} \d\d:|Traceback|During handling of|The above exception|\s")
"""How lines on stderr begin that differ from run to run, or say who called whom."""
PLACE = re.compile(r"^\S+:\d+: ")
"""Where a warning comes from; through hotlap it may come from another line, and so once more."""
OWN = ("as the data is given", "the user's own")
"""Why a ledger notes a plan that is the training's own."""


@dataclass
class Outcome:
    """What came of one run."""

    code: int
    stdout: list[str]
    stderr: list[str]
    """Without hotlap's own lines."""
    told: str
    """All of stderr."""
    folder: Path
    """What the script was run in, with the files that it wrote."""
    plans: list[dict[str, Any]] = field(default_factory=list)
    """The plans that were in force one after the other, of all its trainings: `{choice: (own, now)}`."""

    @property
    def is_refused(self) -> bool:
        """Whether hotlap has left the script as it is, with a reason."""
        return "hotlap leaves the script alone" in self.told

    @property
    def fault(self) -> str | None:
        """What went wrong inside of hotlap."""
        lines = [line for line in self.told.splitlines() if "hotlap failed" in line]
        return lines[0] if lines else None


class Runner:
    """Runs scripts by python alone, disturbed, and under hotlap."""

    def __init__(self, device: str, home: Path) -> None:
        self._environment = environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "COLUMNS": "120",
            "HOTLAP_PROGRESS": "off",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        environment.pop("HOTLAP_PLAN", None)
        self._forks: Preloaded | None = Preloaded(*MODULES, environment=environment)
        if device == "cuda":
            script = home / "first.py"
            script.write_text("import torch\nprint(torch.zeros(1, device='cuda').item())\n")
            first = self.alone(script, home / "first")
            if first.code:
                print(f"no fork can use the GPU, so each script has a process of its own: {first.told[-300:]}")
                self.close()

    def close(self) -> None:
        """End the process that forks."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    def alone(self, script: Path, folder: Path) -> Outcome:
        """By python."""
        return self._ran(folder, "alone", str(script))

    def disturbed(self, script: Path, folder: Path, epsilon: float, seed: int) -> Outcome:
        """By python, each update disturbed."""
        return self._ran(folder, "disturbed", str(epsilon), str(seed), str(script))

    def under(self, script: Path, folder: Path, plan: str) -> Outcome:
        """Under `hotlap run`; `plan` is max, auto, or the text of a plan file."""
        folder.mkdir(parents=True)
        out = folder / "run"
        if plan == "auto":
            words = ["tuned", "run", "--tune-seconds", "5"]
        elif plan == "max":
            words = ["hotlap", "run", "--plan", "max"]
        else:
            file = folder / "plan.toml"
            file.write_text(plan)
            words = ["hotlap", "run", "--plan", str(file)]
        return self._ran(folder, *words, "--out", str(out), str(script))

    def _ran(self, folder: Path, *words: str) -> Outcome:
        work = folder / "work"
        work.mkdir(parents=True)
        try:
            done = self._done([*DRIVER, *words], work, {"HOTLAP_CACHE": str(folder / "cache")})
        except (TimeoutError, subprocess.TimeoutExpired):
            return Outcome(-9, [], [], f"no end after {TIMEOUT_S} s", work)
        theirs = own_words(done.stderr.splitlines())
        ledgers = sorted(folder.glob("run*/**/ledger.jsonl"))
        plans = [plan for ledger in ledgers for plan in plans_of(ledger)]
        return Outcome(done.returncode, done.stdout.splitlines(), theirs, done.stderr, work, plans)

    def _done(self, words: list[str], work: Path, own: dict[str, str]) -> subprocess.CompletedProcess[str]:
        if self._forks is not None:
            return self._forks.run(*words, cwd=work, timeout_s=TIMEOUT_S, **own)
        return subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, cwd=work, timeout=TIMEOUT_S,
            env=self._environment | own, stdin=subprocess.DEVNULL,
        )  # fmt: skip


def own_words(lines: list[str]) -> list[str]:
    """What a script says on stderr, each thing once: no lines of hotlap, no log of torch, no frames, no places."""
    words = (PLACE.sub("", line) for line in lines if line and not HOTLAPS.match(line))
    return list(dict.fromkeys(words))


def plans_of(ledger: Path) -> list[dict[str, Any]]:
    """What each plan of a ledger changes in the one that the training describes itself."""
    if not ledger.exists():
        return []
    own, plans = {}, []
    for line in ledger.read_text().splitlines():
        entry = json.loads(line)
        plan = {f"{part}.{name}": value for part, of in entry["plan"].items() for name, value in of.items()}
        if entry["what"] == "start" or entry["why"].startswith(OWN):
            own = plan
        else:
            plans.append(plan)
    return [{name: value for name, value in plan.items() if value != own[name]} for plan in plans]


def clean(folder: Path) -> None:
    """Remove what a script has left."""
    shutil.rmtree(folder, ignore_errors=True)
