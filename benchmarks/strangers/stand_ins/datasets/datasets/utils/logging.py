"""Levels of logging, which nothing here uses."""


def set_verbosity(level: int) -> None:
    """Take any level."""


def set_verbosity_error() -> None:
    """Nothing is logged anyway."""


def set_verbosity_warning() -> None:
    """Nothing is logged anyway."""
