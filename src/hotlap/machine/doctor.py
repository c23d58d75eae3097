"""The doctor: look at everything, run a kernel on every device, say what is wrong and whether to train."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hotlap.machine.checkup import GpuReport, check_gpu, facts_json, gpu_problems, pretence_problems
from hotlap.machine.detect import Machine, assemble, pretended_gpu
from hotlap.machine.device import cpu_facts, pretended_or
from hotlap.machine.disk import DiskSpeed, Room, disk_problems, shm_problems
from hotlap.machine.dtypes import DtypeFact
from hotlap.machine.problems import Problem, Severity, worst_first
from hotlap.machine.runtimes import runtime_problems
from hotlap.machine.variables import recorded, variable_problems
from hotlap.machine.versions import Toolchain, read_toolchain, version_problems, versions
from hotlap.machine.world import World


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
    problems += pretence_problems(machine)
    problems += disk_problems(disk, speed)
    problems += shm_problems(shm, expected=sys.platform == "linux")
    problems += version_problems(machine, tools)
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
