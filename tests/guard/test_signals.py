"""SIGINT and SIGTERM end a training after a step and a checkpoint, whatever comes while it saves."""

import faulthandler
import os
import signal
import sys
import textwrap
import threading
import time

import pytest
import torch
from killed import before_forward, in_a_child, outcome
from plain import class_data, parameters_of, small_mlp
from torch import nn

from hotlap import Job, fit
from hotlap.cli import main
from hotlap.fitting.session import Best
from hotlap.guard.saving import Saver
from hotlap.guard.signals import StopRequest
from hotlap.store import disk
from hotlap.store.checkpoints import Checkpoints
from hotlap.stress.victim import victim_job


def signalled(run, at=-1, first=signal.SIGTERM, more=(), workers=0, resume=False, save_every=None):
    """A training that signals itself inside its `at`th forward pass, and again while it saves because of that.

    As hotlap chooses, it is too short for a checkpoint: only the signal makes one.
    """
    os.environ["HOTLAP_PROGRESS"] = "lines"
    job = victim_job(workers)
    calls, left = [], list(more)

    def counted():
        calls.append(job.model.training)
        if sum(calls) == at and calls[-1]:
            os.kill(os.getpid(), first)

    def watch(moment):
        # Between the calls of the save that the first signal asked for.
        if sum(calls) >= at > 0 and left and moment.startswith("before"):
            os.kill(os.getpid(), left.pop(0))
            time.sleep(0.005)

    hook = before_forward(job.model, counted)
    try:
        with disk.watched(watch):
            fit(job, **{"resume" if resume else "out": run}, save_every=save_every)
    finally:
        hook.remove()
    assert not left, "the later signals were never sent"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    assert in_a_child(lambda: signalled(run, save_every=1000)) == 0
    return outcome(run)


INTERRUPTED = 1
"""How a KeyboardInterrupt ends a forked child; a script of its own is looked at below."""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("first", "more", "code"),
    [
        (signal.SIGINT, (), INTERRUPTED),
        (signal.SIGTERM, (signal.SIGTERM, signal.SIGINT, signal.SIGTERM), 143),
        (signal.SIGINT, (signal.SIGINT, signal.SIGTERM, signal.SIGINT), INTERRUPTED),
        (signal.SIGUSR1, (signal.SIGUSR2, signal.SIGTERM), 143),
    ],
    ids=["SIGINT", "SIGTERM and three more", "SIGINT and three more", "what Slurm sends, and two more"],
)
def test_the_step_is_finished_and_saved_whole_and_it_goes_on_to_the_same_bit(
    tmp_path, whole, first, more, code, workers
):
    run, said = tmp_path / "run", tmp_path / "said"
    assert in_a_child(lambda: signalled(run, 21, first, more, workers), said) == code, said.read_text()
    assert f"stopped by {first.name}; go on with: hotlap resume {run}" in said.read_text()
    assert said.read_text().endswith("\nKeyboardInterrupt\n") == (code == INTERRUPTED)
    found, damaged = Checkpoints(run / "checkpoints").newest_good()
    assert (found.step, damaged) == (11, []), "the step in hand was finished: 21 batches, two a step"
    assert not [f.name for f in (run / "checkpoints").iterdir() if f.name.startswith(".")]
    assert in_a_child(lambda: signalled(run, workers=workers, resume=True, save_every=1000), said) == 0, (
        said.read_text()
    )
    assert outcome(run) == whole


@pytest.mark.parametrize("save_every", [None, 1000])
def test_a_signal_that_comes_at_the_very_end_is_saved_too(tmp_path, save_every):
    """While it is decided whether the end is worth a checkpoint."""

    def at_the_end():
        due = Saver.due_at_end
        Saver.due_at_end = lambda self, step: os.kill(os.getpid(), signal.SIGTERM) or due(self, step)
        fit(small_job(), out=tmp_path / "run", save_every=save_every, progress=False)

    assert in_a_child(at_the_end) == 143
    assert Checkpoints(tmp_path / "run/checkpoints").newest_good()[0].step == 14
    assert fit(small_job(), resume=tmp_path / "run", progress=False).updates == 14


def test_where_nothing_is_to_be_saved_a_signal_saves_nothing(tmp_path):
    run = tmp_path / "run"
    assert in_a_child(lambda: signalled(run, 21, save_every=0), tmp_path / "said") == 143
    assert not (run / "checkpoints").exists()


SCRIPT = """
    import os, signal, sys
    from hotlap import fit
    from hotlap.stress.victim import victim_job

    job = victim_job(0)
    forward = job.model.forward
    calls = []

    def counted(x):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(x)

    job.model.forward = counted
    try:
        fit(job, out=sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted, and the script knows")
        raise
"""


def test_an_interrupted_script_gets_its_keyboard_interrupt(tmp_path, forks):
    done = forks.run("-c", textwrap.dedent(SCRIPT), tmp_path / "run", cwd=tmp_path)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stdout == "interrupted, and the script knows\n"
    assert Checkpoints(tmp_path / "run/checkpoints").newest_good()[1] == []


def demo(name, run):
    """The command as its entry point runs it, signalled at its first evaluation."""
    os.environ["HOTLAP_PROGRESS"] = "lines"
    sys.argv = ["hotlap", "demo", "--epochs", "10", "--device", "cpu", "--out", str(run)]
    judge, sent = Best.judge, []

    def judged(self, record):
        judge(self, record)
        if not sent:
            sent.append(1)
            os.kill(os.getpid(), name)

    Best.judge = judged
    main()


@pytest.mark.parametrize(("name", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_ends_with_the_documented_code(tmp_path, name, code):
    said = tmp_path / "said"
    assert in_a_child(lambda: demo(name, tmp_path / "run"), said) == code, said.read_text()
    assert f"stopped by {name.name}" in said.read_text()
    assert "Traceback" not in said.read_text()
    assert Checkpoints(tmp_path / "run/checkpoints").newest_good()[1] == []


# --- handlers ------------------------------------------------------------------------------------


def small_job(**changes):
    settings = {
        "model": small_mlp(), "data": class_data(), "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01), "batch_size": 8, "epochs": 2, "device": "cpu",
    }  # fmt: skip
    return Job(**{**settings, **changes})


@pytest.fixture
def own_handlers():
    def mine(*_):
        pass

    before = {name: signal.signal(name, mine) for name in (signal.SIGINT, signal.SIGTERM)}
    yield mine
    for name, handler in before.items():
        signal.signal(name, handler)


def test_the_callers_handlers_are_back_after_a_fit_and_after_one_that_failed(tmp_path, own_handlers):
    fit(small_job(), out=tmp_path / "a", progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is own_handlers

    def broken(model, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(small_job(loss=broken), out=tmp_path / "b", progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is own_handlers


def test_a_fit_outside_the_main_thread_trains_and_touches_no_handler(tmp_path, own_handlers):
    runs, seen = [], []

    def train():
        runs.append(fit(small_job(loss=watching), out=tmp_path / "thread", progress=False))

    class Watching(nn.CrossEntropyLoss):
        def forward(self, *args):
            seen.append(signal.getsignal(signal.SIGINT))
            return super().forward(*args)

    watching = Watching()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    expected = fit(small_job(), out=tmp_path / "main", progress=False)
    assert torch.equal(parameters_of(runs[0].model), parameters_of(expected.model))
    assert set(seen) == {own_handlers}


def test_a_handler_only_notes_the_first_signal(own_handlers):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is signal.SIGTERM
    with pytest.raises(SystemExit) as caught:
        stop.obey()
    assert caught.value.code == 143


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.signal is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_warning_signal_that_code_in_c_or_the_user_handles_is_left_to_them():
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        handlers = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
        with StopRequest() as stop:
            assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == handlers
            os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.signal is None
    finally:
        signal.signal(signal.SIGUSR2, before)
        faulthandler.unregister(signal.SIGUSR1)


def test_without_a_signal_there_is_nothing_to_obey():
    with StopRequest() as stop:
        pass
    assert stop.obey() is None
