"""Optimizers as a session has them make their steps."""

from contextlib import contextmanager

from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotlap.script.patches import Patches
from hotlap.script.update.clipping import stand_ins


@contextmanager
def at_work(updates):
    """Inside, the steps and clippings of this process are made by `updates`."""
    patches = Patches()
    patches.hooked("before", register_optimizer_step_pre_hook(updates.before_step))
    patches.hooked("after", register_optimizer_step_post_hook(lambda one, *_: updates.after_step(one)))
    for name, make in stand_ins(lambda: updates.clipping):
        patches.put(clip_grad, name, make)
    try:
        yield
    finally:
        patches.take_out_all()
