"""Archives: a run goes into one file and comes out whole; what would write elsewhere leaves nothing behind."""

import os
import stat
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from plain import class_data, small_mlp
from torch import nn

import hotlap
from hotlap.core.errors import StoreError
from hotlap.store import archives, disk
from hotlap.store.archives import checkpoint_bytes, pack, unpack


def small_job(epochs):
    return hotlap.Job(
        model=small_mlp(),
        data=class_data(16),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        batch_size=8,
        epochs=epochs,
        device="cpu",
    )


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_taken_elsewhere_goes_on_there_to_the_same_bits(tmp_path):
    straight = hotlap.fit(small_job(4), out=tmp_path / "straight", progress=False)
    hotlap.fit(small_job(2), out=tmp_path / "kaggle", save_every=1, progress=False)
    pack(tmp_path / "kaggle", tmp_path / "kaggle.zip", checkpoints=True)
    home = unpack(tmp_path / "kaggle.zip", tmp_path / "home")
    packed, unpacked = files_of(tmp_path / "kaggle"), files_of(home)
    packed.pop("lock")
    assert unpacked == packed
    resumed = hotlap.fit(small_job(4), resume=home, progress=False)
    assert "resumed at step 4" in [entry.what for entry in resumed.ledger]
    one, other = straight.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-000000001").mkdir(parents=True)
    (folder / "plan.toml").write_text("hotlap_plan = 1\n")
    (folder / "checkpoints" / "step-000000001" / "model.safetensors").write_bytes(os.urandom(5000))
    return folder


def test_links_locks_and_what_a_crash_left_are_not_packed(run, tmp_path):
    (tmp_path / "secret").write_text("s")
    (run / "link").symlink_to(tmp_path / "secret")
    (run / "folder").symlink_to(tmp_path)
    (run / "lock").write_text("1")
    (run / ".plan.toml.abc").write_text("half")
    os.mkfifo(run / "pipe")
    for name in (".new-000000002", ".old-000000000"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "x.json").write_text("{}")
    pack(run, tmp_path / "x.zip", checkpoints=True)
    with zipfile.ZipFile(tmp_path / "x.zip") as file:
        assert file.namelist() == ["checkpoints/step-000000001/model.safetensors", "plan.toml"]


def test_checkpoints_are_left_out_unless_asked_for_and_all_files_are_compressed(run, tmp_path):
    (run / "model.safetensors").write_bytes(bytes(5000))
    pack(run, tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "x.zip") as file:
        assert file.namelist() == ["model.safetensors", "plan.toml"]
        assert file.getinfo("model.safetensors").compress_size < 100
    assert checkpoint_bytes(run) == 5000


def test_packing_overwrites_nothing_and_says_what_is_no_run(run, tmp_path):
    (tmp_path / "x.zip").write_text("precious")
    with pytest.raises(StoreError, match="exists already"):
        pack(run, tmp_path / "x.zip")
    assert (tmp_path / "x.zip").read_text() == "precious"
    with pytest.raises(StoreError, match="inside of the run folder"):
        pack(run, run / "x.zip")
    with pytest.raises(StoreError, match="does not exist"):
        pack(run, tmp_path / "none" / "x.zip")
    with pytest.raises(StoreError, match="not a run folder"):
        pack(tmp_path, tmp_path / "y.zip")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "x.zip"]


def test_a_file_older_than_zip_files_is_packed(run, tmp_path):
    os.utime(run / "plan.toml", (0, 0))
    pack(run, tmp_path / "x.zip")
    assert (unpack(tmp_path / "x.zip", tmp_path / "into") / "plan.toml").read_text() == "hotlap_plan = 1\n"


# --- archives of strangers -------------------------------------------------------------------------


def info(name, mode=stat.S_IFREG | 0o644):
    entry = zipfile.ZipInfo("x")
    entry.filename = entry.orig_filename = name  # as it is: the constructor would mend some
    entry.external_attr = mode << 16
    return entry


def wrote(path, *entries, kind=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", kind) as file:
        for entry, content in entries:
            name = entry if isinstance(entry, zipfile.ZipInfo) else info(entry)
            name.compress_type = kind
            with file.open(name, "w") as target:
                target.write(content)
    return path


@pytest.fixture
def refused(tmp_path):
    """Unpacks, and holds that it was refused, that nothing was written, and gives what was said."""

    def check(path, **settings):
        room = tmp_path / "room"
        room.mkdir(exist_ok=True)
        before = sorted(p.name for p in tmp_path.rglob("*"))
        with pytest.raises(StoreError) as caught:
            unpack(path, room / "into", **settings)
        assert sorted(p.name for p in tmp_path.rglob("*")) == before
        assert str(caught.value).count("\n") == 0
        return str(caught.value)

    return check


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../evil", "leads out"),
        ("a/../../evil", "leads out"),
        ("a/..", "leads out"),
        ("..", "leads out"),
        ("./a", "leads out"),
        ("a//b", "leads out"),
        ("", "leads out"),
        ("/etc/evil", "absolute"),
        ("//host/share", "absolute"),
        ("..\\evil", "character"),
        ("a\\b", "character"),
        ("C:\\evil", "character"),
        ("C:evil", "character"),
        ("a\x1b[2J", "character"),
        ("a\nb", "character"),
        ("x" * 201, "too long"),
        ("/".join("a" * 40), "too long"),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(refused, tmp_path, name, said):
    assert said in refused(wrote(tmp_path / "x.zip", ("good", b"1"), (name, b"evil")))


def test_a_name_with_a_hidden_end_is_refused(refused, tmp_path):
    path = wrote(tmp_path / "x.zip", ("plain.txtZ.sh", b"1"))
    path.write_bytes(path.read_bytes().replace(b"plain.txtZ.sh", b"plain.txt\0.sh"))
    assert "character" in refused(path)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_and_devices_are_refused(refused, tmp_path, kind):
    entry = info("a", kind | 0o777)
    said = refused(wrote(tmp_path / "x.zip", (entry, b"/etc/passwd"), ("a/b", b"evil")))
    assert ("is a link" if kind == stat.S_IFLNK else "device or pipe") in said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "a"], "twice"),
        (["a", "A"], "twice with different case"),
        (["a/x", "A/y"], "twice with different case"),
        (["caf\u00e9", "cafe\u0301"], "twice with different case"),
        (["stra\u00dfe", "strasse"], "twice with different case"),
        (["a", "a/b"], "both a file and a folder"),
        (["a/b", "a"], "both a file and a folder"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_clash_are_refused(refused, tmp_path, names, said):
    assert said in refused(wrote(tmp_path / "x.zip", *[(name, b"1") for name in names]))


def test_too_many_entries_are_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_ENTRIES", 20)
    assert "21 entries" in refused(wrote(tmp_path / "x.zip", *[(f"f{n}", b"") for n in range(21)]))
    assert unpack(wrote(tmp_path / "y.zip", *[(f"f{n}", b"") for n in range(20)]), tmp_path / "into")


def test_the_most_entries_are_ten_thousand():
    assert archives.MOST_ENTRIES == 10_000
    assert archives.MOST_BYTES == 64 * 2**30


def test_a_list_of_entries_that_would_fill_the_memory_is_not_read(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(archives._Bounded, "most", 500)
    assert "list of entries" in refused(wrote(tmp_path / "x.zip", *[(f"f{n}", b"") for n in range(50)]))


def test_more_than_the_limit_is_refused_before_anything_is_written(refused, tmp_path):
    path = wrote(tmp_path / "x.zip", ("a", b"1" * 600), ("b", b"2" * 600))
    assert "would unpack to 1.2 KiB" in refused(path, most_bytes=1199)
    assert unpack(path, tmp_path / "into", most_bytes=1200)


def test_a_bomb_is_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "SMALL_BYTES", 2**20)
    assert "it is a bomb" in refused(wrote(tmp_path / "x.zip", ("a", bytes(2**25))))
    monkeypatch.undo()
    assert unpack(tmp_path / "x.zip", tmp_path / "into"), "small enough to do no harm"


def declared(path, name, size):
    """The archive with another size for an entry in its list."""
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02", 0, content.rindex(name.encode()))
    content[at + 24 : at + 28] = struct.pack("<I", size)
    path.write_bytes(content)
    return path


def test_sizes_that_lie_are_refused(refused, tmp_path):
    assert "it is a bomb" in refused(declared(wrote(tmp_path / "x.zip", ("a", b"1" * 100)), "a", 2**31))
    for size in (10, 101, 0):
        said = refused(declared(wrote(tmp_path / f"{size}.zip", ("a", b"1" * 100)), "a", size))
        assert "not a complete zip file" in said or "bytes, not the" in said


def test_entries_that_share_their_bytes_are_a_bomb(refused, tmp_path, monkeypatch):
    """Many entries, one kernel: small as an archive, large on the disk."""
    monkeypatch.setattr(archives, "SMALL_BYTES", 2**20)
    path = wrote(tmp_path / "x.zip", ("a", bytes(2**20)))
    content = path.read_bytes()
    at, end = content.rindex(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    one = content[at:end]
    many = b"".join(one[:46] + bytes([letter]) + one[47:] for letter in range(ord("a"), ord("z") + 1))
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 26, 26, len(many), at, 0)
    path.write_bytes(content[:at] + many + tail)
    assert "it is a bomb" in refused(path)


@pytest.mark.parametrize("flag", [0x1, 0x40, 0x2000])
def test_encrypted_entries_are_refused(refused, tmp_path, flag):
    path = wrote(tmp_path / "x.zip", ("a", b"1"))
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        at = content.rindex(mark) + offset
        content[at : at + 2] = struct.pack("<H", flag)
    path.write_bytes(content)
    said = refused(path)
    assert "is encrypted" in said or "not a complete zip" in said


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_rare_ways_to_compress_are_refused(refused, tmp_path, kind):
    assert "compressed by method" in refused(wrote(tmp_path / "x.zip", ("a", b"1"), kind=kind))


def test_damage_that_shows_only_while_unpacking_leaves_nothing(refused, tmp_path):
    path = wrote(tmp_path / "x.zip", ("a", b"first"), ("b", b"second"), kind=zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace(b"second", b"sEcond"))
    assert "not a complete zip file" in refused(path)


def test_a_full_disk_leaves_nothing(refused, tmp_path, monkeypatch):
    path = wrote(tmp_path / "x.zip", ("a", b"1" * 100), ("b", b"2"))
    calls = []

    def full(event):
        calls.append(event)
        if calls.count("before write") == 2:
            raise OSError(28, "No space left on device")

    with disk.watched(full):
        assert "No space left" in refused(path)
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda _: type("", (), {"free": 50}))
    assert "50 B" in refused(path)


def test_no_zip_file_is_told(refused, tmp_path):
    for content in (b"", b"PK", b"\x1f\x8b" * 20, b"x" * 70_000):
        (tmp_path / "x.zip").write_bytes(content)
        assert "not a complete zip file" in refused(tmp_path / "x.zip")
    assert "No such file" in refused(tmp_path / "none.zip")


def test_a_place_that_is_taken_is_left_alone(tmp_path):
    path = wrote(tmp_path / "x.zip", ("a", b"1"))
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled" / "mine").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("filled", "link", "x.zip", "none/into"):
        with pytest.raises(StoreError):
            unpack(path, tmp_path / name)
    assert list((tmp_path / "empty").iterdir()) == []
    assert files_of(tmp_path / "filled") == {"mine": b"x"}
    assert unpack(path, tmp_path / "empty") == tmp_path / "empty"
    assert files_of(tmp_path / "empty") == {"a": b"1"}


def test_folders_and_modes_of_an_archive_give_nothing_but_files(tmp_path):
    path = wrote(
        tmp_path / "x.zip", (info("d/", stat.S_IFDIR | 0o777), b""), (info("d/s", stat.S_IFREG | 0o6777), b"1")
    )
    into = unpack(path, tmp_path / "into")
    assert not Path(into / "d" / "s").stat().st_mode & 0o7111
