"""Predictions rest on step times that stored files hold, and hotlap has the factors that fit them."""

import json

import pytest
from benchmarks.predictions import AS_WRITTEN, FAST, PARTS, RESULTS, WRITTEN

from hotlap.machine.prediction import Work

STORED = json.loads((RESULTS / "predictions-h200.json").read_text())


@pytest.mark.parametrize("row", [*AS_WRITTEN.values(), *FAST.values()], ids=lambda row: row.quote)
def test_each_measured_time_is_quoted_from_a_stored_file(row):
    assert row.quote in (RESULTS / row.file).read_text().replace("\\", "")
    assert row.file in WRITTEN


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.title)
def test_hotlap_predicts_with_the_factors_that_the_stored_work_comes_to(part):
    works = {name: Work(**work) for name, work in STORED["works"].items()}
    assert part.is_known(STORED[part.title]["predicted_s"], part.fitted(works))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.title)
def test_a_work_is_predicted_without_its_own_time(part):
    works = {name: Work(**work) for name, work in STORED["works"].items()}
    name = min(part.rows)
    expected = STORED[part.title]["predicted_s"][name]
    assert part.predict(works[name], part.fitted(works, without=name)) == pytest.approx(expected, rel=1e-3)
