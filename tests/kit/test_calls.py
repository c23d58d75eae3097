"""The calls of the kit take whatever the commands can name."""

import textwrap

import pytest

import hotlap
from hotlap.core.errors import HotlapError
from hotlap.kit import calls

JOBS = """
    import torch
    from torch import nn
    from hotlap import Job

    def job():
        return Job(model=nn.Linear(4, 2), data=(torch.randn(64, 4), torch.randint(2, (64,))), batch_size=8, epochs=1,
                   loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), device="cpu")
"""
SCRIPT = """
    import sys
    from torch.utils.data import DataLoader
    from kit_call_jobs import job
    mine = job()
    optimizer = mine.optimizer(mine.model.parameters())
    for epoch in range(int(sys.argv[1])):
        for x, y in DataLoader(list(zip(*mine.data)), batch_size=8):
            mine.loss(mine.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "kit_call_jobs.py").write_text(textwrap.dedent(JOBS))
    (tmp_path / "my train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


@pytest.mark.parametrize(
    ("training", "name"),
    [
        ("kit_call_jobs:job", "kit_call_jobs:job"),
        (["my train.py", "10000"], "my train"),
        ("'my train.py' 10000", "my train"),
    ],
)
def test_a_training_may_be_named_in_one_string_or_by_its_words(folder, training, name):
    found = hotlap.memory(training, progress=False)
    assert (found.name, found.samples) == (name, 8)
    assert found.kinds["parameters"] == 4 * (4 * 2 + 2)


@pytest.mark.parametrize("call", ["batch", "workers", "memory"])
def test_all_three_ask_the_same_of_jobs_and_scripts(folder, monkeypatch, call):
    asked = []
    for kind in ("job", "script"):
        monkeypatch.setattr(
            calls, f"{call}_of_{kind}", lambda it, kind=kind, **how: asked.append((kind, type(it).__name__, how["say"]))
        )
    getattr(hotlap, call)("kit_call_jobs:job", progress=False)
    getattr(hotlap, call)("-m kit_call_jobs", progress=False)
    assert [one[:2] for one in asked] == [("job", "Job"), ("script", "Target")]
    assert asked[0][2]("nobody hears it") is None


@pytest.mark.parametrize("training", [3, None, [1, 2], {"a": 1}])
def test_what_is_no_training_is_told_in_one_line(training):
    with pytest.raises(HotlapError, match="is no training: give a Job, or what names one"):
        hotlap.batch(training, progress=False)


def test_words_that_cannot_be_told_apart_are_told_in_one_line():
    with pytest.raises(HotlapError, match="has a quote that is never closed"):
        hotlap.memory("train.py 'a", progress=False)
    with pytest.raises(HotlapError, match=r"which training\?"):
        hotlap.memory("-m", progress=False)


@pytest.mark.parametrize(("call", "limit"), [("batch", "seconds"), ("workers", "seconds"), ("batch", "most")])
@pytest.mark.parametrize("value", [0, -1, float("nan"), "10", True])
def test_a_limit_that_is_none_is_told_in_one_line(call, limit, value):
    with pytest.raises(HotlapError, match=rf"{limit}={value!r} must be a"):
        getattr(hotlap, call)("nothing.py", progress=False, **{limit: value})
