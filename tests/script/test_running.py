"""Scripts in this process are as they are under python: names, streams, exit codes, signals, children."""

import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
DRIVER = """
import os, signal, sys, time
from hotlap.script.running import Target, end_by, run

class Around:
    def __enter__(self):
        if os.environ.get("FAULT") == "enter":
            raise ValueError("no room")
        print("opened", file=sys.stderr, flush=True)

    def __exit__(self, kind, error, at):
        if os.environ.get("UNTIL"):
            print("closing", file=sys.stderr, flush=True)
            gone_wrong = time.monotonic() + 60
            while not os.path.exists(os.environ["UNTIL"]) and time.monotonic() < gone_wrong:
                time.sleep(0.01)
        print("closed", kind and kind.__name__, file=sys.stderr, flush=True)
        if os.environ.get("FAULT") == "exit":
            raise ValueError("no room")

words = sys.argv[1:]
target = Target(module=words[1], args=words[2:]) if words[0] == "-m" else Target(path=words[0], args=words[1:])
seed = os.environ.get("SEED")
code = run(target, None if os.environ.get("BARE") else Around(), seed and int(seed))
if code < 0:
    end_by(-code)
sys.exit(code)
"""
SPEAKS = ("opened\n", "closed ", "hotlap: ")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working directory, with the driver beside it."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "driver.py").write_text(DRIVER)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return folder


def write(path, source):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def python(*words, text="", **variables):
    env = {**os.environ, **variables}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=env, input=text, capture_output=True, text=True, check=False)


def driven(*words, **variables):
    return python("../driver/driver.py", *words, **variables)


def quietly(text):
    """Without the lines of what is around the script."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(SPEAKS))


def same(*words, stderr=True, **settings):
    """What both came to, which has to be the same."""
    plain, ours = python(*words, **settings), driven(*words, **settings)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout), ours.stderr
    if stderr:
        assert quietly(ours.stderr) == plain.stderr
    assert "hotlap" not in quietly(ours.stderr)
    return ours


# --- what the script sees ------------------------------------------------------------------------------

LOOKS = """
import os, sys
mine = {k: v for k, v in globals().items() if k not in ("__loader__", "__spec__", "os", "sys")}
print(sorted(mine.items(), key=str))
print(type(__loader__).__name__, __spec__ and (__spec__.name, __spec__.origin, __spec__.parent))
print(sys.argv, sys.path, os.getcwd(), sys.modules["__main__"].__dict__ is globals(), __name__ == "__main__")
print(sys.excepthook is sys.__excepthook__, sys.stdin.read())
"""


@pytest.mark.parametrize("path", ["look.py", "./look.py", "../home/look.py", "deep/er/look.py", "link.py", "no_suffix"])
def test_a_script_sees_what_it_sees_under_python(home, path):
    write(home / "deep/er/look.py", LOOKS)
    write(home / "look.py", LOOKS)
    write(home / "no_suffix", LOOKS)
    (home / "link.py").symlink_to("deep/er/look.py")
    same(path, "--out", "-m", "--", "", "ä", text="typed")


@pytest.mark.parametrize("path", ["app", "app/", "./app.zip"])
def test_a_folder_or_zip_with_a_main_sees_what_it_sees_under_python(home, path):
    write(home / "app/__main__.py", LOOKS + "import beside\n")
    write(home / "app/beside.py", "print(__name__)")
    with zipfile.ZipFile(home / "app.zip", "w") as archive:
        for name in ("__main__.py", "beside.py"):
            archive.write(home / "app" / name, name)
    assert "beside" in same(path, "-x").stdout


@pytest.mark.parametrize("name", ["look", "package", "package.inner.look"])
def test_a_module_sees_what_it_sees_under_python(home, name):
    write(home / "package/__init__.py", "import sys; print(sys.argv)")
    write(home / "package/__main__.py", LOOKS + "from .inner import look")
    write(home / "package/inner/__init__.py", "")
    write(home / "package/inner/look.py", LOOKS)
    write(home / "look.py", LOOKS)
    same("-m", name, "-m", "x")


def test_what_is_around_is_opened_before_the_first_line_and_closed_after_the_last(home):
    write(home / "a.py", "import sys; sys.stdout.write('last words'); print('here', file=sys.stderr)")
    command = [sys.executable, "../driver/driver.py", "a.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    assert done.stdout == "opened\nhere\nlast wordsclosed None\n"


def test_classes_pickle_and_children_by_fork_and_spawn_find_them(home):
    write(
        home / "a.py",
        """
        import atexit, multiprocessing, pickle, sys, threading

        class Net:
            def __call__(self, x):
                return x + 1

        def late():
            threading.main_thread().join()
            print("thread", sys.modules["__main__"].Net is Net)

        if __name__ == "__main__":
            atexit.register(lambda: print("exit", type(pickle.loads(pickle.dumps(Net()))) is Net))
            threading.Thread(target=late).start()
            for how in ("fork", "spawn"):
                with multiprocessing.get_context(how).Pool(1) as pool:
                    print(how, pool.map(Net(), [1, 2]), flush=True)
        """,
    )
    done = same("a.py")
    assert done.stdout == "fork [2, 3]\nspawn [2, 3]\nthread True\nexit True\n"
    assert done.stderr.count("closed") == 1


def test_a_forked_child_that_ends_closes_nothing(home):
    write(
        home / "a.py",
        """
        import os, sys
        if os.fork() == 0:
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
    )
    done = same("a.py")
    assert (done.stdout, done.stderr) == ("5\n", "opened\nclosed None\n")


def test_random_numbers_begin_with_the_seed(home):
    write(
        home / "a.py",
        "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())",
    )
    import random

    import numpy
    import torch

    state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    expected = f"{random.random()} {numpy.random.rand()} {torch.rand(1).item()}\n"
    random.setstate(state[0]), numpy.random.set_state(state[1]), torch.set_rng_state(state[2])
    assert driven("a.py", SEED="5").stdout == expected


# --- how it ends ---------------------------------------------------------------------------------------

ENDS = {
    "the last line": "print('done')",
    "exit": "import sys; sys.exit()",
    "a code": "import sys; sys.exit(3)",
    "a truth": "raise SystemExit(True)",
    "a code below 0": "import sys; sys.exit(-1)",
    "a code above 255": "import sys; sys.exit(259)",
    "no code of a process": "import sys; sys.exit(2**70)",
    "a message": "import sys; sys.exit('no data found')",
    "two things": "import sys; sys.exit(('a', 1))",
    "an error": "def f():\n    raise ValueError('bad loss')\n\nf()",
    "an error with a cause": """
        try:
            {}["lr"]
        except KeyError as error:
            raise RuntimeError("no lr") from error
        """,
    "an error in a handler": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    print(undefined)",
    "several errors": "raise ExceptionGroup('both', [ValueError(1), TypeError(2)])",
    "a syntax error": "print('never')\nfor x in:\n    pass",
    "a syntax error in an import": "import broken",
    "deep recursion": "def f():\n    f()\ntry:\n    f()\nexcept RecursionError:\n    print('deep')",
    "its own hook": "import sys\nsys.excepthook = lambda kind, error, at: print(kind, at.tb_lineno)\n1 / 0",
    "its own hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(9)\n1 / 0",
    "its own hook that fails": "import sys\ndef hook(*_):\n    raise ValueError('x')\nsys.excepthook = hook\n1 / 0",
    "an interrupt": "import atexit; atexit.register(print, 'at exit')\nraise KeyboardInterrupt",
    "no stdout": "import sys; sys.stdout = None; sys.exit(4)",
    "a warning": "import warnings; warnings.warn('odd')",
    "bytes": "import sys; sys.stdout.buffer.write(bytes(range(100))); print('end', end='')",
}


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_under_python(home, how):
    write(home / "a.py", ENDS[how])
    write(home / "broken.py", "for x in:")
    done = same("a.py")
    assert ("opened" in done.stderr) == (how != "a syntax error")
    assert done.stderr.count("closed") == done.stderr.count("opened")


@pytest.mark.parametrize("how", ["a code", "a message", "an error", "a syntax error", "an interrupt"])
def test_a_module_ends_as_under_python(home, how):
    write(home / "a.py", ENDS[how])
    done = same("-m", "a", stderr=False)
    assert "running.py" not in done.stderr


def test_an_error_while_a_package_is_imported_is_the_scripts_own(home):
    write(home / "package/__init__.py", "import not_there")
    write(home / "package/train.py", "print(1)")
    done = same("-m", "package.train", stderr=False)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'not_there'\n" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.py"], "there is no file 'gone.py'"),
        (["empty"], "'empty' has no __main__.py"),
        (["picture.png"], "'picture.png' is not Python source code"),
        (["latin.py"], "'latin.py' is not Python source code"),
        (["-m", "gone"], "no module named 'gone' in this folder or on the path"),
        (["-m", "gone.deep"], "no module named 'gone' in this folder or on the path"),
        (["-m", ""], "no module named '' in this folder or on the path"),
        (["-m", "package.gone"], "No module named package.gone"),
        (["-m", "package"], "No module named package.__main__; 'package' is a package and cannot be directly executed"),
    ],
)
def test_where_there_is_nothing_to_run_one_line_says_so_and_the_code_is_2(home, words, said):
    (home / "empty").mkdir()
    (home / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    (home / "latin.py").write_bytes(b"x = '\xe9'\n")
    write(home / "package/__init__.py", "")
    done = driven(*words)
    assert (done.returncode, done.stdout) == (2, "")
    around = ("opened", "closed NoScriptError")
    assert [line for line in done.stderr.splitlines() if line not in around] == [f"hotlap: {said}"]


def test_a_script_that_may_not_be_read_is_one_line(home):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    write(home / "a.py", "").chmod(0)
    done = driven("a.py")
    assert (done.returncode, done.stderr) == (2, "hotlap: cannot read 'a.py': Permission denied\n")


@pytest.mark.parametrize("fault", ["enter", "exit"])
def test_a_fault_around_the_script_is_one_line_and_the_script_does_not_notice(home, fault):
    write(home / "a.py", "import sys; print('ran'); sys.exit(6)")
    done = driven("a.py", FAULT=fault)
    assert (done.returncode, done.stdout) == (6, "ran\n")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hotlap")]
    assert "ValueError: no room" in line


# --- signals -------------------------------------------------------------------------------------------


def signalled(*numbers, words=("a.py",), until="ready", **variables):
    """Send signals once it says that it is ready, and return its code, its stdout, and its stderr since then."""
    process = subprocess.Popen(
        [sys.executable, "../driver/driver.py", *words],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process, process.stdout as out, process.stderr as err:
        while not err.readline().startswith(until):
            assert process.poll() is None, "it never got there"
        for number in numbers:
            process.send_signal(number)
        Path("sent").touch()
        told = out.read(), err.read()
    return process.returncode, *told


WAITS = """
import os, sys, time
print("buffered")
print("ready", file=sys.stderr, flush=True)
while not os.path.exists("sent"):
    time.sleep(0.01)
print("over")
"""


def test_sigterm_closes_what_is_around_and_then_ends_the_process(home):
    write(home / "a.py", WAITS)
    assert signalled(signal.SIGTERM) == (-signal.SIGTERM, "buffered\n", "closed None\n")


def test_a_shell_sees_143(home):
    write(home / "a.py", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} ../driver/driver.py a.py; echo $?"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "143\n"


def test_sigterm_while_it_is_being_closed_waits_for_the_end_of_that(home):
    write(home / "a.py", "")
    assert signalled(signal.SIGTERM, until="closing", UNTIL="sent") == (-signal.SIGTERM, "", "closed None\n")


def test_a_second_sigterm_ends_it_at_once(home):
    write(home / "a.py", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert signalled(signal.SIGTERM, until="closing", UNTIL="never") == (-signal.SIGTERM, "", "")


def test_a_script_that_listens_to_sigterm_itself_is_in_charge(home):
    listens = """
        import signal
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            assert before is signal.SIG_DFL, before
        """
    write(home / "a.py", textwrap.dedent(listens) + WAITS)
    assert signalled(signal.SIGTERM) == (7, "buffered\n", "closed SystemExit\n")


def test_a_script_that_ignores_sigterm_goes_on(home):
    write(home / "a.py", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + WAITS)
    assert signalled(signal.SIGTERM) == (0, "buffered\nover\n", "closed None\n")


def test_a_script_that_gives_sigterm_back_leaves_it_to_the_system(home):
    back = "import signal; before = signal.signal(signal.SIGTERM, print); signal.signal(signal.SIGTERM, before)\n"
    write(home / "a.py", back + WAITS)
    assert signalled(signal.SIGTERM) == (-signal.SIGTERM, "buffered\n", "closed None\n")


def test_a_child_of_the_script_ends_by_sigterm_without_closing_anything(home):
    write(
        home / "a.py",
        """
        import multiprocessing, signal, time
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
        child.start()
        child.terminate()
        child.join()
        print(child.exitcode)
        """,
    )
    done = same("a.py")
    assert (done.stdout, done.stderr) == ("-15\n", "opened\nclosed None\n")


def test_with_nothing_around_it_signals_are_not_touched(home):
    write(home / "a.py", "import signal; print(signal.signal.__module__, signal.getsignal(signal.SIGTERM))")
    assert driven("a.py", BARE="1").stdout == python("a.py").stdout


@pytest.mark.parametrize("words", [("a.py",), ("-m", "a")])
def test_ctrl_c_ends_it_as_python_ends_and_what_runs_at_exit_runs(home, words):
    write(home / "a.py", "import atexit; atexit.register(print, 'at exit')" + WAITS)
    code, out, err = signalled(signal.SIGINT, words=words)
    assert (code, out) == (-signal.SIGINT, "buffered\nat exit\n")
    assert err.startswith("Traceback")
    assert err.endswith("KeyboardInterrupt\nclosed KeyboardInterrupt\n")
    assert "running.py" not in err
