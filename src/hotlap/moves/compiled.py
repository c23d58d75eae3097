"""The model by torch's compiler, which fuses what it computes one operation after the other."""

from __future__ import annotations

from torch import nn

from hotlap.core.plan import Plan
from hotlap.engine.blocks import repeated_blocks
from hotlap.engine.driven import Driven
from hotlap.moves.move import Move

START_S = {"cpu": 40.0, "cuda": 20.0}
"""What compiling takes before it comes to the model: loading the compiler, its headers and its processes."""
LAYER_S = {"cpu": 1.2, "cuda": 1.0}
"""What it takes for each layer. On two busy cores of a CPU with nothing cached, networks of 14 to 51 layers took 60 to
112 s in all. For GPUs it is a guess from one figure: a BERT of about 200 layers took 228 s on an H200."""
BLOCKS = 0.5
"""The part of a model's layers that have to be in repeated blocks for these to be compiled alone."""


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.execution.compile != "no":
        return "it is compiled already"
    if not rig.modules:
        return "there is no model to compile"
    model = rig.modules[0]
    blocks = repeated_blocks(model)
    # A block of one layer leaves nothing to fuse. Blocks share what is compiled for one of them.
    inside = sum(_layers(block) for block in blocks)
    is_worth = inside > len(blocks) and inside >= BLOCKS * _layers(model)
    # Its own kernels, and cuDNN's, are compiled at once.
    return plan.but(compile="blocks" if is_worth else "model", depthwise="library")


def _layers(module: nn.Module) -> int:
    """Layers that consist of no others."""
    return sum(next(layer.children(), None) is None for layer in module.modules())


def _setup_s(plan: Plan, rig: Driven) -> float:
    device = "cpu" if rig.device.type == "cpu" else "cuda"
    model = rig.modules[0]
    compiled = repeated_blocks(model)[0] if plan.execution.compile == "blocks" else model
    return START_S[device] + LAYER_S[device] * _layers(compiled)


MOVE = Move(
    name="torch.compile",
    kind="A",
    propose=_propose,
    setup_s=_setup_s,
    helps=("arithmetic", "memory traffic", "launching"),
)
