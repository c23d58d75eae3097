"""The face hotlap shows: its public names, and a command that answers at once."""

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hotlap

SRC = Path(__file__).parents[1] / "src"
PUBLIC = {
    "Augment",
    "DataError",
    "Execution",
    "Feed",
    "HotlapError",
    "Job",
    "JobError",
    "Ledger",
    "MachineError",
    "Memory",
    "Normalise",
    "Numerics",
    "Pictures",
    "Plan",
    "PlanError",
    "Rig",
    "Run",
    "Search",
    "Sequences",
    "StoreError",
    "Tokens",
    "TrainingError",
    "Tuner",
    "Windows",
    "__version__",
    "batch",
    "decoded",
    "diagnose",
    "fit",
    "fit_many",
    "gpus",
    "load",
    "load_plan",
    "load_weights",
    "memory",
    "parallel_map",
    "predict",
    "save_plan",
    "search",
    "tokenised",
    "train",
    "watch",
    "workers",
}
HEAVY = ("torch", "numpy", "rich", "jinja2", "asyncio")


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "100"}


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def forked(forks, tmp_path_factory):
    """Runs a command as `run` does, where it does not matter that hotlap was loaded before."""
    folder = tmp_path_factory.mktemp("work")
    return lambda *arguments: forks.run(*arguments, cwd=folder, environment=ENVIRONMENT)


def run_code(code):
    done = run("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- names -------------------------------------------------------------------------------------------


def test_the_public_names_are_these_and_sorted():
    assert set(hotlap.__all__) == PUBLIC
    assert hotlap.__all__ == sorted(hotlap.__all__)
    assert dir(hotlap) == hotlap.__all__


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_can_be_imported_and_is_called_so(name):
    value = getattr(hotlap, name)
    assert getattr(value, "__name__", name) == name
    assert getattr(value, "__doc__", None)


def test_a_star_import_brings_exactly_the_public_names(torch_forks, tmp_path):
    code = "from hotlap import *; print(sorted(n for n in dir() if n[0] != '_' or n == '__version__'))"
    done = torch_forks.run("-c", code, cwd=tmp_path)
    assert set(ast.literal_eval(done.stdout)) == PUBLIC, done.stderr


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hotlap' has no attribute 'fti'"):
        hotlap.fti  # noqa: B018
    with pytest.raises(ImportError):
        from hotlap import fti  # noqa: F401


def test_a_public_name_is_the_same_whatever_was_imported_before(torch_forks, tmp_path):
    code = """
        import hotlap
        first = {name: getattr(hotlap, name) for name in reversed(hotlap.__all__)}
        import hotlap.cli, hotlap.fitting.fit, hotlap.store.run_folder, hotlap.machine
        print([name for name in hotlap.__all__ if getattr(hotlap, name) is not first[name]])
    """
    done = torch_forks.run("-c", textwrap.dedent(code), cwd=tmp_path)
    assert done.stdout == "[]\n", done.stderr


def test_the_version_is_one_that_packaging_understands():
    assert [part.isdigit() for part in hotlap.__version__.split(".")] == [True] * 3


# --- imports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["hotlap", "hotlap.cli", "hotlap.__main__", "hotlap.core.plan", "hotlap.machine"])
def test_importing_it_imports_no_torch(module):
    # __main__ runs the command when it is imported: --version ends it.
    told = run_code(f"""
        import sys
        sys.argv = ["hotlap", "--version"]
        try:
            import {module}
        except SystemExit as ended:
            assert not ended.code
        print([name for name in ("torch", "numpy") if name in sys.modules])
    """)
    assert told.splitlines()[-1] == "[]"


def modules_after(*arguments):
    code = f"""
        import json, sys
        sys.argv = ["hotlap", *{arguments!r}]
        from hotlap.cli import main
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, ended.code
        print(json.dumps(sorted(sys.modules)))
    """
    return set(json.loads(run_code(code).splitlines()[-1]))


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("demo", "--help"), ("doctor", "--help")])
def test_help_imports_nothing_heavy(arguments):
    assert modules_after(*arguments) & set(HEAVY) == set()


# --- the command -------------------------------------------------------------------------------------


def test_help_names_the_commands_and_the_exit_codes():
    done = run("-m", "hotlap", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert {"doctor", "gpus", "demo"} <= set(done.stdout.split())
    assert "Exit codes: 0 done; 1 " in " ".join(done.stdout.split())


def test_every_command_explains_itself(forked):
    from hotlap.cli import app

    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        done = forked("-m", "hotlap", name, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert "--json" in done.stdout


def test_no_version_of_typer_can_take_an_options_name_from_its_metavar():
    from typer.models import OptionInfo

    from hotlap.cli import app

    for command in app.registered_commands:  # 0.27 makes --PLAN of plan with metavar="PLAN"
        for name, parameter in inspect.signature(command.callback).parameters.items():
            option = parameter.default
            if isinstance(option, OptionInfo) and option.metavar and option.metavar.lower() == name.lower():
                assert option.param_decls, f"{command.callback.__name__}: write --{name} out"


def test_version_is_printed_on_stdout():
    done = run("-m", "hotlap", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hotlap {hotlap.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["bogus"], ["--bogus"], ["demo", "--epochs", "many"], ["demo", "extra"]])
def test_a_command_line_that_makes_no_sense_ends_with_2_and_says_so_on_stderr(arguments, forked):
    done = forked("-m", "hotlap", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_hotlaps_own_is_one_line_on_stderr_and_ends_with_1(forked):
    done = forked("-m", "hotlap", "resume", "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "hotlap: nowhere does not exist; name the folder of a run\n"


@pytest.mark.parametrize("command", ["doctor", "gpus"])
def test_a_word_that_a_command_does_not_know_is_one_line_and_ends_with_2(command, forked):
    done = forked("-m", "hotlap", command, "--pretend", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hotlap: unknown GPU 'nonsense'")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "nonsense"], "no recipe is called 'nonsense'"),
        (["recipes", "nonsense"], "no recipe is called 'nonsense'"),
        (["train", "text", "--epohcs", "1"], "no option is called 'epohcs'; did you mean 'epochs'?"),
        (["train", "text"], "no data is named"),
        (["batch"], "which training?"),
    ],
)
def test_a_recipe_or_training_that_is_not_there_is_one_line_and_ends_with_2(arguments, said, forked):
    done = forked("-m", "hotlap", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.startswith("hotlap: ")
    assert "Traceback" not in done.stderr


ENDS = """
import sys
from hotlap import cli
from hotlap.core import errors

@cli.app.command()
def ends() -> None:
    raise {what}

sys.argv = ["hotlap", "ends"]
cli.main()
"""


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("errors.StoreError('cannot write x: No space left')", 1, "hotlap: cannot write x: No space left\n"),
        ("errors.PlanError('a', 'b')", 1, "hotlap: the plan has 2 mistakes:\n  - a\n  - b\n"),
        ("KeyboardInterrupt", 130, "hotlap: interrupted\n"),
    ],
)
def test_what_ends_a_command_is_told_without_a_traceback(what, code, said):
    done = run("-c", ENDS.format(what=what))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_a_fault_of_hotlap_itself_shows_its_traceback():
    done = run("-c", ENDS.format(what="ZeroDivisionError('ours')"))
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: ours\n")
