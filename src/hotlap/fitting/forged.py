"""A checkpoint may be forged, or another model's: what it says is looked at before it is believed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hotlap.core.errors import HotlapError, StoreError


@contextmanager
def unfit_checkpoint(name: str) -> Iterator[None]:
    """Say of whatever goes wrong inside that the checkpoint does not fit."""
    try:
        yield
    except (HotlapError, torch.OutOfMemoryError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"checkpoint {name} does not fit this training: {type(error).__name__}: {reason}") from error


def counts(*values: Any) -> None:
    """Raise ValueError for a value that counts nothing."""
    for value in values:
        if type(value) is not int or not 0 <= value < 2**53:
            raise ValueError(f"{value!r:.40} is no count")


def records(*values: Any) -> list[dict[str, Any]]:
    """The records of evaluations; raises ValueError for one that is none."""
    for record in values:
        if not isinstance(record, dict) or not {"step", "epoch", "train_loss", "lr"} <= set(record):
            raise ValueError(f"{record!r:.40} is no record of an evaluation")
        for name, value in record.items():
            if not isinstance(name, str) or not isinstance(value, (int, float)):
                raise ValueError(f"{name!r:.40} is {value!r:.40} in a record of an evaluation")
        counts(record["step"], record["epoch"])
    return list(values)
