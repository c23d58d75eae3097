"""One optimizer update: pieces weighted by samples, gradients clipped once, schedule moved once."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from hotlap.core.errors import TrainingError
from hotlap.core.plan import Execution, Numerics
from hotlap.core.torch_private import foreach_div_
from hotlap.data.batches import Batch, map_tensors, to_device
from hotlap.data.resident import PendingRows
from hotlap.engine.assists.overlap import Overlap
from hotlap.engine.capture.recording import intended_wait
from hotlap.engine.exchange import Exchange
from hotlap.engine.layout import Layout
from hotlap.engine.objective import Objective, Scored, Totals
from hotlap.engine.optimizers import start_momenta
from hotlap.engine.precision import Switches, precision_context
from hotlap.engine.scaling import LossScale, skipping
from hotlap.engine.schedules import Rates, Schedule


@dataclass(slots=True)  # not frozen: that would take three times as long to construct, at every step
class Window:
    """The samples of one update, in the pieces that go through the model one by one."""

    pieces: list[Batch]
    sizes: list[int]
    all_count: bool = False
    """Whether the loss is known to ignore none of its targets."""
    updates: int = 1
    """Number of updates. The pieces of the later ones follow in the epoch's order and are cut the same way."""
    of: int = 0
    """Samples of the update over all ranks, if several share it."""

    @property
    def samples(self) -> int:
        """Samples in all pieces of all updates, and of all ranks."""
        if self.of:
            return self.of
        sizes = self.sizes
        return (sizes[0] if len(sizes) == 1 else sum(sizes)) * self.updates

    def update(self, number: int) -> Window:
        """One of its updates."""
        if self.updates == 1:
            return self
        by = number * sum(self.sizes)
        return Window([piece.shifted(by) for piece in self.pieces], self.sizes, self.all_count)

    def widest(self) -> Window:
        """The same samples padded to the widest batch, if they are held on the device and differ in size."""
        if not self.is_held:
            return self
        return Window([piece.widest() for piece in self.pieces], self.sizes, self.all_count, self.updates)

    @property
    def is_held(self) -> bool:
        """Whether its samples are on the device and still to be gathered."""
        return isinstance(self.pieces[0], PendingRows)


class EagerStep:
    """Runs updates operation by operation. A capture records `gradients` and `finish`."""

    warmup_steps: int = 0
    """Warm-up windows: none."""
    given_up: str | None = None
    """Why it does not do what the plan asks: always None."""
    warm_later: int = 1
    """Updates of a new shape that run eagerly before it is recorded: libraries choose their kernels for it."""

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        schedule: Schedule,
        totals: Totals,
        *,
        device: torch.device,
        numerics: Numerics,
        execution: Execution,
        layout: Layout,
        clip: float | None = None,
        scale: LossScale | None = None,
        skips_on_device: bool = False,
        rates: Rates | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._objective = objective
        self.modules = objective.modules
        self.functions = objective.functions
        self.optimizer = optimizer
        self.schedule = schedule
        self.totals = totals
        self.rates = rates
        self._exchange = exchange
        self._device = device
        self._moves = device.type != "cpu"
        self._context = precision_context(numerics, device, self.modules)
        self._has_context = self._context is not nullcontext
        self._changes_batches = objective.changes_batches
        self.switches = Switches(numerics, execution, device)
        self._plain = rates is None and not self.switches
        """Whether a step needs no context around it, which saves some microseconds."""
        self._layout = layout if numerics.layout != "as given" else None
        self._clip = clip
        self._scale, self._skips_on_device = scale, skips_on_device
        self._scaled = scale is not None and numerics.precision == "fp16"
        self.look: Callable[[Tensor], None] | None = None
        """Called with every loss before its backward pass."""
        self.around: AbstractContextManager[object] = nullcontext()
        """Around the computation of gradients."""
        self.is_compiled = execution.compile != "no"
        self.overlap: Overlap | None = None
        """Computes the gradients, if steps are recorded."""
        self._known: tuple[int, ...] = ()
        self._all: list[Tensor] = []
        self._not_optimized: list[Tensor] = []

    @property
    def waits(self) -> bool:
        """Whether the host decides if an update is skipped, and so waits for the device."""
        return self._scale is not None and not self._skips_on_device

    def __call__(self, window: Window) -> Tensor:
        """Make the window's updates; returns the loss of the last."""
        if window.updates == 1:
            return self.one(window)
        for number in range(window.updates):
            loss = self.one(window.update(number))
        return loss

    def one(self, window: Window) -> Tensor:
        """Make one update; its loss."""
        if self._plain:
            loss, scores = self.gradients(window.pieces, window.sizes, window.all_count, window.of)
            updated = self.finish(scores)
        else:
            if self.rates is not None:
                self.rates.write(1)
            with self.switches if self.switches else nullcontext():
                loss, scores = self.gradients(window.pieces, window.sizes, window.all_count, window.of)
                with self.rates.given(0) if self.rates is not None else nullcontext():
                    updated = self.finish(scores)
        self.ended(updated)
        return loss

    def kept(self, loss: Tensor) -> Tensor:
        """A loss that the next call does not overwrite."""
        return loss

    def forget(self) -> None:
        """Drop recordings: there are none."""

    def ended(self, updated: bool) -> None:
        """Move the schedule after an update; it stays after a skipped one."""
        if self.rates is not None:
            self.rates.ended()
        elif updated and self.schedule.moves_per_update:
            self.schedule.move()

    def gradients(
        self, pieces: list[Batch], sizes: list[int], all_count: bool, of: int = 0
    ) -> tuple[Tensor, list[Scored]]:
        """Compute and clip the gradients of one update. Returns the loss, and what to add to the running loss.

        `of` are its samples over all ranks. The loss is that of this rank's samples.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.parameters()
        for parameter in self._not_optimized:
            parameter.grad = None
        with self.around:
            if self._exchange is not None:
                loss, scores = self._in_ranks(self._exchange, pieces, sizes, of)
            elif len(pieces) == 1:
                loss, scores = self._whole(pieces[0], sizes[0], all_count)
            else:
                loss, scores = self._in_pieces(pieces, sizes)
        self._unscale_and_clip()
        return loss, scores

    def finish(self, scores: list[Scored]) -> bool:
        """Update the weights and the running loss. False if the host skipped the update."""
        found = self._scale.found_inf if self._scale is not None else None
        updated = True
        start_momenta(self.optimizer)
        if found is None:
            self.optimizer.step()
        elif self._skips_on_device:
            with skipping(self.optimizer, found):
                self.optimizer.step()
        elif self._overflowed(found):
            self.optimizer.zero_grad(set_to_none=True)
            updated = False
        else:
            self.optimizer.step()
        if self._scale is not None:
            self._scale.update()
            if self.rates is not None:
                self.rates.made(found)
        if updated:
            # A skipped window does not count in the running loss either.
            for scored in scores:
                self.totals.add(scored, found if self._skips_on_device else None)
        return updated

    def _overflowed(self, found: Tensor) -> bool:
        """Whether gradients overflowed. This is the only wait of a step, needed if the optimizer cannot skip by
        itself."""
        with intended_wait():
            return bool(found)

    def _whole(self, piece: Batch, samples: int, all_count: bool) -> tuple[Tensor, list[Scored]]:
        batch, same_target = self._on_device(piece)
        if self._has_context:
            with self._context():
                scored = self._objective.whole(batch, samples, all_count=all_count and same_target)
        else:
            scored = self._objective.whole(batch, samples, all_count=all_count and same_target)
        self._backward(scored.loss)
        # Detach, so that a kept loss does not keep the graph, whose nodes belong to this step's stream.
        loss = scored.loss.detach()
        return loss, [Scored(loss, scored.factor, scored.weight, scored.counted)]

    def _in_pieces(self, pieces: list[Batch], sizes: list[int]) -> tuple[Tensor, list[Scored]]:
        """Gradients of the whole window: means are weighted by samples, counted sums are divided once at the end."""
        everything = sum(sizes)
        # A sum over samples is larger than their mean by their number. A scaled fp16 loss has no room for that.
        shrink = everything if self._scaled else 1
        total: Tensor | float = 0.0
        count: Tensor | float = 0
        scores = []
        for piece, samples in zip(pieces, sizes, strict=True):
            batch, _ = self._on_device(piece)
            with self._context():
                scored = self._objective.piece(batch, samples)
            if scored.counted:
                self._backward(scored.loss / shrink if shrink > 1 else scored.loss)
            else:
                self._backward(scored.loss if self._objective.sums else scored.loss * (samples / everything))
            scores.append(scored._replace(loss=scored.loss.detach()))
            total = total + scores[-1].loss * scored.factor
            count = count + scored.weight
        if any(scored.counted for scored in scores):
            self._divide_gradients(count / shrink if shrink > 1 else count)
        return torch.as_tensor(total if self._objective.sums else total / count), scores

    def _in_ranks(
        self, exchange: Exchange, pieces: list[Batch], sizes: list[int], everything: int
    ) -> tuple[Tensor, list[Scored]]:
        """The same over all ranks: the last piece of each exchanges the gradients of all its pieces."""
        objective = self._objective
        counts, shrink = objective.may_count, everything if self._scaled else 1
        total, count = (torch.zeros((), dtype=torch.float64, device=self._device) for _ in range(2))
        scores = []
        parts = [*zip(pieces, sizes, strict=True)] or [(None, 0)]
        for number, (piece, samples) in enumerate(parts, 1):
            batch = self._on_device(piece)[0] if samples else None
            with exchange.waiting(objective) if number < len(parts) else nullcontext():
                with self._context():
                    loss, scored = exchange.loss(objective, batch, samples)
                if scored is not None and scored.counted and not counts:
                    raise TrainingError(
                        "a loss whose reduction is 'sum' must not return (sum, count) with several ranks"
                    )
                if scored is not None and not scored.counted and not objective.sums:
                    loss = loss * (samples if counts else samples / everything)
                self._backward(loss / shrink if counts and shrink > 1 else loss)
            if scored is not None:
                scores.append(scored._replace(loss=scored.loss.detach()))
                total += scores[-1].loss * scored.factor
                count += scored.weight
        exchange.finished(objective)
        own = total if objective.sums else total / count.clamp(min=1)
        if counts:
            self._divide_gradients(exchange.add_up(count) / shrink)
        return own, scores

    def _backward(self, loss: Tensor) -> None:
        if self.look is not None:
            self.look(loss)
        scaled = self._scale.scaled(loss) if self._scaled and self._scale is not None else loss
        if self.overlap is None:
            torch.autograd.backward(scaled)
        else:
            self.overlap.backward(scaled)

    def _divide_gradients(self, count: Tensor | float) -> None:
        grads = self._gradients()
        if isinstance(count, Tensor):
            count = count.to(grads[0].device, torch.promote_types(grads[0].dtype, torch.float32))
        foreach_div_(grads, count)

    def _unscale_and_clip(self) -> None:
        """Unscale, clip, then check whether all gradients are finite."""
        if self._scaled and self._scale is not None:
            self._scale.unscale_(self._gradients())
        if self._clip is not None:
            norm = clip_grad_norm_(self._all, self._clip)
        elif self._scale is not None and not self._scaled:
            norm = get_total_norm(self._gradients())
        if self._scale is not None and not self._scaled:
            self._scale.look_at(norm)

    def _on_device(self, batch: Batch) -> tuple[Batch, bool]:
        """The batch on the device as the model takes it, and whether its target is unchanged."""
        if type(batch) is PendingRows:
            batch = batch.gathered()
        elif self._moves:
            batch = to_device(batch, self._device, non_blocking=True)
        same_target = True
        if self._changes_batches:
            given, batch = batch, self._objective.ready(batch, training=True)
            same_target = type(batch) is tuple and type(given) is tuple and batch[-1] is given[-1]
        return (batch if self._layout is None else self._layout.batch(batch)), same_target

    def parameters(self) -> list[Tensor]:
        """All tensors that may have a gradient: the parameters of the optimizer, the model and the loss."""
        groups = self.optimizer.param_groups
        # By identity: a layer may have been replaced by one with as many tensors.
        known = tuple(map(id, groups[0]["params"])) if len(groups) == 1 else self._ids_of_all(groups)
        if known != self._known:
            mine = [p for group in self.optimizer.param_groups for p in group["params"]]
            every = [p for module in self.modules for p in module.parameters()]
            # By identity too: tensors compare by value.
            self._all = list({id(p): p for p in (*every, *mine)}.values())
            # The optimizer does not know these, so their gradients would accumulate from step to step.
            self._not_optimized = [p for p in every if id(p) not in set(map(id, mine))]
            self._known = known
        return self._all

    @staticmethod
    def _ids_of_all(groups: list[dict[str, Any]]) -> tuple[int, ...]:
        return tuple(id(p) for group in groups for p in group["params"])

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._all if p.grad is not None]


# --- errors --------------------------------------------------------------------------------------------


def why_no_gradients() -> str | None:
    """Why torch computes no gradients in this context; None if it does."""
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode() is active, which computes no gradients: train outside of it"
    if not torch.is_grad_enabled():
        return "torch.no_grad() is active, which computes no gradients: train outside of it"
    return None


_CUDA_FULL = "out of memory"
_FULL = ("CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")
"""What a RuntimeError says of memory that is too small; for the host's, torch has no class."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or the one that it comes from, says that the memory of the GPU or the host was too small."""
    if error is None:
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    says = text == "std::bad_alloc" or any(words in text for words in _FULL) or ("CUDA" in text and _CUDA_FULL in text)
    return (isinstance(error, RuntimeError) and says) or is_out_of_memory(error.__cause__)


def let_go_of_frames(error: BaseException | None) -> None:
    """Clear the frames that an error has come through, which hold activations."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def explained(error: Exception, window: Window, model: nn.Module) -> str | None:
    """A clear message for an error in a step that users meet often; None for other errors."""
    text = str(error)
    if (reason := why_no_gradients()) is not None:
        return reason
    if "more than 1 value per channel" in text:
        return (
            f"a batch norm got a single value per channel (pieces of {window.sizes} samples); drop the "
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
                f"{text.splitlines()[0]}: a loss that is not a module is called as f(model, batch); for a loss of "
                "(output, target) give a loss module, or loss=lambda model, batch: f(model(batch[0]), batch[1])"
            )
        return None
    if is_out_of_memory(error):
        return None
    if (mismatch := _shape_mismatch(text)) is not None:
        return f"{mismatch} (the batch holds {_described(window)})"
    words = (
        "same dtype",
        "expected scalar type",
        "expected target dtype",
        "expected m1 and m2",
        "Found dtype",
        "not implemented for 'Int'",
    )
    if not any(word in text for word in words):
        return None
    held = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    return (
        f"{text.splitlines()[0]}: the batch holds {_described(window)} and the model {', '.join(held)}; "
        "let the dataset give numbers of the model's dtype, and classes as int64"
    )


def _described(window: Window) -> str:
    """Dtypes and shapes of the tensors in a batch; no value is read."""
    seen: list[str] = []
    if not window.pieces:
        return "no samples"

    def note(tensor: Tensor) -> Tensor:
        seen.append(f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}")
        return tensor

    map_tensors(window.pieces[0], note)
    return ", ".join(seen) or "no tensors"


_SIZE = r"\(?(?:torch\.Size\()?(\[[\d, ]*\])\)?\)?"
_MISMATCHES = (
    (
        r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
        "a linear layer of the model takes {1} features and was given {0}: change the layer's in_features or the data",
    ),
    (
        r"input\.size\(-1\) must be equal to input_size\. Expected (\d+), got (\d+)",
        "a recurrent layer of the model takes {0} features and was given {1}: change its input_size or the data",
    ),
    (
        r"to have (\d+) channels, but got (\d+) channels",
        "a convolution of the model takes {0} channels and was given {1}: images are (batch, channels, height, width)",
    ),
    (
        r"Target (-?\d+) is out of bounds",
        "the target holds class {0}, which the model has no output for: classes count from 0, so that C outputs take "
        "labels 0 to C-1; shift the labels or give the model more outputs",
    ),
    (
        rf"[Tt]arget size {_SIZE} (?:must be the same as|that is different to the) input size {_SIZE}",
        "the loss takes output and target of one shape; the model gives {1}, the target is {0}: "
        "use target.unsqueeze(1), or squeeze the output",
    ),
    (
        r"0D or 1D target tensor expected, multi-target not supported",
        "the loss takes one class for each sample, in a target of one dimension: use target.squeeze(1), or argmax(1) "
        "of classes in columns",
    ),
    (
        r"device-side assert triggered",
        "the GPU stopped at a failed check, most often of a label or an index out of range: C outputs take labels 0 to "
        "C-1, an embedding of N rows takes indices 0 to N-1; device='cpu' names the place",
    ),
)
"""What torch says when sizes do not fit, as a pattern, and what that means."""


def _shape_mismatch(text: str) -> str | None:
    for pattern, meaning in _MISMATCHES:
        if (found := re.search(pattern, text)) is not None:
            return meaning.format(*found.groups())
    return None
