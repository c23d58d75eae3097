"""Results of whole runs are of one command, complete and unedited, and README quotes the worst of them too."""

import argparse
import json
import re
from pathlib import Path

import pytest

from benchmarks import whole_run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


@pytest.fixture
def report(tmp_path, monkeypatch):
    """What a command writes whose processes only pretend to train."""
    file = tmp_path / "found.json"
    took = {"seconds": 1e-9, "steps": 10, "samples": 10, "machine": "none", "held_out": 0.1}
    fit = {"plan": "off", "problems": [], "ledger": ""}

    def run(command, **settings):
        folder, what = (Path(command[command.index(name) + 1]) for name in ("--folder", "--alone"))
        found = took | (fit if str(what) == "fit" else {"step_s": 1.0, "train_s": 1.0})
        (folder / whole_run.FOUND).write_text(json.dumps(found))

    monkeypatch.setattr(whole_run.subprocess, "run", run)
    monkeypatch.setattr(whole_run, "called", lambda works, *names: list(works)[:2])
    assert whole_run.main(["--json", str(file), "--device", "cpu", "--seconds", "1"]) == 0
    return json.loads(file.read_text())


def test_a_file_of_results_is_of_one_command_whose_times_add_up(report):
    assert whole_run.problems(report) == []
    assert report["command"][:3] == ["python", "-m", "benchmarks.whole_run"]
    assert report["asked"] == list(report["works"])
    assert sum(sum(work["processes_s"]) for work in report["works"].values()) <= report["seconds"]


def test_a_figure_that_was_changed_is_noticed(report):
    report["works"][report["asked"][0]]["fit"]["seconds"] = 0.001
    assert "it was changed after it was written" in whole_run.problems(report)


def test_works_that_were_left_out_or_put_in_are_noticed_though_the_digest_is_right(report):
    moved = report["works"].pop(report["asked"][0])
    assert any(line.startswith("works are missing") for line in whole_run.problems(signed(report)))
    moved["processes_s"] = [500.0]
    report["works"][report["asked"][0]] = moved
    assert any(line.startswith("times do not add up") for line in whole_run.problems(signed(report)))


def signed(report):
    return report | {"digest": whole_run.digest(report)}


def test_all_files_of_results_hold():
    files = list(RESULTS.glob("whole-run*.json"))
    assert files
    assert [problem for file in files for problem in whole_run.problems(json.loads(file.read_text()))] == []


def test_readme_quotes_the_worst_whole_run_and_the_best():
    reports = [json.loads(file.read_text()) for file in RESULTS.glob("whole-run-h200*.json")]
    ratios = [work["ratio"] for report in reports for work in report["works"].values()]
    for file in RESULTS.glob("whole-run-h200*.txt"):
        ratios += [float(told) for told in re.findall(r"([\d.]+) \[[\d., ]+\] of by hand's speed", file.read_text())]
    assert len(ratios) >= 6
    assert f"| {min(ratios):.2f}x to {max(ratios):.2f}x |" in (ROOT / "README.md").read_text()


def test_the_check_is_a_command(tmp_path, capsys):
    stored = RESULTS / "whole-run-h200.json"
    assert whole_run.main(["--check", str(stored)]) == 0
    report = json.loads(stored.read_text())
    without = tmp_path / "without.json"
    without.write_text(json.dumps({name: report[name] for name in report if name != "digest"}))
    capsys.readouterr()
    assert whole_run.main(["--check", str(without)]) == 1
    assert "it may be of several commands" in capsys.readouterr().out
    assert isinstance(whole_run.parsed(["--check", str(without)]), argparse.Namespace)
