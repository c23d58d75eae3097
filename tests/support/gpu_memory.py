"""Less of a GPU's memory than there is."""

import gc
from contextlib import contextmanager

import torch


@contextmanager
def memory_limited(device="cuda"):
    """Gives what sets how many bytes more than now torch may take."""

    def limit(more):
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + more) / total))

    try:
        yield limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()
