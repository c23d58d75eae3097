"""Splits: every row is on one side or in the gap, and nothing of what is held out is known from what is trained on."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hotlap.core.errors import DataError
from hotlap.recipes.tabular import by_group, stratified, stratified_by_group

QUIET = [HealthCheck.filter_too_much, HealthCheck.too_slow]
shares = st.floats(0.05, 0.95)
seeds = st.integers(0, 99)


def tried(make):
    """What `make` gives; where it refuses for lack of rows, the example does not count."""
    try:
        return make()
    except DataError as error:
        if "rows are left to train on" not in str(error):
            raise
        return assume(False)


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(groups=st.lists(st.integers(0, 8), min_size=2, max_size=60), share=shares, seed=seeds)
def test_no_group_is_on_both_sides(groups, share, seed):
    assume(len(set(groups)) > 1)
    groups = np.array(groups)
    split = by_group(groups, share, seed)
    assert sorted(np.concatenate(split).tolist()) == list(range(len(groups)))
    assert len(split.train)
    assert len(split.valid)
    assert not set(groups[split.train]) & set(groups[split.valid])
    largest = np.unique(groups, return_counts=True)[1].max()
    assert abs(len(split.valid) - share * len(groups)) <= largest
    again = by_group(groups, share, seed)
    assert all(np.array_equal(a, b) for a, b in zip(split, again, strict=True))


def test_groups_of_words_are_split_and_another_seed_holds_out_others():
    groups = np.repeat([f"user {n}" for n in range(40)], 5)
    one, other = by_group(groups, 0.25, 1), by_group(groups, 0.25, 2)
    assert len(one.valid) == len(other.valid) == 50
    assert not np.array_equal(one.valid, other.valid)


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(target=st.lists(st.sampled_from("aaaabbc"), min_size=4, max_size=80), share=shares, seed=seeds)
def test_classes_keep_their_shares_to_within_a_row(target, share, seed):
    target = np.array(target)
    split = tried(lambda: stratified(target, share, seed))
    assert sorted(np.concatenate(split).tolist()) == list(range(len(target)))
    for name in set(target):
        rows, held = int((target == name).sum()), int((target[split.valid] == name).sum())
        assert abs(held - share * rows) < 1 + 1e-9
        assert 0 < held < rows if rows > 1 else held == 0
    again = stratified(target, share, seed)
    assert all(np.array_equal(a, b) for a, b in zip(split, again, strict=True))


def test_all_held_out_rows_together_are_the_share_that_was_asked_for():
    target = np.repeat(np.arange(10), 15)  # 3.75 rows of each class
    split = stratified(target, 0.25, 0)
    assert len(split.valid) == 38
    assert not np.array_equal(split.valid, stratified(target, 0.25, 1).valid)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: stratified([0, 1], 1.5), "share=1.5 must be between 0 and 1"),
        (lambda: by_group([1, 1], 0.5), "there is 1 group in 2 rows"),
        (lambda: stratified([], 0.5), "the shape of the target is (0,)"),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_line(make, said):
    with pytest.raises(DataError) as error:
        make()
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@given(groups=st.lists(st.integers(0, 12), min_size=2, max_size=60), share=shares, seed=seeds)
def test_groups_stay_together_and_each_class_of_two_groups_is_on_both_sides(groups, share, seed):
    groups = np.array(groups)
    target = groups % 3  # a group is of one class
    several = [label for label in range(3) if len(set(groups[target == label].tolist())) > 1]
    assume(several)
    split = stratified_by_group(target, groups, share, seed)
    assert sorted([*split.train, *split.valid]) == list(range(len(groups)))
    assert not set(groups[split.train]) & set(groups[split.valid])
    for label in several:
        assert label in target[split.train]
        assert label in target[split.valid]


def test_a_group_larger_than_the_share_is_trained_on():
    groups = np.array([0] * 50 + list(range(1, 51)))
    for seed in range(20):
        split = stratified_by_group(np.zeros(100), groups, 0.2, seed)
        assert len(split.valid) == 20
        assert 0 in split.train
