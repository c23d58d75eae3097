"""What a TreeJob refuses, and that it says all of it at once."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from hotlap import trees
from hotlap.core.errors import JobError, MachineError
from hotlap.trees import TreeJob, parameters

X = np.random.default_rng(0).normal(size=(40, 3))
Y = X[:, 0]
BOTH = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])


def problems(*args, **given):
    with pytest.raises(JobError) as error:
        TreeJob(*args, **given)
    return error.value.problems


def test_all_mistakes_of_a_job_are_named_at_once():
    y = Y.copy()
    y[7] = np.nan
    found = problems(
        X, y, valid=(X[:, :2], Y), library="xgboost", rounds=0, weight=-np.ones(40), params={"max_deph": 3}
    )
    for words in ("rounds=0", "row 7", "valid x has 2 columns and x has 3", "weights must be"):
        assert any(words in problem for problem in found), words


def test_sizes_that_do_not_fit_are_named():
    assert problems(X[:1], Y[:1]) == ("x has 1 rows; training needs at least 2",)
    assert problems(X, Y[:5]) == ("x has 40 rows and y has 5",)
    assert "shape (40,)" in problems(Y, Y)[0]
    assert problems(X, Y, patience=3) == ("patience=3 needs valid=(x, y) to judge the rounds by",)


def test_infinite_features_are_refused_and_missing_ones_are_not():
    x = X.copy()
    x[3, 1] = np.nan
    TreeJob(x, Y)
    x[4, 2] = np.inf
    assert "infinite values, the first in row 4, column 2" in problems(x, Y)[0]


def test_texts_among_the_features_are_refused_with_what_to_do():
    assert "code texts and categories as numbers" in problems([["a", 1], ["b", 2]], [1, 2])[0]


@BOTH
def test_an_unknown_parameter_is_refused_with_the_nearest_known_one(library):
    (found,) = problems(X, Y, library=library, params={"max_dept": 3})
    assert "no parameter 'max_dept'; did you mean 'max_depth'?" in found


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"tree_method": "gpu_hist"}, "write 'device': 'cuda' and 'tree_method': 'hist'"),
        ({"gpu_id": 1}, "write 'device': 'cuda:1'"),
        ({"predictor": "gpu_predictor"}, "leave it out"),
        ({"n_gpus": 1}, "write 'device': 'cuda'"),
    ],
)
def test_parameters_that_are_gone_are_refused_with_what_to_write_today(params, words):
    (found,) = problems(X, Y, params=params)
    assert "gone from XGBoost" in found
    assert words in found


@BOTH
def test_parameters_that_hotlap_sets_are_refused_with_where_they_belong(library):
    found = problems(X, Y, library=library, params={"n_estimators": 50, "n_jobs": 2, "random_state": 1})
    assert [words in problem for problem, words in zip(found, ("rounds=50", "'threads': 2", "seed=1"), strict=True)]


def test_the_parameters_of_an_objective_are_known_with_it():
    TreeJob(X, np.abs(Y), params={"objective": "reg:tweedie", "tweedie_variance_power": 1.2})
    TreeJob(X, Y, params={"objective": "reg:quantileerror", "quantile_alpha": 0.2})
    (found,) = problems(X, Y, params={"objective": "reg:quantileerror", "quantile_alpha": [0.2, 0.8]})
    assert "a job for each" in found
    assert "no parameter 'tweedie_variance_power'" in problems(X, Y, params={"tweedie_variance_power": 1.2})[0]


def test_labels_that_only_the_validation_data_has_are_refused():
    labels = np.where(Y > 0, "up", "down")
    found = problems(X, labels, task="classification", valid=(X, np.where(Y > 0, "up", "flat")))
    assert found == ("valid y has labels that y lacks: ['flat']",)


def test_a_target_of_one_label_is_refused():
    assert "target 0 has one label only" in problems(X, np.ones(40, int), task="classification")[0]


@BOTH
def test_without_the_library_the_error_names_the_extra(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    parameters._xgboost_names.cache_clear()
    parameters._lightgbm_aliases.cache_clear()
    with pytest.raises(MachineError, match=rf"needs {library}: pip install '\.\[trees\]'"):
        TreeJob(X, Y, library=library)


@pytest.mark.parametrize("file", sorted(Path(trees.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_importing_the_room_imports_neither_library(file, monkeypatch):
    for name in ("xgboost", "lightgbm"):
        monkeypatch.setitem(sys.modules, name, None)
    runpy.run_path(str(file), run_name=f"anew.{file.stem}")
