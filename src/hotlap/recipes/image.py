"""The recipe `image`: pictures in folders of classes, or named by a table → classes or numbers."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shlex
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from hotlap.core.errors import DataError, JobError, shown
from hotlap.core.job import Job
from hotlap.data.pictures import FITS, Fit, Pictures, decoded, list_broken, pillow
from hotlap.engine.augment import Augment, as_shares
from hotlap.recipes import checks
from hotlap.recipes.kinds import word_column
from hotlap.recipes.networks import BUILT_IN, NetworkSpec, initial_network, name_problem, new_network, spec_in_folder
from hotlap.recipes.onnx_files import CLOSE, OnnxExport
from hotlap.recipes.options import MOST, Options, is_file, is_folder, option, outside, unknown_words
from hotlap.recipes.picture_files import CLASS, OTHERS, PATH, files_named, from_one_folder, is_picture
from hotlap.recipes.recipe import Asked, Numbers, Reader, Say
from hotlap.recipes.tables import Table, named_columns, read_table, table_in_memory
from hotlap.recipes.tabular import HEADERS, Side, TabularRecipe, now_and_then, refuse, refuse_too_large, shown_table
from hotlap.store.files import write_text

PARTS = {
    **dict.fromkeys(("train", "training"), "data"),
    **dict.fromkeys(("valid", "val", "validation", "dev"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Usual names of folders that hold parts of the data, and the options that they are for."""
TASKS = ("auto", "classes", "numbers")
PATHS = (PATH, "file", "filename", "file_name", "image", "image_path", "image_id", "img", "id")
"""Usual names of a column of paths, where the paths do not show it."""
LOOKED_AT = 20
"""Rows of which one that names a picture shows a column of paths."""
MOST_VIEWS = 10
BROKEN = "broken.csv"
"""In a run's folder: the files that were left out, and why."""
SOME = 16
"""Pictures on which hotlap tries an ONNX file."""
THUMBNAIL = 8
"""Pixels along a side, for the baseline that compares thumbnails."""
AT_ONCE = 512
"""Pictures that this baseline looks at together."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Options):
    """The options of the recipe."""

    data: str = option("", "a folder with a folder of pictures for each class, or a CSV or Parquet file of paths")
    target: str = option("", "the column to predict; in folders the class")
    path: str = option("", "the column of paths; found by itself where its values are named .jpg, .jpeg or .png")
    root: str = option("", "the folder that paths begin at; the default is that of the file")
    header: str = option("auto", "whether the first row holds names: yes, no, or auto to find out")
    task: str = option(
        "auto", "what to predict: classes, numbers, or auto: numbers where the target has decimals or many values"
    )
    size: int = option(224, "pixels along a side")
    fit: str = option("stretch", "how a picture becomes a square: stretch all of it, or crop its middle")
    models: tuple[str, ...] = option(
        ("resnet",), "which to train: resnet, vit, timm:NAME, transformers:TYPE; the best is kept"
    )
    width: int = option(64, "channels of the resnet's first stage; the vit is three times as wide", most=4096)
    depth: int = option(
        2, "blocks of each of the resnet's four stages; the vit has three times as many layers", most=256
    )
    weights: str = option("", "a .safetensors file of the model, or a folder with one of transformers, to begin with")
    patience: int = option(5, "evaluations without improvement before the training stops")
    flip: bool = option(True, "mirror pictures at random; not for letters and digits")
    crop: float = option(0.2, "cut off up to this share of each side at random")
    colour: float = option(0.2, "change brightness, contrast and saturation at random, by up to this share")
    mixup: float = option(0.0, "mix pictures with others, by shares drawn from Beta of this number; 0.2 is usual")
    cutmix: float = option(0.0, "put boxes of others into them, of areas drawn from Beta of this number; 1 is usual")
    tta: int = option(1, "views of each picture that an answer is the mean of: itself, mirrored, corners; up to 10")
    smoothing: float = option(0.1, "label smoothing")
    weight_decay: float = option(0.05, "weight decay of AdamW")

    PROFILES: ClassVar[Mapping[str, Mapping[str, Any]]] = {"best": {"patience": 10}}

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = outside(
            self,
            size=(8, 4096),
            width=(1, MOST),
            depth=(1, MOST),
            crop=(0, 0.9),
            colour=(0, 0.9),
            mixup=(0, MOST),
            cutmix=(0, MOST),
            tta=(1, MOST_VIEWS),
            smoothing=(0, 1),
        )
        wrong += unknown_words(self, task=TASKS, fit=FITS, header=HEADERS)
        wrong += [problem for name in self.models if (problem := name_problem(name))]
        if not self.models:
            wrong.append(f"models is empty; name some of {', '.join(BUILT_IN)}")
        if MOST_VIEWS >= self.tta > (most := most_views(self.crop, mirrors=self.flip)):
            views = f"{most} view{'s'[: most > 1]}"
            wrong.append(f"tta={self.tta}, and with flip={self.flip} and crop={self.crop} a picture has {views}")
        if self.weights and len(self.models) > 1:
            wrong.append(f"weights={self.weights} are those of one model, and models names {len(self.models)}")
        if wrong:
            raise JobError(wrong)


class ImageRecipe(TabularRecipe):
    """Classes or numbers of pictures."""

    name = "image"
    summary = "classes or numbers of pictures: a small ResNet or vision Transformer, or one of timm or transformers"
    expects = "a folder of pictures for each class, or a column of paths and one to predict"
    options_type = ImageOptions
    targets = (CLASS, "label", "target", "category", "y")
    unit = "pictures"
    source = "path"
    holder = "the pictures of "
    cure = "name a column of classes, each with several rows, or say --task numbers"

    pictures: dict[int, Pictures]
    """The decoded pictures of each table, by its identity."""

    # the table

    def read(self, path: str) -> Table:
        """A table of paths, or the list of a folder of pictures."""
        root = self.options.root
        if root and not is_folder(root):
            raise DataError(f"root={root} is no folder; name the one that paths begin at, or leave it out")
        return shown_table(path, self.say, header=self.header)

    def target_of(self, table: Table) -> str:
        """Also the class, of folders; folders that are no classes are refused."""
        refuse(_folder_problems(table))
        if not self.options.target and list(table.columns) == [PATH] and table.path.is_dir():
            raise DataError(f"{table.path} has pictures and no folders of classes; sort them into one for each class")
        return super().target_of(table)

    def columns_of(self, table: Table) -> list[str]:
        """The column of paths."""
        named = self.options.path
        return [table[named].name if named else path_column(table, "say --path")]

    def is_number(self) -> bool:
        """Whether the target has decimals, or many different values."""
        column, task = self.table[self.target], self.options.task
        can_be = column.kind in ("number", "whole number")
        if task == "numbers" and not can_be:
            raise DataError(f"task=numbers, and the target {self.target!r} is {column.kind}; name a column of numbers")
        if task != "auto":
            return bool(task == "numbers")
        return column.kind == "number" or (can_be and len(set(column.values.tolist())) > checks.MOST_CLASSES)

    def problems(self) -> list[str]:
        """Also smoothing of labels, where numbers are to be predicted."""
        found = super().problems()
        smoothing = self.options.smoothing
        if not found and self.is_number() and smoothing != ImageOptions.smoothing:
            raise DataError(f"smoothing={smoothing} is of classes, and {self.target} is a number; leave it out")
        return found

    def looked(self) -> None:
        """Make each network once, so that mistakes in them, or in a file to predict, show at once."""
        options, self.pictures = self.options, {}
        self.networks = list(dict.fromkeys(options.models))
        outputs = max(1, len(self.classes))
        spec = NetworkSpec(size=options.size, outputs=outputs, width=options.width, depth=options.depth)
        if options.weights and is_file(Path(options.weights) / "config.json"):
            name, spec = spec_in_folder(Path(options.weights), spec)
            self.networks = [name]
        for name in self.networks:
            refuse_too_large(partial(new_network, name, spec), name, options.device, "give a smaller width or depth")
            initial_network(name, spec, options.weights, lambda line: None)
        self.reader = PictureReader(
            self.classes,
            spec,
            path=self.columns[0],
            root=options.root,
            fit=cast("Fit", options.fit),
            tta=options.tta,
            mirrors=options.flip,
            crop=options.crop,
            header=self.header,
        )
        if options.test:
            self.reader.table(Path(options.test))

    def check_valid(self, table: Table) -> None:
        """Refuse a file without a column of paths."""
        self.reader.path_in(table)

    def usable(self, table: Table) -> Numbers:
        """The rows whose files are pictures, decoded here; a class may not lose all of its files."""
        found = self.reader.pictures(table, self.say)
        self.pictures[id(table)] = found
        if table is self.table:
            left = set(table[self.target].rows(found.whole).texts())
            lost = [shown(name) for name in self.classes if name not in left]
            if lost and len(left) < 2:
                only = shown(next(iter(left)))
                refuse([f"but for broken files there is only the class {only}; mend the files of the others"])
            refuse([f"no file of the class {name} is a picture; mend them, or leave the class out" for name in lost])
        whole: Numbers = found.whole
        return whole

    def keys(self, table: Table, rows: Numbers) -> Sequence[Hashable]:
        """The bytes of the files, as hashes."""
        digests = self.pictures[id(table)].digests
        return [digests[row] for row in rows]

    def copies_of(self, keys: Sequence[Hashable]) -> Numbers:
        """Groups of copies in the order of their hashes."""
        groups: Numbers = np.unique(np.asarray(keys), return_inverse=True)[1]
        return groups

    def example_of(self, at: int) -> str:
        """The path of a held-out picture."""
        table = self.held.whole.rows(self.held.rows[at : at + 1])
        return table[self.reader.path_in(table)].texts()[0]

    # the networks

    def reader_of(self) -> PictureReader:
        """The reader that decoded the pictures; numbers are learned around their mean."""
        found: PictureReader = self.reader
        if not self.classes:
            found.mean, found.spread = float(self.train.target.mean()), float(self.train.target.std()) or 1.0
        return found

    def data_of(self, side: Side) -> Subset[tuple[Tensor, ...]]:
        """The pictures of a side, with what a network is to answer."""
        pixels = self.pictures[id(side.whole)].pixels
        if self.classes:
            whole = np.full(len(pixels), -1, np.int64)
            whole[side.rows] = side.target
        else:
            whole = np.zeros((len(pixels), 1), np.float32)
            whole[side.rows, 0] = (side.target - self.reader.mean) / self.reader.spread
        return Subset(TensorDataset(pixels, torch.from_numpy(whole)), side.rows.tolist())

    def models(self) -> Sequence[str]:
        """The networks that the options name."""
        return self.networks

    def job(self, name: str, data: Any, held: Any) -> Job:
        """30 epochs from random weights, or 8 from given ones, with augmentation."""
        options, is_begun, is_class = self.options, bool(self.options.weights), bool(self.classes)
        torch.manual_seed(options.seed)
        changes = {one: getattr(options, one) for one in ("flip", "crop", "colour", "mixup", "cutmix")}
        loss: nn.Module = nn.SmoothL1Loss()
        scored: dict[str, Any] = {
            "metrics": {"mae": _Error(self.reader.spread), "mse": _Error(self.reader.spread, is_squared=True)},
            "monitor": "mse",
            "better": "lower",
        }
        if is_class:
            loss = nn.CrossEntropyLoss(weight=self.class_weights(), label_smoothing=options.smoothing)
            scored = {"better": "higher"}
        return self.adamw_job(
            initial_network(name, self.reader.network, options.weights, self.say),
            data,
            held,
            lr=1e-4 if is_begun else 1e-3 if name == "resnet" else 5e-4,
            epochs=8 if is_begun else 30,
            loss=loss,
            augment=Augment(**changes, classes=len(self.classes)) if any(changes.values()) else None,
            drop_last=options.leaves_one(len(data)),
            **scored,
        )

    def space(self) -> dict[str, Any]:
        """Also how pictures are changed at random."""
        lr = (1e-5, 1e-3, "log") if self.options.weights else (1e-4, 3e-3, "log")
        changes = {"crop": (0.0, 0.4), "colour": (0.0, 0.4), "smoothing": (0.0, 0.2)}
        return {**super().space(), "lr": lr, **changes}

    def baselines(self) -> Mapping[str, Numbers]:
        """Also, of classes, the one whose mean thumbnail is nearest."""
        rules = dict(super().baselines())
        if not self.classes:
            return rules
        mine, theirs = (self._thumbnails(side) for side in (self.train, self.held))
        sums = np.zeros((len(self.classes), mine.shape[1]))
        np.add.at(sums, self.train.target, mine)
        counts = np.bincount(self.train.target, minlength=len(self.classes))[:, None]
        means = sums / np.maximum(counts, 1)
        far = (means**2).sum(1) - 2 * theirs @ means.T
        far[:, counts[:, 0] == 0] = np.inf
        return {**rules, "nearest mean thumbnail": far.argmin(1)}

    def advice(self) -> str:
        """Pretrained weights, where the networks begin at random."""
        return "train for more --epochs, or on more pictures" if self.options.weights else "begin with --weights FILE"

    def onnx_export(self, held: Any, name: str, model: nn.Module) -> OnnxExport:
        """The network with what comes before and after it, with some held-out pictures."""
        reader = self.reader
        classes = json.dumps(reader.classes)
        return OnnxExport(
            model=Answering(model, reader),
            inputs=(self.pictures[id(self.held.whole)].pixels[torch.from_numpy(self.held.rows[:SOME])],),
            about={"model": name, "classes": classes, "input": "pictures of uint8, channels first, RGB"},
            names=("pictures", "probabilities" if reader.classes else "numbers"),
            close=CLOSE if reader.classes else CLOSE * reader.spread,
        )

    def _thumbnails(self, side: Side) -> Numbers:
        # Of large pictures some lines are enough.
        pixels = self.pictures[id(side.whole)].pixels
        step = max(1, pixels.shape[-1] // (4 * THUMBNAIL))
        some = pixels[:, :, ::step, ::step]
        parts = [
            F.adaptive_avg_pool2d(some[torch.from_numpy(side.rows[at : at + AT_ONCE])].float(), THUMBNAIL).flatten(1)
            for at in range(0, len(side.rows), AT_ONCE)
        ]
        return torch.cat(parts).double().numpy()

    @classmethod
    def revive(cls, state: Mapping[str, Any], folder: Path) -> PictureReader:
        """The reader of a finished run."""
        own = {name: value for name, value in state.items() if name not in ("classes", "network")}
        return PictureReader(state["classes"], NetworkSpec(**state["network"]), **own)


class PictureReader(Reader):
    """Pictures as a network takes them."""

    def __init__(
        self,
        classes: Sequence[str],
        network: NetworkSpec,
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
            return Table(path=data, columns={PATH: word_column(PATH, [data.name])})
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

    def rows_of(self, data: Any) -> Table:
        """Paths in memory, which may lie anywhere."""
        table = table_in_memory(data, [self.path], {self.path: "text"})
        name = self.path_in(table)
        base, paths = from_one_folder(table[name].texts())
        return replace(table, path=base, columns={**table.columns, name: word_column(name, paths)})

    def state(self) -> dict[str, Any]:
        """All that makes the reader again."""
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
        return new_network(name, self.network)

    def pictures(self, table: Table, say: Say, *, is_asked: bool = False) -> Pictures:
        """The pictures that a table names, decoded, a row each; a warning counts the broken ones."""
        pillow()
        paths = table[self.path_in(table)].texts()
        files = files_named(paths, table.path, self.root, say, is_asked=is_asked)
        progress = now_and_then(say, "pictures  {done:,} of {total:,} decoded")
        found = decoded(files, size=self.network.size, fit=self.fit, progress=progress)
        say(f"pictures  {found.line}")
        if found.broken:
            named = [path or "(no path)" for path in paths]
            count = f"{len(found.broken):,} file{'s'[: len(found.broken) > 1]}"
            say(f"warning   {count} left out: {list_broken(named, found.broken)}")
            self.broken |= {named[row]: why for row, why in found.broken.items()}
        return found

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


class _Error:
    """How far outputs are off, in the units of the target; the network's own are around 0."""

    def __init__(self, spread: float, *, is_squared: bool = False) -> None:
        self._spread, self._is_squared = spread, is_squared

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        off = (output.double() - target.double()) * self._spread
        return off.square() if self._is_squared else off.abs()


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


def _folder_problems(table: Table) -> list[str]:
    """Why the folders of a folder are no classes: they are parts of the data, or one that holds those of classes."""
    if not table.path.is_dir() or list(table.columns) != [PATH, CLASS]:
        return []
    names = checks.classes_of(table[CLASS])[0]
    parts = {name: PARTS[name.lower()] for name in names if name.lower() in PARTS}
    if len(parts) == len(names) and "data" in parts.values():
        words = " ".join(f"--{part} {shlex.quote(str(table.path / name))}" for name, part in sorted(parts.items()))
        return [
            f"the folders of {table.path} are {', '.join(names)}, which are parts of the data, no classes; say {words}"
        ]
    inner = {Path(path).parts[1] for path in table[PATH].texts() if len(Path(path).parts) > 2}
    if len(names) == 1 and len(inner) > 1:
        held = shlex.quote(str(table.path / names[0]))
        return [f"{table.path} holds a single folder, {shown(names[0])}, which holds others; say --data {held}"]
    return []


RECIPE = ImageRecipe
