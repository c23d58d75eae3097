"""Models of transformers from configs and weights that may be a stranger's: none of their code is ever run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotlap.core.errors import HotlapError, StoreError, first_few, library, shown
from hotlap.store.files import read_text
from hotlap.store.weights import load_weights

CONFIG = "config.json"
LONGEST = 200
"""Characters of a library's error that a line shows."""
MOST_LAYERS, MOST_NUMBER, MOST_LISTED = 1024, 10_000_000, 100_000
"""Of a config: layers, any other whole number (a vocabulary may have a million words), and entries of a list."""
LAYERS = ("layers", "n_layer", "depth", "depths", "num_blocks", "num_stages")
"""How keys end that say how many layers there are."""
LEADS_ELSEWHERE = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "kernel_config")
"""Keys that make the library load code; names of other models and folders (`…name_or_path`) are refused beside them."""
OTHER_LIBRARIES = ("timm_wrapper", "timm_backbone")
"""Types whose configs name a model of another library, by an address or a folder."""
FROM_ELSEWHERE = ("backbone", "use_pretrained_backbone", "use_timm_backbone", "backbone_kwargs", "quantization_config")
"""Keys that fetch a part of the model from elsewhere, or its layers from another library, unless they are unset."""
WITHOUT_EFFECT = ("_name_or_path", "_attn_implementation_autoset", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "transformers_version", "architectures", "dtype", "torch_dtype", "num_labels", "_num_labels",
    "gradient_checkpointing", "finetuning_task", "task_specific_params", "tokenizer_class", "model_max_length",
    "output_past", "xla_device", "_commit_hash", "directionality", "pooler_fc_size", "pooler_num_attention_heads",
    "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type")  # fmt: skip
"""Keys that `save_pretrained` writes beside the settings. hotlap leaves them out: the library never sees them."""
EARLIER = ("rope_theta", "rope_scaling", "partial_rotary_factor", "global_rope_theta", "local_rope_theta", "use_cache")
"""Settings as earlier versions wrote them, which the library still reads."""
SET_HERE = ("image_size", "max_position_embeddings", "pad_token_id", "type_vocab_size", "vocab_size")
"""Settings that recipes give to every model, were they of no use to some."""
READ_BESIDE = {
    "deberta-v2": ("position_buckets", "norm_rel_ebd", "share_att_key", "conv_kernel_size", "conv_groups", "conv_act",
        "attention_head_size", "embedding_size", "cls_dropout"),
}  # fmt: skip
"""Settings that models of a type read, though its class of configs has none of them; DeBERTa v3 has the first three."""
USUAL = {"position_embedding_type": "absolute", "pruned_heads": {}}
"""Settings that this version of the library lacks, with the value it always uses."""


def first_words(error: BaseException) -> str:
    """What a library says, in a line that can be read."""
    words = " ".join(str(error).split())
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 2]} …"


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a config.json; StoreError where it is none, or names code or files to load."""
    if not path.exists():
        raise StoreError(f"there is no {path}; a folder of weights holds the model's {CONFIG}")
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise StoreError(f"{path} is no JSON; give a model's {CONFIG}") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise StoreError(f"{path} names no model_type; give the {CONFIG} of a model of transformers")
    return checked(found, str(path))


def checked(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A model's settings without those of no effect; StoreError where some are unknown, or name code to load."""
    auto = library("transformers", "this model", "[text]")
    try:
        found = _with_effect(config)
        wrong = dict.fromkeys(_leading_elsewhere(found))
        absurd = next(_absurd(found), None)
    except RecursionError:
        raise StoreError(f"{source} is nested too deeply; give the {CONFIG} of a model of transformers") from None
    if wrong:
        raise StoreError(
            f"{source} has {_named(wrong)}, which can make the library load a stranger's code or files; "
            "remove it from the file if the model works without it"
        )
    if absurd is not None:
        raise StoreError(f"{source} has {absurd}; correct it")
    with _library_errors(source), _quietly():
        example = auto.AutoConfig.for_model(config["model_type"])
    unknown = list(_unknown(found, example))
    if unknown:
        kind = shown(config["model_type"])
        raise StoreError(
            f"{source} has {_named(unknown)}, which no {kind} of this transformers has; remove it from the file"
        )
    return found


def new_model(
    kind: str, config: Mapping[str, Any], source: str, labels: int | None = None, **settings: Any
) -> nn.Module:
    """A model with random weights, of a kind such as AutoModel; StoreError where the config is of none."""
    auto = library("transformers", "this model", "[text]")
    with _library_errors(source), _quietly():
        settings_of_model = _config(auto, checked(config, source), labels)
        model: nn.Module = getattr(auto, kind).from_config(
            settings_of_model, trust_remote_code=False, dtype=torch.float32, **settings
        )
    return model


def pretrained_model(
    kind: str, config: Mapping[str, Any], folder: Path, source: str, labels: int | None = None, **settings: Any
) -> tuple[nn.Module, list[str]]:
    """A model with the weights of a folder, and the names of those that it lacks, which are random.

    Weights come through hotlap's own loader: the library only has other names for tensors in files than in models.
    """
    auto = library("transformers", "this model", "[text]")
    state = load_weights(folder)
    with torch.device("meta"):
        family = type(new_model(kind, config, source, labels, **settings))
    with _library_errors(source), _quietly():
        model, said = family.from_pretrained(  # type: ignore[attr-defined]
            None,
            config=_config(auto, checked(config, source), labels),
            state_dict=state,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            **settings,
        )
    # Those that are missing, by name; those of another shape, by name and shapes.
    missing = sorted({*said["missing_keys"], *(one[0] for one in said["mismatched_keys"])})
    if len(missing) == len(model.state_dict()):
        raise StoreError(f"{folder} has {len(state):,} tensors, and none of them fits {source}; name its own model")
    return model, missing


def _config(auto: Any, config: dict[str, Any], labels: int | None) -> Any:
    settings = {key: value for key, value in config.items() if key != "model_type"}
    found = auto.AutoConfig.for_model(config["model_type"], **settings)
    if labels is not None:
        found.num_labels = labels
    return found


@contextlib.contextmanager
def _library_errors(source: str) -> Iterator[None]:
    try:
        yield
    except HotlapError:
        raise
    except Exception as error:  # of a library that checks each kind of model in its own way
        raise StoreError(f"no model can be made of {source}: {first_words(error)}") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Inside, the library shows no bars and no warnings, which hold names from files; nor does it ask anything."""
    logs: Any = importlib.import_module("transformers.utils.logging")
    asking: Any = importlib.import_module("transformers.dynamic_module_utils")
    level, bars, patience = logs.get_verbosity(), logs.is_progress_bar_enabled(), asking.TIME_OUT_REMOTE_CODE
    logs.set_verbosity(logs.CRITICAL)
    logs.disable_progress_bar()
    asking.TIME_OUT_REMOTE_CODE = 0  # how long it would wait for an answer
    try:
        yield
    finally:
        logs.set_verbosity(level)
        asking.TIME_OUT_REMOTE_CODE = patience
        if bars:
            logs.enable_progress_bar()


def _with_effect(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and the configs inside of it, without the keys of no effect."""
    return {
        key: _with_effect(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in WITHOUT_EFFECT
    }


def _leading_elsewhere(value: Any) -> Iterator[str]:
    """The keys of a config, and of all inside of it, that name code or files to load."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in LEADS_ELSEWHERE or key.endswith("name_or_path") or (key in FROM_ELSEWHERE and inner):
                yield key
            elif key == "model_type" and inner in OTHER_LIBRARIES:
                yield f"model_type {inner}"
            yield from _leading_elsewhere(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leading_elsewhere(inner)


def _absurd(value: Any, key: str = "") -> Iterator[str]:
    """Numbers and lists of a config, and of all inside of it, that no model has: they would fill the memory."""
    most = MOST_LAYERS if key.endswith(LAYERS) else MOST_NUMBER
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _absurd(inner, str(name))
    elif isinstance(value, (list, tuple)):
        if len(value) > MOST_LISTED:
            yield f"{shown(key)} of {len(value):,} entries, at most {MOST_LISTED:,} are taken"
        for inner in value:
            yield from _absurd(inner, key)
    elif isinstance(value, int) and abs(value) > most:
        yield f"{shown(key)} of {shown(value)}, at most {most:,} is taken"


def _unknown(config: Mapping[str, Any], example: Any) -> Iterator[str]:
    """The keys of a config, and of configs inside of it, that one of its type does not have."""
    names = {one.name for one in dataclasses.fields(example)} if dataclasses.is_dataclass(example) else set()
    known = {*names, *example.to_dict(), *example.attribute_map, *EARLIER, *SET_HERE, "model_type"}
    known.update(READ_BESIDE.get(example.model_type, ()))
    for key, value in config.items():
        inner = getattr(example, key, None) if key in known else None
        if key not in known and (key not in USUAL or value != USUAL[key]):
            yield key
        elif isinstance(value, Mapping) and hasattr(inner, "attribute_map"):
            yield from _unknown(value, inner)


def _named(keys: Iterable[str]) -> str:
    return first_few([shown(key) for key in keys], 4)
