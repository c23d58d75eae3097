"""`hotlap doctor` and `hotlap gpus`, from the outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hotlap as package
from hotlap.cli import app
from hotlap.machine import examine as real_examine
from hotlap.machine.cuda import Cuda, CudaGpu, Driver
from hotlap.machine.detect import World

NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    for name in ("HOTLAP_PRETEND", "HOTLAP_WORKERS", "NUM_WORKERS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Another Python that finds the same hotlap, wherever it is started."""
    source = str(Path(package.__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": source, **variables}
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, check=False)


def hotlap(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "hotlap", *arguments, **variables)


def told(*arguments: str):
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.stdout


@pytest.fixture
def p100(monkeypatch):
    """The doctor meets a P100 under a build without kernels for it."""
    gpu = CudaGpu(index=0, name="Tesla P100-PCIE-16GB", capability=(6, 0), memory_bytes=16280 * 1024**2)
    cuda = Cuda(torch="2.13.0+cu130", build="13.0", architectures=("sm_75", "sm_80"), gpus=(gpu,))

    def kernel(device, dtype):
        return NO_KERNEL if device == "cuda:0" else None

    def examine(pretend=None, *, require_gpu=False):
        made = World(driver=lambda: Driver(), cuda=lambda: cuda, kernel=kernel, free_bytes=lambda i: None)
        return real_examine(pretend, require_gpu=require_gpu, world=made)

    monkeypatch.setattr("hotlap.machine.examine", examine)


@pytest.mark.parametrize("words", [[], ["run"], ["batch"], ["cache", "prune"], ["train"]])
def test_every_command_has_a_short_option_for_its_help(words, monkeypatch):
    short, long = told(*words, "-h"), told(*words, "--help")
    assert short == long
    assert short[1].startswith("Usage: ")


def test_help_fills_the_terminal():
    helps = [hotlap("batch", "-h", COLUMNS=columns).stdout for columns in ("80", "150")]
    widths = [max(map(len, text.splitlines())) for text in helps]
    assert 70 < widths[0] <= 80 < widths[1] <= 150


def test_each_command_is_told_in_one_whole_line_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    named = ("  doctor", "  run ", "  batch", "  resume")
    own = [line for line in told("-h")[1].splitlines() if line.startswith(named)]
    assert len(own) == 4
    assert not any("..." in line for line in own)


@no_gpu_here
def test_on_a_cpu_machine_the_doctor_says_fit_as_json_and_nothing_else(forks, tmp_path):
    result = forks.run("-m", "hotlap", "doctor", "--json", cwd=tmp_path)
    report = json.loads(result.stdout)
    assert result.returncode == 0
    assert result.stderr == ""
    assert (report["fit"], report["device"], report["gpus"]) == (True, "cpu", [])
    assert report["dtypes"]["fp32"] == {"support": "hardware", "kernel": "ran", "reason": "every CPU"}
    assert report["versions"]["torch"] == torch.__version__


def test_the_keys_of_the_json_are_stable():
    code, out = told("doctor", "--json")
    assert code == 0
    assert sorted(json.loads(out)) == [
        "architectures",
        "compiler",
        "cpu",
        "device",
        "disk",
        "dtypes",
        "fit",
        "gpus",
        "hidden_gpus",
        "memory",
        "pretend",
        "problems",
        "runtime",
        "shared_memory",
        "variables",
        "verdict",
        "versions",
    ]


@pytest.mark.parametrize("how", ["option", "variable"])
def test_pretending_a_t4_says_fp16_hardware_bf16_emulated_tf32_absent(how, monkeypatch):
    if how == "variable":
        monkeypatch.setenv("HOTLAP_PRETEND", "Tesla T4")
    code, out = told("doctor", "--json", *(["--pretend", "t4"] if how == "option" else []))
    report = json.loads(out)
    assert code == 0
    assert {name: fact["support"] for name, fact in report["dtypes"].items()} == {
        "fp32": "hardware",
        "tf32": "absent",
        "bf16": "emulated",
        "fp16": "hardware",
    }
    assert report["pretend"]["key"] == "t4"


@no_gpu_here
def test_requiring_a_gpu_where_there_is_none_is_exit_1():
    code, out = told("doctor", "--require-gpu")
    assert code == 1
    assert "stops      a GPU is required" in out
    assert out.rstrip().splitlines()[-1].endswith(".")
    assert "Not fit to train: a GPU is required" in out


def test_a_p100_without_kernels_is_exit_1_and_says_what_to_do(p100):
    code, out = told("doctor")
    flat = " ".join(out.split())
    assert code == 1
    assert "has no kernels for the Tesla P100-PCIE-16GB (sm_60), only for sm_75 sm_80" in flat
    assert "do: use another GPU (Turing or later)" in flat
    assert f"kernel failed: {NO_KERNEL}" in flat


def test_a_p100_without_kernels_is_told_as_json(p100):
    code, out = told("doctor", "--json")
    assert code == 1
    assert json.loads(out)["gpus"][0]["dtypes"]["fp16"]["kernel"] == "failed"


def test_the_text_fits_80_columns_and_has_no_colour():
    variables = {"CUDA_LAUNCH_BLOCKING": "1", "NUM_WORKERS": "999", "KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    result = CliRunner().invoke(app, ["doctor", "--pretend", "t4"], env=variables, color=True)
    assert max(len(line) for line in result.stdout.splitlines()) < 80
    assert "\x1b" not in result.stdout
    for word in ("CUDA_LAUNCH_BLOCKING=1", "NUM_WORKERS=999", "kaggle", "costs:", "do:"):
        assert word in result.stdout


def test_a_bad_number_of_workers_is_exit_1():
    result = CliRunner().invoke(app, ["doctor"], env={"NUM_WORKERS": "many"})
    assert result.exit_code == 1
    assert "NUM_WORKERS='many' is not a number of workers" in result.stdout


@pytest.mark.parametrize("command", ["doctor", "gpus"])
@pytest.mark.parametrize(("gpu", "words"), [("a100", "a100-40 or a100-80"), ("t44", "did you mean 't4'?")])
def test_an_unclear_gpu_is_one_line_on_stderr_and_exit_2(command, gpu, words):
    result = hotlap(command, "--json", "--pretend", gpu)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("hotlap: ")
    assert words in result.stderr


def test_a_read_only_folder_is_exit_1(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("hotlap.machine.disk.tempfile.NamedTemporaryFile", refuse)
    code, out = told("doctor")
    assert code == 1
    assert "Read-only file system" in out


def test_no_file_is_left_in_the_folder(tmp_path):
    told("doctor", "--json")
    assert list(tmp_path.iterdir()) == []


def test_gpus_lists_the_catalogue_with_the_pretended_one_marked():
    code, out = told("gpus", "--pretend", "T4")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith(">") and "Turing" in line] == ["t4"]
    for name in ("p100", "v100", "a10", "l4", "rtx3080", "rtx3090", "rtx4090", "a100-40", "h100", "h200"):
        assert any(line.split()[:1] == [name] or line.split()[1:2] == [name] for line in lines)
    assert "Sources:" in lines
    assert max(map(len, lines)) < 80


def test_gpus_as_json_gives_formats_and_sources():
    code, out = told("gpus", "--json")
    entries = {entry["key"]: entry for entry in json.loads(out)["gpus"]}
    assert code == 0
    assert entries["t4"]["dtypes"] == {
        "fp32": "hardware",
        "tf32": "absent",
        "bf16": "emulated",
        "fp16": "hardware",
    }
    assert entries["p100"]["flops"]["tf32"] is None
    assert all(entry["source"] for entry in entries.values())


def test_help_imports_neither_torch_nor_the_room():
    code = (
        "import sys; from hotlap.cli import app; from typer.testing import CliRunner; "
        "assert CliRunner().invoke(app, ['doctor', '--help']).exit_code == 0; "
        "print([name for name in sys.modules if name in ('torch', 'hotlap.machine', 'numpy')])"
    )
    result = python("-c", code)
    assert result.stdout.strip() == "[]"


def test_the_room_imports_no_torch():
    code = "import sys, hotlap.machine; print('torch' in sys.modules)"
    result = python("-c", code)
    assert result.stdout.strip() == "False"
