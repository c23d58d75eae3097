"""What hotlap changed in a run, as the lines one would write by hand: a diff of the script, or lines of PyTorch."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.core.plan import Feed, Plan
from hotlap.core.units import MIB
from hotlap.report.reading import SCRIPT, TREES, RunFiles, Training, listing, words
from hotlap.report.source import DATA, Edit, NotFoundError, Source
from hotlap.store.files import read_bytes

MOST_SCRIPT_BYTES = 4 * MIB
WIDEST = 100
"""Columns of a call that stays on one line."""
NUMBERS = "another precision changes the numbers a little: compare scores"
ORDER = "persistent_workers draws fewer random numbers: from the second epoch on batches come in another order"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that hotlap changed."""

    what: str
    lines: tuple[str, ...]
    """It as lines of PyTorch, with the usual names."""
    edit: Callable[[Source], list[Edit]] | None = None
    """Edits of a script that do the same; raises NotFoundError. None: no short lines do."""
    why: str = ""
    """Why one has to write it by hand."""
    note: str = ""
    """What else it changes."""


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """What changed in one training, and how one would write it."""

    training: str
    baseline: str
    """The plan before, in words."""
    plan: str
    """The plan at the end."""
    script: str = ""
    """The file that the diff is for; empty where there is no diff."""
    diff: str = ""
    notes: tuple[str, ...] = ()
    left: tuple[Change, ...] = ()
    """What has to be written by hand."""

    def to_dict(self) -> dict[str, Any]:
        """It as JSON."""
        left = [{"what": one.what, "why": one.why, "lines": list(one.lines)} for one in self.left]
        return {**vars(self), "notes": list(self.notes), "left": left}

    def comments(self) -> list[str]:
        """All but the diff, as lines that `patch` passes over."""
        found = [f"{self.training}: {self.baseline}", f"becomes {self.plan}"]
        for one in self.left:
            found += ["", f"write by hand: {one.what}{f' ({one.why})' if one.why else ''}"]
            found += [f"    {line}" for line in one.lines]
        found += ["", *self.notes] if self.notes else []
        return [f"# {line}".rstrip() for line in found]


def by_hand(run: RunFiles) -> list[ByHand]:
    """What hotlap changed in each training of a run. Raises StoreError where the files do not say."""
    if run.kind == TREES:
        raise StoreError(f"{run.path} grew trees, which no plan changes; `hotlap show {run.path}` has their settings")
    known = [one for one in run.trainings if one.plan is not None and one.ledger is not None and len(one.ledger)]
    if not known:
        unread = f": {run.problems[0]}" if run.problems else ""
        raise StoreError(f"{run.path} has no plan.toml and ledger.jsonl that tell what was changed{unread}")
    return [_of_training(run, one, is_only=len(run.trainings) == 1) for one in known]


def _of_training(run: RunFiles, training: Training, *, is_only: bool) -> ByHand:
    assert training.plan is not None
    assert training.ledger is not None
    before, after = next(iter(training.ledger)).plan, training.plan
    found = ByHand(training=training.name, baseline=str(before), plan=str(after))
    changes = changes_of(before, after, device_of(training), _replay(run, training))
    if not changes:
        return dataclasses.replace(found, notes=("hotlap changed nothing: the plan at the end is the first one",))
    notes = [f"note: {change.note}" for change in changes if change.note]
    if run.kind != SCRIPT:
        return dataclasses.replace(found, left=tuple(changes), notes=tuple(notes))
    try:
        if not is_only:
            raise NotFoundError("the script trained several times, and the files do not tell which lines did")
        path, text = _script(training)
        after_text, left = edited(text, changes)
    except NotFoundError as error:
        return dataclasses.replace(found, left=tuple(changes), notes=(*notes, f"lines alone, without a diff: {error}"))
    diff = unified(text, after_text, path.name)
    if diff:
        notes.append(f"apply it with: hotlap diff {shlex.quote(str(run.path))} | patch {shlex.quote(str(path))}")
    return dataclasses.replace(found, script=str(path), diff=diff, left=tuple(left), notes=tuple(notes))


def device_of(training: Training) -> str:
    """`cuda` or `cpu`: where the training ran, as far as its files tell."""
    named = [training.live.get("device"), training.result.get("device"), training.job.get("device")]
    known = [one for one in named if isinstance(one, str) and one.startswith(("cuda", "cpu"))]
    on_gpu = known[0].startswith("cuda") if known else bool(listing(training.environment.get("gpus")))
    return "cuda" if on_gpu else "cpu"


def _replay(run: RunFiles, training: Training) -> str:
    """How to run it again under the plan."""
    if run.kind != SCRIPT:
        return f"fit(job, plan={str(run.path)!r})"
    own = [words(one) for one in listing(training.started.get("words"))][2:]
    return f"hotlap run --plan {shlex.quote(str(training.path))} {shlex.join(own) or 'train.py'}"


def _script(training: Training) -> tuple[Path, str]:
    """The script of a run and its text, if it is the one that ran."""
    name, digest = training.started.get("file"), training.started.get("sha256")
    if not isinstance(name, str) or not isinstance(digest, str):
        raise NotFoundError("the run does not name its script")
    try:
        content = read_bytes(Path(name), MOST_SCRIPT_BYTES)
    except StoreError as error:
        raise NotFoundError(str(error)) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise NotFoundError(f"{name} has changed since the run")
    try:
        return Path(name), content.decode()
    except UnicodeDecodeError:
        raise NotFoundError(f"{name} is not UTF-8") from None


def edited(text: str, changes: Iterable[Change]) -> tuple[str, list[Change]]:
    """The text with all changes whose places are certain, and the other changes."""
    source, edits, left = Source(text), list[Edit](), list[Change]()
    for change in changes:
        try:
            if change.edit is None:
                raise NotFoundError(change.why)
            edits += change.edit(source)
        except NotFoundError as error:
            left.append(dataclasses.replace(change, why=str(error)))
    edits.sort(key=lambda edit: not edit.text.startswith(("import ", "from ")))
    after = source.edited(list(dict.fromkeys(edits)))  # two changes may need the same import
    Source(after)
    return after, left


def unified(before: str, after: str, name: str) -> str:
    """The difference of two texts as `patch` reads it."""
    lines = difflib.unified_diff(_kept_ends(before), _kept_ends(after), name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _kept_ends(text: str) -> list[str]:
    *whole, last = text.split("\n")
    return [*(f"{line}\n" for line in whole), *([last] if last else [])]


# --- what changed ----------------------------------------------------------------------------------------


def changes_of(before: Plan, after: Plan, device: str, replay: str) -> list[Change]:
    """What differs between two plans, in the order in which one would write it; `replay` runs the plan again."""
    changed = before.changes(after)
    numerics, memory, execution = after.numerics, after.memory, after.execution
    parts: list[tuple[tuple[str, ...], list[Change]]] = [
        (("autotune",), [_AUTOTUNED] if execution.autotune else []),
        (("kind", "workers", "prefetch", "persistent", "pinned"), _feed(after.feed, device)),
        (("layout",), [_LAYOUT] if numerics.layout == "channels_last" else []),
        (("precision",), _precision(numerics.precision, device)),
        (("optimizer",), [_FUSED] if numerics.optimizer == "fused" else []),
        (("micro_batch",), [_pieces(memory.micro_batch)] if memory.micro_batch else []),
        (("checkpoint",), [_checkpointed(memory.checkpoint)] if memory.checkpoint else []),
        (("compile",), [_compiled(execution.compile)] if execution.compile != "no" else []),
        (("mode", "replay_steps"), [_captured(replay)] if execution.mode == "captured" else []),
        (("depthwise",), []),
    ]
    found: list[Change] = []
    for names, made in parts:
        differ = [name for name in names if name in changed]
        words_of = ", ".join(f"{name} {changed[name][0]} → {changed[name][1]}" for name in differ)
        none = Change(what=words_of, lines=(), why=f"no short equivalent; run it with: {replay}")
        found += (made or [none]) if differ else []
    return found


def _setting(line: str, source: Source) -> list[Edit]:
    """A line that sets something of torch, behind the imports."""
    name = line.partition(" = ")[0].partition("(")[0]
    at_line = source.set_in(name)
    if at_line is not None:
        raise NotFoundError(f"line {at_line} of the script sets {name} itself")
    at, has_torch = source.header()
    imported = [] if has_torch else [Edit(begin=at, end=at, text="import torch\n")]
    return [*imported, Edit(begin=at, end=at, text=f"\n{line}\n")]


def _set(what: str, line: str, note: str = "") -> Change:
    return Change(what=what, lines=(line,), edit=partial(_setting, line), note=note)


_TF32 = _set("TF32", 'torch.set_float32_matmul_precision("high")', NUMBERS)
_AUTOTUNED = _set("cuDNN autotuned", "torch.backends.cudnn.benchmark = True")


def _fuse(source: Source) -> list[Edit]:
    return [source.with_argument(call, "fused=True") for call in source.fused_optimizers()]


_FUSED = Change(
    what="fused optimizer", lines=("optimizer = torch.optim.AdamW(model.parameters(), …, fused=True)",), edit=_fuse
)


def _cast(head: str, source: Source) -> list[Edit]:
    return source.indented(*source.forward_statements(), head)


def _precision(precision: str, device: str) -> list[Change]:
    if precision in ("bf16", "fp16"):
        return [_autocast(precision, device)]
    return [_TF32] if precision == "tf32" else []


def _autocast(precision: str, device: str) -> Change:
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    head = f'with torch.autocast("{device}", dtype=torch.{dtype}):'
    forward = ("    output = model(x)", "    loss = criterion(output, y)")
    if precision == "fp16":
        scaler = ("scaler.scale(loss).backward()", "scaler.step(optimizer)", "scaler.update()")
        lines = ("scaler = torch.amp.GradScaler()", head, *forward, *scaler)
        return Change(what="16-bit precision", lines=lines, why="fp16 needs a scaled loss", note=NUMBERS)
    return Change(what="16-bit precision", lines=(head, *forward), edit=partial(_cast, head), note=NUMBERS)


def _lay_out(source: Source) -> list[Edit]:
    model, makes = source.model_of_optimizer()
    call = source.training_call()
    image = call.args[0] if len(call.args) == 1 and not call.keywords else None
    if not isinstance(image, ast.Name):
        raise NotFoundError(f"line {call.lineno} hands over more than one batch of images")
    statement = source.statement_of(call)
    places = ((makes, model), (statement, image.id))
    return [
        Edit(begin=at, end=at, text=f"{source.indent_of(one)}{name} = {name}.to(memory_format=torch.channels_last)\n")
        for one, name in places
        for at in [source.line_start(one.lineno)]
    ]


_LAYOUT = Change(
    what="channels last",
    lines=(
        "model = model.to(memory_format=torch.channels_last)",
        "x = x.to(memory_format=torch.channels_last)  # each batch of images",
    ),
    edit=_lay_out,
)


def _pieces(samples: int) -> Change:
    lines = (
        f"for part, target in zip(x.split({samples}), y.split({samples})):",
        "    (criterion(model(part), target) * len(part) / len(x)).backward()",
        "optimizer.step()",
    )
    return Change(what=f"batches in pieces of {samples}", lines=lines, why="it depends on the loss, a mean here")


def _checkpointed(blocks: int) -> Change:
    lines = (
        "from torch.utils.checkpoint import checkpoint",
        f"x = checkpoint(block, x, use_reentrant=False)  # in forward, for {blocks} of the blocks",
    )
    return Change(what=f"{blocks} blocks checkpointed", lines=lines, why="it belongs into the model's forward")


def _compiled(what: str) -> Change:
    whole = ["model = torch.compile(model)  # before the first step"]
    blocks = ["for block in model.blocks:  # those that the model repeats", "    block.compile()"]
    lines = tuple(blocks if what == "blocks" else whole)
    return Change(what="torch.compile", lines=lines, why="it belongs behind what else changes the model")


def _captured(replay: str) -> Change:
    lines = (
        "# Once, with batches of one shape, an optimizer with capturable=True, and some steps made on a side stream:",
        "graph = torch.cuda.CUDAGraph()",
        "with torch.cuda.graph(graph):",
        "    loss = criterion(model(x), y)",
        "    loss.backward()",
        "    optimizer.step()",
        "# Then for each batch:",
        "x.copy_(new_x), y.copy_(new_y)",
        "graph.replay()",
    )
    return Change(what="captured step", lines=lines, why=f"no short equivalent; run it with: {replay}")


# --- batches ---------------------------------------------------------------------------------------------

MOST_PLAIN = 3
"""Arguments of a DataLoader that may come without their names: dataset, batch_size, shuffle."""
UNDERSTOOD = {
    "dataset", "batch_size", "shuffle", "drop_last", "generator",
    "num_workers", "pin_memory", "persistent_workers", "prefetch_factor",
}  # fmt: skip
"""Arguments of a DataLoader that hotlap can write in another way."""
_COPIED = Change(
    what="copies that the host does not wait for",
    lines=('x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)',),
    edit=lambda source: [source.with_argument(call, "non_blocking=True") for call in source.copies_to_device()],
)


def _feed(feed: Feed, device: str) -> list[Change]:
    """The changes that bring batches as a feed does."""
    copied = [_COPIED] if device == "cuda" and (feed.pinned or feed.kind == "stream") else []
    if feed.kind == "loader":
        named: dict[str, Any] = {"num_workers": feed.workers, "pin_memory": feed.pinned}
        named |= {"persistent_workers": True} if feed.persistent else {}
        named |= {"prefetch_factor": feed.prefetch} if feed.prefetch is not None else {}
        given = ", ".join(f"{name}={value}" for name, value in named.items())
        edit, note = partial(_with_workers, named), ORDER if feed.persistent else ""
        loader = f"loader = DataLoader(dataset, …, {given})"
        return [Change(what="workers that fetch ahead", lines=(loader,), edit=edit, note=note), *copied]
    what = {"resident": "data held on the device", "stream": "batches copied ahead"}
    more = ", pin_memory=True" if feed.kind == "stream" and device == "cuda" else ""
    is_held = feed.kind == "resident" and device == "cuda"
    lines = (
        f"from {DATA} import BatchSampler, RandomSampler",
        *(['dataset = TensorDataset(x.to("cuda"), y.to("cuda"))'] if is_held else []),
        "batches = BatchSampler(RandomSampler(dataset), batch_size, drop_last=False)",
        f"loader = DataLoader(dataset, sampler=batches, batch_size=None{more})  # for a TensorDataset",
    )
    gathered = partial(_batched, is_held=is_held, more=more)
    return [Change(what=what.get(feed.kind, "batches indexed as a whole"), lines=lines, edit=gathered), *copied]


def _with_workers(named: dict[str, Any], source: Source) -> list[Edit]:
    """Set arguments of the loader, where they are not set so."""
    call = source.training_loader()
    given = {word.arg: word for word in call.keywords}
    if None in given or len(call.args) > MOST_PLAIN:
        raise NotFoundError(f"line {call.lineno} hands over arguments without their names")
    edits, new = [], []
    for name, value in named.items():
        word = given.get(name)
        if word is not None:
            begin, end = source.span(word)
            edits.append(Edit(begin=begin, end=end, text=f"{name}={value}"))
        elif value:
            new.append(f"{name}={value}")
    if not named["num_workers"] and given.keys() & {"persistent_workers", "prefetch_factor"}:
        raise NotFoundError(f"line {call.lineno} sets what only workers take")
    return [*edits, *([source.with_argument(call, ", ".join(new))] if new else [])]


def _batched(source: Source, *, is_held: bool, more: str) -> list[Edit]:
    """A loader that asks its `TensorDataset` for a whole batch at once, in the same order."""
    call = source.training_loader()
    given: dict[str | None, ast.expr] = dict(zip(("dataset", "batch_size", "shuffle"), call.args, strict=False))
    given |= {word.arg: word.value for word in call.keywords}
    dataset, shuffle = given.get("dataset"), given.get("shuffle", ast.Constant(False))
    if len(call.args) > MOST_PLAIN or not given.keys() <= UNDERSTOOD or dataset is None:
        odd = ", ".join(str(name) for name in given if name not in UNDERSTOOD) or "arguments without their names"
        raise NotFoundError(f"line {call.lineno} chooses batches itself: {odd}")
    if not isinstance(shuffle, ast.Constant):
        raise NotFoundError(f"line {call.lineno} shuffles or not")
    statement, (tensors, is_part) = source.statement_of(call), source.tensors_of(dataset)
    if is_part and is_held:
        raise NotFoundError("other parts of the same data may be used on the host")
    indent = source.indent_of(statement)
    inside = _on_device(source, tensors) if is_held else []
    if isinstance(dataset, ast.Name):
        name = dataset.id
        if inside and source.uses_of(dataset) > 1:
            raise NotFoundError(f"{name} is used elsewhere too")
        edits = inside
    elif is_part:
        raise NotFoundError(f"line {call.lineno} makes a part of a dataset")
    else:
        name = "dataset" if source.knows("dataset") is None else "training_data"
        if source.knows(name) is not None:
            raise NotFoundError("the names dataset and training_data are taken")
        begin, end = source.span(tensors)
        made = source.edited(inside, begin, end)
        at = source.line_start(statement.lineno)
        edits = [Edit(begin=at, end=at, text=f"{indent}{name} = {made}\n")]
    sampler = "RandomSampler" if shuffle.value else "SequentialSampler"
    generator = f"generator={source.piece(given['generator'])}" if "generator" in given else ""
    drawn = f"{sampler}({', '.join([name, *([generator] if generator and shuffle.value else [])])})"
    batch = source.piece(given["batch_size"]) if "batch_size" in given else "1"
    drop = source.piece(given["drop_last"]) if "drop_last" in given else "False"
    words_of = [name, f"sampler=BatchSampler({drawn}, {batch}, drop_last={drop})", "batch_size=None"]
    words_of += [generator] if generator else []
    words_of += [more.removeprefix(", ")] if more else []
    begin, end = source.span(call)
    line = f"{source.piece(call.func)}({', '.join(words_of)})"
    column = begin - source.line_start(call.lineno)
    if column + len(line) > WIDEST:
        line = f"{source.piece(call.func)}(\n" + "".join(f"{indent}    {one},\n" for one in words_of) + f"{indent})"
    return [*_imported(source, ("BatchSampler", sampler)), *edits, Edit(begin=begin, end=end, text=line)]


def _on_device(source: Source, tensors: ast.Call) -> list[Edit]:
    """Edits that copy the tensors of a dataset to the GPU."""
    plain = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
    if tensors.keywords or not all(isinstance(one, plain) for one in tensors.args):
        raise NotFoundError(f"line {tensors.lineno} does not name its tensors one by one")
    ends = [source.span(one)[1] for one in tensors.args]
    return [Edit(begin=end, end=end, text='.to("cuda")') for end in ends]


def _imported(source: Source, names: Iterable[str]) -> Iterator[Edit]:
    """The import of samplers, behind the others."""
    missing = [name for name in names if source.knows(name) != f"{DATA}.{name}"]
    taken = [name for name in missing if source.knows(name) is not None]
    if taken:
        raise NotFoundError(f"the script uses the name {taken[0]} for something else")
    if missing:
        at, _ = source.header()
        yield Edit(begin=at, end=at, text=f"from {DATA} import {', '.join(missing)}\n")
