"""Moves: each proposes one change of plan that may make a training faster. `MOVES` and `OTHERS` list all of them.

To add one, write a function that proposes the change, and list a `Move` in its place here. The tuner reads everything
else from the move's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from hotlap import machine
from hotlap.core.plan import Feed, Plan
from hotlap.engine.blocks import repeated_blocks
from hotlap.engine.depthwise import depthwise_kinds
from hotlap.engine.layout import why_not_channels_last
from hotlap.engine.protocol import TunableTraining
from hotlap.machine.limits import read_cpu

LEFT_OUT = "left out, as asked"
"""Why a move is not made that `without` names."""
NO_SETUP_S = 0.02
"""Seconds that changing the plan takes by itself, about."""
STEPS, LONGER_STEPS = 8, 32
"""Updates in one replay. With 8, launching costs next to nothing, and waiting for the end takes milliseconds."""
MOST_WORKERS = 8
WORKER_S = 0.1
"""Seconds that one worker takes to start, about: a fork, and its first batch."""
DEPTHWISE_S = 0.6
"""Seconds that cuDNN compiles one kind of depthwise layer, forward and backward: 0.5 to 1.2 s on an H200."""
COMPILER_S = {"cpu": 40.0, "cuda": 20.0}
"""Seconds before torch.compile comes to the model: it loads the compiler, its headers and its processes."""
LAYER_S = {"cpu": 1.2, "cuda": 1.0}
"""Seconds of compiling for each layer. On two busy cores of a CPU with nothing cached, networks of 14 to 51 layers took
60 to 112 s in all. For GPUs it is a guess from one figure: a BERT of about 200 layers took 228 s on an H200."""
BLOCKS = 0.5
"""Share of a model's layers that must be in repeated blocks for hotlap to compile the blocks alone."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """One change of plan that may pay."""

    name: str
    """Its name in the table and the ledger."""
    word: str
    """Its short name in `MOVE_WORDS`, by which a plan leaves it out."""
    kind: str
    """What it changes besides the time: `A` rounding only, `B` precision."""
    propose: Callable[[Plan, TunableTraining], Plan | str]
    """What `proposed` gives where the plan does not leave the move out."""
    setup_s: Callable[[Plan, TunableTraining], float] = lambda plan, rig: NO_SETUP_S
    """Seconds until the changed plan is at its pace, about."""
    helps: tuple[str, ...] = ()
    """What bounds the trainings that it may make faster, by the names of `Diagnosis.bound`."""
    is_rare: bool = False
    """Whether it applies to few trainings. The ledger leaves it out where it has nothing to change."""
    feeds: str = ""
    """How it brings batches another way: `held` with all samples at hand, `fetched` one by one; empty if not at all."""
    is_paired: bool = False
    """Whether it is tried together with all others that are paired: each alone may be slower, all of them are not."""
    comes_last: bool = False
    """Whether it is tried after all others, since it builds on the plan at that time."""
    at_a_glance: str = ""
    """`needed`: it shows most in short runs, so a glance without it is worth nothing. `stays`: a glance takes it
    wherever it can be made. Empty: a glance leaves it out where it is too dear."""

    def proposed(self, plan: Plan, rig: TunableTraining) -> Plan | str:
        """The plan with the change, or why there is nothing to change. `supports` tells whether the rig can obey."""
        return LEFT_OUT if self.word in plan.execution.without else self.propose(plan, rig)


def _fused(plan: Plan, rig: TunableTraining) -> Plan | str:
    return "the optimizer is fused already" if plan.numerics.optimizer == "fused" else plan.but(optimizer="fused")


FUSED = Move(name="fused optimizer", word="fused", kind="A", propose=_fused, helps=("launching", "memory traffic"))


# --- feeds -------------------------------------------------------------------------------------------


def _holding_s(plan: Plan, rig: TunableTraining) -> float:
    """Seconds until all samples are where the plan's feed gathers them."""
    return NO_SETUP_S + rig.holding_s(plan.feed)


def _resident(plan: Plan, rig: TunableTraining) -> Plan | str:
    if plan.feed.kind == "resident":
        return "the data is held on the device already"
    # The settings of workers belong to the loader that this feed replaces.
    return plan.with_feed(Feed(kind="resident"))


def _stream(plan: Plan, rig: TunableTraining) -> Plan | str:
    if plan.feed.kind == "resident":
        return "batches are on the device already"
    if plan.feed.kind == "stream":
        return "batches are streamed already"
    return plan.with_feed(Feed(kind="stream"))


def _gather(plan: Plan, rig: TunableTraining) -> Plan | str:
    if plan.feed.kind != "loader":
        return "batches are indexed as a whole already"
    return plan.with_feed(Feed(kind="gather"))


def _workers(plan: Plan, rig: TunableTraining) -> Plan | str:
    if plan.feed.workers:
        return f"the plan has {plan.feed.workers} workers already"
    reason = rig.why_no_workers()
    if reason is not None:
        return reason
    count = max(1, min(MOST_WORKERS, read_cpu().cores))
    pinned = rig.device.type == "cuda"
    return plan.with_feed(Feed(kind="loader", workers=count, persistent=True, pinned=pinned))


RESIDENT = Move(
    name="data held on the device",
    word="held-data",
    kind="A",
    propose=_resident,
    setup_s=_holding_s,
    helps=("feeding", "pageable copies"),
    feeds="held",
)
STREAM = Move(
    name="batches copied ahead",
    word="copied-ahead",
    kind="A",
    propose=_stream,
    setup_s=_holding_s,
    helps=("feeding", "pageable copies"),
    feeds="held",
)
GATHER = Move(
    name="batches indexed as a whole",
    word="gathered",
    kind="A",
    propose=_gather,
    setup_s=_holding_s,
    helps=("feeding", "pageable copies"),
    feeds="held",
)
WORKERS = Move(
    name="workers that fetch ahead",
    word="workers",
    kind="A",
    propose=_workers,
    setup_s=lambda plan, rig: WORKER_S * plan.feed.workers,
    helps=("feeding", "pageable copies"),
    feeds="fetched",
)


# --- numerics ----------------------------------------------------------------------------------------


def _without_compiling(plan: Plan, rig: TunableTraining) -> Plan:
    """The plan with depthwise kernels that are ready at once, where cuDNN would first compile its own."""
    is_slow_to_start = rig.device.type == "cuda" and depthwise_kinds(rig.modules) > 0
    return plan.but(depthwise="direct") if is_slow_to_start else plan


def _precision(plan: Plan, rig: TunableTraining) -> Plan | str:
    if plan.numerics.precision in ("bf16", "fp16"):
        return f"the precision is {plan.numerics.precision} already"
    # bf16 has the range of fp32 and needs no scaling; fp16 comes second.
    for precision in ("bf16", "fp16"):
        if machine.dtype_fact(rig.device, precision).support is machine.Support.HARDWARE:
            return _without_compiling(plan.but(precision=precision), rig)
    return f"this {rig.device.type} has no 16-bit number format in hardware"


def _tf32(plan: Plan, rig: TunableTraining) -> Plan | str:
    """TF32 is fp32 whose factors are rounded to 10 bits of fraction in products and convolutions."""
    if plan.numerics.precision != "fp32":
        return f"the precision is {plan.numerics.precision} already"
    return plan.but(precision="tf32")


def _layout(plan: Plan, rig: TunableTraining) -> Plan | str:
    """The convolutions of tensor cores take images with their channels last."""
    if plan.numerics.layout == "channels_last":
        return "channels are last already"
    return _without_compiling(plan.but(layout="channels_last"), rig)


def _depthwise(plan: Plan, rig: TunableTraining) -> Plan | str:
    """cuDNN's kernels can be a little faster than those that are ready at once."""
    if plan.numerics.depthwise == "direct":
        return plan.but(depthwise="library")
    return "cuDNN computes them already"


PRECISION = Move(
    name="16-bit precision",
    word="16-bit",
    kind="B",
    propose=_precision,
    setup_s=lambda plan, rig: 0.3 if rig.device.type == "cuda" else 0.02,
    helps=("arithmetic", "memory traffic"),
    is_paired=True,
    at_a_glance="needed",
)
TF32 = Move(name="TF32", word="tf32", kind="B", propose=_tf32, helps=("arithmetic", "memory traffic"))
LAYOUT = Move(
    name="channels last",
    word="channels-last",
    kind="A",
    propose=_layout,
    helps=("arithmetic", "memory traffic"),
    is_paired=True,
)
DEPTHWISE = Move(
    name="depthwise convolutions by cuDNN",
    word="cudnn-depthwise",
    kind="A",
    propose=_depthwise,
    setup_s=lambda plan, rig: DEPTHWISE_S * depthwise_kinds(rig.modules),
    helps=("arithmetic", "memory traffic"),
    is_rare=True,
)


# --- execution ---------------------------------------------------------------------------------------


def _autotune(plan: Plan, rig: TunableTraining) -> Plan | str:
    if plan.execution.autotune:
        return "autotuning is on already"
    if rig.device.type != "cuda":
        return "cuDNN needs a GPU"
    if why_not_channels_last(rig.modules) is not None:
        return "the model has no convolutions over images or volumes"
    if rig.steps:
        return "torch keeps the kernels that it chose for shapes of earlier steps"
    return plan.but(autotune=True)


def _captured(plan: Plan, rig: TunableTraining) -> Plan | str:
    if plan.execution.mode == "captured":
        return "the step is captured already"
    at_once = min(STEPS, rig.most_replay_steps) if plan.feed.kind == "resident" else 1
    return plan.but(mode="captured", replay_steps=at_once)


def _longer(plan: Plan, rig: TunableTraining) -> Plan | str:
    if plan.execution.mode != "captured" or plan.feed.kind != "resident":
        return "it needs captured steps and data that is held on the device"
    if rig.most_replay_steps < LONGER_STEPS:
        return "a replay holds one update only here"
    if plan.execution.replay_steps >= LONGER_STEPS:
        return f"a replay has {plan.execution.replay_steps} updates already"
    if rig.epoch_windows < 2 * LONGER_STEPS:
        return f"an epoch has {rig.epoch_windows} updates only"
    return plan.but(replay_steps=LONGER_STEPS)


def _compiled(plan: Plan, rig: TunableTraining) -> Plan | str:
    if plan.execution.compile != "no":
        return "the model is compiled already"
    if not rig.modules:
        return "there is no model to compile"
    model = rig.modules[0]
    blocks = repeated_blocks(model)
    # A block of one layer leaves nothing to fuse. Blocks share the code that is compiled for one of them.
    inside = sum(_layers(block) for block in blocks)
    is_worth = inside > len(blocks) and inside >= BLOCKS * _layers(model)
    # The compiler compiles its own kernels, and cuDNN's, at once.
    return plan.but(compile="blocks" if is_worth else "model", depthwise="library")


def _layers(module: nn.Module) -> int:
    """Layers that consist of no others."""
    return sum(next(layer.children(), None) is None for layer in module.modules())


def _compiling_s(plan: Plan, rig: TunableTraining) -> float:
    device = "cpu" if rig.device.type == "cpu" else "cuda"
    model = rig.modules[0]
    compiled = repeated_blocks(model)[0] if plan.execution.compile == "blocks" else model
    return COMPILER_S[device] + LAYER_S[device] * _layers(compiled)


AUTOTUNE = Move(
    name="cuDNN autotuned",
    word="autotuned",
    kind="A",
    propose=_autotune,
    setup_s=lambda plan, rig: 1.0,
    helps=("arithmetic",),
)
CAPTURED = Move(
    name="whole step captured",
    word="captured",
    kind="A",
    propose=_captured,
    setup_s=lambda plan, rig: 0.3,
    helps=("launching", "feeding"),
    at_a_glance="stays",
)
LONGER = Move(
    name=f"{LONGER_STEPS} steps a replay",
    word="longer-replays",
    kind="A",
    propose=_longer,
    setup_s=lambda plan, rig: 0.5,
    helps=("launching",),
)
COMPILED = Move(
    name="torch.compile",
    word="compiled",
    kind="A",
    propose=_compiled,
    setup_s=_compiling_s,
    helps=("arithmetic", "memory traffic", "launching"),
    comes_last=True,
)


# --- all of them -------------------------------------------------------------------------------------

MOVES: tuple[Move, ...] = (FUSED, RESIDENT, STREAM, GATHER, PRECISION, TF32, LAYOUT, AUTOTUNE, CAPTURED)
"""In the order in which a plan's parts rest on each other, except for the optimizer, which decides how fp16 skips."""

OTHERS: tuple[Move, ...] = (LONGER, WORKERS, DEPTHWISE, COMPILED)
"""Moves that replace one of these, build upon it, or are too dear to be tried beside others."""


@dataclass(frozen=True)
class Everything:
    """A plan with every move that can be made, and why the others cannot."""

    plan: Plan
    made: tuple[Move, ...]
    not_made: tuple[tuple[Move, str], ...]


def everything(rig: TunableTraining, plan: Plan | None = None, moves: Sequence[Move] | None = None) -> Everything:
    """The plan with each of these moves that can be made, starting from `plan`. Nothing is measured.

    Without `moves` it takes `MOVES`, and workers where samples have to be fetched one by one.
    """
    if moves is None:
        found = everything(rig, plan, MOVES)
        return found if found.plan.feed.kind != "loader" else everything(rig, plan, (*MOVES, WORKERS))
    plan, made, not_made = plan or rig.plan, [], []
    for move in moves:
        proposed = move.proposed(plan, rig)
        reason = proposed if isinstance(proposed, str) else rig.supports(proposed)
        if isinstance(proposed, str) or reason:
            not_made.append((move, str(reason)))
        else:
            plan = proposed
            made.append(move)
    return Everything(plan, tuple(made), tuple(not_made))
