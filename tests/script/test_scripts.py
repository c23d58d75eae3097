"""Scripts written as people write them, with hotlap and without: the same output, the same files, the same exit code.

Every script runs three times, two at a time: by python alone, under a plan that changes nothing but the feed, which
has to be equal to the last bit, and tuned, which has to be equal within the band of `CLOSE`. But for `FRESH` they run
in forks of a process that has loaded torch, and libraries where they are written for one.
"""

import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from preloaded import Preloaded

from hotlap.core.plan import Feed, Plan
from hotlap.core.table import rows
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder

SCRIPTS = Path(__file__).parents[1] / "scripts"
PATHS = os.pathsep.join(map(str, (SCRIPTS, SCRIPTS.parent / "support")))
NAMES = [*sorted(path.name for path in SCRIPTS.glob("*.py")), "module_pkg"]
NEEDS = {"hf_trainer.py": "transformers", "lightning_fit.py": "lightning", "accelerate_loop.py": "accelerate"}
PRELOADED = {
    "accelerate_loop.py": "transformers.trainer", "hf_trainer.py": "transformers.trainer",
    "lightning_fit.py": "lightning",
}  # fmt: skip
"""What takes long to be imported, by the scripts that do; accelerate is imported by the Trainer."""
FRESH = ("plain_loop.py", "tuned")
"""The run in a process of its own from the start, by the clock of this machine."""
KEEPS = (
    "accelerate_loop.py", "accumulation.py", "amp_scaler_clip.py", "argparse_exit.py", "data_parallel.py",
    "lightning_fit.py", "module_pkg", "torch_hub_style.py", "two_loaders.py", "two_optimizers.py",
)  # fmt: skip
"""Scripts whose batches are fetched sample by sample, in epochs that hold laps: there a move has to be kept."""
OWN_FEED = {
    "augmented_images.py": "draws from", "evaluates_and_saves.py": "cannot be a column",
    "hf_trainer.py": "collate", "rnn_lengths.py": "collate",
}  # fmt: skip
"""Scripts whose batches cannot be indexed as a whole, and a word of the reason."""
CLOSE = 0.35
"""How far a printed figure may be off, as a fraction, or in absolute terms below 1, after hundreds of steps of which
some were made with a fused optimizer or in bf16. Losses of single batches are among them."""
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
TIMES = re.compile(r"\d+\.\d+ ?s\b|'\w*(?:runtime|per_second)': '?[\d.e+-]+'?")
NOISE = re.compile(r"'grad_norm': '?[\d.e+-]+'?")
"""What differs from one batch to the next by more than any band."""
CHOICE = re.compile(r" \*saved\*|(?<=\(epoch )\d+|(?<=Best epoch )\d+")
"""What hangs on which of two figures is the higher, however little they differ."""
STOPS_EARLY = {"trainer_class.py": "Early stopping"}
"""Scripts that choose so when to stop, and how the line begins that says it."""
MADE_UP = (
    "import pytest; from made_up_time import make_up_time; from hotlap.cli import main; from hotlap.tuner import laps; "
    "import hotlap.tuner.trials as trials; from random import Random; trials.Random = lambda: Random(0); "
    "make_up_time(pytest.MonkeyPatch()); laps.LAP_S = 0.005; main()"
)
"""The tuner times seconds that are made up, in which to fetch samples one by one is slow: what it keeps hangs on no
machine. Short laps for short scripts: there is no room for many of the usual length."""


@dataclass
class Outcome:
    code: int
    lines: list
    files: dict
    said: str


class Pythons:
    """Run scripts."""

    def __init__(self):
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "COLUMNS": "120"}
        self._environment |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        self._environment.pop("HOTLAP_PLAN", None)
        self._preloaded = {}
        if torch.cuda.is_available():
            return  # libraries may have asked for the GPU by the time they are imported: no fork could use it
        libraries = sorted({PRELOADED[name] for name in PRELOADED if is_there(name)})
        for more in [[], libraries] if libraries else [[]]:
            digits = ["sklearn.datasets"] if importlib.util.find_spec("sklearn") else []
            modules = ["pytest", "made_up_time", "hotlap.cli", "hotlap.script.session", "torch._dynamo", *digits, *more]
            self._preloaded[bool(more)] = Preloaded(*modules, environment=self._environment)

    def __call__(self, name, folder, *options, fresh=False):
        """One run of a script in a folder of its own, by python with these options before its name."""
        work = folder / "work"
        work.mkdir(parents=True)
        target = ["-m", "module_pkg.train"] if name == "module_pkg" else [str(SCRIPTS / name)]
        own = {"HOTLAP_CACHE": str(folder / "cache")}
        if self._preloaded and not fresh:
            done = self._preloaded[name in PRELOADED].run(*options, *target, cwd=work, **own)
        else:
            done = subprocess.run(
                [sys.executable, *map(str, options), *target], capture_output=True, text=True, cwd=work,
                env=self._environment | own, timeout=600,
            )  # fmt: skip
        files = {str(path.relative_to(work)): path for path in sorted(work.rglob("*")) if path.is_file()}
        return Outcome(done.returncode, done.stdout.splitlines(), files, done.stderr)

    def close(self):
        for one in self._preloaded.values():
            one.close()


def is_there(name):
    """Whether the library of a script is."""
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


class Runs:
    """Runs of all scripts, two at a time, begun as soon as one is asked for."""

    def __init__(self, folder):
        self._folder = folder
        self._pool = ThreadPoolExecutor(2)
        self._ran = Pythons()
        plan = folder / "gather.toml"
        save_plan(Plan(feed=Feed(kind="gather")), plan)
        self._begun = {}
        for name, kind in itertools.product(filter(is_there, NAMES), ("alone", "fed", "tuned")):
            own, fresh = folder / f"{name}-{kind}", (name, kind) == FRESH
            tuned = ("-m", "hotlap") if fresh else ("-c", MADE_UP)
            options = {
                "alone": (),
                "fed": ("-m", "hotlap", "run", "--plan", plan, "--out", own / "run"),
                "tuned": (*tuned, "run", "--tune-seconds", "5", "--out", own / "run"),
            }
            self._begun[name, kind] = self._pool.submit(self._ran, name, own, *options[kind], fresh=fresh)

    def __call__(self, name, kind):
        if (name, kind) not in self._begun:
            pytest.skip(f"{NEEDS[name]} is not installed")
        return self._begun[name, kind].result()

    def ledger(self, name, kind):
        return RunFolder.open(self._folder / f"{name}-{kind}" / "run").read_ledger()

    def keeps(self, name):
        """The moves that tuning keeps."""
        self(name, "tuned")
        return [row.what for row in rows(self.ledger(name, "tuned")) if row.outcome == "kept"]

    def close(self):
        self._pool.shutdown(cancel_futures=True)
        self._ran.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found = Runs(tmp_path_factory.mktemp("scripts"))
    yield found
    found.close()


def without_times(lines):
    return [TIMES.sub("TIME", line) for line in lines]


def comparable(name, lines):
    """The shape of each printed line and the figures in it, without what no two runs have in common."""
    stop = STOPS_EARLY.get(name)
    lines = [line for line in without_times(lines) if stop is None or not line.startswith(stop)]
    lines = [CHOICE.sub("", NOISE.sub("NOISE", line)) for line in lines]
    return [(NUMBER.sub("#", line), [float(figure) for figure in NUMBER.findall(line)]) for line in lines]


def of_shape(lines, shape):
    return [line for line in lines if line[0] == shape]


def tensors_in(value, path=""):
    if isinstance(value, torch.Tensor):
        yield path, value.double() if value.is_floating_point() else value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors_in(one, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from tensors_in(one, f"{path}.{number}")
    else:
        yield path, value


def loaded(path):
    if path.suffix in (".pt", ".pth"):
        return dict(tensors_in(torch.load(path, weights_only=True)))
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return None


def is_close(one, other):
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_where_only_the_feed_changes_all_is_equal_to_the_last_bit(runs, name):
    alone, fed = runs(name, "alone"), runs(name, "fed")
    assert (fed.code, without_times(fed.lines)) == (alone.code, without_times(alone.lines)), fed.said
    assert fed.files.keys() == alone.files.keys()
    for file, path in alone.files.items():
        mine, theirs = loaded(path), loaded(fed.files[file])
        if mine is None:
            assert path.read_bytes() == fed.files[file].read_bytes(), file
            continue
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            same = torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]
            assert same, f"{file} {key}"
    if name in OWN_FEED:
        assert OWN_FEED[name] in fed.said, fed.said
    else:
        kinds = {entry.plan.feed.kind for entry in runs.ledger(name, "fed")}
        assert "gather" in kinds, fed.said


@pytest.mark.parametrize("name", NAMES)
def test_a_tuned_script_prints_and_writes_the_same_within_the_band(runs, name):
    alone, tuned = runs(name, "alone"), runs(name, "tuned")
    assert tuned.code == alone.code, tuned.said
    assert "hotlap failed" not in tuned.said
    mine, theirs = comparable(name, alone.lines), comparable(name, tuned.lines)
    if name in STOPS_EARLY:
        assert {shape for shape, _ in mine} == {shape for shape, _ in theirs}
        pairs = [
            zip(of_shape(mine, shape), of_shape(theirs, shape), strict=False) for shape in {one for one, _ in mine}
        ]
    else:
        assert [shape for shape, _ in mine] == [shape for shape, _ in theirs]
        pairs = [zip(mine, theirs, strict=True)]
    for (shape, one), (_, other) in itertools.chain(*pairs):
        assert all(map(is_close, one, other)), f"{shape}: {one} {other}"
    assert tuned.files.keys() == alone.files.keys()
    for file, path in alone.files.items():
        kept = loaded(path)
        if kept is not None:
            found = loaded(tuned.files[file])
            assert [(k, getattr(v, "shape", None)) for k, v in kept.items()] == [
                (k, getattr(v, "shape", None)) for k, v in found.items()
            ]


@pytest.mark.parametrize("name", KEEPS)
def test_a_script_whose_batches_can_be_indexed_keeps_a_move(runs, name):
    assert runs.keeps(name), runs(name, "tuned").said


def test_nothing_inside_hotlap_went_wrong(runs):
    faults = {}
    for name in filter(is_there, NAMES):
        for kind in ("fed", "tuned"):
            said = [line for line in runs(name, kind).said.splitlines() if "hotlap failed" in line]
            if said:
                faults[name, kind] = said
    assert faults == {}, json.dumps({str(key): value for key, value in faults.items()}, indent=1)
