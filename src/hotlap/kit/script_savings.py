"""What would bring the memory of somebody's script down, tried in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from hotlap.core.errors import HotlapError
from hotlap.kit.looks import Seen, Wish
from hotlap.kit.savings import Saving, Tried
from hotlap.kit.visiting import visit
from hotlap.script.running import Target

LAPS, LAP_S = 3, 0.05
"""Laps of each look, of which the middle one counts, and what each takes at least."""


class ScriptTrials:
    """Tries things in a script: each takes a process of its own."""

    def __init__(self, target: Target, own: Seen, say: Callable[[str], None]) -> None:
        self._target, self._own, self._say = target, own, say
        self._wish = Wish(laps=LAPS, lap_s=LAP_S, counts=True, loader=own.loader, longest=own.varies)

    def in_pieces(self, size: int) -> Tried:
        """Batches of this size, with an update after each; gradients stay in memory as while they are accumulated."""
        wish = replace(self._wish, change={"batch_size": size}, keeps_gradients=True)
        tried = self._tried(f"micro-batches of {size:,}", wish)
        norms = "batch norms see micro-batches, so their statistics differ"
        return replace(tried, changes=norms) if self._own.model["least"] > 1 else tried

    def checkpointed(self, blocks: int) -> Tried:
        """Updates with all blocks checkpointed."""
        return self._tried(f"all {blocks} blocks checkpointed", replace(self._wish, checkpoint=True))

    def in_precision(self, precision: str) -> Tried:
        """Updates under autocast, as `hotlap run --plan` has it."""
        return self._tried(f"{precision} autocast", replace(self._wish, precision=precision))

    def _tried(self, what: str, wish: Wish) -> Tried:
        self._say(f"memory     {what}: tried")
        try:
            seen = visit(self._target, wish)
        except HotlapError as error:
            return Tried(why_not=str(error).partition("\n")[0])
        over = None if seen.peak_bytes else f"{self._target.name} is over before its memory was looked at"
        why_not = seen.why_not or seen.out_of_memory or over
        if why_not is not None:
            return Tried(why_not=why_not)
        # Of smaller batches, as many as have the samples of an update.
        step_s = seen.step_s if seen.sample_s is None else seen.sample_s * self._own.samples_an_update
        return Tried(peak_bytes=seen.peak_bytes, step_s=step_s)


def words_on(found: Iterable[Saving]) -> list[str]:
    """How somebody gets in a script what was found to be had, in lines."""
    told = {
        "micro-batches": "micro-batches: the loader's batch_size, an update every so many (timed with one for each)",
        "blocks checkpointed": "checkpointing: torch.utils.checkpoint around each block; hotlap run leaves that to you",
        "autocast": "autocast: hotlap run tries it by itself, and keeps it where it is faster and gradients agree",
    }
    had = [one.what for one in found if one.peak_bytes is not None]
    return [line for word, line in told.items() if any(word in what for what in had)]
