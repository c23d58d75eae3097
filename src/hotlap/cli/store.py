"""`hotlap show`, `hotlap cache`, `hotlap pack` and `hotlap unpack`: what runs left, and taking one elsewhere."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotlap.cli.output import show, show_json
from hotlap.core.terminal import say

if TYPE_CHECKING:
    from hotlap.store.cache import Item
    from hotlap.store.run_folder import RunFolder

cache = typer.Typer(help="List, size, verify or prune what hotlap keeps from run to run.", rich_markup_mode=None)

_JSON = typer.Option(False, "--json", help="Print one JSON object and nothing else.")
_KIND = typer.Option(None, "--kind", metavar="KIND", help="Only entries of this kind, as the list names it.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("show")(show_run)
    app.command()(pack)
    app.command()(unpack)
    app.add_typer(cache, name="cache")


def show_run(
    run: Path = typer.Argument(metavar="RUN", help="The folder of the run."),
    as_json: bool = _JSON,
) -> None:
    """Show an earlier run again: its table, plan, last figures and files.

    A recipe's run has a table for each model and fold.
    """
    from hotlap.recipes.options import run_of
    from hotlap.store.run_folder import RunFolder

    inner = [] if (run / "plan.toml").is_file() else sorted(file.parent for file in run.glob("*/*/plan.toml"))
    folders = [RunFolder.open(path) for path in (inner if inner and run_of(run) == run else [run])]
    if as_json:
        show_json({"runs": [_figures(folder) for folder in folders]}, indent=2)
        return
    for number, folder in enumerate(folders):
        show(*[""] * bool(number), *_lines(folder))


def _figures(folder: RunFolder) -> dict[str, Any]:
    from hotlap.core.table import as_json

    return {
        "run": str(folder.path),
        "plan": folder.read_plan().to_dict(),
        "tuning": as_json(folder.read_ledger()),
        "last": _last_record(folder),
        "artefacts": [vars(artefact) for artefact in folder.artefacts()],
    }


def _lines(folder: RunFolder) -> list[str]:
    from hotlap.core.table import table
    from hotlap.core.terminal import columns
    from hotlap.core.units import show_bytes

    last = {name: value for name, value in _last_record(folder).items() if isinstance(value, (int, float))}
    return [
        *(table(folder.read_ledger(), columns(sys.stdout)) or ["nothing was tuned"]),
        "",
        *([] if (folder.path / "trees.json").is_file() else [f"plan      {folder.read_plan()}"]),  # networks have one
        *([f"last      {' · '.join(f'{name} {value:.4g}' for name, value in last.items())}"] if last else []),
        f"run       {folder.path}",
        *(f"          {show_bytes(file.bytes):>9}  {file.name:<18} {file.what}" for file in folder.artefacts()),
    ]


def _last_record(folder: RunFolder) -> dict[str, Any]:
    """The figures of the last evaluation; empty where there are none."""
    records = folder.read_metrics() if (folder.path / "metrics.jsonl").is_file() else []
    return records[-1] if records and isinstance(records[-1], dict) else {}


def pack(
    run: Path = typer.Argument(metavar="RUN", help="The folder of the run."),
    archive: Path | None = typer.Argument(None, metavar="ARCHIVE", help="The zip file to write; by default RUN.zip."),
    checkpoints: bool = typer.Option(False, "--checkpoints", help="Pack checkpoints too, to resume elsewhere."),
    as_json: bool = _JSON,
) -> None:
    """Pack a run folder into one compressed zip file.

    Take it to another machine, and unpack it there.
    """
    from hotlap.core.units import show_bytes
    from hotlap.recipes.options import run_of
    from hotlap.store import archives

    whole = run_of(run)
    if whole not in (None, run):
        say(f"hotlap: {run} is a single model of the run {whole}, which is packed")
    folder = whole or run
    folder = folder if folder.name else folder.absolute()  # the working folder has a name only there
    written = archives.pack(folder, archive or folder.with_name(f"{folder.name}.zip"), checkpoints=checkpoints)
    left = 0 if checkpoints else archives.checkpoint_bytes(folder)
    if left:
        say(f"hotlap: checkpoints of {show_bytes(left)} are left out; to resume elsewhere pack with --checkpoints")
    size = written.stat().st_size
    if as_json:
        show_json({"archive": str(written), "bytes": size})
    else:
        show(f"{written}  {show_bytes(size)}")


def unpack(
    archive: Path = typer.Argument(metavar="ARCHIVE", help="A zip file that `hotlap pack` has written."),
    folder: Path = typer.Argument(metavar="FOLDER", help="A new folder for the run."),
    as_json: bool = _JSON,
) -> None:
    """Unpack a run into a new folder.

    hotlap refuses an archive that would write anywhere else.
    """
    from hotlap.store import archives

    written = archives.unpack(archive, folder.absolute())
    if as_json:
        show_json({"folder": str(written)})
    else:
        where = shlex.quote(str(folder))
        is_finished = (written / "recipe.json").is_file()
        predict = f"predict with: hotlap predict {where} --data FILE --out FILE"
        show(folder, predict if is_finished else f"go on with: hotlap resume {where}")


@cache.callback(invoke_without_command=True)
def _cache(ctx: typer.Context, as_json: bool = _JSON) -> None:
    """List, size, verify or prune what hotlap keeps from run to run.

    The cache holds plans, features and trained models. Without a command: list.
    """
    if ctx.invoked_subcommand is None:
        list_entries(kind=None, as_json=as_json)


@cache.command("list")
def list_entries(kind: str | None = _KIND, as_json: bool = _JSON) -> None:
    """List every entry with its size, the latest used first."""
    from hotlap.core.units import show_bytes
    from hotlap.store.cache import Cache

    held = Cache()
    items = held.list(kind)
    if as_json:
        show_json({"root": str(held.root), "entries": [_row(item) for item in items]}, indent=2)
        return
    for item in items:
        show(f"{item.kind:<12} {item.key[:12]}  {show_bytes(item.bytes):>9}  {_ago(item.used_s):<16}  {_what(item)}")
    show(f"{len(items)} entries, {show_bytes(sum(item.bytes for item in items))} in {held.root}")


@cache.command()
def size(kind: str | None = _KIND, as_json: bool = _JSON) -> None:
    """Show how much room the entries take."""
    from hotlap.core.units import show_bytes
    from hotlap.store.cache import Cache

    held = Cache()
    total = held.size(kind)
    if as_json:
        show_json({"root": str(held.root), "bytes": total})
    else:
        show(f"{show_bytes(total)} in {held.root}")


@cache.command()
def verify(
    kind: str | None = _KIND,
    remove: bool = typer.Option(False, "--remove", help="Remove damaged entries; hotlap makes them again when needed."),
    as_json: bool = _JSON,
) -> None:
    """Read every byte of every entry.

    Exit code 1: some entries are damaged.
    """
    from hotlap.store.cache import Cache

    held = Cache()
    damaged = held.verify(kind, remove=remove)
    if as_json:
        rows = [{"path": str(one.path), "why": one.why} for one in damaged]
        show_json({"root": str(held.root), "damaged": rows, "removed": remove}, indent=2)
    else:
        for one in damaged:
            show(f"{'removed' if remove else 'damaged'}: {one.path}: {one.why:.100}")
        cure = "; remove them with --remove" if damaged and not remove else ""
        show(f"{len(damaged)} damaged{cure}")
    raise typer.Exit(1 if damaged else 0)


@cache.command()
def prune(
    keep: str | None = typer.Option(
        None, "--keep", metavar="SIZE", help="Keep at most this much, such as 10GB or 500MB."
    ),
    older_than: str | None = typer.Option(
        None, "--older-than", metavar="TIME", help="Remove entries not used for this long, such as 30d, 12h or 90m."
    ),
    kind: str | None = _KIND,
    as_json: bool = _JSON,
) -> None:
    """Remove entries, the least recently used first.

    --keep 0 removes all.
    """
    from hotlap.core.units import show_bytes
    from hotlap.store.cache import Cache

    if keep is None and older_than is None:
        raise typer.BadParameter("say what to keep: --keep SIZE, --older-than TIME, or both")
    most = None if keep is None else int(_amount(keep, _SIZES, "--keep", "10GB"))
    age = None if older_than is None else _amount(older_than, _TIMES, "--older-than", "30d")
    held = Cache()
    removed = held.prune(most, age, kind)
    total = sum(item.bytes for item in removed)
    if as_json:
        show_json({"root": str(held.root), "removed": [_row(item) for item in removed], "bytes": total}, indent=2)
    else:
        show(f"removed {len(removed)} entries, {show_bytes(total)}")


_SIZES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_SIZES |= {"kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _amount(text: str, units: Mapping[str, float], option: str, example: str) -> float:
    """A number with its unit, as people write them."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([a-z]*)", text.strip().lower())
    if found is None or found[2] not in units:
        raise typer.BadParameter(f"{text!r:.40} is no amount; write it as in {option} {example}")
    return float(found[1]) * units[found[2]]


def _row(item: Item) -> dict[str, Any]:
    return {"kind": item.kind, "key": item.key, "bytes": item.bytes, "used_s": item.used_s, "facts": item.facts}


def _ago(then_s: float) -> str:
    from hotlap.core.units import show_seconds

    return f"{show_seconds(max(0, round(time.time() - then_s)))} ago" if then_s else "gone"


def _what(item: Item) -> str:
    return "  ".join(f"{name} {value}" for name, value in item.facts.items() if isinstance(value, str | int))[:100]
