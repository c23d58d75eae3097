"""The trainings on texts that hotlap is held against: the guides' loops, the Trainer of `transformers`, and by hand.

As in `rivals`, each is a generator whose `next` makes one whole step and tells its samples, from the same first
weights with AdamW on whole batches; texts are tokenised before. A Trainer cannot be stepped from outside, so that
`hf_trainer` times its own laps from within.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import logging
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.utils.data import DataLoader, Dataset

from benchmarks.rivals import GOOD_MASKS, EndlessOrder, Steps, UnavailableError
from benchmarks.texts import Batch, Priced, TextData, Texts, TextWork, padded
from hotlap.data.order import mix

BUCKET = 32
"""By hand, widths are its multiples."""
WINDOW = 50
"""By hand, batches whose texts are sorted by length together; the Trainer's own number, too."""
WARM_STEPS = 3
"""By hand, eager steps before anything is captured; for a width that comes later one is enough."""
GUIDE_WORKERS, TRAINER_WORKERS = 2, 4


class Samples(Dataset[Batch]):
    """Texts one by one, as tokenised as they can be without being padded."""

    def __init__(self, texts: Texts) -> None:
        self._rows, self._columns = texts.rows(), texts.columns

    def __getitem__(self, index: int) -> Batch:
        return {"input_ids": self._rows[index], **{name: column[index] for name, column in self._columns.items()}}

    def __len__(self) -> int:
        return len(self._rows)


def loader_of(
    work: TextWork, data: TextData, device: torch.device, *, width: int | None, workers: int = 0
) -> DataLoader[Any]:
    """A DataLoader as people set it up; batches are padded to the width, or to their longest text."""
    return DataLoader(
        Samples(data.train),
        batch_size=work.batch,
        sampler=EndlessOrder(len(data.train), work.batch),
        collate_fn=functools.partial(padded, width=width),
        drop_last=True,
        # Of its own: a loader draws a seed as it starts, which would move the masks of dropout.
        generator=torch.Generator(),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=workers > 0 and device.type == "cuda",
    )


# --- the guides ----------------------------------------------------------------------------------------


def guide_before(work: TextWork, model: nn.Module, data: TextData, device: torch.device) -> Steps:
    """The loop the guides begin with: padded to the maximum, fp32, no workers, two values read back in every step."""
    return _plain_loop(work, model, data, device, width=data.longest)


def dynamic(work: TextWork, model: nn.Module, data: TextData, device: torch.device) -> Steps:
    """The same, but each batch padded to its longest text alone."""
    return _plain_loop(work, model, data, device, width=None)


def _plain_loop(work: TextWork, model: nn.Module, data: TextData, device: torch.device, *, width: int | None) -> Steps:
    model.to(device).train()
    optimizer = work.optimizer(model)
    running, told = 0.0, 0.0
    for given in loader_of(work, data, device, width=width):
        batch = {name: part.to(device) for name, part in given.items()}
        optimizer.zero_grad()
        output = work.task.output(model, batch)
        loss = work.task.judged(output, batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        running += loss.item()
        told += work.task.told(output, batch["labels"]).item()
        yield work.batch


def guide_after(work: TextWork, model: nn.Module, data: TextData, device: torch.device) -> Steps:
    """The loop they end with: fp16 and a scaled loss, 2 pinned workers, clipping, activations computed again."""
    if device.type != "cuda":
        raise UnavailableError("fp16 needs a GPU")
    model.to(device).train()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    optimizer, scaler = work.optimizer(model), torch.amp.GradScaler(device.type)
    running, told = 0.0, 0.0
    for given in loader_of(work, data, device, width=data.longest, workers=GUIDE_WORKERS):
        batch = {name: part.to(device, non_blocking=True) for name, part in given.items()}
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.float16):
            output = work.task.output(model, batch)
            loss = work.task.judged(output, batch["labels"])
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        running += loss.item()
        told += work.task.told(output, batch["labels"]).item()
        yield work.batch


# --- by hand -------------------------------------------------------------------------------------------


def bucketed(lengths: Tensor, batch: int, epoch: int) -> tuple[Tensor, list[int]]:
    """An epoch's texts, a row for each whole batch, and how wide each batch is.

    Shuffled; sorted by length within windows of 50 batches, of which batches are cut; and these shuffled again.
    """
    generator = torch.Generator().manual_seed(mix(0, epoch))
    order = torch.randperm(len(lengths), generator=generator)[: len(lengths) // batch * batch]
    starts = range(0, len(order), WINDOW * batch)
    windows = [order[start : start + WINDOW * batch] for start in starts]
    windows = [window[lengths[window].argsort(stable=True)] for window in windows]
    batches = torch.cat(windows).view(-1, batch)
    batches = batches[torch.randperm(len(batches), generator=generator)]
    return batches, [-(-longest // BUCKET) * BUCKET for longest in lengths[batches].amax(1).tolist()]


class TextByHand:
    """All texts on the device, one whole step a width, out of a static buffer of indices.

    `update` is plain PyTorch that runs anywhere; on a GPU it is what the graphs record, all in one memory. Nothing in
    it waits. How a model is called so that nothing is read back, a subclass knows.
    """

    def __init__(self, work: TextWork, model: nn.Module, data: TextData, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._task, self._device = work.task, device
        self._half = work.precision == "bf16" and self._on_gpu
        self.model = model.to(device).train()
        self._optimizer = work.optimizer(model, fused=True, capturable=self._on_gpu)
        train = data.train
        widest = -(-int(train.lengths.max()) // BUCKET) * BUCKET
        tokens = nn.utils.rnn.pad_sequence(train.rows(), batch_first=True)
        self._tokens = F.pad(tokens, (0, widest - tokens.shape[1])).to(device)
        self._lengths = train.lengths.to(device)
        self._columns = {name: column.to(device) for name, column in train.columns.items()}
        self._places = torch.arange(widest, device=device)
        self.indices = torch.zeros(work.batch, dtype=torch.int64, device=device)
        self.running = torch.zeros((), dtype=torch.float64, device=device)
        """Losses of all steps, added up."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._seen: Counter[int] = Counter()

    def output(self, ids: Tensor, is_there: Tensor, columns: Batch) -> Tensor:
        """What the model says of texts."""
        raise NotImplementedError

    def update(self, width: int) -> None:
        """One step on the texts in the buffer of indices, cut at a width that takes all of them."""
        ids = self._tokens[:, :width].index_select(0, self.indices)
        is_there = self._places[:width] < self._lengths.index_select(0, self.indices).unsqueeze(1)
        columns = {name: column.index_select(0, self.indices) for name, column in self._columns.items()}
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast(), sdpa_kernel(GOOD_MASKS):
            loss = self._task.judged(self.output(ids, is_there, columns), columns["labels"])
        torch.autograd.backward(loss)
        self._optimizer.step()
        self.running += loss.detach()

    def step(self, width: int) -> None:
        """The same as a replay, once that width is captured: after a first step of it, which is eager."""
        if not self._on_gpu:
            self.update(width)
        elif width in self._graphs:
            self._graphs[width].replay()
        elif self._seen[width] < (1 if self._graphs else WARM_STEPS):
            self._seen[width] += 1
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self.update(width)
            torch.cuda.current_stream().wait_stream(self._side)
        else:
            self._graphs[width] = self._captured(width)
            self._graphs[width].replay()

    def _captured(self, width: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        gc.disable()  # what a collection lets go of in the middle of a capture may end it, as other threads may
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._side, capture_error_mode="thread_local"):
                self.update(width)
        finally:
            gc.enable()
        return graph

    @functools.cached_property
    def _side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, dtype=torch.bfloat16) if self._half else nullcontext()


class BertByHand(TextByHand):
    """A mask that is ready for attention is taken as it is; a plain one, the library would look into."""

    def output(self, ids: Tensor, is_there: Tensor, columns: Batch) -> Tensor:
        """Scores of the classes."""
        dtype = torch.bfloat16 if self._half else torch.float32
        hidden = torch.zeros(is_there.shape, dtype=dtype, device=self._device)
        hidden = hidden.masked_fill(~is_there, torch.finfo(dtype).min)
        scores: Tensor = self.model(input_ids=ids, attention_mask=hidden[:, None, None, :]).logits
        return scores


class PricedByHand(TextByHand):
    """Relative positions are made once for each width: the library makes them anew, by a copy from the host."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._positions: dict[int, Tensor] = {}

    def output(self, ids: Tensor, is_there: Tensor, columns: Batch) -> Tensor:
        """Prices."""
        model = self.model
        assert isinstance(model, Priced)
        encoder: Any = model.encoder
        embedded = encoder.embeddings(input_ids=ids, mask=is_there)
        width = ids.shape[1]
        if width not in self._positions:
            self._positions[width] = encoder.encoder.get_rel_pos(embedded.detach())
        mask = is_there[:, None, None, :]
        states = encoder.encoder(embedded, mask, relative_pos=self._positions[width]).last_hidden_state
        return model.priced(states, is_there, columns["numbers"])


def by_hand(work: TextWork, model: nn.Module, data: TextData, device: torch.device) -> Steps:
    """The best without compiling: texts on the device in buckets of 32, fused AdamW, bf16, a CUDA graph a bucket.

    On the CPU the same in fp32, step by step.
    """
    hand = (PricedByHand if isinstance(model, Priced) else BertByHand)(work, model, data, device)
    for epoch in itertools.count():
        batches, widths = bucketed(data.train.lengths, work.batch, epoch)
        for chosen, width in zip(batches.to(device), widths, strict=True):
            hand.indices.copy_(chosen)
            hand.step(width)
            yield work.batch


# --- the Trainer of transformers -----------------------------------------------------------------------


class TrainerWay(NamedTuple):
    """How a Trainer makes its batches."""

    sampling: str
    is_dynamic: bool
    """Whether they are padded to their longest text, to a multiple of 8; else to the maximum."""
    as_it_comes: bool = False
    """Whether it clips, looks for losses that are not finite, and notes losses, as it does unless told otherwise."""


TRAINER_WAYS = {
    "grouped by length": TrainerWay("group_by_length", True),
    "to each batch's longest": TrainerWay("random", True),
    "to the longest of all": TrainerWay("random", False),
    "to the longest of all with clipping and checks, as it comes": TrainerWay("random", False, True),
}


def hf_trainer(
    work: TextWork,
    way: str,
    device: torch.device,
    *,
    laps: int,
    lap_s: float,
    warm_s: float,
) -> list[tuple[int, float]]:
    """Laps of one `Trainer.train` in bf16 with fused AdamW and 4 workers, as (samples, seconds).

    Timed by a callback from the end of one step to the end of a later one, with a wait for the device at both, once
    it has trained for `warm_s` and for a whole round. A round is what the workers bring in a burst, or, grouped by
    length, the batches that were sorted together. No checkpoints, and unless it is as it comes no logging, no clipping,
    and nothing that looks for losses that are not finite.
    """
    transformers = _transformers()
    sampling, is_dynamic, as_it_comes = TRAINER_WAYS[way]
    bare = {} if as_it_comes else {"max_grad_norm": 0.0, "logging_nan_inf_filter": False, "logging_strategy": "no"}
    data = work.data()
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    a_round = WINDOW if sampling == "group_by_length" else TRAINER_WORKERS
    found: list[tuple[int, float]] = []

    class Loss(transformers.Trainer):  # type: ignore[misc, name-defined]
        """With the loss that everybody else has."""

        def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> Tensor:
            return work.task.loss(model, inputs)

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        """Laps of whole rounds."""

        def __init__(self) -> None:
            self._steps, self._begun, self._warm = 0, time.perf_counter(), False

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._steps += 1
            least = warm_s if not self._warm else lap_s
            if self._steps % a_round or time.perf_counter() - self._begun < least:
                return
            wait()
            now = time.perf_counter()
            if self._warm:
                found.append((self._steps * work.batch, now - self._begun))
            self._warm, self._steps, self._begun = True, 0, now
            control.should_training_stop = len(found) >= laps

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        settings = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=work.batch,
            max_steps=10**6,
            learning_rate=work.lr,
            weight_decay=0.01,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            bf16=device.type == "cuda",
            use_cpu=device.type != "cuda",
            train_sampling_strategy=sampling,
            dataloader_num_workers=TRAINER_WORKERS,
            dataloader_persistent_workers=True,
            dataloader_drop_last=True,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **bare,
        )
        trainer = Loss(
            model=work.build(),
            args=settings,
            train_dataset=Samples(data.train),
            data_collator=functools.partial(padded, multiple=8) if is_dynamic else _to(data.longest),
            callbacks=[Clock()],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # stdout is for results
        trainer.train()
    return found


def _to(width: int) -> Callable[[list[Batch]], Batch]:
    return functools.partial(padded, width=width)


def _transformers() -> Any:
    for name in ("transformers", "accelerate"):  # its Trainer needs the second
        try:
            importlib.import_module(name)
        except ImportError:
            raise UnavailableError(f"{name} is not installed") from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return importlib.import_module("transformers")
