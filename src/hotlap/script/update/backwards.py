"""Backward passes in the thread of the script itself."""

from __future__ import annotations

import torch


class Backwards:
    """Has autograd work in the thread that calls it, or as the script has it.

    torch gives each GPU a thread of its own. To wake it and to be woken takes the host longer than a replay: 0.2 ms of
    a step of 1.3 ms were measured on an H200. With one GPU there is nothing that the two could do at a time, but for
    what the script does in Python while it waits.
    """

    def __init__(self) -> None:
        self._was: bool | None = None

    def use(self, *, here: bool) -> None:
        """From the next backward pass on; to be told in the thread of the script."""
        if here and self._was is None:
            self._was = torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(False)
        elif not here and self._was is not None:
            torch._C._set_multithreading_enabled(self._was)
            self._was = None
