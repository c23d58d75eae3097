"""`hotlap show`, `cache`, `pack` and `unpack`: results on stdout, one line on stderr where something is refused."""

import json
import os
import pickle
import shutil
import time
import zipfile

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hotlap import Job, fit
from hotlap.cli import app
from hotlap.core.errors import StoreError
from hotlap.core.table import table
from hotlap.store.cache import Cache, key_of

A, B = key_of("a"), key_of("b")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    held = Cache()
    held.put("features", A, tensors={"x": torch.zeros(1000)}, facts={"what": "bars \x1b[31m", "rows": 3})
    held.put("models", B, tensors={"x": torch.zeros(10)}, facts={"model": "Net"})
    os.utime(held.root / "features" / A, (1000, 1000))
    return held


def said(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


@pytest.fixture
def run(forks, tmp_path):
    """Runs the command in a process that has loaded it, with the cache of this test."""

    def run(*arguments):
        return forks.run("-m", "hotlap", *arguments, cwd=tmp_path, HOTLAP_CACHE=os.environ["HOTLAP_CACHE"])

    return run


def test_the_cache_is_listed_with_and_without_the_word(cache):
    text = said("cache")
    assert text == said("cache", "list")
    first, second, last = text.splitlines()
    assert first.startswith(f"models       {B[:12]}")
    assert "model Net" in first
    assert second.startswith(f"features     {A[:12]}    4.0 KiB")
    assert "bars \\x1b[31m" in second
    assert last == f"2 entries, {said('cache', 'size').split(' in ')[0]} in {cache.root}"


def test_lists_and_sizes_are_json_on_request(cache):
    listed = json.loads(said("cache", "--json"))
    assert listed == json.loads(said("cache", "list", "--json"))
    assert listed["root"] == str(cache.root)
    assert [entry["kind"] for entry in listed["entries"]] == ["models", "features"]
    assert json.loads(said("cache", "size", "--json")) == {"root": str(cache.root), "bytes": cache.size()}
    only = json.loads(said("cache", "list", "--kind", "models", "--json"))
    assert [entry["key"] for entry in only["entries"]] == [B]


def test_verify_ends_with_1_on_damage_and_removes_only_when_told_to(cache):
    assert said("cache", "verify") == "0 damaged\n"
    file = cache.root / "features" / A / "tensors.safetensors"
    file.write_bytes(b"\x80")
    text = said("cache", "verify", code=1)
    assert text.startswith(f"damaged: {file.parent}: tensors.safetensors has 1 bytes")
    assert "--remove" in text
    told = json.loads(said("cache", "verify", "--json", code=1))
    assert [row["path"] for row in told["damaged"]] == [str(file.parent)]
    assert file.exists()
    said("cache", "verify", "--remove", code=1)
    assert not file.parent.exists()
    said("cache", "verify")


def test_prune_removes_by_size_by_age_and_by_kind(cache):
    assert said("cache", "prune", "--keep", "1MB", "--older-than", "100000d") == "removed 0 entries, 0 B\n"
    assert said("cache", "prune", "--older-than", "1h", "--kind", "models").startswith("removed 0")
    told = json.loads(said("cache", "prune", "--older-than", "1h", "--json"))
    assert [row["key"] for row in told["removed"]] == [A]
    assert said("cache", "prune", "--keep", "0").startswith("removed 1 entries")
    assert cache.list() == []


@pytest.mark.parametrize(
    "options", [[], ["--keep", "x"], ["--keep", "-1"], ["--keep", "1d"], ["--older-than", "5"], ["--older-than", "nan"]]
)
def test_prune_that_does_not_say_what_ends_with_2_and_removes_nothing(cache, options):
    said("cache", "prune", *options, code=2)
    assert len(cache.list()) == 2


def test_an_empty_cache_is_no_error_and_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "none"))
    assert said("cache").startswith("0 entries, 0 B in ")
    said("cache", "verify")
    said("cache", "prune", "--keep", "0")
    assert not (tmp_path / "none").exists()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run.1"
    path.mkdir()
    (path / "plan.toml").write_text("hotlap_plan = 1\n")
    (path / "model.safetensors").write_bytes(b"x" * 100)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run of a short training."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    job = Job(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.CrossEntropyLoss(),
        data=(torch.randn(20, 3), torch.arange(20) % 2),
        batch_size=5,
        epochs=2,
    )
    return fit(job, plan="max", out=tmp_path_factory.mktemp("runs") / "short", progress=False)


def test_an_earlier_run_is_shown_again(trained):
    text = said("show", trained.folder)
    assert f"plan      {trained.plan}\n" in text
    assert f"run       {trained.folder}\n" in text
    assert "last      step 8 · epoch 1 · " in text or "last      step 8 · epoch 2 · " in text
    assert all(line in text for line in table(trained.ledger))
    assert all(artefact.name in text for artefact in trained.artefacts())
    (found,) = json.loads(said("show", trained.folder, "--json"))["runs"]
    assert found["plan"] == trained.plan.to_dict()
    assert found["last"]["train_loss"] == pytest.approx(trained.history[-1]["train_loss"])


def test_a_recipes_run_is_shown_by_its_models(trained, tmp_path):
    for name in ("models/a", "folds/1"):
        shutil.copytree(trained.folder, tmp_path / "recipe" / name)
    (tmp_path / "recipe" / "options.toml").write_text('recipe = "text"\n')
    text = said("show", tmp_path / "recipe")
    assert [line.split()[1] for line in text.splitlines() if line.startswith("run ")] == [
        str(tmp_path / "recipe" / name) for name in ("folds/1", "models/a")
    ]


def test_what_is_no_run_is_not_shown(tmp_path):
    done = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert isinstance(done.exception, StoreError)
    assert "is not a run folder" in str(done.exception)


def test_a_run_is_packed_beside_itself_and_unpacked(folder, tmp_path):
    assert said("pack", folder).startswith(f"{folder}.zip  ")
    text = said("unpack", f"{folder}.zip", tmp_path / "home")
    assert text == f"{tmp_path / 'home'}\ngo on with: hotlap resume {tmp_path / 'home'}\n"
    assert (tmp_path / "home" / "model.safetensors").read_bytes() == b"x" * 100
    told = json.loads(said("pack", folder, tmp_path / "b.zip", "--json"))
    assert told == {"archive": str(tmp_path / "b.zip"), "bytes": (tmp_path / "b.zip").stat().st_size}
    assert json.loads(said("unpack", tmp_path / "b.zip", tmp_path / "c", "--json")) == {"folder": str(tmp_path / "c")}


def test_pack_and_unpack_name_files_as_the_command_does(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert said("pack", folder.name).startswith("run.1.zip  ")
    assert said("unpack", "run.1.zip", "home") == "home\ngo on with: hotlap resume home\n"
    monkeypatch.chdir("home")
    assert said("pack", ".").startswith(f"{folder.parent / 'home.zip'}  ")


def test_a_refusal_reaches_the_user_as_an_error_of_hotlaps_own(folder, tmp_path, monkeypatch):
    (tmp_path / "x.zip").write_bytes(pickle.dumps(1))
    monkeypatch.setenv("HOTLAP_CACHE", str(folder))
    folder.chmod(0o777)
    for arguments in (["unpack", tmp_path / "x.zip", tmp_path / "y"], ["pack", tmp_path], ["cache"], ["cache", "size"]):
        done = CliRunner().invoke(app, list(map(str, arguments)))
        assert isinstance(done.exception, StoreError)


class Bomb:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.system, (f"touch {self.sentinel}",)


def test_hostile_arguments_end_with_1_and_one_line_and_run_nothing(folder, tmp_path, monkeypatch, run):
    sentinel = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(sentinel))
    (tmp_path / "bomb.zip").write_bytes(bomb)
    with zipfile.ZipFile(tmp_path / "slip.zip", "w") as file:
        file.writestr("../../executed", b"x")
    (folder / "started.json").write_bytes(bomb)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("HOTLAP_CACHE", str(shared))
    before = sorted(map(str, tmp_path.rglob("*")))
    for arguments in (
        ["unpack", tmp_path / "bomb.zip", tmp_path / "into"],
        ["unpack", tmp_path / "slip.zip", tmp_path / "into"],
        ["resume", folder],
        ["resume", tmp_path / "bomb.zip"],
        ["cache", "verify"],
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert done.stderr.startswith("hotlap: ")
        assert done.stderr.count("\n") == 1
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_hostile_entries_are_told_and_never_opened(cache, tmp_path, run):
    entry = cache.root / "features" / A
    for name in ("manifest.json", "values.json"):
        (entry / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    done = run("cache", "verify")
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 damaged" in done.stdout
    done = run("cache")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "executed").exists()


def test_the_time_of_use_is_told_as_an_age(cache):
    hour = time.time() - 3600
    os.utime(cache.root / "models" / B, (hour, hour))
    assert "1 h 0 min ago" in said("cache", "list", "--kind", "models")
