"""Waits for the device are noted with the script's line, and told only where they may cost something."""

import contextlib
import io
import itertools
import threading

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotlap.script import advice as module
from hotlap.script.advice import PYTHON, SCRIPT, Waits, home_of


class Clock:
    """Each look at it is a millisecond after the last one, so that each wait takes so long."""

    def __init__(self):
        self._looks = itertools.count()

    def perf_counter(self):
        return next(self._looks) * 1e-3


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(module, "time", Clock())


@contextlib.contextmanager
def installed(on_gpu=lambda tensor: tensor.dtype == torch.float32):
    """Tensors of fp32 count as those on a GPU."""
    waits = Waits(on_gpu)
    waits.install()
    try:
        yield waits
    finally:
        waits.remove()


def told(step, *, steps=10, step_s=10e-3):
    with installed() as waits:
        for _ in range(steps):
            step()
            waits.stepped()
    return waits.lines(step_s)


def line_of(function, offset=1):
    return function.__code__.co_firstlineno + offset


LOSS = torch.tensor(0.5)


@pytest.mark.parametrize(
    ("wait", "shown"),
    [
        (lambda: LOSS.item(), ".item()"),
        (lambda: LOSS.tolist(), ".tolist()"),
        (lambda: LOSS.cpu(), ".cpu()"),
        (lambda: LOSS.numpy(), ".numpy()"),
        (lambda: LOSS.to(torch.float64), '.to("cpu")'),
        (lambda: float(LOSS), "float(…)"),
        (lambda: int(LOSS), "int(…)"),
        (lambda: f"{LOSS:.3f}", 'f"{…}"'),
        (lambda: f"{LOSS}", 'f"{…}"'),
        (lambda: "%.3f" % LOSS, "float(…)"),  # noqa: UP031
        (lambda: print(LOSS, file=io.StringIO()), "print(…)"),
        (lambda: 1 if LOSS else 2, "bool(…)"),
        (lambda: LOSS.nonzero(), ".nonzero()"),
        (lambda: LOSS.masked_select(torch.tensor(True)), ".masked_select(…)"),
    ],
)
def test_each_way_of_waiting_is_told_once_by_its_name(wait, shown):
    first, hint = told(wait)
    line = wait.__code__.co_firstlineno
    assert first == f"one `{shown}` a step at test_waits.py:{line} costs up to 1 ms of 10 ms"
    assert hint.startswith("instead, add up on the device")


@pytest.mark.parametrize(
    "idle",
    [
        lambda: LOSS.double,
        lambda: LOSS.to(torch.float32),
        lambda: LOSS.to("cpu", torch.float64, non_blocking=True),
        lambda: LOSS[None],
        lambda: torch.tensor(1.0, dtype=torch.float64).item(),
        lambda: bool(torch.tensor(1)),
        lambda: LOSS + LOSS,
    ],
)
def test_what_waits_for_nothing_is_not_told(idle):
    assert told(idle) == []


def test_an_index_counts():
    rows = torch.tensor([1, 2])
    with installed(lambda tensor: tensor.dtype == torch.int64) as waits:
        for _ in range(9):
            assert [0, 1, 2][rows[0]] == 1
            waits.stepped()
    assert waits.lines(1e-2)[0].startswith("one `int(…)` a step at test_waits.py:")


def test_places_of_one_kind_in_one_file_share_a_line():
    def step():
        LOSS.item()
        float(LOSS)
        LOSS.item()

    items, floats, hint = told(step)
    at = line_of(step)
    assert items == f"two `.item()` a step at test_waits.py:{at} and :{at + 2} cost up to 2 ms of 10 ms"
    assert floats == f"one `float(…)` a step at test_waits.py:{at + 1} costs up to 1 ms of 10 ms"
    assert hint.startswith("together they cost up to 3 ms; instead, add up")


def test_three_places_are_listed_and_many_times_are_in_digits():
    def step():
        LOSS.item()
        LOSS.item()
        for _ in range(11):
            LOSS.item()

    at = line_of(step)
    line, _ = told(step, step_s=0.1)
    assert line == f"13 `.item()` a step at test_waits.py:{at}, :{at + 1} and :{at + 3} cost up to 13 ms of 100 ms"


def test_twelve_is_the_last_number_in_words():
    def step():
        for _ in range(12):
            LOSS.item()

    assert told(step, step_s=0.1)[0].startswith("twelve `.item()` a step")


@pytest.mark.parametrize(("step_s", "cost"), [(10e-3, "4 ms of 10 ms"), (6e-3, "2 ms of 6 ms")])
def test_no_more_is_promised_than_the_lesser_of_working_and_waiting(step_s, cost):
    def step():
        for _ in range(4):
            LOSS.item()

    assert told(step, step_s=step_s)[0].endswith(f"cost up to {cost}")


def test_a_host_that_only_waits_has_nothing_to_gain():
    assert told(lambda: LOSS.item(), step_s=1e-3) == []
    assert told(lambda: LOSS.item(), step_s=0.0) == []


def test_less_than_a_fiftieth_of_a_step_is_not_told():
    assert told(lambda: LOSS.item(), step_s=49e-3)
    assert told(lambda: LOSS.item(), step_s=51e-3) == []


def test_what_happens_in_a_few_steps_only_is_not_told():
    numbers = itertools.count()
    assert told(lambda: next(numbers) % 10 or LOSS.item(), steps=30, step_s=3e-3) == []


def test_what_happens_every_few_steps_says_so():
    numbers = itertools.count()
    line, _ = told(lambda: next(numbers) % 5 or LOSS.item(), steps=40, step_s=3e-3)
    assert line.startswith("one `.item()` every five steps at")
    assert line.endswith("costs up to 200 µs of 3 ms")


def test_an_evaluation_does_not_count_as_part_of_a_step():
    def loss_of(batch):
        return LOSS.item()

    with installed() as waits:
        for step in range(20):
            loss_of(step)
            waits.stepped()
            if step == 9:
                for batch in range(100):
                    loss_of(batch)
    line, _ = waits.lines(10e-3)
    assert line == f"one `.item()` a step at test_waits.py:{line_of(loss_of)} costs up to 1 ms of 10 ms"


def test_a_synchronize_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    line, _ = told(lambda: torch.cuda.synchronize())
    assert line.startswith("one `torch.cuda.synchronize()` a step at test_waits.py:")


# --- whose line it is ----------------------------------------------------------------------------


def code_of(folder, text, name="wait"):
    made = {}
    exec(compile(text, f"/usr/lib/python3/{folder}", "exec"), made)
    return made[name]


LIBRARY = code_of("site-packages/metrics/running.py", "def wait(loss):\n    return loss.item()")


def test_a_wait_in_a_library_is_told_at_the_scripts_line_with_the_librarys_name():
    line, _ = told(lambda: LIBRARY(LOSS))
    assert line.startswith("one `.item()` a step in metrics at test_waits.py:")


def test_a_wait_in_torch_itself_is_told_so():
    with installed(lambda tensor: tensor.dtype == torch.bool) as waits:
        for _ in range(9):
            assert 0.5 in LOSS.view(1)
            waits.stepped()
    assert waits.lines(10e-3)[0].startswith("one `.item()` a step in torch at test_waits.py:")


def test_where_no_line_of_the_script_leads_there_the_librarys_is_told():
    lines = []
    waits = Waits(lambda tensor: True)
    text = """
def wait(waits, loss, lines):
    waits.install()
    for _ in range(9):
        loss.item()
        waits.stepped()
    waits.remove()
    lines += waits.lines(0.01)
"""
    thread = threading.Thread(target=code_of("dist-packages/trainers/loop.py", text), args=(waits, LOSS, lines))
    thread.start()
    thread.join()
    assert lines[0] == "one `.item()` a step in trainers at loop.py:5 costs up to 1 ms of 10 ms"


def test_what_hotlap_itself_waits_for_is_not_the_scripts():
    text = "def wait(loss):\n    return loss.item()"
    made = {}
    exec(compile(text, module.__file__, "exec"), made)
    assert told(lambda: made["wait"](LOSS)) == []


def test_files_are_told_apart_by_whom_they_belong_to():
    assert home_of(torch.nn.__file__) == "torch"
    assert home_of(module.__file__) == "hotlap"
    assert home_of(threading.__file__) == PYTHON
    assert home_of("<string>") == PYTHON
    assert home_of("/home/me/.venv/lib/python3.11/site-packages/six.py") == "six"
    assert home_of(__file__) == home_of("train.py") == home_of("/tmp/ipykernel_12/345.py") == SCRIPT


def test_lines_of_a_notebook_are_told_as_its_cells():
    made = {}
    exec(compile("def wait(loss):\n    return loss.item()", "/tmp/ipykernel_12/345.py", "exec"), made)
    assert told(lambda: made["wait"](LOSS))[0].startswith("one `.item()` a step at cell:2 costs")


# --- nothing else changes ------------------------------------------------------------------------


def test_everything_is_as_before_once_it_is_removed():
    owners = (Tensor, torch.cuda, torch.cuda.Event, torch.cuda.Stream)
    before = [dict(vars(owner)) for owner in owners]
    waits = Waits()
    waits.install()
    waits.install()
    assert vars(Tensor)["item"].__name__ == "item"
    waits.remove()
    waits.remove()
    assert [dict(vars(owner)) for owner in owners] == before
    assert Tensor.item is torch._C.TensorBase.item
    assert LOSS.view(1)[0].item() == float(LOSS) == 0.5


def test_what_others_patched_meanwhile_stays_and_works(monkeypatch):
    waits = Waits(lambda tensor: True)
    waits.install()
    ours = Tensor.item
    monkeypatch.setattr(Tensor, "item", lambda tensor: 2 * ours(tensor))
    waits.remove()
    assert LOSS.item() == 1.0
    waits.stepped()
    assert not waits._seen
    monkeypatch.undo()
    del Tensor.item  # what lay beneath, and is torch's own by inheritance


def test_calls_return_what_they_return_without():
    matrix = torch.arange(6.0).view(2, 3)
    with installed():
        assert LOSS.item() == float(LOSS) == LOSS.tolist() == 0.5
        assert repr(LOSS) == str(LOSS) == "tensor(0.5000)"
        assert f"{LOSS:.1f}" == "0.5"
        assert matrix[matrix > 2].tolist() == [3, 4, 5]
        assert matrix[0, 1:].tolist() == [1, 2]
        assert [row.tolist() for row in matrix] == [[0, 1, 2], [3, 4, 5]]
        assert torch.tensor([LOSS, LOSS]).tolist() == [0.5, 0.5]
        assert matrix.numpy().shape == (2, 3)
        assert matrix.to(dtype=torch.float64).dtype == torch.float64
        assert len({LOSS, LOSS}) == 1


def test_errors_are_the_callers_own_and_are_no_waits():
    def step():
        with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
            torch.zeros(2).item()

    assert told(step) == []
    assert told(lambda: LOSS.item())  # and it is noted again what comes after


def test_a_fault_in_noting_never_reaches_the_script(monkeypatch):
    monkeypatch.setattr(module, "home_of", {}.__getitem__)
    with installed() as waits:
        assert LOSS.item() == 0.5
        waits.stepped()
    assert waits.lines(1.0) == []


def test_other_threads_are_left_alone():
    with installed() as waits:
        thread = threading.Thread(target=lambda: [(LOSS.item(), waits.stepped()) for _ in range(9)])
        thread.start()
        thread.join()
    assert waits.lines(10e-3) == []


class Image(Tensor):
    """Keeps its type through what it knows, as torchvision's tensors do."""

    kept = (Tensor.to, Tensor.cpu)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func in set(cls.kept) else result


def test_subclasses_are_given_the_functions_they_know():
    image = torch.zeros(2).as_subclass(Image)
    assert type(image.to(torch.float64)) is Image
    with installed() as waits:
        for _ in range(9):
            assert type(image.to(torch.float64)) is Image
            assert image.tolist() == [0, 0]
            waits.stepped()
    assert [line.split("`")[1] for line in waits.lines(10e-3)[:2]] == ['.to("cpu")', ".tolist()"]


def test_waits_are_noted_under_a_default_device():
    torch.set_default_device("cpu")
    try:
        line, _ = told(lambda: LOSS.item())
    finally:
        torch.set_default_device(None)
    assert line.startswith("one `.item()` a step")


def test_a_mode_that_dispatches_sees_the_same_operations():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names = []
    with Seen():
        float(LOSS), LOSS.nonzero()
    before, names = names, []
    with Seen(), installed():
        float(LOSS), LOSS.nonzero()
    assert names == before


def test_compiled_functions_are_compiled_as_without():
    def step(x):
        x = x.to(torch.float32) * 2
        if x.sum() > 0:
            x = x + x.sum().item()
            print(f"{x.mean():.1f}", file=io.StringIO())
        return x * x

    def run():
        torch._dynamo.reset()
        graphs = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(step, backend=graphs)
        return [compiled(torch.ones(3)).tolist() for _ in range(3)], graphs.frame_count, graphs.op_count

    want = run()
    with installed():
        assert run() == want
    assert run() == want
