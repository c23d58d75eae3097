"""Checks: a table that teaches nothing, or gives its target away, is found out before it is trained on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.recipes import checks
from hotlap.recipes.tables import read_table


@pytest.fixture
def made(tmp_path):
    """A table of these columns, as it is read from a file."""

    def make(name="train.csv", **columns):
        path = tmp_path / name
        rows = zip(*columns.values(), strict=True)
        path.write_text("\n".join(",".join(map(str, row)) for row in (columns, *rows)) + "\n")
        return read_table(path)

    return make


RNG = np.random.default_rng(0)
LABELS = np.array(["no", "maybe", "yes"])[RNG.integers(3, size=60)]
NOISE = RNG.normal(size=60).round(3)


# --- targets -------------------------------------------------------------------------------------------


def test_classes_are_numbered_in_order_and_nothing_is_minus_one(made):
    table = made(
        word=["b", "a", "", "b", "a"],
        whole=[10, 2, "", 10, 2],
        flag=["Yes", "No", "", "Yes", "No"],
        number=[1.5, -2.0, "", 1.5, -2.0],
    )
    for name, classes in [("word", "a b"), ("whole", "2 10"), ("flag", "No Yes"), ("number", "-2.0 1.5")]:
        found, labels = checks.classes_of(table[name])
        assert found == tuple(classes.split())
        assert labels.dtype == np.int64
        assert labels.tolist() == [1, 0, -1, 1, 0]


def test_a_good_target_has_no_problems(made):
    table = made(label=LABELS, amount=NOISE, count=range(60), answer=["true", "false"] * 30)
    for name in table.columns:
        assert checks.target_problems(table[name]) == []
        assert checks.target_warnings(table[name]) == []


def test_a_target_of_one_class_teaches_nothing(made):
    for value in ("spam", 7, 1.5, "yes"):
        table = made(label=[value] * 6, x=NOISE[:6])
        (line,) = checks.target_problems(table["label"])
        assert line == f"the target 'label' is '{value}' in all rows; there is nothing to learn"


def test_missing_targets_are_named_with_their_rows(made):
    labels = LABELS.astype(object)
    labels[[3, 6]] = ""
    (line,) = checks.target_problems(made(label=labels, x=NOISE)["label"])
    said = "the target 'label' is missing in 2 of 60 rows (rows 4, 7), empty or a word such as NA, none, null or -"
    assert line.startswith(f"{said}; fill it in, take these rows out")
    labels[10:20] = "NA"
    (line,) = checks.target_problems(made(label=labels, x=NOISE)["label"])
    assert "(rows 4, 7, 11, 12, 13 and 7 more)" in line


def test_targets_that_are_no_classes_and_no_numbers_are_refused(made):
    table = made(
        empty=["-"] * 8,
        day=[f"2024-01-0{n + 1}" for n in range(8)],
        text=[f"a review {n}" for n in range(8)],
        number=[1.5, "inf", *NOISE[:6]],
    )
    (line,) = checks.target_problems(table["empty"])
    assert line.startswith("the target 'empty' has no values but such as NA, none, null or -; name another column")
    assert "holds dates, as '2024-01-01'" in checks.target_problems(table["day"])[0]
    assert "has 8 different texts in 8 rows, as 'a review 0'" in checks.target_problems(table["text"])[0]
    assert "is infinite in 1 of 8 rows (row 2)" in checks.target_problems(table["number"])[0]


def test_classes_of_a_single_row_are_a_warning(made):
    (line,) = checks.target_warnings(made(label=[*LABELS[:50], "odd"], x=NOISE[:51])["label"])
    assert line.startswith("class 'odd' of 'label' has a single row, which is trained on and never judged; ")
    (line,) = checks.target_warnings(made(label=[0, 0, 0, 1, 2], x=NOISE[:5])["label"])
    assert line.startswith("2 classes of 'label' have a single row ('1', '2'), ")


# --- leaks ---------------------------------------------------------------------------------------------


def found(table, target="label", **options):
    return checks.leaks(table, target, **options), checks.suspects(table, target, **options)


def test_columns_that_have_nothing_to_do_with_the_target_are_not_named(made):
    table = made(
        label=LABELS,
        noise=NOISE,
        id=range(60),
        text=[f"review {n}" for n in range(60)],
        kind=np.roll(LABELS, 1),
        constant=["a"] * 60,
        nothing=[""] * 60,
        day=[f"2024-01-{n % 28 + 1:02}" for n in range(60)],
    )
    assert found(table) == ([], [])
    assert found(table, "noise") == ([], [])


def test_a_column_equal_to_the_target_leaks(made):
    lines = ["column 'copy' is equal to the target 'label'; leave it out"]
    assert found(made(label=LABELS, copy=LABELS, noise=NOISE)) == (lines, [])
    assert found(made(label=NOISE, copy=NOISE)) == (lines, [])
    whole = RNG.integers(9, size=60)
    assert found(made(label=whole, copy=[f"{n}.0" for n in whole])) == (lines, [])


def test_the_target_under_other_names_leaks(made):
    table = made(label=LABELS, code=[{"no": 5, "maybe": 3, "yes": 9}[name] for name in LABELS], noise=NOISE)
    (line,), other = found(table)
    assert line.startswith("column 'code' is the target 'label' under other names ('")
    assert "is" in line
    assert other == []


def test_rows_in_which_a_column_has_nothing_do_not_hide_a_leak(made):
    copy = LABELS.astype(object)
    copy[::7] = ""
    assert len(found(made(label=LABELS, copy=copy))[0]) == 1


def test_a_column_whose_every_value_has_one_answer_is_suspect(made):
    cities = [f"{name} city {n % 2}" for n, name in enumerate(LABELS)]
    sure, (line,) = found(made(label=LABELS, city=cities))
    assert sure == []
    assert line.startswith("column 'city' alone tells the target 'label' in every row: each of its 6 values has one")


@pytest.mark.parametrize("apart", [20, -20])
def test_a_number_that_parts_a_class_from_all_others_is_suspect(made, apart):
    sure, (line,) = found(made(label=LABELS, x=NOISE + apart * (LABELS == "maybe"), noise=NOISE))
    assert sure == []
    assert line.startswith("column 'x' alone parts class 'maybe' of the target 'label' from all others (AUC of one); ")


@pytest.mark.parametrize("change", [lambda x: 3 - 2 * x, np.exp, lambda x: -(x**3)])
def test_a_number_that_moves_with_the_target_is_suspect(made, change):
    sure, (line,) = found(made(label=NOISE, x=change(NOISE), other=RNG.normal(size=60)))
    assert sure == []
    assert line.startswith("column 'x' has a correlation of one with the target 'label'; ")


def test_columns_that_are_excepted_are_not_looked_at(made):
    table = made(label=LABELS, copy=LABELS, x=NOISE + 20 * (LABELS == "maybe"))
    assert found(table, but=("copy", "x")) == ([], [])


def test_what_few_rows_show_may_be_chance(made):
    table = made(label=["a", "b", "a", "b"], copy=["a", "b", "a", "b"], x=[1, 5, 2, 6])
    assert found(table) == ([], [])


def test_infinite_numbers_do_not_disturb(made):
    assert found(made(label=NOISE, x=["inf", "-inf", *NOISE[:-2]])) == ([], [])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(2, 40), classes=st.integers(2, 4))
def test_columns_of_pure_chance_are_never_named(tmp_path_factory, seed, rows, classes):
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("t") / "t.csv"
    cells = np.column_stack([rng.integers(classes, size=(rows, 3)), rng.normal(size=(rows, 2)).round(2)])
    path.write_text("label,a,b,c,d\n" + "".join(",".join(map(str, row)) + "\n" for row in cells))
    assert found(read_table(path)) == ([], [])


# --- two files -----------------------------------------------------------------------------------------


def test_files_of_the_same_columns_fit(made):
    train = made(label=LABELS, x=NOISE, n=range(60), kind=LABELS)
    test = made("test.csv", n=[1.5, 2], x=[1, 2], kind=["no", "yes"])
    assert checks.mismatch_problems(train, test, "label") == []


def test_columns_that_are_missing_or_of_another_kind_are_problems(made):
    train = made(label=LABELS, x=NOISE, n=range(60), kind=LABELS)
    test = made("test.csv", n=["one", "two"], kind=["no", "yes"])
    assert checks.mismatch_problems(train, test, "label") == [
        f"{test.path} lacks 'x', which {train.path} has; add what is missing",
        f"column 'n' is whole number in {train.path} (as '0') and text in {test.path} (as 'one'); make them the same",
    ]


def test_words_that_mean_nothing_are_named_where_they_are_a_targets_classes(made):
    table = made(pain=["none", "mild"] * 5)
    assert any("a word such as NA, none, null or -" in problem for problem in checks.target_problems(table["pain"]))


def test_a_column_that_is_the_target_again_and_not_read_is_noted(made):
    table = made(label=LABELS, again=LABELS, code=[{"no": 0, "maybe": 1, "yes": 2}[one] for one in LABELS], x=NOISE)
    same, renamed = checks.unread_leaks(table, "label")
    assert same == "column 'again' is equal to the target 'label'; it is not read"
    assert renamed.startswith("column 'code' is the target 'label' under other names")
    assert renamed.endswith("; it is not read")
    assert checks.unread_leaks(table, "label", but=["again", "code"]) == []


def test_classes_that_differ_in_capitals_or_spaces_only_are_warned_of(made):
    table = made(label=["SPORT", "sport", "money", "big  tax", "Big tax"] * 12, x=NOISE)
    (line,) = checks.target_warnings(table["label"])
    assert line == (
        "classes 'Big tax' and 'big  tax' of 'label' differ in capitals or spaces only, and so in 1 other pair; "
        "write them alike if they are one class"
    )
    assert checks.target_warnings(made(label=["sport", "sports", "Money"] * 20, x=NOISE)["label"]) == []
