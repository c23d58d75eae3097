"""`hotlap diagnose` on a GPU: planted problems that no CPU shows are named first."""

import shutil
from pathlib import Path

import pytest

import hotlap

PLANTED = Path(__file__).parents[2] / "benchmarks" / "planted"


@pytest.mark.parametrize(
    ("script", "name"),
    [("item_everywhere", "synchronising"), ("on_cpu", "on-cpu"), ("launch_blocking", "variables")],
)
def test_a_planted_problem_is_named_first_and_is_gone_in_the_repaired_script(script, name, tmp_path, monkeypatch):
    shutil.copy(PLANTED / f"{script}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    found = hotlap.diagnose(f"{script}.py", seconds=40, progress=False)
    assert found.found[0].name == name
    repaired = hotlap.diagnose(f"{script}.py --repaired", seconds=40, progress=False)
    assert name not in [one.name for one in repaired.found]
