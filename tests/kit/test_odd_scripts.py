"""The kit on scripts that are not as one would like them: each is told of, and nothing that was measured is lost."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hotlap.core.errors import HotlapError, TrainingError, UsageError
from hotlap.kit import workers
from hotlap.kit.batch import batch_of_script
from hotlap.kit.calls import named
from hotlap.kit.memory import memory_of_script
from hotlap.kit.probe import ProbeRequest, ProbeResult, ScriptEndedError, run_probe
from hotlap.kit.search import TooShortError
from hotlap.kit.workers import by
from hotlap.script.running import Target

PLAIN = "import time, torch\n"
"""A script that trains nothing: torch loads as much again for an optimizer."""
HEAD = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(512, 8), torch.randint(2, (512,)))

def update(x, y):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def target(tmp_path):
    def made(text, head=HEAD):
        path = tmp_path / "mine.py"
        path.write_text(head + textwrap.dedent(text))
        return Target(path=str(path))

    return made


def test_a_size_that_a_script_fails_with_does_not_train_and_the_others_are_told(target):
    mine = target("""
        for epoch in range(10_000):
            for x, y in DataLoader(data, batch_size=16, drop_last=True):
                update(x + torch.zeros(16, 8), y)
    """)
    found = batch_of_script(mine, most=32, seconds=60)
    assert found.largest.size == 16
    (failed,) = [one for one in found.searched.trials if one.size == 32]
    assert failed.why_not.startswith("RuntimeError: The size of tensor a (32) must match")
    assert "the effective batch of 16 stays as it is" in found.summary()


def test_its_own_size_has_to_train(target):
    mine = target("""
        for x, y in DataLoader(data, batch_size=16):
            raise KeyError("mine")
    """)
    with pytest.raises(ScriptEndedError, match="mine ended by an error: KeyError"):
        batch_of_script(mine)


def test_of_several_loaders_the_first_is_counted_and_the_others_are_told_of(target):
    mine = target("""
        first, second = DataLoader(data, batch_size=4), DataLoader(data, batch_size=32)
        for epoch in range(10_000):
            for (x, y), (u, _) in zip(first, second):
                update(torch.cat((x, u[:0])), y)
    """)
    seen = run_probe(mine, ProbeRequest(laps=2, lap_s=0.0))
    assert (seen.batch_size, seen.samples_an_update, seen.other_loaders) == (4, 4, 1)
    assert {samples for _, samples in seen.laps} == {4}
    found = batch_of_script(mine, most=4, seconds=30)
    assert found.effective_batch == 4
    assert "2 loaders bring the batches of an update: sizes are those of the first" in found.summary()


def test_workers_that_would_repeat_samples_are_not_tried(target, monkeypatch):
    mine = target("""
        class Rows(IterableDataset):
            def __iter__(self):
                return iter(data)

        for epoch in range(10_000):
            for x, y in DataLoader(Rows(), batch_size=16):
                update(x, y)
    """)
    monkeypatch.setattr(workers, "counts", lambda cores: [0, 1, 2])
    found = workers.workers_of_script(mine, seconds=60)
    reasons = {one.feed.workers: one.why_not for one in found.settings if one.feed.kind == "loader"}
    assert reasons[0] is None
    assert reasons[1] is None
    assert reasons[2] == workers.REPEATS
    assert found.best.feed.workers < 2


def test_a_dataset_that_shares_its_samples_out_already_may_have_other_workers():
    first = ProbeResult(iterates=True, workers=4, laps=[[0.1, 8]], samples_an_update=8)
    probes = workers._ScriptFeeds(Target(path="mine.py"), first, 5, 0, lambda line: None)
    assert probes.setting(by(8, on_gpu=False)).why_not == "5 s were spent"


def test_where_nothing_else_was_timed_nothing_is_said_to_be_slower(target):
    mine = target("""
        for epoch in range(10_000):
            for x, y in DataLoader(data, batch_size=16):
                update(x, y)
    """)
    found = workers.workers_of_script(mine, seconds=0)
    assert found.advice == "nothing: hotlap has timed no other setting than no workers"


def test_memory_that_was_not_seen_is_told_with_its_reason(target):
    # As many updates as a lap takes, and not one more, by which memory would be looked at.
    mine = target("""
        for x, y in DataLoader(data, batch_size=64):
            time.sleep(0.11)
            update(x, y)
    """)
    found = batch_of_script(mine, most=64, seconds=0)
    assert not found.largest.taken_bytes
    assert "memory not measured: the script ended before" in found.summary()
    assert "measured " not in found.summary(), "one size shows no slope"


def test_a_script_that_reads_is_told_that_there_is_nothing_to_read(target):
    with pytest.raises(ScriptEndedError, match=r"EOFError.*with an empty stdin"):
        run_probe(target("input()"), ProbeRequest())


@pytest.mark.parametrize("waits", ["time.sleep(600)", "while True: torch.ones(1)"])
@pytest.mark.parametrize("look", [batch_of_script, workers.workers_of_script, memory_of_script])
def test_a_script_that_never_trains_is_ended_and_told_where_it_was(target, waits, look):
    # The script itself has the time be over once it runs: until then it may take as long as it likes.
    mine = target(f"""
        import threading
        (timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        assert timer.interval == 70
        threading.Thread(target=timer.function).start()
        {waits}
    """)
    with pytest.raises(TrainingError, match=r"made no update in 70 s, and is at mine.py:\d+: .*; name the script that"):
        look(mine, seconds=70)


@pytest.mark.skipif(sys.platform != "linux", reason="by Linux alone")
def test_a_script_ends_with_whoever_looked_at_it(target, tmp_path):
    mine = target(
        f"""
        import os, pathlib
        pathlib.Path({str(tmp_path / "part")!r}).write_text(str(os.getpid()))
        os.rename({str(tmp_path / "part")!r}, {str(tmp_path / "pid")!r})
        time.sleep(600)
    """,
        head=PLAIN,
    )
    looking = _look_at(mine)
    try:
        pid = int(_read_once_there(tmp_path / "pid"))
    finally:
        looking.kill()
        looking.wait()
    until = time.monotonic() + 600
    while _lives(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _lives(pid)


def _look_at(mine):
    code = (
        "import sys; from hotlap.kit.probe import ProbeRequest; from hotlap.kit.probe import run_probe; "
        "from hotlap.script.running import Target; run_probe(Target(path=sys.argv[1]), ProbeRequest())"
    )
    return subprocess.Popen([sys.executable, "-c", code, mine.path])


def _read_once_there(path):
    until = time.monotonic() + 600
    while not path.is_file() and time.monotonic() < until:
        time.sleep(0.1)
    return path.read_text()


def _lives(pid):
    try:
        os.kill(pid, signal.SIG_DFL)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- what it says, and what it writes ---------------------------------------------------------------------


def test_a_script_that_refuses_its_arguments_is_told_in_its_own_words(target):
    mine = target("""
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--data", required=True)
        parser.parse_args()
    """)
    with pytest.raises(ScriptEndedError, match=r"mine\.py: error: the following arguments are required: --data"):
        run_probe(mine, ProbeRequest())


def test_an_error_of_a_script_is_told_with_its_line(target):
    mine = target("""
        for x, y in DataLoader(data, batch_size=16):
            raise ValueError("boom")
    """)
    line = next(number for number, text in enumerate(Path(mine.path).read_text().splitlines(), 1) if "boom" in text)
    with pytest.raises(ScriptEndedError, match=rf"ended by an error: ValueError: boom \(mine.py:{line}\)"):
        run_probe(mine, ProbeRequest())


def test_an_error_of_a_script_is_told_with_the_lines_that_led_to_it(target):
    mine = target("""
        def main():
            print(undefined)

        main()
    """)
    with pytest.raises(ScriptEndedError) as caught:
        run_probe(mine, ProbeRequest())
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("mine ended by an error: NameError: name 'undefined' is not defined (mine.py:")
    assert [line.strip() for line in lines[1::2]] == ["main()", "print(undefined)"]
    assert "hotlap" not in "".join(lines[0::2]).replace(str(Path(mine.path).parent), "")


def test_an_error_in_a_worker_is_told_by_what_it_said(target):
    mine = target("""
        class Broken(TensorDataset):
            def __getitem__(self, index):
                raise ValueError("no such picture")

        for x, y in DataLoader(Broken(*data.tensors), num_workers=1):
            pass
    """)
    with pytest.raises(ScriptEndedError) as caught:
        run_probe(mine, ProbeRequest())
    assert "in DataLoader worker process 0. ValueError: no such picture (mine.py:" in str(caught.value).splitlines()[0]
    assert 'raise ValueError("no such picture")' in str(caught.value)


def test_what_is_not_python_is_told_with_its_line(target, tmp_path):
    mine = target("def f(:")
    line = len(HEAD.splitlines()) + 1
    with pytest.raises(HotlapError, match=rf"^mine.py:{line} is not valid Python: .*; correct it: def f\(:$"):
        named([mine.path])
    (tmp_path / "helper.py").write_text("x = 1\ndef g(:\n")
    with pytest.raises(ScriptEndedError, match=r"SyntaxError: invalid syntax \(helper.py:2\)\n(.*\n)*.*def g\(:"):
        run_probe(target("import helper"), ProbeRequest())


def test_a_module_that_is_not_there_is_told_without_names_of_hotlaps_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ScriptEndedError, match=r"^mine\.inner ended by an error: No module named mine\.inner$"):
        run_probe(Target(module="mine.inner"), ProbeRequest())
    with pytest.raises(UsageError, match=r"there is no file 'gone\.py'"):
        named(["gone.py"])


def test_a_script_that_trains_nothing_is_told_to_be_none(target):
    with pytest.raises(TooShortError, match="without an update of a torch optimizer"):
        run_probe(target("print('hello')"), ProbeRequest())
    short = target("""
        for x, y in DataLoader(data, batch_size=256):
            update(x, y)
    """)
    with pytest.raises(TooShortError, match="ended after 2 updates, too few for timing"):
        run_probe(short, ProbeRequest())


def test_an_evaluation_is_no_part_of_an_updates_memory(target):
    mine = target("""
        large, made = torch.randn(65536, 8), 0
        for epoch in range(10_000):
            for x, y in DataLoader(data, batch_size=256):
                if made == 4:  # after one lap the next update is looked at
                    with torch.no_grad():
                        model(large)
                update(x, y)
                made += 1
    """)
    account = run_probe(mine, ProbeRequest(laps=1, lap_s=0.0, counts=True)).account
    assert 0 < account["peak_bytes"] < 65536 * 2 * 4
