"""How a training was started, so that it can be started again: recorded without secrets, and never run by itself."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.store.run_folder import RunFolder

RESUME = "HOTLAP_RESUME"
"""Set by `hotlap resume` for the script it runs: the folder of the run to go on with."""

_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie", re.IGNORECASE)
HIDDEN = "***"


def start_record(call: int, words: Sequence[str] | None) -> dict[str, Any]:
    """What a run folder keeps of its start: words for a shell, and the how manieth training of its script it is."""
    return {"words": list(words) if words is not None else without_secrets(sys.argv, os.environ), "call": call}


def asked_by_command(call: int) -> Path | None:
    """The run that `hotlap resume` wants this call of `fit` to go on with, or None."""
    folder = os.environ.get(RESUME)
    if not folder:
        return None
    recorded = RunFolder.open(folder).read_started().get("call", 1)
    return Path(folder) if recorded == call else None


def without_secrets(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The words of a command line with everything hidden that looks like a secret, or is one in the environment."""
    known = {v for k, v in environ.items() if _SECRET.search(k) and len(v) >= 6}
    shown: list[str] = []
    hide_next = False
    for word in words:
        flag, equals, value = word.partition("=")
        if hide_next or (not equals and word in known):
            shown.append(HIDDEN)
            hide_next = False
        elif word.startswith("-") and _SECRET.search(flag):
            shown.append(f"{flag}={HIDDEN}" if equals else word)
            hide_next = not equals
        elif equals and (value in known or any(secret in word for secret in known)):
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(HIDDEN if any(secret in word for secret in known) else word)
    return shown


def checked_words(folder: RunFolder) -> list[str]:
    """The words of a run folder's start; it may be a stranger's, so they are only ever shown or compared."""
    words = folder.read_started().get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise StoreError(f"{folder.path} does not say how it was started")
    return words
