"""The benchmark of recipes has data of the stated shape, a rival that trains the same, and survives what fails."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import statistics
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks.recipe_results import Ran, Result, banded, late, lines
from benchmarks.recipes import FailedError
from recipe_data import tiny_config
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks import recipe_files, recipe_rivals, recipes
from hotlap import cli
from hotlap.data.windows import Windows
from hotlap.recipes import recipe_named
from hotlap.recipes.options import from_words, options_of
from hotlap.store.run_folder import RunFolder

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--plan", "off", "--epochs", "1", "--rival-steps", "5"]
SMALL = [*QUICK, "--bars", "500", "--models", "mlp", "--texts", "200", "--lr", "5e-3"]


def in_this_process(command, variables, folder, limit):
    """As `started`, without the seconds that a process takes to begin."""
    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        for name, value in variables.items():
            patch.setenv(name, value)
        if command[1] == "hotlap":
            patch.setattr(sys, "argv", ["hotlap", *command[2:]])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            code = ended.value.code
        else:
            code = recipe_rivals.main(command[2:])
    lines = said.getvalue().splitlines()
    if code:
        raise FailedError(f"exit code {code}: {lines[-1]}")
    return lines


@pytest.fixture
def _here(monkeypatch):
    monkeypatch.setattr(recipes, "started", in_this_process)


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


# --- data ----------------------------------------------------------------------------------------------


def test_by_default_as_many_windows_are_trained_on_as_the_docstring_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    words = recipes.temporal_words(recipes.parsed([]), tmp_path)
    recipe = recipe_named("temporal")
    prepared = recipe.prepare(options_of(recipe.options_type, None, from_words(words)), lambda line: None)
    data = prepared.candidates[0].job().data
    assert [one.name for one in prepared.candidates] == ["lstm", "transformer", "mlp"]
    assert len(data) == 76_792
    assert data[0][0].shape == (20, 38)


def test_texts_have_the_stated_lengths_and_shares_and_tell_their_class(tmp_path):
    rows = rows_of(recipe_files.texts_file(tmp_path / "texts.csv", recipes.TEXTS, seed=0))
    assert len(rows) == 24_048
    lengths = [len(row["text"].split()) for row in rows]
    assert statistics.median(lengths) == 8
    assert 100 < max(lengths) <= 150
    positive = np.asarray([row["label"] == "1" for row in rows])
    assert positive.mean() == pytest.approx(0.17, abs=0.01)
    telling = {recipe_files.word(rank) for rank in recipe_files.TELLING}
    told = np.asarray([bool(telling & set(row["text"].split())) for row in rows])
    assert told[positive].mean() > 0.85
    assert told[~positive].mean() < 0.05


def test_every_rank_has_a_word_of_its_own():
    assert len({recipe_files.word(rank) for rank in range(recipe_files.WORDS + 1)}) == recipe_files.WORDS + 1


def test_texts_are_drawn_again_alike_and_a_file_to_predict_has_no_labels(tmp_path):
    first, again, other = (
        rows_of(recipe_files.texts_file(tmp_path / f"{at}.csv", 50, seed=seed, labels=at < 2))
        for at, seed in enumerate((3, 3, 4))
    )
    assert first == again
    assert [row["text"] for row in first] != [row["text"] for row in other]
    assert list(other[0]) == ["text"]


# --- the rival -----------------------------------------------------------------------------------------


def test_the_rival_trains_on_all_windows_written_out():
    series = torch.arange(40.0).view(20, 2)
    windows = Windows([series[:12], series[12:]], 4, target=[torch.arange(12), torch.arange(12, 20)])
    x, y = recipe_rivals.all_windows(windows).tensors
    assert x.shape == (14, 4, 2)
    assert torch.equal(x[9], series[12:16])
    assert y.tolist() == [*range(3, 12), *range(15, 20)]


def of_first(model, batch):
    return model(batch[0])


@pytest.mark.parametrize(("setting", "tolerance"), [("fp32", 1e-5), ("fp16", 2e-3)])
def test_the_guides_loop_makes_plain_clipped_steps_of_adamw(setting, tolerance):
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    model, mine = nn.Linear(6, 3), nn.Linear(6, 3)
    mine.load_state_dict(model.state_dict())
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    job = SimpleNamespace(model=model, loss=loss, optimizer=optimizer, batch_size=32, clip=0.05)
    training = recipe_rivals.guide_loop(job, TensorDataset(x, y), of_first, CPU, setting=setting)
    found = [next(training) for _ in range(4)]
    training.close()
    own = torch.optim.AdamW(mine.parameters(), lr=0.1, weight_decay=0.2)
    for theirs in found:
        own.zero_grad()
        value = loss(mine(x), y)
        assert theirs == pytest.approx(value.item(), abs=tolerance)  # all data a step, in another order
        value.backward()
        nn.utils.clip_grad_norm_(mine.parameters(), 0.05)
        own.step()
    assert found[-1] < found[0]
    torch.testing.assert_close(model.weight, mine.weight, rtol=0, atol=10 * tolerance)


def test_an_evaluation_goes_once_through_what_is_held_out_and_learns_nothing(monkeypatch):
    monkeypatch.setattr(recipe_rivals, "WARM_STEPS", 1)
    seen = []

    def counted(model, batch):
        seen.extend(batch[1].tolist())
        assert not torch.is_grad_enabled()
        assert not model.training
        return model(batch[0])

    job = SimpleNamespace(model=nn.Linear(6, 3), loss=nn.CrossEntropyLoss(), batch_size=8)
    data = TensorDataset(torch.randn(20, 6), torch.arange(20) % 3)
    assert recipe_rivals.evaluated(job, data, counted, CPU, setting="fp32") > 0
    assert seen[:8] == data.tensors[1][:8].tolist()  # a batch before the clock starts
    assert seen[8:] == data.tensors[1].tolist()


def test_the_guides_end_with_fp16_and_encoders_with_activations_computed_again(tmp_path):
    gpu = torch.device("cuda")
    assert recipe_rivals.settings_of("temporal", gpu)[-1] == "fp16"
    assert recipe_rivals.settings_of("text", gpu)[-1] == "fp16, computed again"
    asked = []
    encoder = nn.Linear(6, 3)
    encoder.gradient_checkpointing_enable = lambda: asked.append(1)
    model = nn.Module()
    model.encoder = encoder
    optimizer = torch.optim.AdamW(model.parameters())
    job = SimpleNamespace(model=model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=8, clip=1.0)
    data = TensorDataset(torch.randn(16, 6), torch.arange(16) % 3)
    for setting in recipe_rivals.settings_of("text", gpu):
        training = recipe_rivals.guide_loop(job, data, lambda own, batch: own.encoder(batch[0]), CPU, setting=setting)
        next(training)
        training.close()
    assert asked == [1]


def test_steps_that_warm_up_are_not_counted():
    made = []

    def training():
        while True:
            made.append(1)
            yield 0.5

    found = recipe_rivals.timed(training(), 30, CPU)
    assert (len(made), found["steps"], found["loss"]) == (30 + recipe_rivals.WARM_STEPS, 30, 0.5)
    assert found["step_s"] == found["seconds"] / 30


def test_the_rivals_texts_are_tokenised_one_by_one_and_padded_to_the_width(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    words = recipes.text_words(recipes.parsed(["--texts", "60"]), tmp_path)
    recipe = recipe_named("text")
    options = options_of(recipe.options_type, None, from_words(words))
    prepared = recipe.prepare(options, lambda line: None)
    data = recipe_rivals.text_rows(options.data, options, prepared)
    file = rows_of(tmp_path / "texts.csv")
    assert len(data) == 60
    for at in (0, 7, 59):
        ids = prepared.reader.encoder.tokenizer.encode(file[at]["text"]).ids
        assert data[at]["input_ids"].tolist() == ids + [0] * (192 - len(ids))
        assert data[at]["attention_mask"].tolist() == [1] * len(ids) + [0] * (192 - len(ids))
        assert int(data[at]["labels"]) == int(file[at]["label"])


# --- all of it -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_here")
def test_both_recipes_are_reported_to_people_and_to_a_file(tmp_path, capsys):
    pytest.importorskip("transformers")
    file, config = tmp_path / "found.json", tiny_config(tmp_path / "tiny.json")
    assert recipes.main([*SMALL, "--config", str(config), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert set(report["recipes"]) == {"temporal", "text"}
    for name, model, samples, steps in (("temporal", "mlp", 488, 2), ("text", "encoder", 200, 13)):
        found = report["recipes"][name]
        made = found["cold"]["models"][model]
        assert (made["training_samples"], made["steps"]) == (samples, steps)
        timed = found["rival"][model]["fp32"]
        assert timed["steps"] == 5
        rival_s = timed["step_s"] * steps + timed["evaluation_s"]
        assert found["rival_s_extrapolated"] == {model: pytest.approx(rival_s)}
        assert found["ratio_extrapolated"] == pytest.approx(rival_s / found["cold"]["seconds"])
        assert not made["from_cache"]
        assert found["again"]["models"][model]["from_cache"]
        assert found["again"]["models"][model]["macro_f1"] == made["macro_f1"]
        assert found["saved_s"] == pytest.approx(found["cold"]["seconds"] - found["again"]["seconds"])
        assert not found["failures"]
        assert f"x, extrapolated; on one H200 {found['wanted']:g}x wanted: not reached" in printed
    assert "temporal: 1 epoch asked for; bars.csv 2,000 rows, test.csv 2,000 rows" in printed
    assert "5 steps timed\n      fp32" in printed
    assert "features 38 of 2,000 bars of m15, 4 symbols, from the cache, which saved" in printed
    assert "tokens 200 texts" in printed
    assert printed.count("trained before, which saved") == 2


@pytest.mark.usefixtures("_here")
def test_a_recipe_that_fails_says_why_and_the_other_goes_on(tmp_path, capsys):
    pytest.importorskip("transformers")
    file = tmp_path / "found.json"
    config = tmp_path / "broken.json"
    config.write_text("{}")
    assert recipes.main([*SMALL, "--config", str(config), "--rival-steps", "0", "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "failed        hotlap train: exit code 1: hotlap: " in printed
    assert "names no model_type" in printed
    found = json.loads(file.read_text())["recipes"]
    assert found["text"]["cold"] is None
    assert found["text"]["ratio_extrapolated"] is None
    assert len(found["text"]["failures"]) == 1
    assert found["temporal"]["cold"]["models"]["mlp"]["steps"] == 2
    assert found["temporal"]["failures"] == []


def test_without_transformers_text_says_so_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(recipes.importlib.util, "find_spec", lambda name: None)
    assert recipes.main(["--only", "text"]) == 1
    assert (
        "failed        data: transformers is not installed: pip install '.[text]' in a clone of hotlap"
        in capsys.readouterr().out
    )


def test_a_second_run_that_trains_again_is_a_failure(monkeypatch, capsys):
    def retrained(command, variables, folder, limit):
        return in_this_process([*command, "--retrain"], variables, folder, limit)

    monkeypatch.setattr(recipes, "started", retrained)
    assert recipes.main([*SMALL, "--only", "temporal", "--rival-steps", "0"]) == 1
    assert "hotlap train again: mlp trained once more, not read from the cache" in capsys.readouterr().out


def test_the_band_is_of_three_seeds_beside_three_of_the_tuned_plan(tmp_path, monkeypatch, capsys):
    asked, one_at_a_time = [], threading.Lock()  # in one process they would share their randomness

    def noted(command, variables, folder, limit):
        with one_at_a_time:
            asked.append(command)
            return in_this_process(command, variables, folder, limit)

    monkeypatch.setattr(recipes, "started", noted)
    file = tmp_path / "found.json"
    words = ["--only", "temporal", "--rival-steps", "0", "--band", "--band-epochs", "2", "--json", str(file)]
    assert recipes.main([*SMALL, *words]) == 0

    def given(name):
        return [command[command.index(name) + 1] for command in asked]

    assert given("--epochs") == given("--patience") == ["1"] * 2 + ["2"] * 6
    plans, seeds = given("--plan")[2:], [command[command.index("--seed") + 1] for command in asked[2:]]
    assert sorted(seed for seed, plan in zip(seeds, plans, strict=True) if plan == "off") == ["0", "1", "2"]
    tuned = {plan for plan in plans if plan != "off"}
    assert len(tuned) == 1
    assert tuned.pop().endswith("cold/models/mlp/plan.toml")
    found = json.loads(file.read_text())["recipes"]["temporal"]
    assert found["cold"]["models"]["mlp"]["steps"] == 2
    band = found["band"]["models"]["mlp"]["macro_f1"]
    # Here all plans are the same, and so is what each seed gives.
    assert band["eager"] == band["tuned"]
    assert len(set(band["eager"])) == 3
    assert band["outside"] == band["more"] == 0
    assert "seeds 0, 1, 2, 2 epochs: eager fp32, and under the tuned plan" in capsys.readouterr().out


# --- figures -------------------------------------------------------------------------------------------


SCORES = {"accuracy": 0.5, "macro_f1": 0.4, "late_accuracy": 0.45, "late_macro_f1": 0.25}


def ran(seconds, **steps):
    model = {"training_samples": 10, "stopped": "after all epochs", "train_s": 1.0, "plan": "a plan", "table": []}
    model |= {"from_cache": True}
    models = {name: {**model, "steps": count, **SCORES} for name, count in steps.items()}
    return Ran(seconds=seconds, machine="a machine", models=models, said=[])


def test_the_loop_as_the_guides_end_counts_for_as_much_as_hotlap_made_and_the_fastest_is_told():
    def took(step_s, evaluation_s):
        return {"steps": 100, "step_s": step_s, "evaluation_s": evaluation_s}

    rival = {
        "lstm": {"fp32": took(0.02, 0.1), "fp16": took(0.03, 0.2)},
        "mlp": {"fp32": took(0.004, 0.01), "fp16": took(0.002, 0.02)},
    }
    result = Result(epochs=50, wanted=8.0, rival=rival, cold=ran(5.0, lstm=1000, mlp=2000), again=ran(2.0))
    assert result.rival_s == {"lstm": 40.0, "mlp": 5.0}
    assert result.fastest_s == {"lstm": 25.0, "mlp": 5.0}
    assert result.ratio == pytest.approx(9.0)
    assert result.ratio_to_fastest == pytest.approx(6.0)
    assert result.saved_s == 3.0
    said = "\n".join(lines("temporal", result))
    assert "ratio         9.00x, extrapolated; on one H200 8x wanted: reached; 6.00x to its fastest setting" in said
    assert "fp16                  30 ms a step, 200 ms an evaluation" in said
    assert "as much as hotlap did 40.0 s as the guides end, 25.0 s at its fastest" in said
    assert "again         2.0 s, 3.0 s less" in said
    result.cold = ran(10.0, lstm=1000, mlp=2000)
    assert "4.50x, extrapolated; on one H200 8x wanted: not reached" in "\n".join(lines("temporal", result))


def test_for_the_band_each_model_is_trained_by_itself():
    command = ["temporal", "--models", "lstm,mlp", "--epochs", "2"]
    assert recipes.alone(command, "mlp") == ["temporal", "--models", "mlp", "--epochs", "2"]
    assert recipes.alone(["text", "--epochs", "2"], "encoder") == ["text", "--epochs", "2"]


def test_scores_under_the_tuned_plan_are_told_beside_the_band():
    assert banded([0.5, 0.7, 0.6], [0.6, 0.7, 0.65])["outside"] == 0
    assert banded([0.5, 0.7, 0.6], [0.4, 0.3, 0.5])["outside"] == pytest.approx(0.1)
    score = banded([0.5, 0.7, 0.6], [0.7, 0.75, 0.8])
    # Variances of 0.01 and 0.0025, t of 2.776 at 4 degrees of freedom.
    assert score["more"] == pytest.approx(0.15)
    assert score["interval"] == pytest.approx([0.15 - 0.1792, 0.15 + 0.1792], abs=1e-4)
    far = banded([0.5, 0.51, 0.52], [0.7, 0.71, 0.72])
    band = {"epochs": 3, "seeds": [0, 1, 2], "models": {"mlp": {"accuracy": far, "macro_f1": score}}}
    said = lines("temporal", Result(epochs=3, wanted=8.0, band=band))
    told = (
        "[0.5000, 0.7000], tuned 0.7500 in the mean: outside by 0.0500; +0.1500 [-0.0292, +0.3292]: no difference seen"
    )
    assert f"    mlp         macro-F1                {told}" in said
    assert any(
        "accuracy                [0.5000, 0.5200], tuned 0.7100" in line and line.endswith("a difference")
        for line in said
    )


# --- processes -----------------------------------------------------------------------------------------


def test_a_process_that_fails_is_told_by_its_last_words(tmp_path):
    with pytest.raises(FailedError, match="exit code 1: there is no such thing"):
        recipes.started(["-c", "import sys; sys.exit('there is no such thing')"], {}, tmp_path, 60)


def test_a_process_that_takes_too_long_is_stopped(tmp_path):
    with pytest.raises(FailedError, match=r"stopped after 200 ms \(--limit\)"):
        recipes.started(["-c", "import time; time.sleep(60)"], {}, tmp_path, 0.2)


def test_a_process_finds_hotlap_and_the_rivals_and_no_plan_of_somebody_elses(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_PLAN", "max")
    program = (
        "import importlib.util, os, sys; "
        "there = [importlib.util.find_spec(name) for name in ('hotlap', 'benchmarks.recipe_rivals')]; "
        "print(all(there), os.environ.get('HOTLAP_PLAN'), os.environ['HOTLAP_CACHE'], file=sys.stderr)"
    )
    assert recipes.started(["-c", program], {"HOTLAP_CACHE": "mine"}, tmp_path, 60) == ["True None mine"]


def test_a_whole_command_in_a_process_of_its_own_is_read_back(tmp_path, forks, monkeypatch):
    def run(command, *, cwd, env, **how):
        return forks.run(*command[1:], cwd=cwd, environment=env)

    forked = SimpleNamespace(run=run, DEVNULL=None, PIPE=None, TimeoutExpired=TimeoutError)
    monkeypatch.setattr(recipes, "subprocess", forked)
    options = recipes.parsed(SMALL)
    words = ["temporal", *recipes.temporal_words(options, tmp_path), "--device", "cpu", "--plan", "off"]
    cache = {"HOTLAP_CACHE": str(tmp_path / "cache")}
    found = recipes.trained([*words, "--epochs", "2", "--patience", "2"], tmp_path / "run", cache, 120)
    assert found.models["mlp"]["steps"] == 4
    assert found.models["mlp"]["stopped"] == "after all epochs"
    assert found.seconds > found.models["mlp"]["train_s"]
    *_, last = RunFolder.open(tmp_path / "run" / "models" / "mlp").read_metrics()
    assert found.models["mlp"]["late_accuracy"] == last["accuracy"]
    assert "CPU" in found.machine
    assert (tmp_path / "run" / "predictions.csv").is_file()


def test_a_model_that_fails_in_one_of_its_trainings_is_told_and_the_others_have_their_band(tmp_path, monkeypatch):
    def trained(command, out, variables, limit):
        models = command[command.index("--models") + 1].split(",")
        if models == ["lstm"] and command[-3:] == ["off", "--seed", "1"]:
            raise recipes.FailedError("stopped after 7 s (--limit)")
        return ran(1.0, **dict.fromkeys(models, 10))

    monkeypatch.setattr(recipes, "trained", trained)
    bench = recipes.Bench(recipes.parsed(["--only", "temporal", "--bars", "500", "--rival-steps", "0", "--band"]))
    part = next(part for part in recipes.PARTS if part.name == "temporal")
    result = bench.run(part, tmp_path)
    assert set(result.band["models"]) == {"transformer", "mlp"}
    assert result.failures == ["band: 1 of 18 trainings: stopped after 7 s (--limit)"]
    said = "\n".join(lines("temporal", result))
    assert "mlp         accuracy                [0.5000, 0.5000], tuned 0.5000 in the mean: within; +0.0000" in said
    assert "mlp         macro-F1, later epochs  [0.2500, 0.2500], tuned 0.2500 in the mean: within" in said
    assert "failed        band: 1 of 18" in said


def test_later_epochs_are_the_second_half_of_them():
    evaluations = [{"accuracy": one / 10, "macro_f1": one / 20} for one in range(5)]
    assert late(evaluations) == pytest.approx({"late_accuracy": 0.3, "late_macro_f1": 0.15})


def test_one_seed_alone_is_refused(capsys):
    with pytest.raises(SystemExit):
        recipes.parsed(["--band", "--band-seeds", "3", "3"])
    assert "two different ones at least" in capsys.readouterr().err
