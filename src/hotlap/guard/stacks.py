"""What the stacks of a process that makes no progress say: what it waits for, and where. Needs no torch."""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

_STDLIB, _HOTLAP = f"{Path(os.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/")
NEAR: Final = 12
"""The innermost calls that show what a thread waits for."""
MOST_USERS, MOST_INNER, MOST_THREADS = 8, 3, 6
"""The user's calls and the innermost other calls of one thread, and threads, that a report shows."""


class Call(NamedTuple):
    """One call on a stack."""

    file: str
    line: int
    name: str

    @property
    def text(self) -> str:
        """The line of code."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def is_users(self) -> bool:
        """Whether it is code of neither Python, a library nor hotlap."""
        path = self.file.replace(os.sep, "/")
        return not (self.file.startswith((_STDLIB, _HOTLAP, "<frozen")) or any(folder in path for folder in _LIBRARIES))

    def __str__(self) -> str:
        folder = f"{Path.cwd()}{os.sep}"
        inside = self.file.startswith(folder)
        file = self.file[len(folder) :] if inside else "/".join(Path(self.file).parts[-2:])
        return f"{file}:{self.line} {self.name}"


@dataclass(frozen=True)
class Stack:
    """The calls of one thread, the innermost first."""

    thread: str
    calls: tuple[Call, ...]

    def lines(self, head: str = "thread ") -> list[str]:
        """The user's calls with their code, and the innermost calls of libraries."""
        users = [(number, call) for number, call in enumerate(self.calls) if call.is_users]
        inner = [str(call) for call in self.calls[: users[0][0] if users else None]]
        inside = f"in {' < '.join(inner[:MOST_INNER])}{' < …' if len(inner) > MOST_INNER else ''}"
        if not users:
            return [f"  {head}{self.thread} {inside}" if inner else f"  {head}{self.thread}"]
        found = [f"    {call}: {call.text}" if call.text else f"    {call}" for _, call in users[:MOST_USERS]]
        more = [f"    … {len(users) - MOST_USERS} more calls of yours"] if len(users) > MOST_USERS else []
        return [f"  {head}{self.thread}", *found, *more, *([f"    {inside}"] if inner else [])]


def stacks_here(first: int) -> list[Stack]:
    """The stacks of this process's threads, beginning with the thread `first`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda one: one[0] != first)
    return [Stack(names.get(ident, str(ident)), tuple(_calls(frame))) for ident, frame in frames]


def _calls(frame: FrameType | None) -> Iterator[Call]:
    while frame is not None:
        yield Call(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*\n((?:  [^\n]*\n?)*)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def read_stacks(text: str) -> list[Stack]:
    """The stacks in what Python's faulthandler has written, the main thread first."""
    found = [
        Stack(name, tuple(Call(file, int(line), called) for file, line, called in _CALL.findall(calls)))
        for name, calls in _THREAD.findall(text)
    ]
    return [Stack("MainThread", one.calls) for one in found[-1:]] + found[:-1]


def of_worker(pid: int, state: str, text: str) -> list[str]:
    """A worker process of torch's loader in lines: its state, and what it runs as far as faulthandler has written."""
    name, calls = f"{pid} {state}", list[Call]()
    for call in read_stacks(text)[0].calls if text else ():
        if call.name == "_worker_loop":  # what lies beneath was the parent's
            break
        calls.append(call)
    return Stack(name, tuple(calls)).lines("worker ")


def report(stacks: Sequence[Stack]) -> list[str]:
    """The stacks in lines, the first one first; threads of hotlap are left out."""
    others = [stack for stack in stacks[1:] if not stack.thread.startswith("hotlap ")]
    shown = [*stacks[:1], *others[: MOST_THREADS - 1]]
    lines = [line for one in shown for line in one.lines()]
    left = len(others) + 1 - len(shown)
    return [*lines, f"  and {left} more thread{'s' if left > 1 else ''}"] if left > 0 else lines


# --- what a thread waits for ------------------------------------------------------------------------


class Wait(NamedTuple):
    """What a thread waits for."""

    kind: str
    words: str
    cause: str = ""
    """Why that does not come, as far as the stack shows it."""


WORKERS: Final = Wait("workers", "a batch from worker processes")
DATASET: Final = Wait("dataset", "a batch from the dataset, in this process")
COMPILER: Final = Wait("compiler", "torch's compiler")
COLLECTIVE: Final = Wait("collective", "a collective of torch.distributed")
LOCK: Final = Wait("lock", "a lock or another thread")
PROCESS: Final = Wait("process", "another process")
READ: Final = Wait("read", "a read from disk or network")
GPU: Final = Wait("gpu", "the GPU")
THREADS: Final = Wait("threads", "threads that still run after its end")
CODE: Final = Wait("code", "code in this process")

_PLACES: Final = (
    (WORKERS, "torch/utils/data/dataloader.py", ("_try_get_data", "_get_data")),
    (COMPILER, "torch/_dynamo/convert_frame.py", ()),
    (COMPILER, "torch/_inductor/compile_fx.py", ()),
    (COMPILER, "triton/compiler/compiler.py", ()),
    (DATASET, "torch/utils/data/_utils/fetch.py", ()),
    (DATASET, "hotlap/data/sources.py", ("read", "fetch", "gather", "<listcomp>")),
    (THREADS, "threading.py", ("_shutdown",)),
)
"""Calls, also outer ones, that tell by themselves what is waited for; the first that is on the stack counts."""
_FILES: Final = (
    (COLLECTIVE, ("torch/distributed/", "torch/nn/parallel/distributed.py")),
    (GPU, ("torch/cuda/",)),
    (READ, ("/socket.py", "/ssl.py", "/http/client.py", "/urllib3/", "/requests/", "/fsspec/")),
    (PROCESS, ("/subprocess.py", "/multiprocessing/")),
    (LOCK, ("/threading.py", "/queue.py", "/concurrent/futures/")),
)
_TEXTS: Final = (
    (LOCK, re.compile(r"\.acquire\(|^with [\w.\[\]]+:|\.wait\(|\.join\(\)")),
    (GPU, re.compile(r"\.item\(|\.cpu\(|\.tolist\(|synchronize\(|\.cuda\(")),
    (PROCESS, re.compile(r"waitpid\(|os\.wait\(")),
    (READ, re.compile(r"\bopen\(|\.read\w*\(|\.recv\w*\(|\binput\(|\.readline|imread|\bload\w*\(|\.download")),
)
"""Code that waits, for the innermost lines, since calls of C code are on no stack."""
_ATTENDED: Final = ("/pdb.py", "/bdb.py", "/pydevd", "/tkinter/", "/matplotlib/")
_ON_ITS_WAY: Final = (
    "hotlap/engine/evaluate.py", "hotlap/engine/capture/", "hotlap/tuner/", "hotlap/guard/saving.py", "hotlap/store/"
)  # fmt: skip


def waiting_for(calls: Sequence[Call], *, on_gpu: bool) -> Wait:
    """What a thread with these calls waits for."""
    files = [call.file.replace(os.sep, "/") for call in calls]
    for wait, file, names in _PLACES:
        if any(
            one.endswith(file) and (not names or call.name in names) for one, call in zip(files, calls, strict=True)
        ):
            cause = _cause(calls, on_gpu=on_gpu) if wait is DATASET else CODE
            return wait if cause is CODE else wait._replace(cause=f", which waits for {cause.words}")
    return _cause(calls, on_gpu=on_gpu)


def _cause(calls: Sequence[Call], *, on_gpu: bool) -> Wait:
    """The same from the innermost calls, as far as the user's own."""
    for call in calls[:NEAR]:
        path = call.file.replace(os.sep, "/")
        by_text = (wait for wait, pattern in _TEXTS if pattern.search(call.text))
        by_file = (wait for wait, parts in _FILES if not call.is_users and any(part in path for part in parts))
        for wait in (*by_file, *by_text):
            if wait is not GPU or on_gpu:
                return wait
        if call.is_users:
            break
    return CODE


def is_attended(calls: Sequence[Call]) -> bool:
    """Whether it waits for a person: in a debugger, or before a window."""
    inner = itertools.takewhile(lambda call: not call.is_users, calls)
    return any(part in call.file.replace(os.sep, "/") for call in inner for part in _ATTENDED)


def is_long(calls: Sequence[Call]) -> bool:
    """Whether it evaluates, saves, tunes, compiles or captures, which takes its time."""
    return any(
        part in call.file.replace(os.sep, "/")
        for call in calls
        for part in (*_ON_ITS_WAY, *(file for wait, file, _ in _PLACES if wait is COMPILER))
    )
