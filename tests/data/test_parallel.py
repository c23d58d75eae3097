"""A function over many items: in order, by processes where they pay, and with errors that name their item."""

import contextlib
import functools
import importlib
import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from math import isqrt
from pathlib import Path

import numpy as np
import pytest
from apart import deadly, divided, nested, strict, unsendable, with_its_process

from hotlap.core.errors import DataError, StoreError
from hotlap.data import parallel
from hotlap.data.content_keys import ContentKeys
from hotlap.data.parallel import parallel_map, why_not_in_processes
from hotlap.store.cache import Cache


def script(tmp_path, text, **settings):
    file = tmp_path / "job.py"
    file.write_text(textwrap.dedent(text))
    return subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=600, **settings)


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_results_come_in_the_order_of_the_items(workers):
    assert parallel_map(isqrt, range(100), workers=workers) == [isqrt(k) for k in range(100)]


def test_processes_do_the_work_and_are_gone_afterwards():
    found = parallel_map(with_its_process, range(50), workers=2)
    assert [number for number, _ in found] == list(range(50))
    # The first item is done here, to learn how long one takes.
    others = {process for _, process in found[1:]}
    assert found[0][1] == os.getpid()
    assert os.getpid() not in others
    assert 1 <= len(others) <= 2
    assert not multiprocessing.active_children()


def test_no_item_is_no_result_and_short_work_starts_no_process():
    assert parallel_map(isqrt, [], workers=2) == []
    assert {process for _, process in parallel_map(with_its_process, range(1000))} == {os.getpid()}


def test_without_a_number_of_workers_processes_start_once_the_first_items_show_that_they_pay(monkeypatch):
    monkeypatch.setattr(parallel, "TRIED_S", 0.0)
    monkeypatch.setattr(parallel, "START_S", 0.0)
    monkeypatch.setattr(parallel, "read_cpu", lambda: type("Cpu", (), {"cores": 3}))
    found = parallel_map(with_its_process, range(20))
    assert len({process for _, process in found} - {os.getpid()}) in (1, 2)
    monkeypatch.setattr(parallel, "read_cpu", lambda: type("Cpu", (), {"cores": 1}))
    assert {process for _, process in parallel_map(with_its_process, range(20))} == {os.getpid()}


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_only_grows_and_ends_with_all(workers):
    told = []
    parallel_map(isqrt, range(40), workers=workers, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (40, 40)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_names_the_item_and_keeps_its_cause(workers):
    with pytest.raises(DataError, match=r"item 3, 0: ZeroDivisionError: ") as raised:
        parallel_map(functools.partial(divided, 6), [1, 2, 3, 0, 5], workers=workers)
    cause = str(raised.value.__cause__) + "".join(getattr(raised.value, "__notes__", []))
    assert "division" in cause
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("workers", "kind"), [(1, StoreError), (2, DataError)])
def test_an_error_of_hotlap_says_by_itself_where_it_arose(workers, kind):
    with pytest.raises(kind) as raised:
        parallel_map(strict, range(20), workers=workers)
    assert str(raised.value) == "row 7 of the table is missing"


# --- results that are kept --------------------------------------------------------------------------------


def counted(folder, number):
    """Leaves a trace of each call."""
    (folder / f"{number}-{len(list(folder.glob(f'{number}-*')))}").touch()
    if number == 5 and (folder / "stops").exists():
        raise ValueError("not this one")
    return {"root": isqrt(number), "row": np.arange(number), "pair": (number, str(number))}


def calls(folder):
    return sorted(int(path.name.split("-")[0]) for path in folder.glob("*-*"))


@pytest.fixture
def traced(tmp_path):
    folder = tmp_path / "calls"
    folder.mkdir()
    # By its words, as a part of a key: a Path stands for what is in the file.
    return folder, functools.partial(called_in, str(folder))


def called_in(folder, number):
    return counted(Path(folder), number)


def called_too(folder, number):
    return called_in(folder, number)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_interrupted_goes_on_from_where_it_was(traced, tmp_path, workers):
    folder, f = traced
    cache = Cache(tmp_path / "cache")
    (folder / "stops").touch()
    with pytest.raises(DataError, match=r"item 4, 5: ValueError: not this one"):
        parallel_map(f, range(1, 9), workers=1, cache=cache)
    assert calls(folder) == [1, 2, 3, 4, 5]
    (folder / "stops").unlink()
    told = []
    found = parallel_map(
        f, range(1, 9), workers=workers, cache=cache, progress=lambda done, total: told.append((done, total))
    )
    assert calls(folder) == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert [one["pair"] for one in found] == [(n, str(n)) for n in range(1, 9)]
    assert all(np.array_equal(one["row"], np.arange(n)) for n, one in enumerate(found, 1))
    assert told[0] == (4, 8)
    assert told[-1] == (8, 8)
    # Parts have become one entry, and the third call asks nothing.
    assert [item.facts["done"] for item in cache.list()] == [8]
    again = parallel_map(f, range(1, 9), cache=cache)
    assert [one["root"] for one in again] == [one["root"] for one in found]
    assert len(calls(folder)) == 9


def test_an_error_after_some_were_kept_names_the_item_by_its_own_number(traced, tmp_path):
    folder, f = traced
    (folder / "stops").touch()
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"item 4, 5: ValueError"):
            parallel_map(f, range(1, 9), workers=workers, cache=Cache(tmp_path / "cache"))


def test_other_items_and_another_function_are_done_anew(traced, tmp_path):
    folder, f = traced
    cache = Cache(tmp_path / "cache")
    parallel_map(f, [1, 2], cache=cache)
    parallel_map(f, [1, 3], cache=cache)
    parallel_map(functools.partial(called_too, str(folder)), [1, 3], cache=cache)
    assert calls(folder) == [1, 1, 1, 2, 3, 3]


def test_parts_are_kept_while_it_runs(traced, tmp_path, monkeypatch):
    _, f = traced
    monkeypatch.setattr("hotlap.data.parallel.KEEP_S", 0.0)
    cache = Cache(tmp_path / "cache")
    seen = []
    monkeypatch.setattr("hotlap.data.parallel.GROUP_S", 0.0)
    parallel_map(f, range(1, 5), workers=1, cache=cache, progress=lambda done, total: seen.append(len(cache.list())))
    assert seen == [1, 2, 3, 4]
    assert len(cache.list()) == 1


def test_results_that_no_safe_file_can_hold_are_given_all_the_same(tmp_path, caplog):
    found = parallel_map(some_object, range(3), workers=1, cache=Cache(tmp_path / "cache"))
    assert [type(one) for one in found] == [object] * 3
    assert "the cache does not keep results of some_object" in caplog.text


def some_object(number):
    return object()


def test_a_function_without_source_has_no_key(tmp_path):
    with pytest.raises(StoreError, match="isqrt"):
        parallel_map(isqrt, range(3), cache=Cache(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"f": 3}, "f=3 is not a function"),
        ({"items": 3}, "items=3 cannot be iterated over"),
        ({"progress": "yes"}, "progress='yes' must be True, False or a function"),
        ({"cache": "folder"}, "cache='folder' must be True, False or a"),
        ({"cache": None}, "cache=None must be True, False or a"),
    ],
)
def test_an_argument_that_will_not_do_is_told_in_one_line(given, said):
    with pytest.raises(DataError, match=said):
        parallel_map(**{"f": isqrt, "items": [1], **given})


# --- the bar ----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(parallel, "PATIENCE_S", 0.0)
    monkeypatch.setattr(parallel, "LIVE_S", 0.0)
    monkeypatch.delenv("HOTLAP_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_terminal_has_a_bar_that_is_taken_away(patient):
    with parallel.progress_bar(stream := Terminal()) as told:
        told(1, 12)  # from here on it is timed
        told(3, 12)
        told(12, 12)
    text = stream.getvalue()
    assert text.index("3/12") < text.index("12/12")
    assert "━" in text
    assert "\x1b[2K" in text[text.index("12/12") :], "its line is cleared"


def test_a_log_has_a_line_now_and_then_and_quick_work_nothing(patient, monkeypatch):
    with parallel.progress_bar(stream := io.StringIO()) as told:
        told(1, 12)
        told(3, 12)
        told(6, 12)
    assert stream.getvalue().startswith("3/12 · ")
    assert stream.getvalue().count("\n") == 1
    monkeypatch.setenv("HOTLAP_PROGRESS", "off")
    with parallel.progress_bar(stream := Terminal()) as told:
        told(1, 12)
        told(3, 12)
    assert stream.getvalue() == ""
    monkeypatch.undo()
    with parallel.progress_bar(stream := Terminal()) as told:
        told(1, 12)
        told(3, 12)
    assert stream.getvalue() == ""


def test_the_bar_is_shown_unless_nothing_is_wanted(patient, monkeypatch):
    monkeypatch.setattr(parallel, "GROUP_S", 0.0)
    for progress, is_shown in ((True, True), (False, False), (None, False)):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        parallel_map(isqrt, range(5), workers=1, progress=progress)
        assert ("2/5" in stream.getvalue()) == is_shown


def test_a_killed_process_and_results_that_cannot_be_sent_are_told_in_one_line():
    with pytest.raises(
        DataError, match=r"a worker process ended with exit code -9: the system killed it, perhaps for lack of mem"
    ):
        parallel_map(deadly, range(20), workers=2)
    with pytest.raises(DataError, match=r"its result cannot be sent back"):
        parallel_map(unsendable, range(20), workers=2)
    with pytest.raises(DataError, match=r"the items cannot be sent to another process"):
        parallel_map(callable, [1, lambda: 2, lambda: 3], workers=2)
    with pytest.raises(DataError, match=r"workers=0 must be a whole number of at least 1"):
        parallel_map(isqrt, [1], workers=0)


def test_a_function_that_cannot_be_sent_is_called_here_and_the_log_says_why(caplog):
    with caplog.at_level(logging.WARNING):
        found = parallel_map(lambda number: with_its_process(number), range(10), workers=2)
    assert found == [(number, os.getpid()) for number in range(10)]
    assert "define it in a file" in caplog.text
    assert len(caplog.records) == 1


def test_a_worker_starts_no_workers_of_its_own():
    assert parallel_map(nested, [4, 9, 16], workers=2) == [[2, 4], [3, 9], [4, 16]]


def test_a_script_without_a_guard_is_not_run_by_each_process(tmp_path):
    ran = script(
        tmp_path,
        """
        import os
        from hotlap.data.parallel import parallel_map
        print("begun")
        def own(k): return os.getpid()
        print(set(parallel_map(own, range(9), workers=2)) == {os.getpid()})
        """,
    )
    assert ran.stdout.split() == ["begun", "True"], ran.stderr
    assert "put its work under if __name__ ==" in ran.stderr


def test_functions_of_a_guarded_script_are_found_and_those_of_a_shell_are_not(tmp_path):
    text = """
        import os
        from hotlap.data.parallel import parallel_map
        def own(k): return k, os.getpid()
        if __name__ == "__main__":
            found = parallel_map(own, range(9), workers=2)
            print([k for k, _ in found] == list(range(9)), os.getpid() in {p for _, p in found[1:]})
        """
    ran = script(tmp_path, text)
    assert ran.stdout.split() == ["True", "False"], ran.stderr
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=600)
    assert ran.stdout.split() == ["True", "True"], ran.stderr
    assert "define it in a file" in ran.stderr
    assert why_not_in_processes(isqrt) is None


def test_a_package_that_is_run_needs_no_guard(tmp_path):
    package = tmp_path / "tool"
    package.mkdir()
    (package / "work.py").write_text("import os\n\ndef own(k):\n    return k, os.getpid()\n")
    (package / "__main__.py").write_text(
        "import os\nfrom hotlap import parallel_map\nfrom tool.work import own\ndef here(k): return own(k)\n"
        "print('begun')\n"
        "for f in own, here:\n"
        "    found = parallel_map(f, range(9), workers=2, progress=False)\n"
        "    print([k for k, _ in found] == list(range(9)), os.getpid() in {p for _, p in found[1:]})\n"
    )
    ran = subprocess.run([sys.executable, "-m", "tool"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.stdout.split() == ["begun", "True", "False", "True", "True"], ran.stderr
    assert "here is defined in __main__.py, where no other process finds it" in ran.stderr
    lines = (
        "from math import isqrt",
        "from hotlap.data.parallel import why_not_in_processes",
        "print(why_not_in_processes(isqrt))",
    )
    (package / "__main__.py").write_text("\n".join(lines))
    ran = subprocess.run([sys.executable, tmp_path / "tool"], capture_output=True, text=True, timeout=600)
    assert ran.stdout == "None\n", ran.stderr


def test_ctrl_c_ends_all_processes_without_a_word_from_them(tmp_path):
    file = tmp_path / "job.py"
    file.write_text(
        textwrap.dedent(
            """
            import os, pathlib, sys, time
            from hotlap.data.parallel import parallel_map
            begun = pathlib.Path(__file__).with_name("begun")
            def slow(k):
                if k:  # the first one is done by the program itself
                    (begun / str(os.getpid())).touch()
                    time.sleep(600)
            if __name__ == "__main__":
                import threading
                begun.mkdir()
                def tell():
                    while len(pids := [file.name for file in begun.iterdir()]) < 2: time.sleep(0.05)
                    print(*pids, flush=True)
                threading.Thread(target=tell, daemon=True).start()
                try:
                    parallel_map(slow, range(9), workers=2)
                except KeyboardInterrupt:
                    sys.exit(7)
            """
        )
    )
    # A session of its own, as a terminal's: Ctrl-C reaches every process of it.
    run = subprocess.Popen(
        [sys.executable, file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        children = [int(pid) for pid in run.stdout.readline().split()]
        os.killpg(run.pid, signal.SIGINT)
        _, said = run.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 7
    assert said == ""
    assert len(children) == 2
    assert not any(_is_alive(pid) for pid in children)


def _is_alive(pid):
    for _ in range(1200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def test_a_function_that_only_the_program_itself_makes_is_done_here(tmp_path):
    text = """
        import logging
        from hotlap import parallel_map

        if __name__ == "__main__":
            logging.basicConfig()

            def double(number):
                return 2 * number

            print(parallel_map(double, range(4), workers=2, progress=False))
    """
    done = script(tmp_path, text)
    assert done.stdout == "[0, 2, 4, 6]\n"
    assert 'double is defined under if __name__ == "__main__":' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_comes_by_stdin_does_all_of_it_here():
    text = (
        "import hotlap\ndef same(n): return n\nprint(hotlap.parallel_map(same, range(4), workers=2, progress=False))\n"
    )
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.returncode) == ("[0, 1, 2, 3]\n", 0), done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_kept_is_not_used_once_a_helper_or_a_constant_is_another(tmp_path, forks):
    text = """
        import sys
        sys.dont_write_bytecode = True
        from hotlap import parallel_map
        import tools

        FACTOR = {factor}

        def helped(number):
            return tools.plus(number) * FACTOR

        if __name__ == "__main__":
            print(parallel_map(helped, range(3), cache=True, workers=1, progress=False))
    """

    def ran(factor, plus):
        (tmp_path / "tools.py").write_text(f"def plus(number):\n    return number + {plus}\n")
        (tmp_path / "job.py").write_text(textwrap.dedent(text.format(factor=factor)))
        return forks.run("job.py", cwd=tmp_path, HOTLAP_CACHE=str(tmp_path / "cache")).stdout.strip()

    assert ran(1, 1) == "[1, 2, 3]"
    assert ran(1, 5) == "[5, 6, 7]"
    assert ran(2, 5) == "[10, 12, 14]"


USED = {
    "a helper that a method calls": (
        "def low(x): return {k}\nclass M:\n    def go(self, x): return low(x)\ndef f(x): return M().go(x)"
    ),
    "the base of a class": "class B:\n    def go(self, x): return {k}\nclass M(B): pass\ndef f(x): return M().go(x)",
    "an instance": "class M:\n    def __init__(self): self.k = {k}\nm = M()\ndef f(x): return m.k",
    "a table": "T = {{'k': [{k}]}}\ndef f(x): return T['k'][0]",
    "a table of functions": "def low(x): return {k}\ndef mid(x): return low(x)\nT = [mid]\ndef f(x): return T[0](x)",
    "a set": "T = {{{k}}}\ndef f(x): return x in T",
    "a pattern": "import re\nP = re.compile('a' * {k})\ndef f(x): return P.match(x)",
    "arguments": "import argparse\nA = argparse.Namespace(k={k})\ndef f(x): return A.k",
    "a partial": "import functools\ndef low(k, x): return k\ng = functools.partial(low, {k})\ndef f(x): return g(x)",
    "what is wrapped": (
        "import functools\ndef low(x): return {k}\ndef same(f):\n    @functools.wraps(f)\n    def g(x): return f(x)\n"
        "    return g\n@same\ndef f(x): return low(x)"
    ),
    "a helper with a memory": "import functools\n@functools.lru_cache\ndef low(x): return {k}\ndef f(x): return low(x)",
    "a default": "def low(x): return {k}\ndef mid(x): return low(x)\ndef f(x, g=mid): return g(x)",
    "what it is made with": (
        "def low(x): return {k}\ndef mid(x): return low(x)\n"
        "def make(g):\n    def f(x): return g(x)\n    return f\nf = make(mid)"
    ),
    "a module of a module": "import middle\ndef f(x): return middle.mid(x)",
    "a module it imports itself": "def f(x):\n    from lowest import mid\n    return mid(x)",
}


@pytest.mark.parametrize("text", USED.values(), ids=USED)
def test_what_a_function_uses_is_found_however_it_comes_by_it(tmp_path, monkeypatch, text):
    def used(k):
        folder = tmp_path / str(k)
        folder.mkdir(exist_ok=True)
        (folder / "lowest.py").write_text(f"def mid(x): return {k}\n")
        (folder / "middle.py").write_text("import lowest\ndef mid(x): return lowest.mid(x)\n")
        (folder / "highest.py").write_text(text.format(k=k) + "\n")
        with monkeypatch.context() as context:
            context.syspath_prepend(folder)
            try:
                return ContentKeys(exact=False).key("f", importlib.import_module("highest").f)
            finally:
                for name in ("lowest", "middle", "highest"):
                    sys.modules.pop(name, None)

    assert used(2) == used(2)
    assert used(2) != used(3)


def test_what_libraries_hold_is_no_part_of_the_key():
    def f(x):
        return np.median(x), parallel_map(isqrt, x), log.name

    def key():
        return ContentKeys(exact=False).key("f", f)

    log = logging.getLogger("some")
    before = key()
    log.setLevel(logging.ERROR)
    assert key() == before
    log = logging
    assert key() != before


def test_files_that_a_function_names_are_no_part_of_the_key(tmp_path):
    """A function that writes to a file must find its results again."""
    file = tmp_path / "log.txt"
    file.write_text("1")
    f = functools.partial(called_in, str(file))
    keys = [ContentKeys(exact=exact).key("f", f) for exact in (True, False)]
    file.write_text("12")
    again = [ContentKeys(exact=exact).key("f", f) for exact in (True, False)]
    assert [one == other for one, other in zip(keys, again, strict=True)] == [False, True]
