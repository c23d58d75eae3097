"""Only names."""

from typing import Any


def load_from_tsfile_to_dataframe(*_: Any, **__: Any) -> Any:
    """Not here."""
    raise NotImplementedError("sktime is not installed")
