"""The benchmark of whole scripts: what it says of a trick is what the runs with it and without it took."""

import sys

import pytest

from benchmarks import scripts
from hotlap.core.tricks import RUN_TRICKS


@pytest.fixture
def measured(monkeypatch, tmp_path, capsys):
    """Runs the benchmark over scripts that take as long as `takes` says of a run's place and the trick left out."""

    def measure(takes, *words, says=lambda trick: f"hotlap  left out: {trick}"):
        turns = []

        def ran(name, epochs, kind, bytecode, *, seed=None, without=None):
            turns.append(without)
            seconds = takes(len(turns), without)
            said = says(without) if without else ""
            return scripts.Ran(without or kind, seconds, 0, [f"Finished Training in {seconds:.6f} s"], said)

        monkeypatch.setattr(scripts, "ran", ran)
        monkeypatch.setattr(scripts, "compile_hotlap", lambda bytecode: None)
        monkeypatch.setattr(scripts, "epochs_for", lambda name, seconds, bytecode: 3)
        monkeypatch.setattr(sys, "argv", ["scripts", "--only", "mlp", "--tricks", *words])
        code = scripts.main()
        return code, turns, capsys.readouterr()

    return measure


def test_a_trick_is_worth_what_runs_without_it_take_longer(measured):
    code, turns, said = measured(lambda place, trick: 12.0 if trick == "early-item" else 10.0)
    assert code == 0
    there, back = ([word for trick in names for word in (None, trick)] for names in (RUN_TRICKS, reversed(RUN_TRICKS)))
    assert turns == [*there, None, *back, None]
    rows = {line.split()[0]: line.split()[1:] for line in said.out.splitlines() if line.startswith("  ")}
    assert rows["early-item"] == ["1.200x", "[1.200,", "1.200]"]
    assert rows["short-step"] == ["1.000x", "[1.000,", "1.000]"]
    assert {*rows} == {*RUN_TRICKS}


def test_a_machine_that_slows_down_evenly_makes_no_trick_better(measured):
    _, _, said = measured(lambda place, trick: 1.1**place, "early-item", "short-step", "--runs", "3")
    rows = [line.split() for line in said.out.splitlines() if line.startswith("  ")]
    assert [row[:2] for row in rows] == [["early-item", "1.000x"], ["short-step", "1.000x"]]


def test_where_hotlap_left_the_script_as_it_was_nothing_is_said(measured):
    code, _, said = measured(lambda place, trick: 10.0, says=lambda trick: "hotlap  hotlap leaves the script alone")
    assert code == 1
    assert "nothing is known of replayed-loss" in said.err
