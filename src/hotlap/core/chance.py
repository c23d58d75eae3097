"""How far means may lie apart by chance."""

from __future__ import annotations

import math
from functools import lru_cache


@lru_cache
def student_t(freedom: int, chance: float) -> float:
    """The value that Student's t exceeds, on either side, with this chance (both sides together)."""
    # For whole degrees of freedom the distribution is a finite sum in the angle whose tangent is t / sqrt(freedom).
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        odd = freedom % 2
        term = math.cos(angle) if odd else 1.0
        total = 0.0
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
        inside = math.sin(angle) * total
        if odd:
            inside = (angle + inside) * 2 / math.pi
        low, high = (angle, high) if inside < 1 - chance else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)
