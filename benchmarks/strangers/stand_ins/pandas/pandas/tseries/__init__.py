"""Frequencies of series."""
