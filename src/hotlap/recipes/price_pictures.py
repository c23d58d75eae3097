"""Pictures beside the texts of the recipe `price`: where their files are, and what the network sees of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, shown
from hotlap.data.pictures import CHANNELS, decoded, list_broken, pillow
from hotlap.engine.augment import IMAGENET_MEAN, IMAGENET_SPREAD, Normalise
from hotlap.recipes.kinds import Column, word_column
from hotlap.recipes.options import is_file
from hotlap.recipes.picture_files import LOOKED_AT, files_named, from_one_folder, placed
from hotlap.recipes.recipe import Say
from hotlap.recipes.tables import Table
from hotlap.recipes.tabular import now_and_then

LINKS = ("http://", "https://")
WIDTHS = (16, 32, 64, 128)
"""Channels of the network's convolutions, each of which halves the sides."""
GROUPS = 8
"""Of channels that are normalised together: as with a batch norm, but each picture for itself."""


@dataclass(frozen=True, kw_only=True)
class PictureColumn:
    """A column of a table that names pictures, and how they are read."""

    name: str
    root: str
    """Where paths begin; empty for the folder of the table."""
    size: int
    """Pixels along a side."""

    def check(self, table: Table) -> None:
        """Refuse a column of links, which hotlap does not download."""
        pillow()
        column = table[self.name]
        paths = [path for path in column.texts() if path]
        links = [path for path in paths if path.startswith(LINKS)]
        if not paths or len(links) == len(paths):
            what = f"links, as {shown(links[0], 60)}; hotlap downloads nothing" if links else "no paths"
            raise DataError(f"pictures={self.name} holds {what}; name a column of files")

    def read(self, table: Table, say: Say, *, is_asked: bool) -> dict[str, Tensor]:
        """The pixels of each row, black where there is no picture, and whether there is one; counts rows without."""
        paths = ["" if path.startswith(LINKS) else path for path in table[self.name].texts()]
        if any(paths):
            files = files_named(paths, table.path, self.root, say, is_asked=is_asked)
            found = decoded(
                files, size=self.size, progress=now_and_then(say, "pictures  {done:,} of {total:,} decoded")
            )
            say(f"pictures  {found.line}")
            pixels, broken = found.pixels, found.broken
        else:
            pixels = torch.zeros(len(paths), CHANNELS, self.size, self.size, dtype=torch.uint8)
            broken = dict.fromkeys(range(len(paths)), "no path")
        if broken:
            named = [path or "(no path)" for path in paths]
            count = f"{len(broken):,} of {len(paths):,} rows have no picture: {list_broken(named, broken)}"
            say(f"missing   {count}; that it is missing is a feature too")
        has = torch.ones(len(paths))
        has[list(broken)] = 0.0
        return {"pixels": pixels, "has_picture": has}

    def in_memory(self, table: Table) -> Table:
        """A table of rows in memory, whose paths may lie anywhere."""
        base, paths = from_one_folder(table[self.name].texts())
        return replace(table, path=base, columns={**table.columns, self.name: word_column(self.name, paths)})

    def state(self) -> dict[str, Any]:
        """The fields as JSON."""
        return asdict(self)


class PictureBranch(nn.Module):
    """A small network of convolutions: a vector for each picture, zeros and a flag where there is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [Normalise(IMAGENET_MEAN, IMAGENET_SPREAD)]
        for before, after in zip((CHANNELS, *WIDTHS), WIDTHS, strict=False):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(GROUPS, after), nn.GELU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(WIDTHS[-1], width)

    def forward(self, pixels: Tensor, has_picture: Tensor) -> Tensor:
        """Vectors of `width` + 1 numbers."""
        seen, has = self.head(self.body(pixels).mean((2, 3))), has_picture.unsqueeze(1)
        return torch.cat([seen * has, has], 1)


def are_there(column: Column, table: Table, root: str) -> bool:
    """Whether one of the first paths of a column is that of a file."""
    paths = list(islice((path for path in column.texts() if path and not path.startswith(LINKS)), LOOKED_AT))
    return any(map(is_file, _placed(paths, table, root)))


def _placed(paths: list[str], table: Table, root: str) -> Iterable[str]:
    try:
        return placed(paths, table.path, root)
    except DataError:
        return ()
