"""Evaluation calls under capture without a GPU: what records and replays them, and models whose calls are replays."""

from types import SimpleNamespace

import calling
import torch
from calling import CAPTURED, FakeGraph, FakeRecorder, net

from hotlap.script.calls.evaluation_graph import EvaluationGraph
from hotlap.script.calls.evaluations import SEEN

WARM = SEEN + 1
"""Calls of a kind before the first that is a replay: all of them eager, the last but one looked at, the last recorded
and compared."""


class Recorder(FakeRecorder):
    """Knows evaluations, too: their replays write where the recording did, and leave plain values as they were."""

    def record(self, work):
        if not isinstance(work.__self__, EvaluationGraph):
            return super().record(work)
        work()
        self.graphs.append(Replays(work, self))
        return self.graphs[-1]


class Replays(FakeGraph):
    def replay(self):
        self.replays += 1
        mine = self.work.__self__
        frozen = {name: vars(mine)[name] for name in ("_tree", "outputs", "_bases")}
        for graph in self.recorder.graphs:  # they share their memory
            for output in graph.work.__self__.outputs:
                output.untyped_storage().fill_(255)
        self.work()
        for place, made in zip(frozen["outputs"], mine.outputs, strict=True):
            place.untyped_storage().copy_(made.untyped_storage())
        vars(mine).update(frozen)


class Scripted(calling.Scripted):
    def __init__(self, module, plan=CAPTURED, **how):
        super().__init__(module, plan, make_recorder=Recorder, **how)

    def _graphs(self, kind):
        return [graph for recorder in self.recorders for graph in recorder.graphs if isinstance(graph, kind)]

    @property
    def replays(self):
        """Of evaluations."""
        return sum(graph.replays for graph in self._graphs(Replays))

    @property
    def replays_of_training(self):
        return sum(graph.replays for graph in self._graphs(FakeGraph)) - self.replays


def inputs(count, size=5, seed=3, width=6):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, width, generator=generator) for _ in range(count)]


def warmed(module=None, calls=WARM + 1, mode=torch.no_grad, **how):
    """A model in evaluation mode whose calls are replays, of five samples each."""
    model = Scripted((net() if module is None else module).eval(), **how)
    with mode():
        for x in inputs(calls):
            model(x)
    assert model.evaluations.refused == []
    assert model.evaluations.recorded == 1
    return model


def moved(model, work):
    """What some work gives, and how many replays of evaluations were made for it."""
    before = model.replays
    made = work()
    return made, model.replays - before


def evaluated(model, module, xs):
    module.eval()
    with torch.no_grad():
        made = [model(x) for x in xs]
    module.train()
    return made


def everything(out):
    """All tensors and values in what a module of these gives."""
    if isinstance(out, SimpleNamespace):
        return everything(out.hidden)
    if isinstance(out, dict):
        return [list(out), *everything(list(out.values()))]
    if isinstance(out, (tuple, list)):
        return [part for one in out for part in everything(one)]
    return [out.tolist() if isinstance(out, torch.Tensor) else out]
