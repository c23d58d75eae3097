"""A fork that stands in for a fresh python in these tests is told from one by nothing that a script looks at."""

import os
import subprocess
import sys

import pytest
from preloaded import Preloaded

LOOKS = """
import atexit, multiprocessing.process, os, random, sys, threading
print(__name__, globals().get("__file__"), __package__, sys.modules["__main__"].__dict__ is globals())
print(sys.argv, sys.orig_argv[1:], sys.path, os.getcwd(), multiprocessing.process.ORIGINAL_DIR)
print(sorted(item for item in os.environ.items() if item[0] != "_"), sys.stdin.read(), sys.stdout.isatty())
print([stream.line_buffering for stream in (sys.stdout, sys.stderr)], threading.active_count())
print("aside", file=sys.stderr)
atexit.register(print, "at exit")
"""
ENDS = {
    "the last line": "",
    "a code": "sys.exit(3)",
    "a message": "sys.exit('no data')",
    "an interrupt": "raise KeyboardInterrupt",
    "an error": "1 / 0",
    "a signal": "import signal; os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "PYTHONPATH": "", "FIRST": "1"}


@pytest.fixture(scope="module")
def preloaded(environment):
    python = Preloaded("csv", environment=environment)
    yield python
    python.close()


def both(preloaded, environment, folder, *words):
    """What the fork and a fresh process came to."""
    command = [sys.executable, *map(str, words)]
    fresh = subprocess.run(
        command, cwd=folder, env={**environment, "OWN": "2"}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return preloaded.run(*words, cwd=folder, OWN="2"), fresh


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("words", [["deep/look.py"], ["-m", "deep.look"], ["-c", None]], ids=["file", "module", "text"])
def test_it_sees_what_a_fresh_one_sees_and_ends_like_it(preloaded, environment, tmp_path, words, how):
    (tmp_path / "deep").mkdir()
    text = f"{LOOKS}\n{ENDS[how]}\n"
    (tmp_path / "deep/look.py").write_text(text)
    words = [text if word is None else word for word in words]
    fork, fresh = both(preloaded, environment, tmp_path, *words, "--epochs", "")
    assert fork.stdout == fresh.stdout
    assert fork.returncode == fresh.returncode
    assert fork.stderr.splitlines()[:1] == fresh.stderr.splitlines()[:1] == ["aside"]
    assert fork.stderr.splitlines()[-1] == fresh.stderr.splitlines()[-1]


LEFT = """
import sys, threading, time
sys.stdout.write("no line")
kept = open("kept", "w")
kept.write("all of it")

class Ends:
    def __del__(self):
        print(" ends", flush=True)

class Knot:
    def __init__(self):
        self.self, self.ends = self, Ends()

alone, knot = Ends(), Knot()
threading.Thread(target=lambda: (time.sleep(0.05), print(" thread"))).start()
"""


@pytest.mark.parametrize("words", [["look.py"], ["-m", "look"], ["-c", LEFT]], ids=["file", "module", "text"])
@pytest.mark.parametrize("how", ["", "sys.exit(2)"])
def test_what_a_script_has_left_open_is_closed_in_the_end(preloaded, environment, tmp_path, words, how):
    (tmp_path / "look.py").write_text(f"{LEFT}\n{how}\n")
    words = [f"{LEFT}\n{how}\n" if word is LEFT else word for word in words]
    fork, fresh = both(preloaded, environment, tmp_path, *words)
    assert (fork.stdout, fork.stderr, fork.returncode) == (fresh.stdout, fresh.stderr, fresh.returncode)
    assert (tmp_path / "kept").read_text() == "all of it"
    assert fork.stdout == "no line thread\n ends\n ends\n"


def test_what_was_named_is_loaded_and_each_fork_draws_its_own_random_numbers(preloaded, tmp_path):
    text = "import random, sys; print('csv' in sys.modules, random.random())"
    said = [preloaded.run("-c", text, cwd=tmp_path).stdout for _ in range(2)]
    assert all(line.startswith("True ") for line in said)
    assert said[0] != said[1]
