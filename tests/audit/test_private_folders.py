"""What hotlap makes for itself is its owner's alone, whatever the umask allows."""

import os
import stat

import pytest

from hotlap.core.errors import StoreError
from hotlap.kit.probe import _in_copy
from hotlap.store.cache import Cache, key_of


@pytest.fixture
def generous():
    """As on machines that give every user a group of their own."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_a_probe_copies_the_working_folder_into_a_private_one(tmp_path, monkeypatch, generous):
    monkeypatch.chdir(tmp_path)
    with _in_copy() as (folder, _):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_first_entry_leaves_a_cache_that_can_be_used(tmp_path, monkeypatch, generous):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "above" / "cache"))
    Cache().put("features", key_of(1), values=[1], facts={})
    assert stat.S_IMODE((tmp_path / "above" / "cache").stat().st_mode) == 0o700
    assert Cache().get("features", key_of(1)).values == [1]


def test_hotlap_says_how_to_mend_a_cache_that_others_can_write_to(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o775)
    monkeypatch.setenv("HOTLAP_CACHE", str(root))
    with pytest.raises(StoreError) as caught:
        Cache().put("features", key_of(1), values=[1], facts={})
    assert str(caught.value) == f"others can write to the cache {root}; to fix this: chmod go-w {root}"
