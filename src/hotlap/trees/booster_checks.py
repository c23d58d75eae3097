"""Checks of booster files, node by node: a forged one would make the libraries read memory that is not theirs."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from hotlap.core.errors import StoreError

Ints = np.ndarray[Any, Any]
_ARRAYS = (
    "left_children", "right_children", "parents", "split_indices", "default_left", "split_type", "split_conditions",
    "base_weights", "loss_changes", "sum_hessian",
)  # fmt: skip
_CATEGORIES = ("categories", "categories_nodes", "categories_segments", "categories_sizes")


def checked_xgboost(content: bytes, name: str, *, features: int, outputs: int) -> bytes:
    """The JSON of a booster of XGBoost, written anew as it was understood here. Raises StoreError in one line."""
    try:
        raw = json.loads(content, parse_constant=_refuse)
        learner = raw["learner"]
        numbers = {key: learner["learner_model_param"].get(key) for key in ("num_feature", "num_class", "num_target")}
        if int(numbers["num_feature"]) != features:
            raise ValueError(f"it was trained on {numbers['num_feature']} columns, not {features}")
        if max(int(numbers["num_class"]), int(numbers["num_target"]), 1) != outputs:
            raise ValueError(f"it has not {outputs} outputs")
        booster = learner["gradient_booster"]
        if booster["name"] == "dart":
            drops = booster["weight_drop"]
            booster = booster["gbtree"]
            if len(drops) != len(booster["model"]["trees"]):
                raise ValueError("its weights are not one a tree")
        first = json.loads(learner["learner_model_param"]["base_score"])
        if (len(first) if isinstance(first, list) else 1) not in (1, outputs):
            raise ValueError("its first answers are not one for each output")
        if len(learner.get("feature_names", ())) not in (0, features):
            raise ValueError("its columns are not those that it names")
        _xgboost_trees(booster["model"], features, outputs)
        return json.dumps(raw).encode()
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"{name} is not a booster of XGBoost that hotlap can load: {why:.200}") from None


def _xgboost_trees(model: dict[str, Any], features: int, outputs: int) -> None:
    trees, groups = model["trees"], _whole(model["tree_info"])
    if int(model["gbtree_model_param"]["num_trees"]) != len(trees) or len(groups) != len(trees):
        raise ValueError("it does not say how many trees it has")
    if len(groups) and not (groups.min() >= 0 and groups.max() < outputs):
        raise ValueError("a tree is of no output")
    rounds, each = _whole(model["iteration_indptr"]), outputs * int(model["gbtree_model_param"]["num_parallel_tree"])
    if rounds[0] != 0 or rounds[-1] != len(trees) or (np.diff(rounds) != each).any():
        raise ValueError("its rounds are not those of its trees")
    if any(model.get("cats", {}).get(key) for key in ("enc", "feature_segments", "sorted_idx")):
        raise ValueError("it has categories")
    for tree in trees:
        size = int(tree["tree_param"]["num_nodes"])
        if int(tree["tree_param"]["size_leaf_vector"]) > 1 or any(tree[key] for key in _CATEGORIES):
            raise ValueError("its trees have vectors or categories")
        if any(len(tree[key]) != size for key in _ARRAYS):
            raise ValueError("the arrays of a tree differ in length")
        columns = _whole(tree["split_indices"])
        if not size or columns.min() < 0 or columns.max() >= features or any(tree["split_type"]):
            raise ValueError("a tree asks for a column that is not there")
        _check_children(_whole(tree["left_children"]), _whole(tree["right_children"]), size)


def _check_children(left: Ints, right: Ints, size: int) -> None:
    """Each node has two children after it, or none; so nothing goes in circles."""
    inner = left != -1
    if ((right != -1) != inner).any():
        raise ValueError("a node has one child")
    numbers = np.arange(size)[inner]
    for children in (left[inner], right[inner]):
        if (children <= numbers).any() or (children >= size).any():
            raise ValueError("a node has a child that is not below it")


def checked_lightgbm(content: bytes, name: str, *, features: int, outputs: int) -> bytes:
    """The text of a booster of LightGBM. Raises StoreError in one line if it is damaged or forged."""
    try:
        text = content.decode("ascii")
        head, *trees = re.split(r"(?=^Tree=)", text.partition("\nend of trees\n")[0] + "\n", flags=re.M)
        fields = _fields(head)
        if int(fields["max_feature_idx"]) + 1 != features:
            raise ValueError(f"it was trained on {int(fields['max_feature_idx']) + 1} columns, not {features}")
        if int(fields["num_class"]) != outputs or int(fields["num_tree_per_iteration"]) != outputs:
            raise ValueError(f"it has not {outputs} outputs")
        if len(fields["feature_names"].split(" ")) != features or len(fields["feature_infos"].split(" ")) != features:
            raise ValueError("its columns are not those that it names")
        sizes = [int(size) for size in fields["tree_sizes"].split()]
        if [len(tree) for tree in trees] != sizes or len(trees) % outputs:
            raise ValueError("its trees have not the sizes that it names")
        for number, tree in enumerate(trees):
            _lightgbm_tree(_fields(tree), number, features)
        return content
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"{name} is not a booster of LightGBM that hotlap can load: {why:.200}") from None


def _fields(lines: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines.splitlines():
        key, equals, value = line.partition("=")
        if equals and key in found:
            raise ValueError(f"it says twice what {key:.40} is")
        if equals:
            found[key] = value
    return found


def _lightgbm_tree(tree: dict[str, str], number: int, features: int) -> None:
    leaves = int(tree["num_leaves"])
    if int(tree["Tree"]) != number or not 1 <= leaves < 2**24:
        raise ValueError("its trees are not in order")
    if int(tree["num_cat"]) or int(tree.get("is_linear", "0")):
        raise ValueError("its trees have categories or linear leaves")
    if len(_numbers(tree["leaf_value"])) != leaves:
        raise ValueError("a tree has not as many values as leaves")
    if leaves == 1:
        return
    inner = leaves - 1
    arrays = {key: _whole(tree[key].split(" ")) for key in ("split_feature", "left_child", "right_child")}
    kinds = _whole(tree["decision_type"].split(" "))
    if len(kinds) != inner or len(_numbers(tree["threshold"])) != inner or (kinds & 1).any():
        raise ValueError("a tree has not as many splits as nodes")
    if any(len(array) != inner for array in arrays.values()):
        raise ValueError("a tree has not as many splits as nodes")
    if arrays["split_feature"].min() < 0 or arrays["split_feature"].max() >= features:
        raise ValueError("a tree asks for a column that is not there")
    for children in (arrays["left_child"], arrays["right_child"]):
        below = children >= 0
        if (children[below] <= np.arange(inner)[below]).any() or children.max() >= inner or children.min() < -leaves:
            raise ValueError("a node has a child that is not below it")


def _whole(values: list[Any]) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or not len(array):
        return np.zeros(0, np.int64)
    return array.astype(np.int64)


def _numbers(text: str) -> list[float]:
    return [float(value) for value in text.split(" ")]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
