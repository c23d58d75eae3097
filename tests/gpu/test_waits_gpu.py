"""Waits for a real GPU are noted, whatever the script calls to wait; what does not wait is not."""

import io
import itertools

import pytest
import torch

from hotlap.script import advice as module
from hotlap.script.advice import Waits

DEVICE = "cuda"


class Clock:
    """Each look at it is a millisecond after the last one, so that each wait takes so long."""

    def __init__(self):
        self._looks = itertools.count()

    def perf_counter(self):
        return next(self._looks) * 1e-3


def told(step, *, steps=10, step_s=10e-3):
    waits = Waits()
    waits.install()
    try:
        for _ in range(steps):
            step()
            waits.stepped()
    finally:
        waits.remove()
    return waits.lines(step_s)


def marked():
    event = torch.cuda.Event()
    event.record()
    return event


WAITING = {
    ".item()": lambda loss: loss.item(),
    ".tolist()": lambda loss: loss.tolist(),
    ".cpu()": lambda loss: loss.cpu(),
    ".numpy()": lambda loss: loss.numpy(force=True),
    '.to("cpu")': lambda loss: loss.to("cpu"),
    "bool(…)": lambda loss: 1 if loss > 0 else 2,
    "float(…)": lambda loss: float(loss),
    "int(…)": lambda loss: int(loss),
    'f"{…}"': lambda loss: f"{loss:.3f}",
    "print(…)": lambda loss: print(loss, file=io.StringIO()),
    ".nonzero()": lambda loss: loss.nonzero(),
    ".masked_select(…)": lambda loss: loss.masked_select(loss > 0),
    "torch.cuda.synchronize()": lambda loss: torch.cuda.synchronize(),
    "stream.synchronize()": lambda loss: torch.cuda.current_stream().synchronize(),
    "event.synchronize()": lambda loss: marked().synchronize(),
}


@pytest.mark.parametrize("shown", WAITING)
def test_each_way_of_waiting_for_the_gpu_is_told_once(monkeypatch, shown):
    monkeypatch.setattr(module, "time", Clock())
    wait, loss = WAITING[shown], torch.tensor(0.5, device=DEVICE)
    line, hint = told(lambda: wait(loss))
    at = f"test_waits_gpu.py:{wait.__code__.co_firstlineno}"
    assert line == f"one `{shown}` a step at {at} costs up to 1 ms of 10 ms"
    assert hint.startswith("instead, add up on the device")


@pytest.mark.parametrize(
    "idle",
    [
        lambda loss: loss.cpu,
        lambda loss: loss.to(torch.float16),
        lambda loss: loss.to(DEVICE),
        lambda loss: loss.to("cpu", non_blocking=True),
        lambda loss: torch.ones(4).to(DEVICE),
        lambda loss: torch.ones(4).sum().item(),
        lambda loss: loss.add(1).mul(2),
        lambda loss: loss[None],
    ],
)
def test_what_stays_on_the_gpu_or_on_the_host_is_not_told(monkeypatch, idle):
    monkeypatch.setattr(module, "time", Clock())
    loss = torch.tensor(0.5, device=DEVICE)
    assert told(lambda: idle(loss)) == []


def test_the_time_that_the_host_is_blocked_is_noted():
    big = torch.randn(4096, 4096, device=DEVICE)
    waits = Waits()
    waits.install()
    for _ in range(5):
        (big @ big).sum().item()
        waits.stepped()
    waits.remove()
    (wait,) = waits._usual()
    assert (wait.shown, wait.times) == (".item()", 1)
    assert wait.blocked_s > 0


def test_a_training_computes_the_same_while_it_is_looked_at():
    def train():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(DEVICE)
        losses = []
        for _ in range(8):
            with torch.autocast(DEVICE):
                loss = model(torch.randn(16, 8).to(DEVICE)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    want = train()
    waits = Waits()
    waits.install()
    try:
        assert train() == want
    finally:
        waits.remove()
    assert train() == want


def test_what_torch_waits_for_inside_is_told_as_torchs_own(monkeypatch):
    monkeypatch.setattr(module, "time", Clock())
    weight = torch.ones(1, device=DEVICE, requires_grad=True)
    scaler = torch.amp.GradScaler(DEVICE)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step():
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    lines = told(step, step_s=10e-3)
    assert lines[0].startswith("one `.item()` a step in torch at test_waits_gpu.py:")


def test_a_graph_is_captured_and_replayed_while_it_is_looked_at():
    x = torch.ones(4, device=DEVICE)
    waits = Waits()
    waits.install()
    try:
        x.to(torch.float16)  # what a capture loads at first use
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x.to(torch.float32) * 2).to(torch.float16)
        x.fill_(3)
        graph.replay()
        assert y.tolist() == [6, 6, 6, 6]
    finally:
        waits.remove()
