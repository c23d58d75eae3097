"""A whole `fit` that finds its own plan, against the same training tuned by hand, from call to last step.

    python -m benchmarks.whole_run [--seconds 75] [--only NAME …] [--device cuda|cpu] [--plain-seconds 5] [--json FILE]
    python -m benchmarks.whole_run --check FILE …    # whether results are of one command, complete and unedited

The rival trains for `--seconds`, all it does included: moving the data, capturing, warming up. As many steps are then
asked of `hotlap.fit(job, plan="auto")`, whose job is what a user brings: a DataLoader without workers over tensors,
fp32, plain AdamW; images are normalised by the job's `prepare`. Texts come as `hotlap.Sequences` with the leave to
reorder them, and without a loader. Then the rival once more, so that drift of the machine shows. Every training has a
process of its own, and caches that are empty: nothing is known, nothing is warm.

Imports, random data, the first weights and the CUDA context come before the clock starts, on both sides; the loss of
samples that were held out, for which both are judged in fp32, comes after it. The rival
takes whole batches only. The user's loader does not, unless `--drop-last`: its epochs end in an odd one.

Results are written after every training, as far as they are there. The exit code is 1 where one failed. A file of
results is of one command: it names the command, the works that were asked for and the time of every process, and ends
in a digest of itself. `--check` says where the times do not add up, works are missing, or something was changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotlap
from benchmarks.fast_path import all_works
from benchmarks.networks import NETWORKS
from benchmarks.quality import held_out
from benchmarks.texts import LONG_RUN
from benchmarks.trainings import steps_of
from benchmarks.versions import versions
from benchmarks.work import Normalise, Work, called
from hotlap.core.errors import HotlapError
from hotlap.core.ledger import Ledger
from hotlap.core.table import as_json, table
from hotlap.core.units import show_rate, show_seconds
from hotlap.store.run_folder import RunFolder

LARGE = "ResNet-18, batch 256"
"""Left out unless it is asked for: it takes as long as any other, and is bound by arithmetic alone."""
LOOK_S = 0.25
"""Between two looks at the clock, each of which waits for the device."""
FEW_STEPS = 30
"""Of the user's own plan before its pace is taken."""
CACHES = ("HOTLAP_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
RUN_FOLDER, FOUND, ERROR = "run", "found.json", "error.txt"
"""What a process leaves in its folder."""


# --- in a process of its own ---------------------------------------------------------------------------


def made_ready(device: torch.device) -> Callable[[], None]:
    """What waits for the device, once all is imported and a GPU has its context."""
    # torch imports its compiler with the first optimizer of a process. That takes seconds; the rival makes its own
    # optimizer while the clock runs, and a user's is there before `fit` is called.
    torch.optim.AdamW([nn.Parameter(torch.zeros(1, device=device))])
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def by_hand(work: Work, device: torch.device, *, steps: int | None, seconds: float) -> dict[str, Any]:
    """The rival from construction to the end of its last step: for so many steps, or as many as the seconds hold."""
    wait = made_ready(device)
    model = work.build()
    training = steps_of("by_hand", work, device, model=model)
    done, look_at, first_s = 0, 1, 0.0
    begun = time.perf_counter()
    for rounds, samples in enumerate(training, 1):
        done += samples // work.batch
        if steps is not None and done >= steps:
            break
        if steps is None and rounds >= look_at:
            wait()
            took = time.perf_counter() - begun
            first_s = first_s or took
            if took >= seconds:
                break
            # Where one round has been timed beside the first, which captures, looks come at their intervals.
            pace = (took - first_s) / (rounds - 1) if rounds > 1 else LOOK_S
            look_at = rounds + max(1, round(min(LOOK_S, seconds - took) / pace))
    wait()
    took = time.perf_counter() - begun
    training.close()
    found = {"seconds": took, "steps": done, "samples": done * work.batch, **({"first_s": first_s} if first_s else {})}
    return {**found, "held_out": held_out(work, model, device)}


def user_job(work: Work, device: torch.device, *, steps: int, drop_last: bool) -> hotlap.Job:
    """The work as somebody brings it who has not thought about speed."""
    model = work.build()
    return hotlap.Job(
        model=model,
        loss=work.loss,
        optimizer=work.optimizer(model),
        steps=steps,
        prepare=Normalise(device) if work.images else None,
        device=str(device),
        **work.brought(drop_last=drop_last),
    )


def fitted(work: Work, job: hotlap.Job, device: torch.device, *, plan: str, out: Path) -> dict[str, Any]:
    """One call of `fit`, with the progress and the checkpoints it has by itself."""
    wait = made_ready(device)
    begun = time.perf_counter()
    run = hotlap.fit(job, plan=plan, out=out)
    wait()
    return {
        "seconds": time.perf_counter() - begun,
        "held_out": held_out(work, run.model, device),
        "steps": run.steps,
        "samples": run.samples,
        "train_s": run.train_s,
        "saving_s": run.saving_s,
        "train_loss": run.history[-1].get("train_loss"),
        "stopped": run.stopped,
        "problems": list(run.problems),
        "plan": str(run.plan),
        "ledger": run.ledger.to_lines(),
    }


def own_pace(work: Work, device: torch.device, *, seconds: float, drop_last: bool, out: Path) -> dict[str, Any]:
    """Some seconds of the user's own plan: long enough to know how long a step takes."""
    job = user_job(work, device, steps=FEW_STEPS, drop_last=drop_last)
    short = fitted(work, job, device, plan="off", out=out / "short")
    steps = max(FEW_STEPS, round(seconds * FEW_STEPS / short["train_s"]))
    job = user_job(work, device, steps=steps, drop_last=drop_last)
    found = fitted(work, job, device, plan="off", out=out / "long")
    return {**found, "step_s": found["train_s"] / found["steps"]}


def works() -> tuple[Work, ...]:
    """All that is trained here."""
    return (*all_works((LONG_RUN, LONG_RUN)), *NETWORKS)


def train_alone(options: argparse.Namespace) -> None:
    """What a process of its own does; the answer goes to a file, since anybody may print."""
    (work,) = (work for work in works() if work.name == options.work)
    device, folder = torch.device(options.device), Path(options.folder)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.alone == "by_hand":
        found = by_hand(work, device, steps=options.steps, seconds=options.seconds)
    elif options.alone == "fit":
        job = user_job(work, device, steps=options.steps, drop_last=options.drop_last)
        found = fitted(work, job, device, plan=options.plan, out=folder / RUN_FOLDER)
    else:
        found = own_pace(work, device, seconds=options.plain_seconds, drop_last=options.drop_last, out=folder)
    on_gpu = device.type == "cuda"
    found["machine"] = torch.cuda.get_device_name(device) if on_gpu else f"{torch.get_num_threads()} CPU threads"
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    (folder / FOUND).write_text(json.dumps(found))


# --- around them ---------------------------------------------------------------------------------------


@dataclass
class Result:
    """All that is known of a work."""

    steps: int = 0
    by_hand: list[dict[str, Any]] = field(default_factory=list)
    fit: dict[str, Any] | None = None
    own: dict[str, Any] | None = None
    failures: list[str] = field(default_factory=list)
    processes_s: list[float] = field(default_factory=list)
    """What each process took from its start to its end, those that failed included."""
    ledger: str = ""
    """Of the fit, or as far as it came where it was stopped."""

    @property
    def ratios(self) -> list[float]:
        """How fast the fit was as a multiple of each of the rival's runs."""
        return [rival["seconds"] / self.fit["seconds"] for rival in self.by_hand] if self.fit else []

    @property
    def tuning_s(self) -> float | None:
        """What the tuning cost, as the ledger says; None where it says nothing."""
        total = as_json(Ledger.from_lines(self.ledger))["total"]
        return total["cost_s"] if total else None

    def to_dict(self) -> dict[str, Any]:
        """For the file."""
        ledger = Ledger.from_lines(self.ledger)
        ratio = sum(self.ratios) / len(self.ratios) if self.ratios else None
        return {**asdict(self), "ratio": ratio, "ratios": self.ratios, "table": as_json(ledger)}


class Bench:
    """Starts one process after the other, and goes on where one fails."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begun = time.perf_counter()
        self.machine = ""
        self.asked: list[str] = []
        """Names of all works that are to be run."""
        self.results: dict[str, Result] = {}

    def run(self, work: Work) -> Result:
        """The rival, hotlap, the rival again, and some seconds of the user's own plan."""
        result = self.results[work.name] = Result()
        if (first := self._alone(work, result, "by_hand", "the rival by hand")) is not None:
            result.by_hand.append(first)
            result.steps = first["steps"]
            self.write()
            result.fit = self._alone(work, result, "fit", f'fit(plan="{self._options.plan}")', steps=result.steps)
            self.write()
            once = self._options.once
            if (
                not once
                and (again := self._alone(work, result, "by_hand", "the rival again", steps=result.steps)) is not None
            ):
                result.by_hand.append(again)
        if self._options.plain_seconds:
            result.own = self._alone(work, result, "own", "the user's own plan")
        self.write()
        return result

    def write(self) -> None:
        """The file, as far as results are there."""
        if self._options.json is None:
            return
        settings = {
            name: getattr(self._options, name) for name in ("seconds", "plain_seconds", "plan", "drop_last", "threads")
        }
        report = {
            "command": ["python", "-m", "benchmarks.whole_run", *self._options.words],
            "machine": self.machine,
            "versions": versions(),
            "settings": settings,
            "asked": self.asked,
            "seconds": time.perf_counter() - self._begun,
            "works": {name: result.to_dict() for name, result in self.results.items()},
        }
        report["digest"] = digest(report)
        self._options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")

    def _alone(
        self, work: Work, result: Result, what: str, told: str, *, steps: int | None = None
    ) -> dict[str, Any] | None:
        """A training in its own process with empty caches; None where it failed."""
        options = self._options
        asked = f"{steps:,} steps" if steps else f"{options.plain_seconds if what == 'own' else options.seconds:g} s"
        _say(f"{work.name}: {told}, {asked} …")
        with tempfile.TemporaryDirectory(prefix="hotlap-whole-run-", ignore_cleanup_errors=True) as folder:
            command = [sys.executable, "-m", "benchmarks.whole_run", "--alone", what, "--work", work.name]
            command += ["--device", options.device, "--plan", options.plan, "--folder", folder]
            command += ["--seconds", str(options.seconds), "--plain-seconds", str(options.plain_seconds)]
            command += ["--steps", str(steps)] if steps else []
            command += ["--drop-last"] if options.drop_last else []
            command += ["--threads", str(options.threads)] if options.threads else []
            fresh = {name: str(Path(folder) / name.lower()) for name in CACHES}
            found: dict[str, Any] | None = None
            began = time.perf_counter()
            try:
                # Its progress goes to our stderr; stdout is for results.
                subprocess.run(
                    command,
                    check=True,
                    stdout=sys.stderr,
                    env=os.environ | fresh,
                    cwd=Path(__file__).parents[1],
                    timeout=options.limit,
                )
                found = json.loads((Path(folder) / FOUND).read_text())
            except subprocess.TimeoutExpired:
                result.failures.append(f"{told}: stopped after {show_seconds(options.limit)} (--limit)")
            except subprocess.CalledProcessError as error:
                told_by = Path(folder) / ERROR
                why = told_by.read_text() if told_by.exists() else f"exit code {error.returncode}"
                result.failures.append(f"{told}: {why}")
            result.processes_s.append(time.perf_counter() - began)
            if what == "fit":
                result.ledger = found.pop("ledger") if found else _left_in(Path(folder) / RUN_FOLDER)
        if found is None:
            _say(f"{work.name}: {result.failures[-1]}")
        else:
            self.machine = found.pop("machine")
            found.pop("ledger", None)
            _say(f"{work.name}: {told} took {show_seconds(found['seconds'])} for {found['steps']:,} steps")
        return found


def digest(report: Mapping[str, Any]) -> str:
    """A hash of all of a report but its own digest."""
    text = json.dumps({name: value for name, value in report.items() if name != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def problems(report: Mapping[str, Any]) -> list[str]:
    """Why a file of results is not what one command wrote, all of it and unedited; nothing where it is."""
    if "digest" not in report:
        return ["it has no digest: it may be of several commands"]
    found = [] if report["digest"] == digest(report) else ["it was changed after it was written"]
    works = report["works"]
    missing = [name for name in report["asked"] if name not in works]
    if missing:
        found.append(f"works are missing: {', '.join(missing)}")
    inside_s = sum(run["seconds"] for work in works.values() for run in _runs(work))
    processes_s = sum(sum(work["processes_s"]) for work in works.values())
    if not inside_s <= processes_s <= report["seconds"]:
        times = (
            f"trainings {inside_s:.1f} s, their processes {processes_s:.1f} s, the command {report['seconds']:.1f} s"
        )
        found.append(f"times do not add up: {times}")
    return found


def _runs(work: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [run for run in (*work["by_hand"], work["fit"], work["own"]) if run]


def check(files: Sequence[Path]) -> int:
    """Print what is wrong with files of results; 1 where something is."""
    found = [f"{file}: {problem}" for file in files for problem in problems(json.loads(file.read_text()))]
    print("\n".join(found or [f"{len(files)} files: each of one command, complete and unedited"]))
    return 1 if found else 0


def _left_in(folder: Path) -> str:
    """The ledger of a run that was stopped, as far as it had been written."""
    try:
        return RunFolder(folder).read_ledger().to_lines()
    except HotlapError:
        return ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def lines(name: str, result: Result) -> list[str]:
    """A work, for people."""
    told = [f"{name}: {result.steps:,} steps"]
    if result.by_hand:
        told.append(f"  by hand      {', '.join(show_s(rival['seconds']) for rival in result.by_hand)}")
    if result.fit and result.ratios:
        mean, low, high = sum(result.ratios) / len(result.ratios), min(result.ratios), max(result.ratios)
        told.append(
            f"  fit          {show_s(result.fit['seconds'])}, {mean:.3f} [{low:.3f}, {high:.3f}] of by hand's speed"
        )
        theirs = ", ".join(f"{rival['held_out']:.4f}" for rival in result.by_hand)
        told.append(f"  held out     loss {result.fit['held_out']:.4f}, by hand {theirs}")
        told.append(f"  plan         {result.fit['plan']}")
        told += [f"  problem      {problem}" for problem in result.fit["problems"]]
    if result.own:
        step_s, batch_rate = result.own["step_s"], result.own["samples"] / result.own["train_s"]
        line = f"  user's plan  {show_seconds(step_s)}/step, {show_rate(batch_rate)} samples/s"
        if result.fit:
            whole_s = step_s * result.steps
            line += f": about {show_s(whole_s)}, so that fit is {whole_s / result.fit['seconds']:.1f}x as fast"
        told.append(line)
    if result.tuning_s is not None:
        told.append(f"  tuning cost  {show_seconds(result.tuning_s)}, as the ledger says")
    told += [f"  failed       {failure}" for failure in result.failures]
    return told + [f"    {line}" for line in table(Ledger.from_lines(result.ledger), 116)]


def show_s(seconds: float) -> str:
    """Seconds with a digit that a per cent of them shows in."""
    return f"{seconds:.2f} s"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75.0, help="that the rival trains")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="words in works' names")
    parser.add_argument("--large", action="store_true", help=f"{LARGE}, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--plain-seconds", type=float, default=5.0, help="of the user's own plan; 0 leaves it out")
    parser.add_argument("--drop-last", action="store_true", help="the user's loader leaves odd batches out, too")
    parser.add_argument(
        "--limit", type=float, help="seconds after which a training is stopped; else 4 times the rival's"
    )
    parser.add_argument("--once", action="store_true", help="the rival trains before hotlap only, not after it too")
    parser.add_argument("--threads", type=int, help="CPU threads; one has far less noise than all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", type=Path, nargs="+", metavar="FILE", help="look at files of results, run nothing")
    for name in ("--alone", "--work", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", default="auto", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.words = list(sys.argv[1:] if arguments is None else arguments)
    if options.limit is None:
        # Imports, random data and a slow tuning included; at the user's own pace some works would take an hour.
        options.limit = 4 * options.seconds + 120
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 1 where a training failed."""
    options = parsed(arguments)
    if options.alone:
        try:
            train_alone(options)
        except Exception as error:
            told = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            (Path(options.folder) / ERROR).write_text(told)
            raise
        return 0
    if options.check:
        return check(options.check)
    there = works()
    usual = [work for work in there if work not in NETWORKS and (options.large or work.name != LARGE)]
    wanted = called(usual, *options.only) or called(there, *options.only)
    if not wanted:
        _say(f"no work is called {', '.join(options.only)}; there are {'; '.join(work.name for work in there)}")
        return 2
    bench = Bench(options)
    bench.asked = [work.name for work in wanted]
    for number, work in enumerate(wanted):
        result = bench.run(work)
        if not number:
            known = ", ".join(f"{name} {version}" for name, version in versions().items())
            where = bench.machine or options.device
            print(f'whole runs on {where}, {known}; plan="{options.plan}", the rival trains {options.seconds:g} s')
        print("\n".join(lines(work.name, result)), flush=True)
    return 1 if any(result.failures for result in bench.results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
