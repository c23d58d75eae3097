"""A stand-in for `einops`, for scripts that import it and do not call it."""

from typing import Any


def rearrange(*_: Any, **__: Any) -> Any:
    """Not here."""
    raise NotImplementedError("einops is not installed")


repeat = reduce = rearrange
