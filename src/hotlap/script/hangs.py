"""A script that hangs: its stacks go to another process, which shows what it waits for. The script goes on as it does.

hotlap starts no thread of Python beside a script. Python's faulthandler has a thread in C which takes none of
Python's locks. It ends before each fork and begins again after it. A script that uses it itself is left alone.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.guard.hangs import BEFORE_FIRST, LONGEST_GAPS, USUAL_STEPS, hang_s, watch_end
from hotlap.script.lookout import EVERY_S
from hotlap.script.patches import Patches

LATER, CANCEL = "dump_traceback_later", "cancel_dump_traceback_later"
MOST_REPORT = 2**16
"""Bytes of a report to keep in the ledger."""
READER = (
    "import os, sys; os.fork() and os._exit(0)\n"  # the script has no child that it did not start
    "sys.path += {path!r}; from hotlap.guard.hang_reader import main; main({pid}, {dumps}, {kept}, {gpu}, {slack_s})"
)
END_S = 5.0


class ScriptHangs:
    """Looks whether a script makes steps. Between two steps, every few seconds, the session calls `stepped`."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._least_s: float | None = None
        self._limit_s = 0.0
        """Seconds after which the stacks are written; 0 while nothing is watched."""
        self._dumps = self._kept = -1
        self._close_dumps: Callable[[], object] = lambda: None
        self._reader: subprocess.Popen[bytes] | None = None
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] = (0.0, 0)
        self._longest_s = 0.0
        self._later, self._cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later

    @property
    def is_watching(self) -> bool:
        """Whether a step is waited for."""
        return self._limit_s > 0

    def begin(self, *, on_gpu: bool) -> None:
        """The script begins to read data for its training."""
        if self._dumps >= 0 or sys.platform != "linux":
            return
        self._least_s = hang_s()
        if self._least_s is None:
            return
        reading, self._dumps = os.pipe()
        # A pipe that is full, or that nobody reads, holds up neither the thread nor the script.
        os.set_blocking(self._dumps, False)
        self._kept = os.memfd_create("hang")
        self._close_dumps = weakref.finalize(self, os.close, self._dumps)
        for number in (reading, self._kept):
            weakref.finalize(self, os.close, number)
        # Not the script's own path: a module there may have the name of one of Python's.
        path = [str(Path(psutil.__file__).parents[1]), str(Path(__file__).parents[2])]
        code = READER.format(path=path, pid=os.getpid(), dumps=reading, kept=self._kept, gpu=on_gpu, slack_s=EVERY_S)
        self._reader = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            pass_fds=(reading, self._kept),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for name in (LATER, CANCEL):
            self._patches.put(faulthandler, name, self._leaving)
        watch_end(os.getpid())
        _register(weakref.ref(self))
        self._arm(BEFORE_FIRST * self._least_s)

    def stepped(self, steps: int) -> None:
        """The training has made so many steps."""
        if self._reader is not None:
            self._reader.poll()  # it has forked, and ended
        if self._least_s is None:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = now, steps
        else:
            self._longest_s = max(self._longest_s, now - self._last[0] - EVERY_S)
        self._last = now, steps
        made = steps - self._first[1]
        usual_s = (now - self._first[0]) / made if made > 0 else 0.0
        self._arm(max(self._least_s, USUAL_STEPS * usual_s, LONGEST_GAPS * self._longest_s))

    def rest(self) -> None:
        """All steps are made: what the script does now is no training. A further step ends the rest."""
        self._disarm()
        self._limit_s = 0.0

    def write_down(self, ledger: Ledger, plan: Plan) -> str | None:
        """Add what was shown to a ledger; its first line, if there is one."""
        if self._kept < 0 or not os.fstat(self._kept).st_size:
            return None
        stacks = os.pread(self._kept, MOST_REPORT, 0).decode(errors="replace").strip()
        os.truncate(self._kept, 0)
        os.lseek(self._kept, 0, os.SEEK_SET)
        ledger.record(Entry(step=ledger.last_step, what="hang", outcome="fault", plan=plan, why=stacks))
        return stacks.partition("\n")[0]

    def close(self) -> None:
        """Look no more."""
        self.rest()
        self._least_s = None
        self._close_dumps()  # the reader ends
        if self._reader is not None:
            with suppress(subprocess.TimeoutExpired):
                self._reader.wait(END_S)
        for name in (LATER, CANCEL):
            self._patches.take_out(f"{faulthandler.__name__}.{name}")

    def _arm(self, limit_s: float) -> None:
        self._limit_s = limit_s
        with suppress(RuntimeError, OSError, ValueError):  # no thread; a script that has closed all files
            # Steps between two calls of `stepped` are not seen.
            self._later(limit_s + EVERY_S, repeat=True, file=self._dumps)

    def _disarm(self) -> None:
        if self._limit_s:
            self._cancel()

    def _leaving(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The script uses faulthandler's thread itself, of which there is one."""

        @functools.wraps(own)
        def left(*args: Any, **kwargs: Any) -> Any:
            self.rest()
            self._least_s = None
            return own(*args, **kwargs)

        return left


def _register(hangs: weakref.ref[ScriptHangs]) -> None:
    """A fork must not find the thread: what it leaves behind in the child would never end."""

    def before() -> None:
        if (watched := hangs()) is not None:
            watched._disarm()

    def after() -> None:
        if (watched := hangs()) is not None and watched._limit_s:
            watched._arm(watched._limit_s)

    def in_child() -> None:
        if (watched := hangs()) is not None:
            watched._limit_s, watched._least_s = 0.0, None

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)
