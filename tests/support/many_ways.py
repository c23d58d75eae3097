"""Does things to files by chance while they are looked after, and tells whether all are as before in the end.

python many_ways.py FIRST LAST: for each number between them other things, many of which fail.
"""
# ruff: noqa: PTH103, PTH106, PTH107, PTH123, SIM115

import contextlib
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import unsynced  # noqa: F401

from hotlap.kit.saved_files import SavedFiles, put_back

FOLDERS = ("d/e", "f")
FILES = ("a", "b", "d/a", "d/b", "d/e/a", "f/a")
LINKS = {"l": "b", "f/l": "../d/a"}
PLACES = (*FILES, *LINKS, "d", "f", "d/e", "g", "g/a", "x", "x/a")
WAYS = {
    "write": lambda one, other: Path(one).write_text("new"),
    "append": lambda one, other: open(one, "a").write("new"),
    "change": lambda one, other: open(one, "r+").write("new"),
    "remove": lambda one, other: os.remove(one),
    "rename": os.rename,
    "replace": os.replace,
    "move": shutil.move,
    "clear": lambda one, other: shutil.rmtree(one),
    "make": lambda one, other: os.makedirs(one),
    "copy": shutil.copy,
    "copy whole": shutil.copytree,
    "link": os.link,
    "point": os.symlink,
    "truncate": lambda one, other: os.truncate(one, 1),
    "unmake": lambda one, other: os.rmdir(one),
}


def tree(folder):
    def content(path):
        if path.is_symlink():
            return str(path.readlink())
        return path.read_text() if path.is_file() else None

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


def do_some(folder, kept, number):
    """In a process of its own, since it cannot stop listening."""
    chance, files, done = random.Random(number), SavedFiles(kept), []
    os.chdir(folder)
    files.listen()

    def write_unheard(content, file):
        with files._alone():
            Path(file).write_text(content)

    ways = {**WAYS, "save": lambda one, other: files.before(write_unheard)("weights", one)}
    for _ in range(chance.randint(1, 12)):
        done.append((chance.choice(sorted(ways)), chance.choice(PLACES), chance.choice(PLACES)))
        way, one, other = done[-1]
        with contextlib.suppress(Exception):
            ways[way](one, other)
    return done


def lost(number):
    """What is not as it was, and what was done; nothing where all is."""
    with tempfile.TemporaryDirectory() as base:
        folder, kept, told = Path(base) / "files", Path(base) / "kept", Path(base) / "told"
        kept.mkdir()
        for name in FOLDERS:
            (folder / name).mkdir(parents=True)
        for name in FILES:
            (folder / name).write_text(f"precious {name}")
        for name, target in LINKS.items():
            (folder / name).symlink_to(target)
        before = tree(folder)
        child = os.fork()
        if child == 0:
            done = do_some(folder, kept, number)
            told.write_text(repr(done))
            os._exit(0)
        os.waitpid(child, 0)
        put_back(kept)
        after = tree(folder)
        other = {name: after.get(name, "gone") for name in before if after.get(name, "gone") != before[name]}
        return (other, told.read_text()) if other else None


if __name__ == "__main__":
    found = {number: what for number in range(*map(int, sys.argv[1:3])) if (what := lost(number))}
    for number, what in found.items():
        print(number, *what)
    sys.exit(bool(found))
