"""A function over many items in several processes: in order, with progress, and errors that name their item.

This file does not import torch: without torch a process starts in a tenth of the time."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar, cast

from hotlap.core.errors import DataError, HotlapError, first_line, shown
from hotlap.core.terminal import is_terminal, logger, say, write
from hotlap.core.units import show_rate, show_seconds
from hotlap.machine.limits import most_workers, read_cpu

if TYPE_CHECKING:
    from hotlap.store.cache import Cache


PATIENCE_S = 1.0
"""Work that is done before has no bar."""
LIVE_S, LINES_S = 0.2, 15.0
"""Seconds between two views of it, in a terminal and in a log."""
WIDTH = 30


@contextlib.contextmanager
def progress_bar(stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Inside `with`, a function that is told how many items are done, of how many; HOTLAP_PROGRESS=off|lines counts."""
    stream = stream or sys.stderr
    asked = os.environ.get("HOTLAP_PROGRESS", "").strip().lower()
    # Without a console, as under pythonw, there is no stderr.
    if asked == "off" or stream is None:
        yield lambda done, total: None
        return
    live = is_terminal(stream) and asked != "lines" and os.environ.get("TERM") != "dumb"
    bar = _Bar(stream, live=live)
    try:
        yield bar.show
    finally:
        bar.close()


class _Bar:
    def __init__(self, stream: TextIO, *, live: bool) -> None:
        self._stream, self._live, self._width = stream, live, 0
        self._began: tuple[float, int] | None = None
        """When it was first told of items, and how many were done then: some may have been before."""
        self._next_s = 0.0

    def show(self, done: int, total: int) -> None:
        """Draw it anew, unless the last one is fresh."""
        now_s = time.monotonic()
        if self._began is None:
            self._began, self._next_s = (now_s, done), now_s + PATIENCE_S
        began_s, first = self._began
        if now_s < self._next_s or done == first:
            return
        self._next_s = now_s + (LIVE_S if self._live else LINES_S)
        each_s = (now_s - began_s) / (done - first)
        left_s = each_s * (total - done)
        told = f"{done:,}/{total:,} · {show_rate(1 / max(each_s, 1e-9))} a second · {show_seconds(left_s)} left"
        if not self._live:
            say(told, stream=self._stream)
            return
        filled = round(WIDTH * done / max(1, total))
        self._draw(f"{'━' * filled}{' ' * (WIDTH - filled)} {told}")

    def close(self) -> None:
        """Take it away."""
        if self._width:
            self._draw("")
            self._draw("")

    def _draw(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            write(self._stream, f"\r{line:<{self._width}}")
        self._width = len(line)


log = logger(__name__)

Progress = Callable[[int, int], None]
"""Told how many items are done, of how many."""

TRIED_S = 0.5
"""How long items are done here before it is decided whether processes pay."""
START_S = 4.0
"""What it takes to start processes that import torch."""
GROUP_S = 0.1
"""Work that is sent at a time: enough that the sending costs nothing, little enough to show progress."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Failure(NamedTuple):
    """Where in a group and why a function failed."""

    at: int | None
    """None where `why` says it."""
    why: str
    trace: str


def parallel_map(
    f: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    workers: int | None = None,
    progress: Progress | bool | None = True,
    cache: Cache | bool = False,
) -> list[_Result]:
    """`[f(item) for item in items]`, in several processes where that is faster.

    Without `workers` the first items are done here; where they show that the rest takes longer than starting
    processes, all cores but one work on it. With `workers`, so many processes start at once, at most four for each
    core; 1 stays here. They are started afresh, not forked, so `f` has to be a function of a file; where it is none, or
    the script would be run anew by each of them, everything is done here, and the log says why. Raises DataError that
    names the item which `f` failed at; an error of hotlap's own says by itself where it arose. Ctrl-C ends the
    processes too.

    `progress` is told how many are done; True shows a bar on stderr where the work takes long, None and False nothing.
    With `cache` (True: hotlap's own) results are kept as they come, by the items and by the source of `f` and of what
    it calls outside of libraries, so that a call that was interrupted goes on where it was; StoreError where there is
    no key to keep them by.
    """
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise DataError(f"workers={shown(workers)} must be a whole number of at least 1")
    if workers is not None and workers > (most := most_workers()):
        log.warning("workers=%s is too many for this process: %d are started", shown(workers), most)
        workers = most
    if not callable(f):
        raise DataError(f"f={shown(f)} is no function; give one that takes an item")
    if not isinstance(items, Iterable):
        raise DataError(
            f"items={shown(items)} cannot be gone through; give a list, or whatever gives one item at a time"
        )
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise DataError(
            f"progress={shown(progress)} must be True, False or a function of how many are done, of how many"
        )
    given = list(items)
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(progress_bar()) if progress is True else (progress or None)
        if cache is False:
            return cast("list[_Result]", _mapped(_Work(f, given, range(len(given)), told), workers))
        from hotlap.data.kept_results import KeptResults  # imports torch
        from hotlap.store.cache import Cache

        if cache is not True and not isinstance(cache, Cache):
            raise DataError(f"cache={shown(cache)} must be True, False or a hotlap.store.cache.Cache")
        kept = stack.enter_context(KeptResults(f, given, None if cache is True else cache))
        left = [at for at in range(len(given)) if at not in kept.found]
        if told is not None and kept.found:
            told(len(kept.found), len(given))
        _mapped(_Work(f, [given[at] for at in left], left, told, kept.add, len(kept.found)), workers)
        return cast("list[_Result]", [kept.found[at] for at in range(len(given))])


@dataclass(frozen=True)
class _Work:
    """What is to be done, and who is told of it."""

    f: Callable[..., Any]
    items: list[Any]
    numbers: Sequence[int]
    """The number of each item among all that were given."""
    progress: Progress | None = None
    keep: Callable[[int, Any], None] | None = None
    """Told the number of an item and its result, as they come."""
    before: int = 0
    """Items that were done before."""

    def tell(self, done: int) -> None:
        """Show how far it is."""
        if self.progress is not None:
            self.progress(self.before + done, self.before + len(self.items))

    def came(self, at: int, results: Sequence[Any]) -> None:
        """Results have come, of the items from there on."""
        if self.keep is not None:
            for here, result in enumerate(results, at):
                self.keep(self.numbers[here], result)

    def told(self, at: int, why: str) -> str:
        """Where and why it failed."""
        return f"item {self.numbers[at]}, {shown(self.items[at])}: {why}"


def _mapped(work: _Work, workers: int | None) -> list[Any]:
    results: list[Any] = []
    most = workers or max(1, read_cpu().cores - 1)
    began = time.perf_counter()
    for done in _run_here(work, results):
        took_s, left = time.perf_counter() - began, len(work.items) - done
        # The first item tells how much to send at a time; half a second of them, whether to send any.
        saved_s = took_s / done * left * (1 - 1 / most) if took_s >= TRIED_S else 0.0
        if most == 1 or left == 0 or (workers is None and saved_s < START_S):
            continue
        reason = why_not_in_processes(work.f)
        if reason is None:
            size = max(1, min(int(GROUP_S * done / took_s), left // (4 * most)))
            results += _run_in_processes(work, done, most, size)
            break
        log.warning("one process does all the work: %s", reason)
        most = 1
    return results


def why_not_in_processes(f: Callable[..., Any]) -> str | None:
    """Why other processes cannot call `f`, or None where they can."""
    if multiprocessing.current_process().daemon:
        return "this process is a worker itself, which may start no others"
    name = getattr(f, "__qualname__", None) or type(f).__name__
    try:
        sent = pickle.dumps(f)
    except Exception as error:
        return f"{name} cannot be sent to another process ({first_line(error)}); write it as a function of a file"
    main = sys.modules["__main__"]
    path, module = getattr(main, "__file__", None), getattr(getattr(main, "__spec__", None), "name", "")
    if path is None or module.rpartition(".")[2] == "__main__":  # processes do not run the latter, of a package, anew
        where = "a notebook or a shell" if path is None else Path(path).name
        is_there = b"__main__" in sent
        return (
            f"{name} is written in {where}, where no other process finds it; write it in a file" if is_there else None
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"{path} is no file that other processes could read; write it in one"
    except (OSError, UnicodeDecodeError):
        return None
    if "__main__" not in text:
        return f'{Path(path).name} would be run by each process: put its work under if __name__ == "__main__":'
    if getattr(f, "__module__", None) == "__main__" and _is_under_guard(name.partition(".")[0], text):
        return f'{name} is written under if __name__ == "__main__":, which no other process runs; write it above'
    return None


def _is_under_guard(name: str, text: str) -> bool:
    """Whether a program makes what it calls so only where it is run itself."""
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    guards = [one for one in statements if isinstance(one, ast.If) and "__main__" in ast.unparse(one.test)]
    return any(name in _made_in(one) for one in guards) and not any(
        name in _made_in(one) for one in statements if one not in guards
    )


def _made_in(statement: ast.stmt) -> set[str]:
    """The functions and classes that a statement may make."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {one.name for one in ast.walk(statement) if isinstance(one, kinds)}


def _run_here(work: _Work, results: list[Any]) -> Iterator[int]:
    """Do one item after the other into `results`; how many are done, after each."""
    told_s = time.perf_counter()
    for at, item in enumerate(work.items):
        try:
            results.append(work.f(item))
        except HotlapError:
            raise
        except Exception as error:
            raise DataError(work.told(at, _why(error))) from error
        work.came(at, results[-1:])
        now_s, last = time.perf_counter(), at == len(work.items) - 1
        if last or now_s - told_s >= GROUP_S:
            work.tell(at + 1)
            told_s = now_s
        yield at + 1


def _run_in_processes(work: _Work, first: int, workers: int, size: int) -> list[Any]:
    """The results of all items from the first on, in order, from processes that get a group of items at a time."""
    # Started afresh: a fork would inherit CUDA, and the locks that other threads hold.
    context = multiprocessing.get_context("spawn")
    items = work.items
    results: list[Any] = [None] * (len(items) - first)
    starts = iter(range(first, len(items), size))
    processes: list[SpawnProcess] = []
    busy: dict[Connection, tuple[SpawnProcess, int]] = {}
    done = first

    def give(ours: Connection, process: SpawnProcess) -> None:
        if (start := next(starts, None)) is not None:
            busy[ours] = process, start
            _send(ours, items[start : start + size])

    try:
        for _ in range(min(workers, -(-len(results) // size))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(work.f, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            give(ours, process)
        while busy:
            for ours in cast("list[Connection]", wait(list(busy))):
                process, start = busy.pop(ours)
                found = _received(ours, process)
                if isinstance(found, Failure):
                    raise _raised(found, start, work)
                results[start - first : start - first + len(found)] = found
                work.came(start, found)
                done += len(found)
                work.tell(done)
                give(ours, process)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    return results


def _serve(f: Callable[..., Any], theirs: Connection) -> None:
    """What a process does: call `f` with every item of each group it is sent, until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    # Every core has a process: threads would only take turns.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            found = _group_done(f, theirs.recv())
            try:
                theirs.send(found)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                theirs.send(Failure(0, f"what it gives cannot be sent back ({_why(error)})", traceback.format_exc()))


def _group_done(f: Callable[..., Any], group: list[Any]) -> list[Any] | Failure:
    found: list[Any] = []
    try:
        for item in group:
            found.append(f(item))  # noqa: PERF401 -- how many are done is asked for after an error
    except HotlapError as error:
        return Failure(None, str(error), traceback.format_exc())
    except Exception as error:
        return Failure(len(found), _why(error), traceback.format_exc())
    return found


def _raised(failure: Failure, start: int, work: _Work) -> DataError:
    error = DataError(failure.why if failure.at is None else work.told(start + failure.at, failure.why))
    error.add_note(f"In the worker process:\n{failure.trace}")
    return error


def _send(ours: Connection, group: list[Any]) -> None:
    try:
        ours.send(group)
    except ConnectionError:
        pass  # the process has ended, which shows where its answer is awaited
    except Exception as error:
        raise DataError(f"the items cannot be sent to another process: {_why(error)}") from error


def _received(ours: Connection, process: SpawnProcess) -> Any:
    try:
        return ours.recv()
    except (EOFError, ConnectionError):
        process.join()
        code = process.exitcode
        why = "it was killed, as for want of memory" if code == -signal.SIGKILL else "what it printed may say why"
        raise DataError(f"a worker process ended with exit code {code}: {why}; workers=1 works without any") from None


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
