"""The table says what was tried, what it gave and what became of it, whoever wrote the ledger."""

import dataclasses
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotlap.core.ledger import OUTCOMES, Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.core.table import SIGNS, as_json, rows, table

WIDTHS = (80, 100, 120)


def entry(what, outcome, why="", spent_s=0.0, **figures):
    return Entry(step=0, what=what, outcome=outcome, plan=Plan(), why=why, figures=figures, cost_s=spent_s)


def ledger_of(*entries):
    ledger = Ledger()
    for one in entries:
        ledger.record(one)
    return ledger


def measured(ratio, low, high):
    return {"step_s": 0.0098, "ratio": ratio, "low": low, "high": high, "quads": 4, "noise": 0.012}


BASELINE = entry("baseline", "chosen", "bound by feeding: the device waits", step_s=0.0412, noise=0.012)
HELD = entry("batches held on the device", "kept", "same maths", 1.5, **measured(3.2, 3.1, 3.3))
BF16 = entry("bf16", "kept", **measured(1.31, 1.27, 1.33), cosine=0.9997)
LAYOUT = entry("channels_last", "rejected", "no difference seen", **measured(1.0, 0.99, 1.01))
COMPILE = entry("torch.compile", "rejected", "takes 41 s to set up, would save 9 s")
CHECKPOINTING = entry("gradient checkpointing", "not tried", "memory is not short")
CANARY = entry("canary", "fault", "losses drifted apart; the plan before is back")
TUNED = entry("tuned", "chosen", step_s=0.0011, ratio=37.0, low=36.1, high=37.9, cost_s=6.1, saved_s=50.0)
WHOLE = (BASELINE, COMPILE, HELD, BF16, CHECKPOINTING, LAYOUT, CANARY, TUNED)


def line_of(lines, what):
    (line,) = (line for line in lines if what in line)
    return line


def test_a_whole_tuning_reads_as_a_table():
    assert table(ledger_of(*WHOLE), 120) == [
        "                                      step  speed-up  95 % interval   noise",
        "baseline                      41.2 ms/step                           ±1.2 %             "
        "bound by feeding: the device",
        "                                                                                        waits",
        "+ batches held on the device   9.8 ms/step      3.2x  [3.1, 3.3]     ±1.2 %  kept       same maths",
        "+ bf16                         9.8 ms/step     1.31x  [1.27, 1.33]   ±1.2 %  kept       "
        "gradients agree to 0.9997",
        "- torch.compile                          –                                   rejected   "
        "takes 41 s to set up, would save",
        "                                                                                        9 s",
        "- channels_last                9.8 ms/step     1.00x  [0.99, 1.01]   ±1.2 %  rejected   no difference seen",
        "- gradient checkpointing                 –                                   not tried  memory is not short",
        "! canary: losses drifted apart; the plan before is back",
        "total                          1.1 ms/step       37x  [36, 38]                          "
        "tuning cost 6.1 s; net saving 50",
        "                                                                                        s",
    ]


def test_in_a_narrow_terminal_reasons_go_beneath_the_figures():
    assert table(ledger_of(*WHOLE), 80) == [
        "                                      step  speed-up  95 % interval   noise",
        "baseline                      41.2 ms/step                           ±1.2 %",
        "    bound by feeding: the device waits",
        "+ batches held on the device   9.8 ms/step      3.2x  [3.1, 3.3]     ±1.2 %",
        "    kept: same maths",
        "+ bf16                         9.8 ms/step     1.31x  [1.27, 1.33]   ±1.2 %",
        "    kept: gradients agree to 0.9997",
        "- torch.compile               rejected: takes 41 s to set up, would save 9 s",
        "- channels_last                9.8 ms/step     1.00x  [0.99, 1.01]   ±1.2 %",
        "    rejected: no difference seen",
        "- gradient checkpointing      not tried: memory is not short",
        "! canary: losses drifted apart; the plan before is back",
        "total                          1.1 ms/step       37x  [36, 38]",
        "    tuning cost 6.1 s; net saving 50 s",
    ]


def test_a_table_without_figures_has_no_header_and_no_column_has_one_without_figures():
    assert table(ledger_of(CHECKPOINTING), 80)[0].startswith("- gradient checkpointing")
    assert table(ledger_of(entry("bf16", "kept", step_s=0.01)), 80)[0].split() == ["step"]


def test_what_a_move_cannot_do_here_is_named_in_one_line():
    unfit = [dataclasses.replace(entry(name, "not tried"), unfit=True) for name in ("tf32", "cuDNN")]
    assert "does not apply here: tf32, cuDNN" in table(ledger_of(BASELINE, *unfit, TUNED), 80)


def test_a_ledger_of_a_run_that_was_not_tuned_gives_no_table():
    for ledger in (Ledger(), ledger_of(entry("plan", "chosen", "as the job describes it"))):
        assert table(ledger) == []
        assert rows(ledger) == []
        assert as_json(ledger)["nothing_helped"] is False


@pytest.mark.parametrize("outcome", [name for name in OUTCOMES if name not in SIGNS])
def test_entries_that_are_no_verdict_on_a_move_are_left_out(outcome):
    more = entry("bf16", outcome, "a lap", **measured(9.0, 8.0, 9.5))
    assert rows(ledger_of(BASELINE, BF16, more, TUNED)) == rows(ledger_of(BASELINE, BF16, TUNED))


def test_the_last_verdict_on_a_move_counts_in_the_place_of_its_first():
    share = entry("batches held on the device", "kept", spent_s=0.25, **measured(2.9, 2.8, 3.0), share=1.0)
    _, held, bf16 = rows(ledger_of(BASELINE, HELD, BF16, share))
    assert (held.what, held.outcome, held.ratio) == ("batches held on the device", "kept", 2.9)
    assert held.why == "same maths"
    assert held.cost_s == 1.5 + 0.25
    assert bf16.what == "bf16"


def test_a_move_that_was_taken_out_again_is_rejected_with_the_later_reason():
    out = entry("bf16", "rejected", "slower", **measured(0.9, 0.88, 0.92))
    _, held, bf16 = rows(ledger_of(BASELINE, BF16, HELD, out))
    assert held.sign == "+"
    assert (bf16.sign, bf16.outcome, bf16.why, bf16.ratio) == ("-", "rejected", "slower", 0.9)


def test_without_its_end_a_tuning_has_no_total():
    ledger = ledger_of(*WHOLE[:-1])
    assert not any(line.startswith("total") for line in table(ledger, 80))
    assert as_json(ledger)["total"] is None


@pytest.mark.parametrize("width", WIDTHS)
def test_that_nothing_helped_is_said_as_a_result(width):
    end = entry("tuned", "chosen", step_s=0.0412, ratio=1.0, low=0.99, high=1.01, cost_s=0.8, saved_s=0.0)
    ledger = ledger_of(BASELINE, LAYOUT, COMPILE, CHECKPOINTING, end)
    lines = table(ledger, width)
    assert lines[-1] == "nothing helped: 2 moves tried, none kept"
    assert "tuning cost 800 ms" in " ".join(lines)
    assert "saved" not in "".join(lines)
    assert as_json(ledger)["nothing_helped"] is True


def test_that_nothing_helped_is_not_said_of_a_tuning_that_was_cut_short():
    ledger = ledger_of(BASELINE, LAYOUT)
    assert table(ledger)[-1] == "nothing kept so far: 1 move tried, and the tuning did not come to its end"
    assert as_json(ledger)["nothing_helped"] is False


def test_moves_that_the_end_of_the_run_left_undecided_count_as_tried():
    lines = table(ledger_of(BASELINE, entry("fused optimizer", "undecided", "the run ended")), 120)
    assert lines[2].split() == ["-", "fused", "optimizer", "–", "undecided", "the", "run", "ended"]
    assert lines[-1] == "nothing kept so far: 1 move tried, and the tuning did not come to its end"


def test_a_run_in_which_nothing_could_be_tried_says_so():
    assert table(ledger_of(BASELINE, CHECKPOINTING), 80)[-1] == "nothing was tried"


def test_a_run_that_was_not_to_be_tuned_is_not_said_to_have_tried_nothing():
    assert table(ledger_of(CHECKPOINTING), 80) == ["- gradient checkpointing  –  not tried  memory is not short"]


def test_a_tuning_that_cost_more_than_it_saved_says_so():
    end = entry("tuned", "chosen", step_s=0.01, ratio=1.1, cost_s=9.0, saved_s=-2.0)
    assert rows(ledger_of(BASELINE, BF16, end))[-1].why == "tuning cost 9 s; net loss 2 s"


@pytest.mark.parametrize(
    ("ratio", "low", "high", "told"),
    [
        (1.07, 1.05, 1.09, "1.07x  [1.05, 1.09]"),
        (1.0702, 1.0686, 1.0731, "1.07x  [1.069, 1.073]"),
        (1.996, 1.94, 2.04, "2.0x  [1.9, 2.0]"),
        (3.21, 3.14, 3.28, "3.2x  [3.1, 3.3]"),
        (9.96, 9.7, 10.4, "10x  [9.7, 10.4]"),
        (12.3, 11.2, 13.4, "12x  [11, 13]"),
        (2e9, 1e9, 3e9, "2.0e+09x  [1.0e+09, 3.0e+09]"),
        (1.0, 1.0, 1.0, "1.00x  [1.00, 1.00]"),
    ],
)
def test_ratios_have_the_digits_that_mean_something(ratio, low, high, told):
    assert told in line_of(table(ledger_of(entry("bf16", "kept", **measured(ratio, low, high))), 120), "bf16")


@pytest.mark.parametrize(("cosine", "told"), [(0.9435, "0.9435"), (0.99998, "0.999980"), (1.0, "1")])
def test_the_agreement_of_gradients_is_told_from_1(cosine, told):
    (row,) = rows(ledger_of(entry("bf16", "kept", "half the digits", cosine=cosine)))
    assert row.why == f"half the digits; gradients agree to {told}"


def test_reasons_that_speak_of_gradients_are_left_as_they_are():
    differ = entry("bf16", "rejected", "gradients differ: 0.31 in head.weight", cosine=0.4)
    agree = entry("tf32", "kept", "gradients agree to 0.9999 in every layer", cosine=0.99991)
    assert [row.why for row in rows(ledger_of(agree, differ))] == [agree.why, differ.why]


def test_figures_that_are_no_numbers_are_shown_as_missing():
    odd = entry("bf16", "rejected", "failed", step_s=math.nan, ratio=math.inf, low=-1.0, high=2.0, noise=math.nan)
    (row,) = rows(ledger_of(odd))
    assert (row.step_s, row.ratio, row.low, row.noise) == (None, None, None, None)
    assert table(ledger_of(odd), 80)[0] == "- bf16  –  rejected  failed"


def test_other_faults_than_those_of_the_tuning_are_not_its_matter():
    ledger = ledger_of(BASELINE, entry("out of memory", "fault", "micro-batch 8"), entry("trial of bf16", "fault"))
    assert [row.what for row in rows(ledger)] == ["baseline", "trial of bf16"]
    assert "! trial of bf16" in table(ledger, 80)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_stranger_wrote_cannot_command_the_terminal(width):
    nasty = "a\x1b[2J\x9b31m\u202eb\x07\r\nc\x00\u2028d\ud800"
    ledger = ledger_of(
        entry("baseline", "chosen", nasty, step_s=1.0),
        entry(f"move {nasty}", "kept", nasty, **measured(2.0, 1.9, 2.1)),
        entry(f"trial {nasty}", "fault", nasty),
        entry("tuned", "chosen", nasty, ratio=2.0),
    )
    assert all(line.isprintable() for line in table(ledger, width))
    assert all(row.what.isprintable() and row.why.isprintable() for row in rows(ledger))
    json.dumps(as_json(ledger), ensure_ascii=False).encode()


@pytest.mark.parametrize("width", WIDTHS)
def test_long_texts_are_wrapped_and_in_the_end_cut_but_figures_are_whole(width):
    ledger = ledger_of(
        BASELINE,
        entry("one word after the other " * 4, "kept", "because " * 10_000, **measured(1.0702, 1.0686, 1.0731)),
        entry("w" * 500, "not tried", "y" * 500),
        entry("trial", "fault", "z " * 500),
        TUNED,
    )
    lines = table(ledger, width)
    assert max(map(len, lines)) <= width
    assert "1.07x  [1.069, 1.073]  ±1.2 %" in line_of(lines, "+ one word")
    assert rows(ledger)[1].why.endswith(" …")
    assert len(lines) < 60


def test_the_json_holds_every_row_and_no_number_that_json_has_not():
    found = as_json(ledger_of(*WHOLE[:-1], entry("tuned", "chosen", step_s=0.0011, cost_s=6.1, saved_s=math.nan)))
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found
    assert found["baseline"]["step_s"] == 0.0412
    assert [move["what"] for move in found["moves"]] == [
        "batches held on the device",
        "bf16",
        "torch.compile",
        "channels_last",
        "gradient checkpointing",
    ]
    assert [fault["what"] for fault in found["faults"]] == ["canary"]
    assert (found["total"]["cost_s"], found["total"]["saved_s"]) == (6.1, None)
    assert found["nothing_helped"] is False


def test_a_move_may_have_any_name():
    ledger = ledger_of(entry("total", "kept", step_s=1.0), entry("", "rejected"), entry("baseline", "not tried"))
    assert [row.what for row in rows(ledger)] == ["total", "", "baseline"]
    assert as_json(ledger)["baseline"] is None
    assert as_json(ledger)["total"] is None
    assert len(table(ledger, 80)) == 4


names = st.sampled_from(["step_s", "ratio", "low", "high", "noise", "cosine", "cost_s", "saved_s", "share"])
entries = st.builds(
    Entry,
    step=st.just(0),
    what=st.sampled_from(["baseline", "tuned", "canary", "bf16"]) | st.text(),
    outcome=st.sampled_from(OUTCOMES),
    plan=st.just(Plan()),
    why=st.text(),
    figures=st.dictionaries(names, st.floats()),
    cost_s=st.floats(allow_nan=False, allow_infinity=False),
)


@example([Entry(step=0, what="bf16", outcome="kept", plan=Plan(), figures={"step_s": 0.0, "cosine": 1e20})], 29)
@given(st.lists(entries, max_size=6), st.integers(1, 200))
def test_any_ledger_gives_printable_lines_and_valid_json(some, width):
    ledger = ledger_of(*some)
    lines = table(ledger, width)
    assert all(line.isprintable() and line == line.rstrip() for line in lines)
    assert bool(lines) == bool(rows(ledger))
    json.loads(json.dumps(as_json(ledger), allow_nan=False))
