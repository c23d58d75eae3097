"""Whether a dataset gives the same sample for the same index; its code proves it before hotlap fetches a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from hotlap.data.pure.follower import Follower
from hotlap.data.pure.read_state import ReadState, UnreadableError
from hotlap.data.pure.values import Arguments, RefusedError, concrete, make_container
from hotlap.data.sources import Columns, Selection, Source

GRADIENTS = "the data requires gradients, and batches by another feed would have none"
FILES = "reads files, which may change"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the code of a dataset and of its collate function proves."""

    state: ReadState
    """Everything that samples depend on besides their index."""
    why_traces: str | None = None
    """Why fetching a sample may leave a trace or depend on the process; None if it is proven not to."""
    why_files: str | None = None
    """Why samples may change although the state does not."""
    seeds: bool = False
    """Whether fetching a sample seeds torch's generators; the code restores the host's, but not those of devices."""

    @property
    def why_not_fixed(self) -> str | None:
        """Why a sample may change later; None if it stays as long as the state does."""
        return self.why_traces or self.why_files


def prove(samples: Any, collate: Any = None, *, may_draw: bool = False) -> Proof:
    """Follow the code of `samples[index]`, `len(samples)` and `collate([…])`, without running it.

    `may_draw` if hotlap seeds the generators of Python, numpy and torch for every sample.
    """
    follower = Follower(may_draw)
    name = type(samples).__name__
    try:
        given = follower.fetched(samples)
        if collate is not None and collate is not default_collate:
            name = "the collate function"
            follower.call(concrete(collate), Arguments([make_container(list, given)]))
        follower.settle()
    except RefusedError as refusal:
        return Proof(state=follower.state, why_traces=f"{name} {refusal}{follower.where}")
    except UnreadableError as error:
        return Proof(state=follower.state, why_traces=f"{name} {error}")
    except RecursionError:
        return Proof(state=follower.state, why_traces=f"{name} calls too deep to be followed")
    except Exception as error:  # an object with unusual attribute access
        return Proof(state=follower.state, why_traces=f"{name} cannot be followed: {type(error).__name__}")
    why_files = f"{name} {FILES}" if follower.reads_files else None
    return Proof(state=follower.state, why_files=why_files, seeds=follower.seedings > 0)


def proof_of(source: Source, *, may_draw: bool = False) -> Proof:
    """The proof for a source, made once. `may_draw` if hotlap seeds the generators for each sample."""
    name = "proof but for draws" if may_draw else "proof"
    if name not in source.findings:
        source.findings[name] = prove(source.given, source.own_collate, may_draw=may_draw)
    proof: Proof = source.findings[name]
    return proof


def why_not_pure(source: Source) -> str | None:
    """Why repeated fetches may differ or leave a trace; None if neither."""
    proof = proof_of(source)
    if proof.seeds and not source.in_workers and torch.accelerator.is_available():
        return f"{type(source.given).__name__} seeds the generators of all devices"
    return proof.why_traces


def why_not_fixed(source: Source) -> str | None:
    """Why samples may change without a change in the watched state, or may need gradients; else None."""
    proof = proof_of(source)
    reason = why_not_pure(source) or proof.why_files
    if reason is not None:
        return reason
    return GRADIENTS if proof.state.needs_gradients else None


def state_of(source: Source) -> ReadState | None:
    """The state that samples depend on, as of the proof; None without a proof."""
    proof = proof_of(source)
    return proof.state if proof.why_traces is None else None


def reads_in_place(source: Source) -> bool:
    """Whether gathered batches come from the user's own memory, so that writes to it show at once."""
    while isinstance(source, Selection):
        source = source.inner
    return type(source) is Columns
