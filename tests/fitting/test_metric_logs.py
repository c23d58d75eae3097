"""Metrics to other logs: small libraries of the same names stand for the real ones, which the tests do not install."""

import importlib.util
import json
import sys

import pytest
import torch
from torch import nn

import hotlap
from hotlap import Job
from hotlap.core.errors import JobError, MachineError
from hotlap.fitting.metric_logs import MetricLogs, logs_named

LIBRARIES = {
    "trackio": """
import json, os
told = open(os.environ["TOLD"], "a")
def init(**settings):
    print("* a word on stdout")
    note("init", settings)
def log(figures, step):
    note("log", {"step": step, **figures})
def finish():
    note("finish", {})
def note(what, values):
    if os.environ.get("FAILS") == what:
        raise RuntimeError(f"{what} failed\\nand more")
    told.write(json.dumps([what, values], default=str) + "\\n")
    told.flush()
""",
    "wandb": """
import trackio
def init(**settings):
    trackio.note("init", settings)
    return Run()
class Run:
    def log(self, figures, step):
        trackio.log(figures, step)
    def finish(self):
        trackio.finish()
""",
    "tensorboard": "",
    "torch_tensorboard": """
import trackio
class SummaryWriter:
    def __init__(self, log_dir):
        trackio.note("init", {"log_dir": log_dir})
    def add_text(self, name, text): ...
    def add_scalar(self, name, value, global_step):
        trackio.note("log", {"step": global_step, name: value})
    def flush(self): ...
    def close(self):
        trackio.finish()
""",
}


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What the made-up libraries were told, a list each."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name, text in LIBRARIES.items():
        (libraries / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(libraries)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    for name in ("WANDB_MODE", "WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("trackio", "wandb", "tensorboard", "torch_tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", importlib.import_module("torch_tensorboard"))
    yield lambda: [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    sys.modules["trackio"].told.close()
    for name in ("trackio", "wandb", "tensorboard", "torch_tensorboard"):
        sys.modules.pop(name, None)


def job():
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(8, 2))
    return Job(
        model=model, data=(x, y), valid=(x, y), loss=nn.CrossEntropyLoss(), batch_size=16, epochs=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip


@pytest.mark.parametrize("word", ["tensorboard", "trackio", "wandb"])
def test_each_evaluation_goes_to_the_log_that_a_word_names(told, tmp_path, word):
    run = hotlap.fit(job(), out=tmp_path / "run", log=word, progress=False)
    (first, settings), *logged, last = told()
    assert (first, last[0]) == ("init", "finish")
    found = {}
    for what, values in logged:
        assert what == "log"
        step = values.pop("step")
        found.setdefault(step, {}).update(values)
    assert list(found) == [4, 8, 12]
    for record in run.history:
        assert found[record["step"]]["valid_loss"] == pytest.approx(record["valid_loss"])
        assert found[record["step"]]["train_loss"] == pytest.approx(record["train_loss"])
    assert settings == {"log_dir": str(tmp_path / "run" / "tensorboard")} or settings["name"] == "run"


def test_weights_and_biases_is_offline_and_in_the_run_unless_its_own_variables_say_otherwise(
    told, tmp_path, monkeypatch
):
    hotlap.fit(job(), out=tmp_path / "run", log="wandb", progress=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    hotlap.fit(job(), out=tmp_path / "other", log="wandb", progress=False)
    one, other = [values for what, values in told() if what == "init"]
    assert (one["mode"], one["project"], one["dir"]) == ("offline", "hotlap", str(tmp_path / "run"))
    assert (other["mode"], other["project"]) == ("online", "mine")


@pytest.mark.parametrize("what", ["init", "log", "finish"])
def test_a_log_that_fails_is_told_of_once_and_stops_nothing(told, tmp_path, monkeypatch, what, capsys):
    monkeypatch.setenv("FAILS", what)
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    run = hotlap.fit(job(), out=tmp_path / "run", log=["trackio"])
    shown = capsys.readouterr()
    assert shown.err.count(f"warning: metrics no longer go to trackio: {what} failed; training goes on") == 1
    assert run.stopped == "after all epochs"
    assert len(run.history) == 3
    assert run.problems == ()  # it is none of the training's own: a command ends with 0


def test_the_others_go_on_where_one_fails(told, tmp_path, monkeypatch):
    class Fails:
        def add(self, step, figures):
            raise SystemExit("log in first")

    warned = []
    logs = MetricLogs(["trackio"], tmp_path, {}, warned.append)
    logs._open = {"wandb": Fails(), **logs._open}
    for step in (1, 2):
        logs.add({"step": step, "loss": 0.5})
    assert warned == ["metrics no longer go to wandb: log in first; training goes on"]
    assert [values["step"] for what, values in told() if what == "log"] == [1, 2]


def test_what_a_library_prints_does_not_reach_stdout(told, tmp_path, capsys):
    MetricLogs(["trackio"], tmp_path, {}, pytest.fail).close()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "a word on stdout" in shown.err


def test_words_lists_and_commas_name_logs(told):
    assert logs_named(None) == logs_named("") == logs_named([]) == ()
    assert logs_named("TensorBoard") == ("tensorboard",)
    assert logs_named("trackio, wandb") == ("trackio", "wandb")
    assert logs_named(["trackio", "trackio"]) == ("trackio",)


def test_an_unknown_word_and_a_missing_library_are_one_line_before_training(tmp_path, monkeypatch):
    with pytest.raises(JobError, match="unknown log 'tensorbord'; did you mean 'tensorboard'"):
        hotlap.fit(job(), out=tmp_path / "run", log="tensorbord")
    with pytest.raises(JobError, match="unknown log 3"):
        hotlap.fit(job(), out=tmp_path / "run", log=[3])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="log=trackio needs trackio, which is not installed: pip install"):
        hotlap.fit(job(), out=tmp_path / "run", log="trackio")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_the_real_tensorboard_reads_what_was_written(tmp_path):
    run = hotlap.fit(job(), out=tmp_path / "run", log="tensorboard", progress=False)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("valid_loss")] == [4, 8, 12]
    assert events.Scalars("valid_loss")[-1].value == pytest.approx(run.history[-1]["valid_loss"], rel=1e-6)


def test_trees_log_the_score_of_each_round(told, tmp_path):
    pytest.importorskip("xgboost")
    from hotlap import trees

    torch.manual_seed(0)
    x = torch.randn(64, 4).numpy()
    y = x.sum(1)
    found = trees.fit(
        trees.TreeJob(x, y, valid=(x, y), rounds=3), plan="off", out=tmp_path / "run", log="trackio", progress=False
    )
    (_, settings), *logged, _ = told()
    assert settings["name"] == "run"
    assert [values["step"] for _, values in logged] == [1, 2, 3]
    assert logged[-1][1]["valid_rmse"] == pytest.approx(found.history[-1]["valid_rmse"])


def test_a_recipe_takes_the_word_and_refuses_a_wrong_one_before_it_reads_anything(tmp_path):
    with pytest.raises(JobError, match="unknown log 'paper'"):
        hotlap.train("text", tmp_path / "missing.csv", log="paper", progress=False)
