"""Nothing of the user's is lost while a script is looked at, however it writes, replaces and removes files."""

import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hotlap.core.errors import TrainingError
from hotlap.kit import saved_files, visiting
from hotlap.kit.looks import Wish
from hotlap.kit.saved_files import SavedFiles, holds_files, put_back
from hotlap.kit.visiting import visit
from hotlap.script.running import Target

TRAINS = """
import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    for step in range(10_000):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
"""

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
    """A folder with files of the user's, in which a script does something and then trains."""
    for folder in ("models", "data"):
        (tmp_path / folder).mkdir()
    for name in ("best.pt", "models/best.pt", "models/best.npz", "data/part", "large.npy"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "link.pt").symlink_to("best.pt")
    monkeypatch.chdir(tmp_path)

    def made(does):
        path = tmp_path / "mine.py"
        head = "import os, shutil\nfrom pathlib import Path\n"
        path.write_text(f"{head}{TRAINS}\n{textwrap.dedent(does)}\ntrain()\n")
        return Target(path=str(path))

    return made


@pytest.mark.parametrize("does", [*ATOMIC.values(), *OTHERS.values()], ids=[*ATOMIC, *OTHERS])
def test_all_files_are_as_before(mine, tmp_path, does):
    target = mine(does)
    before = _tree(tmp_path)
    visit(target, Wish(laps=1, lap_s=0.0))
    assert _tree(tmp_path) == before


def test_whatever_is_done_to_them_all_files_are_as_before():
    ways = Path(__file__).parents[1] / "support" / "many_ways.py"
    done = subprocess.run([sys.executable, ways, "0", "400"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("does", ATOMIC.values(), ids=ATOMIC)
def test_weights_that_were_not_there_are_not_afterwards(mine, tmp_path, does):
    (tmp_path / "best.pt").unlink()
    (tmp_path / "link.pt").unlink()
    target = mine(does)
    before = _tree(tmp_path)
    visit(target, Wish(laps=1, lap_s=0.0))
    assert _tree(tmp_path) == before


def test_a_look_does_without_torchscript(mine, tmp_path, monkeypatch):
    target = mine("torch.save(1, 'best.pt')")
    monkeypatch.setattr(visiting, "subprocess", subprocess)  # a process of its own: it is read when torch is loaded
    monkeypatch.setenv("PYTORCH_JIT", "0")
    visit(target, Wish(laps=1, lap_s=0.0))
    assert (tmp_path / "best.pt").read_text() == "precious"


def test_other_new_files_stay(mine, tmp_path):
    """As what a script downloads or prepares: each look would have to do so again."""
    target = mine("""
        os.mkdir('parts')
        Path('parts/part').write_text('much')
        os.rename('parts/part', 'parts/whole')
        os.rename('parts', 'downloaded')
    """)
    visit(target, Wish(laps=1, lap_s=0.0))
    assert (tmp_path / "downloaded" / "whole").read_text() == "much"


def test_a_large_file_that_is_changed_in_place_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_files, "MOST_COPIED_BYTES", 4)
    place, aside = tmp_path / "data.bin", tmp_path / "aside"
    aside.mkdir()
    place.write_text("precious")
    SavedFiles(aside).hear("open", (str(place), "r+b", os.O_RDWR))
    assert place.read_text() == "precious"
    assert put_back(aside) == [str(place)]


def test_what_cannot_be_kept_is_not_written(tmp_path):
    place, aside = tmp_path / "best.pt", tmp_path / "aside"
    aside.mkdir()
    place.write_text("precious")
    files = SavedFiles(aside)
    shutil.rmtree(aside)
    with pytest.raises(TrainingError, match=r"cannot be kept as it is before: .*aside.*HOTLAP_CACHE"):
        files.hear("open", (str(place), "w", os.O_WRONLY | os.O_TRUNC))
    assert place.read_text() == "precious"


def test_one_file_that_cannot_be_put_back_keeps_no_other_from_it(tmp_path):
    first, second, aside = tmp_path / "a" / "best.pt", tmp_path / "b" / "best.pt", tmp_path / "aside"
    aside.mkdir()
    files = SavedFiles(aside)
    for place in (first, second):
        place.parent.mkdir()
        place.write_text("precious")
        files.hear("open", (str(place), "w", os.O_WRONLY | os.O_TRUNC))
    second.parent.rmdir()
    second.parent.write_text("in its way")
    with pytest.raises(OSError, match="b"):
        put_back(aside)
    assert first.read_text() == "precious"
    assert holds_files(aside)


@pytest.mark.parametrize("event", ["open", "os.remove"])
def test_a_file_that_somebody_else_removes_meanwhile_breaks_nothing(tmp_path, monkeypatch, event):
    place, aside = tmp_path / "best.pt", tmp_path / "aside"
    aside.mkdir()
    place.write_text("theirs")
    files = SavedFiles(aside)
    monkeypatch.setattr(files, "_room", lambda: place.unlink() or aside / "kept")
    files.hear(event, {"open": (str(place), "w", os.O_WRONLY | os.O_TRUNC), "os.remove": (str(place), -1)}[event])
    assert put_back(aside) == []


@pytest.mark.parametrize("event", ["open", "os.remove", "os.rename", "shutil.rmtree"])
def test_another_disk_will_do(tmp_path, monkeypatch, event):
    place, aside = tmp_path / "models" / "best.pt", tmp_path / "aside"
    aside.mkdir()
    place.parent.mkdir()
    place.write_text("precious")
    rename = os.rename

    def on_this_disk(source, target, **_):
        if Path(source).parent != Path(target).parent:
            raise OSError(18, "Invalid cross-device link")
        return rename(source, target)

    monkeypatch.setattr(os, "rename", on_this_disk)
    monkeypatch.setattr(os, "link", on_this_disk)
    args = {
        "open": (str(place), "w", os.O_WRONLY | os.O_TRUNC),
        "os.remove": (str(place), -1),
        "os.rename": (str(tmp_path / "new"), str(place), -1, -1),
        "shutil.rmtree": (place.parent, None),
    }
    SavedFiles(aside).hear(event, args[event])
    shutil.rmtree(place.parent)
    put_back(aside)
    assert place.read_text() == "precious"


def test_looks_beside_each_other_do_not_take_each_other_for_killed_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path))

    def look(turn):
        with visiting._look_folder() as folder:
            (folder / visiting.SAID).touch()
            return folder.is_dir()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look, range(200)))
