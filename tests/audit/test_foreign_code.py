"""Configs, recipes and weights may be a stranger's: none of their code runs, and nothing is asked."""

import builtins
import json
import pickle
import sys
from types import ModuleType

import pytest
import torch
from recipe_data import TINY, texts_file, tiny_config
from safetensors.torch import load_file, save_file

from hotlap.core.errors import StoreError
from hotlap.recipes import encoders, library_models
from hotlap.recipes.answers import revived
from hotlap.recipes.networks import NetworkSpec, initial_network, new_network, spec_in_folder
from hotlap.recipes.options import options_of
from hotlap.recipes.text import RECIPE
from hotlap.store.weights import load_weights

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

EVIL = """
import pathlib
pathlib.Path({mark!r}).write_text("run")
from transformers import BertModel
class Evil(BertModel):
    pass
"""
OUTSIDE = "blip_text_model"
"""A type that the library has a config for and no model of its own, so that it looks for a stranger's."""
TEXT = {"model_type": OUTSIDE, "auto_map": {"AutoModel": "evil.Evil"}}
IMAGE = {"model_type": "bert", "auto_map": {"AutoModelForImageClassification": "evil.Evil"}}


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A folder with a stranger's module, and a user who says yes to everything."""
    folder, mark = tmp_path / "evil", tmp_path / "mark"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    asked = []
    monkeypatch.setattr(builtins, "input", lambda *words: asked.append(words) or "yes")
    monkeypatch.setattr(encoders, "MINILM", "a_package_that_nobody_has")
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    yield folder
    assert not mark.exists()
    assert not asked


def run_of(folder, recipe, reader):
    """The folder of a recipe's run, as a stranger may write it."""
    folder.mkdir(exist_ok=True)
    state = {"format": 1, "recipe": recipe, "target": "label", "threshold": None, "batch_size": 4, "reader": reader}
    model = "encoder" if recipe == "text" else "transformers:bert"
    (folder / "recipe.json").write_text(json.dumps({**state, "model": model}))
    tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")).save(
        str(folder / "tokenizer.json")
    )
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def text_reader(config):
    return {"columns": ["text"], "classes": ["a", "b"], "most": 8, "dropout": 0.0, "config": config}


def image_reader(config):
    network = NetworkSpec(size=16, outputs=2, config=config).to_dict()
    own = {"path": "path", "root": "", "fit": "squash", "tta": 1, "mirrors": False, "crop": 0.0}
    return {"classes": ["a", "b"], "network": network, **own, "mean": 0.0, "spread": 1.0, "header": None}


@pytest.mark.parametrize(("recipe", "reader", "config"), [("text", text_reader, TEXT), ("image", image_reader, IMAGE)])
def test_the_run_of_a_stranger_runs_no_code_and_asks_nothing(trap, tmp_path, recipe, reader, config):
    folder = run_of(tmp_path / "run", recipe, reader({**config, "name_or_path": str(trap)}))
    with pytest.raises(
        StoreError, match="has 'auto_map', 'name_or_path', which can make the library load a stranger's"
    ):
        revived(folder)


@pytest.mark.parametrize("option", ["config", "weights"])
def test_the_config_of_a_stranger_runs_no_code_and_asks_nothing(trap, tmp_path, option):
    (trap / "config.json").write_text(json.dumps({**TEXT, "name_or_path": str(trap)}))
    path = trap / "config.json" if option == "config" else trap
    run_of(trap, "text", {})
    data = texts_file(tmp_path / "train.csv", rows=60)
    given = options_of(RECIPE.options_type, None, {"data": str(data), "device": "cpu", option: str(path)})
    with pytest.raises(StoreError, match=r"config.json has 'auto_map', 'name_or_path', which can make"):
        RECIPE.prepare(given, lambda line: None)


def test_a_folder_of_pictures_weights_runs_no_code_and_asks_nothing(trap):
    (trap / "config.json").write_text(json.dumps({**IMAGE, "name_or_path": str(trap)}))
    with pytest.raises(StoreError, match="'auto_map', 'name_or_path'"):
        spec_in_folder(trap, NetworkSpec(size=16, outputs=2))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"auto_map": {}}, "'auto_map'"),
        ({"name_or_path": "somebody/model"}, "'name_or_path'"),
        ({"base_model_name_or_path": "somebody/model"}, "'base_model_name_or_path'"),
        ({"attn_implementation": "somebody/kernels"}, "'attn_implementation'"),
        ({"_attn_implementation": "somebody/kernels"}, "'_attn_implementation'"),
        ({"quantization_config": {"quant_method": "x"}}, "'quantization_config'"),
        ({"transformers_weights": "../x.bin"}, "'transformers_weights', which no 'bert' of this transformers has"),
        ({"hiden_size": 32}, "'hiden_size', which no 'bert' of this transformers has"),
        ({"id2label": {"auto_map": "x"}}, "'auto_map'"),
        ({"backbone": "somebody/model"}, "'backbone'"),
        ({"model_type": "timm_wrapper"}, "'model_type timm_wrapper'"),
    ],
)
def test_keys_that_lead_elsewhere_or_are_unknown_are_refused(more, said):
    with pytest.raises(StoreError, match=said):
        library_models.new_model("AutoModel", {**TINY, **more}, "config.json")


def test_the_config_inside_of_a_config_is_looked_at_too():
    config = {"model_type": "clip", "text_config": {"surprise": 1}}
    with pytest.raises(StoreError, match="'surprise', which no 'clip'"):
        library_models.checked(config, "config.json")
    assert library_models.checked({"model_type": "clip", "text_config": {"hidden_size": 8}}, "x")["text_config"]


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "mpnet", "deberta-v2", "modernbert", "vit", "swin"])
def test_what_the_library_itself_writes_is_read(kind):
    config = json.loads(transformers.AutoConfig.for_model(kind).to_json_string(use_diff=False))
    assert library_models.checked(config, "config.json")["model_type"] == kind


def test_a_folder_of_save_pretrained_trains_as_it_is_and_where_it_says_it_came_from_is_never_looked_at(trap, tmp_path):
    folder = run_of(tmp_path / "saved", "text", {})
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(folder)
    path = folder / "config.json"
    # Versions 4 of the library write these.
    written = {"_name_or_path": str(trap), "_attn_implementation_autoset": True, "torchscript": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **written}))
    (trap / "config.json").write_text(json.dumps(TEXT))
    found = encoders.encoder_in(folder, library_models.read_config(path), weights=True)
    assert not found.config.keys() & written.keys()
    names, saved = dict(found.initial_model().named_parameters()), load_file(folder / "model.safetensors")
    assert all(torch.equal(one, saved[name]) for name, one in names.items())


def test_a_config_inside_of_a_config_may_say_where_it_came_from():
    config = {"model_type": "clip", "text_config": {"hidden_size": 8, "_name_or_path": "somebody/model"}}
    assert library_models.checked(config, "config.json")["text_config"] == {"hidden_size": 8}


def test_what_older_files_hold_beside_their_settings_is_left_out():
    old = {"architectures": ["BertModel"], "gradient_checkpointing": False, "position_embedding_type": "absolute"}
    old |= {"transformers_version": "4.1", "torch_dtype": "float16", "directionality": "bidi"}
    assert library_models.checked({**TINY, **old}, "config.json").keys() - TINY.keys() == {"position_embedding_type"}
    with pytest.raises(StoreError, match="position_embedding_type"):
        library_models.checked({**TINY, "position_embedding_type": "relative_key"}, "config.json")


# --- weights -------------------------------------------------------------------------------------------


class Marks:
    """A pickle that writes a file when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    """A folder with an encoder as transformers saves it, its model, and a table of texts."""
    monkeypatch.setattr(encoders, "MINILM", "a_package_that_nobody_has")
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    data, folder = texts_file(tmp_path / "train.csv", rows=60), tmp_path / "encoder"
    quick = {"config": str(tiny_config(tmp_path / "tiny.json")), "vocabulary": 300, "most": 48, "device": "cpu"}
    reader = RECIPE.prepare(
        options_of(RECIPE.options_type, None, {"data": str(data), **quick}), lambda line: None
    ).reader
    model = reader.initial_model().encoder
    model.save_pretrained(folder)
    reader.keep_files(folder)
    return folder, model, data


def begun_from(folder, data):
    given = options_of(RECIPE.options_type, None, {"data": str(data), "weights": str(folder), "device": "cpu"})
    return RECIPE.prepare(given, lambda line: None).reader.initial_model().encoder


def test_a_pickle_that_is_called_safetensors_is_refused_unopened(encoder, tmp_path):
    folder, _, data = encoder
    (folder / "model.safetensors").write_bytes(pickle.dumps(Marks(tmp_path / "mark")))
    with pytest.raises(StoreError, match=r"model\.safetensors is not safetensors: a pickle"):
        begun_from(folder, data)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["weights.bin", "../weights.safetensors", "/weights.safetensors", "..", ["a"], 1])
def test_an_index_leads_to_no_other_file(encoder, tmp_path, name):
    folder, _, data = encoder
    (folder / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (folder / "weights.bin").write_bytes(pickle.dumps(Marks(tmp_path / "mark")))
    save_file({"a": torch.zeros(1)}, folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"embeddings": name}}))
    with pytest.raises(StoreError, match=r"only list \.safetensors files beside it|is not an index"):
        begun_from(folder, data)
    assert not (tmp_path / "mark").exists()


def test_a_link_in_an_index_is_not_followed(encoder, tmp_path):
    folder, _, data = encoder
    (folder / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (folder / "part.safetensors").symlink_to(tmp_path / "weights.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    with pytest.raises(StoreError, match="it is a link"):
        begun_from(folder, data)


def test_weights_in_several_files_are_read_by_their_index(encoder):
    folder, model, data = encoder
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert load_weights(folder).keys() == whole.keys()
    theirs = begun_from(folder, data).state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in model.state_dict().items())


def test_an_adapter_in_the_folder_leads_to_no_other_model(encoder):
    folder, model, data = encoder
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere", "peft_type": "LORA"}')
    theirs = begun_from(folder, data).state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in model.state_dict().items())


def test_weights_with_a_prefix_or_a_head_find_their_places(encoder, tmp_path):
    folder, _, data = encoder
    config = transformers.AutoConfig.from_pretrained(folder)
    theirs = transformers.AutoModelForMaskedLM.from_config(config)
    theirs.save_pretrained(folder)
    mine = begun_from(folder, data).state_dict()
    given = {name.removeprefix("bert."): value for name, value in theirs.state_dict().items()}
    assert all(torch.equal(value, given[name]) for name, value in mine.items())


def test_weights_of_another_model_are_refused_and_names_in_them_are_not_printed(encoder, capfd):
    folder, _, data = encoder
    save_file({"a\x1b[31m": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(StoreError, match="has 1 tensors, and none of them fits"):
        begun_from(folder, data)
    assert "\x1b" not in "".join(capfd.readouterr())


def test_half_precision_weights_are_trained_in_full(encoder):
    folder, model, data = encoder
    model.half().save_pretrained(folder)
    mine = begun_from(folder, data).state_dict()
    assert {value.dtype for value in mine.values() if value.is_floating_point()} == {torch.float32}


def test_a_pickle_among_pictures_weights_is_refused_unopened(tmp_path):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=16, patch_size=8, **small)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "model.safetensors").write_bytes(pickle.dumps(Marks(tmp_path / "mark")))
    name, plan = spec_in_folder(tmp_path / "vit", NetworkSpec(size=16, outputs=2))
    with pytest.raises(StoreError, match="a pickle"):
        initial_network(name, plan, str(tmp_path / "vit"), lambda line: None)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "text", ["[", "[1]", '{"image_mean": "abc"}', '{"image_std": 5}', '{"image_mean": [[1], 2, 3]}']
)
def test_what_normalises_pictures_is_numbers_or_refused(tmp_path, text):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(StoreError, match="has no mean and spread of three colours"):
        spec_in_folder(tmp_path, NetworkSpec(size=16, outputs=2))


def test_a_model_of_timm_is_known_by_its_name_alone(monkeypatch):
    """Not by an address or a folder, which timm would fetch or open."""
    timm = ModuleType("timm")
    timm.is_model = lambda name: name == "resnet18"
    timm.list_models = lambda: ["resnet18"]
    timm.create_model = lambda name, **settings: pytest.fail(f"{name} was made")
    monkeypatch.setitem(sys.modules, "timm", timm)
    for name in ("timm:hf-hub:somebody/model", "timm:local-dir:/somewhere"):
        with pytest.raises(ValueError, match="timm has no model"):
            new_network(name, NetworkSpec(size=16, outputs=2))
