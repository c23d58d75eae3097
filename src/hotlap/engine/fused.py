"""Where these were before `optimizers`."""

from hotlap.engine.optimizers import Fusion, is_fused, why_not_fused

__all__ = ["Fusion", "is_fused", "why_not_fused"]
