"""A function over many items in several processes: in order, with progress, and errors that name their item.

This file imports torch only for the cache: without torch a process starts in a tenth of the time.
"""

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

from hotlap.core.console import Console, open_console
from hotlap.core.errors import DataError, HotlapError, StoreError, first_line, shown
from hotlap.core.terminal import logger
from hotlap.core.units import show_rate, show_seconds
from hotlap.machine.limits import most_workers, read_cpu

if TYPE_CHECKING:
    from hotlap.store.cache import Cache

log = logger(__name__)

Progress = Callable[[int, int], None]
"""A function of how many items are done, and of how many there are."""

TRIED_S = 0.5
"""Seconds of work in this process before hotlap decides whether others pay."""
START_S = 4.0
"""Seconds that processes take to start where they import torch."""
GROUP_S = 0.1
"""Seconds of work in a group of items: long enough that sending costs nothing, short enough to show progress."""
KEEP_S = 5.0
"""Seconds between two writes of results to the cache: a crash loses no more."""
KIND = "map"
"""Kind of the cache's entries."""
PATIENCE_S = 1.0
"""Shorter work shows no progress bar."""
LIVE_S = 0.2
"""Seconds between two updates of the bar; a log gets fewer."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Failure(NamedTuple):
    """Where in a group a function failed, and why."""

    at: int | None
    """None where `why` names the item."""
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

    Without `workers`, this process does the first items; if they show that the rest takes longer than starting
    processes, all cores but one work on it. With `workers`, hotlap starts so many processes at once, at most four for
    each core; 1 uses none. hotlap spawns the processes, so `f` must be a function in a file. Where processes cannot
    find it, or would run the script anew, this process does all the work, and the log says why. Ctrl-C ends them.

    `progress` is a function of how many items are done and how many there are. True shows a bar on stderr for long
    work, None and False show nothing. With `cache` (True: hotlap's own), the cache keeps results as they come, so that
    an interrupted call continues where it was. The key holds the items, the code of `f` and what that code uses outside
    of libraries.

    Raises DataError that names the item at which `f` failed, and StoreError if no key can hold `f` or the items.
    hotlap's own errors pass unchanged.
    """
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise DataError(f"workers={shown(workers)} must be a whole number of at least 1")
    if workers is not None and workers > (most := most_workers()):
        log.warning("workers=%s is too many for this process: hotlap starts %d", shown(workers), most)
        workers = most
    if not callable(f):
        raise DataError(f"f={shown(f)} is not a function; give one that takes an item")
    if not isinstance(items, Iterable):
        raise DataError(f"items={shown(items)} cannot be iterated over; give a list or another iterable")
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise DataError(f"progress={shown(progress)} must be True, False or a function of items done and items in all")
    given = list(items)
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(progress_bar()) if progress is True else (progress or None)
        if cache is False:
            return cast("list[_Result]", _mapped(_Work(f, given, range(len(given)), report), workers))
        from hotlap.store.cache import Cache  # imports torch

        if cache is not True and not isinstance(cache, Cache):
            raise DataError(f"cache={shown(cache)} must be True, False or a hotlap.store.cache.Cache")
        kept = stack.enter_context(_ResultCache(f, given, Cache() if cache is True else cache))
        left = [at for at in range(len(given)) if at not in kept.found]
        if report is not None and kept.found:
            report(len(kept.found), len(given))
        _mapped(_Work(f, [given[at] for at in left], left, report, kept.add, len(kept.found)), workers)
        return cast("list[_Result]", [kept.found[at] for at in range(len(given))])


@dataclass(frozen=True)
class _Work:
    """The items to do, and where their results and the progress go."""

    f: Callable[..., Any]
    items: list[Any]
    numbers: Sequence[int]
    """The number of each item in the whole list."""
    progress: Progress | None = None
    keep: Callable[[int, Any], None] | None = None
    """Takes the number of an item and its result, as they come."""
    before: int = 0
    """Items done by an earlier call."""

    def report(self, done: int) -> None:
        """Show the progress."""
        if self.progress is not None:
            self.progress(self.before + done, self.before + len(self.items))

    def add(self, at: int, results: Sequence[Any]) -> None:
        """Keep the results of the items from `at` on."""
        if self.keep is not None:
            for here, result in enumerate(results, at):
                self.keep(self.numbers[here], result)

    def error_text(self, at: int, why: str) -> str:
        """At which item the function failed, and why."""
        return f"item {self.numbers[at]}, {shown(self.items[at])}: {why}"


def _mapped(work: _Work, workers: int | None) -> list[Any]:
    results: list[Any] = []
    most = workers or max(1, read_cpu().cores - 1)
    began = time.perf_counter()
    for done in _run_here(work, results):
        took_s, left = time.perf_counter() - began, len(work.items) - done
        # The first item decides the size of a group, half a second of items whether to start processes.
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
    """Why other processes cannot call `f`; None if they can."""
    if multiprocessing.current_process().daemon:
        return "this process is a worker itself and cannot start others"
    name = getattr(f, "__qualname__", None) or type(f).__name__
    try:
        sent = pickle.dumps(f)
    except Exception as error:
        return f"{name} cannot be sent to another process ({first_line(error)}); define it in a file"
    main = sys.modules["__main__"]
    path, module = getattr(main, "__file__", None), getattr(getattr(main, "__spec__", None), "name", "")
    if path is None or module.rpartition(".")[2] == "__main__":  # processes do not run __main__ of a package anew
        where = "a notebook or a shell" if path is None else Path(path).name
        if b"__main__" not in sent:
            return None
        return f"{name} is defined in {where}, where no other process finds it; define it in a file"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"other processes cannot read {path}; write the code to a file"
    except (OSError, UnicodeDecodeError):
        return None
    if "__main__" not in text:
        return f'{Path(path).name} would run in each process: put its work under if __name__ == "__main__":'
    if getattr(f, "__module__", None) == "__main__" and _is_under_guard(name.partition(".")[0], text):
        return f'{name} is defined under if __name__ == "__main__":, which no other process runs; define it above'
    return None


def _is_under_guard(name: str, text: str) -> bool:
    """Whether a script defines this name under its `__main__` guard only."""
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    guards = [one for one in statements if isinstance(one, ast.If) and "__main__" in ast.unparse(one.test)]
    return any(name in _defined_in(one) for one in guards) and not any(
        name in _defined_in(one) for one in statements if one not in guards
    )


def _defined_in(statement: ast.stmt) -> set[str]:
    """The functions and classes that a statement may define."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {one.name for one in ast.walk(statement) if isinstance(one, kinds)}


def _run_here(work: _Work, results: list[Any]) -> Iterator[int]:
    """Do one item after the other; yield how many are done."""
    reported_s = time.perf_counter()
    for at, item in enumerate(work.items):
        try:
            results.append(work.f(item))
        except HotlapError:
            raise
        except Exception as error:
            raise DataError(work.error_text(at, _why(error))) from error
        work.add(at, results[-1:])
        now_s, last = time.perf_counter(), at == len(work.items) - 1
        if last or now_s - reported_s >= GROUP_S:
            work.report(at + 1)
            reported_s = now_s
        yield at + 1


def _run_in_processes(work: _Work, first: int, workers: int, size: int) -> list[Any]:
    """The results of all items from `first` on, in order; each process gets a group of items at a time."""
    # A fork would inherit CUDA and the locks that other threads hold.
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
                work.add(start, found)
                done += len(found)
                work.report(done)
                give(ours, process)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    return results


def _serve(f: Callable[..., Any], theirs: Connection) -> None:
    """The work of a process: call `f` with every item of each group, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends it
    # Each core has a process; threads would only take turns.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            found = _group_done(f, theirs.recv())
            try:
                theirs.send(found)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                theirs.send(Failure(0, f"its result cannot be sent back ({_why(error)})", traceback.format_exc()))


def _group_done(f: Callable[..., Any], group: list[Any]) -> list[Any] | Failure:
    found: list[Any] = []
    try:
        for item in group:
            found.append(f(item))  # noqa: PERF401 -- an error reports how many are done
    except HotlapError as error:
        return Failure(None, str(error), traceback.format_exc())
    except Exception as error:
        return Failure(len(found), _why(error), traceback.format_exc())
    return found


def _raised(failure: Failure, start: int, work: _Work) -> DataError:
    error = DataError(failure.why if failure.at is None else work.error_text(start + failure.at, failure.why))
    error.add_note(f"In the worker process:\n{failure.trace}")
    return error


def _send(ours: Connection, group: list[Any]) -> None:
    try:
        ours.send(group)
    except ConnectionError:
        pass  # the process has ended; `_received` reports it
    except Exception as error:
        raise DataError(f"the items cannot be sent to another process: {_why(error)}") from error


def _received(ours: Connection, process: SpawnProcess) -> Any:
    try:
        return ours.recv()
    except (EOFError, ConnectionError):
        process.join()
        code = process.exitcode
        why = "the system killed it, perhaps for lack of memory" if code == -signal.SIGKILL else "see what it printed"
        raise DataError(f"a worker process ended with exit code {code}: {why}; workers=1 starts no processes") from None


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


# --- the cache --------------------------------------------------------------------------------------


class _ResultCache:
    """Results by the number of their item; inside `with`, the cache keeps them part by part.

    Once all results are there, they become one entry. If the cache cannot store them, the log says so and work goes on.
    """

    def __init__(self, f: Callable[..., Any], items: Sequence[Any], cache: Cache) -> None:
        """Raises StoreError where no key can hold the function or the items."""
        from hotlap.data.content_keys import ContentKeys  # these import torch
        from hotlap.store.keys import key_of

        self._cache, self._items, self._key_of = cache, list(items), key_of
        self._key = key_of(KIND, f, self._items, ContentKeys(exact=False).key("the function", f))
        self._name = getattr(f, "__qualname__", type(f).__name__)
        self.found: dict[int, Any] = {}
        """The results so far."""
        self._new: dict[int, Any] = {}
        self._parts, self._is_whole, self._why_not = 0, False, ""
        self._kept_s = time.monotonic()

    def __enter__(self) -> _ResultCache:
        whole = self._read(self._key)
        self._is_whole = whole is not None
        while whole is None and (part := self._read(self._part_key(self._parts))) is not None:
            self.found |= part
            self._parts += 1
        self.found |= whole or {}
        return self

    def __exit__(self, *how: Any) -> None:
        """Store all results as one entry; if some are missing, those since the last part."""
        if self._is_whole:
            return
        if len(self.found) < len(self._items):
            self._keep_part()
            return
        self._put(self._key, self.found)
        for number in range(self._parts):
            with contextlib.suppress(StoreError):
                self._cache.drop(KIND, self._part_key(number))

    def add(self, number: int, result: Any) -> None:
        """Add the result of an item."""
        self.found[number] = self._new[number] = result
        if time.monotonic() - self._kept_s >= KEEP_S:
            self._keep_part()

    def _keep_part(self) -> None:
        if self._new and self._put(self._part_key(self._parts), self._new):
            self._parts += 1
            self._new = {}
        self._kept_s = time.monotonic()

    def _part_key(self, number: int) -> str:
        return self._key_of(self._key, number)

    def _read(self, key: str) -> dict[int, Any] | None:
        try:
            entry = self._cache.get(KIND, key)
        except StoreError as error:
            log.warning("hotlap does not use earlier results: %s", error)
            return None
        return None if entry is None else dict(zip(entry.values["numbers"], entry.values["results"], strict=True))

    def _put(self, key: str, results: dict[int, Any]) -> bool:
        if self._why_not:
            return False
        values = {"numbers": list(results), "results": list(results.values())}
        facts = {"function": self._name, "items": len(self._items), "done": len(results)}
        try:
            self._cache.put(KIND, key, values=values, facts=facts)
        except StoreError as error:
            self._why_not = str(error)
            log.warning("the cache does not keep results of %s: %s", self._name, error)
            return False
        return True


# --- progress ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_bar(stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Inside `with`, a function of items done and items in all that shows a bar; HOTLAP_PROGRESS=off|lines applies."""
    console = open_console(stream=stream)
    try:
        yield _Bar(console).show
    finally:
        console.close()


class _Bar:
    """Shows work over many items on a console, after some patience."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: tuple[float, int] | None = None
        """Time of the first call, and how many items were done by then."""
        self._next_s = 0.0

    def show(self, done: int, total: int) -> None:
        """Update the bar, unless it is fresh."""
        now_s = time.monotonic()
        if self._began is None:
            self._began, self._next_s = (now_s, done), now_s + PATIENCE_S
        began_s, first = self._began
        if now_s < self._next_s or done == first:
            return
        self._next_s = now_s + LIVE_S
        each_s = (now_s - began_s) / (done - first)
        left_s = each_s * (total - done)
        line = f"{done:,}/{total:,} · {show_rate(1 / max(each_s, 1e-9))} a second · {show_seconds(left_s)} left"
        self._console.show(done, total, lambda width: line)
