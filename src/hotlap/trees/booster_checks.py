"""Checks of booster files, node by node: a forged one would make the libraries read memory that is not theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hotlap.core.errors import StoreError, first_line

Ints = np.ndarray[Any, Any]
_ARRAYS = (
    "left_children", "right_children", "parents", "split_indices", "default_left", "split_type", "split_conditions",
    "base_weights", "loss_changes", "sum_hessian",
)  # fmt: skip
_CATEGORIES = ("categories", "categories_nodes", "categories_segments", "categories_sizes")


def checked_xgboost(content: bytes, name: str, *, features: int, outputs: int) -> bytes:
    """The JSON of a booster of XGBoost, written anew as it was understood here. Raises StoreError in one line."""
    with _one_line(name, "XGBoost"):
        raw = json.loads(content, parse_constant=_refuse)
        learner = raw["learner"]
        numbers = {key: learner["learner_model_param"].get(key) for key in ("num_feature", "num_class", "num_target")}
        columns = numbers["num_feature"]
        need(int(columns) == features, f"it was trained on {columns} columns, not {features}")
        have = max(int(numbers["num_class"]), int(numbers["num_target"]), 1)
        need(have == outputs, f"it has not {outputs} outputs")
        booster = learner["gradient_booster"]
        if booster["name"] == "dart":
            drops = booster["weight_drop"]
            booster = booster["gbtree"]
            need(len(drops) == len(booster["model"]["trees"]), "its weights are not one a tree")
        first = json.loads(learner["learner_model_param"]["base_score"])
        starts = len(first) if isinstance(first, list) else 1
        need(starts in (1, outputs), "its first answers are not one for each output")
        names = len(learner.get("feature_names", ()))
        need(names in (0, features), "its columns are not those that it names")
        _check_xgboost_trees(booster["model"], features, outputs)
        return json.dumps(raw).encode()


def _check_xgboost_trees(model: dict[str, Any], features: int, outputs: int) -> None:
    trees, groups = model["trees"], _whole(model["tree_info"])
    count = int(model["gbtree_model_param"]["num_trees"])
    need(count == len(trees) == len(groups), "it does not say how many trees it has")
    need(not len(groups) or (groups.min() >= 0 and groups.max() < outputs), "a tree is of no output")
    rounds, each = _whole(model["iteration_indptr"]), outputs * int(model["gbtree_model_param"]["num_parallel_tree"])
    is_even = rounds[0] == 0 and rounds[-1] == len(trees) and (np.diff(rounds) == each).all()
    need(is_even, "its rounds are not those of its trees")
    kinds = [model.get("cats", {}).get(key) for key in ("enc", "feature_segments", "sorted_idx")]
    need(not any(kinds), "it has categories")
    for tree in trees:
        size = int(tree["tree_param"]["num_nodes"])
        is_plain = int(tree["tree_param"]["size_leaf_vector"]) <= 1 and not any(tree[key] for key in _CATEGORIES)
        need(is_plain, "its trees have vectors or categories")
        need(all(len(tree[key]) == size for key in _ARRAYS), "the arrays of a tree differ in length")
        columns = _whole(tree["split_indices"])
        is_there = size and columns.min() >= 0 and columns.max() < features and not any(tree["split_type"])
        need(is_there, "a tree asks for a column that is not there")
        _check_children(_whole(tree["left_children"]), _whole(tree["right_children"]), size)


def _check_children(left: Ints, right: Ints, size: int) -> None:
    """Each node has two children after it, or none; so nothing goes in circles."""
    inner = left != -1
    need(((right != -1) == inner).all(), "a node has one child")
    numbers = np.arange(size)[inner]
    for children in (left[inner], right[inner]):
        need(((children > numbers) & (children < size)).all(), "a node has a child that is not below it")


def checked_lightgbm(content: bytes, name: str, *, features: int, outputs: int) -> bytes:
    """The text of a booster of LightGBM. Raises StoreError in one line if it is damaged or forged."""
    with _one_line(name, "LightGBM"):
        text = content.decode("ascii")
        head, *trees = re.split(r"(?=^Tree=)", text.partition("\nend of trees\n")[0] + "\n", flags=re.M)
        fields = _fields(head)
        columns = int(fields["max_feature_idx"]) + 1
        need(columns == features, f"it was trained on {columns} columns, not {features}")
        have = {int(fields["num_class"]), int(fields["num_tree_per_iteration"])}
        need(have == {outputs}, f"it has not {outputs} outputs")
        named = {len(fields[key].split(" ")) for key in ("feature_names", "feature_infos")}
        need(named == {features}, "its columns are not those that it names")
        sizes = [int(size) for size in fields["tree_sizes"].split()]
        is_whole = [len(tree) for tree in trees] == sizes and len(trees) % outputs == 0
        need(is_whole, "its trees have not the sizes that it names")
        for number, tree in enumerate(trees):
            _check_lightgbm_tree(_fields(tree), number, features)
        return content


def _fields(lines: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines.splitlines():
        key, equals, value = line.partition("=")
        need(not equals or key not in found, f"it says twice what {key:.40} is")
        if equals:
            found[key] = value
    return found


def _check_lightgbm_tree(tree: dict[str, str], number: int, features: int) -> None:
    leaves = int(tree["num_leaves"])
    need(int(tree["Tree"]) == number and 1 <= leaves < 2**24, "its trees are not in order")
    is_plain = not int(tree["num_cat"]) and not int(tree.get("is_linear", "0"))
    need(is_plain, "its trees have categories or linear leaves")
    need(len(_numbers(tree["leaf_value"])) == leaves, "a tree has not as many values as leaves")
    if leaves == 1:
        return
    inner = leaves - 1
    columns, left, right, kinds = (
        _whole(tree[key].split(" ")) for key in ("split_feature", "left_child", "right_child", "decision_type")
    )
    lengths = {len(columns), len(left), len(right), len(kinds), len(_numbers(tree["threshold"]))}
    need(lengths == {inner} and not (kinds & 1).any(), "a tree has not as many splits as nodes")
    need(columns.min() >= 0 and columns.max() < features, "a tree asks for a column that is not there")
    for children in (left, right):
        below = children >= 0
        is_below = (children[below] > np.arange(inner)[below]).all() and -leaves <= children.min()
        need(is_below and children.max() < inner, "a node has a child that is not below it")


def need(is_so: object, why: str) -> None:
    """Raise ValueError with this reason, unless it is so."""
    if not is_so:
        raise ValueError(why)


@contextmanager
def _one_line(name: str, library: str) -> Iterator[None]:
    """Raise what reading a booster comes to as a StoreError in one line."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        why = first_line(error)
        raise StoreError(f"{name} is not a booster of {library} that hotlap can load: {why:.200}") from None


def _whole(values: list[Any]) -> Ints:
    array = np.asarray(values)
    return array.astype(np.int64) if array.ndim == 1 and len(array) else np.zeros(0, np.int64)


def _numbers(text: str) -> list[float]:
    return [float(value) for value in text.split(" ")]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
