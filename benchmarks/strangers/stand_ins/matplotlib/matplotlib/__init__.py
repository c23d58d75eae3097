"""A stand-in for `matplotlib`: takes every call and draws nothing."""

from __future__ import annotations


def use(backend: str) -> None:
    """Take any back end."""
