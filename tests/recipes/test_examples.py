"""The examples run as they are, from a file to predictions; a notebook finds the models that its script has trained.

They run in forks of a process that has loaded torch, and what texts need; the notebook has a process of its own.
"""

import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import Preloaded

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = """
import os, sys
import nbformat
from nbclient import NotebookClient

book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=600, kernel_name="python3").execute(env=dict(os.environ))
for cell in book.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""))
        print("picture" if "image/svg+xml" in output.get("data", {}) else "")
"""
SHOWS = """from IPython.display import SVG

display(SVG(filename=run / "curves.svg"), SVG(filename=run / "confusion.svg"))"""


SHOWS_CURVES = """from IPython.display import SVG

display(SVG(filename=run / "curves.svg"))"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def environment(cache):
    own = {"HOTLAP_CACHE": str(cache), "PYTHONPATH": str(ROOT / "src")}
    return {**os.environ, **own, "CUDA_VISIBLE_DEVICES": "", "HOTLAP_PROGRESS": "lines"}


@pytest.fixture(scope="module")
def run(environment):
    """Runs an example in a folder; what it prints."""
    late = [name for name in ("transformers.models.bert.modeling_bert", "sklearn") if is_there(name)]
    python = Preloaded("hotlap.recipes.calls", "torch._dynamo", *late, environment=environment)

    def run(folder, name):
        done = python.run(EXAMPLES / f"{name}.py", cwd=folder, TMPDIR=str(folder))
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    python.close()


def is_there(name):
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def answers_in(folder):
    (path,) = folder.glob("hotlap-*/answers.csv")
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check_texts(folder, said):
    right, count = map(int, re.search(r"(\d+) of (\d+) right", said).groups())
    assert count == 50
    assert right > 35
    rows = answers_in(folder)
    given = [f"predicted_label_{name}" for name in ("money", "science", "sport")]
    assert list(rows[0]) == ["id", "text", "label", "predicted_label", *given]
    assert right == sum(row["predicted_label"] == row["label"] for row in rows)
    assert all(abs(sum(float(row[name]) for name in given) - 1) < 1e-4 for row in rows)


def check_bars(folder, said):
    scores = {name: float(score) for name, score in re.findall(r"^(\w[\w ]*?) +macro-F1 (\S+)$", said, re.MULTILINE)}
    assert set(scores) == {"mlp", "most frequent class", "what it did last"}
    assert scores["mlp"] > scores["most frequent class"]
    rows = answers_in(folder)
    assert list(rows[0]) == ["time", "symbol", "close", "direction"]
    assert rows[0]["direction"] == ""
    assert rows[-1]["direction"] in ("down", "flat", "up")


def check_pictures(folder, said):
    right, count = map(int, re.search(r"(\d+) of (\d+) right", said).groups())
    assert count == 45
    assert right > 34
    rows = answers_in(folder)
    assert list(rows[0]) == ["path", "class", "class_circle", "class_cross", "class_triangle"]
    assert [row["path"] for row in rows] == [f"test/{number}.jpg" for number in range(45)]
    (broken,) = folder.glob("hotlap-*/run/broken.csv")
    assert "circle/broken.png,is empty" in broken.read_text()


def test_from_folders_of_pictures_to_predictions(tmp_path, run):
    pytest.importorskip("PIL")
    check_pictures(tmp_path, run(tmp_path, "image"))


def test_from_a_file_of_texts_to_predictions(tmp_path, run):
    pytest.importorskip("transformers")
    check_texts(tmp_path, run(tmp_path, "text"))


def test_from_a_file_of_bars_to_predictions(tmp_path, run):
    check_bars(tmp_path, run(tmp_path, "temporal"))


def check_meters(folder, said):
    scores = {
        name: float(score) for name, score in re.findall(r"^(\w[\w ]*?) +RMSE/deviation (\S+)$", said, re.MULTILINE)
    }
    rules = {"the mean", "the last value", "the value 24 rows before"}
    assert set(scores) == {"ridge", "lightgbm", "lstm", "blend", *rules}
    assert scores["blend"] < 0.7 * min(scores[name] for name in rules)
    rows = answers_in(folder)
    names = [f"meter_{meter}+{step}" for step in (1, 2) for meter in range(8)]
    assert list(rows[0]) == ["time", *names]
    assert len(rows) == 100
    assert all(row[name] for row in rows for name in names)


def test_from_a_wide_table_to_forecasts(tmp_path, run):
    pytest.importorskip("lightgbm")
    check_meters(tmp_path, run(tmp_path, "forecast"))


def check_prices(folder, said):
    scores = {name: float(score) for name, score in re.findall(r"^(\w[\w ]*?) +SMAPE (\S+) %$", said, re.MULTILINE)}
    rules = {"the median", "the median by packaging"}
    assert set(scores) == {"encoder", "trees", "blend", *rules}
    assert scores["blend"] <= min(scores["encoder"], scores["trees"])
    assert scores["blend"] < 0.5 * min(scores[name] for name in rules)
    rows = answers_in(folder)
    assert list(rows[0]) == ["id", "title", "price"]
    assert [row["id"] for row in rows] == [str(number) for number in range(50)]
    assert all(float(row["price"]) > 0 for row in rows)


def test_from_a_file_of_products_to_prices(tmp_path, run):
    pytest.importorskip("transformers")
    pytest.importorskip("xgboost")
    check_prices(tmp_path, run(tmp_path, "price"))


def test_a_notebook_does_the_same_and_shows_pictures(tmp_path, environment):
    """One of them: the others have the code of their scripts too, and the same last cell."""
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(EXAMPLES / "temporal.ipynb")],
        env={**environment, "TMPDIR": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_bars(tmp_path, done.stdout)
    assert done.stdout.splitlines().count("picture") == 2


@pytest.mark.parametrize("name", ["text", "temporal", "image", "forecast", "price"])
def test_the_notebook_has_the_code_of_the_script_and_shows_pictures_at_its_end(name):
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    script = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    assert all(cell in script for cell in code[:-1])
    assert code[-1] == (SHOWS_CURVES if name in ("forecast", "price") else SHOWS)
    assert not any(cell.get("outputs") for cell in book.cells)
