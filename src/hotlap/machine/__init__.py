"""What this machine is and can do.

Nothing here imports torch until it is asked something that needs it.
"""

from hotlap.machine.catalogue import CATALOGUE, GpuModel, find_gpu
from hotlap.machine.detect import Gpu, Machine, World, detect
from hotlap.machine.device import choose_device, dtype_fact, dtype_facts
from hotlap.machine.doctor import Report, examine
from hotlap.machine.dtypes import DTYPES, DtypeFact, Support
from hotlap.machine.problems import Problem, Severity
from hotlap.machine.variables import workers_wanted
from hotlap.machine.versions import TESTED_TORCH, environment

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
