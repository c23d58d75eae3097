"""Checkpoints: written to a new folder, hashed, synced and renamed, so that a crash always leaves a good one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.store import disk
from hotlap.store.manifest import FORMAT, MANIFEST, MOST_MANIFEST_BYTES, read_files, read_manifest, write_folder

__all__ = ["FORMAT", "KEPT", "MADE", "MANIFEST", "MOST_MANIFEST_BYTES", "Checkpoint", "Checkpoints"]

KEPT = 2
_NAME = re.compile(r"step-(\d{9,})", re.ASCII)
_REPLACED = ".was-"
MADE = "checkpoints.made"
"""A file beside the checkpoint folder: if it exists and no checkpoint does, checkpoints were lost."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint, checked byte for byte."""

    path: Path
    step: int
    facts: dict[str, Any]
    """The facts in the manifest: versions, code, data, settings, plan."""
    files: dict[str, bytes]


class Checkpoints:
    """The checkpoints of one run, in their own folder. Only one process may write there (see RunLock)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = folder.with_name(MADE)
        self.trusted: int | None = None
        """The newest checkpoint up to this step stays beside the last two: a training may have to go back to it."""

    def write(self, step: int, files: Mapping[str, Iterable[disk.Piece]], facts: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove all but the last two. Raises OSError; earlier checkpoints stay untouched."""
        if not self.folder.is_dir():
            disk.make_folder(self.folder)
            disk.sync_folder(self.folder.parent)
        new, final = self.folder / f".new-{step:09d}", self.folder / f"step-{step:09d}"
        if new.exists():
            shutil.rmtree(new)

        def place() -> None:
            if not os.path.lexists(final):
                disk.rename(new, final)
                return
            # The training continued from an earlier checkpoint. The old one may be the only good one, so it keeps
            # a name that `tidy` knows until the new one is in place.
            replaced = self.folder / f"{_REPLACED}{step:09d}"
            if os.path.lexists(replaced):
                disk.remove_folder(replaced)
            disk.rename(final, replaced)
            try:
                disk.rename(new, final)
            except OSError:
                if not os.path.lexists(final):
                    replaced.rename(final)
                raise

        write_folder(new, {"step": step}, files, facts, place)
        self._remove_old(step)
        self._note_first(final)
        return final

    def _note_first(self, final: Path) -> None:
        """Note that a checkpoint was completed; a crash in the first save leaves no note."""
        if os.path.lexists(self._made):
            return
        try:
            disk.write_new(self._made, [b"at least one checkpoint of this run was completed\n"])
            disk.sync_folder(self._made.parent)
        except OSError as error:
            raise StoreError(
                f"{self._made.name} could not be written: {error.strerror or error}; {final.name} itself is complete"
            ) from error

    def none_completed(self) -> bool:
        """Whether no checkpoint was ever completed here, so that a fresh start loses nothing. Call `tidy` first."""
        return not os.path.lexists(self._made) and not self.folder.is_symlink() and not self._found()

    def _remove_old(self, step: int) -> None:
        """Remove all but the last two up to `step` and the trusted one, also damaged ones that the run passed."""
        found = self._found()
        kept = [path for number, path in found if number <= step][:KEPT]
        if self.trusted is not None:
            kept += [path for number, path in found if number <= min(step, self.trusted)][:1]
        replaced = self.folder / f"{_REPLACED}{step:09d}"
        doomed = [path for _, path in found if path not in kept] + [replaced] * os.path.lexists(replaced)
        for old in doomed:
            try:
                disk.remove_folder(old)
            except OSError as error:
                raise StoreError(
                    f"the old checkpoint {old.name} could not be removed: {error.strerror or error}; "
                    "the new one is complete"
                ) from error

    def read(self, path: Path) -> Checkpoint:
        """A checkpoint, checked byte for byte; StoreError says what is wrong."""
        manifest = read_manifest(path)
        step = manifest.name.get("step")
        if type(step) is not int or step < 0:
            raise StoreError(f"{MANIFEST} is not a manifest")
        if path.name != f"step-{step:09d}":
            raise StoreError(f"{MANIFEST} belongs to step {step}, not to {path.name}")
        return Checkpoint(path=path, step=step, facts=manifest.facts, files=read_files(path, manifest))

    def newest_good(self, *, until: int | None = None) -> tuple[Checkpoint, list[str]]:
        """The newest good checkpoint up to step `until`, and a line for each newer one that is damaged.

        Raises StoreError if there is none: a training never starts anew silently.
        """
        if self.folder.is_symlink():
            raise StoreError(f"{self.folder} is a link; hotlap reads checkpoints only from the run folder itself")
        damaged: list[str] = []
        found = [path for step, path in self._found() if until is None or step <= until]
        for path in found:
            try:
                return self.read(path), damaged
            except StoreError as error:
                damaged.append(f"checkpoint {path.name} is damaged: {error}")
        if not found and os.path.lexists(self._made):
            raise StoreError(
                f"{self.folder.parent} had checkpoints and has none now; restore {self.folder.name}, "
                "or start the training anew in another folder"
            )
        if not found:
            raise StoreError(f"{self.folder.parent} has no checkpoint to resume from; start the training anew")
        raise StoreError(
            f"every checkpoint of {self.folder.parent} is damaged ({'; '.join(damaged)}); start anew in another folder"
        )

    def tidy(self) -> None:
        """Remove leftovers of a crash, and rename a checkpoint back that was about to be replaced."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return
        for path in self.folder.iterdir():
            if not path.is_dir() or path.is_symlink():
                continue
            final = path.with_name(f"step-{path.name.removeprefix(_REPLACED)}")
            if path.name.startswith(_REPLACED) and not os.path.lexists(final):
                disk.rename(path, final)
            elif path.name.startswith((".new-", ".old-", _REPLACED)):
                shutil.rmtree(path, ignore_errors=True)

    def _found(self) -> list[tuple[int, Path]]:
        """Steps and folders of all checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        steps = [(int(m[1]), path) for path in self.folder.iterdir() if (m := _NAME.fullmatch(path.name))]
        return sorted(steps, reverse=True)
