"""`hotlap run --compare`: runs take turns, times have their spread, and what changed nothing is called noise."""

import os
import textwrap

import pytest

SCRIPT = """
    import os, sys, torch
    from torch import nn
    with open("order", "a") as file:
        file.write("without " if "--off" in sys.orig_argv else "with ")
    assert "HOTLAP_BEGAN" not in os.environ
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    print("loss", 0.5)
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory, forks):
    """What a comparison of two rounds says, and the order of its runs."""
    home = tmp_path_factory.mktemp("compared")
    (home / "train.py").write_text(textwrap.dedent(SCRIPT))
    variables = {**os.environ, "HOTLAP_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    variables.pop("HOTLAP_PLAN", None)
    command = ("-m", "hotlap", "run", "--compare", "--out", "kept", "train.py")
    done = forks.run(*command, cwd=home, environment=variables)
    return done, (home / "order").read_text().split(), home


def test_runs_take_turns(compared):
    done, order, _ = compared
    assert done.returncode == 0, done.stderr
    assert order == ["without", "with", "with", "without"]


def test_wall_and_cpu_time_have_their_spread_and_start_up_stands_apart(compared):
    lines = {line.split("  ")[0]: line for line in compared[0].stderr.splitlines()}
    for name in ("wall", "CPU time", "start-up", "the rest"):
        assert lines[name].count("[") >= 2, lines[name]
    assert "0 s" not in lines["CPU time"].replace("10 s", "")
    assert not lines["start-up"].split()[1].startswith("0")


def test_where_nothing_was_changed_the_difference_is_called_noise(compared):
    assert "hotlap changed nothing in the end: a difference in time is noise" in compared[0].stderr


def test_every_run_with_hotlap_leaves_its_own_folder(compared):
    home = compared[2]
    assert (home / "kept" / "ledger.jsonl").is_file()
    assert (home / "kept-2" / "ledger.jsonl").is_file()
