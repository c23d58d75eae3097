"""`%load_ext hotlap`. A stand-in that notes what happens to it takes the place of the session."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
STAND_IN = """
import os, sys, types

class Session:
    def __init__(self, settings):
        self.settings = settings

    def note(self, what):
        with open(os.environ["NOTES"], "a") as file:
            file.write(what + "\\n")

    def __enter__(self):
        self.note(f"start {self.settings.name} {self.settings.plan}")
        return self

    def stop(self):
        self.note("stop")
        print("what was found", file=sys.stderr)

    def so_far(self):
        return ["baseline 3 ms/step", "+ fused optimizer"]

module = types.ModuleType("hotlap.script.session")
module.Session, module.Settings = Session, types.SimpleNamespace
sys.modules[module.__name__] = module
"""
SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.user_ns.update(json.loads(sys.argv[1]))
for line in sys.argv[2:]:
    shell.run_line_magic(*line.split(maxsplit=1)) if " " in line else shell.run_line_magic(line, "")
"""
NOTEBOOK = """
import json, os, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(code) for code in sys.argv[1:]]
NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=600, kernel_name="python3").execute(env=dict(os.environ))
print(json.dumps([[output.get("text", output) for output in cell.outputs] for cell in cells]))
"""
WATCHES = "hotlap: watching the training in this notebook; %hotlap shows the state, %hotlap off removes hotlap\n"


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    """Where the stand-in notes what happens to it."""
    for name in ("HOTLAP_PLAN", "JPY_SESSION_NAME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{SRC}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "notes"


def python(*words, **variables):
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def shell(*lines, names=None, **variables):
    return python(SHELL, json.dumps(names or {}), *lines, **variables)


def test_in_a_real_notebook_it_watches_until_the_kernel_ends(notes):
    done = python(NOTEBOOK, "%load_ext hotlap", "%hotlap", "1 + 1", JPY_SESSION_NAME="/home/me/digits.ipynb")
    loaded, told, _ = json.loads(done.stdout)
    assert (loaded, told) == ([WATCHES], ["baseline 3 ms/step\n+ fused optimizer\n"])
    assert notes.read_text() == "start digits None\nstop\n"


def test_off_takes_everything_back_once_and_it_can_begin_anew(notes):
    done = shell("load_ext hotlap", "hotlap off", "hotlap", "hotlap off", "reload_ext hotlap", "unload_ext hotlap")
    assert done.stdout == ""
    off = "hotlap: is off; use %reload_ext hotlap to start it again\n"
    assert done.stderr == WATCHES + "what was found\n" + off + off + WATCHES + "what was found\n"
    assert notes.read_text() == "start notebook None\nstop\n" * 2


def test_unloaded_the_magic_is_gone(notes):
    done = subprocess.run(
        [sys.executable, "-c", SHELL, "{}", "load_ext hotlap", "unload_ext hotlap", "hotlap"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "`%hotlap` not found" in done.stderr
    assert notes.read_text() == "start notebook None\nstop\n"


def test_a_word_that_is_not_known_changes_nothing(notes):
    assert "unknown: %hotlap on" in shell("load_ext hotlap", "hotlap on").stderr
    assert notes.read_text() == "start notebook None\nstop\n"


def test_the_variable_chooses_the_plan_and_off_leaves_the_notebook_alone(notes):
    shell("load_ext hotlap", HOTLAP_PLAN="max", names={"__vsc_ipynb_file__": "/x/lstm.ipynb"})
    assert notes.read_text() == "start lstm max\nstop\n"
    notes.unlink()
    done = shell("load_ext hotlap", "hotlap", HOTLAP_PLAN="off")
    assert done.stderr.startswith("hotlap: HOTLAP_PLAN=off: hotlap does nothing in this notebook\nhotlap: is off")
    assert not notes.exists()


def test_nothing_of_it_needs_ipython_before_it_is_used():
    code = "import sys, hotlap.script.notebook; print(hotlap.load_ipython_extension.__name__, 'IPython' in sys.modules)"
    assert python(code).stdout == "load_ipython_extension False\n"


def test_a_notebook_that_trains_prints_the_same_with_the_real_session(tmp_path, forks):
    notebook = json.loads((Path(__file__).parents[1] / "scripts" / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HOTLAP_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(SRC),
    }
    environment.pop("HOTLAP_PLAN", None)

    def words(text):
        """Without figures: a few steps may have been made in other ways, and times differ."""
        return [re.sub(r"[\d.]+", "#", line) for line in text.splitlines() if not line.startswith("hotlap")]

    alone = forks.run("-c", "\n".join(cells), cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, "%load_ext hotlap", *cells, "%hotlap off"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600,
    )  # fmt: skip
    assert (alone.returncode, done.returncode) == (0, 0), alone.stderr + done.stderr
    watched = json.loads(done.stdout)
    told = "".join(str(text) for text in watched[-1])
    assert "baseline" in told
    assert "hotlap failed" not in told
    assert words("".join(text for cell in watched[1:-1] for text in cell if isinstance(text, str))) == words(
        alone.stdout
    )
