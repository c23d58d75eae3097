"""The system calls of a save: seen one by one, and failing as a real disk does."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from hotlap.core.errors import StoreError
from hotlap.store import disk


def seen_by(action):
    moments = []
    with disk.watched(moments.append):
        action()
    return moments


def failing(name, number):
    def watch(moment):
        if moment == f"before {name}":
            raise OSError(number, os.strerror(number))

    return disk.watched(watch)


@pytest.mark.parametrize(
    "pieces",
    [[], [b""], [b"one"], [b"a" * 10, b"", b"b" * 5], [b"x" * (disk.CHUNK * 2 + 3), b"tail"], [b"k"] * 1000],
    ids=["none", "empty", "one", "several", "large", "many small"],
)
def test_a_new_file_holds_the_pieces_in_order_with_their_size_and_hash(tmp_path, pieces):
    size, digest = disk.write_new(tmp_path / "file", pieces)
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(pieces)
    assert (size, digest) == (len(content), hashlib.sha256(content).hexdigest())


def test_pieces_may_be_views_of_any_kind_of_number(tmp_path):
    numbers = memoryview(bytes(range(16))).cast("I")
    assert disk.write_new(tmp_path / "file", [numbers])[0] == 16
    assert (tmp_path / "file").read_bytes() == bytes(range(16))


def test_a_write_that_the_system_cuts_short_goes_on_where_it_stopped(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, chunk: real(handle, chunk[:3]))
    assert disk.write_new(tmp_path / "file", [b"0123456789"])[0] == 10
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_file_that_is_there_already_is_never_written_over(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        disk.write_new(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_text() == "precious"


def test_every_call_is_seen_before_and_after_in_its_order(tmp_path):
    moments = seen_by(lambda: disk.write_new(tmp_path / "file", [b"a"]))
    assert moments == [f"{when} {what}" for what in ("open", "write", "sync") for when in ("before", "after")]
    moments = seen_by(lambda: disk.rename(tmp_path / "file", tmp_path / "other"))
    assert moments == [f"{when} {what}" for what in ("rename", "sync folder") for when in ("before", "after")]
    assert seen_by(lambda: disk.make_folder(tmp_path / "folder")) == ["before make folder", "after make folder"]


def test_nobody_watches_once_the_watch_is_over_also_after_an_error(tmp_path):
    with pytest.raises(OSError, match="No space"), failing("open", errno.ENOSPC):
        disk.write_new(tmp_path / "file", [b"a"])
    disk.write_new(tmp_path / "file", [b"a"])


def test_a_folder_is_gone_from_its_name_before_its_files_go(tmp_path):
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "file").touch()
    states = []
    with disk.watched(lambda moment: states.append((moment, folder.exists()))):
        disk.remove_folder(folder)
    assert ("before remove", False) in states
    assert list(tmp_path.iterdir()) == []


def test_removing_goes_on_over_what_a_crash_left(tmp_path):
    for name in ("step", ".old-step"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    disk.remove_folder(tmp_path / "step")
    assert list(tmp_path.iterdir()) == []


def test_removing_a_link_leaves_what_it_leads_to(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/precious").touch()
    (tmp_path / "step").symlink_to(tmp_path / "home")
    disk.remove_folder(tmp_path / "step")
    assert [f.name for f in tmp_path.rglob("*")] == ["home", "precious"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_no_failure(tmp_path, number):
    with failing("sync folder", number):
        disk.sync_folder(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_folder_that_should_sync_and_does_not_is_a_failure(tmp_path, number):
    with failing("sync folder", number), pytest.raises(OSError, match=os.strerror(number)):
        disk.sync_folder(tmp_path)


# --- reading -------------------------------------------------------------------------------------


def test_a_file_is_read_only_where_every_byte_is_as_written(tmp_path):
    path = tmp_path / "file"
    size, digest = disk.write_new(path, [b"content"])
    assert disk.read_checked(path, size, digest) == b"content"
    path.write_bytes(b"cantent")
    with pytest.raises(StoreError, match="differs"):
        disk.read_checked(path, size, digest)
    path.write_bytes(b"conten")
    with pytest.raises(StoreError, match="has 6 bytes, not the 7 written"):
        disk.read_checked(path, size, digest)
    path.unlink()
    with pytest.raises(StoreError, match="file is missing"):
        disk.read_checked(path, size, digest)


@pytest.mark.parametrize("read", [lambda p: disk.read_checked(p, 0, ""), lambda p: disk.read_small(p, 10)])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, read, kind):
    path = tmp_path / "file"
    if kind == "link":
        (tmp_path / "target").touch()
        path.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(StoreError, match=r"file (cannot be read|is not a regular file)"):
        read(path)


def test_a_disk_that_fails_while_reading_is_told_as_such():
    """This file opens like any other, and its first byte cannot be read."""
    with pytest.raises(StoreError, match="mem cannot be read: Input/output error"):
        disk.read_checked(Path("/proc/self/mem"), 0, "")


def test_a_file_larger_than_allowed_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(StoreError, match="11 bytes; hotlap reads at most 10"):
        disk.read_small(tmp_path / "file", 10)
    assert disk.read_small(tmp_path / "file", 11) == b"x" * 11
