"""A run folder belongs to one run, and lists what it holds."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from torch import nn

from hotlap.core.errors import StoreError
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.store import run_folder
from hotlap.store.run_folder import ABOUT, RunFolder


def strict(text):
    """JSON as the standard has it: without NaN and Infinity."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_new_or_empty_folder_is_taken(tmp_path):
    assert RunFolder.create(tmp_path / "a" / "b").path.is_dir()
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(str(tmp_path / "empty")).path == tmp_path / "empty"


def test_a_folder_that_holds_files_is_refused_and_left(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(StoreError) as caught:
        RunFolder.create(tmp_path)
    assert str(caught.value) == f"the run folder {tmp_path} is not empty; name a new one or remove it"
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_file_in_its_place_or_above_it_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(StoreError) as caught:
        RunFolder.create(file)
    assert str(caught.value) == f"cannot use {file} as a run folder: it is a file; name a new folder"
    with pytest.raises(StoreError) as caught:
        RunFolder.create(file / "below")
    assert str(caught.value) == f"cannot make the run folder {file / 'below'}: Not a directory"


def test_whether_a_folder_can_be_written_is_known_without_making_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for fine in (None, tmp_path, "new/inner"):
        RunFolder.check(fine)
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path, why in ((None, "Not a dir"), ("runs/mine", "Not a dir"), ("x" * 300, "too long"), ("link", "No such")):
        with pytest.raises(StoreError, match=f"cannot write a run into .*: .*{why}.*; name another"):
            RunFolder.check(path)


class Noon(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2030, 1, 2, 12, 0, 0)


@pytest.fixture
def at_noon(tmp_path, monkeypatch):
    """All that happens, happens in the same second, in an empty folder."""
    monkeypatch.setattr(run_folder, "datetime", Noon)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_of_the_same_second_get_names_of_their_own(at_noon):
    paths = [str(RunFolder.create(None, "Net").path) for _ in range(3)]
    assert paths == [f"runs/Net-20300102-120000{end}" for end in ("", "-2", "-3")]


def test_runs_that_start_at_the_same_moment_never_share_a_folder(at_noon):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: RunFolder.create(None).path, range(40)))
    assert len(set(paths)) == 40


def test_a_file_called_runs_is_told_and_not_waited_for(at_noon):
    (at_noon / "runs").write_text("mine")
    with pytest.raises(StoreError, match="cannot make the run folder runs/"):
        RunFolder.create(None)


@pytest.mark.parametrize(
    "names", [["lock"], ["lock", "started.json", ".plan.toml.abc"], ["lock", "record.json"]], ids=str
)
def test_a_folder_left_before_anything_was_trained_there_is_as_good_as_new(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(StoreError, match="holds no training yet: its run ended before the first step; start it anew"):
        RunFolder.open(tmp_path)
    assert RunFolder.create(tmp_path).path == tmp_path


@pytest.mark.parametrize(
    "names",
    [["started.json"], ["lock", "mine.txt"], ["lock", "plan.toml"], ["lock", ".mine"], ["lock", "locks"]],
    ids=str,
)
def test_a_folder_that_holds_anything_else_is_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(StoreError, match="is not empty"):
        RunFolder.create(tmp_path)


def test_a_folder_without_a_plan_is_no_run(tmp_path):
    with pytest.raises(StoreError) as caught:
        RunFolder.open(tmp_path)
    assert str(caught.value) == f"{tmp_path} is not a run folder: it has no plan.toml"


WRITTEN = (
    "plan.toml",
    "ledger.jsonl",
    "metrics.jsonl",
    "environment.json",
    "model.safetensors",
    "artefacts.json",
)


def filled(path):
    folder = RunFolder.create(path)
    ledger = Ledger()
    ledger.record(Entry(step=0, what="start", outcome="chosen", plan=Plan()))
    folder.write_plan(Plan().but(precision="bf16"))
    folder.write_ledger(ledger)
    folder.add_metrics({"step": 1, "train_loss": 0.5})
    folder.write_environment({"python": "3"})
    folder.write_model(nn.Linear(2, 2))
    folder.write_artefacts()
    return folder


def test_what_was_written_is_read_back_by_a_later_visitor(tmp_path):
    folder = filled(tmp_path / "run")
    later = RunFolder.open(str(folder.path))
    assert later.read_plan() == Plan().but(precision="bf16")
    assert [entry.plan for entry in later.read_ledger()] == [Plan()]
    assert later.read_metrics() == [{"step": 1, "train_loss": 0.5}]


def test_artefacts_are_listed_with_their_sizes_and_what_they_are(tmp_path):
    folder = filled(tmp_path / "run")
    (folder.path / "notes.txt").write_text("12345")
    (folder.path / ".half.tmp").write_text("left by a crash")
    (folder.path / "inner").mkdir()
    listed = {artefact.name: artefact for artefact in folder.artefacts()}
    assert sorted(listed) == sorted([*WRITTEN, "notes.txt"])
    assert all(artefact.bytes == (folder.path / name).stat().st_size > 0 for name, artefact in listed.items())
    assert all(listed[name].what == ABOUT[name] != "" for name in WRITTEN)
    assert listed["notes.txt"].what == ""


def test_the_list_in_the_folder_names_all_files_but_itself(tmp_path):
    folder = filled(tmp_path / "run")
    folder.write_artefacts()  # a second time, when the list itself is there
    rows = strict((folder.path / "artefacts.json").read_text())
    assert {row["name"]: row["bytes"] for row in rows} == {
        name: (folder.path / name).stat().st_size for name in WRITTEN if name != "artefacts.json"
    }


def test_a_folder_that_has_gone_is_told(tmp_path):
    with pytest.raises(StoreError, match=r"cannot read .*No such file or directory"):
        RunFolder(tmp_path / "gone").artefacts()


def test_numbers_that_are_none_are_stored_as_null(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.add_metrics({"step": 1, "train_loss": math.nan, "best": {"mae": math.inf}, "all": [1.0, -math.inf]})
    folder.write_environment({"clip": math.inf, "n": 1})
    assert strict((folder.path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "train_loss": None,
        "best": {"mae": None},
        "all": [1.0, None],
    }
    assert strict((folder.path / "environment.json").read_text()) == {"clip": None, "n": 1}


def test_metrics_can_be_replaced_as_a_whole(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.add_metrics({"step": 1})
    folder.write_metrics([{"step": 7, "loss": math.nan}, {"step": 8}])
    folder.add_metrics({"step": 9})
    assert folder.read_metrics() == [{"step": 7, "loss": None}, {"step": 8}, {"step": 9}]


def test_metrics_are_a_line_each_in_order_whatever_they_hold(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    records = [{"step": step, "what": "a\u2028b\nc ä"} for step in range(5)]
    for record in records:
        folder.add_metrics(record)
    assert folder.read_metrics() == records
    assert (folder.path / "metrics.jsonl").read_bytes().count(b"\n") == 5


def test_a_last_line_that_a_crash_cut_short_is_left_out(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.add_metrics({"step": 1})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "tra')
    assert folder.read_metrics() == [{"step": 1}]


def test_garbage_in_a_stored_file_is_told_with_file_and_line(tmp_path):
    folder = filled(tmp_path / "run")
    for name, read in [("metrics.jsonl", folder.read_metrics), ("ledger.jsonl", folder.read_ledger)]:
        file = folder.path / name
        file.write_text(file.read_text() + "garbage\n")
        with pytest.raises(StoreError) as caught:
            read()
        assert str(caught.value).startswith(f"{file}: line 2 ")
        assert "\n" not in str(caught.value)
