"""Whatever waits for the GPU raises."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting():
    """Inside, whatever waits for the GPU raises."""
    with warnings.catch_warnings():
        # torch says once per process that this mode does not see every wait.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
