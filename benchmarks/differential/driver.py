"""What a fork does: run one script as it was asked to, and end without taking the interpreter apart.

    alone SCRIPT | disturbed EPSILON SEED SCRIPT | tuned WORDS of hotlap … | hotlap WORDS …

To take apart an interpreter that has loaded torch takes ten times as long as one of these scripts.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

import torch
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
    """Multiply each weight by 1 + epsilon × a normal number after every update, to see how far a script drifts by that.

    The numbers come from a generator that the script does not see. With a negative seed the GPU's generator is moved
    before the first step too: other masks of dropout, as a captured plan may draw them.
    """
    generator = torch.Generator().manual_seed(abs(seed))
    moved: list[bool] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        if not moved and seed < 0 and torch.cuda.is_initialized():
            torch.cuda.manual_seed(abs(seed))
        moved.append(True)

    @torch.no_grad()
    def after(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.is_floating_point():
                    noise = torch.randn(p.shape, generator=generator).to(p)
                    p.mul_(1 + epsilon * noise)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


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
