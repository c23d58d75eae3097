"""Frequencies by their letters."""

from __future__ import annotations

from pandas.tseries import offsets


def to_offset(letters: str) -> object:
    """The frequency of hours and days."""
    return {"h": offsets.Hour, "d": offsets.Day}[letters.lower()]()
