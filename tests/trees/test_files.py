"""Features in files that are larger than memory: the trees of the same data in memory."""

import gc

import numpy as np
import pytest

from hotlap import trees
from hotlap.core.errors import JobError
from hotlap.trees import files

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(900, 5)).astype(np.float32)
X[RANDOM.random(X.shape) < 0.05] = np.nan
Y = np.nan_to_num(X) @ RANDOM.normal(size=(5, 3))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(files, "PAGE", 600)


def parts_in(folder, kind):
    if kind == "memmap":
        table = np.memmap(folder / "x", np.float32, "w+", shape=X.shape)
        table[:] = X
        return table
    names = [folder / f"{at}.{kind}" for at in (0, 1)]
    for name, rows in zip(names, (X[:500], X[500:]), strict=True):
        if kind == "npy":
            np.save(name, rows)
        else:
            arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            columns = {f"c{at}": arrow.array(rows[:, at], from_pandas=True) for at in range(5)}  # NaN is null
            parquet.write_table(arrow.table(columns), name)
    return names


def fitted(folder, x, **given):
    job = trees.TreeJob(x, Y, rounds=6, **{"params": {"max_depth": 4, "max_bin": 64}, **given})
    return trees.fit(job, plan=given.pop("plan", {"threads": 2}), out=folder, progress=False)


@pytest.fixture
def uncollected():
    """Inside, Python collects no garbage: what is let go of goes at once, or stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ["npy", "parquet", "memmap"])
def test_features_in_files_give_the_trees_of_features_in_memory(kind, tmp_path, uncollected):
    x = trees.TreeFiles(parts_in(tmp_path, kind), scratch=tmp_path)
    for name, given in {
        "plain": {},
        "weighted": {"weight": np.arange(900.0)},
        "drawn": {"params": {"subsample": 0.5}},
    }.items():
        run, whole = fitted(tmp_path / f"{name} run", x, **given), fitted(tmp_path / f"{name} whole", X, **given)
        assert [f.sha256 for f in run.model.record.boosters] == [f.sha256 for f in whole.model.record.boosters]
        assert np.array_equal(run.predict(x), whole.predict(X))
    del run
    assert not list(tmp_path.glob("hotlap-*")), "quantised values go when nothing trains on them"


KILLED = """
import os, signal, sys
from hotlap import trees

matrix = trees.TreeFiles(sys.argv[1:], scratch=".").quantised(None, None, {"max_bin": 16})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_quantised_values_of_a_killed_process_go_with_the_next_training(tmp_path, forks):
    parts = parts_in(tmp_path, "npy")
    x = trees.TreeFiles(parts, scratch=tmp_path)
    ours = x.quantised(None, None, {"max_bin": 16})
    mine = set(tmp_path.glob("hotlap-*"))
    assert forks.run("-c", KILLED, *parts, cwd=tmp_path, timeout_s=120).returncode == -9
    assert len(set(tmp_path.glob("hotlap-*")) - mine) == 1
    more = x.quantised(None, None, {"max_bin": 16})
    assert len(set(tmp_path.glob("hotlap-*"))) == 2
    assert mine < set(tmp_path.glob("hotlap-*")), "those in use stay"
    del ours, more
    assert not list(tmp_path.glob("hotlap-*"))


def test_rounds_are_judged_on_files_and_on_arrays_alike(tmp_path):
    x, answers = trees.TreeFiles(parts_in(tmp_path, "npy"), scratch=tmp_path), (X[:200], Y[:200])
    runs = [fitted(tmp_path / "array", x, valid=answers), fitted(tmp_path / "whole", X, valid=answers)]
    assert runs[0].history == runs[1].history
    runs = [fitted(tmp_path / "files", x, valid=(x, Y)), fitted(tmp_path / "own", X, valid=(X, Y))]
    assert runs[0].history == runs[1].history


def test_the_cache_knows_files_by_what_they_hold(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    parts = parts_in(tmp_path, "npy")
    outcomes = []
    for number in range(3):
        if number == 2:
            np.save(parts[1], X[500:] + 1)
        job = trees.TreeJob(trees.TreeFiles(parts, scratch=tmp_path), Y, rounds=2)
        outcomes.append(trees.fit(job, out=tmp_path / str(number), plan="off", reuse=True, progress=False).stopped)
    assert outcomes == ["all rounds", "loaded from the cache", "all rounds"]


def test_files_that_will_not_do_are_refused(tmp_path):
    np.save(tmp_path / "wide.npy", np.zeros((3, 7)))
    np.save(tmp_path / "far.npy", np.full((3, 5), np.inf))
    np.save(tmp_path / "texts.npy", np.array([["a"]]))
    (tmp_path / "x.csv").write_text("1,2\n")
    good = parts_in(tmp_path, "npy")
    mistakes = {
        "wide.npy": "7 columns and the first one 5",
        "far.npy": "infinite values, the first in row 900",
        "none.npy": "No such file",
        "texts.npy": "rows × columns of numbers",
        "x.csv": "neither .npy nor .parquet",
    }
    for more, why in mistakes.items():
        with pytest.raises(JobError, match=why):
            trees.TreeFiles([*good, tmp_path / more])
    np.save(tmp_path / "empty.npy", np.zeros((0, 5)))
    with pytest.raises(JobError, match="hold no rows"):
        trees.TreeFiles([tmp_path / "empty.npy"])
    x = trees.TreeFiles(good)
    with pytest.raises(JobError, match=r"give LightGBM a np\.memmap"):
        trees.TreeJob(x, Y, library="lightgbm")
    with pytest.raises(JobError, match="'exact' cannot read TreeFiles"):
        trees.TreeJob(x, Y, params={"tree_method": "exact"})
    with pytest.raises(JobError, match="not shared over jobs"):
        trees.TreeData(x)


LIMITED = """
import resource, sys
import numpy as np
from hotlap import trees
from hotlap.trees import files

files.PAGE = 2**19
parts, in_memory = sys.argv[1:-1], sys.argv[-1] == "memory"
y = np.arange(250_000) % 97
small = trees.TreeJob(np.zeros((50, 2)) + np.arange(50)[:, None], np.arange(50), rounds=2)
trees.fit(small, plan={"threads": 1}, out="small " + sys.argv[-1], progress=False)
held = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) * 1024
size = 250_000 * 100 * 4
resource.setrlimit(resource.RLIMIT_DATA, (held + size * 8 // 10,) * 2)
params = {"max_depth": 3, "max_bin": 32}
x = np.concatenate([np.load(part) for part in parts]) if in_memory else trees.TreeFiles(parts, scratch=".")
job = trees.TreeJob(x, y, rounds=3, params=params)
run = trees.fit(job, plan={"threads": 1}, out="run " + sys.argv[-1], progress=False)
print(run.predict(x).shape)
"""


def test_training_takes_less_memory_than_the_features(tmp_path, forks):
    parts = [tmp_path / f"{at}.npy" for at in range(4)]
    for part in parts:
        np.save(part, RANDOM.random((62_500, 100), dtype=np.float32))
    done = forks.run("-c", LIMITED, *parts, "files", cwd=tmp_path, timeout_s=120)
    assert done.stdout == "(250000,)\n", done.stderr
    failed = forks.run("-c", LIMITED, *parts, "memory", cwd=tmp_path, timeout_s=120)
    assert failed.returncode == 1
    assert "MemoryError" in failed.stderr or "bad_alloc" in failed.stderr
