"""Signals that nohup or a shell's `&` has a process ignore: hotlap goes on ignoring them; no test depends on them."""

import os
import signal
import subprocess
import sys

import pytest
from dispositions import heeded
from killed import in_a_child
from plain import class_data, small_mlp
from torch import nn, optim

from hotlap import Job, fit
from hotlap.script.compare import _Child

IGNORED = (signal.SIGINT, signal.SIGHUP)
SENDS = "import os, signal, sys; os.kill(os.getpid(), int(sys.argv[1])); print('goes on')"


@pytest.fixture(params=IGNORED, ids=lambda number: number.name)
def ignored(request):
    """A signal that this process ignores meanwhile."""
    before = signal.signal(request.param, signal.SIG_IGN)
    yield request.param
    signal.signal(request.param, before)


def test_a_training_that_ignores_hangups_and_interrupts_goes_on_ignoring_them(tmp_path):
    """As under `nohup hotlap train … &`, when the terminal is closed."""

    def training():
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        model, sent = small_mlp(), []

        def forward(model, batch):
            if not sent:
                sent.extend(IGNORED)
                for number in IGNORED:
                    os.kill(os.getpid(), number)
            return model(batch[0]), batch[1]

        job = Job(
            model=model, data=class_data(16), loss=nn.CrossEntropyLoss(), optimizer=lambda p: optim.SGD(p, lr=0.1),
            batch_size=8, epochs=2, device="cpu", forward=forward,
        )  # fmt: skip
        assert fit(job, out=tmp_path / "run", progress=False).updates == 4
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in sent)

    said = tmp_path / "said"
    assert in_a_child(training, said) == 0, said.read_text()


def test_what_watches_over_other_processes_leaves_it_ignored(ignored):
    with _Child():
        assert signal.getsignal(ignored) is signal.SIG_IGN
        os.kill(os.getpid(), ignored)
    assert signal.getsignal(ignored) is signal.SIG_IGN


def test_programs_that_tests_start_heed_what_the_test_run_ignores(ignored):
    def started():
        return subprocess.run([sys.executable, "-c", SENDS, str(int(ignored))], capture_output=True, text=True)

    assert started().stdout == "goes on\n"
    with heeded(*IGNORED):
        assert started().returncode == -ignored
        os.kill(os.getpid(), ignored)  # which goes on
    assert signal.getsignal(ignored) is signal.SIG_IGN
    assert started().stdout == "goes on\n"


def test_a_forked_child_heeds_them_too(ignored, tmp_path):
    said = tmp_path / "said"
    code = in_a_child(lambda: os.kill(os.getpid(), ignored), said)
    assert code == (1 if ignored == signal.SIGINT else -ignored)
    assert ("KeyboardInterrupt" in said.read_text()) == (ignored == signal.SIGINT)
