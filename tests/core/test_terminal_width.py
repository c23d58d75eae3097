"""Lines break between words where a terminal is narrower than they are, and nowhere else."""

import io
import json

import pytest

from hotlap.cli.output import show, show_json
from hotlap.core.terminal import columns, fitted, say, wrapped

LINE = (
    "write      DataLoader(num_workers=2, persistent_workers=True): 1.48x as fast as no workers at all, on this machine"
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    return Terminal()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("line", [LINE, "  12,000  none", "no label: " + LINE, ""])
def test_no_word_is_broken_and_no_line_too_long(line, width):
    parts = wrapped(line, width)
    assert " ".join(" ".join(parts).split()) == " ".join(line.split())
    assert all(len(part) <= width or " " not in part.strip() for part in parts)


def test_later_lines_begin_below_the_text():
    first, *others = wrapped(LINE, 60)
    assert first.startswith("write      DataLoader(")
    assert all(line.startswith(" " * 11) and line[11] != " " for line in others)


def test_only_a_terminal_has_columns(narrow, monkeypatch):
    assert columns(narrow) == 40
    assert columns(io.StringIO()) is None
    assert columns(None) is None
    monkeypatch.delenv("COLUMNS")
    assert columns(Terminal()) is None  # it has no number to ask the system by


def test_what_goes_to_a_terminal_fits_it_and_a_file_gets_whole_lines(narrow, monkeypatch):
    say(LINE, stream=narrow)
    assert max(map(len, narrow.getvalue().splitlines())) <= 40
    say(LINE, stream=(file := io.StringIO()))
    assert file.getvalue() == f"{LINE}\n"
    monkeypatch.setattr("sys.stdout", (out := Terminal()))
    show(LINE)
    assert out.getvalue() == narrow.getvalue()


def test_json_stays_in_one_line(narrow, monkeypatch):
    text = json.dumps({"why": "because " * 20})
    assert fitted([text], narrow) == [text]
    monkeypatch.setattr("sys.stdout", narrow)
    show_json({"why": "because " * 20}, indent=2)
    assert json.loads(narrow.getvalue())["why"].startswith("because")
    assert len(narrow.getvalue().splitlines()) == 3


class Bare:
    """A stream of a user's own that can be written to, and nothing else."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("kind", [Bare, type("Odd", (Bare,), {"isatty": lambda self: True})])
def test_a_stream_that_does_not_say_what_it_is_gets_whole_lines(kind, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    say(LINE, stream=(stream := kind()))
    assert stream.text == f"{LINE}\n"
