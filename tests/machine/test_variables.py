"""Environment variables that matter."""

from __future__ import annotations

import json

import pytest

from hotlap.core.errors import MachineError
from hotlap.machine import environment, workers_wanted
from hotlap.machine.variables import HARMS, RECORDED, variable_problems


def one(environ, cores=4):
    (problem,) = variable_problems(environ, cores)
    return problem


def test_a_clean_environment_has_no_problem():
    assert variable_problems({"PATH": "/bin", "HOME": "/root"}, 4) == []


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "slows"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "slows"),
        ("NVIDIA_TF32_OVERRIDE", "0", "slows"),
        ("NVIDIA_TF32_OVERRIDE", "1", "note"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "note"),
        ("TORCHDYNAMO_DISABLE", "1", "slows"),
        ("TORCH_SHOW_CPP_STACKTRACES", "1", "note"),
        ("TORCH_CUDA_SANITIZER", "1", "slows"),
        ("TOKENIZERS_PARALLELISM", "false", "slows"),
        ("TOKENIZERS_PARALLELISM", "true", "note"),
        ("OMP_NUM_THREADS", "64", "slows"),
        ("OMP_NUM_THREADS", "1", "note"),
        ("MKL_NUM_THREADS", "many", "note"),
        ("NUM_WORKERS", "9", "slows"),
        ("HOTLAP_WORKERS", "9", "slows"),
        ("NUM_WORKERS", "-2", "stops"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "note"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:21", "note"),
        ("PYTHONDEVMODE", "1", "slows"),
    ],
)
def test_a_harmful_variable_is_told_with_its_cost_and_its_cure(name, value, severity):
    problem = one({name: value})
    assert problem.severity == severity
    assert name in problem.what
    assert problem.costs
    assert problem.do


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("CUDA_LAUNCH_BLOCKING", ""),
        ("TORCHDYNAMO_DISABLE", "0"),
        ("TOKENIZERS_PARALLELISM", ""),
        ("OMP_NUM_THREADS", "4"),
        ("OMP_NUM_THREADS", ""),
        ("NUM_WORKERS", "4"),
        ("NUM_WORKERS", "0"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ],
)
def test_a_harmless_value_is_no_problem(name, value):
    assert variable_problems({name: value}, 4) == []


def test_two_allocator_settings_that_disagree_are_told():
    environ = {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}
    assert "disagree" in one(environ).what


def test_every_variable_that_can_harm_is_also_recorded():
    assert {harm.name for harm in HARMS} <= set(RECORDED)


def test_workers_come_from_the_environment_and_hotlaps_own_variable_wins(monkeypatch):
    monkeypatch.delenv("HOTLAP_WORKERS", raising=False)
    monkeypatch.delenv("NUM_WORKERS", raising=False)
    assert workers_wanted() is None
    monkeypatch.setenv("NUM_WORKERS", " 3 ")
    assert workers_wanted() == 3
    monkeypatch.setenv("HOTLAP_WORKERS", "0")
    assert workers_wanted() == 0
    monkeypatch.setenv("HOTLAP_WORKERS", "")
    assert workers_wanted() == 3


@pytest.mark.parametrize("value", ["many", "-1", "2.5", "1e3", "4 workers", "٣"])
def test_a_bad_number_of_workers_is_refused_in_one_line(value):
    with pytest.raises(MachineError, match=r"NUM_WORKERS=.*set it to 0 or more, or unset it") as caught:
        workers_wanted({"NUM_WORKERS": value})
    assert "\n" not in str(caught.value)


def test_the_record_of_a_run_holds_no_secret_no_user_and_no_host(monkeypatch):
    import getpass
    import platform

    for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "KAGGLE_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, "s3cr3t-value")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    record = environment()
    text = json.dumps(record)
    assert "s3cr3t-value" not in text
    assert "MY_PASSWORD" not in text
    assert record["variables"]["CUDA_LAUNCH_BLOCKING"] == "1"
    assert set(record["variables"]) <= set(RECORDED)
    node, user = platform.node(), getpass.getuser()
    values = [str(value) for value in record["versions"].values()]
    assert node not in values
    assert user not in values


def test_the_record_of_a_run_names_versions_and_hardware():
    import torch

    record = environment()
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["numpy"]
    assert record["cpu"]["cores"] >= 1
    assert record["memory_bytes"] > 0
    assert len(record["gpus"]) == torch.cuda.device_count()
