"""What torch's errors mean for a training, in words that say what to do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotlap.data.batches import map_tensors
from hotlap.engine.step import Window


def why_no_gradients() -> str | None:
    """Why nothing can be trained where this is called: torch computes no gradients here. None where it does."""
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode() is in force, which computes no gradients: train outside of it"
    if not torch.is_grad_enabled():
        return "torch.no_grad() is in force, so no gradients are computed: train outside of it"
    return None


def explained(error: Exception, window: Window, model: nn.Module) -> str | None:
    """A clear line for an error in a step that users meet often, or None for all others."""
    text = str(error)
    if (reason := why_no_gradients()) is not None:
        return reason
    if "more than 1 value per channel" in text:
        return (
            f"a batch norm was given a single value of each channel (pieces of {window.sizes} samples); leave out the "
            "last, shorter batch (drop_last=True), or choose a batch size that leaves no single sample"
        )
    if "view size is not compatible" in text:
        return (
            f"{text.splitlines()[0]}: under the layout channels_last a model has to use reshape or flatten where it "
            "uses view; change that, or leave the layout as given"
        )
    if isinstance(error, TypeError):
        if f"not {type(model).__name__}" in text:
            return (
                f"{text.splitlines()[0]}: a loss that is no module is called as f(model, batch); for one of (output, "
                "target) give a loss module, or loss=lambda model, batch: f(model(batch[0]), batch[1])"
            )
        return None
    words = ("same dtype", "expected scalar type", "expected m1 and m2", "Found dtype", "not implemented for 'Int'")
    if isinstance(error, torch.OutOfMemoryError) or not any(word in text for word in words):
        return None
    seen: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(str(tensor.dtype).removeprefix("torch."))
        return tensor

    map_tensors(window.pieces[0], note)
    held = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    return (
        f"{text.splitlines()[0]}: the batch holds {', '.join(seen) or 'no tensors'} and the model {', '.join(held)}; "
        "let the dataset give numbers of the model's dtype, and classes as int64"
    )
