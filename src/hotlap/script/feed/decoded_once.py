"""Pictures that PIL decodes, converts and resizes: made once, then recalled from memory.

Many scripts decode the same files in every epoch, and resize them to the same size, before anything random happens.
`followed_pictures` follows a picture from its file through these calls, as `Origin`. The key of the result is a hash
of the file's bytes and of the calls, so a changed file is another picture. The first other use of the pixels is where
hotlap remembers the picture, or recalls it. The script gets the same bits, types and attributes.

The patches stay in forked processes, since workers make the pictures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.core.units import show_bytes, show_seconds
from hotlap.script.patches import Patches

if TYPE_CHECKING:
    from hotlap.data.picture_memory import PictureMemory

PIL: Final = "PIL.Image"
"""The module whose import shows that a script may read pictures."""
WHAT: Final = "pictures decoded once"
"""Its name in the ledger."""


def decoded_once() -> DecodedOnce | None:
    """Follows the pictures of this process, if the system and this version of PIL allow it."""
    try:
        return DecodedOnce()
    except (ImportError, AttributeError, OSError):
        return None


class DecodedOnce:
    """Remembers the pictures of this process and of those forked from it."""

    def __init__(self) -> None:
        """Raises OSError where there is no memory for it, and ImportError or AttributeError where PIL is unknown."""
        from hotlap.data.picture_memory import PictureMemory
        from hotlap.script.feed import followed_pictures

        self.memory: PictureMemory = PictureMemory()
        self._patches = Patches(in_forks=True)
        for owner, name, make in followed_pictures.patches(self.memory):
            self._patches.put(owner, name, make)
        self._is_over = False

    def begin_epoch(self, *, pays: bool) -> None:
        """An epoch of a loader begins; with `pays`, its pictures are likely to come again."""
        if pays and not self._is_over and not self.memory.counts.compared:
            self.memory.is_on = True
        self.memory.refresh()

    def close(self) -> None:
        """Leave PIL alone."""
        self.memory.is_on, self._is_over = False, True
        self._patches.take_out_all()

    def write_down(self, ledger: Ledger, plan: Plan) -> None:
        """Add what it gave to a ledger, if anything."""
        counts = self.memory.counts
        if not counts.compared:
            return
        made_s, recall_s = counts.made_s / counts.compared, counts.compared_s / counts.compared
        each = f"{show_seconds(recall_s)} each from memory, {show_seconds(made_s)} decoded anew"
        figures = {"made_s": made_s, "recall_s": recall_s, "recalled": counts.recalled}
        if not self.memory.is_on:
            why = "pictures from memory differ" if self.memory.differs else "memory is hardly faster"
            ledger.record(_entry(ledger, plan, "rejected", f"{why}: {each}", figures))
            return
        if self.memory.recalled_here == counts.recalled:  # else the workers of the loader share what is saved
            figures["saved_s"] = counts.recalled * (made_s - recall_s) - counts.remember_s
        taken = show_bytes(self.memory.bytes_taken)
        ledger.record(_entry(ledger, plan, "kept", f"{counts.recalled:,} recalled: {each}; {taken} of memory", figures))


def _entry(ledger: Ledger, plan: Plan, outcome: str, why: str, figures: dict[str, float]) -> Entry:
    return Entry(step=ledger.last_step, what=WHAT, outcome=outcome, plan=plan, why=why, figures=figures)
