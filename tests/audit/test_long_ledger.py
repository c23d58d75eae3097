"""A ledger of 100,000 lines is read in seconds: each plan in it is checked once, each line is written once."""

import json

import pytest

from hotlap.core.errors import HotlapError, StoreError
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.store.run_folder import MOST_LEDGER_BYTES, RunFolder


def entry(step, plan=None, **figures):
    return Entry(step=step, what="lap", outcome="measured", plan=plan or Plan(), figures=figures)


def filled(count):
    ledger = Ledger()
    for step in range(count):
        ledger.record(entry(step, Plan().but(micro_batch=1 + step % 2), step_s=0.1))
    return ledger


def test_a_plan_that_many_lines_have_is_checked_once(monkeypatch):
    text, read, checked = filled(200).to_lines(), Plan.from_dict, []
    monkeypatch.setattr(Plan, "from_dict", lambda raw: checked.append(raw) or read(raw))
    found = Ledger.from_lines(text)
    assert len(checked) == 2
    assert list(found) == list(filled(200))


def test_a_value_of_another_type_is_no_known_plan():
    good, forged = entry(0).to_dict(), entry(0).to_dict()
    forged["plan"]["execution"]["replay_steps"] = True  # which is equal to 1
    with pytest.raises(HotlapError, match="line 2 of the ledger"):
        Ledger.from_lines(f"{json.dumps(good)}\n{json.dumps(forged)}\n")


def test_only_new_entries_are_made_into_lines(monkeypatch):
    ledger, made = Ledger.from_lines(filled(50).to_lines()), []
    to_dict = Entry.to_dict
    monkeypatch.setattr(Entry, "to_dict", lambda one: made.append(one) or to_dict(one))
    for step in (50, 51):
        ledger.record(entry(step))
        lines = ledger.to_lines().splitlines()
        assert len(lines) == step + 1
        assert Ledger.from_lines(ledger.to_lines()).last_step == step
    assert [one.step for one in made] == [50, 51]


def test_numbers_that_json_does_not_have_are_not_written_again():
    text = entry(0, step_s=2.5).to_dict() | {"figures": {"step_s": float("nan")}}
    ledger = Ledger.from_lines(json.dumps(text) + "\n" + json.dumps(entry(1, step_s=1.5).to_dict()) + "\n")
    assert [json.loads(line)["figures"]["step_s"] for line in ledger.to_lines().splitlines()] == [None, 1.5]


def test_a_ledger_beyond_all_measure_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "ledger.jsonl").open("wb") as file:
        file.truncate(MOST_LEDGER_BYTES + 1)
    with pytest.raises(StoreError, match=r"hotlap reads at most 67,108,864"):
        RunFolder(tmp_path).read_ledger()
