"""What bounds a training now, from planted measurements: the step, what is between steps, or somebody else."""

import pytest

from hotlap.core.plan import Feed, Plan
from hotlap.machine.catalogue import find_gpu
from hotlap.monitor.bound import BOUNDS, diagnose
from hotlap.monitor.calibration import Calibration
from hotlap.monitor.census import Census
from hotlap.monitor.verdict import ANSWERS, Seen, headway, verdict

GPU = Calibration(
    matmul_flops={"fp32": 5e13, "bf16": 8e14}, copy_bytes=4e12, cache_bytes=5e7, pinned_bytes=5e10,
    pageable_bytes=1e10, launch_s=4e-6, sync_s=5e-6,
)  # fmt: skip
OWN, TUNED, HELD, CAPTURED = (
    Plan(), Plan().but(precision="bf16"), Plan().but(kind="resident"), Plan().but(mode="captured"),
)  # fmt: skip


def diagnosed(**figures):
    counted = Census(operations=50, flops=2 * 10**12, bytes=10**10)
    return diagnose(
        **{"step_s": 0.05, "feed_s": 0.0, "issue_s": 1e-3, "census": counted, "calibration": GPU, **figures}
    )


def sample(*, host=None, **gpu):
    usual = {"busy": 0.98, "sm_mhz": 1900.0, "most_sm_mhz": 1980.0, "throttled": []}
    return {"at": 1.0, "host": host or {}, "gpus": [{**usual, **gpu}]}


def seen(**figures):
    usual = {"seconds": 10.0, "steps": 200, "on_gpu": True, "samples": [sample()], "plan": OWN}
    return verdict(Seen(**{**usual, **figures}))


@pytest.mark.parametrize(
    ("bound", "why", "found"),
    [
        ("feeding", "the host waits for batches 70 % of the time", seen(feeding_s=7.0)),
        ("evaluation", "evaluations take 80 % of the time", seen(evaluation_s=8.0, feeding_s=1.0)),
        ("evaluation", "evaluations take 100 % of the time", seen(evaluation_s=12.0, steps=0)),
        ("saving", "checkpoints hold training up for 60 % of the time", seen(saving_s=6.0)),
        (
            "another process",
            "another process (pid 20, 30) computes on the GPU 45 % of the time and holds 2.0 GiB",
            seen(samples=[sample(others=2, others_busy=0.45, others_bytes=2 * 1024**3, other_pids=[20, 30])]),
        ),
        # It is the first thing to say: everything else is measured beside it.
        ("another process", "another process computes on the GPU 30 % of the time",
         seen(feeding_s=9.0, samples=[sample(others_busy=0.3)])),
        (
            "throttling",
            "the GPU runs at 1,200 of 1,980 MHz (heat, 88 °C, 310 W)",
            seen(samples=[sample(sm_mhz=1200.0, throttled=["heat"], temperature_c=88.0, power_w=310.0)]),
        ),
        ("launching", "the GPU has nothing to do 75 % of the time, and batches come fast enough",
         seen(samples=[sample(busy=0.25)])),
        # Waits were counted before the data was held; they stay.
        ("synchronising", "the GPU has nothing to do 75 % of the time, and the host waits for it 3 times in a step",
         seen(samples=[sample(busy=0.25)], diagnosed=(diagnosed(waits=3), OWN), plan=HELD)),
        ("launching", "the GPU has nothing to do 75 % of the time, and batches come fast enough",
         seen(samples=[sample(busy=0.25)], diagnosed=(diagnosed(waits=3), OWN), plan=CAPTURED)),
        ("computing", "the GPU computes 98 % of the time", seen()),
        ("arithmetic", "its products and convolutions take about 40 of 50 ms", seen(diagnosed=(diagnosed(), OWN))),
        # The step that was looked at had another plan: now the device has 2.5 ms of arithmetic and 2.5 of traffic.
        ("memory traffic", "it takes about 2.5 ms of 50 ms", seen(diagnosed=(diagnosed(), OWN), plan=TUNED)),
        ("synchronising", "3 waits for the device in a step cost 1.01 of 2 ms",
         seen(diagnosed=(diagnosed(step_s=2e-3, waits=3), OWN))),
        ("pageable copies", "copying a batch from memory that is not pinned takes 30 of 50 ms",
         seen(diagnosed=(diagnosed(issue_s=0.05, pageable_bytes=3e8, census=Census(operations=50, flops=1, bytes=1)),
                         OWN))),
    ],
)  # fmt: skip
def test_each_planted_run_gets_its_verdict_with_figures_and_an_answer(bound, why, found):
    assert (found.bound, found.why) == (bound, why)
    assert found.line == f"bound by {bound}: {why}"
    assert found.answer
    assert 0 <= found.share <= 1


@pytest.mark.parametrize(
    "samples",
    [
        [sample(others=1, others_bytes=2**30)],  # it holds memory, and computes nothing
        [sample(others=1, others_busy=0.1)],
        [sample(sm_mhz=1800.0, throttled=["power limit"])],  # as any GPU at full load
        [sample(sm_mhz=900.0, throttled=["heat"]), sample(), sample()],  # for a moment
        [sample(sm_mhz=300.0, throttled=["power limit"], busy=0.0)],
        [sample(sm_mhz=None, throttled=["heat"])],
        [],
    ],
)
def test_what_holds_nothing_up_is_not_named(samples):
    assert seen(samples=samples).bound not in ("another process", "throttling")


def test_nothing_is_said_before_anything_was_seen():
    assert seen(seconds=0.0) is None
    assert seen(steps=0) is None


def on_cpu(cores_busy, own_cores, plan=OWN, **figures):
    host = {"cores": 4, "cores_busy": cores_busy, "own_cores": own_cores}
    return seen(on_gpu=False, samples=[{"at": 1.0, "host": host}], plan=plan, **figures)


def test_on_a_cpu_other_work_is_named_where_no_core_is_free():
    found = on_cpu(4.0, 1.5)
    assert found.line == "bound by another process: other work takes 2.5 of 4 cores, and none is free"
    assert on_cpu(3.0, 1.5).bound == "computing"
    assert on_cpu(4.0, 3.5).bound == "computing"
    assert on_cpu(4.0, 1.5, feeding_s=7.0).bound == "feeding"
    # Its own workers are other processes too.
    assert on_cpu(4.0, 1.5, OWN.with_feed(Feed(kind="loader", workers=2))).bound == "computing"


def test_everything_that_can_bound_a_training_has_an_answer():
    assert set(BOUNDS) < set(ANSWERS)


def test_headway_is_measured_against_the_published_peak_and_against_the_floor():
    found = headway(diagnosed(), 0.01, "bf16", find_gpu("h200"))
    assert found.flops_per_s == pytest.approx(2e14)
    assert found.mfu == pytest.approx(2e14 / 989.5e12)
    assert found.floor_s == pytest.approx(2.5e-3)
    assert found.line == "200 TFLOPS · 20 % of the peak (MFU) · 4x its floor (2.5 ms of 10 ms)"


def test_without_a_catalogue_entry_or_a_floor_headway_says_what_is_left():
    assert headway(diagnosed(), 0.01, "fp16", None).line == "200 TFLOPS"
    assert headway(diagnosed(), 0.01, "fp16", None).mfu is None
