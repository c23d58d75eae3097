"""The recipe `image`: pictures in folders of classes, or named by a table → classes or numbers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, JobError, shown
from hotlap.core.job import Job
from hotlap.data.decoding import FITS, Fit
from hotlap.engine.augment import Augment
from hotlap.recipes import checks
from hotlap.recipes.existing import is_file, is_folder
from hotlap.recipes.options import MOST, Options, option, outside
from hotlap.recipes.picture_files import CLASS, PATH
from hotlap.recipes.picture_networks import BUILT_IN, NetworkPlan, begun, name_problem, plan_in
from hotlap.recipes.picture_reader import PictureReader, most_views, path_column, written_as_onnx
from hotlap.recipes.picture_sides import rules, sides, warn_of_copies
from hotlap.recipes.reading import HEADERS, refuse, shown_table
from hotlap.recipes.recipe import Candidate, Prepared, Recipe, Say
from hotlap.recipes.schedules import warm_up_and_cosine
from hotlap.recipes.scores import class_weights
from hotlap.recipes.tables import Table, named_columns

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
