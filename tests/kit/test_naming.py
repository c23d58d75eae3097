"""A training by its name: a job, a recipe, a script, a module; all else is refused in one line."""

import sys
import textwrap

import pytest
from typer.testing import CliRunner

from hotlap import Job
from hotlap.cli import app
from hotlap.core.errors import HotlapError
from hotlap.kit.calls import named, named_job

JOBS = """
import torch
from torch import nn
from hotlap import Job

def job():
    return Job(model=nn.Linear(4, 2), data=(torch.randn(16, 4), torch.randint(2, (16,))), loss=nn.CrossEntropyLoss(),
               optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4, epochs=1, device="cpu")

ready = job()
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kit_jobs.py").write_text(textwrap.dedent(JOBS))
    return tmp_path


@pytest.mark.parametrize("name", ["kit_jobs:job", "kit_jobs:ready", "demo"])
def test_a_job_a_function_that_gives_one_and_the_demo_are_made(folder, name):
    found = named([name])
    assert found.target is None
    assert isinstance(found.make_job(), Job)


def test_a_script_and_a_module_are_not_run_by_naming_them(folder):
    (folder / "train.py").write_text("raise SystemExit('run')")
    script = named(["train.py", "--epochs", "3"])
    assert (script.name, script.target.words) == ("train", ["train.py", "--epochs", "3"])
    module = named(["-m", "kit_jobs", "x"])
    assert module.target.words == ["-m", "kit_jobs", "x"]


def test_a_recipe_takes_the_options_that_train_takes(folder):
    rows = "\n".join(f"{'good' if n % 2 else 'bad'} words {n},{n % 2}" for n in range(60))
    (folder / "train.csv").write_text(f"text,label\n{rows}\n")
    words = ["text", "--data", "train.csv", "--target", "label", "--batch-size", "7", "--device", "cpu"]
    job = named(words).make_job()
    assert job.effective_batch == 7
    with pytest.raises(HotlapError, match="name the data with --data FILE"):
        named(["text"]).make_job()


def test_an_option_of_the_command_behind_a_recipe_is_refused_with_its_place():
    words = ["text", "--data", "train.csv", "--seconds", "10"]
    with pytest.raises(HotlapError, match="--seconds is no option of the recipe text; put it before the recipe"):
        named(words).make_job()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which training"),
        (["nothing.py"], "there is no file 'nothing.py'"),
        (["txt"], "did you mean 'text'"),
        (["kit_jobs:job", "more"], "takes no arguments; drop 'more'"),
    ],
)
def test_what_names_no_training_is_refused_in_one_line(folder, words, said):
    with pytest.raises(HotlapError, match=said) as refused:
        named(words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kit_jobs:number", "not a hotlap.Job"),
        ("kit_jobs:jb", "has no"),
        ("kit_job:job", "No module"),
        ("json:dumps", "without arguments"),
        (":job", "':job' is no module:job; name a module in this folder"),
        ("kit_jobs:", "'kit_jobs:' is no module:job"),
        ("../kit_jobs:job", "is no module:job"),
        ("kit_jobs.py:job", r"did you mean kit_jobs:job\?"),
        ("deep/kit_jobs.py:job", r"did you mean deep\.kit_jobs:job\?"),
        ("kit_lacks:job", "kit_lacks imports 'nobody_has_this', which is missing"),
        ("kit_wrong:job", r"kit_wrong\.py:2 is not valid Python"),
    ],
)
def test_a_name_that_gives_no_job_is_refused_when_the_job_is_made(folder, name, said):
    (folder / "kit_lacks.py").write_text("import nobody_has_this\n")
    (folder / "kit_wrong.py").write_text("\ndef job(:\n")
    with pytest.raises(HotlapError, match=said) as refused:
        named([name]).make_job()
    assert "\n" not in str(refused.value)


def test_a_script_is_no_job_and_the_command_for_scripts_is_named():
    with pytest.raises(HotlapError, match=r"'train\.py' is a script; .*hotlap run"):
        named_job("train.py")


def test_an_attribute_that_a_module_lacks_while_it_is_made_is_not_taken_for_the_job(folder):
    (folder / "kit_halfway.py").write_text("import torch\ntorch.nobody_has_this\ndef job(): pass\n")
    with pytest.raises(AttributeError, match="nobody_has_this"):
        named(["kit_halfway:job"]).make_job()


MINE = """
    import torch
    from torch import nn
    from hotlap import Job

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if index == 13:
                raise ValueError("row 13 is broken")
            return torch.randn(4), index % 2

    common = dict(loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=8, epochs=1)
    common["device"] = "cpu"
    broken = Job(model=nn.Linear(4, 2), data=Rows(), **common)
    unfit = Job(model=nn.Linear(5, 2), data=(torch.randn(64, 4), torch.randint(2, (64,))), **common)

    def missing():
        raise OSError("no data today")
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", ["the training raised an error", "in __getitem__", "ValueError: row 13 is broken"]),
        ("unfit", ["takes 5 features and was given 4"]),
        ("missing", ["in missing", "OSError: no data today"]),
    ],
)
@pytest.mark.parametrize("command", ["batch", "workers", "memory"])
def test_an_error_of_a_jobs_own_is_told_by_its_own_lines(tmp_path, monkeypatch, command, name, said):
    (tmp_path / "badly_made.py").write_text(textwrap.dedent(MINE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "badly_made", raising=False)
    done = CliRunner().invoke(app, [command, "--quiet", f"badly_made:{name}"])
    assert done.exit_code == 1
    shown = done.stderr or str(done.exception)  # the command shows an error of hotlap's in a line
    assert all(words in shown for words in said), shown
    assert "typer" not in shown
    assert len(shown.splitlines()) <= 6


def test_an_error_of_hotlaps_own_keeps_its_lines(tmp_path, monkeypatch):
    (tmp_path / "badly_made.py").write_text(textwrap.dedent(MINE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "badly_made", raising=False)
    monkeypatch.setattr("hotlap.kit.batch.StartSize", None)
    done = CliRunner().invoke(app, ["batch", "--quiet", "badly_made:unfit"])
    assert isinstance(done.exception, TypeError)
