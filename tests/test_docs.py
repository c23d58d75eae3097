"""README and docs can be trusted: python runs, command lines parse, links lead somewhere, rooms are the real ones.

A block of code names its language. `python` runs: the blocks of a page, one after the other, in one process. `sh` holds
command lines. `console` shows output: lines that begin with `$ ` are command lines, all others were printed by them.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

import hotlap
from hotlap.cli import app
from hotlap.moves import MOVES, OTHERS
from hotlap.recipes import NAMES, recipe_named
from hotlap.recipes.options import from_words, options_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", *sorted(ROOT.glob("docs/*.md"))]
LANGUAGES = {"python", "sh", "console", "toml", "ipython"}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
COMMANDS = typer.main.get_command(app).commands
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

GIVEN = """
import torch
from torch import nn

torch.manual_seed(0)
x, xv = torch.randn(96, 8), torch.randn(32, 8)
y, yv = (x.sum(1) > 0).long(), (xv.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
"""
"""What the code of a page may take for granted: a reader has a model and data."""


def blocks_of(page, *languages):
    return [code for _, language, code in BLOCK.findall(page.read_text()) if language in languages]


def lines_of(page):
    """The command lines of a page's blocks, without comments."""
    found = blocks_of(page, "sh")
    found += ["\n".join(re.findall(r"^\$ (.*)$", code, re.M)) for code in blocks_of(page, "console")]
    lines = "\n".join(found).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


# --- blocks ------------------------------------------------------------------------------------------


@pages
def test_every_block_of_code_names_its_language(page):
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.M)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= LANGUAGES
    assert set(fences[1::2]) <= {""}


@pages
def test_a_block_that_shows_output_begins_with_the_command_that_printed_it(page):
    assert [code for code in blocks_of(page, "console") if not code.startswith("$ ")] == []


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks_of(page, "python")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_python_of_a_page_runs(page, forks, cache, tmp_path):
    (tmp_path / "page.py").write_text(GIVEN + "\n".join(blocks_of(page, "python")))
    own = {"HOTLAP_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": "", "HOTLAP_PROGRESS": "lines"}
    done = forks.run("page.py", cwd=tmp_path, **own)
    assert done.returncode == 0, done.stderr


# --- command lines -----------------------------------------------------------------------------------


def check_hotlap(words):
    """The command takes these words. Of a script, its name is enough; of a recipe, its options are checked too."""
    command, words = COMMANDS[words[0]], words[1:]
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context(command.name, list(words))
    asked = [context.params["recipe"], *context.args] if command.name == "train" else context.params.get("training")
    if isinstance(asked, list | tuple) and asked and asked[0] in NAMES:
        options_of(recipe_named(asked[0]).options_type, None, from_words(list(asked[1:])))


def check_module(name, words):
    """`python -m` finds the module, and each option is in its text."""
    home = ROOT.joinpath(*name.split("."))
    text = (home.with_suffix(".py") if home.with_suffix(".py").exists() else home / "__main__.py").read_text()
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in text] == []


def check(words):
    first, *rest = words
    if first == "hotlap":
        assert not {"--help", "--version"} & set(rest), "shows help, parses nothing"
        check_hotlap(rest)
    elif first == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif first == "python" and rest[0] == "-m":
        check_module(rest[1], rest[2:])
    elif first == "python":
        assert (ROOT / rest[0]).exists() or rest[0] in {"train.py", "work.py"}, "no such file"
    elif first == "pip":
        extras = re.findall(r"\[(.*)\]", words[-1])
        assert rest[0] == "install"
        assert {name for listed in extras for name in listed.split(",")} <= set(
            PROJECT["project"]["optional-dependencies"]
        )
    else:
        assert "=" in first or first in {"unzip", "ls", "head", "cd"}, f"a command that nothing checks: {words}"


@pages
def test_every_command_line_of_a_page_is_one_that_its_command_takes(page):
    wrong = []
    for words in lines_of(page):
        try:
            check(words)
        except Exception as error:
            wrong.append(f"{' '.join(words)}: {error!r}")
    assert wrong == []


@pages
def test_commands_and_options_that_a_text_names_exist(page):
    text = BLOCK.sub("", page.read_text())
    wrong = []
    for named in re.findall(r"`hotlap ([a-z].*?)`", text):
        command, *words = named.split()
        known = COMMANDS.get(command)
        if known is None:
            wrong.append(named)
            continue
        options = {option for one in known.params for option in one.opts}
        if command in ("train", "batch", "workers", "memory", "diagnose"):
            chosen = [recipe_named(name).options_type for name in NAMES]
            options |= {"--" + name.replace("_", "-") for one in chosen for name in one.__dataclass_fields__}
        script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
        options |= {"--help"}
        wrong += [f"{command} {word}" for word in words[:script] if word.startswith("--") and word not in options]
    assert wrong == []


def known_options():
    """Every option that a command, a recipe, a benchmark or another program of this repository takes."""
    found = {option for one in all_commands() for parameter in one.params for option in parameter.opts}
    found |= {
        f"--{name.replace('_', '-')}" for one in NAMES for name in recipe_named(one).options_type.__dataclass_fields__
    }
    for path in ROOT.glob("benchmarks/**/*.py"):
        found |= set(re.findall(r'"(--[\w-]+)"', path.read_text()))
    return found | {"--help"}


def all_commands():
    for command in COMMANDS.values():
        yield command
        yield from getattr(command, "commands", {}).values()


def test_every_option_that_a_text_names_by_itself_is_one_of_some_command():
    known, wrong = known_options(), []
    for page in PAGES:
        named = re.findall(r"`(--[\w-]+)", BLOCK.sub("", page.read_text()))
        wrong += [f"{page.name}: {option}" for option in named if option not in known]
    assert wrong == []


# --- links and rooms ---------------------------------------------------------------------------------


def anchors_of(page):
    """What a link into a page can name: its headings as GitHub spells them, and its own anchors."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.M)
    spelt = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return spelt | set(re.findall(r'<a id="(.*?)">', text))


@pages
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page):
    wrong = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors_of(found)):
            wrong.append(target)
    assert wrong == []


def test_the_readme_lists_every_extra():
    listed = re.search(r"Extras: (.*?)\.\n", (ROOT / "README.md").read_text(), re.S)[1]
    assert set(re.findall(r"`(\w+)`", listed)) == set(PROJECT["project"]["optional-dependencies"]) - {"dev"}


def test_the_page_of_the_plan_gives_the_choice_of_every_move():
    table = re.search(r"^### Moves\n(.*?)^### ", (ROOT / "docs/plan.md").read_text(), re.M | re.S)[1]
    named = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| .*`", table, re.M)
    assert sorted(named) == sorted((move.name, move.word) for move in (*MOVES, *OTHERS))


def test_the_page_of_commands_and_names_lists_all_of_them():
    text = (ROOT / "docs/reference.md").read_text()
    commands, names = text.partition("## From Python")[::2]
    assert re.findall(r"^\| `hotlap (\w+)` \|", commands, re.M) == list(COMMANDS)
    listed = set(re.findall(r"`(?:hotlap\.)?(\w+)`", names.partition("\n## ")[0]))
    assert {*hotlap.__all__, "trees"} - {"__version__"} == listed


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs/guide.md").read_text()
    assert [page.name for page in ROOT.glob("docs/*.md") if f"]({page.name})" not in index] == ["guide.md"]


def test_contributing_lists_the_rooms_in_the_order_of_the_import_contract():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (contract,) = PROJECT["tool"]["importlinter"]["contracts"]
    layers = [[room.strip().removeprefix("hotlap.") for room in layer.split("|")] for layer in contract["layers"]]
    arrow = re.search(r"`(\w+(?: (?:→|\|) \w+)+)`", text)[1]
    assert [layer.split(" | ") for layer in arrow.split(" → ")] == layers
    rows = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert sorted(rows) == sorted(room for layer in layers for room in layer)
