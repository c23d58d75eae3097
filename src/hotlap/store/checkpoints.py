"""Checkpoints: written to a new place, hashed, synced and renamed, so that a crash at any moment leaves a good one."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.store import disk
from hotlap.store.encoding import from_json, to_json

FORMAT = 1
KEPT = 2
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 16 * 1024 * 1024
_NAME = re.compile(r"step-(\d{9,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.(safetensors|json)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every byte is as it was written."""

    path: Path
    step: int
    facts: dict[str, Any]
    """What the manifest says beside the files: versions, code, data, settings, plan."""
    files: dict[str, bytes]


class Checkpoints:
    """The checkpoints of one run, in a folder of their own. Only one process may write there (see RunLock)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, files: Mapping[str, Iterable[disk.Piece]], facts: dict[str, Any]) -> Path:
        """Write a checkpoint, then let go of all but the last two. Raises OSError; the ones before stay untouched."""
        self.folder.mkdir(exist_ok=True)
        new, final = self.folder / f".new-{step:09d}", self.folder / f"step-{step:09d}"
        if new.exists():
            shutil.rmtree(new)
        try:
            disk.make_folder(new)
            listed = {}
            for name, pieces in files.items():
                size, digest = disk.write_new(new / name, pieces)
                listed[name] = {"bytes": size, "sha256": digest}
            manifest = {"format": FORMAT, "step": step, "files": listed, "facts": facts}
            disk.write_new(new / MANIFEST, [to_json(manifest | {"sha256": _digest(manifest)})])
            disk.sync_folder(new)
            if final.exists():  # of a training that went on from an earlier one
                disk.remove_folder(final)
            disk.rename(new, final)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        for old in self._found()[KEPT:]:
            disk.remove_folder(old)
        return final

    def read(self, path: Path) -> Checkpoint:
        """A checkpoint, if every byte of it is as it was written; StoreError says what is wrong."""
        if path.is_symlink() or not path.is_dir():
            raise StoreError(f"{path.name} is not a folder of its own")
        manifest = from_json(disk.read_small(path / MANIFEST, MOST_MANIFEST_BYTES), MANIFEST)
        step, listed, facts = _checked(manifest)
        if path.name != f"step-{step:09d}":
            raise StoreError(f"{MANIFEST} is of step {step}, not of {path.name}")
        files = {name: disk.read_checked(path / name, *entry) for name, entry in listed.items()}
        return Checkpoint(path=path, step=step, facts=facts, files=files)

    def newest_good(self) -> tuple[Checkpoint, list[str]]:
        """The newest checkpoint that is whole, and a line for each newer one that is not.

        Raises StoreError where none is: a training never begins anew in silence.
        """
        damaged: list[str] = []
        found = self._found()
        for path in found:
            try:
                return self.read(path), damaged
            except StoreError as error:
                damaged.append(f"checkpoint {path.name} is damaged: {error}")
        if not found:
            raise StoreError(f"{self.folder.parent} has no checkpoint to resume from; start the training anew")
        told = "; ".join(damaged)
        raise StoreError(f"no checkpoint of {self.folder.parent} is whole ({told}); start anew in another folder")

    def tidy(self) -> None:
        """Remove what a crash left half done."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith((".new-", ".old-")) and path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)

    def _found(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        steps = [(int(m[1]), path) for path in self.folder.iterdir() if (m := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(steps, reverse=True)]


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(manifest)).hexdigest()


def _checked(manifest: Any) -> tuple[int, dict[str, tuple[int, str]], dict[str, Any]]:
    """Step, files and facts of a manifest that is in its form and was not changed."""
    if not isinstance(manifest, dict) or "sha256" not in manifest:
        raise StoreError(f"{MANIFEST} is not a manifest")
    rest = {k: v for k, v in manifest.items() if k != "sha256"}
    if rest.get("format") != FORMAT:
        raise StoreError(f"{MANIFEST} has format {rest.get('format')!r}; this hotlap reads {FORMAT}")
    if _digest(rest) != manifest["sha256"]:
        raise StoreError(f"{MANIFEST} differs from what was written (sha256)")
    step, files, facts = rest.get("step"), rest.get("files"), rest.get("facts")
    if not isinstance(step, int) or step < 0 or not isinstance(files, dict) or not isinstance(facts, dict):
        raise StoreError(f"{MANIFEST} is not a manifest")
    listed = {}
    for name, entry in files.items():
        # Names come from a file that anyone may have written: plain ones only, so that none leads out.
        if not _FILE.fullmatch(name):
            raise StoreError(f"{MANIFEST} names the file {name!r:.60}, which is not a plain name")
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
            raise StoreError(f"{MANIFEST} has no size for {name}")
        listed[name] = (entry["bytes"], str(entry.get("sha256")))
    return step, listed, facts
