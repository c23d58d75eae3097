"""Optimizers as a session has them make their steps, and what records and replays these without a GPU."""

from contextlib import contextmanager

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotlap.script.patches import Patches
from hotlap.script.update.capture import UpdateGraph
from hotlap.script.update.clipping import clipping_patches


@contextmanager
def at_work(updates):
    """Inside, the steps and clippings of this process are made by `updates`."""
    patches = Patches()
    patches.hooked("before", register_optimizer_step_pre_hook(updates.before_step))
    patches.hooked("after", register_optimizer_step_post_hook(lambda one, *_: updates.after_step(one)))
    for name, make in clipping_patches(lambda: updates.clipping):
        patches.put(clip_grad, name, make)
    try:
        yield
    finally:
        patches.take_out_all()


class FakeRecorder:
    """Records by keeping the work, and replays by doing it again, as it was set and in the memory it was given."""

    def __init__(self, device):
        self.graphs = []

    @contextmanager
    def aside(self):
        yield

    def record(self, work):
        self.graphs.append(FakeGraph(work))
        return self.graphs[-1]


class FakeGraph:
    def __init__(self, work):
        self.work, self.replays = work, 0
        self.of = getattr(work, "__self__", None)
        if isinstance(self.of, UpdateGraph):
            self.settings = [dict(group) for group in self.of._optimizer.param_groups]
            self.reads = [parameter.grad for parameter in self.of._used]

    def replay(self):
        self.replays += 1
        if not isinstance(self.of, UpdateGraph):
            self.work()
            return
        groups = self.of._optimizer.param_groups
        now = [dict(group) for group in groups], [p.grad for p in self.of._used]
        for group, settings in zip(groups, self.settings, strict=True):
            group.update(settings)
        for parameter, read in zip(self.of._used, self.reads, strict=True):
            parameter.grad = read
        versions = [p._version for p in self.of._used]
        self.work()
        for parameter, grad, version in zip(self.of._used, now[1], versions, strict=True):
            parameter.grad = grad
            torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))  # as on a GPU
        for group, settings in zip(groups, now[0], strict=True):
            group.update(settings)
