"""Predicted times follow from counted work and published rates: nothing else, and always more for more work."""

import random
from dataclasses import fields, replace

import pytest

from hotlap.machine.catalogue import CATALOGUE, find_gpu
from hotlap.machine.prediction import AS_IT_IS, AT_BEST, Error, Factors, Work, as_it_is_s, at_best_s, best_format

T4, A100, H200 = map(find_gpu, ("t4", "a100-80", "h200"))
NOTHING = Work(operations=0, launches=0, flops={}, bytes=0, narrow_bytes=0)
LARGE = Work(
    operations=200, launches=190, flops={"tf32": 2e12, "fp32": 1e11}, bytes=4e10, narrow_bytes=2e10,
    step_bytes=1e9, least_step_bytes=4e8,
)  # fmt: skip
SMALL = Work(operations=200, launches=190, flops={"fp32": 1e6}, bytes=1e6, narrow_bytes=5e5)
HALF = Factors(arithmetic=0.5, traffic=0.25, launch_s=1e-6, issue_s=1e-5, begin_s=1e-3)


def test_arithmetic_traffic_and_launches_add_up_on_planted_work():
    asked = replace(NOTHING, flops={"fp16": T4.fp16_flops, "fp32": T4.fp32_flops / 2})
    assert as_it_is_s(asked, T4, HALF) == pytest.approx(1.5 / 0.5)
    asked = replace(asked, bytes=T4.bandwidth_bytes_per_s, step_bytes=T4.bandwidth_bytes_per_s)
    assert as_it_is_s(asked, T4, HALF) == pytest.approx(3 + 2 / 0.25)
    asked = replace(asked, operations=1e6)
    assert as_it_is_s(asked, T4, HALF) == pytest.approx(3 + 8 + 1)
    # At best all arithmetic is in 16 bits, half of the bytes move, and the optimizer moves the least.
    asked = replace(asked, narrow_bytes=asked.bytes / 2, least_step_bytes=asked.step_bytes / 4, launches=1e6 - 1)
    whole = asked.total_flops / T4.fp16_flops
    assert at_best_s(asked, T4, HALF) == pytest.approx(whole / 0.5 + 0.75 / 0.25 + 1)


def test_a_small_update_takes_as_long_as_the_host_takes_to_issue_it():
    host_s = AS_IT_IS.begin_s + SMALL.operations * AS_IT_IS.issue_s
    assert [as_it_is_s(SMALL, gpu) for gpu in CATALOGUE] == [host_s] * len(CATALOGUE)
    assert at_best_s(SMALL, H200) < host_s / 2


def test_a_format_that_the_hardware_lacks_counts_at_the_fp32_rate():
    for name in ("tf32", "bf16", "fp64"):
        lacking, plain = (replace(LARGE, flops={one: 1e13}) for one in (name, "fp32"))
        assert as_it_is_s(lacking, T4) == as_it_is_s(plain, T4)
    assert as_it_is_s(replace(LARGE, flops={"tf32": 1e13}), A100) < as_it_is_s(
        replace(LARGE, flops={"fp32": 1e13}), A100
    )


def test_a_training_in_16_bits_already_moves_no_fewer_bytes_at_best():
    narrow = replace(LARGE, flops={"bf16": 2.1e12}, bytes=2e10)
    assert at_best_s(narrow, H200) == at_best_s(LARGE, H200)


@pytest.mark.parametrize("predicted", [as_it_is_s, at_best_s])
def test_more_work_never_takes_less_time_on_any_gpu(predicted):
    drawn = random.Random(0)
    for _ in range(200):
        work = Work(
            operations=drawn.randrange(2000),
            launches=drawn.randrange(2000),
            flops={name: 10 ** drawn.uniform(6, 14) for name in ("fp32", "tf32", "bf16")},
            **{f.name: 10 ** drawn.uniform(5, 12) for f in fields(Work) if "bytes" in f.name},
        )
        name = drawn.choice([f.name for f in fields(Work)])
        if name == "flops":
            more = replace(work, flops={**work.flops, "fp32": 2 * work.flops["fp32"]})
        else:
            more = replace(work, **{name: 2 * getattr(work, name)})
        for gpu in CATALOGUE:
            assert predicted(more, gpu) >= predicted(work, gpu)


@pytest.mark.parametrize("predicted", [as_it_is_s, at_best_s])
@pytest.mark.parametrize(
    "rising",
    [("v100", "a100-40", "a100-80", "h100", "h200"), ("rtx3080", "rtx3090", "rtx4090"), ("t4", "a10", "a100-40")],
)
def test_large_work_is_faster_on_larger_gpus(predicted, rising):
    times = [predicted(LARGE, find_gpu(key)) for key in rising]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)


def test_each_gpu_is_aimed_at_in_the_format_that_its_hardware_has():
    chosen = {gpu.key: best_format(gpu) for gpu in CATALOGUE}
    assert {key for key, name in chosen.items() if name == "fp32"} == {"p100"}
    assert {key for key, name in chosen.items() if name == "fp16"} == {"v100", "t4"}


def test_an_error_is_the_factor_within_which_all_measured_times_were():
    assert Error(low=0.5, high=1.2, works=3).within == 2
    assert Error(low=0.9, high=1.5, works=3).within == 1.5
    assert AT_BEST.issue_s == 0
