"""The versions of torch that hotlap is tested with. Nothing here imports torch."""

from __future__ import annotations

from typing import Final

TESTED_TORCH: Final = ("2.11", "2.13")
"""The versions of torch that hotlap is tested with; hotlap uses and names others."""
