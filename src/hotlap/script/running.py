"""Runs a script in this process as `python train.py` does, inside a context such as a `Session`."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import linecache
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NoReturn

from hotlap.core.errors import HotlapError
from hotlap.core.terminal import clean_lines, say

BEGAN = "HOTLAP_BEGAN"
"""Environment variable with the file for the script's start time, by `time.perf_counter`, which processes share."""


class NoScriptError(HotlapError):
    """There is nothing that python could run."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to run: a script, or a folder or zip with a `__main__.py`, by its path; or a module by its name."""

    path: str | None = None
    module: str | None = None
    args: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Its short name: `train` for `code/train.py`, or a module's own."""
        return self.module or Path(self.path or "").absolute().stem

    @property
    def words(self) -> list[str]:
        """The words after `python`."""
        return [*(["-m", self.module] if self.module else [self.path or ""]), *self.args]


def look(target: Target) -> None:
    """Check that there is something to run, without running any of it. Raises NoScriptError."""
    if target.path is not None and not Path(target.path).exists():
        raise NoScriptError(f"there is no file {target.path!r}")
    if target.module is not None:
        # Only the outermost package is looked up: finding a module in it would run its code.
        top = target.module.partition(".")[0]
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            found = None
        finally:
            del sys.path[0]
        if found is None:
            raise NoScriptError(f"no module named {top!r} in this folder or on the path")


def check_syntax(target: Target) -> None:
    """Raise SyntaxError if a script is not valid Python. Modules are not checked: finding one may run code."""
    if target.path is not None:
        _script(target.path)


def run(target: Target, around: AbstractContextManager[object] | None = None, seed: int | None = None) -> int:
    """Run the target inside the context `around`, and return its exit code, or minus the number of a signal to end by.

    The target becomes `__main__`. Its error is shown as python shows it, before `around` is closed. If there is nothing
    to run, prints one line and returns 2. `seed` seeds all random generators first.
    """
    guard = _Guard(around)
    ended: BaseException | None = None
    with_text = without_text(files_beneath())
    try:
        look(target)
        # Scripts that cannot run fail before the context is opened; finding a module may run its packages.
        loaded = _script(target.path) if target.path is not None else None
        guard.open()
        _take_over(target)
        if seed is not None:
            _seed(seed)
        main, code = loaded or _module(target.module or "")
        sys.modules["__main__"] = main
        _note_begin()
        exec(code, main.__dict__)
    except BaseException as error:
        ended = error
    try:
        return _show(ended) if ended else 0
    finally:
        guard.close(ended)
        with_text()


def end_by(number: int) -> NoReturn:
    """End the process as this signal does; for SIGINT as python does, after its exit handlers."""
    if number == signal.SIGINT:
        # Everything there was to show has been shown.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError(f"signal {number} ends no process")


# --- the code to run ---------------------------------------------------------------------


def _take_over(target: Target) -> None:
    """Set `sys.argv` and `sys.path` as python does; removes hotlap's own folder, which is missing under -P."""
    sys.argv = [target.path or "-m", *target.args]
    if sys.flags.safe_path:
        return
    if target.path is None:
        sys.path[0] = str(Path.cwd())
    elif pkgutil.get_importer(_full(target.path)) is None:
        sys.path[0] = str(Path(target.path).resolve().parent)
    else:
        sys.path[0] = _full(target.path)


def _full(path: str) -> str:
    """The path as python writes it: absolute, but otherwise as given."""
    return path if Path(path).is_absolute() else f"{Path.cwd()}/{path}"


def _script(path: str) -> tuple[ModuleType, CodeType]:
    """The main module of a file, a folder or a zip, and its code."""
    file = _full(path)
    importer = pkgutil.get_importer(file)
    if importer is not None:
        spec = importer.find_spec("__main__")
        code = spec.loader.get_code("__main__") if spec and spec.loader else None  # type: ignore[attr-defined]
        if spec is None or code is None:
            raise NoScriptError(f"{path!r} has no __main__.py")
        return _main(spec), code
    try:
        source = Path(path).read_bytes()
        importlib.util.decode_source(source)
    except OSError as error:
        raise NoScriptError(f"cannot read {path!r}: {error.strerror or error}") from None
    except (SyntaxError, UnicodeDecodeError):
        source = b"\0"
    if b"\0" in source:
        raise NoScriptError(f"{path!r} is not Python source code")
    main = _main(None, __file__=file, __loader__=SourceFileLoader("__main__", file))
    return main, compile(source, file, "exec", dont_inherit=True)


def _module(name: str) -> tuple[ModuleType, CodeType]:
    """The main module of a module or package, and its code. Imports the packages around it."""
    # The function behind `python -m`; pdb and trace of the standard library use it, too.
    find: Any = runpy._get_module_details  # type: ignore[attr-defined]
    _, spec, code = find(name, NoScriptError)
    sys.argv[0] = spec.origin
    return _main(spec), code


def _main(spec: ModuleSpec | None, **own: object) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins, __cached__=None, **own)
    if spec is not None:
        main.__dict__.update(
            __cached__=spec.cached,
            __file__=spec.origin,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
        )
    return main


def _note_begin() -> None:
    """Write down when the script itself begins, for `hotlap run --compare`."""
    file = os.environ.pop(BEGAN, None)
    if file:
        with contextlib.suppress(OSError):
            Path(file).write_text(repr(time.perf_counter()))


def _seed(seed: int) -> None:
    import random

    random.seed(seed)
    for name, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        with contextlib.suppress(ImportError):
            getattr(importlib.import_module(name), function)(seed)


# --- how the script ends -----------------------------------------------------------------


def _show(error: BaseException) -> int:
    """Show the script's error as python does, and return the exit code."""
    if isinstance(error, NoScriptError):
        _say(str(error))
        return 2
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            code = int(error.code or 0)
            return code & 0xFF if abs(code) < 2**63 else 0xFF
        _write(f"{error.code}\n")
        return 1
    _forget_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    fault: BaseException | None = None
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as raised:
        fault = raised
    if isinstance(fault, SystemExit):
        return _show(fault)
    if fault is not None:
        _forget_frames(fault)
        _write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(fault), fault, fault.__traceback__)
        _write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _forget_frames(error: BaseException) -> None:
    """Remove hotlap's own frames, which come first."""
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next


class _Guard:
    """The context around the script: opened and closed once, in this process only, and invisible to the script.

    If the script does not handle SIGTERM, the guard closes the context before the process ends. To the script SIGTERM
    still looks unhandled: Lightning, for example, installs its handler only then.
    """

    def __init__(self, context: AbstractContextManager[object] | None) -> None:
        self._context = context
        self._open = False
        self._listens = False
        self._terminated = False
        self._set, self._get = signal.signal, signal.getsignal
        self._masks = threading.local()

    def open(self) -> None:
        """Enter the context; if that fails, the script runs without it."""
        if self._context is None:
            return
        try:
            self._context.__enter__()
        except Exception as error:
            _say(f"{type(error).__name__}: {error}; the script runs without hotlap")
            return
        self._open = True
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._leave_child)
        if threading.current_thread() is threading.main_thread() and self._get(signal.SIGTERM) == signal.SIG_DFL:
            self._listens = True
            self._set(signal.SIGTERM, self._terminate)
            # By name: type checkers treat functions as constant.
            vars(signal).update(signal=self._signal, getsignal=self._getsignal)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the context, after everything that the script has printed."""
        if self._context is None or not self._open:
            return
        self._open = False
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        try:
            self._context.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except BaseException as fault:
            _say(f"{type(fault).__name__}: {fault}, after the end of the script")
        self._let_go()
        if self._terminated:
            end_by(signal.SIGTERM)

    def _let_go(self) -> None:
        """Restore signal handling."""
        if self._listens:
            self._listens = False
            vars(signal).update(signal=self._set, getsignal=self._get)
            if self._get(signal.SIGTERM) == self._terminate:
                self._set(signal.SIGTERM, signal.SIG_DFL)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._terminated:
            self._let_go()
            end_by(signal.SIGTERM)
        self._terminated = True
        # If it is already being closed, the process ends after that.
        if self._open:
            # The signal may have interrupted a write to stderr, which accepts no other write.
            with contextlib.suppress(OSError):
                sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
            self.close()

    def _hold(self) -> None:
        """Block SIGTERM while the script forks: python would lose one that arrives before the child is set up."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _leave_child(self) -> None:
        """A child process of the script closes nothing."""
        self._open = False
        self._let_go()
        self._release()

    def _signal(self, number: int, handler: Any) -> Any:
        if self._listens and number == signal.SIGTERM and handler == signal.SIG_DFL:
            handler = self._terminate
        return self._seen(self._set(number, handler))

    def _getsignal(self, number: int) -> Any:
        return self._seen(self._get(number))

    def _seen(self, handler: Any) -> Any:
        return signal.SIG_DFL if handler == self._terminate else handler


def _say(line: str) -> None:
    say(*clean_lines(f"hotlap: {line}").split("\n"))


def _write(text: str) -> None:
    # The script may have closed its streams, or replaced them.
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


# --- tracebacks without source lines -----------------------------------------------------


HOTLAP = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of hotlap's own code."""


def files_beneath() -> set[str]:
    """The files of hotlap, and of the command that started it, with functions on the stack."""
    found = set[str]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_command = frame.f_globals.get("__name__") == "__main__" and not file.endswith(".py")
        if file.startswith(HOTLAP) or is_command:
            found.add(file)
        frame = frame.f_back
    return found


def without_text(files: Iterable[str]) -> Callable[[], None]:
    """Let tracebacks show frames of these files without their source lines, until the returned function is called.

    torch formats the whole stack at each `torch.manual_seed` while CUDA or XPU is not initialised. Datasets may call
    that for every sample, in workers with the stack they were forked from: 14 µs a frame with its source line, 3
    without.
    """
    cache: dict[str, Any] = linecache.cache
    ours = {file: (0, None, list[str](), file) for file in files}  # linecache does not check files of such entries
    before = {file: cache[file] for file in ours if file in cache}
    cache.update(ours)

    def undo() -> None:
        for file in [file for file, entry in ours.items() if cache.get(file) is entry]:
            del cache[file]
            cache.update({file: before[file]} if file in before else {})

    return undo
