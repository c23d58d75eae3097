"""Whether a dataset gives the same sample for the same index: shown by its code, before a sample is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from hotlap.data.pure.follower import Follower
from hotlap.data.pure.read_state import ReadState, UnreadableError
from hotlap.data.pure.values import Given, RefusedError, boxed, thing
from hotlap.data.sources import Columns, Selection, Source

GRADIENTS = "the data requires gradients, and batches by another feed would have none"
FILES = "reads files, which may change"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was shown of a dataset, and of the function that makes its batches."""

    state: ReadState
    """All that its samples depend on beside their index."""
    why_traces: str | None = None
    """Why fetching a sample may leave a trace, or give another sample elsewhere; None where it is shown not to."""
    why_files: str | None = None
    """Why samples may become others though the state stays."""
    seeds: bool = False
    """Whether fetching a sample seeds torch's generators: that of the host is put back, those of devices are not."""

    @property
    def why_not_fixed(self) -> str | None:
        """Why a sample may be another one later; None where it stays as long as the state does."""
        return self.why_traces or self.why_files


def prove(samples: Any, collate: Any = None, *, may_draw: bool = False) -> Proof:
    """Follow what `samples[index]`, `len(samples)` and `collate([…])` do. Nothing of it is run.

    `may_draw` where the generators of Python, numpy and torch are seeded for every sample.
    """
    follower = Follower(may_draw)
    name = type(samples).__name__
    try:
        given = follower.fetched(samples)
        if collate is not None and collate is not default_collate:
            name = "the collate function"
            follower.call(thing(collate), Given([boxed(list, given)]))
    except RefusedError as refusal:
        return Proof(state=follower.state, why_traces=f"{name} {refusal}{follower.where}")
    except UnreadableError as error:
        return Proof(state=follower.state, why_traces=f"{name} {error}")
    except RecursionError:
        return Proof(state=follower.state, why_traces=f"{name} calls too deep to be followed")
    except Exception as error:  # of an object that answers in ways of its own
        return Proof(state=follower.state, why_traces=f"{name} cannot be followed: {type(error).__name__}")
    why_files = f"{name} {FILES}" if follower.reads_files else None
    return Proof(state=follower.state, why_files=why_files, seeds=follower.seedings > 0)


def proof_of(source: Source, *, may_draw: bool = False) -> Proof:
    """What its code shows of a source; found out once. `may_draw` where draws are seeded for each sample."""
    name = "proof but for draws" if may_draw else "proof"
    if name not in source.findings:
        source.findings[name] = prove(source.given, source.own_collate, may_draw=may_draw)
    proof: Proof = source.findings[name]
    return proof


def why_not_pure(source: Source) -> str | None:
    """Why samples may differ from one asking to the next, or fetching them may leave a trace; None where neither."""
    proof = proof_of(source)
    if proof.seeds and not source.in_workers and torch.accelerator.is_available():
        return f"{type(source.given).__name__} seeds the generators of all devices"
    return proof.why_traces


def why_not_fixed(source: Source) -> str | None:
    """Why samples may be others later though nothing that is watched has changed, or may need gradients; else None."""
    proof = proof_of(source)
    reason = why_not_pure(source) or proof.why_files
    if reason is not None:
        return reason
    return GRADIENTS if proof.state.needs_gradients else None


def state_of(source: Source) -> ReadState | None:
    """What the samples depend on, as it was when it was first asked for; None where nothing is known of it."""
    proof = proof_of(source)
    return proof.state if proof.why_traces is None else None


def reads_in_place(source: Source) -> bool:
    """Whether batches that are gathered come out of the user's own memory: who writes to it is seen at once."""
    while isinstance(source, Selection):
        source = source.inner
    return type(source) is Columns
