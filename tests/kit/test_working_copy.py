"""A probe runs a script in a copy of its working folder: the user's files stay as they are, whatever it does."""
# ruff: noqa: PTH103, PTH106, PTH107, PTH123, SIM115

import contextlib
import os
import random
import shutil
import subprocess
import textwrap
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from killed import in_a_child
from torch import nn

from hotlap.core.errors import StoreError
from hotlap.kit import probe, working_copy
from hotlap.kit.probe import ProbeRequest, ScriptEndedError, run_probe
from hotlap.kit.working_copy import WorkingCopy, WriteGuard
from hotlap.script.patches import Patches
from hotlap.script.running import Target

SAVES = ((torch, "save"), (torch.jit.RecursiveScriptModule, "save"), (safetensors.torch, "serialize_file"))

ATOMIC = {
    "os.replace": "torch.save(1, 'best.tmp'); os.replace('best.tmp', 'best.pt')",
    "os.rename": "torch.save(1, 'best.tmp'); os.rename('best.tmp', 'best.pt')",
    "Path.replace": "torch.save(1, 'best.tmp'); Path('best.tmp').replace(Path('best.pt'))",
    "Path.rename": "torch.save(1, 'best.tmp'); Path('best.tmp').rename('best.pt')",
    "shutil.move": "torch.save(1, 'best.tmp'); shutil.move('best.tmp', 'best.pt')",
    "a file of its own": """
        with open('best.tmp', 'wb') as file:
            torch.save(1, file)
        os.replace('best.tmp', 'best.pt')
    """,
    "a temporary file": """
        import tempfile
        with tempfile.NamedTemporaryFile(dir='.', delete=False) as file:
            torch.save(1, file)
        os.replace(file.name, 'best.pt')
    """,
    "a temporary folder": """
        import tempfile
        with tempfile.TemporaryDirectory(dir='.') as folder:
            torch.save(1, f'{folder}/best.pt')
            shutil.move(f'{folder}/best.pt', 'best.pt')
    """,
    "a copy": "torch.save(1, 'last.pt'); shutil.copyfile('last.pt', 'best.pt')",
    "a link": """
        torch.save(1, 'epoch.pt')
        if os.path.lexists('best.pt'):
            os.remove('best.pt')
        os.symlink('epoch.pt', 'best.pt')
    """,
    "a folder": """
        os.makedirs('new')
        torch.save(1, 'new/best.pt')
        if os.path.isdir('models'):
            shutil.rmtree('models')
        os.rename('new', 'models')
    """,
    "safetensors": """
        from safetensors.torch import save_file
        save_file(model.state_dict(), 'best.pt')
        save_file(model.state_dict(), filename=Path('models/best.pt'))
    """,
    "TorchScript": "torch.jit.script(model).save('best.pt')",
    "the format of old": "torch.save(1, 'best.pt', _use_new_zipfile_serialization=False)",
    "a name that is not ASCII": "torch.save(1, 'größe.pt'); os.replace('größe.pt', 'best.pt')",
}

OTHERS = {
    "writing": "open('best.pt', 'w').write('x'); Path('models/best.pt').write_text('x')",
    "writing twice": "open('best.pt', 'w').write('x'); open('best.pt', 'w').write('y')",
    "appending": "open('best.pt', 'a').write('x')",
    "changing": "file = open('best.pt', 'r+b'); assert file.read() == b'precious'; file.write(b'x'); file.close()",
    "by a number": "os.write(os.open('best.pt', os.O_WRONLY), b'x')",
    "json": "import json; json.dump({}, open('best.pt', 'w'))",
    "numpy": "import numpy; numpy.savez('models/best.npz', a=numpy.ones(3)); numpy.save('large.npy', numpy.ones(3))",
    "a map": "import numpy; numpy.memmap('best.pt', dtype='u1', mode='r+')[0] = 7",
    "pickle": "import pickle; pickle.dump(model.state_dict(), open('best.pt', 'wb'))",
    "removing": "os.remove('best.pt'); Path('models/best.pt').unlink()",
    "clearing": "shutil.rmtree('models')",
    "clearing, to begin anew": "shutil.rmtree('models'); os.makedirs('models/a'); torch.save(1, 'models/best.pt')",
    "clearing by hand": """
        for path in Path('models').iterdir():
            path.unlink()
        os.rmdir('models')
    """,
    "truncating": "os.truncate('best.pt', 2)",
    "a turn of names": "os.rename('best.pt', 'old.pt'); open('old.pt', 'a').write('x'); torch.save(1, 'best.pt')",
    "a turn of folders": "os.rename('models', 'old'); os.mkdir('models'); torch.save(1, 'models/best.pt')",
    "a turn of folders that is refused": """
        try:
            os.rename('models', 'data')
        except OSError:
            torch.save(1, 'best.pt')
    """,
    "a name that cannot be": """
        try:
            os.rename('best.pt', 'large.npy/best.pt')
        except OSError:
            torch.save(1, 'models/best.pt')
    """,
    "weights, then a folder": "torch.save(1, 'a'); os.remove('a'); os.mkdir('a')",
    "through a link": "torch.save(1, 'link.pt')",
    "a link anew": "os.remove('link.pt'); os.symlink('large.npy', 'link.pt')",
    "new folders": "os.makedirs('a/b/c'); torch.save(1, 'a/b/c/best.pt')",
    "another thread": """
        import threading
        thread = threading.Thread(target=torch.save, args=(1, 'best.pt'))
        thread.start()
        thread.join()
    """,
    "another process": """
        import multiprocessing
        process = multiprocessing.get_context('fork').Process(target=Path('best.pt').write_text, args=('x',))
        process.start()
        process.join()
        Path('best.pt').write_text('y')
    """,
}

FOLDERS = ("d/e", "f")
FILES = ("a", "b", "d/a", "d/b", "d/e/a", "f/a")
LINKS = {"l": "b", "f/l": "../d/a"}
PLACES = (*FILES, *LINKS, "d", "f", "d/e", "g", "g/a", "x", "x/a", "../beside", "../new")
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
    "save": lambda one, other: torch.save(1, one),
}


def _tree(folder):
    """All that is in it, links as such."""
    paths = sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in paths
    }


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A working folder with files of the user's."""
    folder = tmp_path / "mine"
    for name in ("models", "data"):
        (folder / name).mkdir(parents=True)
    for name in ("best.pt", "models/best.pt", "models/best.npz", "data/part", "large.npy", "../beside"):
        (folder / name).write_text("precious")
    (folder / "link.pt").symlink_to("best.pt")
    monkeypatch.chdir(folder)
    return folder


def done_in_copy(folder, does):
    """Do it as the script of a probe would, in a process of its own, which cannot stop to listen."""
    copy = WorkingCopy(folder)

    def work():
        warnings.simplefilter("ignore")  # scripting is deprecated
        os.chdir(copy.folder)
        guard, patches = WriteGuard(folder), Patches(in_forks=True)
        for owner, name in SAVES:
            patches.put(owner, name, guard.before_saving)
        guard.listen()
        does()

    said = folder / "said"
    assert in_a_child(work, said) == 0, said.read_text()


@pytest.fixture(params=[working_copy.MOST_FILE_BYTES, 0], ids=["copied", "linked"])
def by(request, monkeypatch):
    """How files get into the copy."""
    monkeypatch.setattr(working_copy, "MOST_FILE_BYTES", request.param)


@pytest.fixture
def aside(tmp_path):
    (tmp_path / "aside").mkdir()
    return tmp_path / "aside"


@pytest.mark.parametrize("does", [*ATOMIC.values(), *OTHERS.values()], ids=[*ATOMIC, *OTHERS])
def test_all_files_are_as_before(mine, aside, by, does):
    before = _tree(mine.parent)
    names = {"os": os, "shutil": shutil, "torch": torch, "Path": Path, "model": nn.Linear(8, 2)}
    done_in_copy(aside, lambda: exec(textwrap.dedent(does), names))
    shutil.rmtree(aside)
    assert _tree(mine.parent) == {name: was for name, was in before.items() if name != "aside"}


def test_whatever_is_done_to_them_all_files_are_as_before(tmp_path, aside, by, monkeypatch):
    folder = tmp_path / "mine"
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    for name in (*FILES, "../beside"):
        (folder / name).write_text(f"precious {name}")
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)
    monkeypatch.chdir(folder)
    before = _tree(folder)
    for number in range(12):
        chance = random.Random(number)
        (part := aside / str(number)).mkdir()

        def some(chance=chance):
            places = (*PLACES, *(str(folder / name) for name in FILES))  # by their own names, too
            for _ in range(12):
                way, one, other = chance.choice(sorted(WAYS)), chance.choice(places), chance.choice(places)
                with contextlib.suppress(Exception):
                    WAYS[way](one, other)

        done_in_copy(part, some)
        assert _tree(folder) | before == _tree(folder), f"number {number}"
        assert (tmp_path / "beside").read_text() == "precious ../beside"
        for name in _tree(folder).keys() - before.keys():  # new files elsewhere stay
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
        shutil.rmtree(part)


TRAINS = """
import os, shutil
from pathlib import Path
import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    for step in range(10_000):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
"""


def script(folder, does):
    path = folder / "mine.py"
    path.write_text(f"{TRAINS}\n{textwrap.dedent(does)}\ntrain()\n")
    return Target(path=str(path))


def test_a_script_reads_its_files_and_what_it_writes_is_gone(mine):
    target = script(
        mine,
        """
        assert Path('best.pt').read_text() == Path('../beside').read_text() == 'precious'
        assert Path(__file__).resolve().parent == Path.cwd()
        torch.save(1, 'best.pt'); torch.save(1, Path(__file__).parent / 'models' / 'new.pt')
        os.mkdir('runs'); Path('runs/log').write_text('x'); os.remove('large.npy'); shutil.rmtree('data')
        """,
    )
    before = _tree(mine.parent)
    assert run_probe(target, ProbeRequest(laps=1, lap_s=0.0)).laps
    assert _tree(mine.parent) == before


def test_a_file_elsewhere_is_not_changed_and_its_name_is_the_users(mine, tmp_path):
    beside = tmp_path / "beside"
    target = script(mine, f"torch.save(1, {str(beside)!r})")
    with pytest.raises(ScriptEndedError, match=rf"the script would change {beside}, which .*write elsewhere") as caught:
        run_probe(target, ProbeRequest())
    assert f"{mine / 'mine.py'}" in str(caught.value)
    assert "hotlap-probe" not in str(caught.value)
    assert beside.read_text() == "precious"


def test_a_script_may_write_new_files_elsewhere_as_often_as_it_likes(mine, tmp_path):
    new = tmp_path / "new.pt"
    target = script(mine, f"for n in range(3): torch.save(n, {str(new)!r})\nos.remove({str(new)!r})")
    assert run_probe(target, ProbeRequest(laps=1, lap_s=0.0)).laps
    assert not new.exists()


def test_a_probe_does_without_torchscript(mine, monkeypatch):
    target = script(mine, "torch.save(1, 'best.pt')")
    monkeypatch.setattr(probe, "subprocess", subprocess)  # a process of its own: it is read when torch is loaded
    monkeypatch.setenv("PYTORCH_JIT", "0")
    run_probe(target, ProbeRequest(laps=1, lap_s=0.0))
    assert (mine / "best.pt").read_text() == "precious"


def test_a_large_file_and_a_large_folder_are_links_and_what_a_link_leads_to_is_read(mine, aside, monkeypatch):
    monkeypatch.setattr(working_copy, "MOST_FILE_BYTES", 8)
    monkeypatch.setattr(working_copy, "MOST_ENTRIES", 8)
    (mine / "data" / "large").write_text("precious!")
    for number in range(9):
        (mine / "models" / str(number)).touch()
    copy = WorkingCopy(aside).folder
    assert (copy / "models").readlink() == mine / "models"
    assert (copy / "data").is_dir()
    assert not (copy / "data").is_symlink()
    assert (copy / "data" / "large").readlink() == mine / "data" / "large"
    assert not (copy / "best.pt").is_symlink()
    assert (copy / "link.pt").read_text() == (copy / ".." / "beside").read_text() == "precious"


def test_a_hidden_folder_is_a_link(mine, aside):
    (mine / ".git").mkdir()
    assert (WorkingCopy(aside).folder / ".git").readlink() == mine / ".git"


def test_nothing_is_left_of_a_probe_whose_working_folder_cannot_be_copied(mine, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(working_copy.shutil, "copy2", full)
    monkeypatch.setattr(probe.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with pytest.raises(StoreError, match=r"cannot copy the working folder to .*: No space left on device; .*TMPDIR"):
        run_probe(script(mine, ""), ProbeRequest())
    assert list((tmp_path / "tmp").iterdir()) == []
