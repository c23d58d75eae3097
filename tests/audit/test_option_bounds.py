"""Every number of an option or of a file has a bound, and what is beyond it is told in one line."""

import json
import os
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
from torch import nn

from hotlap.core.errors import HotlapError, JobError, StoreError, did_you_mean
from hotlap.core.job import Job
from hotlap.recipes import library_models
from hotlap.recipes.answers import revived, state_problem
from hotlap.recipes.image import ImageOptions
from hotlap.recipes.networks import NetworkSpec, _normalising_in, new_network
from hotlap.recipes.options import options_of, recipe_in
from hotlap.recipes.price import PriceOptions
from hotlap.recipes.temporal import TemporalOptions, seconds_of
from hotlap.recipes.text import TextOptions
from hotlap.store.weights import build_with_weights, save_state

KINDS = (TextOptions, PriceOptions, TemporalOptions, ImageOptions)
NUMBERS = [(kind, one.name) for kind in KINDS for one in fields(kind) if get_type_hints(kind)[one.name] in (int, float)]


@pytest.mark.parametrize("value", ["9" * 31, "1" + "0" * 400, "1e999", "nan", "-" + "9" * 31])
@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda one: getattr(one, "__name__", one))
def test_no_option_takes_a_number_beyond_all_measure(kind, name, value):
    with pytest.raises(JobError) as caught:
        options_of(kind, None, {name: value})
    assert f"{name}=" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", ["epochs = " + "9" * 30, "lr = 1" + "0" * 400, "lr = inf", "seed = [[1]]", "lr = 1979-05-27"]
)
def test_an_options_file_has_the_same_bounds(tmp_path, text):
    (tmp_path / "options.toml").write_text(text)
    with pytest.raises(JobError) as caught:
        options_of(TextOptions, tmp_path / "options.toml", {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "{b=" * 5000, "a = 1" + "0" * 5000])
def test_an_options_file_that_is_nested_beyond_reason_is_refused(tmp_path, text):
    file = tmp_path / "options.toml"
    file.write_text(text)
    with pytest.raises(StoreError, match="is no options file"):
        options_of(TextOptions, file, {})
    assert recipe_in(file) is None


def test_an_options_file_that_is_a_pipe_or_too_large_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(StoreError, match="it is not a regular file"):
        options_of(TextOptions, tmp_path / "pipe.toml", {})
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(2**20 + 1)
    with pytest.raises(StoreError, match="at most 1,048,576"):
        options_of(TextOptions, tmp_path / "large.toml", {})


@pytest.mark.parametrize("options", [{"data": "x" * 5000}, {"models": ",".join(["mlp"] * 101)}])
def test_words_and_lists_have_a_length(options):
    with pytest.raises(JobError, match=r"the most is (4,096|100)"):
        options_of(TemporalOptions, None, options)


@pytest.mark.parametrize("frame", ["m" + "9" * 30, "d401", "h0"])
def test_a_frame_is_no_longer_than_a_year(frame):
    assert seconds_of(frame) is None
    assert seconds_of("d365") == 365 * 86400


@pytest.mark.parametrize("name", ["batch_size", "epochs", "accumulate", "eval_batch", "eval_every", "patience"])
def test_a_job_takes_no_number_beyond_all_measure(name):
    model = nn.Linear(2, 2)
    settings = {"batch_size": 2, "epochs": 1, name: 10**30}
    with pytest.raises(JobError, match=f"{name}=1000.* is too large; the most is 2,147,483,647"):
        Job(
            model=model, data=(torch.zeros(4, 2), torch.zeros(4, 2)), valid=(torch.zeros(4, 2), torch.zeros(4, 2)),
            loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), **settings,
        )  # fmt: skip


# --- recipe.json ----------------------------------------------------------------------------------------

IMAGE = {
    "classes": ["a", "b"], "path": "path", "root": "", "fit": "stretch", "tta": 1, "mirrors": True, "crop": 0.2,
    "mean": 0.0, "spread": 1.0, "header": None,
    "network": {"size": 16, "outputs": 2, "width": 4, "depth": 1, "mean": [0.5] * 3, "spread": [0.5] * 3, "config": {}},
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A finished run of the recipe image, whose state may be changed."""
    network = new_network("resnet", NetworkSpec(size=16, outputs=2, width=4, depth=1, mean=[0.5] * 3, spread=[0.5] * 3))
    save_state(network.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})

    def changed(**changes):
        state = {
            "format": 1, "recipe": "image", "model": "resnet", "target": "class", "batch_size": 8, "threshold": None,
            "reader": json.loads(json.dumps(IMAGE)),
        }  # fmt: skip
        for name, value in changes.items():
            place = state if name in state else state["reader"] if name in IMAGE else state["reader"]["network"]
            place[name] = value
        (tmp_path / "recipe.json").write_text(json.dumps(state))
        return tmp_path

    return changed


def test_a_run_as_it_was_left_is_revived(run):
    assert revived(run())[1].classes == ("a", "b")
    assert revived(run(threshold=[1, 0.3]))[0]["threshold"] == [1, 0.3]


HUGE, LONG = 10**30, [0] * 200_000
SIZES = ("batch_size", "tta", "size", "outputs", "width", "depth")


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in SIZES for value in (HUGE, -1, 0.5, "3", None, [3])),
        *({name: value} for name in ("crop", "mean", "spread") for value in (HUGE * 10**300, "a", [[1]])),
        {"width": 4096, "depth": 8},
        {"outputs": 1_000_000},
        {"classes": "ab"}, {"classes": [1, 2]}, {"classes": [["a"]]}, {"classes": None},
        {"threshold": [HUGE, 0.5]}, {"threshold": [7, 0.5]}, {"threshold": ["x"]},
        {"format": HUGE}, {"recipe": ["image"]}, {"model": "x" * 10_000}, {"network": 5},
        {"fit": 1}, {"path": []}, {"mirrors": "yes"}, {"header": 1}, {"target": 5},
    ],
    ids=lambda one: ",".join(one),
)  # fmt: skip
def test_no_field_of_a_recipe_ends_in_a_traceback_or_fills_the_memory(run, changes):
    with pytest.raises(HotlapError) as caught:
        revived(run(**changes))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"format":' * 900 + "1" + "}" * 900, '{"format": 1' + "0" * 5000 + "}", "null"]
)
def test_a_recipe_that_is_nested_beyond_reason_is_damaged(run, text):
    folder = run()
    (folder / "recipe.json").write_text(text)
    with pytest.raises(StoreError):
        revived(folder)


def test_states_of_all_recipes_have_bounds():
    assert state_problem({"reader": {"most": 192, "dropout": 0.1, "columns": ["a", "b"]}}) is None
    assert (
        state_problem({"reader": {"frames": [3600], "length": 20, "seconds": None, "standard": {"mean": [1.0]}}})
        is None
    )
    for wrong in (
        {"most": HUGE}, {"dropout": 2}, {"columns": ["a"] * 21}, {"frames": [HUGE]}, {"frames": [60] * 21},
        {"length": HUGE}, {"seconds": HUGE}, {"standard": {"mean": [float("nan")]}}, {"features": [1]},
    ):  # fmt: skip
        assert state_problem({"reader": wrong}) is not None


def test_a_model_is_not_made_that_is_far_larger_than_its_weights(tmp_path):
    save_state({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StoreError, match="has 24 B of weights, but its model would need 37"):
        build_with_weights(lambda: nn.Linear(100_000, 100_000), tmp_path / "model.safetensors")
    assert build_with_weights(lambda: nn.Linear(2, 2), tmp_path / "model.safetensors").bias.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": HUGE}, "'hidden_size' of 1000"),
        ({"num_hidden_layers": 10**6}, "'num_hidden_layers' of 1000000, at most 1,024 is taken"),
        ({"id2label": {"0": LONG}}, "'0' of 200,000 entries"),
        ({"vocab_size": {"a": [HUGE]}}, "'a' of 1000"),
    ],
)
def test_a_config_of_absurd_numbers_is_refused_before_a_model_is_made(changes, told):
    pytest.importorskip("transformers")
    with pytest.raises(StoreError, match=told):
        library_models.checked({"model_type": "bert", **changes}, "config.json")


def test_a_config_that_is_nested_beyond_reason_is_refused():
    pytest.importorskip("transformers")
    nested = {}
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(StoreError, match="nested too deeply"):
        library_models.checked({"model_type": "bert", "a": nested}, "config.json")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"image_mean": 5}', '{"image_mean": [[1], 2, 3]}', f'{{"image_std": [1, 2, 1{"0" * 400}]}}'],
)
def test_a_preprocessor_config_that_is_none_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(StoreError, match="has no mean and spread of three colours"):
        _normalising_in(tmp_path)


def test_a_name_is_compared_with_few_others_and_few_are_listed():
    many = [f"{number:06}" for number in range(20_000)]
    assert did_you_mean("nothing like it", many).endswith("000099 and 19,900 more")
    assert len(did_you_mean("x" * 10**6, ["y" * 10**6, "z"])) < 200
    assert did_you_mean("trget", ["target", "other"]) == "; did you mean 'target'?"
