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


def test_costs_are_compared_as_shares_and_memory_as_bytes():
    row = Row(SLEEPS, "feeding", predicted=4.0, gave=16.0, shares=(0.4, 0.5))
    assert (row.is_first, row.ratio) == (True, pytest.approx(0.8))
    grows = Row(Planted("growing_losses", "graphs-kept", kind="memory"), "copies", predicted=2.0, gave=4.0)
    assert (grows.is_first, grows.ratio) == (False, pytest.approx(0.5))
    assert Row(SLEEPS, "feeding", ended="KeyError, whole").ratio is None
