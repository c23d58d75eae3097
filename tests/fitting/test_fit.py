import json
import math
import random

import numpy as np
import pytest
import torch
from plain import class_data, parameters_of, plain_loop, small_mlp, twins
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hotlap import Job, JobError, MachineError, Plan, PlanError, StoreError, TrainingError, fit, save_plan


def small_job(**changes):
    model = changes.pop("model", None) or small_mlp()
    settings = {
        "model": model,
        "data": class_data(),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01),
        "batch_size": 8,
        "epochs": 3,
        "device": "cpu",
    }
    return Job(**{**settings, **changes})


def quiet(job, tmp_path, **settings):
    return fit(job, out=tmp_path / "run", progress=False, **settings)


def test_fit_is_bit_equal_to_the_plain_loop(tmp_path):
    mine, theirs = twins(small_mlp())
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=21)
    plain_loop(theirs, optimizer, nn.CrossEntropyLoss(), class_data(), batch=8, epochs=3, clip=0.5, scheduler=scheduler)
    job = small_job(
        model=mine,
        clip=0.5,
        schedule=lambda o, updates: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=updates),
        valid=class_data(30, seed=9),
        metrics=["accuracy"],
    )
    run = quiet(job, tmp_path)
    assert torch.equal(parameters_of(run.model), parameters_of(theirs))
    assert (run.steps, run.updates, run.samples) == (21, 21, 150)


@pytest.mark.parametrize(
    "data",
    [
        class_data(),
        tuple(t.numpy() for t in class_data()),
        TensorDataset(*class_data()),
        [(x, int(y)) for x, y in zip(*class_data(), strict=True)],
    ],
    ids=["tensors", "arrays", "Dataset", "list of samples"],
)
def test_data_in_every_form_trains_to_the_same_bit(data, tmp_path):
    expected = quiet(small_job(), tmp_path / "a")
    run = quiet(small_job(data=data), tmp_path / "b")
    assert torch.equal(parameters_of(run.model), parameters_of(expected.model))


def test_a_dataloader_trains_with_its_own_batch_size(tmp_path):
    loader = DataLoader(TensorDataset(*class_data()), batch_size=10, shuffle=True)
    run = quiet(small_job(data=loader, batch_size=None), tmp_path)
    assert run.updates == 15
    assert run.plan.feed.kind == "loader"


def test_the_seed_decides_the_result_and_the_callers_randomness_is_left_alone(tmp_path):
    def trained(seed, place):
        model = nn.Sequential(small_mlp(), nn.Dropout(0.5))
        torch.manual_seed(random.randrange(1000))
        before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"], random.getstate()
        run = quiet(small_job(model=model, seed=seed), tmp_path / place)
        after = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"], random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        return parameters_of(run.model)

    assert torch.equal(trained(1, "a"), trained(1, "b"))
    assert not torch.equal(trained(1, "c"), trained(2, "d"))


def test_early_stopping_restores_the_best_weights(tmp_path):
    """The score is scripted: best at the third evaluation."""
    model = small_mlp()
    scores = iter([0.5, 0.6, 0.9, 0.7, 0.8, 0.7, 0.7])
    kept = []

    def scripted(output, target):
        kept.append(parameters_of(model).clone())
        return torch.full((len(target),), next(scores))

    job = small_job(
        model=model, epochs=10, valid=class_data(10), metrics={"scripted": scripted}, monitor="scripted",
        better="higher", patience=3,
    )  # fmt: skip
    run = quiet(job, tmp_path)
    assert len(run.history) == 6
    assert run.best == run.history[2]
    assert torch.equal(parameters_of(run.model), kept[2])
    assert not torch.equal(kept[2], kept[-1])
    assert run.stopped.startswith("early")


@pytest.mark.parametrize(("better", "expected"), [("lower", 1), ("higher", 2)])
def test_better_says_which_way_a_metric_should_move(better, expected, tmp_path):
    scores = iter([0.5, 0.2, 0.9])
    job = small_job(
        valid=class_data(10), metrics={"mine": lambda o, t: next(scores)}, monitor="mine", better=better, patience=5
    )
    run = quiet(job, tmp_path)
    assert run.best == run.history[expected]


def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    scores = iter([math.nan, 0.2, math.nan])
    job = small_job(
        valid=class_data(10), metrics={"mine": lambda o, t: next(scores)}, monitor="mine", better="lower", patience=5
    )
    assert quiet(job, tmp_path).best["mine"] == pytest.approx(0.2)


def test_a_plateau_schedule_moves_by_the_monitored_score(tmp_path):
    job = small_job(
        epochs=6,
        valid=class_data(10),
        metrics={"mine": lambda o, t: 1.0},
        monitor="mine",
        better="lower",
        schedule=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=1),
    )
    rates = [record["lr"] for record in quiet(job, tmp_path).history]
    assert rates == pytest.approx([0.01, 0.01, 0.01, 0.001, 0.001, 0.0001])


def test_evaluations_come_every_so_many_updates_when_asked(tmp_path):
    run = quiet(small_job(valid=class_data(10), eval_every=4, epochs=2), tmp_path)
    assert [record["step"] for record in run.history] == [4, 8, 12, 14]


def test_training_by_steps_ends_there_and_is_judged_at_the_end(tmp_path):
    run = quiet(small_job(epochs=None, steps=10, valid=class_data(10)), tmp_path)
    assert run.updates == 10
    assert [record["step"] for record in run.history] == [7, 10]


def test_the_training_loss_of_an_epoch_is_exact_over_its_samples(tmp_path):
    x, y = class_data(21)
    model = small_mlp()
    run = quiet(small_job(model=model, data=(x, y), optimizer=lambda p: torch.optim.SGD(p, lr=0.0)), tmp_path)
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(x), y).item()
    assert [record["train_loss"] for record in run.history] == pytest.approx([expected] * 3, rel=1e-12)


def test_a_loss_that_is_not_finite_is_told_once_and_recorded(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    x, y = class_data()
    job = small_job(data=(x, y), loss=lambda model, batch: model(batch[0]).sum() + math.nan)  # gradients are finite
    run = fit(job, out=tmp_path / "run")
    assert capfd.readouterr().err.count("warning: the training loss is nan") == 1
    assert [entry.outcome for entry in run.ledger].count("fault") == 1
    assert [problem.partition(" at step")[0] for problem in run.problems] == ["the training loss is nan"]
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["train_loss"] is None


@pytest.mark.parametrize(
    ("settings", "advice"),
    [({}, "a smaller learning rate, clip=1.0, skip_nonfinite=True"), ({"clip": 1.0}, "a smaller learning rate, skip")],
)
def test_what_is_done_already_is_no_advice(settings, advice, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    x, y = class_data()
    x[3] = math.inf
    with pytest.raises(TrainingError, match="the weights are not finite"):
        fit(small_job(data=(x, y), **settings), out=tmp_path / "run")
    assert f"try {advice}" in capfd.readouterr().err


def test_skipped_updates_are_counted_in_the_run(tmp_path):
    x, y = class_data()
    x[3] = math.inf
    run = quiet(small_job(data=(x, y), skip_nonfinite=True), tmp_path)
    assert (run.steps, run.updates) == (21, 18)
    assert "skipped   3 updates" in run.summary()


def test_choices_given_as_a_dict_change_the_users_own_plan_and_nothing_else(tmp_path):
    model = small_mlp()
    loader = DataLoader(TensorDataset(*class_data()), batch_size=10)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    job = small_job(model=model, data=loader, batch_size=None, optimizer=optimizer)
    run = quiet(job, tmp_path, plan={"micro_batch": 4})
    assert run.plan == Plan().but(kind="loader", optimizer="fused", micro_batch=4)
    with pytest.raises(PlanError, match="did you mean 'micro_batch'"):
        quiet(small_job(), tmp_path / "b", plan={"microbatch": 4})
    with pytest.raises(PlanError, match="plan is a int"):
        quiet(small_job(), tmp_path / "c", plan=4)


def test_the_model_is_trained_in_training_mode_and_handed_back_in_the_mode_it_came_in(tmp_path):
    seen = []

    class Watching(nn.Dropout):
        def forward(self, x):
            seen.append(self.training)
            return super().forward(x)

    model = nn.Sequential(small_mlp(), Watching(0.5)).eval()
    run = quiet(small_job(model=model), tmp_path)
    assert all(seen)
    assert not run.model.training


def test_early_stopping_restores_the_losss_own_weights_too_and_keeps_them_in_the_run(tmp_path):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output, target):
            return nn.functional.cross_entropy(output * self.scale, target)

    loss = Scaling()
    kept, scores = [], iter([0.5, 0.1, 0.9])

    def scripted(output, target):
        kept.append(loss.scale.item())
        return next(scores)

    job = small_job(
        loss=loss, valid=class_data(10), metrics={"mine": scripted}, monitor="mine", better="lower", patience=5
    )
    run = quiet(job, tmp_path)
    assert loss.scale.item() == kept[1] != kept[2]
    assert "loss.safetensors" in {artefact.name for artefact in run.artefacts()}


def test_a_buffer_younger_than_the_best_weights_does_no_harm(tmp_path):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_mlp()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 15:
                self.register_buffer("late", torch.zeros(1))
            return self.inner(x)

    scores = iter([0.1, 0.5, 0.9])
    job = small_job(
        model=Growing(), valid=class_data(10), metrics={"mine": lambda o, t: next(scores)}, monitor="mine",
        better="lower", patience=5,
    )  # fmt: skip
    assert quiet(job, tmp_path).best["mine"] == pytest.approx(0.1)


def test_a_plateau_schedule_made_by_a_function_is_checked_too(tmp_path):
    job = small_job(schedule=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o))
    with pytest.raises(JobError, match="give valid="):
        quiet(job, tmp_path)


def test_a_schedule_per_epoch_is_told_the_number_of_epochs(tmp_path):
    seen = []

    def schedule(optimizer, length):
        seen.append(length)
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)

    quiet(small_job(schedule=schedule, schedule_per="epoch"), tmp_path)
    assert seen == [3]


# --- the run folder ------------------------------------------------------------------------------


def test_the_run_folder_holds_all_that_a_run_left_and_lists_it(tmp_path):
    run = quiet(small_job(valid=class_data(10), metrics=["accuracy"]), tmp_path, save_every=4)
    names = {artefact.name: artefact.bytes for artefact in run.artefacts()}
    assert set(names) == {
        "plan.toml", "ledger.jsonl", "metrics.jsonl", "environment.json", "model.safetensors", "artefacts.json",
        "started.json", "record.json", "checkpoints/", "checkpoints.made",
    }  # fmt: skip
    stored = sum(file.stat().st_size for file in (run.path / "checkpoints").rglob("*") if file.is_file())
    assert names.pop("checkpoints/") == stored
    assert all(size == (run.path / name).stat().st_size for name, size in names.items())
    listed = json.loads((run.path / "artefacts.json").read_text())
    assert {row["name"] for row in listed} == {*names, "checkpoints/"} - {"artefacts.json"}
    assert run.files.read_plan() == run.plan
    assert run.files.read_ledger().plan_at(0) == run.plan
    assert [r["step"] for r in run.files.read_metrics()] == [r["step"] for r in run.history]
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["job"]["batch_size"] == 8
    assert "torch" in json.dumps(environment)
    for name in names:
        assert name in run.summary()


def test_the_model_loads_in_plain_pytorch_without_hotlap(tmp_path, torch_forks):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    run = quiet(small_job(model=model), tmp_path)
    model.eval()
    x = torch.ones(2, 5, dtype=torch.float64)
    script = """
import sys, torch
from torch import nn
from safetensors.torch import load_file
model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
model.load_state_dict(load_file(sys.argv[1]))
model.eval()
assert not any(name.startswith("hotlap") for name in sys.modules)
print(model(torch.ones(2, 5, dtype=torch.float64)).tolist())
"""
    done = torch_forks.run("-c", script, run.path / "model.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == model(x).tolist()


def test_a_folder_that_holds_files_is_refused_before_training(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    model = small_mlp()
    before = parameters_of(model).clone()
    with pytest.raises(StoreError, match="is not empty"):
        quiet(small_job(model=model), tmp_path)
    assert torch.equal(parameters_of(model), before)
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_without_a_name_every_run_gets_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = fit(small_job(), progress=False), fit(small_job(), progress=False)
    assert first.path != second.path
    assert first.path.parent.name == "runs"


def test_a_job_that_cannot_run_leaves_no_folder(tmp_path):
    with pytest.raises(PlanError, match="one by one"):
        quiet(small_job(data=[(torch.zeros(5).double(), 0)] * 9), tmp_path, plan=Plan())
    assert not (tmp_path / "run").exists()


# --- models trained before -----------------------------------------------------------------------


def test_the_very_same_training_is_loaded_and_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    settings = {"valid": class_data(10), "metrics": ["accuracy"], "patience": 5}
    first = quiet(small_job(**settings), tmp_path / "a", reuse=True)
    model = small_mlp()
    monkeypatch.setattr("hotlap.fitting.fit.train", lambda *_: pytest.fail("it was trained again"))
    again = quiet(small_job(model=model, **settings), tmp_path / "b", reuse=True)
    assert torch.equal(parameters_of(first.model), parameters_of(again.model))
    assert "trained before" in again.stopped
    assert (again.best, again.history, again.updates) == (first.best, first.history, first.updates)
    assert (again.path / "model.safetensors").read_bytes() == (first.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"epochs": 4},
        {"batch_size": 9},
        {"data": class_data(seed=5)},
        {"model": small_mlp(seed=8)},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.02)},
        {"valid": class_data(10)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_training_that_differs_in_anything_is_trained(changes, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    quiet(small_job(), tmp_path / "a", reuse=True)
    assert "trained before" not in quiet(small_job(**changes), tmp_path / "b", reuse=True).stopped


def test_a_damaged_model_in_the_cache_is_trained_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    first = quiet(small_job(), tmp_path / "a", reuse=True)
    for file in (tmp_path / "cache").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = quiet(small_job(), tmp_path / "b", reuse=True)
    assert "trained before" not in again.stopped
    assert torch.equal(parameters_of(first.model), parameters_of(again.model))
    assert caplog.records


# --- plans and machine ---------------------------------------------------------------------------


def test_an_unknown_plan_is_refused_with_the_ones_there_are():
    with pytest.raises(PlanError) as caught:
        fit(small_job(), plan="fast")
    assert str(caught.value) == "unknown plan 'fast': use auto, off, max, a plan file or a run folder"


def test_a_plan_is_taken_as_a_value_or_as_a_file(tmp_path):
    plan = Plan().but(kind="loader", micro_batch=3, optimizer="fused")
    save_plan(plan, tmp_path / "plan.toml")
    by_value = quiet(small_job(), tmp_path / "a", plan=plan)
    by_file = quiet(small_job(), tmp_path / "b", plan=tmp_path / "plan.toml")
    assert by_value.plan == by_file.plan == plan
    assert torch.equal(parameters_of(by_value.model), parameters_of(by_file.model))


def test_a_gpu_that_was_demanded_and_is_not_there_stops_before_any_data_is_read(tmp_path, monkeypatch):
    class Untouchable(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            raise AssertionError("data was read")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="GPU"):
        quiet(small_job(data=Untouchable(), device="auto"), tmp_path, require_gpu=True)
    with pytest.raises(MachineError, match="'cuda'"):
        quiet(small_job(data=Untouchable(), device="cuda"), tmp_path)
    assert not (tmp_path / "run").exists()


def test_workers_asked_for_by_the_environment_are_used_and_change_no_bit(tmp_path, monkeypatch):
    class Noisy(Dataset):
        def __len__(self):
            return 30

        def __getitem__(self, index):
            return torch.rand(5, dtype=torch.float64) + index, index % 3

    alone = quiet(small_job(data=Noisy()), tmp_path / "a")
    monkeypatch.setenv("NUM_WORKERS", "2")
    together = quiet(small_job(data=Noisy()), tmp_path / "b")
    assert together.plan.feed.workers == 2
    assert torch.equal(parameters_of(alone.model), parameters_of(together.model))


# --- what is shown -------------------------------------------------------------------------------


def test_the_banner_shows_the_settings_in_force(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    fit(small_job(accumulate=2), out=tmp_path / "run", plan=Plan().but(micro_batch=4))
    shown = capfd.readouterr()
    assert "batch 8 × 2 accumulated = 16 per update" in shown.err
    assert "3 epochs = 12 updates" in shown.err
    assert str(Plan().but(micro_batch=4)) in shown.err
    assert shown.out == ""


def test_a_quiet_fit_writes_nothing_to_the_terminal(tmp_path, capfd):
    quiet(small_job(), tmp_path)
    assert capfd.readouterr() == ("", "")


def test_the_function_stays_callable_whatever_was_imported_first():
    import hotlap
    import hotlap.fitting.fit

    assert callable(hotlap.fit)
    assert hotlap.fit is hotlap.fitting.fit.fit


def test_a_text_that_on_evaluation_returns_ends_the_training_and_is_the_reason(tmp_path):
    def at_the_second(record):
        return "that\nwill do" if record["epoch"] == 2 else 1

    run = quiet(small_job(epochs=5), tmp_path, on_evaluation=at_the_second)
    assert (run.stopped, run.best["epoch"]) == ("early: that will do", 2)


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), AttributeError("slip")])
def test_where_memory_is_too_small_to_keep_the_start_it_is_not_kept_and_other_errors_are_raised(tmp_path, error):
    class Full(torch.optim.lr_scheduler.ConstantLR):
        def state_dict(self):
            raise error

    job = small_job(schedule=lambda o: Full(o))
    if isinstance(error, RuntimeError):
        assert quiet(job, tmp_path).updates > 0
    else:
        with pytest.raises(AttributeError, match="slip"):
            quiet(job, tmp_path)
