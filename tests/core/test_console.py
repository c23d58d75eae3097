"""Progress as its user sees it: in a log, in a terminal, in a notebook, or not at all."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from hotlap.core import console
from hotlap.core.console import LineConsole, NotebookConsole, SilentConsole, TerminalConsole, open_console
from hotlap.core.errors import MachineError
from hotlap.fitting.progress import Reading, status

SRC = Path(__file__).parents[2] / "src"


def reading(step=5, total=10, **changes):
    given = {
        "step": step,
        "total_steps": total,
        "epoch": 1,
        "loss": 0.25,
        "steps_per_s": 12.5,
        "samples_per_s": 4000.0,
        "elapsed_s": 3.0,
        "eta_s": 75.0,
    }
    return Reading(**{**given, **changes})


def of(one):
    """A reading as a console takes it."""
    return one.step, one.total_steps, partial(status, one)


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch):
    for name in ("HOTLAP_PROGRESS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")


@contextmanager
def terminal():
    """A pseudo-terminal to write to, and what it received when all is written."""
    master, slave = pty.openpty()
    received = bytearray()

    def listen():
        while True:
            try:
                piece = os.read(master, 4096)
            except OSError:  # the other end is closed
                return
            if not piece:
                return
            received.extend(piece)

    ear = threading.Thread(target=listen)
    ear.start()
    stream = os.fdopen(slave, "w", encoding="utf-8")
    try:
        yield stream, received
    finally:
        if not stream.closed:
            stream.close()
        ear.join(10)
        os.close(master)


def screen(received):
    """What stands on the screen in the end: a terminal that knows line ends, cursor up and erasing."""
    rows, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", bytes(received).decode()):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif piece.endswith("A"):
            row = max(0, row - int(piece[2:-1] or 1))
        elif piece == "\x1b[2K":
            rows[row] = ""
        elif not piece.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + piece + rows[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in rows if line.strip()]


# --- a reading in words ------------------------------------------------------------------------------


def test_a_reading_is_one_line_with_place_loss_rates_and_time_left():
    assert status(reading(1500, 20_000)) == (
        "step 1,500/20,000 · epoch 2 · loss 0.25 · 12.5 steps/s · 4,000 samples/s · 1 min 15 s left"
    )


def test_what_is_not_known_is_left_out():
    assert status(reading(total=None, eta_s=None, loss=float("nan"))) == (
        "step 5 · epoch 2 · loss nan · 12.5 steps/s · 4,000 samples/s"
    )


# --- which view --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "env", "wanted", "kind"),
    [
        (Terminal, {}, True, TerminalConsole),
        (Terminal, {"TERM": "dumb"}, True, LineConsole),
        (Terminal, {"HOTLAP_PROGRESS": "lines"}, True, LineConsole),
        (Terminal, {"HOTLAP_PROGRESS": "off"}, True, SilentConsole),
        (Terminal, {"HOTLAP_PROGRESS": " OFF"}, True, SilentConsole),
        (Terminal, {}, False, SilentConsole),
        (Terminal, {"HOTLAP_PROGRESS": "lines"}, False, SilentConsole),
        (io.StringIO, {}, True, LineConsole),
        (io.StringIO, {"HOTLAP_PROGRESS": "lines"}, True, LineConsole),
        (io.StringIO, {"HOTLAP_PROGRESS": "off"}, True, SilentConsole),
    ],
)
def test_the_view_fits_where_the_output_goes_unless_told_otherwise(monkeypatch, stream, env, wanted, kind):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert type(open_console(wanted, stream())) is kind


def test_without_a_stream_named_progress_goes_to_stderr(capsys):
    open_console().say("a line")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "a line\n")


def test_without_any_stderr_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert type(open_console()) is SilentConsole


def test_in_a_notebook_the_cell_is_used_unless_a_stream_or_lines_are_asked_for(monkeypatch):
    monkeypatch.setattr(console, "in_notebook", lambda: True)
    assert type(open_console()) is NotebookConsole
    assert type(open_console(stream=io.StringIO())) is LineConsole
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    assert type(open_console()) is LineConsole


def test_ipython_in_a_terminal_is_no_notebook():
    code = """
    import sys
    from IPython.core.interactiveshell import InteractiveShell
    InteractiveShell.instance()
    from hotlap.core.console import open_console
    print(type(open_console()).__name__)
    """
    assert run(code).stdout == "LineConsole\n"


def run(code, **settings):
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    settings = {"capture_output": True, **settings}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, text=True, check=True, **settings)


# --- nothing and lines -------------------------------------------------------------------------------


def test_silence_shows_nothing_and_asks_for_no_reading(capfd):
    view = SilentConsole()
    view.say("x")
    view.show(*of(reading()))
    view.close()
    assert capfd.readouterr() == ("", "")
    assert view.every_s == float("inf")


def test_a_log_gets_plain_lines_and_nothing_else():
    stream = io.StringIO()
    view = open_console(stream=stream)
    view.say("[bold] :smile: a line")
    view.show(*of(reading()))
    view.say("another")
    view.close()
    assert stream.getvalue() == f"[bold] :smile: a line\n{status(reading())}\nanother\n"


def test_a_log_is_not_filled_with_readings(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    view = LineConsole(stream, seldom_s=15)
    shown = []
    for step in range(40):
        view.show(*of(reading(step, 100)))
        if str(stream.getvalue()).count("\n") > len(shown):
            shown.append(now[0] - 50)
        now[0] += 1
    assert shown == [0, 15, 30]


# --- a terminal --------------------------------------------------------------------------------------


def test_a_terminal_gets_a_bar_that_is_taken_away_while_the_lines_stay():
    with terminal() as (stream, received):
        view = open_console(stream=stream)
        assert type(view) is TerminalConsole
        view.say("first")
        view.show(*of(reading(2)))
        view.show(*of(reading(5)))
        view.say("second")
        view.show(*of(reading(9)))
        view.close()
        stream.close()
    text = bytes(received).decode()
    assert "━" in text
    assert "step 5/10 · epoch 2 · loss 0.25" in text
    assert screen(received) == ["first", "second"]
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def test_the_bar_stands_below_the_lines_while_it_lives():
    with terminal() as (stream, received):
        view = TerminalConsole(stream)
        view.say("first")
        view.show(*of(reading(5)))
        view.say("second")
        stream.close()
    first, second, bar = screen(received)
    assert (first, second) == ("first", "second")
    assert bar.startswith("━")
    assert "step 5/10" in bar


def test_a_line_is_shown_as_it_is_and_broken_between_words_alone():
    line = "[red] :x: /a/path [/] " + "long " * 60 + "end"
    with terminal() as (stream, received):
        view = TerminalConsole(stream)
        view.say(line)
        view.show(*of(reading()))
        view.say(line)
        view.close()
        stream.close()
    shown = screen(received)
    assert " ".join(" ".join(shown).split()) == f"{line} {line}"
    assert len(shown) > 2
    assert max(map(len, shown)) <= 100


def test_a_view_that_showed_no_reading_closes_without_a_trace():
    with terminal() as (stream, received):
        view = TerminalConsole(stream)
        view.say("only")
        view.close()
        view.close()
        stream.close()
    assert bytes(received) == b"only\r\n"


def test_results_on_stdout_stay_there_while_a_bar_lives_on_stderr():
    code = """
    from hotlap.core.console import open_console
    view = open_console()
    view.show(5, 10, lambda width: "step 5/10")
    print("a result")
    view.close()
    print(type(view).__name__)
    """
    with terminal() as (stream, received):
        done = run(code, capture_output=False, stdout=subprocess.PIPE, stderr=stream)
    assert done.stdout == "a result\nTerminalConsole\n"
    assert "━" in bytes(received).decode()
    assert screen(received) == []


def test_a_user_who_prints_in_the_same_terminal_sees_it_above_the_bar(monkeypatch):
    with terminal() as (stream, received):
        monkeypatch.setattr(sys, "stdout", stream)
        view = TerminalConsole(stream)
        view.show(*of(reading(3)))
        print("the user's own")
        view.show(*of(reading(4)))
        view.close()
        assert sys.stdout is stream
        stream.close()
    assert screen(received) == ["the user's own"]


# --- a notebook --------------------------------------------------------------------------------------


class Handle:
    def __init__(self):
        self.pages = []

    def update(self, page, raw):
        assert raw
        self.pages.append(page)


@pytest.fixture
def cell(monkeypatch):
    handle = Handle()

    def display(page, *, raw, display_id):
        assert raw
        assert display_id is True
        assert not handle.pages, "one output, changed in place"
        handle.pages.append(page)
        return handle

    monkeypatch.setattr("IPython.display.display", display)
    return handle.pages


def test_a_notebook_gets_one_output_with_lines_and_a_bar_that_goes(cell):
    view = NotebookConsole()
    view.say("a <b> & c")
    view.show(*of(reading(5)))
    assert cell[-1]["text/html"].startswith('<pre>a &lt;b&gt; &amp; c\n</pre><progress value="0.5000" max="1"')
    assert "step 5/10" in cell[-1]["text/html"]
    view.say("second")
    assert "<progress" in cell[-1]["text/html"], "a new line does not take the bar away"
    view.close()
    assert cell[-1] == {
        "text/html": "<pre>a &lt;b&gt; &amp; c\nsecond\n</pre>",
        "text/plain": "a <b> & c\nsecond\n",
    }


def test_a_notebook_view_that_said_nothing_leaves_no_empty_output(cell):
    NotebookConsole().close()
    assert cell == []


def test_a_training_of_unknown_length_has_an_empty_bar(cell):
    NotebookConsole().show(*of(reading(total=None)))
    assert 'value="0.0000"' in cell[-1]["text/html"]


FIT_CELL = """
import torch, hotlap
from hotlap.core.errors import MachineError
from hotlap.core import console
console.NotebookConsole.every_s = 0.0
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
x = torch.randn(64, 4)
job = hotlap.Job(
    model=model, data=(x, (x[:, 0] > 0).long()), loss=torch.nn.CrossEntropyLoss(),
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=16, epochs=2, device="cpu",
)
run = hotlap.fit(job)
"""

RUN_NOTEBOOK = """
import json, os, sys
from pathlib import Path
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(code) for code in json.loads(sys.argv[1])]
notebook = nbformat.v4.new_notebook(cells=cells)
client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}})
seen = []
updates = client.process_message
def note(message, cell, index):
    if message["msg_type"] in ("display_data", "update_display_data"):
        seen.append(message["content"]["data"].get("text/html", ""))
    return updates(message, cell, index)
client.process_message = note
client.execute(env=dict(os.environ))
Path(sys.argv[2], "done.json").write_text(json.dumps({"cells": [cell.outputs for cell in cells], "seen": seen}))
"""


def test_in_a_real_notebook_a_fit_leaves_one_output_with_its_lines_and_no_noise(tmp_path):
    cells = [FIT_CELL, "print(run.stopped)", "hotlap.fit(job, progress=False).steps"]
    env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "default", "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(
        [sys.executable, "-c", RUN_NOTEBOOK, json.dumps(cells), str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "done.json").read_text())
    fitted, told, again = result["cells"]
    (output,) = fitted
    assert output["output_type"] == "display_data"
    lines = output["data"]["text/plain"].splitlines()
    assert lines[0].startswith("hotlap ")
    assert [line[:7] for line in lines if line.startswith("epoch")] == ["epoch 1", "epoch 2"]
    assert output["data"]["text/html"].startswith("<pre>hotlap ")
    assert "<progress" not in output["data"]["text/html"], "the bar is taken away in the end"
    assert any("<progress" in page for page in result["seen"]), "a bar was shown while it trained"
    assert [output["text"] for output in told] == ["after all epochs\n"]
    assert [output["output_type"] for output in again] == ["execute_result"]


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (200, ["step 5/10", "epoch 2", "loss 0.25", "12.5 steps/s", "4,000 samples/s", "1 min 15 s left"]),
        (60, ["step 5/10", "loss 0.25", "12.5 steps/s", "1 min 15 s left"]),
        (10, ["step 5/10", "1 min 15 s left"]),
    ],
)
def test_in_a_narrow_terminal_what_matters_least_is_left_out(width, kept):
    assert status(reading(), width).split(" · ") == kept


def test_an_unknown_word_for_progress_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("HOTLAP_PROGRESS", "linez")
    with pytest.raises(MachineError, match="did you mean 'lines'"):
        open_console()


def test_a_long_training_begins_a_new_output_now_and_then():
    shown = []

    class Handle:
        def update(self, page, raw):
            shown[-1] = page

    view = NotebookConsole()

    def display(page, raw, display_id):
        shown.append(page)
        return Handle()

    view._display = display
    for number in range(120):
        view.say(f"line {number}")
        view.show(*of(reading()))
    view.close()
    lines = [line for page in shown for line in page["text/plain"].splitlines()]
    assert lines == [f"line {number}" for number in range(120)]
    assert len(shown) == 3
    assert not any("progress" in page["text/html"] for page in shown)
