"""The end of a session, by a variable, by Slurm and by the rules of hosted platforms."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta

import pytest

from hotlap.core.errors import MachineError
from hotlap.machine.runtimes import read_runtime
from hotlap.machine.session_end import ASKING_S, GUESSED_S, KNOWN_S, SHARE, _own_start_s, session_end

HOUR = 3600.0


def end_of(environ, runtime=None, age_s=None):
    return session_end(environ, lambda: runtime, lambda: None if age_s is None else time.time() - age_s)


def test_without_a_sign_of_a_session_no_end_is_known():
    assert end_of({}) is None
    assert end_of({"SLURM_JOB_ID": "no such command answers"}) is None


def test_the_variable_takes_a_duration_a_time_of_day_a_date_and_off():
    now = time.time()
    assert 0 < end_of({"HOTLAP_SESSION_ENDS": "3h 30m"}).left_s <= 3.5 * HOUR
    soon = datetime.now(UTC).astimezone() + timedelta(hours=2)
    of_day = end_of({"HOTLAP_SESSION_ENDS": f"{soon:%H:%M}"})
    assert 1.9 * HOUR < of_day.left_s <= 2 * HOUR + 1
    before = datetime.now(UTC).astimezone() - timedelta(hours=12)
    assert 11.9 * HOUR < end_of({"HOTLAP_SESSION_ENDS": f"{before:%H:%M}"}).left_s < 12.1 * HOUR
    assert abs(end_of({"HOTLAP_SESSION_ENDS": f"{soon:%Y-%m-%dT%H:%M:%S}"}).at_s - now - 2 * HOUR) < 60
    assert end_of({"HOTLAP_SESSION_ENDS": "2026-11-19T17:40:00+00:00"}).at_s == 1795110000.0
    slurm = {"SLURM_JOB_END_TIME": str(now + 99)}
    assert end_of({"HOTLAP_SESSION_ENDS": "off", **slurm}) is None
    with pytest.raises(MachineError, match=r"HOTLAP_SESSION_ENDS='soon' is no time: give a time of day \(17:40\)"):
        end_of({"HOTLAP_SESSION_ENDS": "soon"})


def test_slurm_names_the_end_in_a_variable_and_the_line_says_when_that_is():
    at = datetime.now(UTC).astimezone().replace(hour=12, minute=5, second=0, microsecond=0)
    at += timedelta(days=at.timestamp() < time.time() + 60)
    end = end_of({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(at.timestamp()))})
    assert "12:05 by Slurm's limit, in " in end.line
    assert "sbatch" in end.then
    assert end.margin_s == KNOWN_S
    short = end_of({"HOTLAP_SESSION_ENDS": str(time.time() - _own_start_s() + 100)})
    assert short.margin_s == pytest.approx(SHARE * 100, rel=0.1)


@pytest.mark.parametrize("command", ["squeue", "scontrol"])
def test_an_older_slurm_is_asked_and_an_answer_that_never_comes_is_not_waited_for(command, tmp_path, monkeypatch):
    at = datetime.now(UTC).astimezone().replace(microsecond=0) + timedelta(hours=1)
    answer = {"squeue": f"{at:%Y-%m-%dT%H:%M:%S}", "scontrol": f"JobId=9 EndTime={at:%Y-%m-%dT%H:%M:%S} Deadline=N/A"}
    (tmp_path / command).write_text(f"#!/bin/sh\necho '{answer[command]}'\n")
    (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert end_of({"SLURM_JOB_ID": f"9{command}"}).at_s == at.timestamp()
    (tmp_path / command).write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    monkeypatch.setattr("hotlap.machine.session_end.ASKING_S", 0.05)
    assert end_of({"SLURM_JOB_ID": f"10{command}"}) is None
    (tmp_path / command).write_text("#!/bin/sh\necho UNLIMITED EndTime=Unknown\n")
    monkeypatch.setattr("hotlap.machine.session_end.ASKING_S", ASKING_S)
    assert end_of({"SLURM_JOB_ID": f"11{command}"}) is None


def hosted(environ, tmp_path):
    return read_runtime(environ, tmp_path, lambda name: False)


def test_kaggle_ends_by_its_rules_counted_from_the_first_process(tmp_path):
    kaggle = {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    end = end_of({}, hosted(kaggle, tmp_path), age_s=HOUR)
    assert end.left_s == pytest.approx(11 * HOUR, abs=60)
    assert (end.margin_s, end.by) == (GUESSED_S, "Kaggle's 12 hours")
    assert "hotlap pack RUN --checkpoints" in end.then
    tpu = hosted({**kaggle, "TPU_WORKER_ID": "0"}, tmp_path)
    assert end_of({}, tpu, age_s=HOUR).left_s == pytest.approx(8 * HOUR, abs=60)


def test_a_session_on_colab_that_outlasts_12_hours_is_one_of_24(tmp_path):
    colab = hosted({"COLAB_GPU": "1"}, tmp_path)
    assert end_of({}, colab, age_s=HOUR).by == "Colab's 12 hours"
    assert end_of({}, colab, age_s=13 * HOUR).left_s == pytest.approx(11 * HOUR, abs=60)


@pytest.mark.parametrize("age_s", [None, -HOUR, 400 * HOUR])
def test_where_the_first_process_cannot_be_that_of_the_session_no_end_is_known(age_s, tmp_path):
    assert end_of({}, hosted({"COLAB_GPU": "1"}, tmp_path), age_s=age_s) is None


def test_a_fork_counts_a_duration_from_the_same_moment():
    first = end_of({"HOTLAP_SESSION_ENDS": "1h"}).at_s
    pid = os.fork()
    if pid == 0:
        os._exit(end_of({"HOTLAP_SESSION_ENDS": "1h"}).at_s != first)
    assert os.waitpid(pid, 0)[1] == 0
