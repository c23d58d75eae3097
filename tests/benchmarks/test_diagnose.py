"""The planted problems: each has a script that can be repaired, and the table judges only what was measured."""

import pytest
from benchmarks.diagnose import ALL, PLANTED, Planted, Row

SLEEPS = Planted("sleeping_loader", "feeding")


def test_every_script_is_planted_once_and_has_a_repaired_twin():
    scripts = {path.stem: path.read_text() for path in PLANTED.glob("*.py")}
    assert sorted(one.script for one in ALL) == sorted(scripts)
    assert len(ALL) == 12
    for text in scripts.values():
        compile(text, "planted", "exec")
        assert 'REPAIRED = "--repaired" in sys.argv' in text


def test_costs_are_compared_in_seconds_and_as_parts_of_the_run_and_memory_as_bytes():
    row = Row(SLEEPS, ("feeding",), 20.0, predicted=4.0, gave=16.0, shares=(0.4, 0.5))
    assert (row.named, row.ratio, row.ratio_of_shares) == ("feeding", pytest.approx(0.25), pytest.approx(0.8))
    memory = Planted("growing_losses", "graphs-kept", kind="memory")
    grows = Row(memory, ("copies", "graphs-kept", "copies"), 20.0, predicted=2.0, gave=4.0)
    assert (grows.named, grows.ratio, grows.ratio_of_shares) == ("copies", pytest.approx(0.5), pytest.approx(0.5))
    assert Row(SLEEPS, ("feeding",), 20.0, ended="KeyError, whole").ratio is None
