"""The checks of recipes name what does not hold, and shuffle targets alone."""

import pytest
from benchmarks.recipe_checks import problems, shuffled
from recipe_data import write_rows


def report(blend, part, rule, *, out_of_fold=None):
    more = {} if out_of_fold is None else {"out_of_fold": {"blend": out_of_fold, "ridge": part}}
    models = {"ridge": {"scaled_rmse": part}, "blend": {"scaled_rmse": blend, **more}}
    return {"models": models, "baselines": {"the last value": {"scaled_rmse": rule}}}


@pytest.mark.parametrize(
    ("plain", "chance", "wrong"),
    [
        (report(0.6, 0.7, 0.8, out_of_fold=0.65), report(1.0, 1.0, 1.0), []),
        (report(0.6, 0.5, 0.8), report(1.0, 1.0, 1.0), ["the blend is worse than its best part"]),
        (report(0.8, 0.9, 0.8), report(1.0, 1.0, 1.0), ["the blend is no better than the last value"]),
        (report(0.6, 0.7, 0.8), report(0.9, 1.0, 1.0), ["shuffled targets are answered better than by chance"]),
    ],
)
def test_what_does_not_hold_is_named(plain, chance, wrong):
    assert problems("forecast", plain, chance) == wrong


def test_targets_are_those_of_other_rows_and_all_else_stays(tmp_path):
    table = write_rows(tmp_path / "a.csv", ["day", "x", "y"], [[at, 10 * at, 100 * at] for at in range(50)])
    rows = [line.split(",") for line in shuffled(table, tmp_path / "b.csv", ("y",)).read_text().splitlines()[1:]]
    assert [row[:2] for row in rows] == [[str(at), str(10 * at)] for at in range(50)]
    assert sorted(int(row[2]) for row in rows) == [100 * at for at in range(50)]
    assert sum(int(row[2]) == 100 * at for at, row in enumerate(rows)) < 10
    lines = shuffled(table, tmp_path / "c.csv", ("x", "y"), beside="day").read_text().splitlines()
    assert lines[0] == "day,another x,another y"
    assert all(10 * int(line.split(",")[1]) == int(line.split(",")[2]) for line in lines[1:])
