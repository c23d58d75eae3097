"""Public training scripts, unchanged, by themselves and under `hotlap run`, in turns.

    python -m benchmarks.strangers --folder DIR --fetch-from MIRRORS [--only NAME …]   lay the scripts out, run nothing
    python -m benchmarks.strangers --folder DIR [--only NAME …] [--pairs 3] [--plan auto …] [--seconds 300] [--tiny]
                                   [--total S] [--other-seed] [--json FILE] [--logs DIR] [--options WORDS]
    python -m benchmarks.strangers --folder DIR --list

`strangers.toml` describes the scripts: repository, commit, command, data. The scripts themselves are not part of this
repository: `--fetch-from` takes them out of local git directories (MIRRORS/owner+name, MIRRORS/owner/name or
MIRRORS/name). A folder may have a strangers.toml of its own; without one, each .py file in it is run without arguments.
All data is made on the spot, from seeds; nothing needs a network.

Each process gets a fresh copy of the script's folder, a fresh cache of hotlap's and of torch.compile's, and is timed
from start to exit. In each round the script runs once by itself and once under each `--plan`; the order alternates from
round to round. The ratio is the median over rounds of seconds by itself over seconds under hotlap, with the lowest and
the highest. Exit codes, names and hashes of written files, and printed figures (times and speeds taken out) are
compared: exactly, or with what two runs by themselves differ by. With `--other-seed`, where figures lie further apart,
the script runs once more by itself with another seed.

Exit code: 1 where a script fails by itself, or exit codes, files or figures differ by more than that;
2 for a folder that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.strangers import makers
from benchmarks.strangers.comparing import Verdict, compare_figures, compare_files, without_times
from benchmarks.strangers.running import ALONE, Ran, run_once, warm_up
from benchmarks.strangers.scripts import DESCRIPTION, FolderError, Stranger, lay_out, read_folder
from benchmarks.versions import versions

WIDTHS = (22, 8, 8, 19)
SHOWN = 200
"""Characters of hotlap's line in the table."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print."""
    options = parsed(arguments)
    try:
        if options.fetch_from is not None:
            laid, missing = lay_out(options.fetch_from, options.folder, options.only)
            report(*missing, f"laid out in {options.folder}: {', '.join(laid) or 'nothing'}")
            return int(bool(missing))
        strangers = chosen(read_folder(options.folder), options.only)
    except FolderError as error:
        report(str(error))
        return 2
    if options.list:
        for one in strangers:
            print(f"{one.name:<18} about {one.seconds:3.0f} s  {one.repository or 'this folder'}  {one.command}")
        return 0
    facts: dict[str, Any] = {"versions": versions(), "tiny": options.tiny, "pairs": options.pairs, "scripts": {}}
    failed = False
    with tempfile.TemporaryDirectory(prefix="strangers-data-", ignore_cleanup_errors=True) as scratch:
        print(header(), flush=True)
        for one in strangers:
            if not options.tiny and time.monotonic() + (1 + len(options.plan)) * one.seconds > options.ends:
                report(f"{one.name}: left out, since a round takes longer than what is left of --total")
                continue
            found = compare(one, options, Path(scratch))
            facts["scripts"][one.name] = found
            failed |= not found["same"]
            if options.json is not None:
                options.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False))
    for plan in options.plan:
        ratios = {
            name: found["plans"][plan]["ratio"]
            for name, found in facts["scripts"].items()
            if found["plans"] and found["plans"][plan]["exit"]["same"]
        }
        if not ratios:
            continue
        whole = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values()))
        lowest = min(ratios, key=lambda name: ratios[name])
        print(
            f"\n{plan}: geometric mean {whole:.2f}x of {len(ratios)} scripts, lowest {ratios[lowest]:.2f}x ({lowest})"
        )
    return int(failed)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.strangers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help=f"scripts, with a {DESCRIPTION} or without")
    parser.add_argument("--fetch-from", type=Path, help="git directories to lay the folder out from")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--pairs", type=int, default=3, help="rounds for each script (default: 3)")
    parser.add_argument("--plan", nargs="+", default=["auto"], help="plans of hotlap (default: auto)")
    parser.add_argument("--options", type=shlex.split, default=[], help="more options of hotlap run, in one word")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of one process (default: 300)")
    parser.add_argument(
        "--total", type=float, default=math.inf, help="seconds in all: no round is begun that takes longer"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--other-seed", action="store_true", help="where figures differ, compare with another seed")
    parser.add_argument("--json", type=Path, help="write everything here, after each script")
    parser.add_argument("--logs", type=Path, help="write what each process printed into this folder")
    parser.add_argument("--list", action="store_true", help="list the scripts")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs}: at least 1 is needed")
    options.folder = options.folder.resolve()
    options.ends = time.monotonic() + options.total
    return options


def chosen(strangers: list[Stranger], only: list[str]) -> list[Stranger]:
    """Pick scripts by name, in the order of the names."""
    by_name = {one.name: one for one in strangers}
    if unknown := [name for name in only if name not in by_name]:
        raise FolderError(f"--only {' '.join(unknown)}: not in this folder; it has {', '.join(by_name)}")
    return [by_name[name] for name in only] or strangers


def compare(one: Stranger, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run one script in turns, print its rows and return what was found."""
    data = made_data(one, options.tiny, scratch)
    warm_up(one, scratch)
    kinds = [ALONE, *options.plan]
    runs: dict[str, list[Ran]] = {kind: [] for kind in kinds}

    def run(kind: str, *, other_seed: bool = False) -> Ran:
        words = one.words(tiny=options.tiny, other_seed=other_seed)
        more = options.options if kind != ALONE else []
        ran = run_once(one, kind, words, data=data, options=more, limit_s=options.seconds)
        report(f"{one.name}: {'another seed' if other_seed else kind} {ran.seconds:.1f} s, exit code {ran.code}")
        if ran.code != 0:
            report(*(f"    {line}" for line in ran.err.splitlines()[-12:]))
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            at = f"{one.name}-{len(runs[kind])}-{'seed' if other_seed else kind.replace('/', '_')}"
            (options.logs / f"{at}.out").write_text(ran.out)
            (options.logs / f"{at}.err").write_text(ran.err)
        return ran

    for turn in range(options.pairs):
        begun = time.monotonic()
        for kind in kinds if turn % 2 == 0 else reversed(kinds):
            runs[kind].append(run(kind))
            if turn == 0 and kind == ALONE and runs[ALONE][0].code != 0:
                return fails_by_itself(one, runs[ALONE][0])
        if 2 * time.monotonic() - begun > options.ends:
            break
    alone = runs[ALONE]
    plans: dict[str, Any] = {}
    seeded: str | None = None
    for plan in options.plan:
        under = runs[plan]
        texts = [[without_times(ran.figures, one.ignore) for ran in part] for part in (alone, under)]
        figures = compare_figures(*texts)
        if not figures.same and options.other_seed and one.seed:
            if seeded is None:
                seeded = without_times(run(ALONE, other_seed=True).figures, one.ignore)
            figures = compare_figures(*texts, seeded)
        verdicts = {
            "exit": compare_codes(alone, under),
            "files": compare_files([ran.files for ran in alone], [ran.files for ran in under]),
            "figures": figures,
        }
        ratios = [a.seconds / h.seconds for a, h in zip(alone, under, strict=True)]
        plans[plan] = {
            "alone_s": statistics.median(ran.seconds for ran in alone),
            "hotlap_s": statistics.median(ran.seconds for ran in under),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "said": said(under[-1]),
            **{name: asdict(verdict) for name, verdict in verdicts.items()},
        }
        print(row(one.name if len(options.plan) == 1 else f"{one.name} {plan}", plans[plan], verdicts), flush=True)
    return {
        "repository": one.repository,
        "commit": one.commit,
        "command": " ".join(one.words(tiny=options.tiny)),
        "same": all(found[part]["same"] for found in plans.values() for part in ("exit", "files", "figures")),
        "plans": plans,
        "runs": [told(ran) for kind in kinds for ran in runs[kind]],
    }


def fails_by_itself(one: Stranger, ran: Ran) -> dict[str, Any]:
    """Tell that there is nothing to compare."""
    last = next((line for line in reversed(ran.err.splitlines()) if line.strip()), "")
    print(f"{one.name:<{WIDTHS[0]}} fails by itself, exit code {ran.code}: {last[:SHOWN]}", flush=True)
    return {"repository": one.repository, "commit": one.commit, "same": False, "plans": {}, "runs": [told(ran)]}


def made_data(one: Stranger, tiny: bool, scratch: Path) -> Path | None:
    """Make the data of a script; scripts that ask for the same share it."""
    if not one.data:
        return None
    arguments = one.data_arguments(tiny=tiny)
    name = makers.name_of(one.data["maker"], one.data.get("into", "."), arguments)
    folder = scratch / name
    if not folder.exists():
        begun = time.perf_counter()
        makers.make(one.data["maker"], folder / one.data.get("into", "."), arguments)
        report(f"{one.name}: data made in {time.perf_counter() - begun:.1f} s")
    return folder


def compare_codes(alone: list[Ran], hotlap: list[Ran]) -> Verdict:
    """Compare exit codes."""
    by_itself, under = ({ran.code for ran in part} for part in (alone, hotlap))
    if by_itself != under:
        return Verdict(False, f"EXIT {shown(by_itself)} by itself, {shown(under)} under hotlap")
    return Verdict(by_itself == {0}, f"exit {shown(under)}")


def shown(codes: set[int | str]) -> str:
    """Exit codes for people."""
    return " or ".join(sorted(str(code) for code in codes))


def said(ran: Ran) -> str:
    """The line that sums up what hotlap did."""
    return next((line.partition(": ")[2] for line in ran.lines if line.startswith("hotlap: ")), "nothing")


def told(ran: Ran) -> dict[str, Any]:
    """What the JSON file keeps of a run."""
    last = without_times(ran.out).splitlines()[-8:]
    return {
        "kind": ran.kind,
        "seconds": ran.seconds,
        "code": ran.code,
        "last_lines": [line[-300:] for line in last],
        "files": ran.files,
        "hotlap": ran.lines,
        "error": ran.err.splitlines()[-12:] if ran.code != 0 else [],
    }


def header() -> str:
    """The first row of the table."""
    names = ("script", "alone", "hotlap", "ratio")
    return "".join(f"{name:<{width}} " for name, width in zip(names, WIDTHS, strict=True)) + "exit; files; figures"


def row(name: str, found: dict[str, Any], verdicts: dict[str, Verdict]) -> str:
    """One script of the table, and below it what hotlap said."""
    spread = f"{found['ratio']:.2f}x [{min(found['ratios']):.2f}, {max(found['ratios']):.2f}]"
    cells = (name, f"{found['alone_s']:.1f} s", f"{found['hotlap_s']:.1f} s", spread)
    left = "".join(f"{cell:<{width}} " for cell, width in zip(cells, WIDTHS, strict=True))
    return left + "; ".join(verdict.words for verdict in verdicts.values()) + f"\n    {found['said'][:SHOWN]}"


def report(*lines: str) -> None:
    """Tell how far it is, on stderr."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
