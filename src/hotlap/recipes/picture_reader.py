"""Pictures as a network takes them, and its answers: for the recipe `image`."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from hotlap.core.errors import DataError, shown
from hotlap.data.decoding import Fit, pillow
from hotlap.data.pictures import Pictures, broken_told, decoded
from hotlap.engine.augment import as_shares
from hotlap.recipes.existing import is_file
from hotlap.recipes.kinds import in_words
from hotlap.recipes.onnx_files import write_onnx
from hotlap.recipes.picture_files import OTHERS, PATH, elsewhere, folder_of, is_picture, placed
from hotlap.recipes.picture_networks import NetworkPlan, made
from hotlap.recipes.reading import now_and_then
from hotlap.recipes.recipe import Asked, Say
from hotlap.recipes.tables import Table, named_columns, read_table
from hotlap.store.files import write_text

CLOSE = 1e-4
"""How far an answer of an ONNX file may be from the network's: a probability, or a share of the numbers' spread."""
PATHS = (PATH, "file", "filename", "file_name", "image", "image_path", "image_id", "img", "id")
"""Names of a column of paths, where the paths do not show it."""
LOOKED_AT = 20
"""Rows of which one that names a picture shows a column of paths."""
BROKEN = "broken.csv"
"""In a run's folder: the files that were left out, and why."""


class PictureReader:
    """Pictures as a network takes them."""

    def __init__(
        self,
        classes: Sequence[str],
        network: NetworkPlan,
        *,
        path: str,
        root: str,
        fit: Fit,
        tta: int,
        mirrors: bool,
        crop: float,
        mean: float = 0.0,
        spread: float = 1.0,
        header: bool | None = None,
    ) -> None:
        self.classes, self.network = tuple(classes), network
        self.path, self.root, self.fit = path, root, fit
        self.tta, self.mirrors, self.crop = tta, mirrors, crop
        self.mean, self.spread = mean, spread
        """Of the numbers to be answered: the network's own are around 0."""
        self.header = header
        """Whether the first row of a file holds names; None where that is found out."""
        self.broken: dict[str, str] = {}
        """Files that gave no picture, and why; written into the run's folder."""

    def table(self, data: Path) -> Table:
        """A folder, a single picture, or a file whose paths are words, were they all numbers."""
        if data.is_file() and is_picture(data):
            return Table(path=data, columns={PATH: in_words(PATH, [data.name])})
        if data.is_file() and data.suffix.lower() in OTHERS:
            raise DataError(f"{data} is no JPEG and no PNG; save it as PNG")
        table = read_table(data, header=self.header)
        name = self.path_in(table)
        return (
            table
            if table[name].kind in ("text", "category")
            else read_table(data, header=self.header, kinds={name: "text"})
        )

    def path_in(self, table: Table) -> str:
        """The column of paths: that of the training, or else as there, by what is in it."""
        return self.path if self.path in table else path_column(table, f"call it {self.path!r}, as in training")

    def state(self) -> dict[str, Any]:
        """All that it needs to be made again."""
        names = ("path", "root", "fit", "tta", "mirrors", "crop", "mean", "spread", "header")
        own = {name: getattr(self, name) for name in names}
        return {"classes": list(self.classes), "network": self.network.to_dict(), **own}

    def keep_files(self, folder: Path) -> None:
        """Write the list of files that were left out, if there are any."""
        if self.broken:
            lines = io.StringIO()
            csv.writer(lines, lineterminator="\n").writerows([("file", "why"), *self.broken.items()])
            write_text(folder / BROKEN, lines.getvalue())

    def model(self, name: str) -> nn.Module:
        """A network with its first weights."""
        return made(name, self.network)

    def pictures(self, table: Table, say: Say, *, is_asked: bool = False) -> Pictures:
        """The pictures that a table names, decoded, a row each; those that are none are told."""
        pillow()
        paths = table[self.path_in(table)].texts()
        files = placed(paths, table.path, self.root, is_asked=is_asked)
        first = next(((path, file) for path, file in zip(paths, files, strict=True) if path), ("", ""))
        if not any(is_file(file) for file in files if file):
            self._refuse_if_elsewhere(first[0], table.path, is_asked=is_asked)
            self._refuse_if_nowhere(paths, files, table.path, is_asked=is_asked)
        elif is_asked:
            self._warn_of_namesakes(*first, table.path, say)
        told = now_and_then(say, "pictures  {done:,} of {total:,} decoded")
        found = decoded(files, size=self.network.size, fit=self.fit, progress=told)
        say(f"pictures  {found.line}")
        if found.broken:
            named = [path or "(no path)" for path in paths]
            count = f"{len(found.broken):,} file{'s'[: len(found.broken) > 1]}"
            say(f"warning   {count} left out: {broken_told(named, found.broken)}")
            self.broken |= {named[row]: why for row, why in found.broken.items()}
        return found

    def _refuse_if_elsewhere(self, path: str, table: Path, *, is_asked: bool) -> None:
        """Raise DataError where the first of files of which none is there is in a folder near by, which it names."""
        found = elsewhere(path, table, self.root) if path else None
        if found is not None:
            folder, file = found
            where = self.root if self.root and not is_asked else folder_of(table)
            ending = "" if is_picture(Path(path)) else ", whose ending may be left out"
            cure = f"move {table.name} into {folder}" if is_asked else f"say --root {shlex.quote(str(folder))}"
            raise DataError(f"{table} names {shown(path)}, which is not in {where}: it is {file}{ending}; {cure}")

    def _refuse_if_nowhere(self, paths: Sequence[str], files: Sequence[str], table: Path, *, is_asked: bool) -> None:
        """Raise DataError where nothing is there under any of the names."""
        named = [(path, file) for path, file in zip(paths, files, strict=True) if path]
        if not named or any(os.path.lexists(file) for _, file in named):
            return
        path, file = named[0]
        cure = f"put them beside {table.name}" if is_asked else "name the folder that paths begin at with --root"
        cure = "write / in place of \\ in paths" if "\\" in path else cure
        count = f"none of the {len(named):,} files" if len(named) > 1 else "the file"
        there = "is there" if len(named) > 1 else "is not there"
        raise DataError(
            f"{count} that {table} names {there}, as {shown(path)}, which would be {shown(file, 120)}; {cure}"
        )

    def _warn_of_namesakes(self, path: str, file: str, table: Path, say: Say) -> None:
        """Pictures to predict may have the names of those trained on."""
        if self.root and is_file(file) and not file.startswith(str(folder_of(table) / path)):
            found = elsewhere(path, table, "")
            if found is not None and not found[1].samefile(file):
                say(
                    f"warning   pictures of {table} are read from {self.root}, the root of the training; "
                    f"if those in {found[0]} are meant, move {table.name} into it"
                )

    def asked(self, table: Table, say: Say) -> Asked:
        """The rows of a table whose files are pictures."""
        found = self.pictures(table, say, is_asked=True)
        rows = found.whole
        return Asked(data=Subset(TensorDataset(found.pixels), rows.tolist()), rows=rows)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """A row of scores for each picture, or its number: the mean over its views."""
        pictures = batch[0] if isinstance(batch, (tuple, list)) else batch
        seen = views(pictures, self.tta, crop=self.crop, mirrors=self.mirrors)
        outputs = torch.stack([model(view) for view in seen])
        if not self.classes:
            return outputs.mean(0) * self.spread + self.mean
        # Logarithms of the mean of probabilities.
        return outputs.float().log_softmax(-1).logsumexp(0) if self.tta > 1 else outputs[0]

    @property
    def embedded(self) -> None:
        """There is none of use."""
        return None


def path_column(table: Table, cure: str) -> str:
    """The column whose values are named as pictures are, or that is called as such columns are; DataError for none."""
    words = {name: column.rows(slice(0, LOOKED_AT)).texts() for name, column in table.columns.items()}
    found = [name for name, texts in words.items() if any(is_picture(Path(text)) for text in texts if len(text) < 4096)]
    found = found or [name for name in table.columns if name.lower() in PATHS][:1]
    if len(found) != 1:
        raise DataError(f"which column of {table.path} holds the paths? There are {named_columns(table)}; {cure}")
    return found[0]


def most_views(crop: float, *, mirrors: bool) -> int:
    """How many views a picture has: those that a training with these augmentations has seen the like of."""
    return (5 if crop else 1) * (2 if mirrors else 1)


def views(pictures: Tensor, count: int, *, crop: float, mirrors: bool) -> list[Tensor]:
    """So many views of pictures: as they are and each corner, and where they may be mirrored each of these mirrored.

    Of a corner half as much is cut off as training cuts off at most.
    """
    if count == 1:
        return [pictures]
    whole = as_shares(pictures)
    height, width = whole.shape[-2:]
    tall, wide = (round(side * (1 - crop / 2)) for side in (height, width))
    found = [whole]
    for top, left in itertools.product((0, height - tall), (0, width - wide)) if crop else ():
        corner = whole[..., top : top + tall, left : left + wide]
        found.append(F.interpolate(corner, (height, width), mode="bilinear", align_corners=False))
    if mirrors:
        found = [view for one in found for view in (one, one.flip(-1))]
    return found[:count]


# --- ONNX ----------------------------------------------------------------------------------------------


class Answering(nn.Module):
    """Pictures of uint8 in, answers out: probabilities of classes, or numbers in their own units."""

    def __init__(self, network: nn.Module, reader: PictureReader) -> None:
        super().__init__()
        self.network, self._mean, self._spread = network, reader.mean, reader.spread
        self._has_classes = bool(reader.classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """An answer for each picture, without views."""
        outputs: Tensor = self.network(pictures)
        return outputs.softmax(1) if self._has_classes else outputs * self._spread + self._mean


def written_as_onnx(
    reader: PictureReader, pictures: Tensor, name: str, model: nn.Module, folder: Path, say: Say
) -> None:
    """Write a trained network as ONNX with all that comes before and after it, tried on these pictures."""
    path = folder / "model.onnx"
    about = {"model": name, "classes": json.dumps(reader.classes), "input": "pictures of uint8, channels first, RGB"}
    names = ("pictures", "probabilities" if reader.classes else "numbers")
    close = CLOSE if reader.classes else CLOSE * reader.spread
    gap = write_onnx(Answering(model, reader), pictures, path, about, names=names, close=close)
    say(f"onnx      {path}: its answers are the model's to {gap:.1g}")
