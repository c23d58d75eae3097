"""A resumed run goes on under the plan it had: nothing tunes one that was begun without tuning."""

import json
import os
import signal

import pytest
import torch
from plain import class_data, parameters_of, small_mlp
from torch import nn

from hotlap import Job, fit
from hotlap.core.plan import Plan
from hotlap.fitting import training
from hotlap.tuner.tuner import Replay, Tuner


class Stopping:
    """Asks for an end after some batches, as a person would with Ctrl-C."""

    def __init__(self, after):
        self.left = after

    def __call__(self, batch):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return batch


def job(after=None):
    model = small_mlp()
    return Job(
        model=model,
        data=class_data(),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        prepare=Stopping(after if after is not None else -1),
        batch_size=10,
        epochs=4,
        device="cpu",
    )


@pytest.fixture
def chosen(monkeypatch):
    """Who chose the plan in each part of a training; the default is to tune, as for a user."""
    monkeypatch.setenv("HOTLAP_PLAN", "")
    found, made = [], training.chooser_for
    monkeypatch.setattr(training, "chooser_for", lambda *given: found.append(made(*given)) or found[-1])
    return found


def stopped_and_resumed(folder, plan):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(job(after=7), plan=plan, out=folder, progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    return fit(job(), resume=folder, progress=False, allow_changes=True)


@pytest.mark.parametrize("plan", ["off", "max", Plan(), {"micro_batch": 5}], ids=["off", "max", "a plan", "a choice"])
def test_a_run_begun_under_a_fixed_plan_is_resumed_under_it_and_not_tuned(plan, tmp_path, chosen):
    run = stopped_and_resumed(tmp_path / "run", plan)
    assert not any(isinstance(one, Tuner) for one in chosen)
    whole = fit(job(), plan=plan, progress=False, out=tmp_path / "whole")
    assert run.plan == whole.plan
    assert torch.equal(parameters_of(run.model), parameters_of(whole.model))


def test_a_run_that_was_tuned_is_tuned_when_it_is_resumed_whatever_the_default(tmp_path, chosen, monkeypatch):
    monkeypatch.setenv("HOTLAP_PLAN", "off")
    stopped_and_resumed(tmp_path / "run", "auto")
    assert [type(one) for one in chosen] == [Tuner, Tuner]


def test_a_run_that_replays_another_goes_on_replaying_it(tmp_path, chosen):
    fit(job(), plan="off", out=tmp_path / "first", progress=False)
    run = stopped_and_resumed(tmp_path / "run", tmp_path / "first")
    assert [type(one) for one in chosen][1:] == [Replay, Replay]
    assert run.updates == 20


def test_a_resumed_run_with_a_plan_of_its_own_obeys_that_and_is_resumed_under_it_later(tmp_path, chosen):
    fit(job(), plan="off", out=tmp_path / "run", progress=False, save_every=5)
    longer = job()
    object.__setattr__(longer, "epochs", 5)
    fit(longer, plan="auto", resume=tmp_path / "run", progress=False, allow_changes=True)
    assert isinstance(chosen[-1], Tuner)
    assert json.loads((tmp_path / "run" / "record.json").read_text())["facts"]["how"] == "auto"


def test_a_run_of_an_earlier_hotlap_is_resumed_under_the_default_plan(tmp_path, chosen):
    fit(job(), plan="off", out=tmp_path / "run", progress=False, save_every=5)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    del record["facts"]["how"]
    record["ended"] = None
    (tmp_path / "run" / "record.json").write_text(json.dumps(record))
    fit(job(), resume=tmp_path / "run", progress=False, allow_changes=True)
    assert isinstance(chosen[-1], Tuner)
    assert os.environ["HOTLAP_PLAN"] == ""
