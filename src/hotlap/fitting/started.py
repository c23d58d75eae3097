"""How a training was started, so that it can be started again: recorded without secrets, and never run by itself."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hotlap.core.errors import StoreError
from hotlap.core.terminal import clean
from hotlap.store.run_folder import RunFolder

RESUME = "HOTLAP_RESUME"
"""Set by `hotlap resume` for the script it runs: the folder of the run to go on with."""

_SECRET = re.compile(
    r"key|token|secret|passw|passphrase|credential|auth|cookie|bearer|signature|webhook|private|session_id|dsn"
    r"|conn(ection)?_?str|(?<![a-z])(pat|sas|jwt|pw|psw|otp|sig)(?![a-z])|[a-z][_-]pwd|_pass(?![a-z])|^-*pass$|^-+pwd$",
    re.IGNORECASE,
)
"""Names of what should not be told."""
_SHORT = re.compile(r"-p", re.IGNORECASE)
"""The flag by which many programs take a password; to others it is a port, or a rate that few characters say."""
_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])(hf|gh[oprsu]|glpat|github_pat|xox[abeprs]|xapp|sk|rk|pk|kgat|npm|pypi|wandb(_v\d+)?|dckr_pat|nvapi|gsk|r8|glsa"
    r"|shp(at|ss)|dapi|tskey)[_-][A-Za-z0-9_-]{16,}|SG\.[A-Za-z0-9_-]{16,}\.|ya29\.[A-Za-z0-9_-]{16,}"
    r"|A[KS]IA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}|-----BEGIN"
    r"|https?://(hooks?\.|api\.telegram\.org/bot|[^\s?]*webhook|[^\s?]*/hooks?/)",
    re.IGNORECASE,
)
"""What keys of well-known services look like, and addresses that whoever knows them may send to."""
_HEX = re.compile(r"[0-9a-f]{40}")
"""A key of Weights & Biases, or a commit of git."""
_COMMIT = re.compile(r"rev|commit|sha|hash|ref|version|tag|branch|checkpoint", re.IGNORECASE)
"""Names of what a commit is given as."""
_IN_QUERY = re.compile(r"[?&;]([^=&;\s]+)=")
_IN_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@", re.IGNORECASE)
HIDDEN = "***"
WHOLE, WITHIN = 4, 6
"""From so many characters on a secret is hidden as a word of its own, and inside of a longer one."""


def start_record(call: int, words: Sequence[str] | None) -> dict[str, Any]:
    """What a run folder keeps of its start: words for a shell, and the how manieth training of its script it is."""
    return {"words": without_secrets(sys.argv if words is None else words, os.environ), "call": call}


def asked_by_command(call: int) -> Path | None:
    """The run that `hotlap resume` wants this call of `fit` to go on with, or None."""
    folder = os.environ.get(RESUME)
    if not folder:
        return None
    recorded = RunFolder.open(folder).read_started().get("call", 1)
    return Path(folder) if recorded == call else None


_gone_on: set[Path] = set()
"""Folders of runs that this process went on with."""


def note_gone_on(folder: str | Path) -> None:
    """Remember that this process went on with a run."""
    _gone_on.add(Path(folder).resolve())


def has_gone_on(folder: Path) -> bool:
    """Whether this process went on with a run, as `hotlap resume` promised that it would."""
    return folder.resolve() in _gone_on


def without_secrets(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The words of a command line with everything hidden that looks like a secret, or is one in the environment."""
    known = secrets_of(environ)
    shown: list[str] = []
    hide_next = False
    before = ""
    for word in words:
        flag, equals, value = word.partition("=")
        last, before = before, word
        if hide_next or _is_password(last, word):
            shown.append(HIDDEN)
            hide_next = False
        elif _HEX.fullmatch(value or word) and not _COMMIT.search(flag if equals else last):
            shown.append(f"{flag}={HIDDEN}" if equals else HIDDEN)
        elif word.startswith("-") and not equals and _SECRET.search(flag) and not _tells(word, known):
            shown.append(word)
            hide_next = True
        elif equals and not _tells(flag, known) and (_SECRET.search(flag) or _tells(value, known)):
            shown.append(f"{flag}={HIDDEN}")
        # A name and a value in one word: a header, a piece of JSON or YAML.
        elif _tells(word, known) or (":" in word and _SECRET.search(word.partition(":")[0])):
            shown.append(HIDDEN)
        else:
            shown.append(word)
    return shown


def secrets_of(environ: Mapping[str, str]) -> set[str]:
    """The values in the environment that should not be told: by their names, or as passwords inside of addresses."""
    named = {v for k, v in environ.items() if _SECRET.search(k) and v.lower() not in ("true", "false", "none", "auto")}
    named |= {found for v in environ.values() for found in _IN_URL.findall(v)}
    # A private key has several lines, and each tells too much; an address has it with signs in place of others.
    named |= {line for v in named for line in v.splitlines()} | {quote(v, safe="") for v in named}
    return {v.strip() for v in named if len(v.strip()) >= WHOLE}


def _is_password(flag: str, word: str) -> bool:
    """Whether a word that follows a short flag may be a password: `-p VALUE`, or `-u NAME:VALUE`."""
    if _SHORT.fullmatch(flag):
        return len(word) >= WHOLE
    return flag in ("-u", "--user") and ":" in word


def _tells(word: str, known: set[str]) -> bool:
    if word in known or any(secret in word for secret in known if len(secret) >= WITHIN):
        return True
    return bool(_SHAPE.search(word) or _IN_URL.search(word) or any(map(_SECRET.search, _IN_QUERY.findall(word))))


def checked_words(folder: RunFolder) -> list[str]:
    """The words of a run folder's start; it may be a stranger's, so they are only ever shown or compared."""
    words = folder.read_started().get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise StoreError(f"{folder.path} does not say how it was started")
    # Shown in a terminal, which a stranger's words must not drive.
    return [clean(word) for word in words]


def resume_words(folder: RunFolder) -> str:
    """The command that goes on with a run."""
    words = checked_words(folder)
    if words[:2] == ["hotlap", "train"]:  # a recipe's run goes on as it was begun
        return shlex.join(words)
    training = [] if words[:1] == ["hotlap"] else words
    return shlex.join(["hotlap", "resume", str(folder.path), *training])
