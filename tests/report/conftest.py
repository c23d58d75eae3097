"""One run of each kind for all tests of reports."""

import finished_runs
import pytest


@pytest.fixture(scope="session")
def runs(tmp_path_factory, forks):
    """A folder with a run of each kind."""
    home = tmp_path_factory.mktemp("runs")
    data = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLAP_CACHE", str(tmp_path_factory.mktemp("cache")))  # nothing was trained before
        finished_runs.tuned(home / "fit")
        finished_runs.grown(home / "trees")
        finished_runs.searched(home / "search")
        finished_runs.classified(home / "temporal", data / "bars.csv")
    (data / "train.py").write_text(finished_runs.SCRIPT)
    done = forks.run("-m", "hotlap", "run", "--plan", "max", "--out", str(home / "script"), "train.py", cwd=data)
    assert done.returncode == 0, done.stderr
    return home
