"""Findings: their order, and how a terminal shows them."""

import json

import pytest

from hotlap.monitor.findings import Finding, Findings

SLOW = Finding(
    name="feeding",
    what="each update waits for its batch, since the script loads samples in its own process and one by one",
    evidence=("31.0 ms of 40.2 ms an update", "0 workers"),
    cost_s=31.0,
    share=0.77,
    where="train.py:12",
    change="give it workers:\n--- train.py\n+++ train.py\n-DataLoader(data)\n+DataLoader(data, num_workers=2)",
)
SLOWER = Finding(name="fp64", what="the model computes in float64", cost_s=60.0, share=0.5)
LEAK = Finding(name="leak", what="memory grows with every update")


def test_what_endangers_the_run_comes_first_and_then_the_costliest():
    found = Findings(name="train.py", found=(SLOW, SLOWER, LEAK)).found
    assert [one.name for one in found] == ["leak", "fp64", "feeding"]


def test_the_lines_fit_80_columns_and_hold_every_part():
    text = Findings(name="train.py", found=(SLOW,), bound="bound by feeding: " + "so it is " * 12).summary()
    assert max(map(len, text.split("\n"))) <= 80
    for part in ("1. feeding: each update", "about 31 s, 77 % of a step", "31.0 ms of 40.2 ms", "train.py:12"):
        assert part in text
    assert "   +DataLoader(data, num_workers=2)" in text.split("\n")


def test_without_findings_one_line_tells_what_bounds_the_training():
    text = Findings(name="train.py", bound="bound by arithmetic: 9 of 10 ms").summary()
    assert text == "train.py: nothing wrong found; bound by arithmetic: 9 of 10 ms"


def test_control_characters_of_a_script_do_not_reach_the_terminal():
    assert "\x1b" not in Findings(name="a\x1b[2J", found=(Finding(name="x", what="y", change="a\n\x1b[2J"),)).summary()


def test_findings_are_json():
    found = json.loads(json.dumps(Findings(name="train.py", found=(SLOW, LEAK)).to_dict()))
    assert [one["name"] for one in found["found"]] == ["leak", "feeding"]
    assert found["found"][1]["evidence"] == ["31.0 ms of 40.2 ms an update", "0 workers"]
    assert found["found"][0]["cost_s"] is None


@pytest.mark.parametrize("wrong", [{"cost_s": -1.0}, {"cost_s": float("nan")}, {"share": 1.5}])
def test_figures_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Finding(name="x", what="y", **wrong)
