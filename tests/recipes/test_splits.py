"""Splits: every row is on one side or in the gap, and nothing of what is held out is known from what is trained on."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hotlap.core.errors import DataError
from hotlap.recipes.splits import by_group, by_time, stratified, stratified_by_group, walk_forward

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


def each_symbol(split, symbols):
    return [(split.train[symbols[split.train] == s], split.valid[symbols[split.valid] == s]) for s in set(symbols)]


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.sampled_from("abc")), min_size=8, max_size=40),
    share=shares,
    gap=st.integers(0, 4),
)
def test_nothing_is_held_out_that_is_older_than_what_is_trained_on(rows, share, gap):
    times, symbols = np.array([t for t, _ in rows]), np.array([s for _, s in rows])
    for given_symbols, of in ((None, np.full(len(rows), "all")), (symbols, symbols)):
        split = tried(lambda given_symbols=given_symbols: by_time(times, share, symbols=given_symbols, gap=gap))
        both = np.concatenate(split)
        assert len(np.unique(both)) == len(both)
        for train, valid in each_symbol(split, of):
            own = np.flatnonzero(of == of[train[0] if len(train) else valid[0]]) if len(train) + len(valid) else []
            left_out = sorted(set(own) - set(train) - set(valid))
            assert len(left_out) <= gap
            assert np.all(np.diff(times[train]) >= 0)
            assert np.all(np.diff(times[valid]) >= 0)
            if len(valid):
                # Rows of one time are not parted.
                assert all(times[row] < times[valid].min() for row in (*train, *left_out))
                assert len(valid) >= round(share * len(own))
                assert not len(train) or len(left_out) == gap
                assert all(times[row] >= times[train].max() for row in left_out if len(train))


def test_the_last_rows_are_held_out_by_their_time_and_not_by_their_place():
    split = by_time(np.array([5, 1, 4, 2, 3]), 0.4)
    assert split.train.tolist() == [1, 3, 4]
    assert split.valid.tolist() == [2, 0]
    assert by_time(np.arange(10), 0.3, gap=2).train.tolist() == [0, 1, 2, 3, 4]


def test_dates_are_times():
    days = np.array(["2024-01-03", "2024-01-01", "2024-01-02"], "datetime64[s]")
    assert by_time(days, 0.34).valid.tolist() == [0]


def test_each_symbol_is_cut_by_itself():
    times = np.array([0, 1, 2, 3, 10, 11, 12, 13])
    split = by_time(times, 0.25, symbols=np.array(list("aaaabbbb")))
    assert split.train.tolist() == [0, 1, 2, 4, 5, 6]
    assert split.valid.tolist() == [3, 7]


def test_windows_that_end_in_validation_reach_no_training_row_over_a_gap_of_their_length():
    length = 5
    train, valid = by_time(np.arange(50), 0.2, gap=length - 1)
    reached = {row for end in valid for row in range(end - length + 1, end + 1)}
    assert not reached & set(train.tolist())


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab")), min_size=4, max_size=40),
    folds=st.integers(1, 4),
    gap=st.integers(0, 3),
)
def test_walking_forward_trains_on_more_and_more_and_holds_each_row_out_at_most_once(rows, folds, gap):
    times, symbols = np.array([t for t, _ in rows]), np.array([s for _, s in rows])
    splits = tried(lambda: walk_forward(times, folds, gap, symbols=symbols))
    assert len(splits) == folds
    held = np.concatenate([split.valid for split in splits])
    assert len(np.unique(held)) == len(held)
    seen = set()
    for split in splits:
        assert seen <= set(split.train.tolist())
        seen = set(split.train.tolist())
        for train, valid in each_symbol(split, symbols):
            if len(train) and len(valid):
                assert times[train].max() < times[valid].min()
                between = np.flatnonzero(symbols == symbols[train[0]])
                between = set(between[times[between] < times[valid].min()]) - set(train)
                assert len(between) == gap
    for symbol in set(symbols):
        own = np.flatnonzero(symbols == symbol)
        mine = [split.valid[symbols[split.valid] == symbol] for split in splits]
        assert set(np.concatenate(mine)) <= set(own)
        last = np.concatenate(mine)
        assert not len(last) or times[last].max() == times[own].max()


def test_walking_forward_cuts_into_stretches_of_equal_length():
    splits = walk_forward(np.arange(8), 3, gap=1)
    assert [(split.train.tolist(), split.valid.tolist()) for split in splits] == [
        ([0], [2, 3]),
        ([0, 1, 2], [4, 5]),
        ([0, 1, 2, 3, 4], [6, 7]),
    ]


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
        (lambda: by_time([1, 2, 3], 0.5, gap=-1), "gap=-1 must be a whole number of at least 0"),
        (lambda: walk_forward([1, 2, 3], 0), "folds=0 must be a whole number of at least 1"),
        (lambda: by_time([1.0, float("nan"), 3.0], 0.5), "row 2 has no time, the first of 1"),
        (lambda: by_time(np.array(["2024-01-01", "NaT"], "datetime64[s]"), 0.5), "row 2 has no time"),
        (lambda: by_time([1, 2, 3], 0.5, symbols=["a"]), "there are 1 symbols and 3 times"),
        (lambda: by_time([1, 1, 1, 1], 0.5), "0 rows are left to train on and 4 to judge by"),
        (lambda: by_time(np.arange(10), 0.5, gap=5), "0 rows are left to train on"),
        (lambda: walk_forward(np.arange(3), 5), "fold 1 of folds=5, gap=0, 0 rows are left to train on"),
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
