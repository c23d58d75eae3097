"""Kaggle, Colab and TPUs, told by variables and files."""

from __future__ import annotations

import pytest

from hotlap.machine.runtimes import read_runtime, runtime_problems


def nothing(name):
    return False


def keys(problems):
    return [problem.key for problem in problems]


def test_an_ordinary_machine_is_none(tmp_path):
    assert read_runtime({"PATH": "/bin"}, tmp_path, nothing) is None


def test_kaggle_is_told_by_its_variable_and_by_its_folder(tmp_path):
    by_variable = read_runtime({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, tmp_path, nothing)
    (tmp_path / "kaggle/working").mkdir(parents=True)
    by_folder = read_runtime({}, tmp_path, nothing)
    assert by_variable == by_folder
    assert (by_folder.name, by_folder.limit_s, by_folder.tpu) == ("kaggle", 12 * 3600, False)
    assert "as published, may change" in by_folder.limit_source
    assert "T4 x2" in by_folder.choose


def test_kaggle_is_not_taken_for_colab_though_its_image_carries_colabs_variables(tmp_path):
    environ = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "release-colab_2026"}
    assert read_runtime(environ, tmp_path, nothing).name == "kaggle"


@pytest.mark.parametrize("environ", [{"COLAB_RELEASE_TAG": "x"}, {"COLAB_GPU": "1"}])
def test_colab_is_told_by_its_variables(tmp_path, environ):
    found = read_runtime(environ, tmp_path, nothing)
    assert (found.name, found.limit_s) == ("colab", 12 * 3600)
    assert "may change" in found.limit_source


def test_colab_is_told_by_its_module(tmp_path):
    assert read_runtime({}, tmp_path, lambda name: name == "google.colab").name == "colab"


@pytest.mark.parametrize("variable", ["TPU_NAME", "COLAB_TPU_ADDR", "TPU_WORKER_ID"])
def test_a_tpu_is_told_by_its_variables(tmp_path, variable):
    found = read_runtime({variable: "0"}, tmp_path, nothing)
    assert (found.name, found.tpu) == ("tpu", True)


def test_a_tpu_is_told_by_its_device_files(tmp_path):
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/0").touch()
    assert read_runtime({}, tmp_path, nothing) is None  # vfio alone may be any device
    assert read_runtime({}, tmp_path, lambda name: name == "libtpu").tpu
    (tmp_path / "dev/accel0").touch()
    assert read_runtime({}, tmp_path, nothing).tpu


def test_a_kaggle_tpu_session_is_shorter(tmp_path):
    found = read_runtime({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "TPU_WORKER_ID": "0"}, tmp_path, nothing)
    assert (found.tpu, found.limit_s) == (True, 9 * 3600)


def test_a_tpu_runtime_is_told_that_hotlap_trains_on_the_cpu_there(tmp_path):
    found = read_runtime({"COLAB_GPU": "0", "TPU_NAME": "local"}, tmp_path, nothing)
    problem = runtime_problems(found, [], working_gpu=False)[0]
    assert problem.key == "tpu-only"
    assert "trains on the CPU here" in problem.what
    assert "T4" in problem.do


def test_a_session_without_an_accelerator_is_told_which_to_choose(tmp_path):
    found = read_runtime({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, tmp_path, nothing)
    first = runtime_problems(found, [], working_gpu=False)[0]
    assert (first.key, "T4 x2" in first.do) == ("no-accelerator", True)


def test_a_p100_on_kaggle_is_advised_against_and_a_t4_is_not(tmp_path):
    found = read_runtime({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, tmp_path, nothing)
    assert "kaggle-p100" in keys(runtime_problems(found, ["Tesla P100-PCIE-16GB"], working_gpu=False))
    assert keys(runtime_problems(found, ["Tesla T4"], working_gpu=True)) == ["session-limit"]
