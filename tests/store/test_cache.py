"""The cache: what went in comes out, by a key that tells all things apart; what is damaged is made again."""

import errno
import functools
import json
import logging
import math
import multiprocessing
import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from killed import code_of, forked

from hotlap.core.errors import StoreError
from hotlap.store import disk
from hotlap.store.cache import Cache, default_root, key_of, model_key, store_model, stored_model

A, B, C = key_of("a"), key_of("b"), key_of("c")


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def filled(cache, *keys, kind="features", size=100):
    """Entries of one size, used one after the other."""
    for number, key in enumerate(keys):
        cache.put(kind, key, tensors={"x": torch.zeros(size)}, facts={"n": number})
        os.utime(cache.root / kind / key, (1000 + number, 1000 + number))


def keys_of(items):
    return [item.key for item in items]


# --- keys ------------------------------------------------------------------------------------------


class Plain:
    def scale(self):
        return 2


def doubled(x):
    return 2 * x


def tripled(x):
    return 3 * x


def scaled_by(n):
    return lambda x: n * x


DIFFERENT = [
    None,
    True,
    False,
    0,
    1,
    -1,
    0.0,
    -0.0,
    1.0,
    math.nan,
    math.inf,
    "",
    "1",
    "True",
    b"",
    b"1",
    [],
    (),
    {},
    [1],
    (1,),
    {1: 1},
    {"1": 1},
    [[1], 2],
    [[1, 2]],
    [1, [2]],
    ["ab", "c"],
    ["a", "bc"],
    ["abc", ""],
    {"a": {"b": 1}},
    {"a": None, "b": 1},
    torch.zeros(2),
    torch.zeros(3),
    torch.zeros(1, 2),
    torch.zeros(2, dtype=torch.float16),
    torch.zeros(2, dtype=torch.bfloat16),
    torch.zeros(2, dtype=torch.int32),
    torch.tensor([0.0, 1.0]),
    torch.tensor(0.0),
    np.zeros(2),
    np.zeros(2, np.float32),
    np.zeros((2, 1)),
    np.float64(0),
    np.int64(1),
    np.array(["a"]),
    doubled,
    tripled,
    scaled_by(2),
    scaled_by(3),
    *[lambda x: x + 1, lambda x: x + 2],
    functools.partial(doubled, 1),
    functools.partial(doubled, 2),
    Plain,
    json,
]


def test_no_two_different_things_have_one_key():
    keys = [key_of(value) for value in DIFFERENT] + [key_of(), key_of(1, 2), key_of((1, 2)), key_of("a", "b")]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)


@given(st.data())
def test_keys_are_equal_exactly_where_the_values_are(data):
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=6,
    )
    one, other = data.draw(values), data.draw(values)
    assert (key_of(one) == key_of(other)) == (repr_of(one) == repr_of(other))


def repr_of(value):
    """Like repr, whatever the order of a dict."""
    if isinstance(value, dict):
        return sorted((k, repr_of(v)) for k, v in value.items()), "dict"
    return ([repr_of(v) for v in value], "list") if isinstance(value, list) else repr(value)


def test_the_same_things_have_one_key_in_every_process():
    parts = '{"b": [1, 2.5, None], "a": (True, "ä")}, b"x"'
    code = f"""
        import torch, numpy as np
        from hotlap.store.cache import key_of
        print(key_of({parts}, torch.arange(3), np.arange(4)[::2]))
    """
    here = key_of({"a": (True, "ä"), "b": [1, 2.5, None]}, b"x", torch.arange(3), np.array([0, 2]))
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.strip() == here


def test_a_tensor_counts_by_its_numbers_not_by_how_it_lies_in_memory():
    x = torch.arange(6.0).reshape(2, 3)
    assert key_of(x) == key_of(x.t().contiguous().t()) == key_of(torch.nn.Parameter(x))
    assert key_of(x) != key_of(x.t())
    last = torch.zeros(3_000_000)
    changed = last.clone()
    changed[-1] = 1
    assert key_of(last) != key_of(changed)
    array = last.numpy().copy()
    array[-1] = 2
    assert key_of(array) != key_of(last.numpy())


def test_a_path_counts_by_what_is_in_the_file(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").write_bytes(b"x" * 100)
    before = key_of(tmp_path / "a")
    assert before == key_of(tmp_path / "b")
    assert before != key_of(str(tmp_path / "a"))
    (tmp_path / "a").write_bytes(b"x" * 99 + b"y")
    assert key_of(tmp_path / "a") != before


@pytest.mark.parametrize(
    "part",
    [object(), {1}, len, Plain().scale, eval("lambda x: x"), sys, np.array([None]), torch.nn.Linear(1, 1), Path("/")],
    ids=["object", "set", "built in", "method", "no source", "module in C", "objects", "module of torch", "folder"],
)
def test_what_has_no_content_to_go_by_is_refused(part):
    with pytest.raises(StoreError):
        key_of("x", [part])


def test_a_pipe_is_refused_as_part_of_a_key_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="not a regular file"):
        key_of(tmp_path / "pipe")


def test_things_within_themselves_end():
    knot = [1]
    knot.append(knot)

    def calls_itself(n):
        return calls_itself(n - 1)

    assert key_of(knot) == key_of(knot)
    assert key_of(calls_itself) == key_of(calls_itself)
    deep = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(StoreError, match="deep"):
        key_of(deep)


def test_an_edited_function_has_another_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    keys = []
    for text in ("def f(x):\n    return x\n", "def f(x):\n    return -x\n"):
        (tmp_path / "edited_code.py").write_text(text)
        sys.modules.pop("edited_code", None)
        import importlib
        import linecache

        importlib.invalidate_caches()
        linecache.clearcache()
        keys.append(key_of(importlib.import_module("edited_code").f))
    sys.modules.pop("edited_code", None)
    assert keys[0] != keys[1]


# --- entries ---------------------------------------------------------------------------------------


def test_what_is_put_comes_back_to_the_last_bit(cache):
    tensors = {
        "a": torch.randn(3, 4).t(),
        "half": torch.randn(2).bfloat16(),
        "none": torch.empty(0, 2),
        "one": torch.tensor(3),
        "array": np.arange(6.0)[::2],
        "number": np.array(2.5),
    }
    values = {"names": ["x", "y"], 1: (2, None, True), "inner": np.ones(2), "nan": math.nan, "t": [torch.ones(1)]}
    made = cache.put("features", A, tensors=tensors, values=values, facts={"rows": 3})
    for entry in (made, cache.get("features", A)):
        assert set(entry.tensors) == set(tensors)
        for name, value in tensors.items():
            got = entry.tensors[name]
            assert type(got) is type(value)
            assert (got.dtype, tuple(got.shape)) == (value.dtype, tuple(value.shape))
            assert (got == value).all()
        assert entry.values["names"] == ["x", "y"]
        assert entry.values[1] == (2, None, True)
        assert math.isnan(entry.values["nan"])
        assert isinstance(entry.values["inner"], np.ndarray)
        assert torch.equal(entry.values["t"][0], torch.ones(1))
        assert entry.facts == {"rows": 3}


def test_another_key_or_kind_has_another_entry(cache):
    cache.put("features", A, values=1, facts={})
    cache.put("models", A, values=2, facts={})
    assert (cache.get("features", A).values, cache.get("models", A).values) == (1, 2)
    assert cache.get("features", B) is None
    assert cache.get("other", A) is None


@pytest.mark.parametrize(
    ("kind", "key"),
    [("..", A), ("a/b", A), ("", A), ("/etc", A), ("A", A), ("features", "../x"), ("features", A + "\n"), ("x", "")],
)
def test_a_name_that_could_lead_elsewhere_is_refused(cache, kind, key):
    for call in (cache.get, functools.partial(cache.put, values=1, facts={})):
        with pytest.raises(StoreError, match="do not name a cache entry"):
            call(kind, key)
    assert not cache.root.exists()


class Word(str):
    pass


def test_tensors_under_names_that_look_alike_are_told_apart(cache):
    values = {1: torch.zeros(1), "1": torch.ones(1), "a": {"b": torch.tensor([2.0])}, "a.b": torch.tensor([3.0])}
    cache.put("features", A, values=values, facts={})
    got = cache.get("features", A).values
    assert [got[1].item(), got["1"].item(), got["a"]["b"].item(), got["a.b"].item()] == [0, 1, 2, 3]


def test_it_is_made_once_and_then_read(cache):
    calls = []

    def make():
        calls.append(1)
        return {"x": np.arange(3)}, {"mean": 1.0, "kind": Word("ab")}

    results = [cache.get_or_make("features", A, make) for _ in range(3)]
    assert len(calls) == 1
    for tensors, values in results:
        assert tensors["x"].tolist() == [0, 1, 2]
        assert isinstance(tensors["x"], np.ndarray)
        assert values["mean"] == 1.0
        assert type(values["kind"]) is str, "as it will be read"


def test_a_later_put_leaves_a_good_entry_and_replaces_a_damaged_one(cache):
    cache.put("features", A, values="first", facts={})
    cache.put("features", A, values="second", facts={})
    assert cache.get("features", A).values == "first"
    (cache.root / "features" / A / "values.json").write_bytes(b"")
    cache.put("features", A, values="third", facts={})
    assert cache.get("features", A).values == "third"
    assert [path.name for path in (cache.root / "features").iterdir()] == [A]


@pytest.mark.parametrize("instead", ["file", "link", "link to a folder"])
def test_something_else_in_the_place_of_an_entry_is_replaced_and_not_followed(cache, instead, tmp_path):
    cache.put("features", B, values=1, facts={})
    (tmp_path / "outside").mkdir()
    place = cache.root / "features" / A
    if instead == "file":
        place.write_text("x")
    else:
        place.symlink_to(tmp_path / "outside" if "folder" in instead else tmp_path / "nowhere")
    assert len(cache.verify()) == 1
    cache.put("features", A, values=2, facts={})
    assert cache.get("features", A).values == 2
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "values.json", "values.safetensors", "tensors.safetensors"])
def test_a_changed_bit_anywhere_is_found_told_and_made_again(cache, name, caplog):
    filled(cache, A)
    file = cache.root / "features" / A / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (damage,) = cache.verify()
    assert damage.path == file.parent
    assert file.parent.exists(), "verify only looks"
    with caplog.at_level(logging.WARNING):
        assert cache.get("features", A) is None
    assert "removed the damaged cache entry" in caplog.text
    assert not file.parent.exists()
    assert cache.get_or_make("features", A, lambda: ({}, "again")) == ({}, "again")
    assert cache.verify() == []


def test_an_entry_copied_under_another_key_is_damaged(cache):
    filled(cache, A)
    (cache.root / "features" / A).rename(cache.root / "features" / B)
    assert "another entry" in cache.verify()[0].why
    assert cache.get("features", B) is None


@pytest.mark.parametrize(
    ("tensors", "values"),
    [
        ({"x": np.array([None])}, None),
        ({"x": np.array(["a"])}, None),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, None),
        ({}, object()),
        ({}, {1, 2}),
    ],
    ids=["objects", "words", "complex", "object", "set"],
)
def test_what_no_safe_file_can_hold_is_refused_and_the_work_goes_on(cache, tensors, values, caplog):
    with pytest.raises(StoreError):
        cache.put("features", A, tensors=tensors, values=values, facts={})
    assert cache.list() == []
    got = cache.get_or_make("features", A, lambda: (tensors, values))
    assert got[1] is values
    assert "does not keep the features" in caplog.text


def test_facts_that_are_no_json_are_refused(cache):
    for facts in ({"x": math.nan}, {"x": object()}):
        with pytest.raises(StoreError):
            cache.put("features", A, values=1, facts=facts)
    assert list((cache.root / "features").iterdir()) == []


@pytest.mark.parametrize("call", ["open", "write", "sync", "make folder", "rename"])
def test_a_full_disk_is_told_leaves_nothing_behind_and_does_not_stop_the_work(cache, call, caplog):
    filled(cache, B)

    def full(event):
        if event == f"before {call}":
            raise OSError(errno.ENOSPC, "No space left on device")

    with disk.watched(full):
        with pytest.raises(StoreError, match="No space left"):
            cache.put("features", A, values=1, facts={})
        assert cache.get_or_make("features", A, lambda: ({}, "made")) == ({}, "made")
    assert "No space left" in caplog.text
    assert [path.name for path in (cache.root / "features").iterdir()] == [B]


def test_two_processes_that_make_one_entry_at_once_both_succeed(tmp_path):
    cache = Cache(tmp_path / "cache")
    both = multiprocessing.get_context("fork").Barrier(2, timeout=600)

    def make():
        both.wait()
        for number in range(30):
            tensors, _ = cache.get_or_make("features", f"{number:064x}", lambda: ({"x": torch.full((500,), 7.0)}, 1))
            assert tensors["x"].sum() == 3500

    assert [code_of(process) for process in (forked(make), forked(make))] == [0, 0]
    assert cache.verify() == []
    assert sorted(path.name for path in (cache.root / "features").iterdir()) == [f"{n:064x}" for n in range(30)]


# --- the folder ------------------------------------------------------------------------------------


def test_the_folder_is_the_one_named_else_the_systems_else_that_of_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HOTLAP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_root() == tmp_path / ".cache" / "hotlap"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_root() == tmp_path / ".cache" / "hotlap"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "hotlap"
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "mine"))
    assert default_root() == Cache().root == tmp_path / "mine"
    assert not (tmp_path / "mine").exists(), "looking makes no folder"


def test_folders_are_made_for_their_owner_alone(cache):
    before = os.umask(0)
    try:
        filled(cache, A)
    finally:
        os.umask(before)
    for path in (cache.root, cache.root / "features", cache.root / "features" / A):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("which", ["root", "kind"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_refused_with_the_cure(cache, which, mode):
    filled(cache, A)
    folder = cache.root if which == "root" else cache.root / "features"
    folder.chmod(mode)
    calls = [
        lambda: cache.get("features", A),
        lambda: cache.put("features", B, values=1, facts={}),
        lambda: cache.get_or_make("features", A, lambda: ({}, 1)),
        cache.list,
        cache.size,
        cache.verify,
        lambda: cache.prune(0),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=f"chmod go-w {folder}$"):
            call()
    if which == "root":
        with pytest.raises(StoreError, match="chmod go-w"):
            Cache(cache.root)
    folder.chmod(0o755)
    assert cache.get("features", A) is not None


def test_an_entry_that_others_can_write_to_is_not_believed(cache):
    filled(cache, A)
    (cache.root / "features" / A).chmod(0o777)
    assert cache.get("features", A) is None


def test_a_folder_of_somebody_else_is_refused(cache, monkeypatch):
    filled(cache, A)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for call in (lambda: cache.get("features", A), cache.list, lambda: Cache(cache.root)):
        with pytest.raises(StoreError, match="belongs to another user"):
            call()


def test_a_link_or_a_file_in_place_of_the_folder_is_refused(cache, tmp_path):
    filled(cache, A)
    (tmp_path / "link").symlink_to(cache.root)
    (tmp_path / "file").write_text("")
    for name, said in (("link", "is a link"), ("file", "not a folder")):
        with pytest.raises(StoreError, match=said):
            Cache(tmp_path / name)
    (cache.root / "models").symlink_to(cache.root / "features")
    with pytest.raises(StoreError, match="is a link"):
        cache.get("models", A)
    with pytest.raises(StoreError):
        cache.put("models", B, values=1, facts={})
    assert keys_of(cache.list()) == [A]


# --- list, size, prune -----------------------------------------------------------------------------


def test_the_list_has_the_one_used_last_first(cache):
    filled(cache, A, B, C)
    assert keys_of(cache.list()) == [C, B, A]
    cache.get("features", A)
    assert keys_of(cache.list()) == [A, C, B]
    assert [item.facts["n"] for item in cache.list()] == [0, 2, 1]
    assert cache.list("models") == []
    assert Cache(cache.root / "none").list() == []


def test_the_size_is_that_of_the_files(cache):
    filled(cache, A, B)
    files = [p for p in cache.root.rglob("*") if p.is_file() and p.name != "manifest.json"]
    assert cache.size() == sum(file.stat().st_size for file in files) == cache.size("features")
    assert cache.size("models") == 0


def test_pruning_removes_the_least_recently_used_first_and_no_more_than_it_must(cache):
    filled(cache, A, B, C)
    each = cache.list()[0].bytes
    assert cache.prune(3 * each) == []
    assert keys_of(cache.prune(3 * each - 1)) == [A]
    cache.get("features", B)
    assert keys_of(cache.prune(each)) == [C]
    assert keys_of(cache.prune(0)) == [B]
    assert cache.list() == []


def test_pruning_by_age_and_kind_leaves_the_rest(cache):
    filled(cache, A, B)
    filled(cache, A, kind="models")
    cache.get("features", B)
    assert keys_of(cache.prune(older_than_s=3600, kind="features")) == [A]
    assert len(cache.list()) == 2
    assert cache.prune() == []
    assert [item.kind for item in cache.prune(older_than_s=3600)] == ["models"]


def test_pruning_follows_no_link_and_touches_nothing_of_anybody_else(cache, tmp_path):
    filled(cache, A)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (outside / B).mkdir()
    (cache.root / "features" / B).symlink_to(outside)
    (cache.root / "models").symlink_to(outside)
    (cache.root / "notes.txt").write_text("mine")
    (cache.root / "features" / "thesis").mkdir()
    (cache.root / "features" / A / "link").symlink_to(outside)
    cache.prune(0, older_than_s=0)
    assert sorted(path.name for path in outside.iterdir()) == sorted(["precious", B])
    left = sorted(str(path.relative_to(cache.root)) for path in cache.root.rglob("*"))
    assert left == ["features", "features/thesis", "models", "notes.txt"]


def test_pruning_removes_what_a_dead_process_left_and_spares_what_a_live_one_writes(cache):
    filled(cache, A)
    old, new = (cache.root / "features" / f".new-{B}-{n:016x}" for n in (1, 2))
    for path in (old, new):
        path.mkdir()
        (path / "values.json").write_text("{")
    os.utime(old, (0, 0))
    cache.prune()
    assert not old.exists()
    assert new.exists()
    assert keys_of(cache.list()) == [A]


def test_reading_works_where_the_time_of_use_cannot_be_kept(cache, monkeypatch):
    filled(cache, A)

    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.get("features", A) is not None


# --- trained models --------------------------------------------------------------------------------


def test_a_trained_model_is_found_again_by_its_identity_and_first_weights(cache):
    identity = {"settings": {"epochs": 3, "lr": 0.1}, "code": {"train.py": "00"}, "data": {"sha256": "11"}}
    initial = {"w": torch.zeros(2), "b": torch.zeros(1)}
    key = model_key(identity, initial)
    assert stored_model(cache, key) is None
    trained = {"w": torch.randn(2), "b": torch.randn(1)}
    history = [{"step": 1, "loss": math.inf}]
    store_model(cache, key, trained, {"history": history, "best": history[0]}, {"model": "Net"})
    tensors, values = stored_model(cache, model_key(dict(reversed(identity.items())), dict(initial)))
    assert all(torch.equal(tensors[name], trained[name]) for name in trained)
    assert values == {"history": history, "best": history[0]}
    others = [
        model_key({**identity, "settings": {"epochs": 4, "lr": 0.1}}, initial),
        model_key({**identity, "data": {"sha256": "12"}}, initial),
        model_key({**identity, "code": {"train.py": "01"}}, initial),
        model_key(identity, {**initial, "b": torch.ones(1)}),
    ]
    assert key not in others
    assert [stored_model(cache, other) for other in others] == [None] * 4


def test_a_stored_model_that_is_damaged_says_why_and_counts_as_none(cache, caplog):
    key = model_key({}, {})
    store_model(cache, key, {"w": torch.zeros(2)}, None, {})
    file = cache.root / "models" / key / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert stored_model(cache, key) is None
    assert "tensors.safetensors has" in caplog.text
    assert "bytes, not the" in caplog.text


def test_time_is_told_in_seconds_since_1970(cache):
    before = time.time()
    cache.put("features", A, values=1, facts={})
    assert before - 2 <= cache.list()[0].used_s <= time.time() + 2  # as coarse as a file system may be
