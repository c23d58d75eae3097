"""What a run folder remembers of its training beside the checkpoints: what it began with, and how it ended.

A run that was killed before its first checkpoint begins again from it; one that has ended is not trained twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.errors import StoreError
from hotlap.core.terminal import clean
from hotlap.core.units import MIB
from hotlap.engine.rig import Rig
from hotlap.fitting.session import counts, records
from hotlap.fitting.task import trained_tensors
from hotlap.store.disk import read_small
from hotlap.store.files import finite, from_json, write_text
from hotlap.store.run_folder import RunFolder
from hotlap.store.tensors import why_not_stored
from hotlap.store.weights import load_weights, unwrapped

FILE = "record.json"
MODEL, LOSS = "model.safetensors", "loss.safetensors"
FORMAT = 1
MOST_BYTES = 16 * MIB
PIECE = 64 * MIB
"""So much of a tensor comes off a GPU at a time."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a training ended. Its weights are in `model.safetensors`, and a loss's own in `loss.safetensors`."""

    stopped: str
    asked: int
    """Windows that it was to train."""
    patience: int | None
    """Evaluations without a better one after which it stopped early; None where it did not."""
    steps: int
    updates: int
    samples: int
    train_s: float
    total_s: float
    best_step: int
    weights: dict[str, str | None]
    """What `weights_key` says of the weights in each file."""
    setup_s: float | None = None
    """Seconds before the first step; None where it was resumed."""
    evaluation_s: float | None = None
    """Seconds of evaluations; None where it was resumed."""
    left_out: Sequence[str] = ()
    """What it has not done for want of time, a line each."""

    def is_all(self, asked: int, patience: int | None) -> bool:
        """Whether nothing is left of a training of so many windows and so much patience."""
        if self.patience is not None:
            return patience is not None and patience <= self.patience
        return asked <= self.asked


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a training began with, and how it ended."""

    facts: dict[str, Any]
    """As a checkpoint has them: identity, plan, versions."""
    first: str | None
    """`first_key` before the first step."""
    ended: Ended | None = None


def first_key(rig: Rig) -> str | None:
    """A hash of what a training begins with: weights, buffers, and the state an optimizer brings along."""
    return weights_key({**trained_tensors(rig), **_brought_along(rig.optimizer)})


def weights_key(tensors: Mapping[str, Tensor]) -> str | None:
    """A hash of name, dtype, shape and every byte of these tensors; None for some that no file can hold.

    The bytes by crc32: 25 ms for 25 million weights where sha256 takes 75. It tells honest trainings apart; who
    forges a record can forge a hash too.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if why_not_stored(tensor):
            return None
        flat = tensor.detach().reshape(-1)
        rows, crc = max(1, PIECE // flat.element_size()), 0
        for start in range(0, flat.numel(), rows):
            crc = zlib.crc32(flat[start : start + rows].cpu().view(torch.uint8).numpy().data, crc)
        digest.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)} {crc:08x}\n".encode())
    return digest.hexdigest()


def modules_of(rig: Rig) -> dict[str, nn.Module]:
    """The trained modules by the files that hold them at the end: the model, and a loss that has weights."""
    loss = rig.modules[-1]
    has_own = loss is not rig.model and any(True for _ in loss.parameters())
    return {MODEL: rig.model} | ({LOSS: loss} if has_own else {})


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What a file of a module's weights holds."""
    state: dict[str, Any] = unwrapped(module).state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def write_record(folder: RunFolder, record: Record) -> None:
    """Write `record.json`."""
    fields = {"format": FORMAT, **dataclasses.asdict(record)}
    write_text(folder.path / FILE, json.dumps(finite(fields)) + "\n")


def read_record(folder: RunFolder) -> Record:
    """What `write_record` wrote; it may be a stranger's, so all of it is looked at. Raises StoreError."""
    raw = from_json(read_small(folder.path / FILE, MOST_BYTES), FILE)
    try:
        if raw["format"] != FORMAT or not isinstance(raw["facts"], dict):
            raise ValueError
        ended = None if raw["ended"] is None else _checked(Ended(**raw["ended"]))
        return Record(facts=raw["facts"], first=raw["first"], ended=ended)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise StoreError(f"{FILE} is not a record of a training") from None


def read_end(folder: RunFolder, ended: Ended) -> tuple[dict[str, dict[str, Tensor]], list[dict[str, Any]]]:
    """The weights by file and the evaluations that an ended training left, if all are as they were written.

    Raises StoreError where they are not.
    """
    weights = {}
    for file, key in ended.weights.items():
        weights[file] = load_weights(folder.path / file)
        if weights_key(weights[file]) != key:
            raise StoreError(f"{file} differs from what was written")
    try:
        # JSON has no NaN: it stands there as null.
        lines = [{k: math.nan if v is None else v for k, v in record.items()} for record in folder.read_metrics()]
        history = records(*lines)
    except (ValueError, AttributeError) as error:
        raise StoreError(f"metrics.jsonl: {error}") from None
    if not any(record["step"] == ended.best_step for record in history):
        raise StoreError(f"metrics.jsonl has no line of step {ended.best_step}, the best")
    return weights, history


def _brought_along(optimizer: Optimizer) -> dict[str, Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {number: optimizer.state.get(parameter) for number, parameter in enumerate(parameters)}
    return {
        f"optimizer.{number}.{name}": value
        for number, state in states.items()
        if isinstance(state, dict)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _checked(ended: Ended) -> Ended:
    counts(ended.asked, ended.steps, ended.updates, ended.samples, ended.best_step)
    counts(0 if ended.patience is None else ended.patience)
    for seconds in (ended.train_s, ended.total_s, ended.setup_s or 0.0, ended.evaluation_s or 0.0):
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e12:
            raise ValueError(f"{seconds!r:.40} is no time")
    if not isinstance(ended.stopped, str) or not ended.stopped.isprintable():
        raise ValueError("the reason of the end is no plain text")
    if not isinstance(ended.left_out, (list, tuple)) or not all(
        isinstance(line, str) and line.isprintable() for line in ended.left_out
    ):
        raise ValueError("what was left out is no plain text")
    # Only files that hotlap writes are read, wherever a stranger's record points.
    files = set(ended.weights) if isinstance(ended.weights, dict) else set()
    if not {MODEL} <= files <= {MODEL, LOSS}:
        raise ValueError("the weights have no files")
    return ended


RESUME = "HOTLAP_RESUME"
"""Set by `hotlap resume` for the script it runs: the folder of the run to go on with."""

_SECRET = re.compile(
    r"key|token|secret|passw|passphrase|credential|auth|cookie|bearer|signature|webhook|private|session_id|dsn"
    r"|conn(ection)?_?str|(?<![a-z])(pat|sas|jwt|pw|psw|otp|sig)(?![a-z])|[a-z][_-]pwd|_pass(?![a-z])|^-*pass$|^-+pwd$",
    re.IGNORECASE,
)
"""Names of secrets."""
_SHORT = re.compile(r"-p", re.IGNORECASE)
"""The flag by which many programs take a password; to others it is a port, or a rate that few characters say."""
_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])(hf|gh[oprsu]|glpat|github_pat|xox[abeprs]|xapp|sk|rk|pk|kgat|npm|pypi|wandb(_v\d+)?|dckr_pat|nvapi|gsk|r8|glsa"
    r"|shp(at|ss)|dapi|tskey)[_-][A-Za-z0-9_-]{16,}|SG\.[A-Za-z0-9_-]{16,}\.|ya29\.[A-Za-z0-9_-]{16,}"
    r"|A[KS]IA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}|-----BEGIN"
    r"|https?://(hooks?\.|api\.telegram\.org/bot|[^\s?]*webhook|[^\s?]*/hooks?/)",
    re.IGNORECASE,
)
"""The shapes of keys of well-known services, and of addresses that anyone who knows them may send to."""
_HEX = re.compile(r"[0-9a-f]{40}")
"""A key of Weights & Biases, or a commit of git."""
_COMMIT = re.compile(r"rev|commit|sha|hash|ref|version|tag|branch|checkpoint", re.IGNORECASE)
"""Names of what a commit is given as."""
_IN_QUERY = re.compile(r"[?&;]([^=&;\s]+)=")
_IN_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@", re.IGNORECASE)
HIDDEN = "***"
WHOLE, WITHIN = 4, 6
"""Characters from which on a secret is hidden: as a whole word, and inside a longer word."""


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
    """Secret values in the environment: by their names, or as passwords inside addresses."""
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
