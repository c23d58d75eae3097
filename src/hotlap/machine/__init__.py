"""What this machine is and can do.

- `detect` looks at the machine once per process, and `device` chooses the device to train on.
- `cuda`, `limits`, `disk`, `host`, `runtimes`, `variables` and `versions` each read one part of it.
- `session_end` knows when the session of this process ends.
- `dtypes` holds the number formats of a device, each proven by a kernel; `tf32` switches TF32; `catalogue` lists GPUs.
- `doctor` checks everything, and lists each `problems.Problem` with its cost and its cure.

Importing this room does not import torch.
"""

from hotlap.core.errors import TESTED_TORCH
from hotlap.machine.catalogue import CATALOGUE, GpuModel, find_gpu
from hotlap.machine.detect import Gpu, Machine, World, detect
from hotlap.machine.device import choose_device, dtype_fact, dtype_facts
from hotlap.machine.doctor import Report, examine
from hotlap.machine.dtypes import DTYPES, DtypeFact, Support
from hotlap.machine.problems import Problem, Severity
from hotlap.machine.variables import workers_wanted
from hotlap.machine.versions import environment

__all__ = [
    "CATALOGUE",
    "DTYPES",
    "TESTED_TORCH",
    "DtypeFact",
    "Gpu",
    "GpuModel",
    "Machine",
    "Problem",
    "Report",
    "Severity",
    "Support",
    "World",
    "choose_device",
    "detect",
    "dtype_fact",
    "dtype_facts",
    "environment",
    "examine",
    "find_gpu",
    "workers_wanted",
]
