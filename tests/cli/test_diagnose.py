"""`hotlap diagnose RUN` and `hotlap diagnose PID` from a shell."""

import json
import os
import subprocess
import sys

import pytest
from finished_runs import fitted

ASKS_FOR_TORCH = """
import sys
sys.argv = ["hotlap", "diagnose", *sys.argv[1:]]
from hotlap.cli import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run whose loss does not fall."""
    folder = tmp_path_factory.mktemp("home")
    fitted(folder / "runs" / "flat", lr=0.0)
    return folder


def test_a_run_is_diagnosed_by_its_folder(forks, home):
    done = forks.run("-m", "hotlap", "diagnose", "runs/flat", cwd=home, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert "not-learning: the training loss did not fall" in done.stdout
    found = json.loads(forks.run("-m", "hotlap", "diagnose", "--json", "runs/flat", cwd=home).stdout)
    assert found["name"] == "flat"
    assert "not-learning" in [one["name"] for one in found["found"]]


def test_a_process_is_diagnosed_by_its_number(forks, home):
    with subprocess.Popen(["sleep", "600"], env={}) as process:
        try:
            done = forks.run("-m", "hotlap", "diagnose", "--json", process.pid, cwd=home)
        finally:
            process.kill()
    assert done.returncode == 0, done.stderr
    assert [one["name"] for one in json.loads(done.stdout)["found"]] == ["nothing-moves"]


def test_runs_and_processes_are_diagnosed_without_torch(home):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ASKS_FOR_TORCH, "runs/flat"], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.parametrize(
    ("named", "said"),
    [("999999999", "no process has the number 999999999"), ("runs", "is not a run folder"), ("nowhere", "nowhere")],
)
def test_what_is_neither_a_run_nor_a_process_gets_one_line(forks, home, named, said):
    done = forks.run("-m", "hotlap", "diagnose", named, cwd=home)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
