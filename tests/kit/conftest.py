"""Looks at scripts run in forks of a process that has loaded torch: each of them would load it anew.

Those that a fixture for a whole file makes are processes of their own, as they are for users, unless it asks for forks.
"""

import itertools
import subprocess
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hotlap.kit import batch, probe, workers
from hotlap.kit.working_copy import WorkingCopy


class Forks:
    """In the place of `subprocess`, for what looks at scripts."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, forks, after=0):
        """The first looks, `after` of them, take processes of their own, as they do for users."""
        self._forks, self._real = forks, after

    def run(self, command, *, cwd, stdin, stdout, stderr, timeout, check, env):
        self._real -= 1
        if self._real >= 0:
            return subprocess.run(
                command, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, timeout=timeout, check=check, env=env
            )
        done = self._forks.run(*command[1:], cwd=cwd, timeout_s=timeout, environment=env)
        stdout.write((done.stdout + done.stderr).encode())
        return done


@pytest.fixture(scope="session")
def looks_are_forks(forks):
    """Inside, they are, but with a GPU: no fork could use what was loaded."""

    @contextmanager
    def inside(after=0):
        with pytest.MonkeyPatch.context() as patch:
            if not torch.cuda.is_available():
                patch.setattr(probe, "subprocess", Forks(forks, after))
            yield

    return inside


@pytest.fixture(scope="session", autouse=True)
def _copies_have_few_links(tmp_path_factory):
    """A copy has links to all that lies beside each folder above it, and the folder of all tests lies in a full one."""
    base, link = tmp_path_factory.getbasetemp().resolve(), WorkingCopy._link_siblings

    def link_siblings(copy, above, below):
        if above.is_relative_to(base):
            link(copy, above, below)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkingCopy, "_link_siblings", link_siblings)
        yield


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Each probe copies the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _looks_are_forks(looks_are_forks):
    with looks_are_forks():
        yield


@pytest.fixture(autouse=True)
def _limits_are_spent_by_looking(monkeypatch):
    """What a command may spend passes by a quarter of a second with each look at it: on no machine sooner or later."""
    clock = SimpleNamespace(monotonic=itertools.count(0, 0.25).__next__, perf_counter=time.perf_counter)
    for module in (batch, workers):
        monkeypatch.setattr(module, "time", clock)
