"""Evaluation: loss and metrics over all data, in larger batches. The training stays unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import HotlapError, TrainingError, first_line
from hotlap.core.plan import Plan
from hotlap.core.tricks import REPLAYED_EVALUATION, REWIRED_LAYERS
from hotlap.core.turns import turn
from hotlap.data.bad_samples import BadSamples, Thinned
from hotlap.data.batches import Batch, map_tensors, to_device
from hotlap.data.dataset import OrderedDataset, evaluation_dataset
from hotlap.data.feeds import Feeding, open_feed
from hotlap.data.pure.proof import state_of
from hotlap.data.pure.read_state import ReadState
from hotlap.data.resident import ResidentFeeding, hold_on_device, why_not_held
from hotlap.data.sources import tensors_in
from hotlap.engine.assists.rewiring import rewire
from hotlap.engine.capture.captured_step import BatchError, shape_of
from hotlap.engine.capture.fingerprint import fingerprint
from hotlap.engine.capture.recording import NotRecordedError, Recorder, Watch
from hotlap.engine.exchange import Share
from hotlap.engine.layout import Layout
from hotlap.engine.objective import Objective, Totals
from hotlap.engine.precision import Switches, precision_context
from hotlap.engine.snapshot import Modes, Randomness
from hotlap.engine.step import is_out_of_memory, let_go_of_frames
from hotlap.machine.cuda import free_for_torch
from hotlap.machine.memory_shortage import free_bytes, has_returned, release_unused, shortage


@dataclass(frozen=True)
class Tally:
    """Loss and metrics over the batches so far, as sums."""

    totals: Totals
    metrics: dict[str, Metric]

    def sums(self) -> list[list[Tensor]]:
        """The sums of loss and metrics, on the host."""
        total, counted, count = self.totals.saved()
        parts = [[total, counted + count], *(metric.sums() for metric in self.metrics.values())]
        return [[one.detach().cpu() for one in part] for part in parts]

    def add_sums(self, parts: list[list[Tensor]]) -> None:
        """Add the sums of another rank."""
        (total, count), *others = parts
        self.totals.add_numbers((total, count, 0))
        for metric, sums in zip(self.metrics.values(), others, strict=True):
            metric.add_sums(sums)

    def scores(self) -> dict[str, float]:
        """Loss and metrics by name."""
        return {"loss": self.totals.mean(), **{name: metric.result() for name, metric in self.metrics.items()}}


class Evaluator:
    """Evaluates one model.

    From one evaluation to the next it keeps data held on the device, captures, and persistent workers of the user's
    loader.
    """

    def __init__(self, objective: Objective, device: torch.device, layout: Layout) -> None:
        self._objective, self._device, self._layout = objective, device, layout
        self.bad: BadSamples | None = None
        """Lists samples of evaluations that were left out; None if none may be. Predictions leave none out."""
        self._kept: _Kept | None = None
        self._most: int | None = None
        """Most samples at once, where more ran out of memory."""
        self._was_free, self._asked = 0, 0
        """Free memory when it ran out, and what was asked for."""
        self._seen = 0
        """Samples of the largest batch of the evaluation under way."""
        self.on_smaller: Callable[[str, str], None] = lambda what, why: None
        """Called with what became smaller, and why."""
        self._captured: dict[bool, tuple[Plan, CapturedOutputs]] = {}
        """For predictions and for evaluations, with the plan of the last one."""

    def __call__(
        self,
        data: Any,
        metrics: Sequence[str] | Mapping[str, Any],
        *,
        batch_size: int,
        collate: Any,
        plan: Plan,
        share: Share | None = None,
    ) -> dict[str, float]:
        """Loss and metrics by name, computed as the plan asks. Batches that do not fit in memory are halved until they
        do, for later evaluations too."""
        tally = self._tallied(data, metrics, batch_size, collate, plan, share)
        if (mine := turn.get()) is not None:
            mine.pass_on(until_done=True)  # to read the scores waits for the device
        for sums in share.others() if share is not None else ():
            tally.add_sums(sums)
        return tally.scores()

    def sums(
        self,
        data: Any,
        metrics: Sequence[str] | Mapping[str, Any],
        *,
        batch_size: int,
        collate: Any,
        plan: Plan,
        share: Share,
    ) -> list[list[Tensor]]:
        """The sums of one rank's batches, for the rank that adds them up."""
        return self._tallied(data, metrics, batch_size, collate, plan, share).sums()

    def _tallied(
        self,
        data: Any,
        metrics: Sequence[str] | Mapping[str, Any],
        batch_size: int,
        collate: Any,
        plan: Plan,
        share: Share | None,
    ) -> Tally:
        tally: Tally = self._without_a_trace(
            lambda dataset, feeding: self._tally(dataset, feeding, metrics, plan, share),
            data,
            batch_size,
            collate,
            plan,
            self.bad,
        )
        return tally

    def outputs(self, data: Any, *, batch_size: int, collate: Any, plan: Plan) -> Any:
        """The model's outputs for all of `data`, in its order, on the host."""
        return self._without_a_trace(
            lambda dataset, feeding: self._predictions(dataset, feeding, plan), data, batch_size, collate, plan
        )

    def _without_a_trace(
        self,
        work: Callable[[OrderedDataset, Feeding], Any],
        data: Any,
        batch_size: int,
        collate: Any,
        plan: Plan,
        bad: BadSamples | None = None,
    ) -> Any:
        objective, device = self._objective, self._device
        modules = objective.modules
        modes, randomness = Modes(modules), Randomness(device)
        if self._most is not None and has_returned(self._was_free, free_bytes(device), self._asked):
            self._most = None
        for module in modules:
            module.eval()
        try:
            while True:
                dataset, feeding = self._open(data, collate, batch_size, plan, bad)
                try:
                    with torch.no_grad(), Switches(plan.numerics, plan.execution, device):
                        return work(dataset, feeding)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    self._use_less(error)
                finally:
                    if self._kept is None or self._kept.feeding is not feeding:
                        feeding.close()
        finally:
            modes.restore()
            randomness.restore()

    def _use_less(self, error: Exception) -> None:
        """Cut batches into halves from here on. The evaluation begins anew, so that nothing counts twice."""
        before, short = self._seen, shortage(error, self._device)
        if before <= 1:
            raise TrainingError(
                "; ".join(
                    [f"out of memory in an evaluation of one sample at a time: {first_line(error)}", *short.notes]
                )
            ) from None
        self._most = before // 2
        let_go_of_frames(error)
        self._captured = {}
        release_unused(self._device)
        self._was_free, self._asked = free_bytes(self._device), short.asked_bytes or 0
        why = "; ".join([f"out of memory: {first_line(error)}", *short.notes])
        self.on_smaller(f"evaluation batch {before:,} → {self._most:,}", why)

    def close(self) -> None:
        """End kept workers, and release data and captures."""
        if self._kept is not None:
            self._kept.feeding.close()
            self._kept = None
        self._captured = {}

    def _open(
        self, data: Any, collate: Any, size: int, plan: Plan, bad: BadSamples | None
    ) -> tuple[OrderedDataset, Feeding]:
        kept, wanted = self._kept, plan.feed.kind == "resident"
        if kept is not None and kept.is_for(data, collate, size, wanted) and kept.dataset.bad is bad:
            if kept.state is None or kept.state.why_changed(thorough=True) is None:
                return kept.dataset, kept.feeding
            self.close()  # the data has changed since it was held
        on_gpu = self._device.type == "cuda"
        dataset = evaluation_dataset(data, batch_size=size, collate=collate, on_gpu=on_gpu, bad=bad)
        # Use at most a third of the free memory: the training needs the rest.
        resident = wanted and why_not_held(dataset.source, self._device, reserve_bytes=self._two_thirds_free()) is None
        feeding: Feeding
        if resident:
            columns = hold_on_device(dataset.source, self._device)
            feeding = ResidentFeeding(columns, self._device, columns.left_out)
            if bad is not None:
                bad.note("valid", columns.left_out)
        else:
            feeding = open_feed(dataset.source, dataset.feed, on_gpu=on_gpu, device=self._device, extras=dataset.extras)
        if dataset.feed.persistent or resident:
            self.close()
            state = state_of(dataset.source) if resident else None
            self._kept = _Kept(data, collate, size, dataset, feeding, wanted, state)
        return dataset, feeding

    def _two_thirds_free(self) -> int:
        return 2 * free_for_torch(self._device) // 3 if self._device.type == "cuda" else 0

    def _tally(
        self,
        dataset: OrderedDataset,
        feeding: Feeding,
        metrics: Sequence[str] | Mapping[str, Any],
        plan: Plan,
        share: Share | None,
    ) -> Tally:
        objective, device = self._objective, self._device
        context = precision_context(plan.numerics, device, objective.modules)
        totals, gathered = Totals(device), make_metrics(metrics, objective.loss)
        if "loss" in gathered:
            raise HotlapError("a metric called 'loss' hides the loss; give it another name")
        outputs = self._outputs(plan)
        for batch, samples in self._batches(dataset, feeding, share):
            if objective.is_criterion:
                shared = outputs(batch)
                with context():
                    totals.add(objective.judge(*shared, samples))
            else:
                # Prepared once, since a user's function may write into its argument.
                ready = self._ready(batch, plan)
                with context():
                    totals.add(objective.piece(ready, samples))
                    shared = objective.outputs(ready) if gathered else (None, None)
            for metric in gathered.values():
                metric.add(*shared, samples)
        return Tally(totals, gathered)

    def _predictions(self, dataset: OrderedDataset, feeding: Feeding, plan: Plan) -> Any:
        outputs = self._outputs(plan, predicting=True)
        parts = [map_tensors(outputs(batch)[0], _on_host) for batch, _ in self._batches(dataset, feeding)]
        joined = [_joined(column) for column in zip(*map(tensors_in, parts), strict=True)]
        if dataset.is_sorted:
            back = dataset.order.epoch(0).indices.argsort()
            joined = [column.index_select(0, back) for column in joined]
        columns = iter(joined)
        return map_tensors(parts[0], lambda _: next(columns))

    def _batches(
        self, dataset: OrderedDataset, feeding: Feeding, share: Share | None = None
    ) -> Iterator[tuple[Any, int]]:
        """Batches on the device, and their numbers of samples. Ranks take whole batches in turn."""
        epoch = dataset.order.epoch(0)
        if isinstance(feeding, ResidentFeeding):
            epoch = feeding.held_of(epoch)
        windows = range(len(epoch)) if share is None else range(share.rank, len(epoch), share.size)
        asked = [piece for window in windows for piece in epoch.pieces(window, self._most, tickets=feeding.tickets)]
        indices = [piece for piece in asked if len(piece)]
        self._seen = max(map(len, indices), default=0)
        for wanted, piece in zip(indices, feeding.pieces(indices, 0), strict=True):
            samples = len(wanted)
            if isinstance(piece, Thinned):
                assert dataset.bad is not None  # its source skips samples
                dataset.bad.note("valid", piece.left_out)
                piece, samples = piece.batch, samples - len(piece.left_out)
            if samples:
                yield to_device(piece, self._device, non_blocking=True), samples

    def _ready(self, batch: Any, plan: Plan) -> Any:
        batch = self._objective.ready(batch, training=False)
        return batch if plan.numerics.layout == "as given" else self._layout.batch(batch)

    def _outputs(self, plan: Plan, *, predicting: bool = False) -> Callable[[Any], tuple[Any, Any]]:
        """Outputs and targets of a batch, computed as the plan asks. With `predicting`, a batch may lack targets."""
        context = precision_context(plan.numerics, self._device, self._objective.modules)

        def eager(batch: Any) -> tuple[Any, Any]:
            ready = self._ready(batch, plan)
            with context():
                if predicting and self._objective.has_no_target(ready):
                    return self._objective.model(*ready if isinstance(ready, (tuple, list)) else (ready,)), None
                return self._objective.outputs(ready)

        if plan.execution.mode != "captured" or REPLAYED_EVALUATION in plan.execution.without:
            return eager
        kept = self._captured.get(predicting)
        if kept is None or kept[0] != plan:
            modules = self._objective.modules
            adapted = rewire(*modules) if REWIRED_LAYERS not in plan.execution.without else None
            recordable = eager if adapted is None else adapted.during(eager)
            made = CapturedOutputs(recordable, modules, self._objective.functions, self._device)
            kept = self._captured[predicting] = (plan, made)
        return kept[1]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The outputs of several batches as one. Outputs per entry of a sequence are padded with 0 to one width."""
    widths = {part.shape[1] for part in parts if part.ndim > 1}
    if len(widths) > 1:
        parts = [torch.cat([part, _nothing(part, max(widths))], dim=1) for part in parts]
    return torch.cat(list(parts))


def _nothing(part: Tensor, width: int) -> Tensor:
    return part.new_zeros(part.shape[0], width - part.shape[1], *part.shape[2:])


def _on_host(tensor: Tensor) -> Tensor:
    # Always copy: the next replay overwrites these outputs. numpy cannot read the 16-bit formats of autocast.
    dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


@dataclass(frozen=True)
class _Kept:
    """An evaluation whose workers are kept. It holds its data, so that no other data can get the same id."""

    data: Any
    collate: Any
    size: int
    dataset: OrderedDataset
    feeding: Feeding
    resident: bool
    """Whether the plan asked to hold it on the device."""
    state: ReadState | None
    """The state that the data depends on, if the data is held."""

    def is_for(self, data: Any, collate: Any, size: int, resident: bool) -> bool:
        """Whether an evaluation asks for the same."""
        mine = (self.size, self.resident)
        return self.data is data and self.collate is collate and mine == (size, resident)


# --- Outputs of a model in evaluation, by replay ---------------------------------------------------------


WORTH_IT = 8
"""Batches of one shape before it is recorded: recording does not pay in a short evaluation."""
MOST_GRAPHS = 16
"""Recorded shapes at a time."""
MOST_IN_VAIN = 3
"""Consecutive states of a model whose recordings were hardly replayed before it changed again."""


class CapturedOutputs:
    """Outputs and targets of batches, by replay. The next call for a batch of that shape overwrites them."""

    def __init__(
        self,
        eager: Callable[[Batch], tuple[Any, Any]],
        modules: Sequence[nn.Module],
        functions: Sequence[Callable[..., Any] | None],
        device: torch.device,
    ) -> None:
        self._eager, self._modules, self._functions, self._device = eager, modules, functions, device
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Any, Any]]] = {}
        self._made_for: Hashable = None
        self._replays = self._in_vain = 0
        self._recorder = Recorder(device)
        self.given_up: str | None = None
        """Why nothing is captured, once that is known."""

    def __call__(self, batch: Batch) -> tuple[Any, Any]:
        """The model's output for a batch on the device, and its target."""
        if self.given_up is not None:
            return self._eager(batch)
        try:
            shape = shape_of(batch)
        except BatchError:
            self.given_up = "batches hold more than tensors and plain values"
            return self._eager(batch)
        self._check_validity()
        if self._in_vain == MOST_IN_VAIN:
            self.given_up = "the model changes from evaluation to evaluation"
            return self._eager(batch)
        if shape in self._graphs:
            self._replays += 1
            graph, inputs, outputs = self._graphs[shape]
            for static, tensor in zip(inputs, tensors_in(batch), strict=True):
                static.copy_(tensor, non_blocking=True)
            graph.replay()
            return outputs
        self._seen[shape] += 1
        if self._seen[shape] < WORTH_IT:
            return self._eager(batch)
        with self._recorder.aside(), Watch(self._modules, self._device, self._functions) as watch:
            made = self._eager(batch)
        self.given_up = watch.reason
        if self.given_up is None:
            self._record(shape, batch)
        return made

    def _check_validity(self) -> None:
        """Drop recordings that were made for another state of the model."""
        made_for = fingerprint(self._modules, self._functions)
        if made_for == self._made_for:
            return
        if self._graphs:
            self._in_vain = self._in_vain + 1 if self._replays < WORTH_IT else 0
            self._graphs.clear()
        self._made_for, self._replays = made_for, 0

    def _record(self, shape: Hashable, batch: Batch) -> None:
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.clear()
        static = map_tensors(batch, lambda tensor: tensor.clone())
        made: list[tuple[Any, Any]] = []
        try:
            graph = self._recorder.record(lambda: made.append(self._eager(static)))
        except NotRecordedError as error:
            self.given_up = str(error)
        else:
            self._graphs[shape] = (graph, tensors_in(static), made[0])


# --- metrics -------------------------------------------------------------------------------------------


class Metric(Protocol):
    """A metric that is accumulated over batches."""

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Add a batch, without waiting for the device."""

    def sums(self) -> list[Tensor]:
        """What adds up over ranks."""

    def add_sums(self, sums: list[Tensor]) -> None:
        """Add the sums of another rank."""

    def result(self) -> float:
        """The metric over all batches so far; waits for the device."""


class MeanOf:
    """The mean of a function of (output, target) over all samples, or over what the function counts."""

    def __init__(self, name: str, function: Callable[[Any, Any], Any], root: bool = False) -> None:
        self._name, self._function, self._root = name, function, root
        self._sum: Tensor | float = 0.0
        self._count: Tensor | float = 0.0

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Add a batch: a value per sample, a mean, or (sum, count)."""
        value = self._function(output, target)
        if isinstance(value, (np.ndarray, np.generic)):
            value = torch.as_tensor(value)
        if type(value) is tuple and len(value) == 2:
            total, count = value
        elif isinstance(value, Tensor) and value.ndim:
            total, count = value.double().sum(), value.numel()
        elif isinstance(value, (Tensor, int, float)):
            total, count = value * samples, samples
        else:
            raise TrainingError(
                f"metric {self._name!r} returned {type(value).__name__}; "
                "it must return a value per sample, a mean, or (sum, count)"
            )
        self._sum = self._sum + (total.double() if isinstance(total, Tensor) else total)
        self._count = self._count + count

    def sums(self) -> list[Tensor]:
        """Sum and count."""
        return [torch.as_tensor(one, dtype=torch.float64) for one in (self._sum, self._count)]

    def add_sums(self, sums: list[Tensor]) -> None:
        """Add sum and count of another rank."""
        self._sum, self._count = float(self._sum) + float(sums[0]), float(self._count) + float(sums[1])

    def result(self) -> float:
        """The mean; for a root mean its square root."""
        count = float(self._count)
        mean = float(self._sum) / count if count else float("nan")
        return mean**0.5 if self._root else mean


class MacroF1:
    """The mean of F1 over classes. A class that is neither a target nor predicted does not count."""

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self._table: Tensor | None = None

    def add(self, output: Tensor, target: Tensor, samples: int) -> None:
        """Add a batch to the table of targets by predictions."""
        predicted, target, kept, classes = self._decide(output, target)
        if self._table is None:
            self._table = torch.zeros(classes * classes, dtype=torch.float64, device=output.device)
        cell = target.where(kept, 0).long() * classes + predicted
        self._table.index_add_(0, cell.flatten(), kept.flatten().double())

    def sums(self) -> list[Tensor]:
        """The table; nothing where there was no batch."""
        return [] if self._table is None else [self._table]

    def add_sums(self, sums: list[Tensor]) -> None:
        """Add the table of another rank."""
        for table in sums:
            self._table = table if self._table is None else self._table + table.to(self._table.device)

    def result(self) -> float:
        """The mean of F1 over classes."""
        if self._table is None:
            return float("nan")
        side = round(len(self._table) ** 0.5)
        table = self._table.reshape(side, side)
        hits, seen = table.diagonal(), table.sum(0) + table.sum(1)
        f1 = 2 * hits[seen > 0] / seen[seen > 0]
        return float(f1.mean()) if len(f1) else float("nan")


def make_metrics(wanted: Sequence[str] | Mapping[str, Any], loss: Any = None) -> dict[str, Metric]:
    """New metrics for one evaluation, by name. The loss tells what outputs and targets mean."""
    if isinstance(wanted, Mapping):
        return {name: MeanOf(name, function) for name, function in wanted.items()}
    decide = Decide(loss)

    def hits(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        predicted, target, kept, _ = decide(output, target)
        return ((predicted == target) & kept).sum(), kept.sum()

    makers: dict[str, Callable[[], Metric]] = {
        "accuracy": lambda: MeanOf("accuracy", hits),
        "macro_f1": lambda: MacroF1(decide),
        "mae": lambda: MeanOf("mae", lambda output, target: _errors(output, target).abs()),
        "rmse": lambda: MeanOf("rmse", lambda output, target: _errors(output, target).square(), root=True),
    }
    return {name: makers[name]() for name in wanted}


class Decide:
    """Turns outputs and targets into classes, as the loss understands them."""

    def __init__(self, loss: Any) -> None:
        self._classes = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))
        self._yes_or_no = isinstance(loss, (nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss))
        self._threshold = 0.5 if isinstance(loss, nn.BCELoss) else 0.0
        self._ignored = loss.ignore_index if self._classes else -100

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Predicted classes, target classes, which targets count, and the number of classes."""
        if output.ndim == target.ndim + 1:
            # One logit per sample is a binary answer, unless the loss is about classes.
            if output.shape[1] == 1 and not self._classes and output.shape[2:] == target.shape[1:]:
                output = output.squeeze(1)
            else:
                return self._by_class(output, target)
        if output.shape != target.shape:
            raise _unlike(output, target)
        if target.is_floating_point() and output.ndim > 1 and output.shape[1] > 1:
            if self._classes:  # probabilities of classes, or one-hot
                target = target.argmax(1)
                return output.argmax(1), target, torch.ones_like(target, dtype=torch.bool), output.shape[1]
            if not self._yes_or_no:
                raise TrainingError(
                    f"targets of shape {tuple(target.shape)} can be one-hot classes or several yes-or-no answers, "
                    "and the loss does not say which; pass your metric: metrics={'name': f(output, target)}"
                )
        return (output > self._threshold).long(), (target > 0.5).long(), target >= 0, 2

    def _by_class(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        second, last = output.shape[2:] == target.shape[1:], output.shape[:-1] == target.shape
        if second and last and output.ndim > 2 and not self._classes:
            raise TrainingError(
                f"classes can be in dimension 1 or in the last one of outputs of shape {tuple(output.shape)}; "
                "pass your metric: metrics={'name': f(output, target)}"
            )
        if not second and (not last or self._classes):
            raise _unlike(output, target)
        dimension = 1 if second else output.ndim - 1
        kept = (target >= 0) & (target != self._ignored)
        return output.argmax(dimension), target, kept, output.shape[dimension]


def _unlike(output: Tensor, target: Tensor) -> TrainingError:
    return TrainingError(
        f"cannot compare outputs of shape {tuple(output.shape)} with targets of shape {tuple(target.shape)}; "
        "classes belong in dimension 1 of the output"
    )


def _errors(output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        if output.numel() != target.numel():
            raise _unlike(output, target)
        # (n, 1) against (n,) would broadcast to n × n differences.
        output = output.reshape(target.shape)
    return output.double() - target.double()
