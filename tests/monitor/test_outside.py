"""`hotlap diagnose PID`: real processes with a real fault, seen from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from hotlap.core.errors import UsageError
from hotlap.monitor.outside import Look, One, diagnose_process, findings_of, look_at
from hotlap.store.telemetry import write_live

SPIN = "while True: pass"
SLEEP = "import time; print(flush=True); time.sleep(600)"


@pytest.fixture
def begun():
    """Starts a python that has said a line, and ends it and its children in the end."""
    processes = []

    def begin(code, *words, says=True, **settings):
        settings = {"env": {}} | settings
        process = subprocess.Popen([sys.executable, "-S", "-c", code, *words], stdout=subprocess.PIPE, **settings)
        processes.append(process)
        if says:
            process.stdout.readline()
        return process

    yield begin
    for process in processes:
        with process, suppress(psutil.NoSuchProcess):  # it closes the pipes
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()


def names(process, look_s=0.6):
    return {one.name: one for one in diagnose_process(process.pid, look_s).found}


def test_a_thread_that_does_all_the_work_is_found(begun):
    found = names(begun(f"print(flush=True)\n{SPIN}"))
    if (os.cpu_count() or 1) > 1:
        assert "one-core" in found
    assert "nothing-moves" not in found


def test_a_process_that_does_nothing_is_found(begun):
    found = names(begun(SLEEP))
    assert list(found) == ["nothing-moves"]
    assert "py-spy dump" in found["nothing-moves"].change


def test_a_stopped_process_goes_on_by_the_command_that_is_named(begun):
    process = begun(SLEEP)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert names(process)["stopped"].change == f"`kill -CONT {process.pid}` goes on"


def test_dead_workers_are_found(begun):
    found = names(begun(f"import os\nif os.fork() == 0: os._exit(1)\n{SLEEP}"))
    assert found["workers-die"].what == "1 of its 1 children is dead"


def test_workers_that_are_waited_for_are_found(begun):
    process = begun(f"import os\nif os.fork() == 0:\n  {SPIN}\n{SLEEP}")
    found = names(process)
    assert "feeding" in found
    assert 0 < found["feeding"].cost_s <= 3600


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process waits so under Linux alone")
def test_a_process_that_waits_for_a_disk_is_found(begun, tmp_path):
    # Until the program that it starts has opened its files, the system has it wait as for a disk.
    os.mkfifo(tmp_path / "pipe")
    code = (
        "import os, sys\nprint(flush=True)\n"
        "opens = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)\n"
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[opens])"
    )
    process = begun(code, str(tmp_path / "pipe"))
    until = time.monotonic() + 60
    while psutil.Process(process.pid).status() != psutil.STATUS_DISK_SLEEP and time.monotonic() < until:
        time.sleep(0.01)
    assert "disk" in names(process)


def test_memory_that_grows_is_found(begun):
    code = (
        "import time\nheld = []\nprint(flush=True)\nfor _ in range(100):\n"
        "  held.append(bytearray(b'x' * 4 * 2**20)); time.sleep(0.02)\ntime.sleep(600)"
    )
    found = names(begun(code), look_s=1.5)
    assert "it began" in found["memory-grows"].evidence[-1]
    assert found["memory-grows"].cost == "may end the run"


def test_harmful_variables_are_named_and_no_other_is_read(begun):
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "1", "MY_TOKEN": "hf_very_secret"}
    found = diagnose_process(begun(SLEEP, env=environment).pid, 0.3)
    text = json.dumps(found.to_dict())
    assert "CUDA_LAUNCH_BLOCKING=1 is set" in text
    assert "very_secret" not in text
    assert "MY_TOKEN" not in text


def test_a_training_of_hotlaps_is_recognised_by_what_it_lays_out(begun, tmp_path, monkeypatch):
    monkeypatch.setattr("hotlap.monitor.trainings.SILENT_S", 0.0)
    process = begun(SLEEP, cwd=tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    state = {"kind": "fit", "pid": process.pid, "ended": False, "bound": {"by": "feeding", "why": "it waits"}}
    write_live(folder, {**state, "at": time.time()})
    found = diagnose_process(process.pid, 0.3)
    assert found.bound == "bound by feeding: it waits"
    assert f"hotlap diagnose {folder}" in found.notes[-1]
    assert "silent" in {one.name for one in found.found}


def test_a_process_that_is_gone_gets_one_line(begun):
    process = begun(SLEEP)
    process.kill()
    process.wait()
    with pytest.raises(UsageError, match=f"no process has the number {process.pid}"):
        diagnose_process(process.pid, 0.1)


def test_a_process_that_ends_meanwhile_gets_one_line(begun):
    process = begun("input()", stdin=subprocess.PIPE, says=False)

    def ends_it():
        process.communicate(b"\n")
        return []

    with pytest.raises(UsageError, match="ended while hotlap looked at it"):
        look_at(process.pid, 0.1, open_readers=ends_it)


def test_a_process_of_another_user_gets_one_line():
    if os.getuid() != 0:
        with pytest.raises(UsageError, match="is another user's"):
            diagnose_process(1, 0.1)
        return
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            diagnose_process(os.getppid(), 0.1)
        except UsageError as error:
            os.write(theirs, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(theirs)
    with os.fdopen(mine) as pipe:
        assert f"process {os.getpid()} is another user's and shows hotlap too little" in pipe.read()


def test_looking_neither_signals_nor_traces_the_process(begun):
    process = begun(SLEEP)
    look_at(process.pid, 0.2)
    with open(f"/proc/{process.pid}/status") as status:  # noqa: PTH123
        lines = dict(line.split(":", 1) for line in status)
    assert lines["TracerPid"].strip() == "0"
    assert int(lines["SigPnd"], 16) == int(lines["ShdPnd"], 16) == 0


# --- what only a GPU, or a full machine, shows --------------------------------------------------------------


class Reader:
    """A GPU as `hardware.GpuReader` reads it."""

    def __init__(self, **figures):
        self.figures = {"name": "NVIDIA T4", **figures}

    def read(self):
        return self.figures


@pytest.mark.parametrize(
    ("busy", "is_own", "name"),
    [(0.1, True, "gpu-idle"), (0.0, False, "on-cpu"), (0.97, True, None), (0.97, False, None)],
)
def test_a_gpu_that_is_idle_or_left_aside_is_found(begun, busy, is_own, name):
    process = begun(f"print(flush=True)\n{SPIN}")
    reader = Reader(busy=busy, **({"other_pids": [process.pid]} if is_own else {}))
    found = {one.name for one in findings_of(look_at(process.pid, 0.3, open_readers=lambda: [reader]))}
    assert found & {"gpu-idle", "on-cpu"} == ({name} if name else set())
    assert "one-core" not in found or busy < 0.5


def one(pid, *, cpu_s=0.0, waited_s=0.0, **more):
    settings = {"state": "running", "held_bytes": 0, "swapped_bytes": 0, "read_bytes": None} | more
    return One(pid=pid, cpu_s=cpu_s, threads={pid: (cpu_s, waited_s)}, **settings)


def look(main, *children, cores=2):
    return Look(
        pid=1, command=("python", "train.py"), age_s=100.0, cores=cores, seconds=1.0, main=main, children=children,
        variables={},
    )  # fmt: skip


def test_a_thread_that_waits_for_a_core_while_others_compute_is_found():
    found = {found.name: found for found in findings_of(look((one(1), one(1, cpu_s=0.3, waited_s=0.6))))}
    assert found["another-process"].cost_s == pytest.approx(2160)


def test_more_threads_than_cores_are_found():
    children = [(one(at), one(at, cpu_s=0.4, waited_s=0.6)) for at in range(2, 6)]
    found = {found.name for found in findings_of(look((one(1), one(1, cpu_s=0.4, waited_s=0.6)), *children))}
    assert "too-many-threads" in found
    assert "another-process" not in found


def test_memory_in_swap_is_found():
    (found,) = findings_of(look((one(1), one(1, cpu_s=0.4, swapped_bytes=2**30))))
    assert (found.name, found.evidence[0]) == ("swap", "1.0 GiB in swap")
