"""Two recipes from command to predictions, against the loop of the guides for the same models and data.

    python -m benchmarks.recipes [--only temporal|text] [--epochs N] [--rival-steps 1000] [--band] [--json FILE]

temporal: LSTM, Transformer and MLP on 76,792 windows of 20 bars, batch 256, 50 epochs. The bars are simulated: 24,344
of each of 4 symbols, of which the last fifth is held out. A bar has the 38 features that the recipe makes, not 29 as in
the training whose size this is. text: an encoder of the shape of RoBERTa-base from scratch, on 24,048 texts of 8 words
in the median, 17 % of them positive, at most 192 tokens, batch 16, 3 epochs. The tokenizer is made from the texts and
has some 34 thousand tokens, where RoBERTa has 50 thousand. Without `transformers` this part fails, and says so.

For each, in a process of its own:
- the guides' loop (`benchmarks/recipe_rivals.py`) for `--rival-steps` of each model and one evaluation, as the guides
  end (fp16, encoders with activations computed again), and in settings before that. What it would take for as many
  steps and evaluations as hotlap made is extrapolated from that, and nothing else is counted: no start, reading,
  features or predictions. The ratio is to the loop as the guides end; beside it that to the fastest of its settings.
  0 leaves it out;
- `hotlap train … --test …` with an empty cache: the time of the whole process, from the command to the predictions.
  Its patience is as long as the training, so that no model stops early; steps are those that were made;
- the same command again, with the cache that it left;
- with `--band`, each model under `--plan off` (eager, fp32) and under the plan that tuning ended with, with seeds 0, 1
  and 2 each (or `--band-seeds`), for `--band-epochs`, all of it at once since nothing is timed by then: whether the
  tuned ones score in the mean between the lowest and the highest of the others, and how the means differ, with an
  interval of 95 %; by the epoch that is best by macro-F1, and by the later half of all epochs, since which one is best
  is chance. One tuned run would not do: by chance alone one of four is the highest or the lowest half of the time.
  Processes take turns on a GPU, and nine of temporal had not ended after six minutes on one H200; with CUDA's MPS
  (`nvidia-cuda-mps-control -d` before), which lets them run beside each other, eighteen took 4 min 11 s.

Results are written after every process, as far as they are there. One that fails says why and the others go on; the
exit code is then 1. A ratio that is not reached is said, and is no failure. On one H200, for calls of 10 minutes:

    python -m benchmarks.recipes --only temporal --json temporal.json
    python -m benchmarks.recipes --only temporal --rival-steps 0 --band --json temporal-band.json
    python -m benchmarks.recipes --only text --json text.json
    python -m benchmarks.recipes --only text --rival-steps 0 --band --json text-band.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.recipe_files import SYMBOLS, bars_file, texts_file
from benchmarks.recipe_results import LATE, METRICS, Ran, Result, banded, late, lines
from benchmarks.versions import versions
from hotlap.core.table import as_json, table
from hotlap.core.units import show_seconds
from hotlap.store.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
UNSET = ("HOTLAP_PLAN", "PYTHONDONTWRITEBYTECODE")
CACHES = ("HOTLAP_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
SEEDS = (0, 1, 2)
BARS = 24_344
"""Bars of each symbol: of so many, 76,792 windows are trained on."""
TEXTS, HELD_OUT = 24_048, 6_012
ROBERTA_BASE = {
    "model_type": "roberta",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
VOCABULARY = 50_265


class FailedError(Exception):
    """A process that did not do what it should; the message says why, in a line."""


# --- the recipes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """A recipe, and what is asked of it on one H200."""

    name: str
    epochs: int
    wanted: float
    """How many times as fast as the guides' loop."""
    words: Callable[[argparse.Namespace, Path], list[str]]
    """Writes the files into a folder, and gives the words of the command but for epochs, plan and seed."""


def temporal_words(options: argparse.Namespace, folder: Path) -> list[str]:
    """Bars to train on, a fifth as many to predict."""
    train = bars_file(folder / "bars.csv", options.bars, seed=0)
    test = bars_file(folder / "test.csv", max(options.bars // 5, 500), seed=1)
    return ["--data", str(train), "--test", str(test), "--models", options.models, "--batch-size", "256"]


def text_words(options: argparse.Namespace, folder: Path) -> list[str]:
    """Texts to train on, to judge by and to predict. Held out by a file: all seeds are judged by the same."""
    if importlib.util.find_spec("transformers") is None:
        raise FailedError("transformers is not installed: pip install '.[text]' in a clone of hotlap")
    config = options.config
    if config is None:
        config = folder / "config.json"
        config.write_text(json.dumps(ROBERTA_BASE))
    held = max(options.texts * HELD_OUT // TEXTS, 50)
    files = {
        "--data": texts_file(folder / "texts.csv", options.texts, seed=0),
        "--valid": texts_file(folder / "valid.csv", held, seed=1),
        "--test": texts_file(folder / "test.csv", held, seed=2, labels=False),
        "--config": config,
    }
    words = [str(word) for pair in files.items() for word in pair]
    words += ["--text", "text", "--target", "label", "--batch-size", "16", "--most", "192"]
    return [*words, "--lr", str(options.lr), "--vocabulary", str(VOCABULARY)]


PARTS = (
    Part(name="temporal", epochs=50, wanted=8.0, words=temporal_words),
    Part(name="text", epochs=3, wanted=6.0, words=text_words),
)


# --- a process -----------------------------------------------------------------------------------------


def started(command: Sequence[str], variables: Mapping[str, str], folder: Path, limit: float) -> list[str]:
    """Run a command in a folder; what it said on stderr. FailedError with its last words where it failed."""
    given = {name: value for name, value in os.environ.items() if name not in UNSET}
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**given, **variables, "PYTHONPATH": os.pathsep.join(paths)},
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"stopped after {show_seconds(limit)} (--limit)") from None
    said = done.stderr.splitlines()
    if done.returncode:
        last = next((line for line in reversed(said) if line.strip()), "it said nothing")
        raise FailedError(f"exit code {done.returncode}: {last}")
    return said


def trained(command: Sequence[str], out: Path, variables: Mapping[str, str], limit: float) -> Ran:
    """Run `hotlap train` from start to exit, and read what it left."""
    begun = time.perf_counter()
    said = started(["-m", "hotlap", "train", *command, "--out", str(out)], variables, out.parent, limit)
    seconds = time.perf_counter() - begun
    if not (out / "predictions.csv").is_file():
        raise FailedError(f"there are no predictions in {out}")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    models = {name: _model(out / "models" / name, scores) for name, scores in report["models"].items()}
    machine = next((found[1] for line in said if (found := re.match(r"hotlap \S+ on (.*), torch", line))), "")
    return Ran(seconds=seconds, machine=machine, models=models, said=said)


def _model(folder: Path, scores: Mapping[str, Any]) -> dict[str, Any]:
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    run = RunFolder.open(folder)
    ledger = run.read_ledger()
    return {
        "training_samples": record["facts"]["identity"]["data"]["samples"],
        **{name: record["ended"][name] for name in ("steps", "stopped", "train_s")},
        **{name: scores[name] for name in (*METRICS, "from_cache")},
        **late(run.read_metrics()),
        "plan": str(run.read_plan()),
        "tuning": as_json(ledger),
        "table": table(ledger, 112),
    }


# --- all of it -----------------------------------------------------------------------------------------


class Bench:
    """Starts one process after the other, and goes on where one fails."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begun = time.perf_counter()
        self.results: dict[str, Result] = {}

    @property
    def machine(self) -> str:
        """What was trained on, as hotlap says."""
        return next((one.cold.machine for one in self.results.values() if one.cold), self._options.device)

    def run(self, part: Part, folder: Path) -> Result:
        """The guides' loop, the command, the command again, and the band."""
        options = self._options
        result = self.results[part.name] = Result(epochs=options.epochs or part.epochs, wanted=part.wanted)
        words: list[str] = []

        def make() -> None:
            words.extend([part.name, *part.words(options, folder), "--device", options.device])
            result.rows = {file.name: _rows(file) for file in sorted(folder.glob("*.csv"))}

        if not self._done(part, result, "data", make):
            return result
        command = [*words, *_lasting(result.epochs), "--plan", options.plan]

        def rival() -> None:
            answer = folder / "rival.json"
            asked = ["-m", "benchmarks.recipe_rivals", "--steps", str(options.rival_steps), "--answer", str(answer)]
            # A cache of its own: hotlap is to find nothing made.
            variables = {**self._variables(folder, "rival"), "TOKENIZERS_PARALLELISM": "false"}
            started([*asked, *command], variables, folder, options.limit)
            result.rival = json.loads(answer.read_text())

        def cold() -> None:
            result.cold = self._trained(command, folder, "cold")

        def again() -> None:
            result.again = self._trained(command, folder, "again")
            if anew := [name for name, model in result.again.models.items() if not model["from_cache"]]:
                raise FailedError(f"{', '.join(anew)} trained once more, not read from the cache")

        if options.rival_steps:
            self._done(part, result, "the guides' loop", rival)
        if self._done(part, result, "hotlap train", cold):
            self._done(part, result, "hotlap train again", again)
        if options.band:
            self._done(part, result, "band", lambda: self._band(words, result, folder))
        return result

    def write(self) -> None:
        """The file, as far as results are there."""
        if self._options.json is None:
            return
        report = {
            "machine": self.machine,
            "versions": versions(),
            "settings": {name: _plain(value) for name, value in vars(self._options).items()},
            "seconds": time.perf_counter() - self._begun,
            "recipes": {name: result.to_dict() for name, result in self.results.items()},
        }
        self._options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _done(self, part: Part, result: Result, what: str, do: Callable[[], None]) -> bool:
        """Whether it could be done; where not, the result says why."""
        _say(f"{part.name}: {what} …")
        begun = time.perf_counter()
        try:
            do()
        except FailedError as error:
            result.failures.append(f"{what}: {error}")
        except Exception as error:  # whatever it was, the other recipe is still wanted
            result.failures.append(f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        else:
            _say(f"{part.name}: {what} took {show_seconds(time.perf_counter() - begun)}")
            self.write()
            return True
        _say(f"{part.name}: {result.failures[-1]}")
        self.write()
        return False

    def _band(self, words: Sequence[str], result: Result, folder: Path) -> None:
        if result.cold is None:
            raise FailedError("there is no tuned plan")
        epochs, names = self._options.band_epochs or result.epochs, list(result.cold.models)
        seeds = list(self._options.band_seeds)

        def one(name: str, seed: int, kind: str) -> dict[str, Any] | FailedError:
            plan = "off" if kind == "eager" else str(folder / "cold" / "models" / name / "plan.toml")
            asked = [*alone(words, name), *_lasting(epochs), "--retrain", "--plan", plan, "--seed", str(seed)]
            try:
                return self._trained(asked, folder, f"{kind}-{name}-{seed}").models[name]
            except FailedError as error:
                return error

        asked = list(product(names, seeds, ("eager", "tuned")))
        with ThreadPoolExecutor(len(asked)) as pool:  # at once: it is scores that are asked for, not times
            ran = dict(zip(asked, pool.map(one, *zip(*asked, strict=True)), strict=True))
        failed = {key: one for key, one in ran.items() if isinstance(one, FailedError)}
        scores = {key: one for key, one in ran.items() if not isinstance(one, FailedError)}
        whole = [name for name in names if not any(name == key[0] for key in failed)]
        result.band = {
            "epochs": epochs,
            "seeds": seeds,
            "models": {
                name: {
                    metric: banded(
                        *([scores[name, seed, kind][metric] for seed in seeds] for kind in ("eager", "tuned"))
                    )
                    for metric in (*METRICS, *LATE)
                }
                for name in whole
            },
        }
        if failed:
            raise FailedError(f"{len(failed)} of {len(ran)} trainings: {next(iter(failed.values()))}")

    def _trained(self, command: Sequence[str], folder: Path, name: str) -> Ran:
        return trained(command, folder / name, self._variables(folder, "hotlap"), self._options.limit)

    def _variables(self, folder: Path, whose: str) -> dict[str, str]:
        # The rival goes first, so that torch's bytecode is at hand for hotlap, as it is on a machine in use.
        caches = {name: str(folder / f"{whose}-{name.lower()}") for name in CACHES}
        return {**caches, "PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode")}


def alone(command: Sequence[str], name: str) -> list[str]:
    """The command for one of its models: first weights and order are the same for it as beside others."""
    if "--models" not in command:
        return list(command)
    place = command.index("--models") + 1
    return [*command[:place], name, *command[place + 1 :]]


def _lasting(epochs: int) -> list[str]:
    """So many epochs, none of them left out."""
    return ["--epochs", str(epochs), "--patience", str(epochs)]


def _rows(file: Path) -> int:
    with file.open(encoding="utf-8") as lines:
        return sum(1 for _ in lines) - 1


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="RECIPE")
    parser.add_argument("--epochs", type=int, help="of both; else 50 and 3")
    parser.add_argument("--rival-steps", type=int, default=1000, help="of the guides' loop; 0 leaves it out")
    parser.add_argument(
        "--band", action="store_true", help="some seeds without tuning and as many with the tuned plan, too"
    )
    parser.add_argument(
        "--band-seeds", type=int, nargs="+", default=SEEDS, help="of the band, two at least; else 0 1 2"
    )
    parser.add_argument("--band-epochs", type=int, help="of the band; else as many as of the rest")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--plan", default="auto", help="of hotlap: auto, off or max")
    parser.add_argument("--bars", type=int, default=BARS, help=f"of each of {SYMBOLS} symbols")
    parser.add_argument("--models", default="lstm,transformer,mlp", help="of temporal")
    parser.add_argument("--texts", type=int, default=TEXTS, help="to train on")
    parser.add_argument("--config", type=Path, help="the config.json of another encoder than RoBERTa-base")
    parser.add_argument("--lr", type=float, default=5e-5, help="of text")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds after which a process is stopped")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if len(set(options.band_seeds)) < 2:
        parser.error("--band-seeds: two different ones at least, since one has no spread")
    if options.config is not None:
        options.config = options.config.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 1 where a part failed."""
    options = parsed(arguments)
    bench = Bench(options)
    wanted = [part for part in PARTS if not options.only or part.name in options.only]
    with tempfile.TemporaryDirectory(prefix="hotlap-recipes-", ignore_cleanup_errors=True) as folder:
        for number, part in enumerate(wanted):
            own = Path(folder) / part.name
            own.mkdir()
            result = bench.run(part, own)
            if not number:
                known = ", ".join(f"{name} {version}" for name, version in versions().items())
                print(f'recipes on {bench.machine}, {known}; plan="{options.plan}"')
            print("\n".join(lines(part.name, result)), flush=True)
    bench.write()
    return int(any(result.failures for result in bench.results.values()))


if __name__ == "__main__":
    sys.exit(main())
