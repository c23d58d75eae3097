"""`hotlap run`, from the outside. A stand-in takes the place of the session, but where a test says otherwise."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotlap.cli import app
from hotlap.cli.run import ToRun, _check
from hotlap.core.errors import HotlapError
from hotlap.core.tricks import TRICKS
from hotlap.store.run_folder import RunFolder

SRC = Path(__file__).parents[2] / "src"
# Every Python in these tests imports this first.
STAND_IN = """
import os, sys, types

class Settings(types.SimpleNamespace):
    pass

class Session:
    def __init__(self, settings):
        self.settings = settings

    def __enter__(self):
        print("opened", self.settings, file=sys.stderr)

    def __exit__(self, *_):
        print("closed", file=sys.stderr)

module = types.ModuleType("hotlap.script.session")
module.Session, module.Settings = Session, Settings
sys.modules[module.__name__] = module
"""
TORCH = "def manual_seed(seed):\n    print('torch is seeded with', seed)\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The working directory."""
    for name in ("HOTLAP_PLAN", "HOTLAP_SEED", "PYTHONHASHSEED", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{SRC}")
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(path, source):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))


def python(*words, **variables):
    env = {**os.environ, **variables}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)


def hotlap(*words, **variables):
    return python("-m", "hotlap", *words, **variables)


# --- the script ----------------------------------------------------------------------------------------

SCRIPT = """
import sys
import beside
print(__name__, __file__, sys.argv, sys.path[0], sys.excepthook is sys.__excepthook__)
sys.stdout.buffer.write(b"\\xff\\0 loss 0.1\\r")
sys.stdout.write("no newline at the end")
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["deep/train.py"]),
        (["--off"], ["deep/train.py"]),
        (["--plan", "off"], ["deep/train.py"]),
        ([], ["-m", "deep.train"]),
        (["--off"], ["-m", "deep.train"]),
        (["--plan", "max"], ["deep"]),
    ],
)
def test_stdout_and_exit_code_are_those_of_python_to_the_last_byte(home, options, words):
    write(home / "deep/train.py", SCRIPT)
    write(home / "deep/__main__.py", SCRIPT)
    write(home / "deep/beside.py", "")
    write(home / "beside.py", "")
    words = [*words, "--help", "--out", "x", "-m", "--", "--off", ""]
    command = [sys.executable, "-m", "hotlap", "run", *options, *words]
    plain = subprocess.run([sys.executable, *words], capture_output=True, check=False)
    ours = subprocess.run(command, capture_output=True, check=False)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout) == (3, plain.stdout)
    assert b"no newline" in ours.stdout
    if "off" in " ".join(options):
        assert ours.stderr == plain.stderr == b""


def test_an_error_of_the_scripts_shows_none_of_hotlaps_frames(home):
    write(home / "train.py", "def f():\n    raise ValueError('bad')\nf()")
    plain, bare, ours = python("train.py"), hotlap("run", "--off", "train.py"), hotlap("run", "train.py")
    assert (bare.returncode, bare.stderr) == (1, plain.stderr)
    assert ours.stderr.splitlines()[1:-1] == plain.stderr.splitlines()


def test_an_error_of_hotlaps_that_the_script_lets_out_is_the_scripts(home):
    write(home / "train.py", "import hotlap; raise hotlap.PlanError('mine')")
    done = hotlap("run", "--off", "train.py")
    assert (done.returncode, done.stderr) == (1, python("train.py").stderr)


@pytest.mark.parametrize("options", [[], ["--off"]])
@pytest.mark.parametrize("start", [["-m", "hotlap"], ["-c", "from hotlap.cli import main; main()"]])
def test_signals_end_it_as_they_end_python(home, options, start):
    for number in (signal.SIGINT, signal.SIGTERM):
        write(home / "train.py", f"import os, time; print('at', flush=True); os.kill(os.getpid(), {int(number)})")
        done = python(*start, "run", *options, "train.py")
        assert (done.returncode, done.stdout) == (-number, "at\n")
        assert ("Traceback" in done.stderr) == (number == signal.SIGINT)
        assert done.stderr.count("closed") == (not options)
        assert "hotlap" not in done.stderr


@pytest.mark.parametrize("options", [[], ["--off"]])
def test_few_frames_lie_beneath_a_script_and_their_source_is_not_shown(home, options):
    """torch formats all of them at every `torch.manual_seed`."""
    write(home / "train.py", "import sys, traceback\nprint(*traceback.format_stack(), sys.exc_info())")
    done = hotlap("run", *options, "train.py")
    lines = done.stdout.splitlines()
    assert lines[-1].endswith("(None, None, None)")
    at = [line.split()[-1] for line in lines[:-1] if line.lstrip().startswith("File ")]
    assert at == ["_run_module_as_main", "_run_code", "<module>", "main", "run", "<module>"]
    assert len(lines) == len(at) + 2, "but for the line of the script's own"


def test_off_imports_no_torch(home):
    write(home / "train.py", "import sys; print([name for name in ('torch', 'numpy') if name in sys.modules])")
    assert hotlap("run", "--off", "train.py").stdout == "[]\n"
    assert hotlap("run", "train.py", HOTLAP_PLAN="off").stdout == "[]\n"


def test_a_session_that_cannot_be_had_is_one_line_and_the_script_runs(home):
    write(home / "train.py", "print('ran')")
    write(home.parent / "site/sitecustomize.py", "import sys; sys.modules['hotlap.script.session'] = None")
    done = hotlap("run", "train.py")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "ran\n", 1)
    assert done.stderr.endswith("; the script runs without hotlap\n")


# --- the command line ----------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What a command line asks of the session, without any script being run."""
    opened = []
    monkeypatch.setattr("hotlap.script.running.run", lambda target, around, seed: around.__enter__() or 0)
    stand_in = types.ModuleType("hotlap.script.session")
    stand_in.Settings = lambda **settings: settings
    stand_in.Session = lambda settings: contextlib.nullcontext(opened.append(settings))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)

    def ask(*words):
        with pytest.raises(ToRun) as script:
            CliRunner().invoke(app, ["run", *words])
        assert script.value.begin() == 0
        return opened.pop()

    return ask


def test_what_is_asked_for_reaches_the_session(home, asked, monkeypatch):
    write(home / "train.py", "")
    left_out = ("early-item", "short-step")
    words = ["--plan", "max", "--out", "kept", "--tune-seconds", "5", "--report", "--json"]
    words += [word for name in left_out for word in ("--without", name)]
    every = asked(*words, "train.py", "--json")
    expected = {"name": "train", "plan": "max", "out": home / "kept", "tune_s": 5.0, "report": True}
    expected["words"] = ("train.py", "--json")
    assert every == {**expected, "without": left_out, "as_json": True, "torch_s": every["torch_s"]}
    assert every["torch_s"] >= 0
    nothing = asked("-m", "json.tool")
    expected = {"name": "json.tool", "plan": None, "out": None, "tune_s": None, "report": False}
    expected["words"] = ("-m", "json.tool")
    assert nothing == {**expected, "without": (), "as_json": False, "torch_s": nothing["torch_s"]}
    monkeypatch.setenv("HOTLAP_PLAN", "max")
    assert asked("train.py")["plan"] == "max"
    monkeypatch.setenv("HOTLAP_PLAN", "off")
    assert asked("--plan", "auto", "train.py")["plan"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a script to run: hotlap run [OPTIONS] train.py ARGS…, or hotlap run [OPTIONS] -m MODULE ARGS…"),
        (["-m"], "name a script to run: hotlap run [OPTIONS] train.py ARGS…, or hotlap run [OPTIONS] -m MODULE ARGS…"),
        (["--off", "--plan", "max", "train.py"], "--off leaves the script alone; drop --plan max"),
        (["--off", "--compare", "--out=x", "a.py"], "--off leaves the script alone; drop --compare, --out"),
        (["--plan", "off", "--json", "train.py"], "--plan off leaves the script alone; drop --json"),
        (["--compare", "--json", "train.py"], "--compare prints no JSON; drop --json"),
        (["--off", "--without", "early-item", "a.py"], "--off leaves the script alone; drop --without"),
        (["--without", "early", "train.py"], "--without early: unknown name; did you mean 'early-item'?"),
        (["--without", "fuse", "train.py"], "--without fuse: unknown name; did you mean 'fused'?"),
        (["--without", "xy", "train.py"], "--without xy: unknown name; `hotlap run --without '?'` lists all names"),
        (["gone.py"], "there is no file 'gone.py'"),
        (["--plan", "gone", "train.py"], "unknown plan 'gone': use auto, off, max, a plan file or a run folder"),
        (["--off", "gone.py"], "there is no file 'gone.py'"),
        (["--compare", "-m", "gone"], "no module named 'gone' in this folder or on the path"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line_and_the_code_is_2(home, forks, words, said):
    write(home / "train.py", "print('ran')")
    done = forks.run("-m", "hotlap", "run", *words, cwd=home, environment=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"hotlap: {said}\n")


@pytest.mark.parametrize(
    ("variables", "words", "said"),
    [
        ({"HOTLAP_PLAN": "off"}, ["--compare"], "HOTLAP_PLAN=off leaves nothing to compare; add --plan auto"),
        ({"HOTLAP_SEED": "-1"}, [], "HOTLAP_SEED is '-1'; a seed is a whole number from 0 to 4294967295"),
    ],
)
def test_a_variable_that_makes_no_sense_is_one_line_and_the_code_is_2(home, forks, variables, words, said):
    write(home / "train.py", "print('ran')")
    done = forks.run("-m", "hotlap", "run", *words, "train.py", cwd=home, environment=os.environ | variables)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"hotlap: {said}\n")


@pytest.mark.parametrize("words", [["--plan", "taken"], ["--out", "taken"]])
def test_a_plan_or_a_folder_that_will_not_do_is_refused_before_the_script_runs(home, words):
    write(home / "train.py", "open('ran', 'w')")
    write(home / "taken/file", "")
    done = CliRunner().invoke(app, ["run", *words, "train.py"])
    assert isinstance(done.exception, HotlapError), done.exception
    assert not (home / "ran").exists()


def test_where_nothing_is_trained_no_folder_is_left(home, forks):
    write(home / "train.py", "import os; print(os.listdir())")
    write(home / "here/kept", "")
    for folder in ("deep/er/run", "here/run"):
        done = forks.run("-m", "hotlap", "run", "--out", folder, "train.py", cwd=home, environment=os.environ)
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in home.iterdir()) == ["here", "train.py"]
    assert [path.name for path in (home / "here").iterdir()] == ["kept"]


def test_a_run_that_begins_beside_it_in_the_same_new_folder_does_not_matter(home, monkeypatch):
    create = RunFolder.create

    def beside(path):
        write(path.parent / "other/plan.toml", "")
        return create(path)

    monkeypatch.setattr(RunFolder, "create", beside)
    _check("auto", Path("new/mine"))
    assert [path.name for path in (home / "new").iterdir()] == ["other"]


def test_a_question_mark_lists_every_trick_with_what_it_does_and_needs_no_script():
    done = CliRunner().invoke(app, ["run", "--without", "?"])
    assert done.exit_code == 0
    assert [tuple(line.split(maxsplit=1)) for line in done.stdout.splitlines()] == list(TRICKS.items())


# --- both ways -----------------------------------------------------------------------------------------


@pytest.fixture
def light_torch(home):
    """A torch that takes no time to be imported."""
    write(home.parent / "site/torch.py", TORCH)


def test_compare_runs_it_both_ways_with_one_seed_and_tells_them_apart(home, light_torch):
    write(
        home / "train.py",
        """
        import random, sys
        under = "hotlap.script.running" in sys.modules and not "--off" in sys.orig_argv
        print("chance", random.random(), hash("x"))
        print("epoch 1 loss", 0.51 if under else 0.50)
        print("acc: 0.9", sys.argv[1:], file=sys.stderr)
        sys.exit(4 if under else 0)
        """,
    )
    left_out = ["--without", "early-item", "--without", "short-step"]
    done = hotlap("run", "--compare", "--tune-seconds", "5", *left_out, "train.py", "--json", "x")
    assert done.returncode == 4
    seeded, chance, _, *second = done.stdout.splitlines()
    assert seeded == "torch is seeded with 0"
    assert second[:2] == [seeded, chance]
    shown = [line for line in done.stderr.splitlines() if "so timings may be off" not in line]
    first, heading, acc, _, opened, again, closed, *table = shown
    assert first.startswith("hotlap: the script runs 4 times here, first without hotlap")
    assert heading == "hotlap: --- without hotlap, run 1 of 2"
    assert (acc, again, closed) == ("acc: 0.9 ['--json', 'x']", acc, "closed")
    assert "tune_s=5.0" in opened
    assert "without=('early-item', 'short-step')" in opened
    assert table[1].startswith("wall ")
    assert table[6].split() == ["exit", "code", "0", "4", "DIFFERENT"]
    told = [line.split(maxsplit=3) for line in table]
    assert ["loss", "0.5", "0.51", "+0.01 (+2.00%)"] in told
    assert ["acc", "0.9", "0.9", "same"] in told
    assert table[-1] == "printed: the same 3 lines except for their numbers"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_a_comparison_ends_the_script_too(home, light_torch, number):
    write(home / "train.py", "import os, time; print('pid', os.getpid(), flush=True); time.sleep(30)")
    command = [sys.executable, "-m", "hotlap", "run", "--compare", "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (line := process.stdout.readline()).startswith("pid"):
            assert process.poll() is None
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.stderr.read().count("---") == 1, "there is no second run"
    assert (process.returncode, rest) == (-number, "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.split()[1]), 0)


def test_what_a_comparison_prints_is_shown_as_it_comes(home, light_torch):
    write(home / "train.py", "import os, time; print('first')\nwhile not os.path.exists('seen'): time.sleep(0.01)")
    command = [sys.executable, "-m", "hotlap", "run", "--compare", "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while process.stdout.readline() != "first\n":
            assert process.poll() is None
        (home / "seen").touch()
        process.stdout.read()
    assert process.returncode == 0
