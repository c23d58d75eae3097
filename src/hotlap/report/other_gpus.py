"""A training on the GPUs of the catalogue, predicted from the update that was counted while it was tuned."""

from __future__ import annotations

from hotlap.core.errors import HotlapError
from hotlap.core.ledger import Entry
from hotlap.core.units import show_bytes, show_seconds
from hotlap.machine.catalogue import CATALOGUE, GpuModel, find_gpu
from hotlap.machine.prediction import (
    AS_IT_IS_ERROR,
    AT_BEST_ERROR,
    MEASURED,
    Error,
    Work,
    as_it_is_s,
    at_best_s,
    best_format,
    work_in,
)
from hotlap.report.document import Block, Cell, Table, Text, seconds
from hotlap.report.reading import Training, listing, mapping, number


def on_other_gpus(training: Training, name: str = "") -> list[Block]:
    """A table of all GPUs that torch has kernels for; nothing where no update was counted."""
    found = _counted(training)
    if found is None:
        return []
    entry, work = found
    here, step_s, updates = _here(training), number(entry.figures.get("step_s")), _updates(training)
    correction = step_s / as_it_is_s(work, here) if here is not None and step_s else 1.0
    shown = [gpu for gpu in CATALOGUE if gpu.has_kernels]
    head = ("GPU", "update as it is", "at best", "in", "whole run as it is", "at best", "predictions there")
    rows: list[tuple[Cell, ...]] = []
    for gpu in shown:
        own, best = correction * as_it_is_s(work, gpu), at_best_s(work, gpu)
        whole = [None if updates is None else updates * one for one in (own, best)]
        compared = "measured" if gpu.key in MEASURED else "never measured"
        times = [seconds(one) for one in (own, best, *whole)]
        rows.append((gpu.name, *times[:2], best_format(gpu), *times[2:], compared))
    whose = f" of {name}" if name else ""
    said = (
        f"An update{whose} has {work.operations:,.0f} operations and reads and writes "
        f"{show_bytes(work.bytes + work.step_bytes)}. "
        f"Predicted times as it is are {_off(AS_IT_IS_ERROR)}, at best {_off(AT_BEST_ERROR)}; on GPUs that were never "
        "measured, at least that far off."
    )
    if correction != 1.0 and here is not None and step_s:
        said += f" The update took {show_seconds(step_s)} on this {here.name}, which corrects all times as it is."
    marked = (shown.index(here),) if here in shown else ()
    last = "At best: captured, in 16 bits if the GPU has them, held data, fused optimizer. Evaluations are left out."
    table = Table(title="Predicted time on other GPUs", head=head, rows=rows, marked=marked)
    return [Text(said), table, Text(last)]


def _counted(training: Training) -> tuple[Entry, Work] | None:
    """The first entry of the ledger that has a counted update."""
    known = ((entry, work_in(entry.figures)) for entry in training.ledger or ())
    return next(((entry, work) for entry, work in known if work is not None and work.operations), None)


def _here(training: Training) -> GpuModel | None:
    """The GPU of the catalogue that it ran on; None if that is not listed, or is pretended."""
    gpus = [mapping(one) for one in listing(training.environment.get("gpus"))]
    if training.environment.get("pretend") or not str(training.live.get("device")).startswith("cuda") or not gpus:
        return None
    try:
        return find_gpu(str(gpus[0].get("name")))
    except HotlapError:
        return None


def _updates(training: Training) -> float | None:
    planned = number(training.live.get("steps"))
    last = number(training.history[-1].get("step")) if training.history else None
    return planned or last


def _off(error: Error) -> str:
    return f"within {error.within:.2g}x in {error.works} trainings on an H200"
