"""Checkpoints survive a crash at any moment, and damage of any kind is found."""

import errno
import hashlib
import json
import os
import shutil

import pytest
from killed import flip, in_a_child, kill_me

from hotlap.core.errors import StoreError
from hotlap.store import disk
from hotlap.store.checkpoints import MADE, Checkpoints
from hotlap.store.encoding import to_json
from hotlap.store.manifest import MANIFEST, _digest

FILES = ("model.safetensors", "training.json")


def files_of(text):
    return {"model.safetensors": [f"weights {text}".encode()], "training.json": [f'"{text}"'.encode()]}


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "run" / "checkpoints")


@pytest.fixture(autouse=True)
def run_folder(tmp_path):
    (tmp_path / "run").mkdir()


def write(store, *steps, text=""):
    for step in steps:
        store.write(step, files_of(f"{text}{step}"), {"plan": f"plan {step}"})


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def content(store):
    found, damaged = store.newest_good()
    return found.step, found.files["training.json"].decode().strip('"'), damaged


def test_a_checkpoint_comes_back_with_its_files_and_facts(store):
    write(store, 7)
    found, damaged = store.newest_good()
    assert (found.step, found.facts, damaged) == (7, {"plan": "plan 7"}, [])
    assert found.files == {name: b"".join(pieces) for name, pieces in files_of("7").items()}


def test_the_last_two_are_kept(store):
    write(store, 0, 3, 6, 9)
    assert names(store) == ["step-000000006", "step-000000009"]


def test_one_that_is_trusted_is_kept_beside_them_until_a_newer_one_is(store):
    write(store, 10, 20)
    store.trusted = 25
    write(store, 30, 40, 50)
    assert names(store) == ["step-000000020", "step-000000040", "step-000000050"]
    assert store.newest_good(until=25)[0].step == 20
    store.trusted = 45
    write(store, 60, 70)
    assert names(store) == ["step-000000040", "step-000000060", "step-000000070"]
    store.trusted = None
    write(store, 80)
    assert names(store) == ["step-000000070", "step-000000080"]


def test_the_newest_up_to_a_step_may_be_of_that_step(store):
    write(store, 10, 20)
    assert store.newest_good(until=20)[0].step == 20
    assert store.newest_good(until=19)[0].step == 10


def test_after_going_back_nothing_beyond_is_kept_though_it_was_trusted(store):
    write(store, 10, 20)
    store.trusted = 20
    write(store, 15)
    assert store.newest_good()[0].step == 15


def test_steps_are_compared_as_numbers_beyond_nine_digits(store):
    write(store, 999_999_999, 1_000_000_000, 1_000_000_001)
    assert names(store) == ["step-1000000000", "step-1000000001"]
    assert content(store)[0] == 1_000_000_001


# --- the order of the calls ----------------------------------------------------------------------


def moments_of(store, step):
    moments = []
    with disk.watched(moments.append):
        write(store, step)
    return moments


def test_every_file_is_synced_before_the_rename_and_the_parent_after(store):
    write(store, 1)
    moments = moments_of(store, 2)
    rename = moments.index("before rename")
    before, after = moments[:rename], moments[rename:]
    opened, synced = before.count("after open"), before.count("after sync")
    assert opened == synced == 3, "two files and the manifest"
    assert "after sync folder" in before, "the new folder itself"
    assert after[:4] == ["before rename", "after rename", "before sync folder", "after sync folder"]
    assert not any("open" in moment or "write" in moment for moment in after)


def test_each_file_is_synced_after_its_last_write(store, monkeypatch):
    """By the handles, so that no sync is of another file."""
    calls = []

    def noted(name, real):
        def call(handle, *rest):
            calls.append((handle, name))
            return real(handle, *rest)

        return call

    for name in ("write", "fsync"):
        monkeypatch.setattr(disk.os, name, noted(name, getattr(os, name)))
    write(store, 1)
    assert {"write", "fsync"} == {name for _, name in calls}
    assert set(dict(calls).values()) == {"fsync"}, "what each handle saw last"


def test_the_folder_of_all_checkpoints_is_made_to_last_too(store):
    assert moments_of(store, 1)[:4] == [
        "before make folder", "after make folder", "before sync folder", "after sync folder"
    ]  # fmt: skip


def test_an_old_checkpoint_goes_only_once_the_new_one_is_in_its_place(store):
    write(store, 1, 2)
    states = []
    with disk.watched(lambda moment: states.append((moment, names(store)))):
        write(store, 3)
    for _, there in states:
        assert sum(name.startswith("step-") for name in there) >= 2


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step again"])
def test_a_kill_at_any_call_leaves_a_good_checkpoint_and_the_next_save_works(tmp_path, again):
    moments = []
    for moment in range(1, 200):
        store = Checkpoints(tmp_path / f"run-{moment}" / "checkpoints")
        store.folder.parent.mkdir()
        write(store, *([2] if again else [1, 2]), text="old ")

        def killed(store=store, moment=moment):
            seen = 0

            def watch(_):
                nonlocal seen
                seen += 1
                if seen == moment:
                    kill_me()

            with disk.watched(watch):
                write(store, 2 if again else 3, text="new ")

        code = in_a_child(killed)
        store.tidy()
        assert content(store) in ((2, "old 2", []), (2, "new 2", []), (3, "new 3", []))
        assert all(name.startswith("step-") for name in names(store))
        write(store, 4, 5)
        assert names(store) == ["step-000000004", "step-000000005"]
        shutil.rmtree(store.folder.parent)
        if code == 0:
            break
        moments.append(moment)
    assert len(moments) > 30, "every call was hit, and then the save went through"


def test_a_kill_at_any_call_of_the_first_save_leaves_none_at_all_or_a_good_one(tmp_path):
    seen = []
    for moment in range(1, 200):
        store = Checkpoints(tmp_path / f"run-{moment}" / "checkpoints")
        store.folder.parent.mkdir()

        def killed(store=store, moment=moment):
            seen = 0

            def watch(_):
                nonlocal seen
                seen += 1
                if seen == moment:
                    kill_me()

            with disk.watched(watch):
                write(store, 3)

        if in_a_child(killed) == 0:
            break
        store.tidy()
        seen.append(store.none_completed())
        if not seen[-1]:
            assert content(store) == (3, "3", [])
        write(store, 4)
        assert not store.none_completed()
        shutil.rmtree(store.folder)
        assert not store.none_completed(), "gone is not the same as never there"
        with pytest.raises(StoreError, match="had checkpoints and has none now"):
            store.newest_good()
    assert 15 < seen.index(False) < len(seen)
    assert not any(seen[seen.index(False) :])


def test_a_link_in_the_place_of_the_checkpoints_is_not_taken_for_none_yet(store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    store.folder.symlink_to(tmp_path / "elsewhere")
    assert not store.none_completed()


def test_a_mark_that_cannot_be_left_is_told_and_left_next_time(store):
    renamed = []

    def watch(moment):
        renamed.append(moment == "after rename")
        if any(renamed) and moment == "before open":
            raise OSError(errno.ENOSPC, "No space left on device")

    said = "checkpoints.made could not be written: No space left on device; step-000000001 itself is complete"
    with disk.watched(watch), pytest.raises(StoreError, match=said):
        write(store, 1)
    assert content(store) == (1, "1", [])
    assert not store.folder.with_name(MADE).exists()
    write(store, 2)
    assert store.folder.with_name(MADE).is_file()


def test_what_a_crash_left_is_tidied_and_links_are_left_alone(store, tmp_path):
    write(store, 1)
    (tmp_path / "home").mkdir()
    for name in (".new-000000002", ".old-step-000000000"):
        (store.folder / name).mkdir()
        (store.folder / name / "file").touch()
    (store.folder / ".new-000000009").symlink_to(tmp_path / "home")
    (store.folder / "notes.txt").touch()
    store.tidy()
    assert names(store) == [".new-000000009", "notes.txt", "step-000000001"]
    assert (tmp_path / "home").is_dir()


def test_a_checkpoint_that_was_being_replaced_gets_its_name_back(store):
    write(store, 1)
    (store.folder / "step-000000001").rename(store.folder / ".was-000000001")
    store.tidy()
    assert content(store) == (1, "1", [])


@pytest.mark.parametrize("name", ["make folder", "open", "write", "sync", "sync folder", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_save_that_fails_leaves_the_ones_before_untouched_and_nothing_half_done(store, name, number):
    write(store, 1, 2)
    stamps = {file: file.stat().st_mtime_ns for file in store.folder.rglob("*")}

    def watch(moment):
        if moment == f"before {name}":
            raise OSError(number, os.strerror(number))

    with disk.watched(watch), pytest.raises(OSError, match=os.strerror(number)):
        write(store, 3)
    assert {file: file.stat().st_mtime_ns for file in store.folder.rglob("*")} == stamps
    write(store, 3)
    assert content(store) == (3, "3", [])


@pytest.mark.parametrize("name", ["rename", "sync folder"])
def test_writing_the_same_step_again_never_leaves_it_missing_when_it_fails(store, name):
    write(store, 1, text="old ")
    renames = 0

    def watch(moment):
        nonlocal renames
        renames += moment == "after rename"
        if moment == f"before {name}" and renames == 1:
            raise OSError(errno.EIO, "Input/output error")

    with disk.watched(watch), pytest.raises(OSError, match="Input/output"):
        write(store, 1, text="new ")
    store.tidy()
    assert content(store) == (1, "old 1", [])


def test_an_old_one_that_cannot_be_removed_is_told_and_the_new_one_is_whole(store):
    write(store, 1, 2)

    def watch(moment):
        if moment == "before remove":
            raise OSError(errno.EACCES, "Permission denied")

    with disk.watched(watch), pytest.raises(StoreError, match="step-000000001 could not be removed: Permission denied"):
        write(store, 3)
    assert content(store) == (3, "3", [])


# --- damage --------------------------------------------------------------------------------------

DAMAGES = {
    "flipped": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "grown": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "emptied": lambda file: file.write_bytes(b""),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "missing": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a link": lambda file: (file.rename(file.with_name("moved")), file.symlink_to(file.with_name("moved"))),
}


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_each_damage_to_each_file_is_found_and_the_one_before_is_used(store, name, damage):
    write(store, 1, 2)
    damage(store.folder / "step-000000002" / name)
    step, text, damaged = content(store)
    assert (step, text) == (1, "1")
    assert len(damaged) == 1
    assert "checkpoint step-000000002 is damaged" in damaged[0]
    assert name in damaged[0]


def test_a_flip_of_any_bit_of_the_manifest_is_found(store):
    write(store, 1, 2)
    file = store.folder / "step-000000002" / MANIFEST
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        assert content(store)[0] == 1, f"byte {place}"
    file.write_bytes(whole)
    assert content(store)[0] == 2


def test_a_checkpoint_under_another_ones_name_is_refused(store):
    write(store, 1, 2)
    (store.folder / "step-000000002").rename(store.folder / "step-000000005")
    step, _, damaged = content(store)
    assert step == 1
    assert damaged == ["checkpoint step-000000005 is damaged: manifest.json belongs to step 2, not to step-000000005"]


def test_a_link_in_the_place_of_a_checkpoint_is_refused(store, tmp_path):
    write(store, 1, 2)
    (store.folder / "step-000000002").rename(tmp_path / "elsewhere")
    (store.folder / "step-000000002").symlink_to(tmp_path / "elsewhere")
    step, _, damaged = content(store)
    assert step == 1
    assert "is not a folder, or is a link" in damaged[0]


def test_none_good_is_a_clear_stop_that_names_each_damage(store):
    write(store, 1, 2)
    flip(store.folder / "step-000000001" / FILES[0])
    (store.folder / "step-000000002" / FILES[1]).unlink()
    with pytest.raises(StoreError) as caught:
        store.newest_good()
    assert "step-000000001 is damaged: model.safetensors differs" in str(caught.value)
    assert "step-000000002 is damaged: training.json is missing" in str(caught.value)
    assert "start anew in another folder" in str(caught.value)


def test_none_at_all_is_told_as_such(store):
    with pytest.raises(StoreError, match="has no checkpoint to resume from"):
        store.newest_good()


def test_damaged_ones_beyond_the_training_make_way_for_good_ones(store):
    """A training that fell back saves at steps before the damaged one: two good ones must be left all the same."""
    write(store, 3, 6)
    flip(store.folder / "step-000000006" / FILES[0])
    write(store, 4)
    assert names(store) == ["step-000000003", "step-000000004"]
    write(store, 5)
    flip(store.folder / "step-000000005" / FILES[0])
    assert content(store)[:2] == (4, "4")


# --- manifests that somebody made ----------------------------------------------------------------


def forged(store, **changes):
    """A checkpoint whose manifest says what it likes, with a hash that fits."""
    write(store, 1, 2)
    file = store.folder / "step-000000002" / MANIFEST
    manifest = {k: v for k, v in json.loads(file.read_text()).items() if k != "sha256"} | changes
    file.write_bytes(to_json(manifest | {"sha256": _digest(manifest)}))


@pytest.mark.parametrize(
    "name",
    [
        "../../secret.json", "/etc/passwd", "a/b.json", "..", "", ".x.json", "x.pkl", "manifest.json", "a\0.json",
        "a.json\n",
    ],
)  # fmt: skip
def test_a_manifest_that_names_a_file_elsewhere_is_refused(store, tmp_path, name):
    (tmp_path / "secret.json").write_text("{}")
    forged(store, files={name: {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}})
    step, _, damaged = content(store)
    assert step == 1
    assert "not a plain file name" in damaged[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2}, {"step": -1}, {"step": "2"}, {"step": True}, {"files": []}, {"facts": None},
        {"files": {"a.json": 3}}, {"files": {"a.json": {"bytes": "2"}}},
        {"files": {"a.json": {"bytes": 2, "sha256": 5}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_out_of_its_form_is_refused(store, changes):
    forged(store, **changes)
    assert content(store)[0] == 1


@pytest.mark.parametrize(
    "text", ['{"sha256":"x","format":1,"a":NaN}', '{"sha256":"x","format":1,"a":1e999}', "[" * 200_000, "null", "3"]
)
def test_a_manifest_of_garbage_is_refused(store, text):
    write(store, 1, 2)
    (store.folder / "step-000000002" / MANIFEST).write_text(text)
    assert content(store)[0] == 1
