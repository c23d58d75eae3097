"""Samples stay few, and what a kill or a stranger leaves in their file harms no reader."""

import json
import math
from itertools import pairwise

import pytest

from hotlap.core.errors import StoreError
from hotlap.store.run_folder import RunFolder
from hotlap.store.telemetry import LIVE, SAMPLES, SampleFile, read_live, read_samples, write_live


def write(folder, text):
    (folder / SAMPLES).write_text(text)


def fill(file, seconds, start=1000):
    for second in range(seconds):
        file.add({"at": float(start + second), "step": second})


def test_samples_come_back_in_their_order(tmp_path):
    file = SampleFile(tmp_path)
    file.add({"at": 1.0, "step": 3, "host": {"cores_busy": 1.5}, "gpus": [{"busy": 0.5}]})
    file.add({"at": 2.0, "step": 9, "gap_s": 4.0})
    assert read_samples(tmp_path) == [
        {"at": 1.0, "step": 3, "host": {"cores_busy": 1.5}, "gpus": [{"busy": 0.5}]},
        {"at": 2.0, "step": 9, "gap_s": 4.0},
    ]


@pytest.mark.parametrize("seconds", [10, 15, 16, 17, 100, 1000, 5000])
def test_a_training_of_any_length_leaves_a_bounded_number_of_samples_over_all_of_its_time(tmp_path, seconds):
    file = SampleFile(tmp_path, most=16)
    fill(file, seconds)
    kept = [sample["at"] - 1000 for sample in read_samples(tmp_path)]
    assert len(kept) < 16
    assert len(kept) >= min(seconds, 8)
    steps = [b - a for a, b in pairwise(kept)]
    assert max(steps) <= 2 * min(steps)
    assert kept[0] <= seconds / 4
    assert kept[-1] >= 0.75 * seconds - 1


def test_a_later_process_goes_on_as_rarely_as_the_earlier_one_ended(tmp_path):
    fill(SampleFile(tmp_path, most=16), 1000)
    before = len(read_samples(tmp_path))
    fill(SampleFile(tmp_path, most=16), 20, start=2000)
    assert len(read_samples(tmp_path)) - before <= 2


def test_a_gap_outlives_the_sample_that_was_behind_it(tmp_path):
    file = SampleFile(tmp_path, most=4)
    for at, more in ((1.0, {}), (2.0, {}), (60.0, {"gap_s": 58.0}), (61.0, {})):
        file.add({"at": at, **more})
    assert [(one["at"], one.get("gap_s")) for one in read_samples(tmp_path)] == [(2.0, None), (61.0, 58.0)]


def test_a_line_that_a_kill_cut_short_is_left_out_and_spoils_no_later_one(tmp_path):
    write(tmp_path, '{"at": 1.0, "step": 1}\n{"at": 2.0, "ste')
    assert [sample["at"] for sample in read_samples(tmp_path)] == [1.0]
    SampleFile(tmp_path).add({"at": 3.0})
    assert [sample["at"] for sample in read_samples(tmp_path)] == [1.0, 3.0]


@pytest.mark.parametrize(
    "line",
    [
        "null", "[]", "7", '"at"', "{}", '{"at": "now"}', '{"at": true}', '{"at": -1}', '{"at": 1e400}', '{"at": NaN}',
        '{"at": 1, "gpus": 3}', '{"at": 1, "gpus": [3]}', '{"at": 1, "host": []}', '{"at": 1, "torch": "x"}',
        "[" * 100_000, "{" * 5000, "\x00\xff",
    ],
)  # fmt: skip
def test_what_is_no_sample_is_left_out(tmp_path, line):
    write(tmp_path, f'{line}\n{{"at": 5.0}}\n')
    assert read_samples(tmp_path) == [{"at": 5.0}]


def test_a_strangers_texts_and_numbers_are_harmless(tmp_path):
    write(tmp_path, json.dumps({"at": 5.0, "gpus": [{"name": "\x1b[2J<b>" + 10_000 * "x", "busy": 1e300}]}) + "\n")
    ((gpu,),) = [sample["gpus"] for sample in read_samples(tmp_path)]
    assert gpu["name"].isprintable()
    assert len(gpu["name"]) < 500
    assert gpu["busy"] is None


def test_a_run_without_samples_has_none(tmp_path):
    assert read_samples(tmp_path) == []
    assert read_live(tmp_path) is None


def test_a_state_comes_back_with_null_for_what_is_no_number(tmp_path):
    write_live(tmp_path, {"pid": 7, "at": 1.0, "loss": math.nan, "losses": [(1, 0.5)], "name": "a\x1b[31m"})
    assert read_live(tmp_path) == {"pid": 7, "at": 1.0, "loss": None, "losses": [[1, 0.5]], "name": "a\\x1b[31m"}
    assert [file.name for file in tmp_path.iterdir()] == [LIVE]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "1", "at": 1}', '{"pid": 1}', '{"pid": true, "at": 1}'])
def test_what_is_no_state_is_none(tmp_path, text):
    (tmp_path / LIVE).write_text(text)
    assert read_live(tmp_path) is None


def test_a_disk_that_takes_nothing_says_so(tmp_path):
    folder = tmp_path / "gone"
    with pytest.raises(StoreError, match="cannot write"):
        SampleFile(folder).add({"at": 1.0})
    with pytest.raises(OSError, match="gone"):
        write_live(folder, {"pid": 1, "at": 1.0})


def test_a_folder_with_nothing_but_telemetry_is_free_for_another_run(tmp_path):
    write_live(tmp_path, {"pid": 7, "at": 1.0})
    SampleFile(tmp_path).add({"at": 1.0})
    assert RunFolder.create(tmp_path).path == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(StoreError, match="not empty"):
        RunFolder.create(tmp_path)
