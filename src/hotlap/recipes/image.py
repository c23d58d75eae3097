"""The recipe `image`: pictures in folders of classes, or named by a table → classes or numbers."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

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
from hotlap.recipes.kinds import in_words
from hotlap.recipes.networks import BUILT_IN, NetworkPlan, begun, made, name_problem, plan_in
from hotlap.recipes.onnx_files import write_onnx
from hotlap.recipes.options import MOST, Options, is_file, is_folder, option, outside
from hotlap.recipes.picture_files import CLASS, OTHERS, PATH, elsewhere, folder_of, is_picture, placed
from hotlap.recipes.recipe import Asked, Candidate, Numbers, Prepared, Recipe, Say
from hotlap.recipes.scores import class_weights
from hotlap.recipes.tables import Table, named_columns, read_table
from hotlap.recipes.tabular import (
    HEADERS,
    Split,
    by_group,
    now_and_then,
    refuse,
    refuse_too_large,
    shown_table,
    stratified,
    stratified_by_group,
    warm_up_and_cosine,
)
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
            say(f"warning   {count} left out: {list_broken(named, found.broken)}")
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


SOME = 16
"""Pictures that something is tried on."""
THUMBNAIL = 8
"""Pixels along a side, for the rule that looks at little."""
AT_ONCE = 512
"""Pictures at a time, for that rule."""
STRATA = 10
"""Parts of equal number, by their target, of which each gives its share of what is held out."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is trained on, or held out."""

    pictures: Pictures
    rows: Numbers
    """Which of the pictures."""
    target: Numbers
    """The class, or the number, of each of these."""
    names: Sequence[str]
    """The path of each of these."""

    def some(self, count: int = SOME) -> Tensor:
        """A few of the pictures."""
        return self.pictures.pixels[torch.from_numpy(self.rows[:count])]

    def data(self, reader: PictureReader) -> Subset[tuple[Tensor, ...]]:
        """Pictures with what a network is to answer."""
        if reader.classes:
            whole = np.full(len(self.pictures), -1, np.int64)
            whole[self.rows] = self.target
        else:
            whole = np.zeros((len(self.pictures), 1), np.float32)
            whole[self.rows, 0] = (self.target - reader.mean) / reader.spread
        return Subset(TensorDataset(self.pictures.pixels, torch.from_numpy(whole)), self.rows.tolist())


def sides(options: Options, reader: PictureReader, table: Table, target: str, say: Say) -> tuple[Side, Side]:
    """What is trained on and what is held out: a file or folder of its own, whole groups, a share of each class."""
    # What is wrong with either is said before minutes are spent on pictures.
    other = _judged_by(options, reader, target, say) if options.valid else None
    groups = _groups(table, options.group) if options.group else None
    pictures = reader.pictures(table, say)
    whole = pictures.whole
    kept = table.rows(whole)
    refuse(_few_left(kept, target, reader.classes))
    answers, names = _answers(kept, target, reader.classes), kept[reader.path].texts()

    def side(rows: Numbers) -> Side:
        return Side(pictures=pictures, rows=whole[rows], target=answers[rows], names=[names[at] for at in rows])

    if other is not None:
        found = reader.pictures(other, say)
        judged = other.rows(found.whole)
        held = Side(
            pictures=found,
            rows=found.whole,
            target=_answers(judged, target, reader.classes),
            names=judged[reader.path_in(judged)].texts(),
        )
        return side(np.arange(len(whole))), held
    digests = [pictures.digests[row] for row in whole]
    split = _split(options, None if groups is None else groups[whole], answers, reader.classes, digests, say)
    say(f"split     {len(split.train):,} pictures to train on, {len(split.valid):,} held out")
    return side(split.train), side(split.valid)


def _judged_by(options: Options, reader: PictureReader, target: str, say: Say) -> Table:
    """The file or folder to judge by; refused where it has no paths, or targets unlike those trained on."""
    table = shown_table(options.valid, say, header=reader.header)
    if reader.classes:
        theirs = set(checks.classes_of(table[target])[0]) - set(reader.classes)
        refuse(
            [
                f"{options.valid} has the class {shown(name)}, which {options.data} has not; leave its rows out"
                for name in sorted(theirs)
            ]
        )
    refuse(checks.target_problems(table[target]))
    if not reader.classes and table[target].kind not in checks.NUMBERS:
        raise DataError(f"the target {target!r} is {table[target].kind} in {options.valid}; give numbers there too")
    reader.path_in(table)
    return table


def _groups(table: Table, name: str) -> Numbers:
    group = table[name]
    if group.missing is not None:
        raise DataError(f"group={group.name} is missing in {int(group.missing.sum()):,} rows; fill it in")
    return np.asarray(group.texts())


def _split(
    options: Options,
    groups: Numbers | None,
    answers: Numbers,
    classes: Sequence[str],
    digests: Sequence[str],
    say: Say,
) -> Split:
    # Numbers by strata, so that large and small ones are on both sides.
    strata = answers if classes else np.argsort(np.argsort(answers)) * STRATA // len(answers)
    copies = len(digests) - len(set(digests))
    if groups is not None:
        split = by_group(groups, options.valid_share, options.seed)
    elif copies:
        are = "pictures are copies" if copies > 1 else "picture is a copy"
        say(f"copies    {copies:,} {are} of one before, byte for byte: all copies of a picture are on one side")
        split = stratified_by_group(strata, np.asarray(digests), options.valid_share, options.seed)
    else:
        split = stratified(strata, options.valid_share, options.seed)
    for number in np.setdiff1d(answers[split.valid], answers[split.train]) if classes else ():
        say(f"warning   all rows of {shown(classes[number])} are held out by their groups: it is never trained on")
    return split


def _few_left(table: Table, target: str, classes: Sequence[str]) -> list[str]:
    left = set(table[target].texts())
    lost = [name for name in classes if name not in left]
    if lost and len(left) < 2:
        return [f"but for broken files there is only the class {shown(next(iter(left)))}; mend the files of the others"]
    return [f"no file of the class {shown(name)} is a picture; mend them, or leave the class out" for name in lost]


def _answers(table: Table, target: str, classes: Sequence[str]) -> Numbers:
    if not classes:
        numbers: Numbers = table[target].values.astype(np.float64)
        return numbers
    places = {name: number for number, name in enumerate(classes)}
    return np.asarray([places[text] for text in table[target].texts()], dtype=np.int64)


def warn_of_copies(train: Side, held: Side, say: Say) -> None:
    """Pictures that are on both sides, byte for byte, make a score too good."""
    seen = {train.pictures.digests[row] for row in train.rows}
    copies = [at for at, row in enumerate(held.rows) if held.pictures.digests[row] in seen]
    if copies:
        which = f"as {held.names[copies[0]]}"
        say(
            f"warning   {len(copies):,} of {len(held.rows):,} pictures held out are trained on too, {which}; "
            "leave copies out, or keep them on one side with --group"
        )


def rules(train: Side, held: Side, classes: int) -> dict[str, Numbers]:
    """What the most frequent class, or the mean, would score; and thumbnails compared with the mean of each class."""
    if not classes:
        return {"the mean": np.full(len(held.target), train.target.mean())}
    mine, theirs = (_thumbnails(side) for side in (train, held))
    sums = np.zeros((classes, mine.shape[1]))
    np.add.at(sums, train.target, mine)
    counts = np.bincount(train.target, minlength=classes)[:, None]
    means = sums / np.maximum(counts, 1)
    far = (means**2).sum(1) - 2 * theirs @ means.T
    far[:, counts[:, 0] == 0] = np.inf
    return {
        "most frequent class": np.full(len(held.target), counts.argmax()),
        "nearest mean thumbnail": far.argmin(1),
    }


def _thumbnails(side: Side) -> Numbers:
    # Of large pictures some lines are looked at, which are enough for so little.
    step = max(1, side.pictures.pixels.shape[-1] // (4 * THUMBNAIL))
    pixels = side.pictures.pixels[:, :, ::step, ::step]
    parts = [
        F.adaptive_avg_pool2d(pixels[torch.from_numpy(side.rows[at : at + AT_ONCE])].float(), THUMBNAIL).flatten(1)
        for at in range(0, len(side.rows), AT_ONCE)
    ]
    return torch.cat(parts).double().numpy()


TARGETS = (CLASS, "label", "target", "category", "y")
"""Names of a column to predict, as people have them."""
PARTS = {
    **dict.fromkeys(("train", "training"), "data"),
    **dict.fromkeys(("valid", "val", "validation", "dev"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Folders that hold parts of the data, as people call them, and the options that they are for."""
TASKS = ("auto", "classes", "numbers")
MOST_VIEWS = 10


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Options):
    """What the recipe can be told."""

    data: str = option("", "a folder with a folder of pictures for each class, or a CSV or Parquet file of paths")
    target: str = option("", "the column to predict; in folders the class")
    path: str = option("", "the column of paths; found by itself where its values are named .jpg, .jpeg or .png")
    root: str = option("", "the folder that paths begin at; as a rule that of the file")
    header: str = option("auto", "whether the first row holds names: yes, no, or auto to find out")
    task: str = option("auto", "classes, numbers, or auto: numbers where the target has decimals or many values")
    size: int = option(224, "pixels along a side")
    fit: str = option("stretch", "how a picture becomes a square: stretch all of it, or crop its middle")
    models: tuple[str, ...] = option(("resnet",), "resnet, vit, timm:NAME or transformers:TYPE; the best is kept")
    width: int = option(64, "channels of the resnet's first stage; the vit is three times as wide", most=4096)
    depth: int = option(
        2, "blocks of each of the resnet's four stages; the vit has three times as many layers", most=256
    )
    weights: str = option("", "a .safetensors file of the model, or a folder with one of transformers, to begin with")
    patience: int = option(5, "evaluations without improvement before it stops")
    flip: bool = option(True, "mirror pictures at random; not for letters and digits")
    crop: float = option(0.2, "cut off up to this share of each side at random")
    colour: float = option(0.2, "change brightness, contrast and saturation at random, by up to this share")
    mixup: float = option(0.0, "mix pictures with others, by shares drawn from Beta of this number; 0.2 is usual")
    cutmix: float = option(0.0, "put boxes of others into them, of areas drawn from Beta of this number; 1 is usual")
    tta: int = option(1, "views of each picture that an answer is the mean of: itself, mirrored, corners; up to 10")
    warm_up: float = option(0.05, "the share of updates in which the learning rate rises")
    smoothing: float = option(0.1, "of labels")
    weight_decay: float = option(0.05, "of AdamW")
    balance: bool = option(True, "weigh classes by how rare they are")
    onnx: bool = option(False, "write the best model as model.onnx too")

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
            warm_up=(0, 1),
            smoothing=(0, 1),
            weight_decay=(0, MOST),
        )
        for name, known in (("task", TASKS), ("fit", FITS), ("header", HEADERS)):
            if getattr(self, name) not in known:
                wrong.append(f"{name}={shown(getattr(self, name))} must be one of {', '.join(known)}")
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


def prepare(options: ImageOptions, say: Say) -> Prepared:
    """Read what names the pictures, decode them, and hold a part out."""
    if options.root and not is_folder(options.root):
        raise DataError(f"root={options.root} is no folder; name the one that paths begin at, or leave it out")
    header = HEADERS[options.header]
    table = shown_table(options.data, say, header=header)
    refuse(_folder_problems(table))
    target, path = _target(table, options), _path(table, options.path)
    for name, other in (("path", path), ("group", options.group)):
        if other == target:
            raise DataError(f"{name} names {target}, which is the target; name another column")
    is_numbers = _is_numbers(table, target, options.task)
    refuse(_target_problems(table, target, is_numbers))
    if is_numbers and options.smoothing != ImageOptions.smoothing:
        raise DataError(f"smoothing={options.smoothing} is of classes, and {target} is a number; leave it out")
    classes = () if is_numbers else checks.classes_of(table[target])[0]
    for line in checks.target_warnings(table[target]) if classes else ():
        say(f"warning   {line}")
    say(f"task      {target} ({f'{len(classes)} classes' if classes else 'a number'}) from the pictures of {path}")
    models, plan = _network(options, max(1, len(classes)))
    reader = PictureReader(
        classes,
        plan,
        path=path,
        root=options.root,
        fit=cast("Fit", options.fit),
        tta=options.tta,
        mirrors=options.flip,
        crop=options.crop,
        header=header,
    )
    if options.test:
        reader.table(Path(options.test))  # its mistakes, too, are said before minutes are spent on pictures
    train, held = sides(options, reader, table, target, say)
    if not classes:
        reader.mean, reader.spread = float(train.target.mean()), float(train.target.std()) or 1.0
    warn_of_copies(train, held, say)
    data, valid = train.data(reader), held.data(reader)
    weights = None
    if options.balance and classes:
        weights = torch.from_numpy(class_weights(train.target, len(classes))).float()
    simple = rules(train, held, len(classes))
    return Prepared(
        reader=reader,
        candidates=[
            Candidate(name=one, job=partial(_job, options, reader, one, data, valid, weights, say)) for one in models
        ],
        target_name=target,
        held_out=valid,
        target=held.target,
        shown=lambda at: held.names[at],
        baselines=lambda: simple,
        finish=partial(written_as_onnx, reader, held.some()) if options.onnx else None,
    )


def _job(
    options: ImageOptions, reader: PictureReader, name: str, data: Any, valid: Any, weights: Tensor | None, say: Say
) -> Job:
    torch.manual_seed(options.seed)
    model = begun(name, reader.network, options.weights, say)
    is_begun = bool(options.weights)
    loss: nn.Module = nn.SmoothL1Loss()
    if reader.classes:
        loss = nn.CrossEntropyLoss(weight=weights, label_smoothing=options.smoothing)
    changed = any((options.flip, options.crop, options.colour, options.mixup, options.cutmix))
    augment = Augment(
        flip=options.flip,
        crop=options.crop,
        colour=options.colour,
        mixup=options.mixup,
        cutmix=options.cutmix,
        classes=len(reader.classes),
    )
    return Job(
        model=model,
        data=data,
        valid=valid,
        loss=loss,
        augment=augment if changed else None,
        optimizer=torch.optim.AdamW(
            model.parameters(),
            lr=options.lr or (1e-4 if is_begun else 1e-3 if name == "resnet" else 5e-4),
            weight_decay=options.weight_decay,
        ),
        schedule=warm_up_and_cosine(options.warm_up),
        clip=1.0,
        batch_size=options.batch_size,
        drop_last=options.leaves_one(len(data)),
        epochs=options.epochs or (8 if is_begun else 30),
        metrics=["accuracy", "macro_f1"]
        if reader.classes
        else {"mae": _Error(reader.spread), "mse": _Error(reader.spread, is_squared=True)},
        monitor="macro_f1" if reader.classes else "mse",
        better="higher" if reader.classes else "lower",
        patience=options.patience,
        seed=options.seed,
        device=options.device,
    )


class _Error:
    """How far outputs are off, in the units of the target; the network's own are around 0."""

    def __init__(self, spread: float, *, is_squared: bool = False) -> None:
        self._spread, self._is_squared = spread, is_squared

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        off = (output.double() - target.double()) * self._spread
        return off.square() if self._is_squared else off.abs()


def revive(state: Mapping[str, Any], folder: Path) -> PictureReader:
    """The reader of a finished run."""
    own = {name: value for name, value in state.items() if name not in ("classes", "network")}
    return PictureReader(state["classes"], NetworkPlan(**state["network"]), **own)


def _network(options: ImageOptions, outputs: int) -> tuple[Sequence[str], NetworkPlan]:
    """The names of the models, and what they are made of."""
    names: Sequence[str] = list(dict.fromkeys(options.models))
    plan = NetworkPlan(size=options.size, outputs=outputs, width=options.width, depth=options.depth)
    if options.weights and is_file(Path(options.weights) / "config.json"):
        name, plan = plan_in(Path(options.weights), plan)
        names = [name]
    for name in names:
        refuse_too_large(partial(made, name, plan), name, options.device, "give a smaller width or depth")
        # What cannot be made, or read, is said before minutes are spent on pictures.
        begun(name, plan, options.weights, lambda line: None)
    return names, plan


# --- the table -------------------------------------------------------------------------------------


def _target(table: Table, options: ImageOptions) -> str:
    if options.target:
        return table[options.target].name
    found = [name for name in table.columns if name.lower() in TARGETS]
    if len(found) != 1:
        if list(table.columns) == [PATH] and table.path.is_dir():
            raise DataError(f"{table.path} has pictures and no folders of classes; sort them into one for each class")
        raise DataError(
            f"which column of {table.path} is to be predicted? Say --target; there are {named_columns(table)}"
        )
    return found[0]


def _folder_problems(table: Table) -> list[str]:
    """Why the folders of a folder are no classes: they are parts of the data, or one that holds those of classes."""
    if not table.path.is_dir() or list(table.columns) != [PATH, CLASS]:
        return []
    names = checks.classes_of(table[CLASS])[0]
    parts = {name: PARTS[name.lower()] for name in names if name.lower() in PARTS}
    if len(parts) == len(names) and "data" in parts.values():
        said = " ".join(f"--{part} {shlex.quote(str(table.path / name))}" for name, part in sorted(parts.items()))
        return [
            f"the folders of {table.path} are {', '.join(names)}, which are parts of the data, no classes; say {said}"
        ]
    inner = {Path(path).parts[1] for path in table[PATH].texts() if len(Path(path).parts) > 2}
    if len(names) == 1 and len(inner) > 1:
        held = shlex.quote(str(table.path / names[0]))
        return [f"{table.path} holds a single folder, {shown(names[0])}, which holds others; say --data {held}"]
    return []


def _path(table: Table, named: str) -> str:
    return table[named].name if named else path_column(table, "say --path")


def _is_numbers(table: Table, target: str, task: str) -> bool:
    column = table[target]
    can_be = column.kind in ("number", "whole number")
    if task == "numbers" and not can_be:
        raise DataError(f"task=numbers, and the target {target!r} is {column.kind}; name a column of numbers")
    if task != "auto":
        return task == "numbers"
    return column.kind == "number" or (can_be and len(set(column.values.tolist())) > checks.MOST_CLASSES)


def _target_problems(table: Table, target: str, is_numbers: bool) -> list[str]:
    column = table[target]
    found = checks.target_problems(column)
    different = len(set(column.texts()))
    if not found and not is_numbers and 2 * different > len(table):
        found.append(
            f"the target {target!r} has {different:,} different values in {len(table):,} rows, "
            f"as {shown(column.texts()[0])}; name a column of classes, each with several rows, or say --task numbers"
        )
    return found


RECIPE = Recipe(
    name="image",
    summary="classes or numbers of pictures: a small ResNet or vision Transformer, or one of timm or transformers",
    expects="a folder of pictures for each class, or a column of paths and one to predict",
    options=ImageOptions,
    prepare=prepare,
    revive=revive,
)
