"""`hotlap watch` in a real pseudo-terminal of several sizes, resized while it runs; once, as JSON, in a notebook."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from typer.testing import CliRunner

import hotlap
from hotlap.cli import app
from hotlap.core.errors import StoreError
from hotlap.monitor import watch
from hotlap.store.telemetry import write_live

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def state(**changes):
    usual = {"pid": os.getpid(), "at": time.time(), "ended": False, "kind": "fit", "name": "Net", "device": "cpu"}
    place = {"step": 1200, "steps": 5000, "steps_per_s": 134.0, "left_s": 28.0, "losses": [[1, 2.0], [2, 1.0]]}
    return {**usual, **place, **changes}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "Net-1"
    folder.mkdir(parents=True)
    write_live(folder, state())
    return folder


class Terminal:
    """A pseudo-terminal in which a command runs."""

    def __init__(self, *words, columns, rows, cwd, **environ):
        self._mine, theirs = pty.openpty()
        self.resize(columns, rows)
        environment = {name: os.environ[name] for name in os.environ if name not in ("COLUMNS", "LINES")}
        environment |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8", **environ}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotlap", *words], stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd,
            env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._shown = ""

    def resize(self, columns, rows):
        fcntl.ioctl(self._mine, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self):
        """More of what it shows; nothing once it has ended."""
        try:
            more = os.read(self._mine, 65536).decode(errors="replace")
        except OSError:
            return False
        self._shown += more
        return bool(more)

    def frame(self, *, wanted):
        """The lines of a whole frame that `wanted` takes; it is waited for."""
        while True:
            # Each frame begins at the top left corner; the last one may not be whole yet.
            for frame in reversed(self._shown.split("\x1b[H")[1:-1]):
                found = [CODES.sub("", line).rstrip() for line in frame.replace("\r", "").split("\n")]
                if wanted(found):
                    self._shown = ""
                    return found
            assert self.read(), f"it ended: {self._shown[-2000:]}"

    def end(self):
        """All that it shows until its end, and its exit code."""
        while self.read():
            pass
        os.close(self._mine)
        return CODES.sub("", self._shown.replace("\r", "")), self.process.wait()


@pytest.fixture
def terminal(run):
    opened = []

    def make(*words, columns=80, rows=24, **environ):
        opened.append(Terminal("watch", *words, columns=columns, rows=rows, cwd=run.parents[1], **environ))
        return opened[-1]

    yield make
    for one in opened:
        one.process.kill()
        one.process.wait()


def widest(frame):
    return max(map(len, frame))


def test_a_live_view_fits_the_terminal_also_when_it_is_resized_while_it_runs(terminal):
    shown = terminal("--every", "0.2", columns=80, rows=24)
    frame = shown.frame(wanted=lambda lines: any("Net-1" in line for line in lines))
    assert widest(frame) == 80  # the clock stands at its right end
    assert len(frame) <= 24
    assert any("1,200 of 5,000 steps" in line for line in frame)
    shown.resize(200, 50)
    frame = shown.frame(wanted=lambda lines: widest(lines) > 80)
    assert widest(frame) == 200
    assert 24 < len(frame) <= 50
    shown.resize(50, 10)
    frame = shown.frame(wanted=lambda lines: widest(lines) < 80)
    assert widest(frame) == 50
    assert len(frame) <= 10


def test_it_begins_at_200_columns_and_50_rows(terminal):
    frame = terminal(columns=200, rows=50).frame(wanted=lambda lines: any("Net-1" in line for line in lines))
    assert widest(frame) == 200
    assert len(frame) <= 50


def test_it_shows_what_changes_and_ends_with_the_run_that_was_named(terminal, run):
    shown = terminal(str(run), "--every", "0.1")
    shown.frame(wanted=lambda lines: any("1,200 of" in line for line in lines))
    write_live(run, state(step=1300))
    shown.frame(wanted=lambda lines: any("1,300 of" in line for line in lines))
    write_live(run, state(step=5000, ended=True, stopped="after all steps"))
    text, code = shown.end()
    assert code == 0
    assert "ended      after all steps · 5,000 of 5,000 steps" in text.split("hotlap watch")[-1]


def test_ctrl_c_ends_it_and_leaves_the_last_view(terminal):
    shown = terminal("--every", "0.1")
    shown.frame(wanted=lambda lines: any("Net-1" in line for line in lines))
    shown.process.send_signal(signal.SIGINT)
    text, code = shown.end()
    assert code == 0
    assert "1,200 of 5,000 steps" in text.split("hotlap watch")[-1]
    assert "Traceback" not in text


def test_a_watch_that_is_terminated_gives_the_screen_back(terminal):
    shown = terminal("--every", "0.1")
    shown.frame(wanted=lambda lines: any("Net-1" in line for line in lines))
    shown.process.send_signal(signal.SIGTERM)
    while shown.read():
        pass
    assert shown.process.wait() == 143
    assert "\x1b[?1049l" in shown._shown
    assert "\x1b[?25h" in shown._shown


def test_a_terminal_that_shows_ascii_only_gets_ascii_only(terminal):
    frame = terminal(PYTHONIOENCODING="ascii").frame(wanted=lambda lines: any("Net-1" in line for line in lines))
    assert all(line.isascii() for line in frame)


# --- once, and as JSON -----------------------------------------------------------------------------------------


def invoke(*words):
    return CliRunner().invoke(app, ["watch", *map(str, words)])


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(watch, "GLANCE_S", 0.0)


@pytest.mark.parametrize("words", [["--once"], []])
def test_without_a_terminal_it_prints_one_view(run, monkeypatch, words):
    monkeypatch.chdir(run.parents[1])
    done = invoke(*words)
    assert done.exit_code == 0
    assert "runs/Net-1" in done.stdout
    assert "1,200 of 5,000 steps" in done.stdout
    assert "\x1b" not in done.stdout


def test_as_json_it_is_one_object_with_all_that_is_known(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    found = json.loads(invoke("--json").stdout)
    (training,) = found["trainings"]
    assert (training["run"], training["status"], training["step"]) == ("runs/Net-1", "running", 1200)
    assert found["gpus"] == [] or found["gpu_error"] is None
    assert found["host"]["cores"] >= 1


def test_where_nothing_runs_the_last_training_is_shown_or_a_note(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_live(run, state(ended=True, stopped="after all steps"))
    assert "after all steps" in invoke().stdout
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    done = invoke()
    assert done.exit_code == 0
    assert "".join(f"no training runs in {tmp_path / 'empty' / 'runs'}".split()) in "".join(done.stdout.split())


def test_a_training_is_found_by_its_process(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    assert "runs/Net-1" in invoke(os.getpid()).stdout


def test_of_a_process_that_is_no_training_of_hotlaps_it_says_plainly_that_it_sees_it_from_outside(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = invoke(os.getpid())
    assert f"process {os.getpid()}" in done.stdout
    assert "this is what can be seen from outside" in " ".join(done.stdout.split())
    assert json.loads(invoke(os.getpid(), "--json").stdout)["process"]["ram_bytes"] > 0


def test_what_is_neither_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="gone does not exist; name the folder of a run, or the number of a process"):
        hotlap.watch("gone")
    (tmp_path / "run").mkdir()
    with pytest.raises(StoreError, match="no training in run says how it stands"):
        hotlap.watch("run")
    (tmp_path / "run" / "plan.toml").write_text("")
    with pytest.raises(StoreError, match="HOTLAP_SAMPLES=off"):
        hotlap.watch(tmp_path / "run")


def test_from_python_without_a_terminal_it_prints_one_view(run, capsys):
    hotlap.watch(run)
    assert "1,200 of 5,000 steps" in capsys.readouterr().out


def test_in_a_notebook_it_is_a_display_that_changes_until_the_training_has_ended(run, monkeypatch):
    shown = []

    class Handle:
        def update(self, page, raw):
            shown.append(page)

    def display(page, raw, display_id):
        shown.append(page)
        write_live(run, state(ended=True, stopped="<b>done</b>"))
        return Handle()

    monkeypatch.setattr(watch, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    hotlap.watch(run, every_s=0.01)
    first, last = shown
    assert "1,200 of 5,000 steps" in first["text/plain"]
    assert "ended      <b>done</b>" in last["text/plain"]
    assert "&lt;b&gt;done&lt;/b&gt;" in last["text/html"]
