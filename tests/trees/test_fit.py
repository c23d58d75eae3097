"""Training trees: the same trees under every plan, what the folder keeps, the cache, and stopping."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hotlap import machine, trees
from hotlap.core.errors import JobError, MachineError, PlanError, StoreError
from hotlap.trees import choosing, growing, libraries

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(300, 6)).astype(np.float32)
X[RANDOM.random(X.shape) < 0.05] = np.nan
Y = np.nan_to_num(X) @ RANDOM.normal(size=(6, 5)) + 0.1 * RANDOM.normal(size=(300, 5))
TRAIN, VALID = slice(0, 200), slice(200, 300)
BOTH = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
SMALL = {"xgboost": {"max_depth": 3}, "lightgbm": {"num_leaves": 6, "min_data_in_leaf": 5}}


def job_of(library="xgboost", y=Y, *, judged=False, **given):
    valid = {"valid": (X[VALID], y[VALID])} if judged else {}
    params = {**SMALL[library], **given.pop("params", {})}
    return trees.TreeJob(X[TRAIN], y[TRAIN], library=library, params=params, **{"rounds": 8, **valid, **given})


def fitted(tmp_path, job, plan="off", name="run", **given):
    return trees.fit(job, plan=plan, out=tmp_path / name, progress=False, **given)


def own_answers(library, target, rounds=8):
    """What the library gives without hotlap, on data of its own."""
    if library == "xgboost":
        import xgboost

        data = xgboost.DMatrix(X[TRAIN], label=Y[TRAIN, target], nthread=1)
        settings = {"max_depth": 3, "seed": 0, "nthread": 1, "objective": "reg:squarederror"}
        return xgboost.train(settings, data, rounds).predict(xgboost.DMatrix(X[VALID], nthread=1))
    import lightgbm

    settings = {**SMALL["lightgbm"], "seed": 0, "verbosity": -1, "num_threads": 1, "objective": "regression"}
    data = lightgbm.Dataset(X[TRAIN], label=Y[TRAIN, target], params={**settings})
    return lightgbm.train(settings, data, rounds).predict(X[VALID])


PLANS = [{"threads": 1}, {"threads": 2}, {"threads": 1, "at_once": 2}, {"threads": 1, "at_once": 4}]
CASES = [(library, plan) for library in ("xgboost", "lightgbm") for plan in PLANS]


@pytest.mark.parametrize(("library", "plan"), [*CASES, ("xgboost", {"threads": 1, "joint": True})], ids=str)
def test_many_targets_get_the_trees_that_each_gets_alone_from_the_library_itself(library, plan, tmp_path):
    answers = fitted(tmp_path, job_of(library), plan).predict(X[VALID])
    for target in range(5):
        assert np.array_equal(answers[:, target], own_answers(library, target)), target


@BOTH
def test_sampling_and_patience_give_the_same_trees_at_once_as_one_by_one(library, tmp_path):
    sampled = {"subsample": 0.7, "colsample_bytree": 0.6} | ({"bagging_freq": 1} if library == "lightgbm" else {})
    job = job_of(library, judged=True, params={**sampled, "learning_rate": 0.6}, patience=2, rounds=40, seed=3)
    one = fitted(tmp_path, job, {"threads": 1}, "one")
    many = fitted(tmp_path, job, {"threads": 1, "at_once": 3}, "many")
    assert np.array_equal(one.predict(X), many.predict(X))
    assert one.history == many.history
    assert one.best == many.best
    assert len(set(one.best["round"])) > 1, "targets stop each by itself"


@BOTH
def test_patience_keeps_the_best_round_of_each_target(library, tmp_path):
    job = job_of(library, Y[:, 0], judged=True, patience=3, rounds=200, params={"learning_rate": 0.8})
    run = fitted(tmp_path, job)
    (score,) = [name for name in run.history[0] if name != "round"]
    values = [record[score] for record in run.history]
    best = values.index(min(values)) + 1
    assert len(values) == best + 3 < 200
    assert run.best == {"round": best, score: values[-1]} or run.best["round"] == best
    again = fitted(tmp_path, job_of(library, Y[:, 0], rounds=best, params={"learning_rate": 0.8}), name="again")
    assert np.array_equal(run.predict(X), again.predict(X))


@BOTH
def test_the_model_in_the_folder_gives_the_same_answers(library, tmp_path):
    run = fitted(tmp_path, job_of(library))
    model = trees.load(run.folder)
    assert np.array_equal(model.predict(X), run.predict(X))
    assert run.predict(X).shape == (300, 5)
    assert {"trees.json", "boosters/", "ledger.jsonl", "environment.json"} <= {a.name for a in run.artefacts()}


@pytest.mark.parametrize(
    ("library", "params"),
    [
        ("xgboost", {"booster": "dart", "rate_drop": 0.5}),
        ("xgboost", {"num_parallel_tree": 3, "subsample": 0.5}),
        ("xgboost", {"tree_method": "exact"}),
        ("xgboost", {"grow_policy": "lossguide", "max_leaves": 4}),
        ("xgboost", {"tree_method": "approx"}),
        ("lightgbm", {"boosting": "dart", "drop_rate": 0.5}),
        ("lightgbm", {"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5}),
        ("lightgbm", {"data_sample_strategy": "goss"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("task", trees.job.TASKS)
def test_each_kind_of_booster_is_saved_and_loaded(library, params, task, tmp_path):
    y = Y[:, 0] if task == "regression" else np.digitize(Y[:, 0], [-1, 1])
    run = fitted(tmp_path, job_of(library, y, task=task, params=params))
    assert np.array_equal(trees.load(run.folder).predict(X), run.predict(X))
    assert len(np.unique(run.predict(X))) > 1


def test_patience_is_refused_where_later_rounds_change_earlier_trees():
    with pytest.raises(JobError, match="'dart' changes their trees"):
        job_of(judged=True, patience=2, params={"booster": "dart"})


@BOTH
@pytest.mark.parametrize("count", [2, 3])
def test_classes_are_answered_by_their_labels_with_probabilities(library, count, tmp_path):
    labels = np.array(["low", "mid", "top"])[np.digitize(Y[:, 0], [0] if count == 2 else [-2, 2])]
    run = fitted(tmp_path, job_of(library, labels, task="classification", rounds=20))
    model = trees.load(run.folder)
    chances = model.probabilities(X[VALID])
    assert model.classes == [sorted(set(labels))]
    assert np.allclose(chances.sum(1), 1)
    assert np.array_equal(model.predict(X[VALID]), np.asarray(model.classes[0])[chances.argmax(1)])
    assert (model.predict(X[VALID]) == labels[VALID]).mean() > 0.6


@BOTH
def test_weights_count(library, tmp_path):
    heavy = np.where(np.arange(200) < 100, 1.0, 0.0)
    plain = fitted(tmp_path, job_of(library, Y[:, 0]), name="plain").predict(X)
    weighted = fitted(tmp_path, job_of(library, Y[:, 0], weight=heavy), name="weighted").predict(X)
    error = np.abs(weighted - Y[:, 0])
    assert not np.array_equal(plain, weighted)
    assert error[:100].mean() < error[100:200].mean()


@BOTH
def test_data_is_quantised_once_for_all_targets(library, tmp_path, monkeypatch):
    kind = {"xgboost": "XgboostData", "lightgbm": "LightgbmData"}[library]
    made = []
    init = getattr(libraries, kind).__init__

    def counted(self, *args, **given):
        made.append(kind)
        init(self, *args, **given)

    monkeypatch.setattr(getattr(libraries, kind), "__init__", counted)
    fitted(tmp_path, job_of(library))
    assert len(made) == 1


@BOTH
def test_a_model_trained_before_is_loaded_and_not_trained_again(library, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    first = fitted(tmp_path, job_of(library), name="first", reuse=True)
    monkeypatch.setattr(growing.Growth, "grow", lambda *_: pytest.fail("it was trained again"))
    second = fitted(tmp_path, job_of(library), name="second", reuse=True)
    assert second.stopped == "loaded from the cache"
    assert np.array_equal(first.predict(X), second.predict(X))
    assert np.array_equal(trees.load(second.folder).predict(X), first.predict(X))
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        fitted(tmp_path, job_of(library, seed=1), name="third", reuse=True)


def interrupted(tmp_path, monkeypatch, job, after, number):
    """Train, with a signal after so many rounds."""
    count = growing.Watch.count

    def counted(self, rounds):
        count(self, rounds)
        if self.rounds == after:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(growing.Watch, "count", counted)
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            fitted(tmp_path, job)
    finally:
        signal.signal(number, before)


@BOTH
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_rounds_that_were_trained(library, number, tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch, job_of(library, Y[:, 0], rounds=10**6), 5, number)
    model = trees.load(tmp_path / "run")
    rounds = model.record.boosters[0].rounds
    assert 5 <= rounds < 10**6
    assert np.array_equal(model.predict(X[VALID]), own_answers(library, 0, rounds=rounds))


def test_a_signal_before_each_target_has_trees_leaves_boosters_and_no_model(tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch, job_of(rounds=10**5), 20, signal.SIGINT)
    assert 1 <= len(list((tmp_path / "run" / "boosters").iterdir())) < 5
    with pytest.raises(StoreError, match="stopped early"):
        trees.load(tmp_path / "run")


def timed(monkeypatch, seconds):
    """Laps take the seconds a round that the plan says; boosters grow as ever."""
    lap = growing.Crew.lap

    def made_up(self, growths, rounds, watch):
        return seconds(self.plan) + 0 * lap(self, growths, rounds, watch)

    monkeypatch.setattr(growing.Crew, "lap", made_up)
    monkeypatch.setattr(choosing, "read_memory", lambda: SimpleNamespace(free_bytes=2**40))
    monkeypatch.setattr(choosing.time, "perf_counter", lambda: 0.0)


def four_cores(monkeypatch):
    detected = machine.detect()
    monkeypatch.setattr(machine, "detect", lambda *_: replace(detected, cpu=replace(detected.cpu, cores=4)))


@BOTH
@pytest.mark.parametrize("faster", [True, False])
def test_boosters_at_once_are_kept_where_they_are_faster_and_rejected_where_not(library, faster, tmp_path, monkeypatch):
    timed(monkeypatch, lambda plan: 1.0 / plan.at_once**2 if faster else float(plan.at_once))
    four_cores(monkeypatch)
    run = fitted(tmp_path, job_of(library, rounds=80), "auto")
    tried = {entry.what: entry for entry in run.ledger if entry.kind == "move"}
    assert tried["4 boosters at once with 1 thread each"].outcome == ("kept" if faster else "rejected")
    assert run.plan.at_once == (4 if faster else 1)
    assert run.plan.threads == (1 if faster else 4)
    assert "ratio" in tried["4 boosters at once with 1 thread each"].figures
    plain = fitted(tmp_path, job_of(library, rounds=80), {"threads": 1}, "plain")
    assert np.array_equal(run.predict(X), plain.predict(X))
    assert "boosters at once" in run.summary()


@BOTH
def test_fewer_threads_are_kept_where_they_are_faster(library, tmp_path, monkeypatch):
    timed(monkeypatch, lambda plan: float(plan.threads))
    four_cores(monkeypatch)
    run = fitted(tmp_path, job_of(library, Y[:, 0], rounds=90), "auto")
    assert run.plan.threads == 1
    assert [e.outcome for e in run.ledger if e.kind == "move"] == ["kept", "kept"]
    plain = fitted(tmp_path, job_of(library, Y[:, 0], rounds=90), {"threads": 1}, "plain")
    assert np.array_equal(run.predict(X), plain.predict(X))


def test_threads_are_left_alone_where_they_change_the_trees(tmp_path, monkeypatch):
    timed(monkeypatch, lambda plan: float(plan.threads))
    four_cores(monkeypatch)
    run = fitted(tmp_path, job_of("lightgbm", rounds=30, params={"use_quantized_grad": True}), "auto")
    assert (run.plan.threads, run.plan.at_once) == (4, 1)
    assert [(e.what, e.outcome) for e in run.ledger if e.kind == "move"] == [("threads", "not tried")]


def test_one_booster_for_all_targets_is_kept_where_it_is_faster(tmp_path, monkeypatch):
    timed(monkeypatch, lambda plan: 0.1 if plan.joint else 1.0)
    four_cores(monkeypatch)
    run = fitted(tmp_path, job_of(rounds=80), "auto")
    assert run.plan.joint
    assert len(run.model.boosters) == 1
    assert np.array_equal(run.predict(X), fitted(tmp_path, job_of(rounds=80), name="plain").predict(X))


def test_one_booster_for_all_targets_is_refused_where_it_would_change_the_trees(tmp_path):
    for job in (job_of(params={"subsample": 0.5}), job_of(judged=True), job_of("lightgbm"), job_of(y=Y[:, 0])):
        with pytest.raises(PlanError, match="would change the trees"):
            fitted(tmp_path, job, {"joint": True})


@BOTH
def test_a_training_too_short_to_pay_for_it_throws_no_rounds_away(library, tmp_path):
    run = fitted(tmp_path, job_of(library), "auto")
    lossless = "boosters at once" if library == "xgboost" else "none"  # threads of XGBoost change as it grows
    assert {e.outcome for e in run.ledger if e.kind == "move" and lossless not in e.what} <= {"not tried"}
    assert max(entry.step for entry in run.ledger) <= 5 * 8


def test_the_plan_of_a_run_is_used_again(tmp_path):
    run = fitted(tmp_path, job_of(), {"threads": 1, "at_once": 2})
    again = fitted(tmp_path, job_of(), run.folder, "again")
    assert again.plan == run.plan


def test_a_gpu_that_was_asked_for_and_is_not_there_stops_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MachineError):
        fitted(tmp_path, job_of(params={"device": "cuda"}))
    with pytest.raises(MachineError, match="cannot train on the GPU"):
        fitted(tmp_path, job_of("lightgbm", params={"device_type": "cuda"}), name="other")


def test_a_library_that_trains_elsewhere_than_asked_is_found_out():
    plan = trees.TreePlan(device="cuda")
    with pytest.raises(MachineError, match="'cuda' was asked for and xgboost trains on 'cpu'"):
        libraries.check_obeyed(job_of(), plan, {"device": "cpu"})


@BOTH
def test_every_parameter_is_read_back_from_the_booster(library, tmp_path, monkeypatch):
    job = job_of(library, params={"learning_rate": 0.25, "reg_lambda": 2})
    fitted(tmp_path, job)
    monkeypatch.setitem(job.params, "learning_rate", 0.5)  # as if the library had not taken it
    ran = trees.load(tmp_path / "run").record.ran
    with pytest.raises(libraries.TrainingError, match=r"learning_rate=0.5 was asked for and .* trains with 0.25"):
        libraries.check_obeyed(job, trees.TreePlan(), ran)


def test_plans_that_make_no_sense_are_refused_with_all_mistakes(tmp_path):
    with pytest.raises(PlanError, match=r"threads=0(.|\n)*device='gpu'"):
        fitted(tmp_path, job_of(), {"threads": 0, "device": "gpu"})
    with pytest.raises(PlanError, match="did you mean 'threads'"):
        fitted(tmp_path, job_of(), {"thread": 1})
    with pytest.raises(PlanError, match="unknown plan 'fast'"):
        fitted(tmp_path, job_of(), "fast")
    assert not (tmp_path / "run").exists()


def test_nothing_is_printed_by_the_libraries(tmp_path, capfd):
    for library in ("xgboost", "lightgbm"):
        fitted(tmp_path, job_of(library, rounds=40), {"threads": 1, "at_once": 2}, library)
    assert capfd.readouterr() == ("", "")


def passing(monkeypatch, round_s):
    """A clock that only rounds move, whoever grows them."""
    now = [100.0]

    def counted(self, rounds):
        now[0] += round_s * rounds
        self.rounds += rounds

    monkeypatch.setattr(growing.Watch, "count", counted)
    for module in ("trees.growing", "trees.choosing", "fitting.deadline"):
        monkeypatch.setattr(f"hotlap.{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@BOTH
def test_a_deadline_is_shared_out_evenly_and_what_it_left_out_is_said(library, tmp_path, monkeypatch):
    now = passing(monkeypatch, 0.1)
    run = fitted(tmp_path, job_of(library, rounds=1000), {"threads": 1}, finish_in=20)
    rounds = [file.rounds for file in run.model.record.boosters]
    assert 16 <= now[0] - 100 <= 20
    assert max(rounds) - min(rounds) <= 2
    assert run.left_out == (f"5 of 5 boosters stopped after {min(rounds)} to {max(rounds)} of 1,000 rounds",)
    assert run.left_out[0] in run.summary()
    assert trees.load(run.folder).predict(X).shape == (300, 5)


def test_what_one_target_leaves_of_its_time_goes_to_the_others(tmp_path, monkeypatch):
    passing(monkeypatch, 0.1)
    y = Y.copy()
    y[VALID, 0] = -10 * y[VALID, 0]  # the first target stops at once, by patience
    job = job_of(y=y, judged=True, patience=100, rounds=1000, params={"learning_rate": 0.01})
    first = fitted(tmp_path, job, {"threads": 1}, finish_in=100)
    assert len(first.history) > 200, "an even share is 20 s"


def test_a_deadline_that_is_not_needed_changes_nothing(tmp_path):
    run = fitted(tmp_path, job_of(), {"threads": 1}, finish_in="10m")
    assert run.left_out == ()
    assert run.stopped == "all rounds"
    assert np.array_equal(run.predict(X), fitted(tmp_path, job_of(), name="plain").predict(X))


def test_each_target_gets_a_round_however_short_the_time(tmp_path):
    run = fitted(tmp_path, job_of(rounds=1000), "auto", finish_in=1e-6)
    assert [file.rounds for file in run.model.record.boosters] == pytest.approx([1] * 5, abs=1)


@pytest.mark.parametrize(
    ("slow", "depth", "error", "outcome", "why"),
    [
        (0.1, 3, None, "kept", "same trees"),
        (0.1, 1, None, "rejected", "other trees than on the CPU"),
        (5.0, 3, None, "rejected", "slower"),
        (0.1, 3, MachineError("the GPU is full"), "rejected", "the GPU is full"),
    ],
)
@pytest.mark.parametrize("y", [Y, Y[:, 0]], ids=["many", "one"])
def test_a_gpu_is_kept_only_where_it_is_faster_works_and_grows_the_same_trees(
    slow, depth, error, outcome, why, y, tmp_path, monkeypatch
):
    """The GPU is a CPU under another name: which choice is made, and on what grounds, needs no other."""
    timed(monkeypatch, lambda plan: slow if plan.device == "cuda" else 1.0)
    begin = libraries.XgboostBooster.__init__

    def as_if(self, data, targets, plan):
        if plan.device == "cuda" and error is not None:
            raise error
        data.settings["max_depth"] = depth if plan.device == "cuda" else 3
        begin(self, data, targets, replace(plan, device="cpu"))
        ran = {**libraries.parameters.xgboost_ran(self._booster.save_config()), "device": plan.device}
        monkeypatch.setattr(self, "ran", lambda: {**ran, "max_depth": "3"}, raising=False)

    monkeypatch.setattr(libraries.XgboostBooster, "__init__", as_if)
    monkeypatch.setattr(machine, "choose_device", lambda *_, **__: SimpleNamespace(type="cuda"))
    run = fitted(tmp_path, job_of(y=y, rounds=90), "auto")
    (gpu,) = [entry for entry in run.ledger if entry.what == "GPU"]
    assert (gpu.outcome, run.plan.device) == (outcome, "cuda" if outcome == "kept" else "cpu")
    assert why in gpu.why
    monkeypatch.undo()
    assert np.array_equal(run.predict(X), fitted(tmp_path, job_of(y=y, rounds=90), name="plain").predict(X))
