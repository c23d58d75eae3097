"""Trained models kept from run to run: the same data, code, settings and first weights are not trained twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hotlap.store.cache import Cache
from hotlap.store.keys import key_of

KIND = "models"


def model_key(identity: Mapping[str, Any], initial: Mapping[str, Tensor]) -> str:
    """The key of a training: what `guard.identity` says of it, and every weight it begins with."""
    return key_of("a trained model", identity, initial)


def stored_model(cache: Cache, key: str) -> tuple[dict[str, Tensor], Any] | None:
    """Weights and figures of a model trained before, or None; one that is damaged is told in the log and is none."""
    found = cache.get(KIND, key)
    return None if found is None else (found.tensors, found.values)


def store_model(cache: Cache, key: str, tensors: Mapping[str, Tensor], values: Any, facts: Mapping[str, Any]) -> None:
    """Keep a trained model: its weights as plain PyTorch has them, and figures such as history and best.

    Raises StoreError where it cannot be kept.
    """
    cache.put(KIND, key, tensors=tensors, values=values, facts=facts)
