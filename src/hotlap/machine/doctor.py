"""The doctor: checks the machine, runs a kernel on every device, and says whether it is fit to train."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from hotlap.core.errors import first_few
from hotlap.core.units import MIB, show_bytes
from hotlap.machine.cuda import Cuda, Driver, GpuProcess
from hotlap.machine.detect import Gpu, Machine, World, assemble, driver_gpu, pretended_gpu
from hotlap.machine.device import cpu_facts, facts_on, pretended_or, why_kernel_failed, why_no_gpu
from hotlap.machine.disk import DiskSpeed, Room, disk_problems, shm_problems
from hotlap.machine.dtypes import DtypeFact
from hotlap.machine.host import host_problems
from hotlap.machine.limits import why_timings_are_off
from hotlap.machine.problems import Problem, Severity, worst_first
from hotlap.machine.runtimes import runtime_problems
from hotlap.machine.variables import recorded, variable_problems
from hotlap.machine.versions import Toolchain, private_problems, read_toolchain, version_problems, versions

_CONTEXT: Final = 1024 * MIB
"""What CUDA itself may hold on an idle GPU."""


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """One GPU, as it is now."""

    gpu: Gpu
    free_bytes: int | None
    utilisation: int | None
    others: tuple[GpuProcess, ...] | None
    """Processes on it other than this one; None where the driver does not say."""
    unseen_bytes: int
    """Memory that no process in the driver's list holds: processes of other containers do."""
    facts: dict[str, DtypeFact]

    @property
    def works(self) -> bool:
        """Whether its fp32 kernel ran."""
        return self.facts["fp32"].kernel == "ran"

    def as_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        gpu = self.gpu
        return {
            "index": gpu.index,
            "device": gpu.device,
            "name": gpu.name,
            "model": gpu.model,
            "compute_capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
            "memory_bytes": gpu.memory_bytes,
            "usable_bytes": gpu.usable_bytes,
            "free_bytes": self.free_bytes,
            "utilisation": self.utilisation,
            "works": self.works,
            "dtypes": facts_json(self.facts),
            "processes": None
            if self.others is None
            else [{"pid": p.pid, "bytes": p.bytes, "name": p.name} for p in self.others],
        }


def facts_json(facts: dict[str, DtypeFact]) -> dict[str, dict[str, str]]:
    """Formats as plain values."""
    return {
        name: {"support": str(fact.support), "kernel": fact.kernel, "reason": fact.reason}
        for name, fact in facts.items()
    }


def check_gpu(world: World, machine: Machine, driver: Driver, cuda: Cuda, gpu: Gpu) -> GpuReport:
    """Run its kernels, and join what the driver answered before CUDA started."""
    known = driver_gpu(driver, cuda, gpu.index)
    # A slice of a GPU (MIG) shares its parent's entry, whose free memory is not the slice's.
    whole = known is not None and known.total_bytes is not None and known.total_bytes < 1.1 * gpu.memory_bytes
    free = known.free_bytes if known is not None and whole else world.free_bytes(gpu.index)
    listed = known.processes if known is not None else None
    others = None if listed is None else _others(listed, cuda.in_use)
    # If this process was on the GPU already, the memory in use may be its own.
    unknown = cuda.in_use or bool(others)
    return GpuReport(
        gpu=gpu,
        free_bytes=free,
        utilisation=known.utilisation if known is not None else None,
        others=others,
        unseen_bytes=0 if unknown or free is None else max(0, gpu.memory_bytes - free),
        facts=facts_on(machine, gpu.device, world.kernel),
    )


def gpu_problems(machine: Machine, gpus: Sequence[GpuReport], *, require_gpu: bool) -> list[Problem]:
    """Everything wrong with the GPUs, from no GPU to other processes on one."""
    if machine.torch is None:
        return []
    found = _missing(machine, require_gpu=require_gpu)
    any_works = any(report.works for report in gpus)
    for report in gpus:
        found += _broken(machine, report, any_works=any_works)
        found += _shared(report)
    return found


def busy_problems(share: float) -> list[Problem]:
    """Other work on the cores of this machine."""
    what = why_timings_are_off(share)
    if what is None:
        return []
    return [
        Problem(
            key="busy",
            severity=Severity.SLOWS,
            what=what,
            costs="training waits for the CPU, and hotlap may choose plans by wrong timings",
            do="end the other work (`top` shows it), or wait until it is over",
        )
    ]


def pretence_problems(machine: Machine) -> list[Problem]:
    """What differs from the pretended GPU."""
    model = machine.pretended
    if model is None:
        return []
    smaller = [gpu for gpu in machine.gpus if gpu.memory_bytes < 0.98 * model.usable_bytes]
    if machine.gpus and not smaller:
        return []
    what = (
        f"acting as a {model.name} on a machine without a GPU"
        if not machine.gpus
        else f"acting as a {model.name}, which has more memory than the {smaller[0].name} here"
    )
    return [
        Problem(
            key="pretence",
            severity=Severity.NOTE,
            what=what,
            costs="formats are chosen as on that GPU; memory and speed are this machine's own",
            do="nothing, if that is what you want to try; else drop --pretend and unset HOTLAP_PRETEND",
        )
    ]


def _missing(machine: Machine, *, require_gpu: bool) -> list[Problem]:
    """GPUs that torch does not see."""
    hidden, variable = len(machine.hidden_gpus), machine.visible_devices
    if not machine.gpus:
        what, do = why_no_gpu(machine)
        # A GPU that is here and not hidden on purpose is surely meant to be used.
        unusable = hidden > 0 and not machine.hidden_on_purpose
        # On a hosted runtime the advice on accelerators says this.
        if machine.runtime is not None and not hidden and not require_gpu:
            return []
        severity = Severity.SLOWS if hidden else Severity.NOTE
        return [
            Problem(
                key="gpu-unusable" if unusable else "gpu-hidden" if hidden else "no-gpu",
                severity=Severity.STOPS if unusable or require_gpu else severity,
                what=f"a GPU is required, but {what}" if require_gpu else what,
                costs="training runs on the CPU",
                do=f"{do}; to train on the CPU on purpose, set CUDA_VISIBLE_DEVICES=''" if unusable else do,
            )
        ]
    if not hidden:
        return []
    total = hidden + len(machine.gpus)
    cause = f" (CUDA_VISIBLE_DEVICES={variable[:40]!r})" if variable is not None else ""
    return [
        Problem(
            key="gpu-hidden",
            severity=Severity.NOTE if variable is not None else Severity.SLOWS,
            what=f"torch sees {len(machine.gpus)} of {total} GPUs{cause}",
            costs="the others stay idle",
            do="nothing, if that is meant; else unset CUDA_VISIBLE_DEVICES or grant the container all GPUs",
        )
    ]


def _broken(machine: Machine, report: GpuReport, *, any_works: bool) -> list[Problem]:
    """Kernels that did not run on this GPU."""
    failed = {name: fact.reason for name, fact in report.facts.items() if fact.kernel == "failed"}
    if not failed:
        return []
    if report.works:
        return [
            Problem(
                key="dtype-failed",
                severity=Severity.SLOWS,
                what=f"{', '.join(failed)} on {report.gpu.device}: {next(iter(failed.values()))}",
                costs="the hardware has it, but its kernel fails: it will not be used",
                do="another build of torch, or a newer driver",
            )
        ]
    what, do = why_kernel_failed(machine, report.gpu, next(iter(failed.values())))
    return [
        Problem(
            key="gpu-kernel-failed",
            severity=Severity.SLOWS if any_works else Severity.STOPS,
            what=what,
            costs=f"nothing can be computed on {report.gpu.device}, although torch lists it",
            do=do if any_works else f"{do}; to train on the CPU on purpose, set CUDA_VISIBLE_DEVICES=''",
        )
    ]


def _shared(report: GpuReport) -> list[Problem]:
    """Other processes on this GPU."""
    gpu = report.gpu
    if report.others:
        held = sum(process.bytes or 0 for process in report.others)
        who = first_few([f"{p.pid}{f' ({p.name})' if p.name else ''}" for p in report.others], 4)
        size = f", holding {show_bytes(held)}" if held else ""
        what = f"other processes on {gpu.device}{size}: {who}"
    elif report.unseen_bytes > _CONTEXT:
        taken = show_bytes(report.unseen_bytes)
        what = f"{taken} of {gpu.device} is taken, by processes that cannot be seen from here"
    else:
        return []
    return [
        Problem(
            key="gpu-shared",
            severity=Severity.SLOWS,
            what=what,
            costs="less memory, and timings that depend on what the others do: tuning may decide wrongly",
            do="end them (a forgotten notebook kernel is the usual one), or use another GPU",
        )
    ]


def _others(listed: Sequence[GpuProcess], in_use: bool) -> tuple[GpuProcess, ...]:
    """The processes that are not this one.

    In a container the driver gives pids of the host, so this process, if it had begun to use CUDA,
    may stand in the list under a number it does not know: one nameless entry is then taken for it.
    """
    me = os.getpid()
    others = [process for process in listed if process.pid != me]
    if in_use and len(others) == len(listed):
        nameless = next((process for process in others if process.name is None), None)
        others = [process for process in others if process is not nameless]
    return tuple(others)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the doctor found."""

    machine: Machine
    gpus: tuple[GpuReport, ...]
    device: str | None
    """Where hotlap would train; None where it could not."""
    facts: dict[str, DtypeFact]
    """The formats hotlap would choose among."""
    cpu_facts: dict[str, DtypeFact]
    shm: Room | None
    disk: Room | None
    speed: DiskSpeed
    tools: Toolchain
    variables: dict[str, str]
    problems: tuple[Problem, ...]

    @property
    def fit(self) -> bool:
        """Whether hotlap could train here as asked."""
        return all(problem.severity is not Severity.STOPS for problem in self.problems)

    @property
    def verdict(self) -> str:
        """One line: fit to train on what, or not fit because of what."""
        if not self.fit:
            return f"not fit to train: {self.problems[0].what}"
        chosen = next((report.gpu for report in self.gpus if report.gpu.device == self.device), None)
        cores = f"{self.machine.cpu.cores} core{'s' if self.machine.cpu.cores > 1 else ''}"
        where = f"{chosen.device} ({chosen.name})" if chosen else f"the CPU ({cores})"
        acting = f", acting as a {self.machine.pretended.name}" if self.machine.pretended else ""
        return f"fit to train on {where}{acting}"

    def as_json(self) -> dict[str, Any]:
        """One JSON object under stable keys."""
        machine = self.machine
        return {
            "fit": self.fit,
            "verdict": self.verdict,
            "device": self.device,
            "dtypes": facts_json(self.facts),
            "pretend": machine.pretended.as_json() if machine.pretended else None,
            "gpus": [report.as_json() for report in self.gpus],
            "hidden_gpus": list(machine.hidden_gpus),
            "architectures": list(machine.architectures),
            "cpu": {
                "model": machine.cpu.model,
                "cores": machine.cpu.cores,
                "host_cores": machine.cpu.host_cores,
                "quota": machine.cpu.quota,
                "dtypes": facts_json(self.cpu_facts),
            },
            "memory": asdict(machine.memory),
            "shared_memory": asdict(self.shm) if self.shm else None,
            "disk": {**(asdict(self.disk) if self.disk else {}), **asdict(self.speed)},
            "compiler": asdict(self.tools),
            "runtime": asdict(machine.runtime) if machine.runtime else None,
            "versions": versions(machine),
            "variables": self.variables,
            "problems": [problem.as_json() for problem in self.problems],
        }


def examine(pretend: str | None = None, *, require_gpu: bool = False, world: World | None = None) -> Report:
    """Look at the machine afresh and run one kernel per device and format.

    Raises MachineError only where the pretended GPU is unknown or ambiguous.
    """
    world = world or World()
    model = pretended_gpu(pretend, world.environ)
    begun_s, swapped = world.clock(), world.swapped()
    busy = busy_problems(world.busy_share())
    # The driver first: once CUDA has started, this process itself is on the GPU.
    driver = world.driver()
    cuda = world.cuda()
    machine = assemble(world, driver, cuda, model)
    gpus = tuple(check_gpu(world, machine, driver, cuda, gpu) for gpu in machine.gpus)
    on_cpu = cpu_facts(machine, world.kernel, pace=world.pace) if machine.torch else {}
    device = _device(gpus, on_cpu)
    tools = read_toolchain(world)
    shm, disk = world.room(world.root / "dev/shm"), world.room(world.folder)
    speed = world.measure_disk(world.folder)
    problems = _torch_problems(machine, on_cpu)
    problems += gpu_problems(machine, gpus, require_gpu=require_gpu)
    problems += [*busy, *pretence_problems(machine)]
    problems += host_problems(world.battery(), _rate(swapped, world.swapped(), world.clock() - begun_s))
    problems += disk_problems(disk, speed)
    problems += shm_problems(shm, expected=sys.platform == "linux")
    problems += version_problems(machine, tools)
    problems += private_problems(world.missing_names() if machine.torch else {})
    problems += variable_problems(world.environ, machine.cpu.cores)
    names = [gpu.name for gpu in machine.gpus]
    problems += runtime_problems(machine.runtime, names, working_gpu=any(gpu.works for gpu in gpus))
    return Report(
        machine=machine,
        gpus=gpus,
        device=device,
        facts=_facts(machine, device, gpus, on_cpu),
        cpu_facts=on_cpu,
        shm=shm,
        disk=disk,
        speed=speed,
        tools=tools,
        variables=recorded(world.environ),
        problems=worst_first(problems),
    )


def _rate(before: int | None, after: int | None, seconds: float) -> float | None:
    return None if before is None or after is None or seconds <= 0 else max(0, after - before) / seconds


def _device(gpus: Sequence[GpuReport], on_cpu: dict[str, DtypeFact]) -> str | None:
    """The first GPU that works, else the CPU if that does."""
    working = next((report.gpu.device for report in gpus if report.works), None)
    if working is None and on_cpu and on_cpu["fp32"].kernel == "ran":
        return "cpu"
    return working


def _facts(
    machine: Machine, device: str | None, gpus: Sequence[GpuReport], on_cpu: dict[str, DtypeFact]
) -> dict[str, DtypeFact]:
    """The formats hotlap would choose among on that device."""
    for report in gpus:
        if report.gpu.device == device:
            return report.facts
    return pretended_or(machine, on_cpu) if device else {}


def _torch_problems(machine: Machine, on_cpu: dict[str, DtypeFact]) -> list[Problem]:
    """torch itself: missing, or broken on the CPU."""
    if machine.torch is None:
        what, do = f"torch cannot be imported: {machine.cuda_error}", "install torch (https://pytorch.org)"
    elif on_cpu["fp32"].kernel != "ran":
        what, do = f"a kernel on the CPU failed: {on_cpu['fp32'].reason}", "reinstall torch"
    else:
        return []
    return [Problem(key="torch", severity=Severity.STOPS, what=what, costs="nothing can be trained", do=do)]
