"""Files of trees that are damaged, forged, or not there: one line each, and no memory of others is read."""

import json
import shutil

import numpy as np
import pytest

from hotlap import trees
from hotlap.core.errors import DataError, StoreError
from hotlap.trees.booster_checks import checked_lightgbm, checked_xgboost

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(120, 4))
Y = X @ RANDOM.normal(size=(4, 2))


@pytest.fixture(scope="module", params=["xgboost", "lightgbm"])
def run(request, tmp_path_factory):
    job = trees.TreeJob(X, Y, library=request.param, rounds=4, params={"max_depth": 3})
    return trees.fit(job, plan="off", out=tmp_path_factory.mktemp("trees") / "run", progress=False)


def content(run):
    return (run.folder / "boosters" / run.model.record.boosters[0].name).read_bytes()


def check(run, changed):
    check = checked_xgboost if run.model.record.library == "xgboost" else checked_lightgbm
    return check(changed, "0000", features=4, outputs=1)


def test_a_booster_is_the_librarys_own_file(run):
    name = run.model.record.library
    file = run.folder / "boosters" / run.model.record.boosters[0].name
    if name == "xgboost":
        import xgboost

        answers = xgboost.Booster(model_file=file).predict(xgboost.DMatrix(X, nthread=1))
    else:
        import lightgbm

        answers = lightgbm.Booster(model_file=file).predict(X, num_threads=1)
    assert np.array_equal(answers, run.predict(X)[:, 0])


def test_any_changed_byte_of_a_booster_is_found(run, tmp_path):
    shutil.copytree(run.folder, tmp_path / "copy")
    file = tmp_path / "copy" / "boosters" / run.model.record.boosters[1].name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(StoreError, match="differs from what was written"):
        trees.load(tmp_path / "copy")
    file.unlink()
    with pytest.raises(StoreError, match="No such file"):
        trees.load(tmp_path / "copy")


@pytest.mark.parametrize(
    "changes",
    [
        {"library": "pickle"},
        {"features": 3},
        {"targets": 1},
        {"boosters": []},
        {"format": 99},
        {"one_target": True},
        {"task": "classification"},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_record_that_contradicts_itself_is_refused_in_one_line(run, changes, tmp_path):
    shutil.copytree(run.folder, tmp_path / "copy")
    file = tmp_path / "copy" / "trees.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(StoreError) as error:
        trees.load(tmp_path / "copy")
    assert "\n" not in str(error.value)


def test_a_record_cannot_lead_out_of_its_folder(run, tmp_path):
    shutil.copytree(run.folder, tmp_path / "copy")
    file = tmp_path / "copy" / "trees.json"
    raw = json.loads(file.read_text())
    raw["boosters"][0]["name"] = "../../secret.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(StoreError, match="not one for each target"):
        trees.load(tmp_path / "copy")


def test_a_folder_without_trees_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"holds no trees: it has no trees\.json"):
        trees.load(tmp_path)


def forged_xgboost(raw, path, value):
    model = json.loads(raw)
    at = model["learner"]["gradient_booster"]["model"]
    *steps, last = path
    for step in steps:
        at = at[step]
    at[last] = value
    return json.dumps(model).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("trees", 0, "left_children", 0), 10**6),
        (("trees", 0, "left_children", 0), -7),
        (("trees", 0, "left_children", 1), 0),
        (("trees", 0, "right_children", 0), 0),
        (("trees", 0, "right_children", 0), -1),
        (("trees", 0, "split_indices", 0), 4),
        (("trees", 0, "split_indices", 0), -1),
        (("trees", 0, "split_conditions"), [0.5]),
        (("trees", 0, "split_type", 0), 1),
        (("trees", 0, "default_left"), []),
        (("trees", 0, "tree_param", "num_nodes"), "3"),
        (("trees", 0, "tree_param", "size_leaf_vector"), "9"),
        (("trees", 0, "categories"), [1]),
        (("trees",), []),
        (("gbtree_model_param", "num_parallel_tree"), "2"),
        (("gbtree_model_param", "num_trees"), "3"),
        (("tree_info", 0), 5),
        (("tree_info", 0), -1),
        (("iteration_indptr", 1), 99),
        (("iteration_indptr", 4), 99),
        (("trees", 0, "left_children"), "x"),
        (("trees", 0, "left_children", 0), float("nan")),
    ],
    ids=str,
)
@pytest.mark.parametrize("run", ["xgboost"], indirect=True)
def test_forged_nodes_of_xgboost_are_refused(run, path, value):
    check(run, content(run))
    with pytest.raises(StoreError) as error:
        check(run, forged_xgboost(content(run), path, value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("left_child", "9 9 9"),
        ("left_child", "0 0 0 0 0 0 0"),
        ("right_child", "-99 -1 -1"),
        ("split_feature", "4 4 4"),
        ("num_leaves", "100"),
        ("num_leaves", "0"),
        ("num_cat", "1"),
        ("is_linear", "1"),
        ("threshold", "1"),
        ("leaf_value", "1 2"),
        ("decision_type", "1 1 1"),
        ("max_feature_idx", "999"),
        ("num_class", "3"),
        ("tree_sizes", "1 2 3 4"),
        ("feature_infos", "none"),
    ],
)
@pytest.mark.parametrize("run", ["lightgbm"], indirect=True)
def test_forged_nodes_of_lightgbm_are_refused(run, line, value):
    check(run, content(run))
    lines = content(run).decode().split("\n")
    place = next(number for number, text in enumerate(lines) if text.startswith(f"{line}="))
    lines[place] = f"{line}={value}"
    with pytest.raises(StoreError) as error:
        check(run, "\n".join(lines).encode())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("garbage", [b"", b"{}", b"[]", b"tree\n", b"\xff\xfe", b"[" * 100_000, b'{"learner": 3}'])
def test_what_is_no_booster_is_refused(run, garbage):
    with pytest.raises(StoreError) as error:
        check(run, garbage)
    assert "\n" not in str(error.value)


def test_rows_of_other_columns_are_refused(run):
    with pytest.raises(DataError, match="x has 3 columns; the model was trained on 4"):
        run.predict(X[:, :3])
    with pytest.raises(DataError, match="probabilities are for classification"):
        run.model.probabilities(X)


def test_no_rows_get_no_answers(run):
    assert run.predict(X[:0]).shape == (0, 2)
