"""What is shipped, and what it asks of the machine it comes to."""

import os
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def name_of(requirement):
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower()


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_an_installed_torch_or_numpy_is_never_replaced(name):
    assert name in PROJECT["project"]["dependencies"], "named without any bound"
    everything = [r for extra in EXTRAS.values() for r in extra] + PROJECT["project"]["dependencies"]
    assert {r for r in everything if name_of(r) == name} == {name}


def test_the_dependencies_are_the_few_that_were_agreed_on():
    assert {name_of(r) for r in PROJECT["project"]["dependencies"]} == {
        "torch",
        "numpy",
        "typer",
        "rich",
        "jinja2",
        "safetensors",
        "nvidia-ml-py",
        "psutil",
    }


def test_all_extras_are_there_and_all_takes_every_one_but_dev():
    wanted = "recipes onnx text minilm images trees search track gpus ray all dev"
    assert set(EXTRAS) == set(wanted.split())
    taken = {name for r in EXTRAS["all"] for name in re.findall(r"\w+", r.partition("[")[2])}
    assert taken == set(EXTRAS) - {"all", "dev"}


def test_every_room_has_a_layer_in_the_import_contract():
    rooms = {f"hotlap.{home.parent.name}" for home in (ROOT / "src" / "hotlap").glob("*/__init__.py")}
    (contract,) = PROJECT["tool"]["importlinter"]["contracts"]
    layered = [room.strip() for layer in contract["layers"] for room in re.split(r"[|:]", layer)]
    assert contract["type"] == "layers"
    assert sorted(layered) == sorted(set(layered))
    assert rooms - set(layered) == set()
    assert "hotlap.core" in contract["layers"][-1]


def test_the_command_and_the_version_are_where_the_project_says():
    module, function = PROJECT["project"]["scripts"]["hotlap"].split(":")
    assert (module, function) == ("hotlap.cli", "main")
    assert "__version__ = " in (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert (ROOT / "src" / "hotlap" / "py.typed").is_file()


def test_files_that_the_package_needs_at_run_time_lie_inside_of_it():
    assert (ROOT / "src" / "hotlap" / "demo" / "digits.npz").is_file()
    for name in ("layout.html", "report.html", "index.html", "message.html", "page.css", "sort.js"):
        assert (ROOT / "src" / "hotlap" / "report" / name).is_file()
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/hotlap"]


@pytest.mark.parametrize("target", ["demo", "test", "lint", "test-gpu"])
def test_make_knows_the_target_and_explains_it(target):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:.*## \S", makefile, re.MULTILINE)
    assert target in re.search(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)[1].split()


def test_continuous_integration_runs_lint_and_tests_and_stops_at_the_first_failure():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[0].startswith("#!")
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make ")] == ["make lint", "make test"]


def written_files():
    for folder in ("src", "docs", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
    yield from sorted(ROOT.glob("*.md"))
    yield from (ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run"))


def forbidden():
    """What belongs to a machine and not to the project, in pieces, since this file is searched as well."""
    words = ["/wor" + "k/", "--index" + "-url", "--extra-index" + "-url", "pypi" + ".org", "python" + "hosted.org"]
    words += ["arti" + "factory", "pkg" + ".dev", "code" + "artifact"]
    urls = [value for name, value in os.environ.items() if name.endswith(("INDEX_URL", "DEFAULT_INDEX"))]
    return words + [host for url in urls if (host := urlsplit(url).hostname)]


def test_no_file_names_a_place_of_the_machine_it_was_written_on():
    found = []
    for path in written_files():
        try:
            text = path.read_text(encoding="utf-8").lower()
        except UnicodeDecodeError:  # a picture, or data
            continue
        found += [f"{path.relative_to(ROOT)}: {word}" for word in forbidden() if word in text]
    assert found == []


def test_the_search_for_forbidden_words_looks_into_every_kind_of_place():
    searched = {path.relative_to(ROOT).parts[0] for path in written_files()}
    assert {"src", "tests", "README.md", "Makefile"} <= searched
    assert Path(__file__) in set(written_files())


def test_every_package_of_the_set_up_is_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {line.partition("==")[0] for line in lines}
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][\w.]*", line) for line in lines)
    groups = [PROJECT["project"]["dependencies"], *EXTRAS.values()]
    wanted = {re.split(r"[\[<>=]", requirement)[0] for group in groups for requirement in group} - {"hotlap"}
    assert wanted <= pinned
    assert {"hatchling", "editables"} <= pinned


def test_the_way_to_report_a_problem_is_written_down():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "## Report a problem" in text
    assert "hotlap doctor --json" in text
