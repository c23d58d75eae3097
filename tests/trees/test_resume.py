"""Trees that are killed and go on: the same trees to the last bit as if nothing had happened."""

import json
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from killed_trees import X, counting, job_of
from typer.testing import CliRunner

import hotlap
from hotlap import trees
from hotlap.cli import app
from hotlap.core.errors import StoreError
from hotlap.fitting.fit import AnotherTrainingError
from hotlap.recipes.boosted_trees import train_trees
from hotlap.store.run_folder import RunFolder
from hotlap.trees import saving
from hotlap.trees.growing import Grown


def fitted(folder, job, plan="off"):
    return trees.fit(job, plan=plan, out=folder, progress=False)


def killed(forks, folder, given, plan="off", **more):
    """Train in a process that is killed on the way."""
    code = f"import killed_trees; killed_trees.train({str(folder)!r}, {given!r}, {plan!r}, **{more!r})"
    done = forks.run("-c", code, cwd=folder.parent, timeout_s=120)
    assert done.returncode == (-signal.SIGKILL if "number" not in more else 128 + more["number"]), done.stderr


def resumed(folder, job, **given):
    """The run, and how many rounds × targets were left to grow."""
    grown, stop = counting()
    try:
        return trees.fit(job, resume=folder, progress=False, **given), grown[0]
    finally:
        stop()


def same(run, other):
    mine, theirs = ([file.sha256 for file in each.model.record.boosters] for each in (run, other))
    assert mine == theirs
    assert run.history == other.history
    assert run.best == other.best
    assert np.array_equal(trees.load(run.folder).predict(X), other.predict(X))


PLANS = [("xgboost", "off"), ("lightgbm", "off"), ("lightgbm", {"threads": 1, "at_once": 2}), ("xgboost", "auto")]


@pytest.mark.parametrize(("library", "plan"), PLANS, ids=str)
def test_a_killed_training_keeps_the_boosters_that_were_done_and_ends_with_the_same_trees(
    library, plan, tmp_path, forks
):
    drawing = {"max_depth": 3, "subsample": 0.7} | ({"bagging_freq": 1} if library == "lightgbm" else {})
    given = {"library": library, "params": drawing, "patience": 11}
    killed(forks, tmp_path / "run", given, plan, rounds=32)
    run, rounds = resumed(tmp_path / "run", job_of(**given))
    assert rounds <= 4 * 12 - 12, "one booster at least was done"
    same(run, fitted(tmp_path / "whole", job_of(**given), "off" if plan == "auto" else plan))
    assert any(entry.what.startswith("resumed with") for entry in run.ledger)
    assert {file.name for file in (run.folder / "boosters").iterdir()} == {f.name for f in run.model.record.boosters}


GROWING = [
    {"y": "one", "patience": 3, "rounds": 100, "params": {"learning_rate": 0.8}},
    {"y": "classes", "task": "classification", "valid": None},
    {"y": "one", "params": {"grow_policy": "lossguide", "max_leaves": 4, "objective": "reg:absoluteerror"}},
]


@pytest.mark.parametrize("given", GROWING, ids=str)
def test_a_booster_of_xgboost_grows_on_where_it_was_saved(given, tmp_path, forks):
    killed(forks, tmp_path / "run", given, rounds=5, saves=True)
    whole, rounds = resumed(None, job_of(**given), plan="off", out=tmp_path / "whole")
    run, left = resumed(tmp_path / "run", job_of(**given))
    same(run, whole)
    assert left == rounds - 4


def test_a_signal_saves_what_grows_and_resume_goes_on_with_it(tmp_path, forks):
    given = {"y": "one", "rounds": 30}
    killed(forks, tmp_path / "run", given, rounds=9, number=int(signal.SIGTERM))
    run, left = resumed(tmp_path / "run", job_of(**given))
    same(run, fitted(tmp_path / "whole", job_of(**given)))
    assert left <= 30 - 9


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory, forks):
    folder = tmp_path_factory.mktemp("trees") / "run"
    killed(forks, folder, {}, rounds=30, saves=True)
    return folder


@pytest.mark.parametrize("name", ["grown.jsonl", "boosters/0000.json", "boosters/0002.part"])
def test_what_is_damaged_grows_again(name, broken_off, tmp_path):
    folder = shutil.copytree(broken_off, tmp_path / "run")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    same(resumed(folder, job_of())[0], fitted(tmp_path / "whole", job_of()))


def test_the_command_resumes_trees(broken_off, tmp_path):
    folder = shutil.copytree(broken_off, tmp_path / "run")
    done = CliRunner().invoke(app, ["resume", "--json", str(folder), "killed_trees:four_targets"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["run"] == str(folder)
    same(resumed(folder, job_of())[0], fitted(tmp_path / "whole", job_of()))
    refused = CliRunner().invoke(app, ["resume", "--allow-changes", str(folder), "killed_trees:four_targets"])
    assert refused.exit_code != 0


SCRIPT = "import killed_trees as k\nprint(k.trees.fit(k.job_of()).folder)\n"


def test_a_script_of_trees_goes_on_with_its_run(broken_off, tmp_path, forks):
    shutil.copytree(broken_off, tmp_path / "run")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = forks.run("-m", "hotlap", "resume", "run", "train.py", cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert "resumed with 2 boosters" in done.stderr
    assert done.stdout.strip() == str(tmp_path / "run")


def test_a_run_that_had_ended_is_loaded_and_not_trained_again(tmp_path):
    whole = fitted(tmp_path / "run", job_of())
    again, rounds = resumed(tmp_path / "run", job_of())
    assert rounds == 0
    same(again, whole)
    assert (again.stopped, again.train_s) == (whole.stopped, whole.train_s)


@pytest.mark.parametrize(
    "given", [{"rounds": 13}, {"params": {"max_depth": 2}}, {"patience": 3}, {"seed": 1}, {"y": "moved"}], ids=str
)
def test_another_training_is_refused(given, tmp_path):
    fitted(tmp_path / "run", job_of())
    with pytest.raises(AnotherTrainingError, match=f"{next(iter(given))} differs(.|\n)*train anew in another folder"):
        resumed(tmp_path / "run", job_of(**given))


@pytest.mark.parametrize("change", [{"facts": {}}, {"format": 9}, {"facts": {"identity": {}}}], ids=str)
def test_a_record_that_is_none_of_trees_is_refused_in_one_line(change, tmp_path):
    fitted(tmp_path / "run", job_of())
    file = tmp_path / "run" / "record.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(StoreError) as error:
        resumed(tmp_path / "run", job_of())
    assert "\n" not in str(error.value)


def test_a_recipe_goes_on_with_its_trees_and_begins_anew_where_they_are_others(broken_off, tmp_path):
    shutil.copytree(broken_off, tmp_path / "models" / "trees")
    trainer = SimpleNamespace(limit=None, reuse=False, folder=tmp_path, left_out=[])
    options = SimpleNamespace(plan="auto", log=None)
    grown, stop = counting()
    try:
        run = train_trees(job_of(), tmp_path / "models" / "trees", trainer, options)
        assert grown[0] <= 4 * 12 - 30 + 1
        same(run, fitted(tmp_path / "whole", job_of()))
        other = train_trees(job_of(seed=1), tmp_path / "models" / "trees", trainer, options)
    finally:
        stop()
    assert other.model.record.settings["seed"] == 1


def test_a_search_goes_on_with_the_trees_of_its_trial(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(saving, "SAVE_S", 0.0)
    monkeypatch.setattr(saving, "COSTS", 1e9)

    def interrupt(grown):
        if grown == 20:  # in the second trial
            raise KeyboardInterrupt

    def of_values(values):
        return job_of(y="one", params={"learning_rate": values["rate"]})

    def searched(**given):
        space = {"rate": (0.1, 1.0)}
        return hotlap.search(space, of_values, trials=3, progress=False, **given)

    whole = searched(out=tmp_path / "whole")
    stop = counting(interrupt)[1]
    try:
        with pytest.raises(KeyboardInterrupt):
            searched(out=tmp_path / "search")
    finally:
        stop()
    grown, stop = counting()
    try:
        again = searched(resume=tmp_path / "search")
    finally:
        stop()
    assert [(trial.values, trial.score) for trial in again.trials] == [(t.values, t.score) for t in whole.trials]
    assert grown[0] < 3 * 12 - 12 - 4, "the second trial goes on where it was saved"


def test_a_booster_that_cannot_be_saved_on_the_way_ends_no_training(tmp_path):
    saver = saving.Saver(RunFolder.create(tmp_path / "run"), job_of())
    (tmp_path / "run" / "boosters").touch()
    saver.save(Grown(targets=range(1), content=b"", rounds=1, best_round=1, scores=(), whole=False))
    assert not list((tmp_path / "run").glob("**/*.part"))
