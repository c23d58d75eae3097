"""TreeData: quantised once, shared by folds, trials, one fit after the other, and fits at the same time."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import lightgbm
import numpy as np
import pytest
import xgboost

from hotlap import trees
from hotlap.core.errors import JobError

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(300, 5)).astype(np.float32)
Y = X @ RANDOM.normal(size=(5, 3))
EVEN, ODD = np.arange(0, 300, 2), np.arange(1, 300, 2)
BOTH = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])


def answers(job, folder, plan=None):
    return trees.fit(job, plan=plan or {"threads": 1}, out=folder, progress=False).predict(X)


@BOTH
def test_shared_features_give_the_trees_that_an_array_gives(library, tmp_path):
    shared = trees.TreeData(X, library=library)
    for seed in (0, 4):
        given = {"library": library, "rounds": 5, "seed": seed, "params": {"max_depth": 3}}
        alone = answers(trees.TreeJob(X, Y, **given), tmp_path / f"alone{seed}")
        assert np.array_equal(answers(trees.TreeJob(shared, Y, **given), tmp_path / f"shared{seed}"), alone)
        at_once = answers(trees.TreeJob(shared, Y, **given), tmp_path / f"at once{seed}", {"threads": 1, "at_once": 3})
        assert np.array_equal(at_once, alone)


@BOTH
def test_a_fold_has_the_bins_of_the_whole_table(library, tmp_path):
    shared = trees.TreeData(X, library=library, params={"max_bin": 16})
    fold, rest = shared.rows(EVEN), shared.rows(ODD)
    job = trees.TreeJob(fold, Y[EVEN, 0], valid=(rest, Y[ODD, 0]), library=library, rounds=5, params={"max_depth": 3})
    run = trees.fit(job, plan={"threads": 1}, out=tmp_path / "run", progress=False)
    if library == "xgboost":
        whole = xgboost.QuantileDMatrix(X, max_bin=16, nthread=1)
        train = xgboost.QuantileDMatrix(X[EVEN], label=Y[EVEN, 0], ref=whole, max_bin=16, nthread=1)
        own = xgboost.train({"max_depth": 3, "max_bin": 16, "nthread": 1}, train, 5).inplace_predict(X)
    else:
        settings = {"max_bin": 16, "verbosity": -1, "num_threads": 1, "max_depth": 3}
        whole = lightgbm.Dataset(X, label=Y[:, 0].copy(), params=settings).construct()
        own = lightgbm.train(settings, whole.subset(EVEN.tolist()), 5).predict(X)
    assert np.array_equal(run.predict(X), own)
    error = np.sqrt(np.mean((run.predict(X)[ODD] - Y[ODD, 0]) ** 2))
    (score,) = (value for name, value in run.best.items() if name != "round")
    assert score == pytest.approx(error if library == "xgboost" else error**2, rel=1e-5)


@BOTH
def test_features_are_quantised_once_for_all_trials_and_folds(library, tmp_path, monkeypatch):
    made = []
    if library == "xgboost":
        real = xgboost.QuantileDMatrix
        monkeypatch.setattr(
            xgboost, "QuantileDMatrix", lambda *a, **k: (made.append(k.get("ref") is None), real(*a, **k))[1]
        )
    else:
        real = lightgbm.Dataset
        monkeypatch.setattr(lightgbm, "Dataset", lambda *a, **k: (made.append(len(a[0]) > 2), real(*a, **k))[1])
    shared = trees.TreeData(X, library=library)
    fold, rest = shared.rows(EVEN), shared.rows(ODD)
    for number, rate in enumerate((0.1, 0.2, 0.3)):
        for data, y in ((shared, Y), (fold, Y[EVEN]), (rest, Y[ODD])):
            job = trees.TreeJob(data, y, library=library, rounds=2, params={"learning_rate": rate})
            answers(job, tmp_path / f"{number} {data.x[0, 0]} {len(data)}")
    assert sum(made) == 1


@BOTH
def test_fits_at_the_same_time_do_not_share_labels(library, tmp_path):
    shared = trees.TreeData(X, library=library)
    jobs = [trees.TreeJob(shared, Y[:, n], library=library, rounds=60, params={"max_depth": 3}) for n in range(3)]
    alone = [answers(job, tmp_path / f"alone{number}") for number, job in enumerate(jobs)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(answers, jobs, [tmp_path / f"together{number}" for number in range(3)]))
    for number in range(3):
        assert np.array_equal(together[number], alone[number])


@BOTH
def test_weights_of_one_job_do_not_reach_the_next(library, tmp_path):
    shared, weight = trees.TreeData(X, library=library), np.arange(300.0)
    given = {"library": library, "rounds": 3}
    before = answers(trees.TreeJob(shared, Y, **given), tmp_path / "before")
    weighted = answers(trees.TreeJob(shared, Y, weight=weight, **given), tmp_path / "weighted")
    after = answers(trees.TreeJob(shared, Y, **given), tmp_path / "after")
    assert np.array_equal(before, after)
    assert not np.array_equal(before, weighted)


def test_what_shared_features_decide_is_refused_in_a_job():
    shared = trees.TreeData(X, library="lightgbm", params={"max_bins": 31})
    with pytest.raises(JobError, match=r"write TreeData\(x, params=\{'max_bin': 15\}\)"):
        trees.TreeJob(shared, Y, library="lightgbm", params={"max_bin": 15})
    with pytest.raises(JobError, match="x is TreeData of lightgbm and the job is for 'xgboost'"):
        trees.TreeJob(shared, Y)
    with pytest.raises(JobError, match="take both with rows"):
        trees.TreeJob(shared, Y, library="lightgbm", valid=(trees.TreeData(X, library="lightgbm"), Y))
    with pytest.raises(JobError, match="takes no quantised data"):
        trees.TreeJob(trees.TreeData(X), Y, params={"tree_method": "exact"})
    with pytest.raises(JobError, match="parameters of bins, not 'max_depth'"):
        trees.TreeData(X, params={"max_depth": 3})


@pytest.mark.parametrize("rows", [[], [3, 2], [1, 1], [-1, 2], [0, 300], [0.5], np.ones(7, bool), np.ones((2, 2))])
def test_rows_that_are_not_in_rising_order_are_refused(rows):
    with pytest.raises(JobError, match="in rising order, or a mask of all rows"):
        trees.TreeData(X).rows(rows)


def test_rows_of_rows_are_rows_of_the_whole_table():
    shared = trees.TreeData(X)
    part = shared.rows(np.arange(300) >= 100).rows([0, 5])
    assert part.numbers.tolist() == [100, 105]
    assert part.whole is shared
    assert np.array_equal(part.x, X[[100, 105]])


@BOTH
def test_features_in_a_file_are_read_in_pieces_and_never_held(library, tmp_path, monkeypatch):
    monkeypatch.setattr(trees.data, "PIECE", 50_000)
    file = np.memmap(tmp_path / "x", np.float32, "w+", shape=(20_000, 100))
    file[:] = RANDOM.normal(size=file.shape)
    trees.TreeJob(X, Y, library=library)  # imports the library
    tracemalloc.start()
    try:
        job = trees.TreeJob(file, file[:, 0].copy(), library=library, rounds=2, params={"max_depth": 2})
        run = trees.fit(job, plan={"threads": 1}, out=tmp_path / "run", progress=False)
        answers = run.predict(file)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.shares_memory(job.x, file)
    assert len(answers) == 20_000
    assert most < file.nbytes / 2
