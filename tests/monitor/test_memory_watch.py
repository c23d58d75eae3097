"""Memory that really grows, in this process: noticed where it matters, with line and holder, and nowhere else."""

import ctypes
import gc
import os

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from hotlap import Job, Plan, fit, save_plan
from hotlap.core.units import MIB
from hotlap.fitting import training
from hotlap.monitor.growing_memory import TURNS
from hotlap.monitor.memory_watch import LOOKS, MOST_MARKS, Mark, MemoryWatch, private_bytes, steady_growth
from hotlap.script import lookout
from hotlap.script.session import Session, Settings

STEPS = 60
SIZE = 16 * MIB


@pytest.fixture(autouse=True)
def _no_memory_to_use_again():
    """What earlier tests freed goes back to the system, or new memory would come from there."""
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallopt(-3, MIB)  # each large tensor gets pages of its own
    library.malloc_trim(0)


def watched(work, *, filled_at=None, may_watch=True):
    """The line on what grows while `work` is done so many times; None without one."""
    watch = MemoryWatch(torch.device("cpu"))
    try:
        for step in range(1, STEPS + 1):
            work(step)
            line = watch.step_ended() if watch.is_open else watch.look(step, filled_at=filled_at, may_watch=may_watch)
            if line is not None:
                return line
        assert not watch.is_open
        return None
    finally:
        watch.close()


class Holder:
    def __init__(self):
        self.kept = []


def test_tensors_that_are_kept_are_named_with_line_holder_size_and_the_time_that_is_left():
    holder = Holder()
    line = watched(lambda step: holder.kept.append(torch.ones(SIZE // 4)))
    assert line.startswith("RAM grows by 16.")
    assert "16.0 MiB an update (1 tensor) made at " in line
    assert f"{__file__}:" in line
    assert "held by Holder.kept; at this pace it is full in about " in line
    # It grows, after a collection too, and then steps are watched. What else the process frees may cost some looks.
    assert 2 * LOOKS + TURNS <= len(holder.kept) < 2 * (2 * LOOKS + TURNS)


def test_a_loss_that_keeps_its_history_is_named_where_it_is_added_up():
    weight, whole, ballast = torch.ones(SIZE // 4, requires_grad=True), [torch.zeros(())], []

    def adds_up(step):
        loss = (weight.detach() * weight).exp().mean()  # its product and power live as long as its history
        whole[0] = whole[0] + loss
        ballast.append(step)

    line = watched(adds_up)
    assert "RAM grows by " in line
    assert f"{__file__}:" in line


def test_a_list_of_python_objects_is_named_by_its_growth_alone():
    kept = []
    line = watched(lambda step: kept.append(bytearray(os.urandom(64)) * (SIZE // 64)))
    assert "no tensor does, so it may be a list of Python objects" in line


def test_where_steps_do_not_run_the_users_lines_none_is_looked_for():
    kept = []
    line = watched(lambda step: kept.append(torch.ones(SIZE // 4)), may_watch=False)
    assert "`hotlap memory` may find the line" in line
    assert 2 * LOOKS <= len(kept) < 4 * LOOKS


def test_a_cache_that_fills_up_in_the_first_epoch_and_stops_is_no_alarm():
    cache = {}
    assert watched(lambda step: cache.setdefault(min(step, 12), torch.ones(SIZE // 4)), filled_at=12) is None
    assert len(cache) == 12


def test_garbage_that_python_has_not_collected_yet_is_no_alarm():
    def makes_garbage(step):
        cycle = [torch.ones(SIZE // 4)]
        cycle.append(cycle)

    gc.disable()
    try:
        assert watched(makes_garbage) is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "levels",
    [
        [n * MIB for n in range(LOOKS)],  # too little
        [20 * n * MIB for n in range(LOOKS - 1)],  # too short
        [0, 90 * MIB, *[90 * MIB + n for n in range(1, LOOKS - 1)]],  # at once, and then hardly
        [20 * n * MIB if n != 4 else 60 * MIB for n in range(LOOKS)],  # not in each
    ],
)
def test_growth_that_is_small_short_or_unsteady_is_none(levels):
    assert steady_growth([Mark(float(n), n, level) for n, level in enumerate(levels)]) is None


def test_slow_growth_shows_by_marks_that_lie_further_apart():
    watch, found = MemoryWatch(torch.device("cpu")), []
    trend = watch.trends[0]
    trend.taken = lambda: step * MIB
    for step in range(400):
        found.append(trend.look(step))
        assert len(trend.marks) <= MOST_MARKS
    assert any(growth is not None for growth in found)


def test_pages_of_a_mapped_file_are_not_counted(tmp_path):
    file = tmp_path / "data.npy"
    np.save(file, np.zeros(SIZE, dtype=np.uint8))
    gc.collect()
    before = private_bytes()
    mapped = np.load(file, mmap_mode="r")
    assert mapped.sum() == 0
    assert private_bytes() - before < SIZE / 2


def test_a_fork_while_steps_are_watched_watches_nothing():
    watch, kept = MemoryWatch(torch.device("cpu")), []
    for step in range(1, STEPS):
        if not watch.is_open:
            kept.append(torch.ones(SIZE // 4))
            watch.look(step)
    assert watch.is_open
    live = watch._turns.live
    pid = os.fork()
    if pid == 0:
        counted = live.bytes
        kept.append(torch.ones(100))
        os._exit(watch.is_open or live.bytes != counted)
    assert os.waitpid(pid, 0)[1] == 0
    kept.append(torch.ones(100))
    assert live.bytes == 400
    watch.close()
    kept.append(torch.ones(100))
    assert live.bytes == 400


# --- in a training ---------------------------------------------------------------------------------------


class Keeps(nn.Linear):
    """Keeps something large of each training step."""

    def __init__(self, much):
        super().__init__(4, 2)
        self.much, self.kept = much, []

    def forward(self, x):
        if self.training and self.much:
            self.kept.append(torch.ones(self.much // 4))
        return super().forward(x)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    return x, (x.sum(1) > 0).long()


def fitted(tmp_path, much):
    torch.manual_seed(0)
    job = Job(
        model=Keeps(much), data=data(), loss=nn.CrossEntropyLoss(), optimizer=lambda p: optim.SGD(p, lr=0.1),
        batch_size=10, epochs=10, device="cpu",
    )  # fmt: skip
    return fit(job, out=tmp_path / f"run{much}", progress=False)


def test_a_fit_whose_model_keeps_tensors_says_so_once_and_trains_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "LOOK_S", 0.0)
    run, alone = fitted(tmp_path, SIZE), fitted(tmp_path, 0)
    (problem,) = run.problems
    assert problem.startswith("RAM grows by 16.")
    assert f"made at {__file__}:" in problem
    assert "in forward, held by Keeps.kept" in problem
    (entry,) = [one for one in run.ledger if one.what == "memory grows"]
    assert (entry.outcome, entry.why) == ("fault", problem)
    assert alone.problems == ()
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), alone.model.parameters(), strict=True))


def trained_script(much):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer, losses = optim.SGD(model.parameters(), lr=0.1), []
    outputs = []
    for _ in range(10):
        for x, y in DataLoader(TensorDataset(*data()), batch_size=10):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            outputs.append(torch.ones(much // 4))
    return losses


def test_a_script_that_keeps_tensors_hears_of_it_at_once_and_in_the_report(monkeypatch, capfd, tmp_path):
    own_plan = tmp_path / "plan.toml"
    save_plan(Plan(), own_plan)
    monkeypatch.setattr(lookout, "EVERY_S", 0.0)
    with Session(Settings(name="train", plan=str(own_plan))):
        losses = trained_script(SIZE)
    said = capfd.readouterr().err.splitlines()
    lines = [line for line in said if "RAM grows by 16." in line]
    assert len(lines) == 2
    assert lines[0].startswith("hotlap  RAM grows by")
    assert "in trained_script, held by outputs of trained_script" in lines[0]
    with Session(Settings(name="train", plan=str(own_plan))):
        assert trained_script(0) == losses
    assert "RAM grows" not in capfd.readouterr().err
