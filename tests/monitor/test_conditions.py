"""Conditions of the host, planted: when each begins and ends, what it costs, and that a training tells of it."""

import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from sampling import sample_eagerly
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from hotlap import Job, Plan, fit
from hotlap.fitting import training
from hotlap.machine.host import SWAPS
from hotlap.monitor import conditions, hardware
from hotlap.monitor.conditions import Conditions, Stretch
from hotlap.monitor.verdict import Seen, verdict
from hotlap.script.session import Session, Settings

OWN, OTHER = Plan(), Plan().but(precision="bf16")


def seen(*, host=None, on_gpu=True, **gpu):
    usual = {"busy": 0.98, "sm_mhz": 1900.0, "most_sm_mhz": 1980.0, "throttled": []}
    sample = {"at": 1.0, "host": host or {}, "gpus": [{**usual, **gpu}]}
    return Seen(seconds=2.0, steps=20, on_gpu=on_gpu, samples=(sample,), plan=OWN)


CLEAR = seen()
PLANTED = {
    "throttling": seen(sm_mhz=900.0, throttled=["heat"], temperature_c=90.0),
    "another process": seen(others_busy=0.5),
    "swapping": seen(host={"swap_bytes_per_s": 4.0 * SWAPS}),
    "running on battery": seen(host={"battery": 0.62}),
}


def stretches(watched, what, count, steps, plan=OWN):
    for _ in range(count):
        watched.see(what, Stretch(plan, 2.0, steps))
    return list(watched.take())


@pytest.mark.parametrize("name", PLANTED)
def test_each_is_told_once_when_it_has_begun_and_once_when_it_is_over_with_what_it_cost(name):
    watched = Conditions()
    assert stretches(watched, CLEAR, 10, 40) == []
    watched.see(CLEAR, Stretch(OWN, 2.0, 1))  # it had begun, and the mean over samples did not show it yet
    (begun,) = stretches(watched, PLANTED[name], 30, 20)
    assert begun.what == name
    assert begun.line.startswith(f"{name} for 6 s: ")
    assert "; 10 steps/s, 20 without; " in begun.line
    (over,) = stretches(watched, CLEAR, 3, 40)
    assert over.what == f"{name} is over"
    assert over.line == f"{name} is over after 1 min 0 s of training: it cost about 30 s; 10 steps/s, 20 without"
    assert over.figures["seconds"] == 60.0
    assert over.figures["lost_s"] == pytest.approx(30.0)
    assert list(watched.close()) == []


def test_a_moment_of_it_is_not_told():
    watched = Conditions()
    stretches(watched, CLEAR, 2, 40)
    watched.see(PLANTED["swapping"], None)
    assert stretches(watched, CLEAR, 5, 40) == []


def test_one_that_was_there_from_the_first_moment_has_no_pace_to_compare_with_until_it_is_over():
    watched = Conditions()
    (begun,) = stretches(watched, PLANTED["running on battery"], 5, 20)
    assert "; no pace without it is known; plug the power supply in" in begun.line
    (lasted,) = watched.close()
    assert "running on battery lasted to the end after 10 s of training" in lasted.line


def test_a_condition_that_changes_no_pace_costs_nothing():
    watched = Conditions()
    stretches(watched, CLEAR, 10, 40)
    stretches(watched, PLANTED["running on battery"], 10, 40)
    (over,) = stretches(watched, CLEAR, 1, 40)
    assert "it cost nothing; 20 steps/s, 20 without" in over.line


def test_paces_under_two_plans_are_not_compared():
    watched = Conditions()
    stretches(watched, CLEAR, 10, 40, OTHER)
    (begun,) = stretches(watched, PLANTED["throttling"], 10, 20)
    assert "no pace without it is known" in begun.line


def test_a_host_that_swaps_bounds_a_training_on_both_devices_and_a_battery_alone_does_not():
    assert [verdict(seen(on_gpu=on_gpu, host={"swap_bytes_per_s": 4.0 * SWAPS})).bound for on_gpu in (True, False)] == [
        "swapping"
    ] * 2
    assert verdict(PLANTED["running on battery"]).bound == "computing"


# --- in a training ---------------------------------------------------------------------------------------


@pytest.fixture
def power(monkeypatch):
    """The power supply, plugged in until a test changes that; and how often a training was looked at meanwhile."""
    sample_eagerly(monkeypatch)
    state = SimpleNamespace(plugged=True, looks=0)
    battery = lambda: SimpleNamespace(percent=62.0, power_plugged=state.plugged)  # noqa: E731
    monkeypatch.setattr(psutil, "sensors_battery", battery, raising=False)
    monkeypatch.setattr(hardware, "SELDOM", 1)
    monkeypatch.setattr(conditions, "LONG_S", 0.0)
    monkeypatch.setattr(training, "LOOK_S", 0.0)
    # Nothing else of this machine counts here.
    monkeypatch.setattr(conditions, "another_process", lambda seen: None)
    monkeypatch.setattr(conditions, "swapping", lambda seen: None)
    see = Conditions.see

    def counted(self, seen, stretch):
        see(self, seen, stretch)
        state.looks += stretch is not None

    monkeypatch.setattr(Conditions, "see", counted)
    return state


def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def test_a_fit_on_a_laptop_tells_when_it_runs_on_its_battery_and_what_that_costs(power, tmp_path, capfd, monkeypatch):
    """The plug is pulled, each step then takes longer, and it is put in again."""
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")

    class Slower(nn.Linear):
        def forward(self, x):
            if power.looks > 8:
                power.plugged = power.looks > 20
            time.sleep(0.001 if power.plugged else 0.02)
            return super().forward(x)

    job = Job(
        model=Slower(4, 2), data=data(), loss=nn.CrossEntropyLoss(), optimizer=lambda p: optim.SGD(p, lr=0.1),
        batch_size=16, epochs=10**6, device="cpu",
    )  # fmt: skip
    run = fit(job, out=tmp_path / "run", on_evaluation=lambda record: "enough" if power.looks > 40 else None)
    begun, over = [entry for entry in run.ledger if entry.what.startswith("running on battery")]
    assert (begun.outcome, over.what) == ("fault", "running on battery is over")
    assert set(over.figures) == {"seconds", "steps_per_s", "steps_per_s_without", "lost_s"}
    said = capfd.readouterr().err
    assert f"host   {begun.why}" in said
    assert f"host   {over.why}" in said


def test_the_report_of_a_script_names_the_conditions_that_its_samples_show(power, tmp_path, capfd):
    power.plugged = False
    model = nn.Linear(4, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with Session(Settings(name="train", out=tmp_path / "run", tune_s=0.0)):
        while power.looks < 5:
            for x, y in DataLoader(TensorDataset(*data()), batch_size=16):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert "hotlap  host: running on battery lasted to the end after " in capfd.readouterr().err.replace("\n", " ")
