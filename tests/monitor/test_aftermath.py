"""`hotlap diagnose RUN`: what the files of a run tell about what went wrong, with its cost and what to type next."""

import dataclasses
import json
import signal
import time

import finished_runs
import pytest

from hotlap.core.errors import StoreError
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Feed, Plan
from hotlap.monitor.aftermath import diagnose_run
from hotlap.store.run_folder import RunFolder
from hotlap.store.telemetry import write_live

PLAN = Plan(feed=Feed(kind="loader"))
ENDED = {"stopped": "after all epochs", "steps": 1000, "updates": 1000, "train_s": 100.0, "evaluation_s": 1.0}
KILLED = """
import os, signal, sys
sys.path.insert(0, {support!r})
import torch, finished_runs, hotlap

class Deadly(torch.nn.CrossEntropyLoss):
    calls = 0

    def forward(self, output, target):
        Deadly.calls += 1
        if Deadly.calls == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(output, target)

hotlap.fit(finished_runs.small_job(loss=Deadly()), plan="off", out="run", save_every=8)
"""


@pytest.fixture
def made(tmp_path):
    """Makes the folder of a run that took 100 s, with the files that a test names."""

    def make(*entries, script=False, samples=(), history=(), live=None, ended=ENDED, environment=None, job=None):
        folder = RunFolder.create(tmp_path / "run")
        ledger = Ledger()
        for entry in ({"what": "start", "outcome": "chosen"}, *entries):
            ledger.record(Entry(**{"step": 0, "plan": PLAN} | entry))
        folder.write_ledger(ledger)
        words = ["hotlap", "run", "train.py", "--epochs", "3"] if script else ["train.py"]
        folder.write_started({"words": words, **({"command": "run"} if script else {})})
        folder.write_environment({"gpus": [], "cpu": {"cores": 4}, **(environment or {}), "job": job or {}})
        folder.write_metrics(list(history))
        if script:
            folder.write_result({"training_s": 100.0, "device": "cuda:0"})
        else:
            (folder.path / "record.json").write_text(json.dumps({"ended": ended}))
        lines = "".join(json.dumps({"at": 1.0 + at, "step": 10 * at, **one}) + "\n" for at, one in enumerate(samples))
        (folder.path / "samples.jsonl").write_text(lines)
        if live is not None:
            write_live(folder.path, {"pid": 1, "at": 1.0, "ended": True, **live})
        folder.write_plan(PLAN)
        return {one.name: one for one in diagnose_run(folder.path).found}

    return make


def test_a_run_that_went_well_has_no_findings(made, tmp_path):
    history = [{"step": at, "train_loss": 1 / at, "valid_loss": 1 / at} for at in (1, 2, 3)]
    assert made(history=history, job={"valid": "tuple"}) == {}
    found = diagnose_run(tmp_path / "run")
    assert found.summary() == "run: nothing wrong found"
    assert found.over == "the 1 min 40 s of training"


def test_a_run_that_was_killed_says_how_to_go_on(forks, tmp_path):
    support = finished_runs.__file__.rpartition("/")[0]
    (tmp_path / "train.py").write_text(KILLED.format(support=support))
    done = forks.run("train.py", cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    found = diagnose_run(tmp_path / "run").found[0]
    assert found.name == "stopped"
    assert found.change == f"`hotlap resume {tmp_path / 'run'}`"


def test_a_script_that_was_killed_is_started_again(made):
    found = made(script=True, live={"ended": False, "step": 40, "steps": 100, "pid": 2**30, "at": time.time()})
    assert found["stopped"].evidence == ("at step 40 of 100",)
    assert found["stopped"].change == "`hotlap run train.py --epochs 3` starts it again"


@pytest.mark.parametrize(
    ("what", "why", "name", "change"),
    [
        ("checkpoint 0 → 2", "out of memory: 10 GiB", "out-of-memory", "hotlap memory train.py"),
        ("workers died", "worker 3 was killed; 2 workers from step 9 on", "workers-die", "hotlap workers train.py"),
        ("weights not finite", "back to step 40", "not-finite", "lower learning rate"),
        ("memory grows", "by 3 MiB a step at train.py:9", "memory-grows", "hotlap memory train.py"),
        ("data changed", "labels were written to", "data-changed", "keep the dataset"),
    ],
)
def test_faults_that_were_survived_are_findings_with_their_reason(made, what, why, name, change):
    found = made(*({"what": what, "why": why, "outcome": "fault", "step": step} for step in (9, 20)))
    assert found[name].cost == "may end the run"
    assert found[name].evidence[0] == f"step 9: {why}"
    assert "2 times" in found[name].what
    assert change in found[name].change


@pytest.mark.parametrize("by", ["feeding", "launching", "synchronising", "pageable copies", "saving"])
def test_what_bound_the_run_at_its_end_costs_its_share(made, by):
    found = made(live={"bound": {"by": by, "why": "it waits", "share": 0.6}})
    assert found[{"pageable copies": "copies"}.get(by, by)].cost_s == pytest.approx(60)
    assert list(found.values())[0].evidence == ("at the end it waits",)  # noqa: RUF015


def test_what_cannot_be_mended_is_no_finding(made, tmp_path):
    assert made(live={"bound": {"by": "arithmetic", "why": "it takes 9 of 10 ms", "share": 0.9}}) == {}
    assert diagnose_run(tmp_path / "run").bound == "bound by arithmetic at the end: it takes 9 of 10 ms"


def test_another_process_costs_what_it_took_over_the_whole_run(made):
    busy = {"host": {"cores": 4, "cores_busy": 4.0, "own_cores": 2.0}}
    calm = {"host": {"cores": 4, "cores_busy": 2.0, "own_cores": 2.0}}
    found = made(samples=[busy] * 5 + [calm] * 5)
    assert found["another-process"].cost_s == pytest.approx(25)
    assert "in 5 of 10 samples" in found["another-process"].evidence[0]


def test_a_condition_of_the_host_costs_what_the_ledger_says_and_counts_once(made):
    busy = {"host": {"cores": 4, "cores_busy": 4.0, "own_cores": 2.0}}
    begun = {"what": "another process", "outcome": "fault", "why": "for 10 s", "figures": {"lost_s": 3.0}}
    over = begun | {"what": "another process is over", "figures": {"lost_s": 7.0}}
    assert made(begun, over, over, samples=[busy] * 9)["another-process"].cost_s == 14.0


def test_a_condition_of_the_host_that_cost_nothing_is_no_finding(made):
    busy = {"host": {"cores": 4, "cores_busy": 4.0, "own_cores": 2.0}}
    over = {"what": "another process lasted to the end", "outcome": "fault", "why": "x", "figures": {"lost_s": 0.0}}
    assert made(over, samples=[busy] * 9) == {}


def test_a_throttled_gpu_costs_the_clocks_that_it_lacked(made):
    hot = {"gpus": [{"busy": 0.9, "sm_mhz": 1000.0, "most_sm_mhz": 2000.0, "throttled": ["heat"]}]}
    found = made(samples=[hot] * 10, script=True)
    assert found["throttling"].cost_s == pytest.approx(50)
    assert "heat" in found["throttling"].evidence[0]


def test_a_gpu_that_was_idle_costs_the_time_in_which_it_was(made):
    found = made(samples=[{"gpus": [{"busy": 0.2}]}] * 10, live={"device": "cuda:0"})
    assert found["gpu-idle"].cost_s == pytest.approx(80)
    assert "hotlap diagnose train.py" in found["gpu-idle"].change


def test_memory_that_grew_is_found_with_its_pace(made):
    found = made(samples=[{"host": {"own_ram_bytes": 2**30 + at * 2**27}} for at in range(40)])
    assert found["memory-grows"].evidence[1] == "12.8 MiB a step"
    assert found["memory-grows"].cost == "may end the run"


def test_memory_that_only_loads_at_the_start_does_not_grow(made):
    held = [at * 2**27 for at in range(10)] + [10 * 2**27] * 30
    assert made(samples=[{"host": {"own_ram_bytes": one}} for one in held]) == {}


def test_evaluations_cost_what_is_beyond_a_tenth(made):
    history = [{"step": 100 * at, "train_loss": 1 / at} for at in range(1, 11)]
    found = made(history=history, ended={**ENDED, "evaluation_s": 50.0})
    assert found["evaluation"].cost_s == pytest.approx(40)
    assert found["evaluation"].change == "evaluate less often: eval_every=500"


def test_steps_that_became_slower_cost_what_they_took_more(made):
    took = [1.0] * 8 + [3.0] * 4
    history = [{"step": 100 * at, "elapsed_s": sum(took[:at]), "train_loss": 1 / at} for at in range(1, 13)]
    found = made(history=history)
    assert found["slower"].evidence == ("10 ms a step early, 30 ms at the end",)
    assert found["slower"].cost_s == pytest.approx(8)


def test_tuning_that_lost_time_costs_its_loss(made):
    figures = {"step_s": 0.1, "cost_s": 9.0, "saved_s": -6.0}
    found = made({"what": "tuned", "outcome": "chosen", "figures": figures})
    assert found["tuning"].cost_s == 6.0
    assert "--plan" in found["tuning"].change


def test_moves_that_were_too_dear_to_try_name_the_option_that_tries_them(made):
    move = {
        "what": "torch.compile",
        "outcome": "not tried",
        "why": "estimated to take 53 s",
        "figures": {"needs_s": 53},
    }
    found = made(move, script=True)
    assert found["not-tried"].change == "`hotlap run --tune-seconds 67 train.py --epochs 3`"
    assert found["not-tried"].evidence == ("torch.compile: estimated to take 53 s",)


def test_moves_that_were_rejected_are_told_with_their_reason(made, tmp_path):
    made(
        {"what": "baseline", "outcome": "chosen", "figures": {"step_s": 0.1}},
        {"what": "16-bit precision", "outcome": "rejected", "why": "slower"},
        {"what": "workers that fetch ahead", "outcome": "not tried", "why": "at most 1.01x"},
    )
    notes = diagnose_run(tmp_path / "run").notes
    assert notes == (
        "rejected: 16-bit precision (slower)",
        "not tried: workers that fetch ahead (at most 1.01x)",
    )


def test_a_gpu_that_was_left_aside_is_found(made):
    found = made(environment={"gpus": [{"name": "NVIDIA T4"}]}, live={"device": "cpu"})
    assert found["on-cpu"].evidence == ("NVIDIA T4",)


def test_one_of_two_gpus_is_found(made):
    found = made(environment={"gpus": [{"name": "NVIDIA T4"}] * 2}, script=True)
    assert found["one-gpu"].what == "one of 2 GPUs worked"


def test_a_harmful_variable_comes_last_since_its_seconds_are_not_known(made):
    found = made(
        environment={"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, live={"bound": {"by": "feeding", "share": 0.5}}
    )
    assert list(found) == ["feeding", "variables"]
    assert "CUDA_LAUNCH_BLOCKING=1" in found["variables"].evidence[0]


def test_a_loss_that_did_not_fall_costs_the_whole_training(tmp_path):
    finished_runs.fitted(tmp_path / "run", lr=0.0)
    found = {one.name: one for one in diagnose_run(tmp_path / "run").found}
    assert found["not-learning"].cost_s > 0


def test_training_on_after_the_best_evaluation_costs_the_time_since(made):
    losses = [(10.0, 0.5), (20.0, 0.3), (60.0, 0.6)]
    history = [{"step": at, "elapsed_s": at, "valid_loss": loss, "train_loss": 1 / at} for at, loss in losses]
    assert made(history=history)["overfitting"].cost_s == pytest.approx(40)


def test_skipped_updates_cost_their_share(made):
    assert made(ended={**ENDED, "updates": 900})["skipped-steps"].cost_s == pytest.approx(10)


def test_findings_of_many_trainings_are_one_with_the_sum_of_their_costs(tmp_path):
    for number in range(4):
        finished_runs.fitted(tmp_path / "many" / f"{number:04d}", lr=0.0, epochs=2)
    (found,) = (one for one in diagnose_run(tmp_path / "many").found if one.name == "not-learning")
    assert found.evidence[0].startswith("job 1: ")
    assert found.evidence[-1] == "and 1 trainings more"


def test_what_strangers_write_into_a_run_is_harmless(made, tmp_path):
    found = made(live={"bound": {"by": "feeding\x1b[31m", "why": ["x"] * 9, "share": "much"}, "device": 3, "step": "x"})
    text = diagnose_run(tmp_path / "run").summary()
    assert "\x1b" not in text
    assert found == {}
    for file in ("record.json", "environment.json", "started.json", "live.json", "samples.jsonl", "metrics.jsonl"):
        (tmp_path / "run" / file).write_text('{"ended": [[[1e999]]], "gpus": 3, "at": {}, "words": 5, "cpu": 1}\n')
        json.dumps(diagnose_run(tmp_path / "run").to_dict())


def test_a_folder_that_is_no_run_gets_one_line(tmp_path):
    with pytest.raises(StoreError, match="is not a run folder"):
        diagnose_run(tmp_path)


def test_a_finding_names_what_it_costs_where_seconds_are_not_known():
    from hotlap.monitor.findings import Finding, Findings

    dear = Finding(name="dear", what="it costs", cost_s=5.0)
    fatal, vague = (
        dataclasses.replace(dear, name="fatal", cost_s=None),
        Finding(name="vague", what="x", unpriced="trust"),
    )
    found = Findings(name="run", found=(vague, dear, fatal))
    assert [one.name for one in found.found] == ["fatal", "dear", "vague"]
    assert "cost   trust" in found.summary()
