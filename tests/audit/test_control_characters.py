"""Whatever a stranger writes into a file, a name or a cell: what hotlap prints of it drives no terminal."""

import contextlib
import io
import json
import logging
import re
import shutil
import sys
import tempfile
import unicodedata
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_data import coloured_files
from recipe_data import bars_file, texts_file, tiny_config, write_rows
from safetensors.torch import load_file, save_file

import hotlap.cli
import hotlap.demo
from hotlap.core.console import LineConsole, NotebookConsole, TerminalConsole
from hotlap.core.errors import HotlapError, JobError, StoreError
from hotlap.core.terminal import clean, clean_lines, logger, say
from hotlap.recipes import encoders
from hotlap.store import manifest
from hotlap.store.cache import Cache
from hotlap.store.manifest import MANIFEST

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("PIL")

WRITTEN = ["\x1b[31m", "\x1b]0;title\x07", "\r", "\x08", "\x9b31m", "\u202e", "\u2028", "\x85", "\n", "\x7f"]
"""Escape sequences, a title, overwriting, C1 controls, text turned around, ends of lines."""
SIGNS = [*WRITTEN, "\x00", "\udc9b"]
"""And what no text file, or no name of a file, can hold."""
FORGED = "FORGED"
CHECKPOINT = "fit/checkpoints/step-*/manifest.json"
HOSTILE = [f"{sign}{FORGED}" for sign in SIGNS]


def assert_harmless(text):
    for sign in set(text) - {"\n"}:
        assert unicodedata.category(sign) not in ("Cc", "Cf", "Cs", "Zl", "Zp"), ascii(text[-600:])
    assert not any(line.startswith(FORGED) for line in text.split("\n")), text[-600:]


def printed(*words):
    """What a command prints, and how it ends: never by a traceback."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv, code = ["hotlap", *map(str, words)], 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            hotlap.cli.main()
    except SystemExit as error:
        code = error.code
    finally:
        sys.argv = before
    assert_harmless(out.getvalue())
    assert_harmless(err.getvalue())
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return code, out.getvalue() + err.getvalue()


# --- the one function ---------------------------------------------------------------------------------


@given(st.text())
def test_any_text_becomes_one_harmless_line(text):
    line = clean(text)
    assert line.isprintable()
    assert clean(line) == line
    assert clean_lines(text).count("\n") == text.count("\n  ")
    assert text.isprintable() is (line == text) or "Zs" in {unicodedata.category(sign) for sign in text}


@pytest.mark.parametrize("words", HOSTILE)
def test_errors_lines_views_and_logs_are_harmless(words, capsys, monkeypatch):
    for error in (StoreError(words), JobError([words, f"a{words}"]), HotlapError(f"a{words}")):
        assert_harmless(f"hotlap: {error}")
    say(f"a{words}")
    LineConsole(sys.stderr).say(f"a{words}")
    logger("hotlap.test").warning("a%s", words)
    logging.lastResort.handle(logging.LogRecord("x", 30, "", 0, "plain", None, None))
    assert_harmless("".join(capsys.readouterr()))
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    TerminalConsole(stream).say(f"a{words}")
    assert_harmless(stream.getvalue())
    view = NotebookConsole.__new__(NotebookConsole)
    shown = []
    view._display, view._handle, view._lines, view._bar = lambda page, **_: shown.append(page), None, [], ""
    view.say(f"a{words}")
    assert_harmless(shown[0]["text/plain"])


def test_lines_of_a_list_of_mistakes_stay_lines():
    error = JobError(["one", "two\nthree"])
    assert str(error) == "the job has 2 mistakes:\n  - one\n  - two\\nthree"


# --- files of a stranger ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Files as hotlap writes and reads them: runs of each recipe, a run with checkpoints, tables and a config."""
    root = tmp_path_factory.mktemp("world")
    patch = pytest.MonkeyPatch()
    patch.setattr(encoders, "MINILM", "a_package_that_nobody_has")
    patch.setenv("HOTLAP_CACHE", str(root / "cache"))
    patch.setenv("HOTLAP_PROGRESS", "lines")
    data = texts_file(root / "train.csv", rows=60)
    quick = {"epochs": 1, "vocabulary": 200, "most": 16, "plan": "off", "device": "cpu"}
    config = tiny_config(root / "config.json")
    hotlap.train("text", data, config=str(config), out=root / "run", progress=False, **quick)
    (root / "pictures").mkdir()
    found = coloured_files(root / "pictures", 12)
    table = write_rows(root / "pictures" / "table.csv", ["path", "colour"], found)
    small = {"size": 16, "width": 4, "depth": 1, "epochs": 1, "plan": "off", "device": "cpu"}
    hotlap.train("image", table, target="colour", out=root / "image", progress=False, **small)
    small = {"models": "mlp", "length": 8, "epochs": 1, "plan": "off", "device": "cpu"}
    hotlap.train("temporal", bars_file(root / "bars.csv", symbols=1), out=root / "bars", progress=False, **small)
    hotlap.fit(hotlap.demo.digits_job(epochs=1, device="cpu"), plan="off", out=root / "fit", save_every=10,
               progress=False, started_by=["hotlap", "demo", "--epochs", "1", "--device", "cpu"])  # fmt: skip
    yield root
    patch.undo()


def strings_in(value, at=()):
    """The place of each string in a JSON value; a place that ends in None is that of a key."""
    if isinstance(value, str):
        yield at
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from strings_in(inner, (*at, number))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield (*at, key, None)
            yield from strings_in(inner, (*at, key))


def changed(value, place, words):
    """The value with these words behind the string, or the key, at a place."""
    if not place:
        return value + words
    if place[1:] == (None,):
        return {key + words if key == place[0] else key: inner for key, inner in value.items()}
    copy = value.copy()
    copy[place[0]] = changed(value[place[0]], place[1:], words)
    return copy


def spoiled(path, draw):
    """Put hostile words into one string of a file; those of a JSON file as they are, of another into its text."""
    words = draw(st.sampled_from(HOSTILE))
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in _one_changed(lines, words, draw)))
    elif path.suffix == ".json":
        found = _one_changed(json.loads(path.read_text()), words, draw)
        if path.name == MANIFEST and "sha256" in found:  # as a stranger would sign it
            del found["sha256"]
            found |= {"sha256": manifest._digest(found)}
        path.write_text(json.dumps(found))
    elif path.suffix == ".safetensors":
        found = load_file(path)
        name = draw(st.sampled_from(sorted(found)))
        words = words.encode(errors="replace").decode()
        save_file({key + words if key == name else key: value for key, value in found.items()}, path)
    else:
        text = path.read_text()
        places = [at + 1 for at, sign in enumerate(text) if sign in '"=,\n']
        at = draw(st.sampled_from(places))
        if path.suffix == ".toml":  # as TOML escapes it
            words = "".join(f"\\u{ord(sign):04x}" for sign in words) if draw(st.booleans()) else words
        path.write_bytes((text[:at] + words + text[at:]).encode(errors="surrogateescape"))


def _one_changed(value, words, draw):
    return changed(value, draw(st.sampled_from(list(strings_in(value)))), words)


ANSWERS = ("--out", "{0}/answers.csv", "--device", "cpu")
PREDICT = ("predict", "{0}/run", "--data", "{0}/train.csv", *ANSWERS)
PICTURES = ("predict", "{0}/image", "--data", "{0}/pictures/table.csv", *ANSWERS)
BARS = ("predict", "{0}/bars", "--data", "{0}/bars.csv", *ANSWERS)
LOOK = ("train", "text", "--data", "{0}/train.csv", "--config", "{0}/config.json", "--device", "cpu")
REPLAY = ("run", "--out", "{0}/fit", "{0}/train.csv")
RESUME = ("resume", "{0}/fit", "--quiet")
FILES = [
    ("run/recipe.json", PREDICT),
    ("image/recipe.json", PICTURES),
    ("bars/recipe.json", BARS),
    ("pictures/table.csv", PICTURES),
    ("bars.csv", BARS),
    ("run/tokenizer.json", PREDICT),
    ("run/model.safetensors", PREDICT),
    ("train.csv", (*LOOK, "--target", "none")),
    ("train.csv", (*LOOK, "--vocabulary", "1")),
    ("config.json", (*LOOK, "--vocabulary", "1")),
    ("run/options.toml", ("train", "text", "--options", "{0}/run/options.toml", "--out", "{0}/run")),
    ("fit/plan.toml", ("run", "--plan", "{0}/fit/plan.toml", *REPLAY[1:])),
    ("fit/ledger.jsonl", ("run", "--plan", "{0}/fit", *REPLAY[1:])),
    ("fit/ledger.jsonl", RESUME),
    ("fit/started.json", RESUME),
    ("fit/record.json", RESUME),
    ("fit/environment.json", RESUME),
    ("fit/metrics.jsonl", RESUME),
    (CHECKPOINT, RESUME),
]


@settings(max_examples=50, derandomize=True)
@given(st.data())
def test_no_string_of_any_file_reaches_the_terminal(world, data):
    name, words = data.draw(st.sampled_from(FILES))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(world, root, ignore=shutil.ignore_patterns("cache"))
        file = next(root.glob(name))
        spoiled(file, data.draw)
        if name == CHECKPOINT:
            (root / "fit" / "record.json").unlink()
        printed(*(word.format(root) for word in words))


@pytest.mark.parametrize("sign", [sign for sign in SIGNS if sign != "\x00"])
def test_no_name_of_a_file_or_folder_reaches_the_terminal(world, tmp_path, sign):
    folder, data = tmp_path / f"run{sign}{FORGED}", tmp_path / f"{sign}{FORGED}.csv"
    shutil.copytree(world / "run", folder)
    shutil.copy(world / "train.csv", data)
    code, said = printed("predict", folder, "--data", data, "--out", tmp_path / f"a{sign}{FORGED}.csv")
    assert code == 0
    assert FORGED in said
    assert printed("predict", folder, "--data", data, "--out", tmp_path / f"{sign}{FORGED}.doc")[0]
    assert printed("resume", folder)[0] == 1
    assert printed("train", "text", f"--{sign}{FORGED}", "x")[0] == 2
    assert printed("train", f"{sign}{FORGED}")[0] == 2


def test_names_of_columns_classes_and_cells_do_not_reach_the_terminal(world, tmp_path):
    """From the reading of a table to its predictions, where nothing is refused."""
    kinds = [f"{name}{''.join(WRITTEN)}{FORGED}" for name in ("sport", "money")]
    rows = [
        [at, f"{'goal' if at % 2 else 'bank'} {WRITTEN[at % len(WRITTEN)]}{FORGED} {at}", kinds[at % 2]]
        for at in range(60)
    ]
    names = [f"{name}{''.join(WRITTEN)}{FORGED}" for name in ("id", "text", "label")]
    data = write_rows(tmp_path / "train.csv", names, rows)
    quick = ("--epochs", "1", "--vocabulary", "400", "--most", "16", "--plan", "off", "--device", "cpu")
    words = ("--target", names[2], "--text", names[1], "--config", world / "config.json", "--test", data, *quick)
    code, said = printed("train", "text", "--data", data, "--out", tmp_path / "run", *words)
    assert code == 0, said
    assert said.count(FORGED) > 4
    assert printed("train", "text", "--data", data, "--out", tmp_path / "again", "--json", *words)[0] == 0
    for more in (("--probabilities",), ("--keep", f"\x1b{FORGED}")):
        printed("predict", tmp_path / "run", "--data", data, "--out", tmp_path / f"{len(more)}.csv", *more)


def test_facts_of_the_cache_and_names_in_an_archive_do_not_reach_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    words = "".join(f"{sign}{FORGED}" for sign in WRITTEN)
    Cache().put("features", "a" * 64, tensors={"x": torch.zeros(1)}, facts={"what": words, words: 1})
    assert FORGED in printed("cache", "list")[1]
    for command in ("list", "verify", "size"):
        printed("cache", command, "--json")
        printed("cache", command)
    for sign in WRITTEN:
        with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
            archive.writestr(f"run/{sign}{FORGED}", "x")
        assert printed("unpack", tmp_path / "run.zip", tmp_path / "new")[0] == 1


def test_an_error_that_nobody_expected_is_shown_as_python_does_and_drives_no_terminal(monkeypatch, capsys):
    def fail(*words, **more):
        raise RuntimeError(f"a{''.join(HOSTILE)}")

    monkeypatch.setattr(hotlap.cli.typer.main, "get_command", fail)
    with pytest.raises(SystemExit) as ended:
        hotlap.cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.startswith("Traceback (most recent call last):\n  File ")
    assert unicodedata.category("\x1b") not in {unicodedata.category(sign) for sign in said if sign != "\n"}


@pytest.mark.parametrize(
    "line",
    [
        ["gpus", "a\u202eb"],
        ["cache", "prune", "a\u202eb"],
        ["--a\u202eb"],
        ["cache", "a\u202eb"],
        ["gpus", "--a\u202eb"],
    ],
)
def test_a_command_line_that_makes_no_sense_is_shown_without_what_turns_text_around(line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hotlap", *line])
    with pytest.raises(SystemExit, match="2"):
        hotlap.cli.main()
    shown = capsys.readouterr().err
    assert "\\u202e" in shown
    assert "\u202e" not in shown


def test_nothing_is_shown_or_logged_another_way():
    source = Path(hotlap.cli.__file__).parents[1]
    ways = (
        "print(",
        "sys.stderr.write",
        "sys.stdout.write",
        "logging.getLogger(__name__)",
        "typer.echo",
        "warnings.warn",
    )
    allowed = {
        "script/running.py": "sys.stderr.write",  # what python itself would show of a script's end
        "recipes/word_counts.py": "sys.stdout.write",  # a pipe to hotlap itself
        "script/calls/early_loss.py": "warnings.warn",  # what torch itself warns a script of, at the script's line
    }
    found = []
    for file in source.rglob("*.py"):
        name, text = str(file.relative_to(source)), file.read_text()
        used = [way for way in ways if re.search(rf"(?<![\w.\"]){re.escape(way)}", text)]
        found += [(name, way) for way in used if allowed.get(name) != way]
    assert not found
