"""When a training is said to hang, with a made-up clock, and what the stacks of a hang say."""

import faulthandler
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotlap.core.errors import MachineError
from hotlap.guard.hangs import BEFORE_FIRST, MOST_WINDOWS, HangWatch, hang_s
from hotlap.guard.processes import end_processes
from hotlap.guard.stacks import WORKERS, Call, Stack, of_worker, read_stacks, report, waiting_for


class Training:
    """A training in a made-up time; `cores_s` is what its processes have worked."""

    def __init__(self):
        self.now, self.steps, self.entries, self.cores_s, self.found = 0.0, 0, 0, 0.0, []
        self.watch = HangWatch(
            lambda: (self.steps, self.entries), self.found.append,
            clock=lambda: self.now, at_work=lambda: (self.cores_s, 0),
        )  # fmt: skip

    def wait(self, seconds, *, works=False):
        for _ in range(round(seconds / self.watch.every_s)):
            self.now += self.watch.every_s
            self.cores_s += works * self.watch.every_s
            self.watch.look()

    def make_steps(self, count, each_s):
        for _ in range(count):
            self.wait(each_s)
            self.steps += 1
        self.wait(self.watch.every_s)


@pytest.fixture
def training(monkeypatch):
    monkeypatch.setenv("HOTLAP_HANG_S", "60")
    return Training()


def test_a_training_that_stands_still_for_a_minute_is_said_to_hang_once(training):
    training.make_steps(20, 5)
    training.wait(50)
    assert training.found == []
    training.wait(600)
    (hang,) = training.found
    assert 60 <= hang.waited_s < 66
    assert hang.why.startswith("no progress for 1 min 0 s after step 20: the training waits for ")
    training.make_steps(1, 5)
    training.wait(2000)
    assert len(training.found) == 2


def test_a_slow_training_that_moves_raises_no_alarm_and_takes_ten_of_its_steps_to_hang(training):
    training.make_steps(30, 50)
    assert training.found == []
    training.wait(450)
    assert training.found == []
    training.wait(100)
    assert len(training.found) == 1


def test_before_its_first_step_a_training_has_more_time(training):
    training.wait(60 * BEFORE_FIRST - 10)
    assert training.found == []
    training.wait(20)
    assert len(training.found) == 1


def test_what_it_has_once_waited_and_gone_on_from_is_waited_for_again(training):
    training.make_steps(20, 5)
    for _ in range(3):
        training.wait(100)
        training.make_steps(5, 5)
    assert len(training.found) == 1


def test_a_step_that_works_is_no_hang_for_a_while_and_an_evaluation_that_works_is_none_at_all(training, monkeypatch):
    training.make_steps(20, 5)
    training.wait(60 * MOST_WINDOWS, works=True)
    assert training.found == []
    training.wait(180, works=True)
    assert len(training.found) == 1
    training.make_steps(1, 5)
    monkeypatch.setattr("hotlap.guard.hangs.is_long", lambda calls: True)
    training.wait(60 * 3 * MOST_WINDOWS, works=True)
    assert len(training.found) == 1
    training.wait(2000)
    assert len(training.found) == 2


def test_entries_of_the_ledger_are_progress(training):
    training.make_steps(20, 5)
    for _ in range(20):
        training.wait(50)
        training.entries += 1
    assert training.found == []


def test_workers_that_were_ended_in_vain_get_twice_as_long(training, monkeypatch):
    me = SimpleNamespace(pid=os.getpid())  # no child of its own: nothing is ended
    monkeypatch.setattr("hotlap.guard.hangs.waiting_for", lambda calls, on_gpu: WORKERS)
    monkeypatch.setattr("hotlap.guard.hangs._loader_in", lambda frame: SimpleNamespace(_workers=[me]))
    training.make_steps(20, 5)
    for number in range(3):
        training.wait(70 * 2**number)
        assert len(training.found) == number + 1
        training.entries += 1  # others are started
        training.wait(5)
    training.make_steps(1, 5)
    training.wait(70)
    assert len(training.found) == 4


def test_a_process_that_was_stopped_does_not_hang(training):
    training.make_steps(20, 5)
    training.now += 3600
    training.watch.look()
    training.wait(50)
    assert training.found == []


def test_a_person_in_a_debugger_is_left_alone(training, monkeypatch):
    monkeypatch.setattr("hotlap.guard.hangs.is_attended", lambda calls: True)
    training.make_steps(20, 5)
    training.wait(600)
    assert training.found == []


def test_off_starts_no_thread_and_another_word_is_one_line(monkeypatch):
    monkeypatch.setenv("HOTLAP_HANG_S", "off")
    before = threading.active_count()
    with HangWatch(lambda: (0, 0), pytest.fail):
        assert threading.active_count() == before
    monkeypatch.setenv("HOTLAP_HANG_S", "2m")
    assert hang_s() == 120
    monkeypatch.setenv("HOTLAP_HANG_S", "soon")
    with pytest.raises(MachineError, match="HOTLAP_HANG_S='soon' is not known: use a number of seconds, or off"):
        hang_s()


def test_processes_that_ignore_sigterm_are_killed_and_strangers_are_left_alone(monkeypatch):
    monkeypatch.setattr("hotlap.guard.processes.GRACE_S", 0.3)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as deaf:
        deaf.stdout.readline()
        end_processes([deaf.pid, os.getppid()])
        assert deaf.wait(60) == -9


# --- what stacks say --------------------------------------------------------------------------------

TORCH = f"{Path(torch.__file__).parent}/"
USERS = Call("/home/me/train.py", 7, "train")


@pytest.fixture
def line(tmp_path):
    """A call in a script of the user's that holds this line."""

    def write(text):
        file = tmp_path / f"{abs(hash(text))}.py"
        file.write_text(f"{text}\n")
        return Call(str(file), 1, "<module>")

    return write


@pytest.mark.parametrize(
    ("file", "name", "kind"),
    [
        ("utils/data/dataloader.py", "_try_get_data", "workers"),
        ("utils/data/_utils/fetch.py", "fetch", "dataset"),
        ("_dynamo/convert_frame.py", "compile_inner", "compiler"),
        ("distributed/distributed_c10d.py", "all_reduce", "collective"),
        ("cuda/__init__.py", "synchronize", "gpu"),
    ],
)
def test_calls_of_torch_say_what_is_waited_for(file, name, kind):
    assert waiting_for([Call(TORCH + file, 1, name), USERS], on_gpu=True).kind == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("with self.guards[0]:", "lock"),
        ("with made(here):", "code"),
        ("lock.acquire()", "lock"),
        ("total += loss.item()", "gpu"),
        ("data = stream.read(n)", "read"),
        ("os.waitpid(pid, 0)", "process"),
        ("x = x @ y", "code"),
    ],
)
def test_lines_of_code_say_what_is_waited_for(line, text, kind):
    assert waiting_for([line(text)], on_gpu=True).kind == kind


def test_a_dataset_in_this_process_that_waits_for_a_lock_says_both(line):
    wait = waiting_for([line("with lock:"), Call(TORCH + "utils/data/_utils/fetch.py", 1, "fetch")], on_gpu=False)
    assert wait.words + wait.cause == (
        "a batch from the dataset, in this process, which waits for a lock or another thread"
    )


def test_a_report_has_the_users_lines_first_and_shortens_the_rest(line):
    deep = [Call(f"{TORCH}nn/modules/module.py", number, "_call_impl") for number in range(90)]
    stacks = [Stack("MainThread", (*deep, line("with lock:"), *(USERS,) * 20)), Stack("hotlap samples", tuple(deep))]
    lines = report([*stacks, *(Stack(f"Thread-{number}", tuple(deep)) for number in range(9))])
    assert lines[0] == "  thread MainThread"
    assert lines[1].endswith(": with lock:")
    assert "    … 13 more calls of yours" in lines
    assert lines[-1] == "  and 4 more threads"
    assert len(lines) < 20
    assert not any("hotlap samples" in one for one in lines)


def test_what_faulthandler_writes_is_read_back(tmp_path):
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        main = read_stacks(file.read())[0]
    assert main.calls[0].name == "test_what_faulthandler_writes_is_read_back"
    assert main.calls[0].text.startswith("faulthandler.dump_traceback")


def test_of_a_worker_only_its_own_calls_are_shown():
    text = (
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/home/me/data.py", line 3 in __getitem__\n'
        f'  File "{TORCH}utils/data/_utils/worker.py", line 9 in _worker_loop\n'
        '  File "/home/me/train.py", line 7 in <module>\n'
    )
    assert of_worker(9, "is asleep", text) == ["  worker 9 is asleep", "    me/data.py:3 __getitem__"]
    assert of_worker(9, "is stopped", "") == ["  worker 9 is stopped"]
