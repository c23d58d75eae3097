"""Looks at scripts run in forks of a process that has loaded torch: each of them would load it anew.

Those that a fixture for a whole file makes are processes of their own, as they are for users.
"""

import itertools
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from preloaded import Preloaded

from hotlap.kit import batch, script_workers, visiting, workers


class Forks:
    """In the place of `subprocess`, for what looks at scripts."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, preloaded):
        self._preloaded = preloaded

    def run(self, command, *, stdin, stdout, stderr, timeout, check):
        done = self._preloaded.run(*command[1:], cwd=Path.cwd(), timeout_s=timeout, **os.environ)
        stdout.write((done.stdout + done.stderr).encode())
        return done


@pytest.fixture(scope="session")
def preloaded():
    made = Preloaded("hotlap.kit.child", "hotlap.kit.obeying", "torch._dynamo", environment=dict(os.environ))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _looks_are_forks(preloaded, monkeypatch):
    if not torch.cuda.is_available():  # of which no fork could use what was loaded
        monkeypatch.setattr(visiting, "subprocess", Forks(preloaded))


@pytest.fixture(autouse=True)
def _limits_are_spent_by_looking(monkeypatch):
    """What a command may spend passes by a quarter of a second with each look at it: on no machine sooner or later."""
    clock = SimpleNamespace(monotonic=itertools.count(0, 0.25).__next__, perf_counter=time.perf_counter)
    for module in (batch, script_workers, workers):
        monkeypatch.setattr(module, "time", clock)
