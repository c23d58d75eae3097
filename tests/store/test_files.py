"""A crash leaves the old file or the new one, and never anything else."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hotlap.core.errors import StoreError
from hotlap.store.files import append_line, read_text, write_atomically, write_text


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_a_new_file_is_written_and_an_old_one_replaced(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "one – ä")
    assert path.read_bytes() == "one – ä".encode()
    write_text(path, "two")
    assert read_text(path) == "two"
    assert names(tmp_path) == ["a.txt"]


class Sudden(BaseException):
    """As abrupt as an interrupt."""


@pytest.mark.parametrize("fault", [RuntimeError("in the writer"), Sudden(), OSError(errno.ENOSPC, "No space left")])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, fault):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(temporary):
        temporary.write_text("half of the n")
        raise fault

    with pytest.raises(StoreError if isinstance(fault, OSError) else type(fault)):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(temporary):
        assert temporary.parent == tmp_path, "a rename is one step only inside of one file system"
        temporary.write_text("new")
        assert path.read_text() == "old"

    write_atomically(path, write)
    assert path.read_text() == "new"


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    code = (
        "import os, sys; from pathlib import Path; from hotlap.store.files import write_atomically\n"
        "write_atomically(Path(sys.argv[1]), lambda t: (t.write_text('half'), os._exit(9)))"
    )
    src = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONPATH": str(src)}, check=False
    )
    assert done.returncode == 9
    assert path.read_text() == "old"


def one_line(caught):
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_missing_folder_is_told_in_one_line(tmp_path):
    path = tmp_path / "no" / "a.txt"
    for write in (write_text, append_line):
        with pytest.raises(StoreError) as caught:
            write(path, "x")
        assert one_line(caught) == f"cannot write {path}: No such file or directory"


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path, monkeypatch):
    if os.geteuid() == 0:  # root may write anywhere, so the refusal is played

        def refuse(*_, **__):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(tempfile, "mkstemp", refuse)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError) as caught:
            write_text(tmp_path / "a.txt", "x")
    finally:
        tmp_path.chmod(0o700)
    assert one_line(caught) == f"cannot write {tmp_path / 'a.txt'}: Permission denied"
    assert names(tmp_path) == []


def test_a_folder_in_the_place_of_the_file_is_told_and_left(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(StoreError) as caught:
        write_text(tmp_path / "a", "x")
    assert "Is a directory" in one_line(caught)
    assert names(tmp_path) == ["a"]


def test_a_store_error_of_the_writer_is_told_as_it_is(tmp_path):
    def write(_):
        raise StoreError("the reason")

    with pytest.raises(StoreError, match=r"^the reason$"):
        write_atomically(tmp_path / "a", write)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_is_as_readable_as_the_umask_says(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "a", "x")
        append_line(tmp_path / "b", "x")
        assert os.umask(umask) == umask, "the umask itself is left alone"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == mode


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, happened = tmp_path / "a", []
    sync, replace = os.fsync, Path.replace

    def note_sync(handle):
        happened.append("sync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "sync file")
        sync(handle)

    def note_replace(self, target):
        happened.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_text(path, "x")
    assert happened == ["sync file", "name", "sync folder"]


def test_a_file_system_that_cannot_sync_folders_is_no_fault(tmp_path, monkeypatch):
    sync = os.fsync

    def refuse_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write_text(tmp_path / "a", "x")
    assert read_text(tmp_path / "a") == "x"


def test_a_long_file_name_is_no_hindrance(tmp_path):
    path = tmp_path / ("n" * 250)
    write_text(path, "x")
    assert names(tmp_path) == [path.name]


def test_lines_are_added_at_the_end(tmp_path):
    path = tmp_path / "log"
    append_line(path, "one")
    append_line(path, "zwei ä")
    assert read_text(path) == "one\nzwei ä\n"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file or directory"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.write_bytes(bytes(range(256))), "it is not a text file"),
    ],
)
def test_what_cannot_be_read_as_text_is_told_in_one_line(tmp_path, make, reason):
    path = tmp_path / "a"
    make(path)
    with pytest.raises(StoreError) as caught:
        read_text(path)
    assert one_line(caught) == f"cannot read {path}: {reason}"


def test_the_mark_that_some_editors_put_before_a_text_is_no_part_of_it(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbftext")
    assert read_text(tmp_path / "a") == "text"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_would_never_end_is_not_read(kind, tmp_path):
    path = tmp_path / "plan.toml"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(StoreError, match="not a regular file"):
        read_text(path)


def test_a_text_beyond_all_reason_is_not_read(tmp_path):
    path = tmp_path / "plan.toml"
    with path.open("wb") as file:
        file.truncate(300 * 1024 * 1024)  # takes no room: nothing is written
    with pytest.raises(StoreError, match="at most"):
        read_text(path)
