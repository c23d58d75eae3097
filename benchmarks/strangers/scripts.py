"""The scripts of a folder: what describes them, and how they get there from local git mirrors."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

DESCRIPTION = "strangers.toml"
OURS = Path(__file__).parent / DESCRIPTION
STAND_INS = Path(__file__).parent / "stand_ins"


class FolderError(ValueError):
    """The folder or its description cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Stranger:
    """One script: where it comes from, how it is run and what it needs."""

    name: str
    command: str
    """Script and arguments, as after `python`; about 60 s by itself on one H200."""
    tiny: str = ""
    """The same, small enough for a few seconds on a CPU. Empty: as `command`."""
    repository: str = ""
    """owner/name."""
    commit: str = ""
    paths: tuple[str, ...] = ()
    """What of the repository is laid out, under the same paths."""
    folder: str = "."
    """Where it runs, inside its own folder."""
    data: dict[str, Any] = field(default_factory=dict)
    """`maker` (a function of `makers`), `into` (a folder inside its own one) and arguments of the maker."""
    tiny_data: dict[str, Any] = field(default_factory=dict)
    """Arguments that differ for `tiny`."""
    imports: tuple[str, ...] = ()
    """Modules that it imports beside torch and numpy."""
    stand_ins: tuple[str, ...] = ()
    """Modules replaced by those of `stand_ins`, since the real ones ask a network."""
    fallbacks: tuple[str, ...] = ()
    """Modules replaced in the same way, but only where the real ones are not installed."""
    python_path: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    terminal: bool = False
    """Whether stdin has to be a terminal."""
    seed: str = ""
    """Arguments that give it another seed."""
    figures_in: tuple[str, ...] = ()
    """Files that it writes (glob patterns) whose figures are compared like printed ones."""
    ignore: str = ""
    """A pattern of printed figures that are times."""
    seconds: float = 60.0
    """What it is expected to take by itself on one H200."""
    home: Path = Path()

    def words(self, *, tiny: bool, other_seed: bool = False) -> list[str]:
        """The command, as words."""
        return [
            *(self.tiny if tiny and self.tiny else self.command).split(),
            *(self.seed.split() if other_seed else []),
        ]

    def data_arguments(self, *, tiny: bool) -> dict[str, Any]:
        """What its maker of data gets, `maker` and `into` left out."""
        given = self.data | (self.tiny_data if tiny else {})
        return {key: value for key, value in given.items() if key not in ("maker", "into")}


def read_folder(folder: Path) -> list[Stranger]:
    """Read the scripts of a folder: those of its description, or each .py file in it where it has none."""
    if not folder.is_dir():
        raise FolderError(f"--folder {folder}: there is no such folder; --fetch-from lays one out")
    description = folder / DESCRIPTION
    if description.exists():
        found = [one for one in read_description(description, folder) if one.home.is_dir()]
    else:
        found = [Stranger(name=at.stem, command=at.name, home=folder) for at in sorted(folder.glob("*.py"))]
    if not found:
        raise FolderError(f"--folder {folder}: neither a folder of a script in {DESCRIPTION} nor a .py file is there")
    return found


def read_description(file: Path, folder: Path) -> list[Stranger]:
    """Read a description; the script NAME has its files in `folder`/NAME."""
    known = {one.name for one in fields(Stranger)} - {"name", "home"}
    found = []
    for name, given in tomllib.loads(file.read_text("utf-8")).items():
        if unknown := sorted(set(given) - known):
            raise FolderError(f"{file}: {name} has {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        if "command" not in given:
            raise FolderError(f"{file}: {name} has no command")
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        found.append(Stranger(name=name, home=folder / name, **values))
    return found


def lay_out(mirrors: Path, folder: Path, only: list[str]) -> tuple[list[str], list[str]]:
    """Put the scripts of `strangers.toml` into a folder, from git directories under `mirrors`.

    Returns the names laid out, and a line for each that could not be.
    """
    laid: list[str] = []
    missing: list[str] = []
    for one in read_description(OURS, folder):
        if only and one.name not in only:
            continue
        git = git_directory(mirrors, one.repository)
        if git is None:
            missing.append(f"{one.name}: {one.repository} is not under {mirrors}")
            continue
        command = ["git", f"--git-dir={git}", "archive", "--format=tar", one.commit, *one.paths]
        done = subprocess.run(command, capture_output=True)
        if done.returncode:
            missing.append(f"{one.name}: {done.stderr.decode(errors='replace').strip()}")
            continue
        shutil.rmtree(one.home, ignore_errors=True)
        one.home.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(one.home, filter="data")
        laid.append(one.name)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(OURS, folder / DESCRIPTION)
    return laid, missing


def git_directory(mirrors: Path, repository: str) -> Path | None:
    """Find the git directory of owner/name, bare or with a work tree."""
    owner, _, name = repository.partition("/")
    for at in (f"{owner}+{name}", f"{owner}/{name}", f"{owner}/{name}.git", f"{name}.git", name):
        for inside in (".git", "repo/.git", "repo", "."):
            if (mirrors / at / inside / "HEAD").is_file():
                return mirrors / at / inside
    return None
