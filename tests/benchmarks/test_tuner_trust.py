"""The benchmark of the tuner's trust: verdicts follow figures and their noise, and the exit code follows verdicts."""

from __future__ import annotations

import json
import math

import pytest
from benchmarks.tuner_trust import Part

from benchmarks import tuner_trust


def outcome_of(part):
    ((outcome, _, _),) = part.verdicts
    return outcome


@pytest.mark.parametrize(
    ("hits", "of", "limit", "least", "outcome"),
    [
        (0, 10, 0.0, False, "kept"),
        (1, 1000, 0.0, False, "broken"),
        (1, 20, 0.01, False, "unclear"),
        (20, 100, 0.01, False, "broken"),
        (20, 20, 0.95, True, "kept"),
        (18, 20, 0.95, True, "unclear"),
        (50, 100, 0.95, True, "broken"),
        (0, 0, 0.95, True, "unclear"),
    ],
)
def test_a_share_is_broken_only_beyond_chance(hits, of, limit, least, outcome):
    part = Part()
    part.judge_share("", hits, of, limit=limit, least=least)
    assert outcome_of(part) == outcome


@pytest.mark.parametrize(
    ("value", "half", "sides", "outcome"),
    [
        (1.01, 0.5, 2, "kept"),
        (1.04, 0.05, 2, "unclear"),
        (1.10, 0.05, 2, "broken"),
        (0.90, 0.05, 2, "broken"),
        (0.90, 0.05, 1, "kept"),
        (1.50, math.inf, 1, "unclear"),
    ],
)
def test_a_ratio_is_broken_only_beyond_noise(value, half, sides, outcome):
    part = Part()
    part.judge_ratio("", value, half, limit=0.02, sides=sides)
    assert outcome_of(part) == outcome


@pytest.mark.parametrize(("outcome", "code"), [("kept", 0), ("unclear", 0), ("broken", 1)])
def test_the_exit_code_and_the_file_tell_of_what_is_broken(outcome, code, monkeypatch, tmp_path, capsys):
    part = Part(lines=["a line"], verdicts=[(outcome, "a requirement", "a figure")])
    monkeypatch.setattr(tuner_trust, "PARTS", {"quality": lambda options: part})
    monkeypatch.setattr("sys.argv", ["tuner_trust", "--device", "cpu", "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        tuner_trust.main()
    assert ended.value.code == code
    assert outcome in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["parts"]["quality"]["lines"] == ["a line"]


def test_planted_faults_are_caught_and_honest_plans_pass():
    part = tuner_trust.quality(tuner_trust.parsed(["--quick", "--device", "cpu"]))
    assert [outcome for outcome, _, _ in part.verdicts] == ["kept", "kept"], part.lines
