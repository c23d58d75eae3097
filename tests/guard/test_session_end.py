"""A training is saved before its session ends, and goes on from there to the same bit."""

import os
import re
import time

import pytest
import torch
from amount_recipe import AmountOptions, AmountRecipe
from killed import before_forward, in_a_child, outcome
from plain import class_data, small_mlp
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from hotlap import Job, fit, fit_many, trees
from hotlap.fitting import training as fitting_training
from hotlap.recipes.training import train as train_recipe
from hotlap.script import lookout
from hotlap.script.session import Session, Settings
from hotlap.store.checkpoints import Checkpoints
from hotlap.stress.victim import victim_job


def until_the_end(job, at, end_s, **where):
    """A training that stands still in its `at`th forward pass until its session has ended."""
    os.environ["HOTLAP_PROGRESS"] = "lines"
    calls = []

    def counted():
        calls.append(job.model.training)
        while sum(calls) == at and time.time() < end_s:
            time.sleep(0.01)

    hook = before_forward(job.model, counted)
    try:
        fit(job, **where)
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    assert in_a_child(lambda: fit(victim_job(0), out=run, save_every=1000)) == 0
    return outcome(run)


def test_it_is_saved_before_a_slurm_job_ends_and_goes_on_to_the_same_bit(tmp_path, whole):
    """Far below the 2 % that checkpoints may cost: only the end makes one."""
    run, said, end_s = tmp_path / "run", tmp_path / "said", time.time() + 4

    def ended():
        os.environ |= {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": str(end_s)}
        until_the_end(victim_job(0), 21, end_s, out=run)

    assert in_a_child(ended, said) == 143, said.read_text()
    text = said.read_text()
    assert re.search(r"^session  .* at \d\d:\d\d by Slurm's limit", text, re.MULTILINE)
    assert f"go on with: hotlap resume {run}" in text
    assert "in a new job: sbatch" in text
    found, damaged = Checkpoints(run / "checkpoints").newest_good()
    assert found.step <= 11
    assert damaged == []
    assert in_a_child(lambda: fit(victim_job(0), resume=run, save_every=1000), said) == 0, said.read_text()
    assert outcome(run) == whole


def small_job(**changes):
    settings = {
        "model": small_mlp(), "data": class_data(), "valid": class_data(), "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: optim.AdamW(p, lr=0.01), "batch_size": 10, "epochs": 4, "device": "cpu",
    }  # fmt: skip
    return Job(**{**settings, **changes})


def test_an_evaluation_that_would_outlast_the_session_is_made_on_resume(tmp_path):
    """The session ends in the last step of the first epoch."""
    run, end_s = tmp_path / "run", time.time() + 4

    def ended():
        os.environ["HOTLAP_SESSION_ENDS"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end_s + 1))
        until_the_end(small_job(), 5, end_s + 1, out=run)

    assert in_a_child(ended, tmp_path / "said") == 143, (tmp_path / "said").read_text()
    assert Checkpoints(run / "checkpoints").newest_good()[0].step <= 5
    alone = fit(small_job(), out=tmp_path / "alone", progress=False)
    resumed = fit(small_job(), resume=run, progress=False)
    timeless = [[{k: v for k, v in one.items() if k != "elapsed_s"} for one in r.history] for r in (resumed, alone)]
    assert timeless[0] == timeless[1]


def test_a_training_too_slow_for_its_session_is_named_after_the_first_epoch_with_what_would_fit(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("HOTLAP_SESSION_ENDS", "40h")
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    monkeypatch.setattr(fitting_training, "LOOK_S", 0.0)
    calls = []

    def stops(record):
        calls.append(record)
        return "seen enough" if len(calls) == 3 else None

    fit(small_job(epochs=10**9), out=tmp_path / "slow", on_evaluation=stops)
    slow = capfd.readouterr().err
    assert slow.count("at this pace the training takes about ") == 1
    assert "begin it with finish_in='" in slow
    assert slow.index("epoch 1 ·") < slow.index("at this pace")
    fit(small_job(), out=tmp_path / "fast")
    assert "at this pace" not in capfd.readouterr().err


def test_a_recipe_is_saved_before_the_end_too_and_says_how_it_goes_on(tmp_path):
    data, said = tmp_path / "train.csv", tmp_path / "said"
    data.write_text("a,b,target\n" + "".join(f"{n},{n % 7},{n / 3}\n" for n in range(120)))
    end_s = time.time() + 4

    def ended():
        os.environ |= {"SLURM_JOB_END_TIME": str(end_s), "HOTLAP_CACHE": str(tmp_path / "cache")}
        job = AmountRecipe.job

        def slow(self, *args):
            made = job(self, *args)
            before_forward(made.model, lambda: time.sleep(0.02))
            return made

        AmountRecipe.job = slow
        options = AmountOptions(data=str(data), target="target", epochs=100_000, device="cpu")
        train_recipe(AmountRecipe, options, out=tmp_path / "run", retrain=True, say=print, progress=True)

    assert in_a_child(ended, said) == 143, said.read_text()
    assert "\nsession  " in said.read_text()
    assert f"--out {tmp_path / 'run'}" in said.read_text().splitlines()[-1], "how it goes on"
    model = next((tmp_path / "run/models").iterdir())
    assert Checkpoints(model / "checkpoints").newest_good()[0].step >= 1


def test_a_script_hears_of_the_end_once_and_well_before_and_is_left_alone(monkeypatch, capfd):
    monkeypatch.setattr(lookout, "EVERY_S", 0.0)
    end_s = time.time() + 4
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end_s))
    model, data = nn.Linear(4, 1), TensorDataset(*class_data(64, 4, 2))
    optimizer, losses = optim.SGD(model.double().parameters(), lr=0.01), []
    with Session(Settings(name="train", tune_s=0.0)):
        while time.time() < end_s + 0.2 or len(losses) < 100:
            for x, _ in DataLoader(data, batch_size=16):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                time.sleep(0.01)
    said = [line for line in capfd.readouterr().err.splitlines() if "the session" in line]
    assert len(said) == 1
    assert "by Slurm's limit" in said[0]
    assert "save the training before" in said[0]


def test_jobs_that_train_at_once_are_all_saved_before_the_end(tmp_path):
    said, end_s = tmp_path / "said", time.time() + 5

    def slow(model, batch):
        time.sleep(0.01)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def ended():
        os.environ["SLURM_JOB_END_TIME"] = str(end_s)
        jobs = [small_job(seed=seed, valid=None, epochs=10**6, loss=slow) for seed in range(2)]
        fit_many(jobs, out=tmp_path / "many", plan="off", progress=False, at_once=2)

    assert in_a_child(ended, said) == 143, said.read_text()
    assert "stopped by the end of the session: " in said.read_text()
    metrics = list((tmp_path / "many").glob("*/metrics.jsonl"))
    # On a busy machine a process may not have begun to train by then.
    begun = [file.parent for file in metrics if file.read_text()]
    assert all(Checkpoints(folder / "checkpoints").newest_good()[0].step >= 1 for folder in begun)


def test_trees_keep_the_rounds_that_were_grown_before_the_end(tmp_path):
    pytest.importorskip("xgboost")
    said, end_s = tmp_path / "said", time.time() + 5
    x, y = class_data(200, dtype=torch.float32)

    def ended():
        os.environ["SLURM_JOB_END_TIME"] = str(end_s)
        job = trees.TreeJob(x.numpy(), y.numpy().astype("float32"), rounds=10**7, params={"max_depth": 1})
        trees.fit(job, plan="off", out=tmp_path / "run")

    assert in_a_child(ended, said) == 143, said.read_text()
    assert "stopped by the end of the session: " in said.read_text()
    if "has the model as far as it was trained" in said.read_text():  # a busy machine may have grown nothing by then
        assert trees.load(tmp_path / "run").record.boosters[0].rounds >= 1
