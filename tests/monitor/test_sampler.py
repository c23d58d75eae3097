"""The sampler: what it writes, what it may cost, and that nothing it does reaches the training."""

import os
import signal
import threading

import pytest
from sampling import sample_eagerly, sampler_threads, when

from hotlap.core.errors import MachineError
from hotlap.monitor import sampler as module
from hotlap.monitor.sampler import LIVE_S, MOST_COST, Sampler, is_wanted
from hotlap.store.telemetry import read_live, read_samples


class Clocks:
    """A made-up time of day, and the time of a core that readings take."""

    def __init__(self):
        self.now, self.cpu, self.takes = 1000.0, 0.0, 0.001

    def reading(self):
        self.cpu += self.takes
        return {"step": int(self.now)}


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def made(tmp_path, clocks):
    def make(read=clocks.reading, state=lambda sample: {"step": sample["step"]}):
        return Sampler(tmp_path, read, state, clock=lambda: clocks.now, cpu_clock=lambda: clocks.cpu)

    return make


def tick(sampler, clocks, *, after_s=1.0):
    clocks.now += after_s
    sampler.tick()


def test_a_sample_is_written_with_each_reading_and_the_state_less_often(made, clocks, tmp_path):
    sampler = made()
    states = []
    for _ in range(6):
        tick(sampler, clocks)
        states.append(read_live(tmp_path)["at"])
    assert [(sample["at"], sample["step"]) for sample in read_samples(tmp_path)] == [
        (1001.0 + n, 1001 + n) for n in range(6)
    ]
    assert states == [1001.0, 1001.0, 1003.0, 1003.0, 1005.0, 1005.0]
    live = read_live(tmp_path)
    assert (live["pid"], live["ended"], live["step"]) == (os.getpid(), False, 1005)
    assert live["sample"]["step"] == 1005


@pytest.mark.parametrize("takes_s", [0.0001, 0.001, 0.005, 0.02, 0.5])
def test_readings_that_take_long_come_less_often_so_that_they_cost_at_most_half_a_percent(made, clocks, takes_s):
    clocks.takes = takes_s
    sampler = made()
    tick(sampler, clocks)
    began, spent = clocks.now, sampler.spent_s
    for _ in range(100):
        tick(sampler, clocks, after_s=sampler.wait_s)
    assert (sampler.spent_s - spent) / (clocks.now - began) <= 1.001 * MOST_COST
    assert sampler.wait_s >= 1.0


def test_a_first_reading_that_takes_long_is_soon_forgotten(made, clocks):
    clocks.takes = 1.0
    sampler = made()
    tick(sampler, clocks)
    assert sampler.wait_s == pytest.approx(1.0 / MOST_COST)
    clocks.takes = 0.001
    tick(sampler, clocks)
    assert sampler.wait_s == 1.0


def test_the_state_says_what_sampling_has_cost(made, clocks, tmp_path):
    sampler = made()
    for _ in range(10):
        tick(sampler, clocks)
    assert read_live(tmp_path)["sampling_cost"] == pytest.approx(0.001, rel=0.2)


def test_time_in_which_nobody_looked_is_marked(made, clocks, tmp_path):
    sampler = made()
    for after_s in (1.0, 1.2, 1.0, 40.0, 1.0):
        tick(sampler, clocks, after_s=after_s)
    assert [sample.get("gap_s") for sample in read_samples(tmp_path)] == [None, None, None, 40.0, None]


def test_a_resumed_training_marks_the_time_between_its_processes(made, clocks, tmp_path):
    tick(made(), clocks)
    clocks.now += 500
    tick(made(), clocks)
    assert [sample.get("gap_s") for sample in read_samples(tmp_path)] == [None, 501.0]


@pytest.mark.parametrize("part", ["read", "state", "folder"])
def test_what_fails_again_and_again_ends_the_sampling_and_nothing_else(made, clocks, tmp_path, part):
    def fails(*_):
        raise RuntimeError("the driver is gone")

    sampler = made(**({part: fails} if part != "folder" else {}))
    if part == "folder":
        tmp_path.rmdir()
    with sampler:
        for _ in range(3):
            assert not sampler.is_over
            tick(sampler, clocks, after_s=LIVE_S)
    assert sampler.is_over


def test_a_reading_that_fails_once_is_left_out(made, clocks, tmp_path):
    answers = [{"step": 1}, None, {"step": 3}, None, None, {"step": 6}]

    def read():
        found = answers.pop(0)
        if found is None:
            raise RuntimeError("it changed while it was read")
        return found

    sampler = made(read=read)
    for _ in range(6):
        tick(sampler, clocks)
    assert [sample["step"] for sample in read_samples(tmp_path)] == [1, 3, 6]
    assert not sampler.is_over


@pytest.fixture
def eager(monkeypatch):
    sample_eagerly(monkeypatch)


def test_while_it_is_open_a_daemon_thread_reads_and_afterwards_none_is_left(eager, tmp_path):
    with Sampler(tmp_path, dict, dict, every_s=0.001) as sampler:
        (thread,) = sampler_threads()
        assert thread.daemon
        when(lambda: sampler.readings >= 3)
    assert sampler_threads() == []
    assert read_live(tmp_path)["ended"] is True
    assert len(read_samples(tmp_path)) >= 3


def test_a_training_that_is_over_before_the_first_reading_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTLAP_SAMPLES", "on")
    monkeypatch.setattr(module, "FIRST_S", 1e6)
    with Sampler(tmp_path, dict, dict):
        pass
    assert list(tmp_path.iterdir()) == []
    assert sampler_threads() == []


def test_it_is_turned_off_by_a_variable_and_another_word_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTLAP_SAMPLES", "off")
    with Sampler(tmp_path, dict, dict):
        assert sampler_threads() == []
    monkeypatch.setenv("HOTLAP_SAMPLES", "no")
    with pytest.raises(MachineError, match="HOTLAP_SAMPLES='no' is not known: use on or off"):
        is_wanted()


def test_a_fork_finds_no_reading_half_done_and_the_sampler_goes_on_after_it(eager, tmp_path):
    inside = threading.Lock()

    def read():
        with inside:
            return {"step": 1}

    with Sampler(tmp_path, read, dict, every_s=0.0) as sampler:
        for _ in range(20):
            when(lambda before=sampler.readings: sampler.readings > before)
            pid = os.fork()
            if pid == 0:
                # A lock that a thread of the parent held would never be free here.
                is_free = inside.acquire(timeout=0) and not sampler_threads()
                os._exit(0 if is_free else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert len(sampler_threads()) == 1


def test_forks_put_no_reading_off(eager, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIRST_S", 0.2)
    with Sampler(tmp_path, dict, dict, every_s=1e6) as sampler:  # one that waited anew would never read
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        when(lambda: sampler.readings == 1)


def test_a_forked_child_may_end_a_sampler_of_its_parents_without_a_word(eager, tmp_path):
    sampler = Sampler(tmp_path, lambda: {"step": 1}, dict, every_s=0.001)
    with sampler:
        when(lambda: sampler.readings)
        pid = os.fork()
        if pid == 0:
            sampler.__exit__()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert read_live(tmp_path)["ended"] is False


def test_a_reading_that_hangs_holds_up_neither_a_fork_nor_the_end(eager, tmp_path):
    hangs, forever = threading.Event(), threading.Event()

    def read():
        hangs.set()
        forever.wait()
        return {}

    with Sampler(tmp_path, read, dict, every_s=0.001):
        hangs.wait()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    forever.set()


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from hotlap.monitor import sampler

sampler.FIRST_S = 0.0
folder = Path(sys.argv[1])
made = sampler.Sampler(folder, lambda: {"step": 1}, dict, every_s=0.0005).__enter__()
while made.readings < 20:
    time.sleep(0.001)
print(os.getpid(), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run_script(forks, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    return lambda how: forks.run("script.py", tmp_path / "run", how, cwd=tmp_path, HOTLAP_SAMPLES="on")


def test_a_process_ends_with_its_sampler_open(run_script):
    done = run_script("ends")
    assert (done.returncode, done.stderr) == (0, "")


def test_after_kill_9_all_whole_samples_are_read_and_the_state_is_whole(run_script, tmp_path):
    done = run_script("killed")
    assert done.returncode == -signal.SIGKILL
    assert len(read_samples(tmp_path / "run")) >= 20
    live = read_live(tmp_path / "run")
    assert (live["ended"], live["pid"]) == (False, int(done.stdout))
