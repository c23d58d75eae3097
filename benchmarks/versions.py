"""Versions of what the figures depend on."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

import hotlap


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "hotlap": hotlap.__version__}
    for name in ("torchvision", "lightning", "pytorch-lightning", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
