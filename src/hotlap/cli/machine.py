"""`hotlap doctor` and `hotlap gpus`: this machine, and the catalogue of GPUs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import typer

from hotlap.cli.kit import MODULE, QUIET, on_every_gpu
from hotlap.cli.output import show, show_json

if TYPE_CHECKING:
    from hotlap.machine import DtypeFact, Problem, Report
    from hotlap.machine.doctor import GpuReport

_WIDTH: Final = 79
_INDENT: Final = 11


def register(app: typer.Typer) -> None:
    """Add the commands of this room."""
    app.command("doctor")(doctor)
    app.command("gpus", context_settings={"allow_interspersed_args": False})(gpus)


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object and nothing else."),
    pretend: str = typer.Option(
        None, "--pretend", metavar="GPU", help="Act as this GPU (see `hotlap gpus`); also HOTLAP_PRETEND."
    ),
    require_gpu: bool = typer.Option(False, "--require-gpu", help="Count a machine without a working GPU as not fit."),
) -> None:
    """Check this machine, and say what is wrong and what to do.

    The doctor runs one kernel per device and number format. Exit code 0: fit to train; 1: not fit.
    """
    from hotlap.machine import examine

    _check(pretend)
    report = examine(pretend, require_gpu=require_gpu)
    if as_json:
        show_json(report.as_json(), indent=2)
    else:
        show(*_report_lines(report))
    raise typer.Exit(0 if report.fit else 1)


def _check(pretend: str | None) -> None:
    from hotlap.core.errors import MachineError, UsageError
    from hotlap.machine import find_gpu

    try:
        if pretend is not None:
            find_gpu(pretend)
    except MachineError as error:
        raise UsageError(str(error)) from None


def gpus(
    training: list[str] = typer.Argument(
        None, metavar="[TRAINING]", help="With --job: a training, named as for `hotlap memory`."
    ),
    job: bool = typer.Option(False, "--job", help="Predict the time of TRAINING on each GPU, and whether it fits."),
    module: bool = MODULE,
    seconds: float = typer.Option(
        120.0, "--seconds", min=1.0, metavar="SECONDS", help="Most seconds to wait for a script's first update."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object and nothing else."),
    pretend: str = typer.Option(
        None, "--pretend", metavar="GPU", help="Mark this GPU as the pretended one; also HOTLAP_PRETEND."
    ),
    quiet: bool = QUIET,
) -> None:
    """List known GPUs: memory, bandwidth, rates, formats.

    A mark shows which of them are in this machine. With --job hotlap makes some updates of a training, counts their
    work, and predicts its time on each GPU.
    """
    from hotlap.core.errors import UsageError

    if job:
        if pretend:
            raise UsageError("--pretend marks a GPU in the list; to count as on one, set HOTLAP_PRETEND")
        on_every_gpu(training, module, seconds=seconds, as_json=as_json, quiet=quiet)
        return
    if training or module:
        named = " ".join(training or ["MODULE"])
        raise UsageError(f"to predict the time of {named!r:.60} on each GPU: hotlap gpus --job TRAINING")
    from hotlap.machine import CATALOGUE, detect

    _check(pretend)
    machine = detect(pretend)
    here = {gpu.model for gpu in machine.gpus}
    acting = machine.pretended.key if machine.pretended else None
    entries = [{**model.as_json(), "here": model.key in here, "pretended": model.key == acting} for model in CATALOGUE]
    if as_json:
        unlisted = [gpu.name for gpu in machine.gpus if gpu.model is None]
        show_json({"gpus": entries, "here_but_not_listed": unlisted}, indent=2)
        return
    show(*_catalogue_lines(entries))
    for gpu in machine.gpus:
        if gpu.model is None:
            show(f"here, and not in the catalogue: {gpu.name}")


def _catalogue_lines(entries: list[dict[str, Any]]) -> Iterator[str]:
    yield "                                  memory        dense TFLOPS"
    yield "  key      architecture   cc   GiB   GB/s    fp32   tf32   bf16   fp16"
    marks = set()
    for entry in entries:
        mark = "*" if entry["here"] else ">" if entry["pretended"] else " "
        marks.add(mark)
        rates = "".join(f"{_tera(rate):>7}" for rate in entry["flops"].values())
        yield (
            f"{mark} {entry['key']:<9}{entry['architecture']:<14}{entry['compute_capability']:>3}"
            f"{entry['memory_bytes'] / 1024**3:>6.0f}{entry['bandwidth_bytes_per_s'] / 1e9:>7.0f} {rates}"
        )
    yield ""
    yield from textwrap.wrap(
        "Peak rates as published, without sparsity; fp16 with fp32 accumulation. '-': not in hardware "
        "(bf16 is emulated on Volta and Turing, and missing on Pascal). The P100 has no tensor cores, "
        "and default builds of torch have no kernels for the P100 and the V100 any more.",
        width=_WIDTH,
    )
    yield "* here" if "*" in marks else "none of these is here"
    if ">" in marks:
        yield "> pretended"
    yield ""
    yield "Sources:"
    for entry in entries:
        yield from _wrapped(f"  {entry['key']}", entry["source"])


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:.4g}"


def _report_lines(report: Report) -> Iterator[str]:
    """The report in plain lines of less than 80 columns, problems last, the verdict at the very end."""
    from hotlap.core.units import show_bytes

    machine = report.machine
    versions = report.as_json()["versions"]
    acting = f", acting as {machine.pretended.name}" if machine.pretended else ""
    yield f"hotlap {versions['hotlap']} doctor{acting}"
    yield ""
    for gpu in report.gpus:
        yield from _gpu_lines(gpu)
    if not report.gpus:
        yield from _wrapped("GPU", "none that torch can use")
    cores = f"{machine.cpu.cores} of {machine.cpu.host_cores} cores, {machine.cpu.model}"
    yield from _wrapped("CPU", cores)
    if report.cpu_facts:
        yield from _wrapped("", _formats(report.cpu_facts))
    if machine.pretended and not report.gpus and report.facts:
        yield from _wrapped("acting as", f"{machine.pretended.name}: {_formats(report.facts)}")
    memory = machine.memory
    limit = "" if memory.allowed_bytes == memory.host_bytes else f" (host: {show_bytes(memory.host_bytes)})"
    yield from _wrapped("memory", f"{show_bytes(memory.free_bytes)} free of {show_bytes(memory.allowed_bytes)}{limit}")
    if report.shm:
        free, total = show_bytes(report.shm.free_bytes), show_bytes(report.shm.total_bytes)
        yield from _wrapped("/dev/shm", f"{free} free of {total}")
    yield from _wrapped("disk", _disk(report))
    tools = report.tools
    yield from _wrapped(
        "compiler",
        f"{tools.compiler or 'no C compiler'}, {f'Triton {tools.triton}' if tools.triton else 'no Triton'}"
        f"{'' if tools.headers else ', no Python headers'}",
    )
    if machine.runtime:
        hours = f", sessions of {machine.runtime.limit_s // 3600} h" if machine.runtime.limit_s else ""
        yield from _wrapped("runtime", f"{machine.runtime.name}{' with a TPU' if machine.runtime.tpu else ''}{hours}")
    yield from _wrapped(
        "versions",
        f"Python {versions['python']}, torch {versions['torch']}, CUDA build {versions['cuda'] or 'none'}, "
        f"cuDNN {versions['cudnn'] or 'none'}, driver {versions['driver'] or 'none'}, "
        f"numpy {versions['numpy']}",
    )
    yield from _wrapped("system", str(versions["os"]))
    for name, value in report.variables.items():
        yield from _wrapped("variable", f"{name}={value}")
    yield ""
    for problem in report.problems:
        yield from _problem_lines(problem)
    verdict = f"{report.verdict[0].upper()}{report.verdict[1:]}."
    yield from textwrap.wrap(verdict, width=_WIDTH, break_on_hyphens=False)


def _gpu_lines(report: GpuReport) -> Iterator[str]:
    from hotlap.core.units import show_bytes

    gpu = report.gpu
    free = "" if report.free_bytes is None else f", {show_bytes(report.free_bytes)} free"
    busy = "" if report.utilisation is None else f", {report.utilisation} % busy"
    yield from _wrapped(
        f"GPU {gpu.index}",
        f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
        f"{show_bytes(gpu.memory_bytes)}{free}{busy}",
    )
    if gpu.usable_bytes < gpu.memory_bytes:
        yield from _wrapped("", f"capped at {show_bytes(gpu.usable_bytes)}")
    yield from _wrapped("", _formats(report.facts))
    failed = {fact.reason for fact in report.facts.values() if fact.kernel == "failed"}
    for reason in sorted(failed):
        yield from _wrapped("", f"kernel failed: {reason}")


def _formats(facts: Mapping[str, DtypeFact]) -> str:
    return ", ".join(f"{name} {fact.support}" for name, fact in facts.items())


def _disk(report: Report) -> str:
    from hotlap.core.units import show_bytes

    free = f"{show_bytes(report.disk.free_bytes)} free here" if report.disk else "unknown room"
    write, read = report.speed.write_bytes_per_s, report.speed.read_bytes_per_s
    if write is None or read is None:
        return f"{free}, not writable"
    return f"{free}, writes {show_bytes(write)}/s, reads {show_bytes(read)}/s"


def _problem_lines(problem: Problem) -> Iterator[str]:
    yield from _wrapped(str(problem.severity), problem.what)
    yield from _wrapped("", problem.costs, "costs: ")
    yield from _wrapped("", problem.do, "do: ")
    yield ""


def _wrapped(label: str, text: str, lead: str = "") -> list[str]:
    """`label` in its column, the text beside it, broken to fit the width."""
    indent = " " * _INDENT
    return textwrap.wrap(
        f"{lead}{text}",
        width=_WIDTH,
        initial_indent=f"{label:<{_INDENT}}" if label else indent,
        subsequent_indent=indent + " " * len(lead),
        break_on_hyphens=False,
    )
