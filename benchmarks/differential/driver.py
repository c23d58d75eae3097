"""What a fork does: run one script as it was asked to, and end without taking the interpreter apart.

    alone SCRIPT | disturbed EPSILON SEED SCRIPT | tuned WORDS of hotlap … | hotlap WORDS …

To take apart an interpreter that has loaded torch takes ten times as long as one of these scripts.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hotlap.cli
from hotlap.script import running
from hotlap.tuner import laps

LATE = ("pydantic.type_adapter", "typer._adapters", "torch.utils.serialization.config", "torch.profiler._cupti_monitor")
"""What is imported when it is first used, and takes long; not every version has all of it."""
for _name in LATE:
    with suppress(ImportError):
        importlib.import_module(_name)

LAP_S = 0.004
"""Seconds of a lap of a tuner: these scripts are over in less than a usual one."""


def disturb(epsilon: float, seed: int) -> None:
    """Multiply each weight by 1 + epsilon × a normal number at every update, to see how far a script drifts by that.

    An update is the step of an optimizer. A script without an optimizer updates its weights itself after `backward()`,
    so its weights are disturbed there. The numbers come from a generator that the script does not see. With a negative
    seed the GPU's generator is moved before the first update too: other masks of dropout, as a captured plan may draw
    them.
    """
    generator = torch.Generator().manual_seed(abs(seed))
    moved: list[bool] = []
    optimizers: list[bool] = []

    def before(*_: Any) -> None:
        if not moved and seed < 0 and torch.cuda.is_initialized():
            torch.cuda.manual_seed(abs(seed))
        moved.append(True)

    def disturbed(parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.data.mul_(1 + epsilon * noise)

    def after(optimizer: Optimizer, *_: Any) -> None:
        disturbed(p for group in optimizer.param_groups for p in group["params"])

    @functools.wraps(Optimizer.__init__)
    def made(self: Optimizer, *words: Any, **named: Any) -> None:
        optimizers.append(True)
        initialize(self, *words, **named)

    @functools.wraps(torch.autograd.backward)
    def differentiated(tensors: Any, *words: Any, **named: Any) -> None:
        backward(tensors, *words, **named)
        if not optimizers:
            before()
            disturbed(weights_of([tensors] if isinstance(tensors, torch.Tensor) else tensors))

    initialize, backward = Optimizer.__init__, torch.autograd.backward
    Optimizer.__init__, torch.autograd.backward = made, differentiated  # type: ignore[method-assign, assignment]
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def weights_of(tensors: Iterable[torch.Tensor]) -> list[nn.Parameter]:
    """The parameters that tensors were computed from, in the order of their graph."""
    found: list[nn.Parameter] = []
    ahead: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            found.append(leaf)
        ahead += [following for following, _ in node.next_functions]
    return found


def main() -> NoReturn:
    """Do as the command line says."""
    how, *words = sys.argv[1:]
    code: Any = 0
    try:
        if how == "disturbed":
            disturb(float(words[0]), int(words[1]))
        if how in ("alone", "disturbed"):
            code = running.run(running.Target(path=words[-1]))
        else:
            if how == "tuned":
                laps.LAP_S = LAP_S
            sys.argv = ["hotlap", *words]
            hotlap.cli.main()
    except SystemExit as ended:
        code = ended.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
