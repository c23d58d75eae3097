"""Whether a dataset gives the same sample for the same index: shown by its code, before a sample is asked for."""

from __future__ import annotations

import torch

from hotlap.data.code_proof import Proof, prove
from hotlap.data.read_state import ReadState
from hotlap.data.sources import Columns, Selection, Source

GRADIENTS = "the data requires gradients, and batches by another feed would have none"


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
