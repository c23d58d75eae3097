"""Trainings in processes of their own, to be killed; and what a run came to, to be compared."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import dispositions
import torch

import hotlap
from hotlap.stress.victim import _timeless, fate_of, victim_job


def before_forward(model, look):
    """Have `look` called before each forward pass of a model.

    By a hook on all modules: one on this module, or another forward, would make another training of it.
    """
    hook = torch.nn.modules.module.register_module_forward_pre_hook
    return hook(lambda module, given: look() if module is model else None)


SOURCE = Path(hotlap.__file__).parents[1]


def environment(**variables):
    paths = os.pathsep.join([str(SOURCE), str(Path(__file__).parent)])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOTLAP") and k != "NUM_WORKERS"}
    return {**kept, "PYTHONPATH": paths, "HOTLAP_PROGRESS": "lines", "OMP_NUM_THREADS": "1", **variables}


def hotlap_command(*arguments, cwd=None, **variables):
    done = subprocess.run(
        [sys.executable, "-m", "hotlap", *map(str, arguments)],
        env=environment(**variables), cwd=cwd, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@functools.cache
def warm():
    """Train once here, so that children find loaded what torch loads late."""
    with tempfile.TemporaryDirectory() as folder:
        hotlap.fit(victim_job(0), out=Path(folder) / "run", progress=False)


def forked(function, said=None):
    """Run a function in a forked child, where torch is loaded already; its process id.

    `said` is a file for what it prints.
    """
    warm()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that the child does not use
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            dispositions.reset()
            # The pools of threads that torch keeps did not come along.
            torch.set_num_threads(1)
            if said is not None:
                handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            function()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:  # or the child would go on as the test run
                os._exit(code)
    return pid


def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_a_child(function, said=None):
    """Run a function in a forked child; its exit code, negative where a signal ended it."""
    return code_of(forked(function, said))


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


def outcome(run):
    """All that a run came to, without its times."""
    metrics = [_timeless(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return fate_of(run), metrics


def flip(path, at=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 0x10
    path.write_bytes(content)
