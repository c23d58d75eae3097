"""Killed at any moment and resumed, a training ends as if nothing had been; another training is refused."""

import json
import os
import shutil
import signal
import sys
import textwrap

import pytest
import torch
from killed import before_forward, code_of, flip, forked, hotlap_command, in_a_child, kill_me, outcome
from plain import class_data, parameters_of, small_mlp
from torch import nn

import hotlap.fitting.fit as loop
from hotlap import Job, Plan, StoreError, fit
from hotlap.cli import main
from hotlap.fitting.session import Best
from hotlap.store import disk
from hotlap.store.checkpoints import Checkpoints
from hotlap.store.run_folder import RunFolder
from hotlap.stress.trials import kill_at
from hotlap.stress.victim import victim_job

SCORES = [0.5, 0.9, 0.7, 0.6, 0.8, 0.7, 0.7, 0.7]
"""Scripted, an epoch each: the best is the second."""


class Net(nn.Module):
    """Draws at random, and counts the batches it was trained on."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(small_mlp(hidden=16), nn.Dropout(0.2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.count += 1
        return self.inner(x)


def job(**changes):
    """50 samples in batches of 8: seven updates an epoch."""
    model = Net()
    settings = {
        "model": model,
        "data": class_data(),
        "valid": class_data(30, seed=9),
        "metrics": ["accuracy"],
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "batch_size": 8,
        "epochs": 4,
        "device": "cpu",
    }
    if changes.pop("scripted", False):
        changes["metrics"] = {"scripted": lambda o, t: torch.full((len(t),), SCORES[int(model.count) // 7 - 1])}
    return Job(**{**settings, **changes})


def early():
    return job(scripted=True, monitor="scripted", better="higher", patience=2, epochs=8)


WAYS = {
    "plain": (job, {}),
    "micro-batches": (job, {"plan": Plan().but(micro_batch=3)}),
    "bf16": (lambda: job(accumulate=2, clip=0.5, epochs=8), {"plan": Plan().but(precision="bf16", optimizer="fused")}),
    "evaluated every 4": (lambda: job(eval_every=4), {}),
    "by steps": (lambda: job(epochs=None, steps=25), {}),
    "early stopping": (early, {}),
    "plateau": (lambda: job(schedule=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0)), {}),
    "without validation": (lambda: job(valid=None, metrics=()), {}),
    "a loader, no workers": (lambda: victim_job(0), {}),
    "a loader, two workers": (lambda: victim_job(2), {}),
}


def train(run, make, *, kill_at=None, resume=False, save_every=3, **settings):
    """Train, and be killed inside the so manieth training forward pass."""
    made, passes = make(), []

    def counted():
        passes.append(made.model.training)
        if passes[-1] and sum(passes) == kill_at:
            kill_me()

    hook = before_forward(made.model, counted)
    try:
        return fit(made, **{"resume" if resume else "out": run}, save_every=save_every, progress=False, **settings)
    finally:
        hook.remove()


def killed(run, make, at, **settings):
    assert in_a_child(lambda: train(run, make, kill_at=at, **settings)) == -signal.SIGKILL


def resumed(run, make, **settings):
    """In a child too: what the process did before must not matter."""
    assert in_a_child(lambda: train(run, make, resume=True, **settings)) == 0


def files_of(run):
    """Every file with its time, but for the lock, and for what the kill left half written."""
    files = [f for f in run.rglob("*") if f.is_file() and f.name != "lock"]
    return sorted((f, f.stat().st_mtime_ns) for f in files if not f.parent.name.startswith("."))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What each training comes to when nobody kills it."""
    found = {}

    def of(way):
        if way not in found:
            run = tmp_path_factory.mktemp("whole") / "run"
            make, settings = WAYS[way]
            assert in_a_child(lambda: train(run, make, **settings)) == 0
            found[way] = outcome(run)
        return found[way]

    return of


@pytest.mark.parametrize("at", [10, 19, 24])
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_training_ends_as_if_nothing_had_been(tmp_path, undisturbed, way, at):
    make, settings = WAYS[way]
    run = tmp_path / "run"
    killed(run, make, at, **settings)
    resumed(run, make)
    assert outcome(run) == undisturbed(way)


@pytest.mark.parametrize("way", ["plain", "early stopping", "a loader, two workers"])
def test_killed_again_and_again_it_still_ends_the_same(tmp_path, undisturbed, way):
    make, _ = WAYS[way]
    run = tmp_path / "run"
    killed(run, make, 8)
    for _ in range(3):
        killed(run, make, 6, resume=True)
    resumed(run, make)
    assert outcome(run) == undisturbed(way)


def test_early_stopping_knows_the_best_from_before_the_kill(tmp_path):
    """The best is at update 14; killed at 17, and it stops at 28 with the weights of 14."""
    run = tmp_path / "run"
    killed(run, early, 17)
    finished = fit(early(), resume=run, progress=False)
    whole = fit(early(), out=tmp_path / "whole", progress=False)
    assert finished.stopped == whole.stopped
    assert finished.stopped.startswith("early")
    assert finished.best["step"] == 14
    assert int(finished.model.count) == 14
    assert torch.equal(parameters_of(finished.model), parameters_of(whole.model))


def test_what_fit_returns_covers_the_whole_training(tmp_path):
    run = tmp_path / "run"
    killed(run, job, 17)
    finished = fit(job(), resume=run, progress=False)
    assert (finished.steps, finished.updates, finished.samples) == (28, 28, 200)
    assert [record["step"] for record in finished.history] == [7, 14, 21, 28]
    assert finished.path == run
    # Killed in step 17, while the checkpoint of step 15 was perhaps still being written.
    assert {entry.what for entry in finished.ledger} & {"resumed at step 15", "resumed at step 12"}


def test_the_callers_randomness_is_left_alone_by_a_resume(tmp_path):
    killed(tmp_path / "run", job, 17)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made = job()
    torch.set_rng_state(before)
    fit(made, resume=tmp_path / "run", progress=False)
    assert torch.equal(torch.get_rng_state(), before)


# --- before the first checkpoint -----------------------------------------------------------------

BEGUN_AGAIN = "begun again at step 0"


@pytest.mark.parametrize("way", ["plain", "bf16", "early stopping", "a loader, two workers"])
def test_killed_before_the_first_checkpoint_it_begins_again_and_ends_as_if_nothing_had_been(tmp_path, undisturbed, way):
    """Twice; and the plan is the one it was begun with."""
    make, settings = WAYS[way]
    run = tmp_path / "run"
    killed(run, make, 17, save_every=None, **settings)
    killed(run, make, 12, save_every=None, resume=True)
    assert not (run / "checkpoints").exists()
    resumed(run, make)
    assert BEGUN_AGAIN in [entry.what for entry in RunFolder.open(run).read_ledger()]
    assert outcome(run) == undisturbed(way)


def moments_of_the_first_save(run):
    seen = []
    with disk.watched(seen.append):
        train(run, lambda: job(epochs=1), save_every=1000)
    return seen[: len(seen) // 2]


def test_killed_in_its_very_first_save_it_ends_as_if_nothing_had_been(tmp_path, undisturbed):
    """At moments from before the first call to after the last, those around the rename among them."""
    seen = moments_of_the_first_save(tmp_path / "counted")
    named = seen.index("after rename") + 1
    again = {}
    for moment in sorted({1, 2, 5, 12, named - 2, named - 1, named, named + 1, named + 4, named + 8}):
        run = tmp_path / str(moment)

        def die(run=run, moment=moment):
            with disk.watched(kill_at(moment)):
                train(run, job, save_every=1000)

        assert in_a_child(die) == -signal.SIGKILL
        resumed(run, job)
        again[moment] = BEGUN_AGAIN in [entry.what for entry in RunFolder.open(run).read_ledger()]
        assert outcome(run) == undisturbed("plain"), seen[moment - 1]
    assert again == {moment: moment < named for moment in again}, "from the checkpoint once it has its name"


def test_that_it_begins_again_is_said_in_a_line_and_written_down(tmp_path, capfd, monkeypatch):
    run = tmp_path / "run"
    killed(run, job, 17, save_every=None)
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    finished = fit(job(), resume=run)
    assert f"\nno checkpoint of {run} had been completed: begun again at step 0\n" in capfd.readouterr().err
    assert [(entry.step, entry.why) for entry in finished.ledger if entry.what == BEGUN_AGAIN] == [
        (0, "no checkpoint had been completed")
    ]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [7, 14, 21, 28]


def moved(model):
    with torch.no_grad():
        model.inner[0][2].bias[1] += 1e-9


def counting(model):
    model.count += 1


OTHER_STARTS = {
    "a weight": lambda model, optimizer: moved(model),
    "a buffer": lambda model, optimizer: counting(model),
    "what the optimizer brings along": lambda model, optimizer: optimizer.state.update(
        {p: {"step": torch.ones(()), "exp_avg": p.detach() + 1} for p in list(model.parameters())[:1]}
    ),
}


@pytest.mark.parametrize("change", OTHER_STARTS.values(), ids=OTHER_STARTS)
def test_another_start_is_refused_in_one_line_before_the_first_checkpoint(tmp_path, change):
    run = tmp_path / "run"
    killed(run, job, 17, save_every=None)
    before = files_of(run)

    def other():
        made = job()
        change(made.model, made.optimizer)
        return made

    with pytest.raises(StoreError) as caught:
        fit(other(), resume=run, progress=False)
    told = str(caught.value)
    assert told.startswith(f"the model's first weights are not those that {run} began with")
    for words in ("seed before the model is made", "start anew in another folder", "--allow-changes"):
        assert words in told
    assert "\n" not in told
    assert files_of(run) == before


def test_another_start_that_is_allowed_is_the_one_that_counts_from_then_on(tmp_path):
    run = tmp_path / "run"

    def other():
        made = job()
        moved(made.model)
        return made

    whole = fit(other(), out=tmp_path / "whole", progress=False)
    killed(run, job, 17, save_every=None)
    killed(run, other, 17, save_every=None, resume=True, allow_changes=True)
    with pytest.raises(StoreError, match="first weights"):
        fit(job(), resume=run, progress=False)
    finished = fit(other(), resume=run, progress=False)
    assert torch.equal(parameters_of(finished.model), parameters_of(whole.model))


def test_other_settings_are_refused_before_the_first_checkpoint_too(tmp_path):
    run = tmp_path / "run"
    killed(run, job, 17, save_every=None)
    before = files_of(run)
    with pytest.raises(StoreError, match="settings: batch_size was 8, is 4; resume it as it was"):
        fit(job(batch_size=4), resume=run, progress=False)
    assert files_of(run) == before


@pytest.mark.parametrize("lost", ["checkpoints", "checkpoints/step-*"])
def test_checkpoints_that_are_gone_are_a_clear_stop_and_nothing_is_begun_again(tmp_path, lost):
    run = tmp_path / "run"
    killed(run, job, 17)
    for path in run.glob(lost):
        shutil.rmtree(path)
    before = files_of(run)
    with pytest.raises(StoreError, match="had checkpoints and has none now; restore checkpoints, or start"):
        fit(job(), resume=run, progress=False)
    assert files_of(run) == before


@pytest.mark.parametrize("content", [None, "garbage", "{}", '{"format": 2}', "[]"])
def test_without_a_record_of_its_start_and_a_checkpoint_nothing_is_begun_again(tmp_path, content):
    run = tmp_path / "run"
    killed(run, job, 17, save_every=None)
    (run / "record.json").unlink() if content is None else (run / "record.json").write_text(content)
    with pytest.raises(StoreError, match="has no checkpoint to resume from; start the training anew"):
        fit(job(), resume=run, progress=False)


def test_with_a_checkpoint_a_record_that_is_damaged_does_not_matter(tmp_path, undisturbed):
    run = tmp_path / "run"
    killed(run, job, 17)
    (run / "record.json").write_text("garbage")
    resumed(run, job)
    assert outcome(run) == undisturbed("plain")


@pytest.mark.parametrize("name", ["started", "environment", "ledger", "plan"])
def test_killed_while_the_folder_is_set_up_it_is_started_anew_there(tmp_path, undisturbed, name):
    run = tmp_path / "run"

    def die():
        setattr(RunFolder, f"write_{name}", lambda *_: kill_me())
        train(run, job)

    assert in_a_child(die) == -signal.SIGKILL
    with pytest.raises(StoreError, match="holds no training yet: its run ended before the first step; start it anew"):
        fit(job(), resume=run, progress=False)
    assert in_a_child(lambda: train(run, job)) == 0
    assert outcome(run) == undisturbed("plain")


# --- after the end -------------------------------------------------------------------------------


def untouchable(made):
    """A job that fails the test when it is trained or evaluated."""
    before_forward(made.model, lambda: pytest.fail("it was trained again"))
    return made


@pytest.mark.parametrize("save_every", [None, 3])
@pytest.mark.parametrize("make", [job, early], ids=["to the end", "early"])
def test_a_run_that_has_ended_is_handed_back_without_training(tmp_path, capfd, monkeypatch, make, save_every):
    first = train(tmp_path / "run", make, save_every=save_every)
    shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
    model = (tmp_path / "run/model.safetensors").stat().st_mtime_ns
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    again = fit(untouchable(make()), resume=tmp_path / "run")
    assert f"{tmp_path / 'run'} had ended {first.stopped}: nothing is left to train" in capfd.readouterr().err
    assert torch.equal(parameters_of(again.model), parameters_of(first.model))
    assert int(again.model.count) == int(first.model.count)
    for name in ("history", "best", "steps", "updates", "samples", "stopped", "plan", "train_s"):
        assert getattr(again, name) == getattr(first, name), name
    assert (tmp_path / "run/model.safetensors").stat().st_mtime_ns == model
    assert [entry.what for entry in again.ledger][-1] == f"resumed at step {first.steps}"


def test_an_ended_run_with_its_own_loss_is_handed_back_whole(tmp_path):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, output, target):
            return nn.functional.cross_entropy(output * self.scale, target)

    def make():
        model, loss = Net(), Weighted()
        return job(model=model, loss=loss, optimizer=torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1))

    first, again = make(), make()
    fit(first, out=tmp_path / "run", progress=False)
    assert not torch.equal(first.loss.scale, again.loss.scale)
    fit(untouchable(again), resume=tmp_path / "run", progress=False)
    assert torch.equal(first.loss.scale, again.loss.scale)


def test_losses_that_are_no_numbers_come_back_as_such(tmp_path):
    make = lambda: job(valid=None, metrics=(), loss=lambda model, batch: model(batch[0]).sum() + float("nan"))  # noqa: E731
    train(tmp_path / "run", make, save_every=None)
    again = fit(untouchable(make()), resume=tmp_path / "run", progress=False)
    assert [record["train_loss"] != record["train_loss"] for record in again.history] == [True] * 4


def test_fewer_epochs_than_it_had_leave_an_ended_run_as_it_is(tmp_path):
    first = train(tmp_path / "run", job, save_every=None)
    again = fit(untouchable(job(epochs=2)), resume=tmp_path / "run", progress=False)
    assert again.updates == 28
    assert torch.equal(parameters_of(again.model), parameters_of(first.model))


def test_another_training_is_not_handed_what_this_one_came_to(tmp_path):
    train(tmp_path / "run", job, save_every=None)
    with pytest.raises(StoreError, match="settings: seed was 0, is 3"):
        fit(job(seed=3), resume=tmp_path / "run", progress=False)


def test_more_epochs_without_a_checkpoint_are_trained_from_step_0(tmp_path, undisturbed):
    run = tmp_path / "run"
    train(run, lambda: job(epochs=2), save_every=None)
    resumed(run, job)
    assert outcome(run) == undisturbed("plain")


def test_more_patience_goes_on_where_it_had_stopped_early(tmp_path):
    """It stopped at 28, two evaluations after the best; with three more it ends after them or at the last epoch."""
    assert train(tmp_path / "run", early).steps == 28
    assert train(tmp_path / "run", lambda: job(**patient(5)), resume=True).steps == 49


def patient(patience):
    return {"scripted": True, "monitor": "scripted", "better": "higher", "patience": patience, "epochs": 8}


def test_killed_while_it_trains_more_epochs_it_is_not_taken_for_ended(tmp_path, undisturbed):
    run = tmp_path / "run"
    train(run, lambda: job(epochs=2))
    killed(run, job, 4, resume=True)
    assert json.loads((run / "record.json").read_text())["ended"] is None
    resumed(run, job)
    assert outcome(run) == undisturbed("plain")


def removed(run):
    (run / "model.safetensors").unlink()


HARMS = {
    "a flipped bit": lambda run: flip(run / "model.safetensors", at=-3),
    "no model": removed,
    "no metrics": lambda run: (run / "metrics.jsonl").write_text(""),
    "metrics of something else": lambda run: (run / "metrics.jsonl").write_text("[1]\n"),
    "no ledger": lambda run: (run / "ledger.jsonl").write_text("x"),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
@pytest.mark.parametrize("save_every", [None, 3])
def test_an_end_that_was_damaged_is_told_and_trained_again(tmp_path, undisturbed, capfd, monkeypatch, harm, save_every):
    run = tmp_path / "run"
    train(run, job, save_every=save_every)
    harm(run)
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    fit(job(), resume=run, save_every=3)
    assert f"{run} had ended, but " in capfd.readouterr().err
    assert outcome(run) == undisturbed("plain")


def test_a_finished_run_trains_nothing_more(tmp_path, undisturbed):
    run = tmp_path / "run"
    train(run, job)
    finished = train(run, job, resume=True)
    assert finished.updates == 28
    assert outcome(run) == undisturbed("plain")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_that_stopped_early_trains_nothing_more(tmp_path, undisturbed):
    run = tmp_path / "run"
    train(run, early)
    train(run, early, resume=True)
    assert outcome(run) == undisturbed("early stopping")


def test_with_more_epochs_a_finished_run_goes_on_as_if_they_had_been_asked_for_at_once(tmp_path, undisturbed):
    run = tmp_path / "run"
    train(run, lambda: job(epochs=2))
    resumed(run, job)
    assert outcome(run) == undisturbed("plain")


# --- another training ----------------------------------------------------------------------------


def test_other_settings_and_data_are_refused_with_each_difference(tmp_path):
    run = tmp_path / "run"
    train(run, lambda: job(epochs=1))
    x, y = class_data()
    x[3, 2] += 1
    before = files_of(run)
    with pytest.raises(StoreError) as caught:
        fit(job(batch_size=4, seed=3, data=(x, y)), resume=run, progress=False)
    told = str(caught.value)
    assert "settings: batch_size was 8, is 4" in told
    assert "settings: seed was 0, is 3" in told
    assert "data: sha256 was" in told
    assert "allow_changes=True" in told
    assert "--allow-changes" in told
    assert files_of(run) == before


def test_changes_are_allowed_by_a_word_and_written_down(tmp_path):
    run = tmp_path / "run"
    train(run, lambda: job(epochs=1))
    finished = fit(job(batch_size=4, epochs=2), resume=run, progress=False, allow_changes=True)
    assert finished.samples == 100
    assert "settings: batch_size was 8, is 4" in (run / "ledger.jsonl").read_text()


MODULE = """
import torch
from torch import nn
from hotlap import Job, fit

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(5, 3)
    def forward(self, x):
        return self.inner(x) * {factor}

def make():
    model = Own()
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model=model, data=data, loss=nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=8, epochs=4,
               device="cpu")
"""
KILL = """
import os, signal, sys
def die_at(model, at):
    passes = []
    def counted(module, given):
        if module is model:
            passes.append(1)
        if len(passes) == at:
            os.kill(os.getpid(), signal.SIGKILL)
    torch.nn.modules.module.register_module_forward_pre_hook(counted)
"""
SCRIPT = (
    MODULE.format(factor=1)
    + KILL
    + """
if __name__ == "__main__":
    job = make()
    if "--die" in sys.argv:
        die_at(job.model, 9)
    save_every = None if "--unsaved" in sys.argv else 2
    run = fit(job, out=sys.argv[1] if "--out" in sys.argv else None, save_every=save_every, progress=False)
    print("done", run.updates, sys.argv[1:])
"""
)


def test_changed_code_is_refused_and_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file, run = tmp_path / "own_training.py", tmp_path / "run"

    def from_file(**settings):
        sys.modules.pop("own_training", None)
        import own_training

        return fit(own_training.make(), progress=False, **settings)

    file.write_text(MODULE.format(factor=1))
    assert in_a_child(lambda: from_file(out=run)) == 0
    file.write_text(MODULE.format(factor=2.5))
    said = tmp_path / "said"
    assert in_a_child(lambda: from_file(resume=run), said) == 1
    assert "the code of own_training.py differs" in said.read_text()
    assert in_a_child(lambda: from_file(resume=run, allow_changes=True), said) == 0


def test_a_new_folder_and_one_to_resume_are_in_conflict(tmp_path):
    train(tmp_path / "run", lambda: job(epochs=1))
    with pytest.raises(StoreError, match=r"both out=.* and resume="):
        fit(job(), out=tmp_path / "other", resume=tmp_path / "run", progress=False)
    assert not (tmp_path / "other").exists()
    fit(job(epochs=1), out=tmp_path / "run", resume=tmp_path / "run", progress=False)


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path):
    with pytest.raises(StoreError, match=r"has no plan\.toml"):
        fit(job(), resume=tmp_path, progress=False)


def test_a_run_in_use_is_refused_until_its_process_dies(tmp_path):
    run, gate = tmp_path / "run", os.pipe()

    def hold():
        made, passes = job(), []

        def waiting():
            passes.append(1)
            if len(passes) == 9:
                os.write(gate[1], b"x")
                os.read(os.pipe()[0], 1)  # for ever

        before_forward(made.model, waiting)
        fit(made, out=run, save_every=3, progress=False)

    pid = forked(hold)
    os.read(gate[0], 1)
    with pytest.raises(StoreError, match=f"in use by process {pid}"):
        fit(job(), resume=run, progress=False)
    os.kill(pid, signal.SIGKILL)
    code_of(pid)
    assert fit(job(), resume=run, progress=False).updates == 28


# --- damage --------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_named_the_one_before_is_used_and_the_end_is_the_same(
    tmp_path, undisturbed, capfd, monkeypatch
):
    run = tmp_path / "run"
    killed(run, job, 17)
    newest = max((run / "checkpoints").glob("step-*"))
    flip(newest / "training.safetensors")
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    finished = fit(job(), resume=run, save_every=3)
    line = f"checkpoint {newest.name} is damaged: training.safetensors differs from what was written (sha256)"
    assert line in capfd.readouterr().err
    assert any(line in entry.why for entry in finished.ledger)
    assert line in (run / "ledger.jsonl").read_text()
    assert outcome(run) == undisturbed("plain")


def test_no_good_checkpoint_is_a_clear_stop_and_nothing_is_trained_or_touched(tmp_path):
    run = tmp_path / "run"
    killed(run, job, 17)
    for step in (run / "checkpoints").glob("step-*"):
        flip(step / "model.safetensors")
    before = files_of(run)
    model = Net()
    weights = parameters_of(model).clone()
    with pytest.raises(StoreError, match=r"every checkpoint of .* is damaged"):
        fit(job(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01)), resume=run, progress=False)
    assert torch.equal(parameters_of(model), weights)
    assert files_of(run) == before


def test_metrics_have_no_doubled_or_torn_line(tmp_path, undisturbed):
    run = tmp_path / "run"
    killed(run, job, 24)  # the checkpoint is of 21 or 18: the line of 21 may come again
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 28, "epo')
    resumed(run, job)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [7, 14, 21, 28]
    assert outcome(run) == undisturbed("plain")


# --- the command ---------------------------------------------------------------------------------


def command(*words, cwd=None, script=None):
    """`hotlap` (or a script) as a process of its own would run it, without loading torch again."""

    def run():
        loop._calls = 0
        os.environ["HOTLAP_PROGRESS"] = "lines"
        if cwd is not None:
            os.chdir(cwd)
        sys.argv = [str(word) for word in words]
        if script is None:
            main()
        else:
            import runpy

            sys.argv = [str(script), *map(str, words)]
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")

    return run


def said_by(tmp_path, action, expected=0):
    said = tmp_path / "said"
    code = in_a_child(action, said)
    assert code == expected, said.read_text()
    return said.read_text()


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture
def left(tmp_path, script):
    """The run that a killed script left."""
    run = tmp_path / "left"
    assert in_a_child(command(run, "--out", "--die", script=script)) == -signal.SIGKILL
    return run


@pytest.fixture(scope="module")
def left_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    (folder / "train.py").write_text(SCRIPT)
    run = folder / "left"
    assert in_a_child(command(run, "--out", "--die", script=folder / "train.py")) == -signal.SIGKILL
    return run


@pytest.fixture
def copy_of_left(tmp_path, script, left_once):
    """Such a run, where it does not matter that it was made in another folder."""
    return shutil.copytree(left_once, tmp_path / "left")


def weights(run):
    return (run / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of the script when nobody kills it."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "train.py").write_text(SCRIPT)
    assert in_a_child(command(folder / "whole", "--out", script=folder / "train.py"), folder / "said") == 0
    return weights(folder / "whole")


def test_the_command_resumes_a_script_with_its_words(tmp_path, script, left, expected):
    """Two real processes: the only test here that loads everything anew."""
    code, out, err = hotlap_command("resume", left, script, "somewhere", "--own-option", "--json")
    assert code == 0, err
    assert out == "done 20 ['somewhere', '--own-option', '--json']\n"
    assert weights(left) == expected


def test_a_folder_of_a_script_that_hotlap_only_ran_is_refused_before_the_script_runs(tmp_path, script, forks):
    folder = RunFolder.create(tmp_path / "ran")
    folder.write_plan(Plan())
    folder.write_started({"command": "run", "script": "train"})
    done = forks.run("-m", "hotlap", "resume", tmp_path / "ran", script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "keeps no checkpoints" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_resumes_a_module_with_its_words(tmp_path, script, left, expected):
    (tmp_path / "pack").mkdir()
    shutil.move(script, tmp_path / "pack/train.py")
    said = said_by(tmp_path, command("hotlap", "resume", left, "-m", "pack.train", "a", "b", cwd=tmp_path))
    assert "done 20 ['a', 'b']" in said
    assert weights(left) == expected


def test_the_command_resumes_a_named_job_or_function(tmp_path, script, left, expected):
    shown = said_by(tmp_path, command("hotlap", "resume", "--json", "--quiet", left, "train:make", cwd=tmp_path))
    assert json.loads(shown)["updates"] == 20
    assert weights(left) == expected


def test_options_of_the_command_are_also_taken_after_the_folder(tmp_path, script, left):
    shown = said_by(tmp_path, command("hotlap", "resume", left, "--json", "--quiet", "train:make", cwd=tmp_path))
    assert json.loads(shown)["updates"] == 20


def test_the_command_resumes_the_demo_without_more_words(tmp_path):
    run = tmp_path / "run"
    words = ("hotlap", "demo", "--epochs", 2, "--device", "cpu", "--quiet", "--out")

    def die():
        Best.judge = lambda *_: kill_me()  # after the first epoch
        command(*words, run)()

    assert in_a_child(die) == -signal.SIGKILL
    said = said_by(tmp_path, command("hotlap", "resume", run))
    assert f"no checkpoint of {run} had been completed: begun again at step 0" in said
    assert "trained   90 updates" in said
    said_by(tmp_path, command(*words, tmp_path / "whole"))
    assert weights(run) == weights(tmp_path / "whole")


def test_the_command_resumes_a_script_that_was_killed_before_its_first_checkpoint_again_and_again(
    tmp_path, script, expected
):
    run = tmp_path / "unsaved"
    assert in_a_child(command(run, "--out", "--die", "--unsaved", script=script)) == -signal.SIGKILL
    again = command("hotlap", "resume", run, script, "x", "--die", "--unsaved", cwd=tmp_path)
    assert in_a_child(again, tmp_path / "said") == -signal.SIGKILL
    said = said_by(tmp_path, command("hotlap", "resume", run, script, "x", "--unsaved", cwd=tmp_path))
    assert "done 20 ['x', '--unsaved']" in said
    assert weights(run) == expected
    said = said_by(tmp_path, command("hotlap", "resume", run, script, "x", "--unsaved", cwd=tmp_path))
    assert "done 20 ['x', '--unsaved']" in said, "it had ended"


def test_without_words_the_command_of_a_script_is_shown_and_nothing_runs(tmp_path, script, left):
    before = files_of(left)
    said = said_by(tmp_path, command("hotlap", "resume", left), expected=1)
    assert f"hotlap resume {left} {script} {left} --out --die" in said
    assert files_of(left) == before


@pytest.mark.parametrize(
    "words",
    [
        ["sh", "-c", "touch {trap}"],
        ["$(touch {trap})", "`touch {trap}`", "; touch {trap}"],
        ["-c", "open('{trap}', 'w')"],
        ["-m", "trap"],
        ["trap:make"],
        ["{folder}/trap.py"],
        ["hotlap", "demo", "--epochs", "__import__('os').system('touch {trap}')"],
        ["hotlap", "demo", "--epochs", "9" * 5000],
        ["hotlap", "demo", "--device", "$(touch {trap})"],
        ["\x1b[2J\x1b]0;owned\x07", "a\nhotlap: all is well"],
        "touch {trap}",
        [1, None],
        {},
    ],
    ids=str,
)
def test_nothing_that_a_folder_says_is_ever_run(tmp_path, copy_of_left, words):
    trap = tmp_path / "sprung"
    (tmp_path / "trap.py").write_text(f"open({str(trap)!r}, 'w')\n")
    filled = (
        [w.format(trap=trap, folder=tmp_path) if isinstance(w, str) else w for w in words]
        if isinstance(words, list)
        else words
    )
    (copy_of_left / "started.json").write_text(json.dumps({"words": filled, "call": 1}))
    said = said_by(tmp_path, command("hotlap", "resume", copy_of_left, cwd=tmp_path), expected=1)
    assert not trap.exists()
    assert said.startswith("hotlap: ")
    assert "Traceback" not in said
    assert "\x1b" not in said
    assert "\nhotlap: all is well" not in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["missing.py"], "missing.py is no file"),
        (["-m"], "-m needs the name of a module"),
        (["missing_module:job"], "No module named 'missing_module'"),
        (["train:missing"], "train has no 'missing'"),
        (["train:MODULE_NAME"], "train has no 'MODULE_NAME'"),
        (["train:signal"], "train:signal is a module, not a hotlap.Job"),
        (["idle.py"], "idle.py ended without going on with"),
        (["--allow-changes", "train.py"], "--allow-changes does not reach train.py"),
        (["--json", "train.py"], "--json does not reach train.py"),
    ],
)
def test_a_program_that_cannot_be_resumed_is_told_in_one_line(tmp_path, copy_of_left, words, told):
    (tmp_path / "idle.py").write_text("pass\n")
    code = 1 if words == ["idle.py"] else 2
    said = said_by(tmp_path, command("hotlap", "resume", copy_of_left, *words, cwd=tmp_path), expected=code)
    assert told in said
    assert "Traceback" not in said


def test_a_start_that_is_not_told_does_not_matter_where_the_program_is_named(tmp_path, script, left, expected):
    (left / "started.json").write_text("garbage")
    said_by(tmp_path, command("hotlap", "resume", "--quiet", left, "train:make", cwd=tmp_path))
    assert weights(left) == expected


def test_the_command_allows_changes_by_a_word(tmp_path, script, left):
    script.write_text(SCRIPT.replace("* 1", "* 2"))
    said = said_by(tmp_path, command("hotlap", "resume", left, "train:make", cwd=tmp_path), expected=1)
    assert "the code of train.py differs" in said
    said_by(tmp_path, command("hotlap", "resume", "--allow-changes", left, "train:make", cwd=tmp_path))
    assert "the code of train.py differs" in (left / "ledger.jsonl").read_text()


def test_checkpoints_load_in_plain_pytorch_without_hotlap(tmp_path, torch_forks):
    """In a process that cannot import hotlap."""
    run = tmp_path / "run"
    model = Net()
    train(run, lambda: job(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), epochs=1))
    newest = max((run / "checkpoints").glob("step-*"))
    reader = """
        import sys
        from safetensors.torch import load_file
        state = load_file(sys.argv[1])
        assert not any(name.startswith("hotlap") for name in sys.modules)
        print(sorted(state), state["inner.0.0.weight"].double().sum().item())
    """
    done = torch_forks.run("-c", textwrap.dedent(reader), newest / "model.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    total = model.state_dict()["inner.0.0.weight"].double().sum().item()
    assert done.stdout == f"{sorted(model.state_dict())} {total}\n"


def test_the_manifest_tells_versions_code_data_settings_and_plan(tmp_path):
    run = train(tmp_path / "run", lambda: job(epochs=1))
    facts = Checkpoints(run.path / "checkpoints").newest_good()[0].facts
    assert facts["plan"] == run.plan.to_dict()
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["identity"]["settings"]["batch_size"] == 8
    assert facts["identity"]["data"]["samples"] == 50
    assert "test_resume.py" in facts["identity"]["code"]
    assert RunFolder.open(run.path).read_plan() == run.plan


def test_a_schedule_made_for_fewer_updates_is_told_of_when_more_are_asked_for(tmp_path, capfd, monkeypatch):
    def made(epochs):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return Job(
            model=model,
            data=(torch.randn(24, 3), torch.arange(24) % 2),
            loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            schedule=lambda o, updates: torch.optim.lr_scheduler.CosineAnnealingLR(o, updates),
            batch_size=8,
            epochs=epochs,
            device="cpu",
        )

    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    fit(made(2), out=tmp_path / "run", save_every=3)
    capfd.readouterr()
    fit(made(3), resume=tmp_path / "run", allow_changes=True)
    assert "the schedule was made for 6 updates" in capfd.readouterr().err

    fit(made(2), out=tmp_path / "anew", save_every=0)
    capfd.readouterr()
    again = fit(made(3), resume=tmp_path / "anew", allow_changes=True)
    assert "the schedule was made for" not in capfd.readouterr().err  # begun again, it spans all 9 updates
    assert again.history[-1]["lr"] == pytest.approx(0.0, abs=1e-6)
