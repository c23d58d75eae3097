"""TreeFiles are features larger than memory: read in pieces, and quantised on disk by XGBoost."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.core.errors import JobError, StoreError, first_line, library, shown
from hotlap.trees.parameters import EXTRA, NEEDS

PAGE = 2**24
"""Values in a piece: 64 MiB of 32-bit floats."""
SCRATCH = "/var/tmp"
"""Where quantised values are kept on disk: other temporary folders are often in memory."""
PAGES = "hotlap-pages-"
"""How folders of quantised values are named."""
Array = np.ndarray[Any, Any]


class TreeFiles:
    """Features in files, rows × columns: the parts of a table in their order, or a memmap.

    They are read from end to end once here, which checks them, and several times when a training begins.
    """

    def __init__(self, parts: Sequence[str | Path] | Array, *, scratch: str | Path | None = None) -> None:
        """`parts` are `.npy` or `.parquet` files with the same columns, or an array such as a memmap.

        `scratch` is a folder on a disk with room for the quantised values while a training runs.
        Raises JobError where a part cannot be read, or has other columns, texts or infinite values.
        """
        self.scratch = Path(scratch or (SCRATCH if Path(SCRATCH).is_dir() else tempfile.gettempdir()))
        self._parts: list[Any] = [parts] if isinstance(parts, np.ndarray) else [Path(part) for part in parts]
        if not self._parts:
            raise JobError(["TreeFiles needs a part at least: .npy or .parquet files, or a memmap"])
        digest, rows, columns = hashlib.sha256(), 0, 0
        for piece in self.pieces():
            columns = columns or piece.shape[1]
            if piece.shape[1] != columns:
                raise JobError([f"a part has {piece.shape[1]} columns and the first one {columns}"])
            if (infinite := np.isinf(piece)).any():
                row, column = np.argwhere(infinite)[0]
                place = f"the first in row {rows + row}, column {column}"
                raise JobError([f"x has infinite values, {place}; write NaN for a missing value"])
            rows += len(piece)
            digest.update(np.ascontiguousarray(piece).data)
        if not rows:
            raise JobError(["the parts of TreeFiles hold no rows"])
        self.shape, self.size, self.digest = (rows, columns), rows * columns, digest.hexdigest()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        """The first rows, up to those of a piece."""
        return next(self.pieces())[rows]

    def pieces(self) -> Iterator[Array]:
        """The rows as 32-bit floats, in pieces that fit into memory."""
        for part in self._parts:
            yield from _pieces_of(part)

    def quantised(self, weight: Array | None, ref: Any, settings: dict[str, Any]) -> Any:
        """XGBoost's matrix of these rows, whose pages are on disk as long as it lives; `ref` has the bins to take."""
        xgb, files = library("xgboost", NEEDS, EXTRA), self
        _remove_left_over(self.scratch)
        try:
            folder = tempfile.mkdtemp(prefix=PAGES, dir=self.scratch)
            lock = _locked(Path(folder))
        except OSError as error:
            raise StoreError(f"cannot write to scratch={str(self.scratch)!r}: {error.strerror or error}") from error

        class Pages(xgb.DataIter):  # type: ignore[misc, name-defined]
            """Hands the pieces to XGBoost, as often as it asks for them."""

            def __init__(self) -> None:
                self.reset()
                super().__init__(cache_prefix=f"{folder}/pages")

            def next(self, input_data: Any) -> bool:
                piece = next(self.pieces, None)
                if piece is None:
                    return False
                rows = slice(self.at, self.at + len(piece))
                self.at += len(piece)
                input_data(data=piece, **({} if weight is None else {"weight": weight[rows]}))
                return True

            def reset(self) -> None:
                self.pieces, self.at = files.pieces(), 0

        try:
            matrix = xgb.ExtMemQuantileDMatrix(Pages(), ref=ref, **settings)
        except BaseException:
            _remove(folder, lock)
            raise
        weakref.finalize(matrix, _remove, folder, lock)
        return matrix


def _locked(folder: Path) -> int:
    """Lock a folder of pages for this process; the system unlocks it where the process is killed."""
    handle = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_EX)
    (folder / "new").rename(folder / "lock")  # no other process sees it unlocked
    return handle


def _remove(folder: str, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_left_over(scratch: Path) -> None:
    """Remove the pages of processes that were killed."""
    for file in scratch.glob(f"{PAGES}*/lock"):
        with suppress(OSError), file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent, ignore_errors=True)


def _pieces_of(part: Any) -> Iterator[Array]:
    name = "the array" if isinstance(part, np.ndarray) else str(part)
    try:
        if isinstance(part, Path) and part.suffix == ".parquet":
            yield from _parquet_pieces(part)
            return
        if isinstance(part, Path) and part.suffix != ".npy":
            raise JobError([f"{name} is neither .npy nor .parquet; write it as one of them"])
        table = np.load(part, mmap_mode="r", allow_pickle=False) if isinstance(part, Path) else part
        if table.ndim != 2 or table.dtype.kind not in "fiub" or not table.shape[1]:
            raise JobError(
                [f"{name} has the shape {table.shape} of {table.dtype}; it must be rows × columns of numbers"]
            )
        rows = max(1, PAGE // table.shape[1])
        for start in range(0, len(table), rows):
            with np.errstate(over="ignore"):  # what is too large is infinite, and refused
                yield np.array(table[start : start + rows], dtype=np.float32)
    except (OSError, ValueError, TypeError) as error:
        raise JobError([f"cannot read {shown(name)}: {first_line(error)}"]) from None


def _parquet_pieces(file: Path) -> Iterator[Array]:
    parquet = library("pyarrow.parquet", "reading a .parquet file", "[recipes]")
    with parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(max(1, PAGE // max(1, table.metadata.num_columns))):
            columns = [column.to_numpy(zero_copy_only=False).astype(np.float32) for column in batch.columns]
            yield np.stack(columns, axis=1)


def content_of(x: Any) -> Any:
    """What decides features, as a key of a cache takes it."""
    return x.digest if isinstance(x, TreeFiles) else x
