"""The tricks of `hotlap run`: what it does beside the choices of a plan. Each can be left out by its name."""

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

TRICKS: Final[Mapping[str, str]] = MappingProxyType(
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
    }
)
"""What each of them does. All but the last work under a captured plan alone."""
