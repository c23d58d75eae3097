"""Whether bf16 is let through for networks that train well in it, early enough to pay, and whether scores stay.

    python -m benchmarks.precision [--seconds 25] [--only NAME …] [--gate | --seeds N] [--device cuda|cpu] [--json FILE]

Each network trains for as many steps as take `--seconds` as the user brings it (a DataLoader without workers, fp32,
plain AdamW), once by `hotlap.fit(job, plan="auto")` from an empty cache. The line gives what came of bf16, after which
step, and what the whole call took. With `--gate` only the gate judges bf16, after 3 and after 20 updates. With
`--seeds` the chosen networks are trained from so many first weights, as they are and tuned; their losses and
accuracies on samples that were held out are compared.

Exit code 1 where bf16 was not kept, or where tuned scores are outside the band of the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hotlap
from benchmarks.networks import NETWORKS
from benchmarks.rivals import switches
from benchmarks.versions import versions
from benchmarks.whole_run import FEW_STEPS
from benchmarks.work import Normalise, Work, called
from hotlap.core.table import rows, table
from hotlap.core.units import show_seconds
from hotlap.moves import PRECISION
from hotlap.tuner.gates import Gate
from hotlap.tuner.stats import student_t

GATED_AFTER = (3, 20)
"""Updates after which the gate is asked: gradients are at their worst at first weights."""


@contextmanager
def empty_cache() -> Iterator[Path]:
    """A folder for runs, and a cache in which nothing is known."""
    with tempfile.TemporaryDirectory(prefix="hotlap-precision-", ignore_cleanup_errors=True) as folder:
        before = os.environ.get("HOTLAP_CACHE")
        os.environ["HOTLAP_CACHE"] = str(Path(folder) / "cache")
        try:
            yield Path(folder)
        finally:
            os.environ.pop("HOTLAP_CACHE")
            if before is not None:
                os.environ["HOTLAP_CACHE"] = before


def fitted(work: Work, device: torch.device, *, steps: int, plan: str, seed: int = 0) -> dict[str, Any]:
    """One call of `fit` from call to return, and the scores of the model it gives."""
    torch.manual_seed(seed)
    model = work.model().to(device)
    job = hotlap.Job(
        model=model,
        loss=work.loss,
        optimizer=work.optimizer(model),
        steps=steps,
        seed=seed,
        prepare=Normalise(device) if work.images else None,
        device=str(device),
        **work.brought(drop_last=False),
    )
    with empty_cache() as folder:
        began = time.perf_counter()
        run = hotlap.fit(job, plan=plan, out=folder / "run", progress=False)
        took = time.perf_counter() - began
    found = {"plan": plan, "seed": seed, "seconds": took, "steps": run.steps, "in_force": str(run.plan)}
    # The plan at every step is in the ledger: the first entry that settles on bf16 is when it paid from.
    since = [e.step for e in run.ledger if e.outcome in ("chosen", "kept") and e.plan.numerics.precision == "bf16"]
    bf16 = next((row for row in rows(run.ledger) if PRECISION.name in row.what), None)
    found |= {"bf16": run.plan.numerics.precision == "bf16", "since": min(since, default=None)}
    found |= {"why": f"{bf16.outcome}: {bf16.why}" if bf16 is not None else "", "table": table(run.ledger, 116)}
    return {**found, **scores(work, run.model, device)}


def scores(work: Work, model: torch.nn.Module, device: torch.device) -> dict[str, float]:
    """Loss and accuracy on the samples that were held out, in fp32 whatever the plan was."""
    model.eval()
    loss = right = count = 0.0
    with torch.no_grad(), switches(tf32=False, cudnn_tf32=False, benchmark=False):
        for (x, y), samples in work.held_batches(device):
            for some, truth in zip(x.split(256), y.split(256), strict=True):
                made = model(some)
                loss += float(torch.nn.functional.cross_entropy(made, truth, reduction="sum"))
                right += float((made.argmax(1) == truth).sum())
            count += samples
    return {"loss": loss / count, "accuracy": right / count}


def steps_in(work: Work, device: torch.device, seconds: float) -> int:
    """How many steps of the user's own plan take so long."""
    fitted(work, device, steps=3, plan="off")  # kernels are loaded
    taken = [fitted(work, device, steps=steps, plan="off")["seconds"] for steps in (FEW_STEPS, 3 * FEW_STEPS)]
    return round(seconds / ((taken[1] - taken[0]) / (2 * FEW_STEPS)))


def gated(work: Work, device: torch.device) -> dict[str, Any]:
    """What the gate says of bf16 after some updates, and how long it takes to say so."""
    torch.manual_seed(0)
    prepare = Normalise(device) if work.images else None
    model = work.model()
    rig = hotlap.Rig(model, work.optimizer(model), work.loss, device=str(device), prepare=prepare)
    windows = rig.feed(work.brought(drop_last=False)["data"], epochs=100)
    found: dict[str, Any] = {"ok": True, "said": {}}
    for updates in GATED_AFTER:
        while rig.steps < updates:
            rig.advance(next(windows))
        rig.wait()
        began = time.perf_counter()
        judged = Gate(rig, rig.plan).check(rig.plan.but(precision="bf16", layout=work.layout))
        took_s = time.perf_counter() - began
        found["said"][updates] = {"ok": judged.ok, "why": judged.why, "seconds": took_s, **judged.figures}
        found["ok"] &= judged.ok
    rig.close()
    return found


def let_through(work: Work, device: torch.device, seconds: float) -> dict[str, Any]:
    """What came of bf16 in one run."""
    steps = steps_in(work, device, seconds)
    return fitted(work, device, steps=steps, plan="auto")


def band(work: Work, device: torch.device, seconds: float, seeds: int) -> dict[str, Any]:
    """Scores of tuned trainings beside those as the user brings them, from the same first weights."""
    steps = steps_in(work, device, seconds)
    runs = [fitted(work, device, steps=steps, plan=plan, seed=s) for s in range(seeds) for plan in ("off", "auto")]
    found: dict[str, Any] = {"runs": [{**run, "table": None} for run in runs], "outside": []}
    for score in ("loss", "accuracy"):
        own, tuned = ([run[score] for run in runs if run["plan"] == plan] for plan in ("off", "auto"))
        spread = math.hypot(*(statistics.stdev(one) for one in (own, tuned))) / math.sqrt(seeds)
        apart = statistics.mean(tuned) - statistics.mean(own)
        room = student_t(2 * seeds - 2, 0.05) * spread
        found[score] = {"own": own, "tuned": tuned, "apart": apart, "room": room}
        if not min(own) <= statistics.mean(tuned) <= max(own) and abs(apart) > room:
            found["outside"].append(score)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0, help="that a run takes as the user brings it")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="words in networks' names")
    parser.add_argument("--gate", action="store_true", help="only ask the gate")
    parser.add_argument("--seeds", type=int, default=0, help="first weights of which scores are compared; at least 2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    wanted, device = called(NETWORKS, *options.only), torch.device(options.device)
    if not wanted or options.seeds == 1:
        print(f"choose of {'; '.join(work.name for work in NETWORKS)}; and two seeds or more", file=sys.stderr)
        return 2
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"precision on {where}, {', '.join(f'{name} {one}' for name, one in versions().items())}", flush=True)
    results: dict[str, Any] = {}
    failed = False
    for work in wanted:
        if options.gate:
            found = gated(work, device)
            for updates, said in found["said"].items():
                took = show_seconds(said["seconds"])
                outcome = "let through" if said["ok"] else "refused"
                print(f"{work.name}: {outcome} after {updates} updates: {said['why']} ({took})", flush=True)
            failed |= not found["ok"]
        elif options.seeds:
            found = band(work, device, options.seconds, options.seeds)
            for score in ("loss", "accuracy"):
                own, tuned = (" ".join(f"{one:.4f}" for one in found[score][side]) for side in ("own", "tuned"))
                apart = f"apart by {found[score]['apart']:+.4f}, within {found[score]['room']:.4f} by chance"
                print(f"{work.name}: {score} as it is {own}; tuned {tuned}; {apart}", flush=True)
            tuned, own = ([run for run in found["runs"] if run["plan"] == plan] for plan in ("auto", "off"))
            took, plain = (statistics.median(run["seconds"] for run in runs) for runs in (tuned, own))
            kept = sum(run["bf16"] for run in tuned)
            within = f"{show_seconds(took)} in place of {show_seconds(plain)}, in the middle"
            print(f"{work.name}: bf16 in force at the end of {kept} of {len(tuned)} tuned runs; {within}", flush=True)
            failed |= bool(found["outside"]) or kept < len(tuned)
        else:
            found = let_through(work, device, options.seconds)
            since = f"from step {found['since']:,} of {found['steps']:,}" if found["bf16"] else "not used"
            took = f"{show_seconds(found['seconds'])} in place of {options.seconds:g} s"
            print(f"{work.name}: bf16 {since}; {took}; {found['why']}", flush=True)
            if not found["bf16"]:
                print("\n".join(f"    {line}" for line in found["table"]), flush=True)
            failed |= not found["bf16"]
        results[work.name] = found
        if options.json:
            options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
