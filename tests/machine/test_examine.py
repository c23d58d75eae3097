"""The doctor on machines that are not here."""

from __future__ import annotations

import json
import os

import pytest

from hotlap.core.errors import MachineError
from hotlap.machine import examine, limits
from hotlap.machine.cuda import Cuda, Driver, GpuProcess
from hotlap.machine.disk import DiskSpeed

GIB = 1024**3
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"


def keys(report, severity=None):
    return [p.key for p in report.problems if severity is None or p.severity == severity]


def by_key(report, key):
    (problem,) = [p for p in report.problems if p.key == key]
    return problem


def gpus_fail(*broken):
    return lambda device, dtype: NO_KERNEL if device in broken else None


def test_a_healthy_gpu_machine_is_fit_and_every_format_has_run_a_kernel(world, card):
    ran = []
    report = examine(world=world(card("h200"), kernel=lambda d, t: ran.append((d, t))))
    assert report.fit
    assert report.device == "cuda:0"
    assert report.verdict == "fit to train on cuda:0 (NVIDIA H200)"
    assert [pair for pair in ran if pair[0] == "cuda:0"] == [
        ("cuda:0", "fp32"),
        ("cuda:0", "tf32"),
        ("cuda:0", "bf16"),
        ("cuda:0", "fp16"),
    ]
    assert {f["support"] for f in report.as_json()["dtypes"].values()} == {"hardware"}


def test_a_p100_without_kernels_in_this_build_is_found_out(world, card):
    report = examine(world=world(card("p100"), kernel=gpus_fail("cuda:0")))
    assert not report.fit
    problem = by_key(report, "gpu-kernel-failed")
    assert problem.severity == "stops"
    assert "Tesla P100-PCIE-16GB (sm_60)" in problem.what
    assert "sm_75" in problem.what
    assert "another GPU" in problem.do
    gpu = report.as_json()["gpus"][0]
    assert not gpu["works"]
    assert gpu["dtypes"]["fp32"] == {"support": "absent", "kernel": "failed", "reason": NO_KERNEL}
    assert report.verdict.startswith("not fit to train: torch 2.13.0+cu130 has no kernels")


def test_one_broken_gpu_beside_a_working_one_does_not_stop(world, card):
    report = examine(world=world(card("p100", 0), card("t4", 1), kernel=gpus_fail("cuda:0")))
    assert report.fit
    assert report.device == "cuda:1"
    assert by_key(report, "gpu-kernel-failed").severity == "slows"


def test_one_format_that_fails_is_told_and_not_used(world, card):
    broken = lambda device, dtype: "cuBLAS says no" if (device, dtype) == ("cuda:0", "bf16") else None  # noqa: E731
    report = examine(world=world(card("h200"), kernel=broken))
    assert report.fit
    assert report.facts["bf16"].support == "absent"
    assert "cuBLAS says no" in by_key(report, "dtype-failed").what


def test_pretending_a_t4_on_an_h200_leaves_the_t4s_formats_and_memory(world, card):
    report = examine("t4", world=world(card("h200")))
    told = report.as_json()
    assert {name: f["support"] for name, f in told["dtypes"].items()} == {
        "fp32": "hardware",
        "tf32": "absent",
        "bf16": "emulated",
        "fp16": "hardware",
    }
    assert told["gpus"][0]["usable_bytes"] == told["pretend"]["usable_bytes"] < 15 * GIB
    assert told["gpus"][0]["memory_bytes"] > 100 * GIB
    assert "acting as a Tesla T4" in report.verdict


def test_pretending_a_gpu_with_more_memory_than_is_here_is_told(world, card):
    assert "more memory" in by_key(examine("h200", world=world(card("t4"))), "pretence").what


def test_the_variable_pretends_too(world):
    report = examine(world=world(environ={"HOTLAP_PRETEND": "t4"}))
    assert report.machine.pretended.key == "t4"


def test_an_unknown_gpu_to_pretend_is_refused(world):
    with pytest.raises(MachineError, match="did you mean 't4'"):
        examine("t44", world=world())


def test_without_a_gpu_the_cpu_is_fit_unless_a_gpu_is_required(world):
    assert examine(world=world()).fit
    report = examine(require_gpu=True, world=world())
    assert not report.fit
    assert report.verdict.startswith("not fit to train: a GPU is required")


def test_pretending_does_not_satisfy_a_required_gpu(world):
    assert not examine("t4", require_gpu=True, world=world()).fit


def test_a_cpu_build_beside_a_gpu_stops(world, listed):
    report = examine(world=world(driver=Driver(gpus=(listed("t4"),)), cuda=Cuda(torch="2.13.0+cpu")))
    problem = by_key(report, "gpu-unusable")
    assert problem.severity == "stops"
    assert "install a CUDA build" in problem.do


def test_a_gpu_hidden_by_an_empty_variable_is_told_and_the_cpu_is_fit(world, listed):
    hidden = world(driver=Driver(gpus=(listed("t4"),)), environ={"CUDA_VISIBLE_DEVICES": ""})
    report = examine(world=hidden)
    assert report.fit
    assert report.device == "cpu"
    assert "CUDA_VISIBLE_DEVICES='' hides the Tesla T4" in by_key(report, "gpu-hidden").what
    assert report.as_json()["hidden_gpus"] == ["Tesla T4"]
    assert not examine(require_gpu=True, world=hidden).fit


def test_only_one_of_two_gpus_visible_is_told(world, card, listed):
    both = Driver(gpus=(listed("t4", 0), listed("t4", 1)))
    report = examine(world=world(card("t4", 1), driver=both, environ={"CUDA_VISIBLE_DEVICES": "1"}))
    assert "1 of 2 GPUs" in by_key(report, "gpu-hidden").what
    assert by_key(report, "gpu-hidden").severity == "note"
    unset = examine(world=world(card("t4", 1), driver=both))
    assert by_key(unset, "gpu-hidden").severity == "slows"


def test_memory_and_processes_are_those_of_the_same_card_however_cuda_numbers_it(world, card, listed):
    t4, h200 = card("t4", 1), card("h200", 0)
    busy = GpuProcess(pid=2**30, bytes=3 * GIB, name=None)
    driver = Driver(
        gpus=(
            listed("t4", 1, free_bytes=GIB, processes=(busy,)),
            listed("h200", 0, free_bytes=130 * GIB, processes=()),
        )
    )
    told = examine(world=world(h200, t4, driver=driver)).as_json()["gpus"]
    assert [(gpu["name"], gpu["free_bytes"]) for gpu in told] == [
        ("NVIDIA H200", 130 * GIB),
        ("Tesla T4", GIB),
    ]
    assert told[1]["processes"] == [{"pid": 2**30, "bytes": 3 * GIB, "name": None}]


def test_other_processes_on_the_gpu_are_named_and_this_one_is_not(world, card, listed):
    me = GpuProcess(pid=os.getpid(), bytes=GIB, name="python")
    other = GpuProcess(pid=4242, bytes=2 * GIB, name="jupyter")
    report = examine(world=world(card("t4"), driver=Driver(gpus=(listed("t4", processes=(me, other)),))))
    problem = by_key(report, "gpu-shared")
    assert "4242 (jupyter)" in problem.what
    assert "2.0 GiB" in problem.what
    alone = examine(world=world(card("t4"), driver=Driver(gpus=(listed("t4", processes=(me,)),))))
    assert "gpu-shared" not in keys(alone)


def test_this_process_is_not_taken_for_another_where_the_driver_gives_the_hosts_pids(world, card, listed):
    unknown = GpuProcess(pid=999999, bytes=GIB, name=None)
    driver = Driver(gpus=(listed("t4", processes=(unknown,)),))
    used = Cuda(torch="2.13.0+cu130", build="13.0", gpus=(card("t4"),), in_use=True)
    assert "gpu-shared" not in keys(examine(world=world(driver=driver, cuda=used)))
    fresh = examine(world=world(card("t4"), driver=driver))
    assert "999999" in by_key(fresh, "gpu-shared").what


def test_memory_taken_by_nobody_one_can_see_is_told(world, card, listed):
    driver = Driver(gpus=(listed("t4", free_bytes=4 * GIB),))
    assert "cannot be seen" in by_key(examine(world=world(card("t4"), driver=driver)), "gpu-shared").what


def test_without_nvml_everything_it_knew_is_unknown_and_the_gpu_still_fit(world, card):
    report = examine(world=world(card("t4"), driver=Driver(error="Driver Not Loaded")))
    gpu = report.as_json()["gpus"][0]
    assert report.fit
    assert (gpu["free_bytes"], gpu["utilisation"], gpu["processes"]) == (None, None, None)
    assert report.as_json()["versions"]["driver"] is None


def test_without_nvml_free_memory_comes_from_cuda(world, card):
    made = world(card("t4"), driver=Driver(error="gone"), free_bytes=lambda index: 5 * GIB)
    assert examine(world=made).as_json()["gpus"][0]["free_bytes"] == 5 * GIB


def test_torch_missing_stops_without_a_crash(world):
    report = examine(world=world(cuda=Cuda(error="No module named 'torch'")))
    assert not report.fit
    assert report.device is None
    assert "No module named 'torch'" in report.verdict
    json.dumps(report.as_json())


def test_a_cpu_that_cannot_compute_stops(world):
    report = examine(world=world(kernel=lambda device, dtype: "Illegal instruction"))
    assert (report.fit, report.device) == (False, None)


def test_a_folder_that_cannot_be_written_stops(world):
    report = examine(world=world(measure_disk=lambda path: DiskSpeed(error="Read-only file system")))
    assert not report.fit
    assert "Read-only file system" in report.verdict


@pytest.mark.parametrize(
    ("version", "severity"), [("2.4.1+cu121", "slows"), ("2.12.0", "note"), ("2.99.0a0+git", "note")]
)
def test_an_untested_torch_is_told_and_does_not_stop(world, card, version, severity):
    cuda = Cuda(torch=version, build="13.0", gpus=(card("t4"),))
    report = examine(world=world(cuda=cuda))
    assert report.fit
    assert by_key(report, "torch-untested").severity == severity


@pytest.mark.parametrize("version", ["2.11.0+cu128", "2.13.1"])
def test_a_tested_torch_is_not_told(world, card, version):
    assert "torch-untested" not in keys(examine(world=world(cuda=Cuda(torch=version, gpus=(card("t4"),)))))


def test_private_names_that_torch_lacks_are_listed_with_what_needs_them(world, card):
    missing = {"torch._C._one": "captured calls", "torch._C._other": "captured calls", "torch._third": "plans in fp16"}
    problem = by_key(examine(world=world(card("h200"), missing_names=lambda: missing)), "torch-private")
    assert problem.what == "torch lacks private names that hotlap uses: torch._C._one, torch._C._other, torch._third"
    assert problem.costs == "plans that need them fail: captured calls, plans in fp16"


def test_private_names_are_not_asked_for_where_torch_cannot_be_imported(world):
    def fail():
        raise AssertionError

    assert "torch-private" not in keys(examine(world=world(cuda=Cuda(error="no torch"), missing_names=fail)))


def test_a_missing_compiler_is_told(world):
    problem = by_key(examine(world=world(which=lambda name: None)), "compiler")
    assert "a C compiler" in problem.what
    assert "gcc" in problem.do


def test_cores_follow_the_cgroup_and_not_the_host(world, tmp_path):
    made = world(affinity=64)
    (made.root / "sys/fs/cgroup").mkdir(parents=True)
    (made.root / "sys/fs/cgroup/cpu.max").write_text("200000 100000")
    report = examine(world=made)
    assert report.as_json()["cpu"]["cores"] == 2
    assert "2 cores" in report.verdict


def test_stopping_problems_come_first(world):
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "NUM_WORKERS": "x", "TORCH_USE_CUDA_DSA": "1"}
    severities = [str(p.severity) for p in examine(world=world(environ=environ)).problems]
    assert severities == sorted(severities, key=["stops", "slows", "note"].index)
    assert severities[0] == "stops"


def test_a_kaggle_session_is_recognised(world, card):
    report = examine(world=world(card("t4"), environ={"KAGGLE_KERNEL_RUN_TYPE": "Batch"}))
    assert report.as_json()["runtime"]["name"] == "kaggle"
    assert report.as_json()["runtime"]["limit_s"] == 12 * 3600


def test_secrets_do_not_reach_the_report(world):
    report = examine(world=world(environ={"HF_TOKEN": "hf_s3cr3t", "NUM_WORKERS": "2"}))
    text = json.dumps(report.as_json())
    assert "hf_s3cr3t" not in text
    assert report.as_json()["variables"] == {"NUM_WORKERS": "2"}


def test_what_the_cpu_has_is_timed(world):
    here = world(pace=lambda dtype: 9.0)
    (here.root / "proc").mkdir()
    (here.root / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd asimdhp\n")
    fact = examine(world=here).cpu_facts["fp16"]
    assert (fact.support, fact.reason.split(",")[0]) == ("emulated", "asimdhp")


def test_other_work_on_the_cores_is_a_problem_that_slows(world):
    def busy(share):
        return [one for one in examine(world=world(busy_share=lambda: share)).problems if one.key == "busy"]

    assert busy(0.4) == []
    (problem,) = busy(0.75)
    assert "other work keeps 75%" in problem.what
    assert problem.severity == "slows"


def test_timings_on_a_busy_machine_come_with_a_warning(monkeypatch):
    shown = []
    for share in (0.1, 0.9):
        monkeypatch.setattr(limits, "busy_share", lambda share=share: share)
        limits.warn_if_busy(shown.append)
    (line,) = shown
    assert line.startswith("warning    other work keeps 90% of this machine's ")
