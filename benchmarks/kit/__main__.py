"""Whether the kit answers right: its batch, its memory account, its workers, and training from JPEG files.

    python -m benchmarks.kit [--only PART …] [--quick] [--device cpu|cuda] [--files 20000] [--json FILE]

- batch: under the memory of a T4, for ResNet-18 and an encoder of BERT-base's size: does the largest batch train and
  one sample more fail, each in a plain loop in a process of its own, and is the fastest within 3 % of a sweep;
- memory: does the account add up to the allocator's peak within 5 %;
- workers: for data in memory and for a slow dataset, against loops over a plain DataLoader with every count;
- jpeg: files decoded once, then samples/s of training with hotlap against the same step with its batch at hand (at
  least 0.9), and against Lightning with its best count of workers (at least 2.5x).

- catalogue: the bytes a sample of every example in `hotlap.kit.start_size`, counted again on the CPU and compared.

Each part takes less than 10 minutes on an H200. A requirement is `kept` or `broken`; exit code 1 where one is broken.
`--quick` makes all of it small: it shows that the benchmark runs, and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.kit.examples import catalogue_rows
from benchmarks.kit.jpeg import jpeg_rows
from benchmarks.kit.rows import Options, Row
from benchmarks.kit.sizes import batch_rows, memory_rows
from benchmarks.kit.workers import workers_rows
from hotlap.machine.limits import read_cpu

PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "batch": batch_rows,
    "memory": memory_rows,
    "workers": workers_rows,
    "jpeg": jpeg_rows,
    "catalogue": catalogue_rows,
}


def main() -> int:
    """Run the parts that are asked for, and tell what is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = Options(device=given.device, quick=given.quick, files=given.files)
    rows: list[Row] = []
    for part in given.only:
        for row in PARTS[part](options):
            rows.append(row)
            print(f"{'kept' if row.kept else 'BROKEN':<7} {row.part:<8} {row.what}: {row.seen}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if given.json is not None:
        where = torch.cuda.get_device_name() if options.device != "cpu" else read_cpu().model
        told = {"machine": where, "torch": torch.__version__, "quick": options.quick, "rows": [asdict(r) for r in rows]}
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(any(not row.kept for row in rows))


if __name__ == "__main__":
    sys.exit(main())
