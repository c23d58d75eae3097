"""Files made to run code, to fill memory or to lead outside: all refused, nothing executed, nothing written."""

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import marshal
import os
import pickle
import sys
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
import torch
from plain import class_data, small_mlp
from torch import nn

import hotlap
from hotlap.core.errors import HotlapError, StoreError
from hotlap.store.archives import unpack
from hotlap.store.cache import Cache, key_of
from hotlap.store.checkpoints import Checkpoints
from hotlap.store.encoding import to_json
from hotlap.store.files import load_plan
from hotlap.store.run_folder import RunFolder
from hotlap.store.weights import load_weights

EXECUTING = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")
_heard: list[str] | None = None


def _listen(event, _):
    if _heard is not None and event in EXECUTING:
        _heard.append(event)


sys.addaudithook(_listen)


class Bomb:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.system, (f"touch {self.sentinel}",)


def torch_saved(bomb, **settings):
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(2), "x": bomb}, buffer, **settings)
    return buffer.getvalue()


def numpy_saved(bomb):
    buffer = io.BytesIO()
    np.save(buffer, np.array([bomb], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def numpy_zipped(bomb):
    buffer = io.BytesIO()
    np.savez(buffer, x=np.array([bomb], dtype=object))
    return buffer.getvalue()


def zipped(name, content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, content)
    return buffer.getvalue()


def tarred(name, content):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tensors_file(header, body=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def one(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"w": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def code_file(sentinel):
    code = compile(f"import os; os.system('touch {sentinel}')", "x", "exec")
    return b"\xa7\r\r\n" + bytes(12) + marshal.dumps(code)


HOSTILE = {
    **{f"pickle of protocol {n}": lambda s, n=n: pickle.dumps(Bomb(s), n) for n in range(6)},
    "pickle in a dict of weights": lambda s: pickle.dumps({"weight": [1.0], "x": Bomb(s)}),
    "pickle by hand": lambda s: f"cos\nsystem\n(S'touch {s}'\ntR.".encode(),
    "pickle after a safetensors length": lambda s: tensors_file(pickle.dumps(Bomb(s))),
    "pickle after a brace": lambda s: tensors_file(b"{" + pickle.dumps(Bomb(s))),
    "pickle behind good tensors": lambda s: tensors_file(one(), bytes(8)) + pickle.dumps(Bomb(s)),
    "torch.save": lambda s: torch_saved(Bomb(s)),
    "torch.save of old": lambda s: torch_saved(Bomb(s), _use_new_zipfile_serialization=False),
    "numpy object array": lambda s: numpy_saved(Bomb(s)),
    "numpy object arrays zipped": lambda s: numpy_zipped(Bomb(s)),
    "gzip of a pickle": lambda s: gzip.compress(pickle.dumps(Bomb(s))),
    "bzip2 of a pickle": lambda s: bz2.compress(pickle.dumps(Bomb(s))),
    "xz of a pickle": lambda s: lzma.compress(pickle.dumps(Bomb(s))),
    "zlib of a pickle, as joblib": lambda s: zlib.compress(pickle.dumps(Bomb(s))),
    "tar of a pickle": lambda s: tarred("data.pkl", pickle.dumps(Bomb(s))),
    "zip of a pickle": lambda s: zipped("archive/data.pkl", pickle.dumps(Bomb(s))),
    "zip behind good tensors": lambda s: tensors_file(one(), bytes(8)) + zipped("data.pkl", pickle.dumps(Bomb(s))),
    "Keras zip": lambda s: zipped("config.json", json.dumps({"class_name": "Lambda", "config": str(s)})),
    "HDF5": lambda s: b"\x89HDF\r\n\x1a\n" + pickle.dumps(Bomb(s)),
    "compiled Python": code_file,
    "Python": lambda s: f"import os\nos.system('touch {s}')\n".encode(),
    "shell script": lambda s: f"#!/bin/sh\ntouch {s}\n".encode(),
    "YAML that calls": lambda s: f"!!python/object/apply:os.system ['touch {s}']\n".encode(),
    "XML bomb": lambda s: b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><x>&b;</x>',
    "web page": lambda s: b"<html>404</html>",
    "Git LFS pointer": lambda s: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "GGUF": lambda s: b"GGUF" + bytes(100),
    "header of 2**63 bytes": lambda s: tensors_file({}, length=2**63),
    "header longer than the file": lambda s: tensors_file(one(), bytes(8), length=10**6),
    "header of no bytes": lambda s: bytes(64),
    "header of deep JSON": lambda s: tensors_file(b'{"a":' * 50_000),
    "header cut short": lambda s: tensors_file(one(), bytes(8))[:30],
    "header of no JSON": lambda s: tensors_file(b"{nonsense}"),
    "header of a list": lambda s: tensors_file([one()]),
    "header with other metadata": lambda s: tensors_file({"__metadata__": {"x": [1]}, **one()}, bytes(8)),
    "tensor beyond the file": lambda s: tensors_file(one(offsets=(0, 8 * 10**9)), bytes(8)),
    "tensor before its place": lambda s: tensors_file(one(offsets=(8, 0)), bytes(8)),
    "tensor of another size": lambda s: tensors_file(one(shape=(3,)), bytes(8)),
    "tensor of overflowing shape": lambda s: tensors_file(one(shape=(2**33, 2**33)), bytes(8)),
    "tensor of negative shape": lambda s: tensors_file(one(shape=(-2,)), bytes(8)),
    "tensor of no dtype": lambda s: tensors_file(one(dtype="OBJECT"), bytes(8)),
    "tensors that overlap": lambda s: tensors_file({**one(), "v": one()["w"]}, bytes(8)),
    "deep JSON lists": lambda s: b"[" * 100_000 + b"]" * 100_000,
    "deep JSON objects": lambda s: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "JSON of a number without end": lambda s: b"1" * 50_000,
    "JSON of NaN": lambda s: b'{"format": NaN, "sha256": "0", "files": {}, "facts": {}}\n',
    "JSON with a name that leads out": lambda s: b'{"format":1,"files":{"../../x.json":{}},"facts":{},"sha256":"0"}\n',
    "deep TOML": lambda s: b"a = " + b"[" * 50_000,
    "no UTF-8": lambda s: b"\xff\xfe\x00a\xc3\x28\n",
    "nothing": lambda s: b"",
    "zeros": lambda s: bytes(4096),
}


@pytest.fixture(params=sorted(HOSTILE))
def hostile(request, tmp_path):
    """A hostile file's bytes; whoever was given them, nothing was executed."""
    global _heard
    sentinel = tmp_path / "executed"
    content = HOSTILE[request.param](sentinel)
    _heard = []
    yield content
    heard, _heard = _heard, None
    assert heard == []
    assert not sentinel.exists()


def tree(folder):
    """All that is in a folder, links as links."""
    return sorted(
        (str(p.relative_to(folder)), p.readlink() if p.is_symlink() else p.read_bytes() if p.is_file() else None)
        for p in folder.rglob("*")
    )


def told(caught):
    line = str(caught.value)
    assert line.count("\n") == 0, line
    assert len(line) < 600
    return line


def small_job(**changes):
    settings = {
        "model": small_mlp(),
        "data": class_data(16),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.01),
        "batch_size": 8,
        "epochs": 1,
        "device": "cpu",
    }
    return hotlap.Job(**{**settings, **changes})


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "run"
    hotlap.fit(small_job(), out=folder, save_every=1, progress=False)
    for extra in sorted((folder / "checkpoints").iterdir())[:-1]:
        for file in extra.iterdir():
            file.unlink()
        extra.rmdir()
    return folder


@pytest.fixture
def run(good_run, tmp_path):
    """A run of its own for each test, with one checkpoint."""
    copy = tmp_path / "run"
    for path in good_run.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(good_run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return copy


def checkpoint_of(run):
    (path,) = (run / "checkpoints").glob("step-*")
    return path


def sign(folder):
    """Make a manifest true again after its files were changed, as whoever wrote them could."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["sha256"] = hashlib.sha256(to_json(manifest)).hexdigest()
    (folder / "manifest.json").write_bytes(to_json(manifest))


def resumed(run):
    return hotlap.fit(small_job(epochs=2), resume=run, progress=False)


def test_there_are_more_than_twenty_of_them():
    assert len(HOSTILE) >= 40


def test_a_run_that_nobody_touched_is_resumed(run):
    sign(checkpoint_of(run))
    assert resumed(run).steps == 4


def test_the_bombs_are_live(tmp_path):
    """Opened by what must not be used, they go off: a refusal that tests duds would prove nothing."""
    for number, name in enumerate(["pickle of protocol 0", "pickle of protocol 5", "pickle by hand"]):
        pickle.loads(HOSTILE[name](tmp_path / str(number)))
    torch.load(io.BytesIO(HOSTILE["torch.save"](tmp_path / "3")), weights_only=False)
    torch.load(io.BytesIO(HOSTILE["torch.save of old"](tmp_path / "4")), weights_only=False)
    np.load(io.BytesIO(HOSTILE["numpy object array"](tmp_path / "5")), allow_pickle=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "weights", ".metadata", "__0_0.distcp"])
def test_load_weights_refuses_it_under_every_name(hostile, name, tmp_path):
    (tmp_path / name).write_bytes(hostile)
    before = tree(tmp_path)
    with pytest.raises(StoreError) as caught:
        load_weights(tmp_path / name)
    told(caught)
    assert tree(tmp_path) == before


def test_load_weights_refuses_it_as_the_model_of_a_run(hostile, run):
    (run / "model.safetensors").write_bytes(hostile)
    with pytest.raises(StoreError) as caught:
        load_weights(run)
    told(caught)


READERS = {
    "plan.toml": lambda run: RunFolder.open(run).read_plan(),
    "ledger.jsonl": lambda run: list(RunFolder.open(run).read_ledger()),
    "metrics.jsonl": lambda run: RunFolder.open(run).read_metrics(),
    "started.json": lambda run: RunFolder.open(run).read_started(),
}


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_reader_of_a_run_folder_refuses_it_or_finds_plain_values(hostile, name, run, tmp_path):
    (run / name).write_bytes(hostile)
    before = tree(tmp_path)
    with contextlib.suppress(HotlapError):
        json.dumps(READERS[name](run))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["manifest.json", "training.json", "training.safetensors", "model.safetensors"])
def test_a_checkpoint_with_it_is_damaged(hostile, name, run):
    (checkpoint_of(run) / name).write_bytes(hostile)
    with pytest.raises(StoreError, match=r"every checkpoint of .* is damaged") as caught:
        Checkpoints(run / "checkpoints").newest_good()
    told(caught)


@pytest.mark.parametrize("name", ["training.json", "training.safetensors", "model.safetensors"])
def test_a_run_with_it_in_a_checkpoint_is_not_resumed_however_well_it_is_signed(hostile, name, run, tmp_path):
    (checkpoint_of(run) / name).write_bytes(hostile)
    sign(checkpoint_of(run))
    (run / "lock").write_bytes(b"")
    before = tree(tmp_path)
    with pytest.raises(StoreError) as caught:
        resumed(run)
    told(caught)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["manifest.json", "values.json", "values.safetensors", "tensors.safetensors"])
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_a_cache_entry_with_it_is_thrown_away_and_made_again(hostile, name, signed, tmp_path, caplog):
    cache, key = Cache(tmp_path / "cache"), key_of("x")
    cache.put("features", key, tensors={"a": torch.ones(2)}, values={"n": torch.ones(1)}, facts={})
    entry = tmp_path / "cache" / "features" / key
    (entry / name).write_bytes(hostile)
    if signed and name != "manifest.json":
        sign(entry)
    tensors, values = cache.get_or_make("features", key, lambda: ({"a": torch.zeros(2)}, "made again"))
    assert values == "made again"
    assert tensors["a"].tolist() == [0, 0]
    assert "removed the damaged cache entry" in caplog.text
    assert cache.verify() == []


def test_it_is_no_archive_or_one_that_stays_inside(hostile, tmp_path):
    (tmp_path / "x.zip").write_bytes(hostile)
    before = tree(tmp_path)
    with contextlib.suppress(StoreError):  # some of them are zip files, and unpacking runs nothing
        unpack(tmp_path / "x.zip", tmp_path / "into")
    assert [row for row in tree(tmp_path) if not row[0].startswith("into")] == before


def test_it_is_no_plan_to_train_under(hostile, tmp_path):
    (tmp_path / "plan.toml").write_bytes(hostile)
    with pytest.raises(HotlapError):
        hotlap.fit(small_job(), plan=tmp_path / "plan.toml", out=tmp_path / "run", progress=False)
    with pytest.raises(HotlapError):
        load_plan(tmp_path / "plan.toml")
    assert not (tmp_path / "run").exists()


# --- not files at all ------------------------------------------------------------------------------


def fifo(path, _):
    os.mkfifo(path)


def link_out(path, outside):
    path.symlink_to(outside)


def link_to_nothing(path, _):
    path.symlink_to("nowhere")


def link_to_device(path, _):
    path.symlink_to("/dev/zero")


def folder(path, _):
    path.mkdir()


KINDS = [fifo, link_out, link_to_nothing, link_to_device, folder]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_weights_are_read_from_regular_files_only(kind, run, tmp_path):
    kind(tmp_path / "w.safetensors", run / "model.safetensors")
    with pytest.raises(StoreError) as caught:
        load_weights(tmp_path / "w.safetensors")
    assert str(tmp_path / "w.safetensors") in told(caught)


@pytest.mark.parametrize("name", ["manifest.json", "training.json", "model.safetensors"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_checkpoints_are_read_from_regular_files_only(kind, name, run, tmp_path):
    file = checkpoint_of(run) / name
    file.rename(tmp_path / name)
    kind(file, tmp_path / name)
    with pytest.raises(StoreError) as caught:
        resumed(run)
    told(caught)


@pytest.mark.parametrize("name", ["manifest.json", "values.json", "tensors.safetensors"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_cache_entries_are_read_from_regular_files_only(kind, name, tmp_path):
    cache, key = Cache(tmp_path / "cache"), key_of("x")
    cache.put("features", key, values=1, facts={})
    file = tmp_path / "cache" / "features" / key / name
    file.rename(tmp_path / name)
    kind(file, tmp_path / name)
    assert len(cache.verify()) == 1
    assert cache.get("features", key) is None
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_archive_is_a_regular_file(kind, run, tmp_path):
    kind(tmp_path / "x.zip", run / "model.safetensors")
    with pytest.raises(StoreError) as caught:
        unpack(tmp_path / "x.zip", tmp_path / "into")
    told(caught)
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize("where", ["checkpoints", "checkpoints/step"])
def test_a_link_in_place_of_checkpoints_is_not_followed_nor_tidied(where, run, tmp_path):
    place = run / "checkpoints" if where == "checkpoints" else checkpoint_of(run)
    outside = tmp_path / "outside" / place.name
    outside.parent.mkdir()
    place.rename(outside)
    (outside / ".new-000000001").mkdir()
    place.symlink_to(outside)
    before = tree(tmp_path / "outside")
    with pytest.raises(StoreError) as caught:
        resumed(run)
    told(caught)
    assert tree(tmp_path / "outside") == before


@pytest.mark.parametrize("name", ["../x.json", "/x.json", "a/b.json", "..", "x.pkl", "manifest.json", "x\n.json", ""])
def test_a_manifest_that_names_a_file_elsewhere_is_refused_though_its_hash_is_right(name, run):
    folder = checkpoint_of(run)
    (run / "checkpoints" / "x.json").write_text("{}")
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    manifest["files"][name] = {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    manifest["sha256"] = hashlib.sha256(to_json(manifest)).hexdigest()
    (folder / "manifest.json").write_bytes(to_json(manifest))
    with pytest.raises(StoreError, match="not a plain file name"):
        Checkpoints(run / "checkpoints").read(folder)


def test_a_distributed_checkpoint_is_refused_with_the_way_out(tmp_path):
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    (folder / "__0_0.distcp").write_bytes(torch_saved(Bomb(tmp_path / "executed")))
    for path in (folder, folder / ".metadata", folder / "__0_0.distcp"):
        with pytest.raises(StoreError, match=r"distributed checkpoint.*format_utils") as caught:
            load_weights(path)
        told(caught)
    assert not (tmp_path / "executed").exists()


def test_a_header_that_would_fill_the_memory_is_not_read(tmp_path):
    """300 MB that take no room on the disk: its header alone claims 200 MB."""
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little") + b"{")
        file.truncate(300_000_000)
    with pytest.raises(StoreError, match="header of 200,000,000 bytes; hotlap reads at most 100,000,000"):
        load_weights(path)


def test_a_file_larger_than_the_memory_is_told(tmp_path):
    path = tmp_path / "w.safetensors"
    size = 2**46
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    try:
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 2**43)
    except OSError:
        pytest.skip("this file system has no files of 8 TiB")
    with pytest.raises(StoreError):
        load_weights(path)


def test_the_way_a_stranger_says_a_run_was_started_is_shown_and_not_obeyed(run):
    from hotlap.fitting.record import checked_words

    (run / "started.json").write_text(json.dumps({"words": ["a\x1b]0;b\x07", "c\nhotlap: done"], "call": 1}))
    assert checked_words(RunFolder(run)) == ["a\\x1b]0;b\\x07", "c\\nhotlap: done"]
