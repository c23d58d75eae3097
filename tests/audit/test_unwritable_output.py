"""A log that cannot be written ends no training: it goes on, is saved, and ends as it would have."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hotlap
from hotlap.core import terminal
from hotlap.core.console import TerminalConsole, open_console
from hotlap.core.job import Job
from hotlap.data.parallel import progress_bar

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
HOTLAP = [sys.executable, "-m", "hotlap"]
SCRIPT = """
import torch, hotlap
from torch import nn
model = nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
job = hotlap.Job(model=model, data=data, loss=nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                 batch_size=4, epochs=2, device="cpu")
hotlap.fit(job, out="run")
"""
LOOP = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
open("ended", "w").write("yes")
"""


def tiny_job():
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model=model, data=data, loss=nn.MSELoss(), optimizer=optimizer, batch_size=4, epochs=2, device="cpu")


def ended(words, folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
    environ = {**os.environ, "HOTLAP_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environ, stdout=stdout, stderr=stderr, text=True, timeout=300)


@pytest.fixture
def unread():
    """The writing end of a pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        yield file


class Dead:
    """A terminal that has gone away."""

    encoding = "utf-8"

    def __init__(self, error=errno.EIO):
        self.error, self.writes = error, 0

    def isatty(self):
        return True

    def write(self, text):
        self.writes += 1
        raise OSError(self.error, "gone")

    def flush(self):
        raise OSError(self.error, "gone")


def test_a_script_whose_log_is_full_trains_to_its_end_and_ends_well(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with FULL.open("w") as full:
        done = ended([sys.executable, "train.py"], tmp_path, stderr=full)
    assert done.returncode == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_command_whose_output_nobody_reads_trains_to_its_end(tmp_path, unread, forks):
    words = [*HOTLAP[1:], "demo", "--epochs", "2", "--plan", "off", "--out", "run", "--device", "cpu"]
    assert forks.run(*words, cwd=tmp_path, stdout=unread, stderr=unread).returncode == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "artefacts.json").is_file()


def test_results_that_cannot_be_written_are_an_error_in_one_line(tmp_path):
    with FULL.open("w") as full:
        done = ended([*HOTLAP, "--version"], tmp_path, stdout=full)
    assert done.stderr == "hotlap: cannot write the results to stdout: No space left on device\n"
    assert done.returncode == 1


def test_a_watched_script_ends_as_it_does_alone_where_hotlaps_words_cannot_be_written(tmp_path, forks):
    (tmp_path / "train.py").write_text(LOOP)
    with FULL.open("w") as full:
        done = forks.run(*HOTLAP[1:], "run", "--plan", "auto", "train.py", cwd=tmp_path, stderr=full)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "ended").read_text() == "yes"
    assert list(tmp_path.glob("runs/*/plan.toml"))


def test_an_error_that_cannot_be_shown_keeps_its_exit_code_and_stays_off_the_results(tmp_path):
    with FULL.open("w") as full:
        assert ended([*HOTLAP, "run"], tmp_path, stderr=full).returncode == 2
    done = ended(["bash", "-c", f"{sys.executable} -m hotlap run 2>&-"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")


def test_help_that_cannot_be_written_is_an_error_in_one_line(tmp_path):
    with FULL.open("w") as full:
        done = ended([*HOTLAP, "train", "--help"], tmp_path, stdout=full)
        assert done.stderr == "hotlap: cannot write to the terminal or file: No space left on device\n"
        assert done.returncode == 1
        assert ended([*HOTLAP, "--nothing"], tmp_path, stderr=full).returncode == 2


def test_a_recipe_trains_to_its_end_though_none_of_its_lines_can_be_written(tmp_path, monkeypatch):
    from recipe_data import bars_file

    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    data = bars_file(tmp_path / "bars.csv", rows=700, symbols=1)
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        quick = {"models": "mlp", "epochs": 1, "length": 8, "device": "cpu", "plan": "off"}
        folder = hotlap.train("temporal", data, out=tmp_path / "run", **quick)
        monkeypatch.undo()
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("error", [errno.EIO, errno.EPIPE, errno.ENOSPC])
@pytest.mark.parametrize("progress", ["lines", ""])
def test_fit_goes_on_when_its_terminal_goes_away(tmp_path, monkeypatch, progress, error):
    stream = Dead(error)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("HOTLAP_PROGRESS", progress)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(TerminalConsole, "every_s", 0.0)
    run = hotlap.fit(tiny_job(), plan="off", out=tmp_path / "run")
    monkeypatch.undo()
    assert stream.writes
    assert run.steps == 4
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_fit_goes_on_when_stderr_was_closed_before_it(tmp_path, monkeypatch):
    closed = (tmp_path / "log").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    run = hotlap.fit(tiny_job(), plan="off", out=tmp_path / "run")
    monkeypatch.undo()
    assert run.steps == 4


def test_bars_and_lines_of_all_other_work_are_lost_alone(monkeypatch):
    for stream in (Dead(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("hotlap.data.parallel.PATIENCE_S", 0.0)
        with progress_bar() as show:
            show(0, 4)
            show(2, 4)
        terminal.say("a line")
        open_console().say("a line")
    monkeypatch.undo()


def test_a_stream_of_the_users_gets_all_that_is_shown(monkeypatch):
    """One that copies what it is given into a log may have the number of the file below it."""

    class Copies:
        encoding = "utf-8"

        def __init__(self):
            self.lines = []

        def fileno(self):
            return 2

        def write(self, text):
            self.lines.append(text)

        def flush(self):
            pass

    stream = Copies()
    monkeypatch.setattr(sys, "stderr", stream)
    terminal.say("one", "two")
    monkeypatch.undo()
    assert "".join(stream.lines) == "one\ntwo\n"


def test_what_the_encoding_of_a_stream_lacks_is_escaped(tmp_path):
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        print("before", file=stream)
        terminal.say("µ · 3", stream=stream)
        print("after", file=stream)
    assert (tmp_path / "log").read_text() == "before\n\\xb5 \\xb7 3\nafter\n"
