"""Parameters of XGBoost and LightGBM: unknown ones are refused, and so are those that are gone or are hotlap's to set.

XGBoost only warns of a parameter that it does not know, and LightGBM prints a line."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from hotlap.core.errors import did_you_mean, library, shown

NEEDS = "training trees"
EXTRA = "[trees]"

_GONE = {
    "gpu_id": "'gpu_id' is gone from XGBoost: write 'device': 'cuda:{value}'",
    "n_gpus": "'n_gpus' is gone from XGBoost: write 'device': 'cuda'",
    "predictor": "'predictor' is gone from XGBoost: leave it out; 'device' decides where predictions are made",
}
_SET_BY_HOTLAP = {
    "rounds": "write TreeJob(rounds={value})",
    "patience": "write TreeJob(patience={value})",
    "threads": "write fit(job, plan={{'threads': {value}}})",
    "seed": "write TreeJob(seed={value})",
    "classes": "leave it out: it is read from y",
    "quiet": "leave it out: fit(progress=…) decides what is shown",
    "categories": "leave it out: hotlap.trees takes numbers only",
    "linear": "leave it out: hotlap.trees grows trees with a value in each leaf",
}
_XGBOOST_OWN = {
    "n_estimators": "rounds", "num_boost_round": "rounds", "num_round": "rounds", "num_rounds": "rounds",
    "early_stopping_rounds": "patience", "nthread": "threads", "n_jobs": "threads", "seed": "seed",
    "random_state": "seed", "num_class": "classes", "verbosity": "quiet", "silent": "quiet", "verbose": "quiet",
    "enable_categorical": "categories",
}  # fmt: skip
_LIGHTGBM_OWN = {
    "num_iterations": "rounds", "early_stopping_round": "patience", "num_threads": "threads", "seed": "seed",
    "num_class": "classes", "verbosity": "quiet", "categorical_feature": "categories", "linear_tree": "linear",
}  # fmt: skip
"""By their main names."""
_XGBOOST_MORE = ("objective", "eval_metric", "booster", "device", "sampling_method", "max_bin")
"""Parameters that the configuration of a booster keeps under another name, or not at all."""
_DEMANDED = {"quantile_alpha": 0.5, "expectile_alpha": 0.5, "num_class": 2}
"""Parameters without which some objectives of XGBoost do not begin; others pass them over."""
_UNCHECKED = ("objective", "metric", "eval_metric", "boosting", "booster", "device", "device_type")
"""Parameters whose value the library writes in other words; the device is compared by itself."""


def problems(name: str, task: str, params: Mapping[str, Any]) -> list[str]:
    """What is wrong with parameters of the library, a line each. Raises MachineError if it is not installed."""
    texts = [f"parameter names are texts, not {shown(key)}" for key in params if not isinstance(key, str)]
    if texts:
        return texts
    wrong = _xgboost_problems(params) if name == "xgboost" else _lightgbm_problems(params)
    given = device_of(params)
    if given is not None and not is_device(given) and not (name == "lightgbm" and given == "gpu"):
        wrong.append(f"device={shown(given)} must be cpu, cuda or cuda:N")
    if task == "classification" and (objective := params.get("objective", params.get("application"))) is not None:
        wrong.append(f"objective={shown(objective)}: leave it out, task='classification' decides it")
    for metric in ("eval_metric", "metric"):
        if metric in params and not isinstance(params[metric], str):
            wrong.append(f"{metric}={shown(params[metric])} must be the name of one metric")
    return wrong


_BINS = {
    "xgboost": ("max_bin",),
    "lightgbm": ("max_bin", "max_bin_by_feature", "min_data_in_bin", "bin_construct_sample_cnt", "data_random_seed",
                 "is_enable_sparse", "enable_bundle", "use_missing", "zero_as_missing"),
}  # fmt: skip
"""The parameters that decide how features are quantised."""
_SHARED_BINS: dict[str, dict[str, Any]] = {
    "xgboost": {},
    # Both would change with parameters of a trial: the seed, and the rows that a leaf needs.
    "lightgbm": {"data_random_seed": 1, "feature_pre_filter": False},
}


def bin_problems(name: str, params: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parameters of a TreeData, a line each."""
    known = {*_BINS[name], *(alias for alias, main in _main_names(name).items() if main in _BINS[name])}
    return [f"TreeData takes parameters of bins, not {shown(key)}{did_you_mean(key, known)}"
            for key in params if key not in known]  # fmt: skip


def bins_of(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that decide the bins of shared data, by their main names."""
    main = _main_names(name)
    return {**_SHARED_BINS[name], **{main.get(key, key): value for key, value in params.items()}}


def shared_problems(name: str, params: Mapping[str, Any]) -> list[str]:
    """Parameters of a job that shared data decides, a line each."""
    main = _main_names(name)
    wrong = [f"params[{key!r}]: bins are shared: write TreeData(x, params={{{key!r}: {shown(value)}}})"
             for key, value in params.items() if main.get(key, key) in _BINS[name]]  # fmt: skip
    if params.get("tree_method") in ("exact", "approx"):
        wrong.append(f"tree_method={params['tree_method']!r} takes no quantised data: give x as an array")
    return wrong


def files_problems(name: str, params: Any) -> list[str]:
    """Why a job cannot read TreeFiles, a line each."""
    if name != "xgboost":
        return ["TreeFiles are for XGBoost: give LightGBM a np.memmap of 32-bit floats, which it reads in place"]
    method = params.get("tree_method") if isinstance(params, Mapping) else None
    return [f"tree_method={method!r} cannot read TreeFiles: leave it out"] if method in ("exact", "approx") else []


def _main_names(name: str) -> dict[str, str]:
    """The main name of each alias of a parameter; XGBoost has none."""
    if name == "xgboost":
        return {}
    return {alias: main for main, others in _lightgbm_aliases().items() for alias in others}


def is_device(value: object) -> bool:
    """Whether this names a device: `cpu`, `cuda` or `cuda:N`."""
    return isinstance(value, str) and re.fullmatch(r"cpu|cuda(:\d{1,3})?", value) is not None


def threads_decide(name: str, params: Mapping[str, Any]) -> bool:
    """Whether the trees themselves depend on threads: LightGBM rounds quantised gradients by chance in each thread."""
    return name == "lightgbm" and bool(params.get("use_quantized_grad")) and bool(params.get("stochastic_rounding", 1))


def device_of(params: Mapping[str, Any]) -> Any:
    """The device that the parameters ask for; None where they name none."""
    return params.get("device", params.get("device_type"))


def without_device(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, without the one that a plan holds."""
    return {name: value for name, value in params.items() if name not in ("device", "device_type")}


def _unusable(
    name: str, params: Mapping[str, Any], known: Collection[str], owned: Mapping[str, str], gone: Mapping[str, str]
) -> list[str]:
    """Parameters that are gone, that hotlap sets, or that the library does not know, a line each."""
    wrong = []
    for key, value in params.items():
        if key in gone:
            wrong.append(gone[key].format(value=shown(value)))
        elif key in owned:
            wrong.append(f"params[{key!r}]: {_SET_BY_HOTLAP[owned[key]].format(value=shown(value))}")
        elif key not in known:
            wrong.append(f"{name} has no parameter {key!r}{did_you_mean(key, known)}")
        elif gone and isinstance(value, str) and value.startswith(("gpu_", "grow_gpu")):
            wrong.append(f"{key}={value!r} is gone from {name}: write 'device': 'cuda' and 'tree_method': 'hist'")
    return wrong


def _xgboost_problems(params: Mapping[str, Any]) -> list[str]:
    known = _xgboost_names(str(params.get("objective", "reg:squarederror")), str(params.get("booster", "gbtree")))
    wrong = _unusable("XGBoost", params, known, _XGBOOST_OWN, _GONE)
    wrong += [
        f"{name}={shown(params[name])} asks for several answers; give one, and a job for each"
        for name in ("quantile_alpha", "expectile_alpha")
        if isinstance(params.get(name), (list, tuple))
    ]
    if params.get("booster") == "gblinear":
        wrong.append("booster='gblinear' grows no trees; use gbtree or dart")
    return wrong


def _lightgbm_problems(params: Mapping[str, Any]) -> list[str]:
    main = _main_names("lightgbm")
    known = {*_lightgbm_aliases(), *main}
    owned = {key: _LIGHTGBM_OWN[main.get(key, key)] for key in known if main.get(key, key) in _LIGHTGBM_OWN}
    return _unusable("LightGBM", params, known, owned, {})


@functools.cache
def _xgboost_names(objective: str, booster: str) -> frozenset[str]:
    """The parameters of XGBoost for an objective, as a booster itself lists them."""
    xgb = library("xgboost", NEEDS, EXTRA)
    data = xgb.DMatrix(np.zeros((2, 1), np.float32), label=[0.0, 1.0], nthread=1)
    settings = {"verbosity": 0, "nthread": 1, "booster": booster, "tree_method": "hist", **_DEMANDED}
    try:
        config = xgb.Booster({**settings, "objective": objective}, [data]).save_config()
    except xgb.core.XGBoostError:  # refused when training begins, with the library's own words
        config = xgb.Booster({"verbosity": 0, "nthread": 1}, [data]).save_config()
    return frozenset(_XGBOOST_MORE) | {name for name, _ in _leaves(json.loads(config))}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, name)
    elif name != "name":
        yield name, str(value)


@functools.cache
def _lightgbm_aliases() -> dict[str, list[str]]:
    """The parameters of LightGBM, each with its aliases, as its library lists them."""
    lightgbm = library("lightgbm", NEEDS, EXTRA)
    found: dict[str, list[str]] = lightgbm.basic._ConfigAliases._get_all_param_aliases()
    return found


def not_obeyed(name: str, params: Mapping[str, Any], ran: Mapping[str, str]) -> list[str]:
    """Parameters that the library reports with another value than was asked for, a line each."""
    main, wrong = _main_names(name), []
    for key, asked in params.items():
        found = ran.get(main.get(key, key))
        if found is not None and main.get(key, key) not in _UNCHECKED and not _same(asked, found):
            wrong.append(f"{key}={shown(asked)} was asked for and {name} trains with {found}")
    return wrong


def xgboost_ran(config: str) -> dict[str, str]:
    """The parameters that an XGBoost booster reports, by name."""
    return dict(_leaves(json.loads(config)))


def lightgbm_ran(text: str) -> dict[str, str]:
    """The parameters that a LightGBM booster reports, by name."""
    return dict(re.findall(r"^\[(\w+): (.*)\]$", text, re.M))


def _same(asked: Any, found: str) -> bool:
    if isinstance(asked, (list, tuple, dict)):  # written in a form of the library's
        return True
    if isinstance(asked, (bool, np.bool_)):
        return found.lower() in ("1", "true") if asked else found.lower() in ("0", "false")
    try:
        # XGBoost keeps 32 bits of a number.
        return abs(float(asked) - float(found)) <= 1e-6 * max(abs(float(asked)), 1e-30)
    except (TypeError, ValueError):
        return str(asked) == found
