"""A script that hangs under `hotlap run`: another process says what it waits for, and the script goes on as it does."""

import faulthandler
import json
import os
import threading
import time

import psutil
import pytest

from hotlap.script.hangs import ScriptHangs
from hotlap.script.patches import Patches

BLOCKED = """
import os, threading, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
lock, model = threading.Lock(), nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(640, 6), torch.zeros(640, dtype=torch.long)), batch_size=8)
lock.acquire()
steps = 0

def release():
    while b"the script waits for" not in os.pread(2, 1 << 16, 0):
        threading.Event().wait(0.02)
    lock.release()

for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    steps += 1
    if steps == 40:
        threading.Thread(target=release).start()
        with lock:
            pass
print("made", steps, "steps")
"""


def test_a_script_that_blocks_is_reported_in_the_same_words_and_goes_on_by_itself(forks, tmp_path):
    (tmp_path / "train.py").write_text(BLOCKED)
    done = forks.run(
        "-m", "hotlap", "run", "--out", "run", "train.py", cwd=tmp_path, timeout_s=300, HOTLAP_HANG_S="0.3",
        HOTLAP_PLAN="auto", HOTLAP_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "made 80 steps\n"), done.stderr
    assert "the script waits for a lock or another thread" in done.stderr
    assert "train.py:23 <module>: with lock:" in done.stderr
    entries = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    (hang,) = [entry for entry in entries if entry["what"] == "hang"]
    assert hang["kind"] == "fault"
    assert "train.py:23 <module>: with lock:" in hang["why"]


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setenv("HOTLAP_HANG_S", "3600")
    patches = Patches()
    hangs = ScriptHangs(patches)
    hangs.begin(on_gpu=False)
    yield hangs
    hangs.close()
    patches.take_out_all()


def test_a_script_that_is_watched_has_neither_a_thread_of_python_nor_a_child_more(monkeypatch):
    monkeypatch.setenv("HOTLAP_HANG_S", "3600")
    threads, children = threading.enumerate(), psutil.Process().children()
    patches = Patches()
    hangs = ScriptHangs(patches)
    hangs.begin(on_gpu=False)
    try:
        assert threading.enumerate() == threads
        while psutil.Process().children() != children:
            hangs.stepped(1)
            time.sleep(0.01)
    finally:
        hangs.close()


def readers():
    """The processes that read the stacks of this one."""
    mine = f"main({os.getpid()}, "
    return [one.pid for one in psutil.process_iter(["cmdline"]) if mine in " ".join(one.info["cmdline"] or ())]


def test_the_process_that_reads_the_stacks_ends_with_the_watch_and_not_with_the_script(watched):
    while not readers():
        time.sleep(0.01)
    watched.close()
    while readers():
        time.sleep(0.01)


def test_a_fork_leaves_no_watch_behind_that_the_child_would_wait_for(watched):
    pid = os.fork()
    if pid == 0:
        faulthandler.cancel_dump_traceback_later()  # as Python does at its end; it waits for the thread
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert watched._limit_s


def test_a_script_that_uses_faulthandlers_thread_itself_keeps_it(watched, tmp_path):
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.dump_traceback_later(0.05, file=file)
        watched.stepped(5)
        while not os.fstat(file.fileno()).st_size:
            time.sleep(0.01)
        faulthandler.cancel_dump_traceback_later()
    assert not watched._limit_s


def test_after_its_last_step_a_script_is_not_watched_until_it_makes_another(watched):
    watched.rest()
    assert not watched._limit_s
    watched.stepped(6)
    assert watched._limit_s
