"""Hypothesis without a deadline: a loaded machine is slow, not wrong."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
