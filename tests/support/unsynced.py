"""Once this is imported, nothing in this process waits for the disk: a sync takes milliseconds, and tests make many.

What tests end is processes, not machines, and what a process has written outlives it. Which calls are made, and in
which order, is seen as before; processes that tests start as a user would start them sync as they do there.
"""

import os


def fsync(handle):
    """Fail as a sync does where there is no such file."""
    os.fstat(handle if isinstance(handle, int) else handle.fileno())


os.fsync = fsync
