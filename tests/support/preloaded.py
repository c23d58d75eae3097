"""A python that has loaded torch already: each command runs in a fork of it, as a fresh process would run it.

To load torch takes two seconds of a core, and libraries on top of it take more; to fork takes none. The process that is
forked imports and does nothing else, so that it has no threads. What a fork does not show is told by tests that start
processes of their own.
"""

import atexit
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import dispositions


class Preloaded:
    """Runs what is written after `python`, with modules imported before it starts."""

    def __init__(self, *modules, environment):
        """Variables that a module reads when it is imported belong into this environment."""
        self._environment = environment
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules], env=environment, start_new_session=True,
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def run(self, *words, cwd, timeout_s=600, environment=None, stdout=None, stderr=None, **variables):
        """Run it in a folder, with these variables on top of the environment, and wait for it.

        Where `stdout` or `stderr` is an open file, what it prints there goes to that file.
        """
        environment = self._environment if environment is None else dict(environment)
        order = {"words": [*map(str, words)], "cwd": str(cwd), "environment": environment | variables}
        mine, theirs = socket.socketpair()
        with mine, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with theirs, Path(os.devnull).open() as nothing:
                streams = [one.fileno() for one in (nothing, stdout or out, stderr or err, theirs)]
                socket.send_fds(self._line, [json.dumps(order).encode()], streams)
            mine.settimeout(timeout_s)  # what is still running when this line is closed is ended
            told = mine.recv(16)
            assert told, f"the process that was to run {words} is gone"
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(words, int(told), out.read().decode(), err.read().decode())

    def close(self):
        self._line.shutdown(socket.SHUT_RDWR)  # workers that a test has left behind hold copies of it
        self._line.close()
        self._process.wait(600)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what nobody waited for


def serve(line):
    """Fork for every order, until nobody gives any."""
    while True:
        order, streams, *_ = socket.recv_fds(line, 1 << 20, 4)
        if not order:
            return None
        if os.fork() == 0:
            line.close()
            return keep(json.loads(order), streams)
        for stream in streams:
            os.close(stream)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def keep(order, streams):
    """Have a fork run the order, and tell its exit code; where nobody waits for that any more, end the fork."""
    *streams, answer = streams
    awake, ended = socket.socketpair()
    ended.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended.fileno())
    pid = os.fork()
    if pid != 0:
        for stream in streams:
            os.close(stream)
        if awake not in select.select([awake, answer], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            os.write(answer, str(code).encode())
        os._exit(0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awake.close()
    ended.close()
    os.close(answer)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return order


def become(words, cwd, environment):
    """Be what `python` would be with these words."""
    dispositions.reset()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.process.ORIGINAL_DIR = cwd
    tempfile.tempdir = None  # found anew, where this environment has it
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # python's own module does so by itself
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.orig_argv = [sys.executable, *words]
    first, *rest = words
    if first == "-m":
        sys.path[0], sys.argv = cwd, ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])
    elif first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        sys.path[0], sys.argv = str(Path(first).resolve().parent), words
        file = str(Path(cwd) / first)
        main.__file__, main.__loader__ = file, SourceFileLoader("__main__", file)
        exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), main.__dict__)


def leave(code):
    """End as python does, but for taking apart what was loaded before: that takes twenty times as long as the fork."""
    threading._shutdown()
    atexit._run_exitfuncs()
    main = vars(sys.modules["__main__"])
    main.update(dict.fromkeys(main.keys() - {"__builtins__"}))
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            code = 120
    os._exit(code)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    assert threading.active_count() == 1
    gc.freeze()  # or each fork would look through all of it for garbage, and copy it
    given = serve(socket.socket(fileno=int(sys.argv[1])))
    if given is not None:
        try:
            become(**given)
            code = 0
        except SystemExit as left:
            if not isinstance(left.code, int | None):
                raise
            code = left.code or 0
        leave(code)
