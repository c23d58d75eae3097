"""Optimisations, each with a name by which `execution.without` leaves it out: moves, and tricks beside them.

This is the one table of them. `hotlap run --without`, plan files and `fit(without=[...])` all take its names.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

REPLAYED_LOSS: Final = "replayed-loss"
EARLY_ITEM: Final = "early-item"
REPLAYED_CLIPPING: Final = "replayed-clipping"
SHORT_STEP: Final = "short-step"
ONE_THREAD_BACKWARD: Final = "one-thread-backward"
GRADIENTS_IN_PLACE: Final = "gradients-in-place"
REPLAYED_EVALUATION: Final = "replayed-evaluation"
EVALUATION_FEED: Final = "evaluation-feed"
DECODED_ONCE: Final = "decoded-once"
FORWARD_PIECES: Final = "forward-pieces"

OVERLAPPED_GRADIENTS: Final = "overlapped-gradients"
CAST_TOGETHER: Final = "cast-together"
ATTENTION_KERNEL: Final = "attention-kernel"
ATTENTION_MASKS: Final = "attention-masks"
REWIRED_LAYERS: Final = "rewired-layers"
LOSS_WITHOUT_WAITING: Final = "loss-without-waiting"
COUNTED_NORMS: Final = "counted-norms"
GATHERED_TOGETHER: Final = "gathered-together"
CAPTURED_UPDATE: Final = "captured-update"

RUN_TRICKS: Final[Mapping[str, str]] = MappingProxyType(
    {
        REPLAYED_LOSS: "One replay computes the gradients of a loss of torch's, from the loss back to the weights.",
        EARLY_ITEM: "A loss that the script reads at every step is copied to the host before its backward pass.",
        REPLAYED_CLIPPING: "Calls of `clip_grad_norm_` are replays.",
        SHORT_STEP: "`optimizer.step()` and `zero_grad()` skip what torch does around them for profilers and hooks.",
        ONE_THREAD_BACKWARD: "autograd works in the thread of the script and wakes no other.",
        GRADIENTS_IN_PLACE: "Gradients stay where the replay wrote them until the script drops them; "
        f"{REPLAYED_LOSS} needs this.",
        REPLAYED_EVALUATION: "Calls in `eval()` mode without gradients are replays.",
        EVALUATION_FEED: "Loaders beside the training loop, such as those of evaluations, get the feed of the loop.",
        DECODED_ONCE: "Pictures that PIL decodes, converts and resizes, or OpenCV reads, are remembered, and come from "
        "memory in later epochs.",
        FORWARD_PIECES: "A forward pass that runs out of memory, or whose backward pass would, runs again in pieces, "
        "which are computed again in the backward pass.",
    }
)
"""What `hotlap run` does with a script. All but the last three work under a captured plan alone."""

STEP_TRICKS: Final[Mapping[str, str]] = MappingProxyType(
    {
        OVERLAPPED_GRADIENTS: "The gradients of linear layers' weights are computed on a second stream, beside those "
        "of activations.",
        CAST_TOGETHER: "Under autocast one kernel casts a group of weights, and one casts their gradients back.",
        ATTENTION_KERNEL: "Attention takes the kernel of torch that is fastest for its shape, found by timing.",
        ATTENTION_MASKS: "In 16 bits, attention with dropout avoids cuDNN's kernel, which draws poor masks; "
        f"{ATTENTION_KERNEL} avoids it too.",
        REWIRED_LAYERS: "Encoders of torch and `transformers` read no masks, labels or positions back to the host.",
        LOSS_WITHOUT_WAITING: "`cross_entropy` with class weights and smoothed labels does not wait for the GPU.",
        COUNTED_NORMS: "One kernel counts the batches of all batch norms.",
        GATHERED_TOGETHER: "One kernel gathers the batches of all updates in a replay, up to 64 MiB.",
        CAPTURED_UPDATE: "The optimizer's step is captured with the gradients, where torch can record it.",
    }
)
"""What the steps of `fit` and `Rig` do. All but attention-masks work under a captured plan alone."""

MOVE_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fused": "The optimizer updates all weights with one kernel.",
        "held-data": "All data is held on the GPU.",
        "copied-ahead": "The next batch is copied to the GPU while the GPU computes.",
        "gathered": "Batches are indexed as a whole in memory, not sample by sample.",
        "workers": "Processes fetch the next batches.",
        "16-bit": "Products and convolutions are computed in bf16, or fp16 with a scaled loss.",
        "tf32": "Products and convolutions round their factors to TF32.",
        "channels-last": "Images lie in memory with their channels last.",
        "autotuned": "cuDNN times its convolutions and keeps the fastest.",
        "captured": "The GPU replays a recorded step.",
        "longer-replays": "A replay holds 32 updates in place of 8.",
        "cudnn-depthwise": "cuDNN computes depthwise convolutions, in place of kernels of hotlap.",
        "compiled": "torch.compile compiles the model.",
    }
)
"""What each move does, by a short name."""

TRICKS: Final[Mapping[str, str]] = MappingProxyType({**MOVE_WORDS, **RUN_TRICKS, **STEP_TRICKS})
"""What each of them does, in one sentence."""

FIT_TRICKS: Final = frozenset({*STEP_TRICKS, REPLAYED_EVALUATION})
"""Those that `fit` and `Rig` can leave out."""
