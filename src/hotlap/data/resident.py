"""The resident feed: all data on the device, and the order of the epoch beside it, so that gathering needs no host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotlap.core.errors import TrainingError
from hotlap.data.batches import Batch, count_samples, map_tensors
from hotlap.data.columns import Columns
from hotlap.data.samples import Room
from hotlap.machine.cuda import free_for_torch


class EpochOrder:
    """The indices of an epoch, on the device; the next epoch's are written into the same memory."""

    def __init__(self, device: torch.device) -> None:
        self.indices = torch.empty(0, dtype=torch.int64, device=device)
        self.number = 0
        """How often it was written."""

    def write(self, indices: Tensor) -> None:
        """Send an epoch's order to the device, behind the work that still reads the one before."""
        if len(self.indices) < len(indices):
            self.indices = torch.empty(len(indices), dtype=torch.int64, device=self.indices.device)
        # From pageable memory the copy would wait for all that was launched before.
        here = indices.pin_memory() if self.indices.is_cuda else indices
        self.indices[: len(indices)].copy_(here, non_blocking=True)
        self.number += 1


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch that is still to be gathered: `count` samples of held columns, from `start` on in the epoch's order."""

    columns: Columns
    of: EpochOrder
    number: int
    start: int
    count: int

    @property
    def order(self) -> Tensor:
        """The indices of the epoch. Raises TrainingError where it is over: they are another epoch's by now."""
        if self.number != self.of.number:
            raise TrainingError(
                "a window of an epoch that is over cannot be used: windows of a resident feed name their samples by "
                "their place in the epoch, so step with each as it comes, or use kind='gather'"
            )
        return self.of.indices

    def gathered(self) -> Batch:
        """The samples as a batch, on the device."""
        return self.columns.gather(self.order[self.start : self.start + self.count])

    def widest(self) -> Rows:
        """The same samples as wide as any batch is."""
        return self if self.columns is self.columns.widest else replace(self, columns=self.columns.widest)

    def shifted(self, by: int) -> Rows:
        """As many samples further on in the order."""
        return replace(self, start=self.start + by)


def gathered(batch: Batch) -> Batch:
    """The batch itself, gathered where it is still to be."""
    return batch.gathered() if isinstance(batch, Rows) else batch


class ResidentFeeding:
    """Batches gathered on the device out of columns that are held there."""

    tickets = False

    def __init__(self, columns: Columns, device: torch.device) -> None:
        self.columns = columns
        self._order = EpochOrder(device)
        self._epoch: Tensor | None = None

    def begin(self, indices: Tensor) -> None:
        """Begin an epoch, or go on with the one that was begun."""
        if indices is not self._epoch:
            self._order.write(indices)
            self._epoch = indices

    @property
    def varies(self) -> bool:
        """Whether batches of as many samples may have other shapes."""
        return type(self.columns).fitting is not Columns.fitting

    def fitting(self, start: int, end: int) -> Columns:
        """The columns that gather this piece of the epoch that was begun."""
        assert self._epoch is not None, "begin an epoch first"
        return self.columns.fitting(self._epoch[start:end])

    def rows(self, start: int, count: int) -> Rows:
        """A piece of the epoch that was begun."""
        return Rows(self.fitting(start, start + count), self._order, self._order.number, start, count)

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices, gathered on the device."""
        parts = list(indices)
        if not parts:
            return
        self.begin(torch.cat(parts))
        start = 0
        for part in parts:
            yield self.rows(start, len(part)).gathered()
            start += len(part)

    def close(self) -> None:
        """There is nothing to end: what is held is let go of with the feed."""


class Packed(Columns):
    """Columns held on a GPU in the form in which gathering is fastest; batches are the same.

    A kernel that gathers moves one number per thread, so rows are kept as numbers of 8 bytes: uint8 images are gathered
    with an eighth of the threads. With `images_last`, images lie with their channels last, and batches of them too.
    """

    def __init__(self, columns: Columns, *, images_last: bool) -> None:
        self._recipes: list[_Recipe] = []

        def pack(tensor: Tensor, rows: Tensor | None) -> Tensor:
            recipe = _Recipe.of(tensor, images_last=images_last)
            self._recipes.append(recipe)
            return recipe.packed(tensor)

        self._packed_columns = columns.sent(pack)
        super().__init__(tuple(self._packed_columns.tensors.values()))

    def gather(self, indices: Tensor, room: Room | None = None) -> Batch:
        """The samples at `indices`, with the shape and numbers they were given in."""
        found = self._packed_columns.gather(indices)
        if type(found) is tuple and type(self._packed_columns) is Columns:
            return tuple(recipe.unpacked(part) for recipe, part in zip(self._recipes, found, strict=True))
        recipes = iter(self._recipes)
        return map_tensors(found, lambda tensor: next(recipes).unpacked(tensor))


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a column is packed, and a batch of it unpacked: both without a copy, but for images that are turned."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of a row, as it lies."""
    turned: bool
    wide: bool

    @classmethod
    def of(cls, tensor: Tensor, *, images_last: bool) -> _Recipe:
        turned = images_last and tensor.ndim in (4, 5)
        shape = tuple(tensor.shape[1:])
        if turned:
            shape = (*shape[1:], shape[0])
        row_bytes = tensor[:1].numel() * tensor.element_size()
        aligned = row_bytes % 8 == 0 and (turned or tensor.storage_offset() * tensor.element_size() % 8 == 0)
        wide = row_bytes >= 64 and aligned and tensor.element_size() < 8
        return cls(tensor.dtype, shape, turned, wide and (turned or tensor.is_contiguous()))

    def packed(self, tensor: Tensor) -> Tensor:
        if self.turned:
            tensor = tensor.movedim(1, -1).contiguous()
        return tensor.flatten(1).view(torch.int64) if self.wide else tensor

    def unpacked(self, batch: Tensor) -> Tensor:
        if self.wide:
            batch = batch.view(self.dtype).view(-1, *self.shape)
        return batch.movedim(-1, 1) if self.turned else batch


def packed(columns: Columns, *, images_last: bool) -> Columns:
    """The columns packed, where they are plain tensors on a GPU and turning images has room."""
    if not columns.packs or columns.on_host:
        return columns
    images = [tensor for tensor in columns.tensors.values() if tensor.ndim in (4, 5)]
    needed = sum(image.numel() * image.element_size() for image in images)
    if images_last and images:
        images_last = 2 * needed < free_for_torch(images[0].device)
    return Packed(columns, images_last=images_last)


def narrowed(batch: Batch, start: int, count: int) -> Batch:
    """Some rows of a gathered batch, without a copy."""
    return map_tensors(batch, lambda tensor: tensor.narrow(0, start, count))


def sample_bytes(batch: Batch) -> int:
    """Bytes of one sample in a batch."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    map_tensors(batch, add)
    return total // max(1, count_samples(batch) or 1)
