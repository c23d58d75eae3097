"""A process beside a script: it reads the stacks of one that makes no step, and shows what the script waits for.

The script itself runs no thread of Python for this: Python's faulthandler writes its stacks from a thread in C.
"""

from __future__ import annotations

import os
import re
import select
from contextlib import suppress

from hotlap.core.terminal import say
from hotlap.core.units import show_seconds
from hotlap.guard.processes import children_of, is_at_work, state_of, work_so_far
from hotlap.guard.stacks import GPU, WORKERS, is_attended, of_worker, read_stacks, report, waiting_for

MOST_REPORTS = 8
WINDOW = 0.25
"""The share of the time without a step for which it looks whether the script works."""
PAUSE_S = 0.3
"""The stacks are written when for so long nothing more comes."""
_TIMEOUT = re.compile(r"Timeout \((?:(\d+) days?, )?(\d+):(\d+):(\d+(?:\.\d+)?)\)!")


def main(pid: int, dumps: int, kept: int, on_gpu: bool, slack_s: float) -> None:
    """Read what the process `pid` writes to `dumps` until it ends; what is shown also goes to the file `kept`.

    Its stacks come so many seconds later than they might.
    """
    with suppress(OSError):  # it has ended
        _Reader(pid, dumps, kept, on_gpu, slack_s).run()


class _Reader:
    def __init__(self, pid: int, dumps: int, kept: int, on_gpu: bool, slack_s: float) -> None:
        self._pid, self._dumps, self._kept, self._on_gpu, self._slack_s = pid, dumps, kept, on_gpu, slack_s
        self._end = os.pidfd_open(pid)

    def run(self) -> None:
        shown: list[object] = []
        while len(shown) < MOST_REPORTS and self._waits(None, self._dumps):
            text = b""
            while self._waits(PAUSE_S, self._dumps):
                more = os.read(self._dumps, 2**16)
                if not more:  # the script is watched no more, and its process lives on
                    return
                text += more
            written = text.decode(errors="replace")
            stacks, waited_s = read_stacks(written), _seconds(written) - self._slack_s
            calls = stacks[0].calls if stacks else ()
            if not calls or calls in shown or is_attended(calls):
                continue
            wait = waiting_for(calls, on_gpu=self._on_gpu)
            window_s, before = WINDOW * waited_s, work_so_far(self._pid)
            if self._waits(window_s) or (wait is not GPU and is_at_work(before, work_so_far(self._pid), window_s)):
                continue
            workers = children_of(self._pid) if wait is WORKERS else []
            why = f"no step for {show_seconds(waited_s)}: the script waits for {wait.words}{wait.cause}"
            lines = [why, *(line for one in workers for line in of_worker(one, state_of(one), "")), *report(stacks)]
            shown.append(calls)
            os.write(self._kept, "".join(f"{line}\n" for line in lines).encode())
            say(f"hotlap  {lines[0]}", *lines[1:])

    def _waits(self, seconds: float | None, *files: int) -> bool:
        """Whether one of these files is readable within so many seconds, or, without files, the process ends."""
        ready, _, _ = select.select([*files, self._end], [], [], seconds)
        if self._end in ready and files:
            raise ProcessLookupError
        return bool(ready)


def _seconds(text: str) -> float:
    found = _TIMEOUT.search(text)
    if found is None:
        return 0.0
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds
