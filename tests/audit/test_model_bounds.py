"""A model that cannot be trained beside the free memory is refused in one line, before its tensors are made."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from recipe_data import TINY, texts_file
from torch import nn

from hotlap.core.errors import DataError
from hotlap.machine.limits import read_memory
from hotlap.recipes import encoders, image, tabular, text
from hotlap.recipes.options import options_of
from hotlap.recipes.tabular import refuse_too_large
from hotlap.store.weights import bytes_of


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes are free."""

    def be(count):
        monkeypatch.setattr(tabular, "read_memory", lambda: replace(read_memory(), free_bytes=count))

    return be


def test_weights_gradients_and_moments_of_adam_have_to_fit(free):
    weights = 4 * 1001 * 1000
    free(4 * weights)
    refuse_too_large(lambda: nn.Linear(1000, 1000), "a layer", "cpu", "give a smaller one")
    free(4 * weights - 1)
    with pytest.raises(DataError, match=r"^a layer has 3\.8 MiB of weights, .* 15\.3 MiB of memory, and 15\.3"):
        refuse_too_large(lambda: nn.Linear(1000, 1000), "a layer", "cpu", "give a smaller one")


@pytest.mark.parametrize("model", ["resnet", "vit"])
def test_a_network_that_is_wide_beyond_the_memory_is_refused_before_pictures_are_read(tmp_path, free, model):
    free(1_000_000)  # small models, so that this test fails without filling the memory
    for name in "ab":
        (tmp_path / name).mkdir()
        for at in range(4):
            Image.fromarray(np.full((8, 8, 3), at, "uint8")).save(tmp_path / name / f"{at}.png")
    given = {"data": str(tmp_path), "device": "cpu", "width": "48", "models": model}
    with pytest.raises(DataError, match=rf"^{model} has .*iB of weights, .* give a smaller width or depth$"):
        image.RECIPE.prepare(options_of(image.RECIPE.options_type, None, given), lambda line: None)


def test_an_encoder_that_is_wide_beyond_the_memory_is_refused_before_texts_become_tokens(tmp_path, monkeypatch, free):
    free(1_000_000)
    pytest.importorskip("transformers")
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "intermediate_size": 10_000}))
    data = texts_file(tmp_path / "train.csv", rows=60)
    given = {"data": str(data), "device": "cpu", "config": str(path)}
    with pytest.raises(DataError, match=r"config\.json has .*iB of weights, .* give a smaller encoder$"):
        text.RECIPE.prepare(options_of(text.RECIPE.options_type, None, given), lambda line: None)


def test_a_vocabulary_that_is_large_beyond_the_memory_is_refused(tmp_path, monkeypatch, free):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    data = texts_file(tmp_path / "train.csv", rows=60)
    given = {"data": str(data), "device": "cpu", "config": str(path), "most": "16"}
    without = encoders.Encoder(config={**TINY, "max_position_embeddings": 18, "vocab_size": 5}, tokenizer=None)
    free(4 * bytes_of(without.new_model))
    with pytest.raises(DataError, match=r"give a smaller encoder or vocabulary$"):
        text.RECIPE.prepare(options_of(text.RECIPE.options_type, None, given), lambda line: None)
