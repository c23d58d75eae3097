"""The comparison of public scripts by themselves and under hotlap."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from benchmarks.strangers import __main__ as strangers_main
from benchmarks.strangers import makers, scripts
from benchmarks.strangers.comparing import compare_figures, compare_files, without_times

SCRIPT = """
import sys, time
from pathlib import Path

begun = time.time()
Path("weights.txt").write_text("1 2 3")
print(f"loss 0.25 after {sys.argv[1]} epochs in {time.time() - begun:.9f} s")
print(Path("data/words.txt").read_text().split()[0])
"""
DESCRIPTION = """
[little]
repository = "owner/little"
commit = "HEAD"
paths = ["inside/train.py"]
folder = "inside"
command = "train.py 20"
tiny = "train.py 2"
data = { maker = "text_file", into = "inside/data", name = "words.txt", words = 500, vocab = 50 }
tiny_data = { words = 50 }
"""


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one git repository, and a description of a script in it."""
    home = tmp_path / "mirrors" / "owner+little"
    (home / "inside").mkdir(parents=True)
    (home / "inside" / "train.py").write_text(SCRIPT)
    (home / "other.py").write_text("")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=home, check=True)
    description = tmp_path / "ours.toml"
    description.write_text(DESCRIPTION)
    monkeypatch.setattr(scripts, "OURS", description)
    return home.parent


def test_a_script_is_laid_out_and_compared_by_itself_and_under_hotlap(mirror, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(strangers_main, "warm_up", lambda *_: None)  # which only steadies times
    folder, found = tmp_path / "scripts", tmp_path / "found.json"
    assert strangers_main.main(["--folder", str(folder), "--fetch-from", str(mirror)]) == 0
    assert (folder / "little" / "inside" / "train.py").read_text() == SCRIPT
    assert not (folder / "little" / "other.py").exists()
    assert strangers_main.main(["--folder", str(folder), "--tiny", "--pairs", "1", "--json", str(found)]) == 0
    little = json.loads(found.read_text())["scripts"]["little"]
    plan = little["plans"]["auto"]
    assert little["command"] == "train.py 2"
    assert [plan[part]["words"] for part in ("exit", "files", "figures")] == ["exit 0", "same 1", "same"]
    assert [run["last_lines"][0] for run in little["runs"]] == ["loss 0.25 after 2 epochs in TIME"] * 2
    assert "no training" in plan["said"]
    table = capsys.readouterr().out
    assert "little" in table
    assert f"{plan['ratio']:.2f}x" in table
    assert not (folder / "little" / "inside" / "weights.txt").exists()


def test_a_repository_that_is_not_there_is_named(mirror, tmp_path, capsys):
    (mirror / "owner+little").rename(mirror / "gone")
    assert strangers_main.main(["--folder", str(tmp_path / "scripts"), "--fetch-from", str(mirror)]) != 0
    assert "owner/little is not under" in capsys.readouterr().err


def test_a_folder_without_a_description_runs_each_of_its_scripts(tmp_path):
    (tmp_path / "one.py").write_text("")
    (tmp_path / "two.py").write_text("")
    assert [one.name for one in scripts.read_folder(tmp_path)] == ["one", "two"]


def test_a_script_that_fails_by_itself_is_not_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(strangers_main, "warm_up", lambda *_: None)
    (tmp_path / "one.py").write_text("raise SystemExit('no data here')")
    assert strangers_main.main(["--folder", str(tmp_path)]) == 1
    assert "fails by itself, exit code 1: no data here" in capsys.readouterr().out


def test_no_script_is_begun_that_takes_longer_than_is_left(tmp_path, capsys):
    (tmp_path / "one.py").write_text("")
    assert strangers_main.main(["--folder", str(tmp_path), "--total", "100"]) == 0
    assert "one: left out" in capsys.readouterr().err


def test_an_unknown_field_and_an_unknown_name_are_refused_with_those_known(tmp_path, capsys):
    (tmp_path / "strangers.toml").write_text('[one]\ncommand = "one.py"\nfolders = "x"\n')
    assert strangers_main.main(["--folder", str(tmp_path)]) == 2
    assert "one has folders; known are command" in capsys.readouterr().err
    (tmp_path / "strangers.toml").unlink()
    (tmp_path / "one.py").write_text("")
    assert strangers_main.main(["--folder", str(tmp_path), "--only", "another"]) == 2
    assert "it has one" in capsys.readouterr().err


def test_the_description_names_a_commit_and_data_that_can_be_made_for_each_script():
    found = scripts.read_description(scripts.OURS, Path())
    assert len(found) >= 12
    for one in found:
        assert len(one.commit) == 40
        assert one.paths
        assert not one.data or one.data["maker"] in makers.MAKERS
        for name in (*one.stand_ins, *one.fallbacks):
            assert (scripts.STAND_INS / name).is_dir()


def test_times_and_speeds_are_not_compared():
    one = without_times(
        "epoch 1 | ms/batch 5.11 | time: 3.1s | loss 2.5\n  12.4 it/s at 10:11:12 {'train_runtime': 1.25}"
    )
    other = without_times(
        "epoch 1 | ms/batch 2.00 | time: 1.7s | loss 2.5\n  31.0 it/s at 10:11:40 {'train_runtime': 0.5}"
    )
    assert one == other
    assert "2.5" in one
    assert without_times("  eval_steps_per_second   =     42.798") == without_times("  eval_steps_per_second   =  7.1")
    assert without_times("{'train_runtime': '2.678'}") == without_times("{'train_runtime': '4.5'}")


def test_figures_have_to_be_the_same_where_runs_by_themselves_are():
    assert compare_figures(["loss 1.5"] * 2, ["loss 1.5"] * 2).same
    assert not compare_figures(["loss 1.5"] * 2, ["loss 1.6"] * 2).same
    assert not compare_figures(["loss 1.5"] * 2, ["loss nan"] * 2).same
    assert not compare_figures(["loss 1.5"] * 2, ["loss 1.5\nwarning"] * 2).same


def test_figures_may_differ_as_much_as_two_runs_or_two_seeds_do():
    alone = ["loss 1.50", "loss 1.60"]
    assert compare_figures(alone, ["loss 1.55", "loss 1.55"]).same
    assert not compare_figures(alone, ["loss 2.50", "loss 2.50"]).same
    assert compare_figures(["loss 1.5"], ["loss 1.6"], "loss 1.7").same
    assert not compare_figures(["loss 1.5"], ["loss 1.7"], "loss 1.6").same


def test_files_that_are_lost_or_new_are_named():
    assert compare_files([{"a": "1"}], [{"a": "1"}]).words == "same 1"
    assert "a" in compare_files([{"a": "1"}], [{"a": "2"}]).words
    lost = compare_files([{"a": "1", "b": "1"}], [{"a": "1"}])
    assert not lost.same
    assert "lost b" in lost.words


def test_data_is_the_same_each_time_and_in_the_files_that_scripts_read(tmp_path):
    for turn in ("first", "second"):
        makers.make("mnist", tmp_path / turn, {"train": 20, "test": 10})
        makers.make("wikitext", tmp_path / turn, {"words": 200, "vocab": 40, "held_out": 50})
    names = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file())
    assert len(names) == 7
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    raw = (tmp_path / "first" / "MNIST" / "raw" / "train-images-idx3-ubyte").read_bytes()
    assert np.frombuffer(raw, ">i4", 4).tolist() == [2051, 20, 28, 28]
    assert len(raw) == 16 + 20 * 28 * 28
