"""Calls of modules under capture without a GPU: what records and replays, and small models with their batches."""

import functools
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hotlap.core.plan import Execution, Numerics
from hotlap.data.order import HostRandomness
from hotlap.script.calls.call import ModuleCall

CPU = torch.device("cpu")
OWN, CAPTURED = (Numerics(), Execution()), (Numerics(), Execution(mode="captured"))


class OfPythonAndNumpy(HostRandomness):
    """The host's randomness without torch's, which stands for the device's where there is none."""

    def __init__(self):
        super().__init__()
        self.torch = None

    def same_as(self, other):
        return self.python == other.python and repr(self.numpy) == repr(other.numpy)


class FakeRecorder:
    """Records by keeping the work, and replays by doing it again, over what the last replay has left.

    As graphs that share their memory do, a replay spoils what others have left in it.
    """

    def __init__(self, device):
        self.graphs = []

    @contextmanager
    def aside(self):
        yield

    def record(self, work):
        work()
        graph = FakeGraph(work, self)
        self.graphs.append(graph)
        return graph


class FakeGraph:
    def __init__(self, work, recorder):
        self.work, self.recorder = work, recorder
        self.replays = 0

    def replay(self):
        self.replays += 1
        mine = self.work.__self__
        if self.work.__name__ == "_make_outputs":
            for graph in self.recorder.graphs:
                other = graph.work.__self__
                other.outputs = [output.detach() for output in other.outputs]
            spoil(mine.outputs)
        spoil(grad for grad in mine._grads if grad is not None)
        self.work()


class Scripted:
    """A module as a script under hotlap calls it; on the CPU, recordings are pretended."""

    def __init__(self, module, plan=CAPTURED, *, device=CPU, make_recorder=FakeRecorder, **settings):
        self.module, self.recorders = module, []
        if make_recorder is not None:
            settings["make_recorder"] = lambda device: self._kept(make_recorder(device))
        self.call = ModuleCall(module, device=device, **settings)
        self.call.use(*plan)

    def _kept(self, recorder):
        self.recorders.append(recorder)
        return recorder

    def __call__(self, *args, **kwargs):
        return self.call(functools.partial(nn.Module.__call__, self.module), args, kwargs)

    @property
    def evaluations(self):
        return self.call._way._evaluations


def spoil(tensors):
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))


def net(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def batches(count, size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def state_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_equal_states(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def giving_transformers_output(nested, kind):
    """Of a class with two layers, `first` and `last`, a module that gives back what transformers' models do."""
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(nested):
        def forward(self, x):
            hidden = self.first(x)
            return outputs.SequenceClassifierOutput(logits=self.last(hidden), hidden_states=(hidden, hidden))

    return Model(kind)
