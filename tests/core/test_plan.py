"""A plan is a value: frozen, printable, comparable, kept in a readable file, and never half right."""

import copy
import dataclasses
import pickle
import tomllib
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotlap.core.errors import PlanError
from hotlap.core.plan import (
    COMPILED,
    DEPTHWISE,
    FEEDS,
    FORMAT,
    HOME,
    LAYOUTS,
    MODES,
    MOST_REPLAY_STEPS,
    OPTIMIZERS,
    PARTS,
    PRECISIONS,
    Execution,
    Feed,
    Memory,
    Numerics,
    Plan,
)
from hotlap.core.tricks import TRICKS


@st.composite
def plans(draw):
    kind = draw(st.sampled_from(FEEDS))
    workers = draw(st.integers(0, 64)) if kind == "loader" else 0
    mode = draw(st.sampled_from(MODES))
    several = mode == "captured" and kind == "resident"
    return Plan().but(
        kind=kind,
        workers=workers,
        prefetch=draw(st.none() | st.integers(1, 99)) if workers else None,
        persistent=draw(st.booleans()) if workers else False,
        pinned=draw(st.booleans()) if kind == "loader" else False,
        precision=draw(st.sampled_from(PRECISIONS)),
        layout=draw(st.sampled_from(LAYOUTS)),
        depthwise=draw(st.sampled_from(DEPTHWISE)),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        micro_batch=draw(st.none() | st.integers(1, 2**31 - 1)),
        checkpoint=draw(st.integers(0, 99)),
        mode=mode,
        replay_steps=draw(st.integers(1, MOST_REPLAY_STEPS)) if several else 1,
        autotune=draw(st.booleans()),
        compile=draw(st.sampled_from(COMPILED)),
        without=draw(st.lists(st.sampled_from([*TRICKS]), max_size=3)),
    )


values = {
    "kind": st.sampled_from(FEEDS),
    "workers": st.integers(0, 3),
    "prefetch": st.none() | st.integers(1, 3),
    "persistent": st.booleans(),
    "pinned": st.booleans(),
    "precision": st.sampled_from(PRECISIONS),
    "layout": st.sampled_from(LAYOUTS),
    "depthwise": st.sampled_from(DEPTHWISE),
    "optimizer": st.sampled_from(OPTIMIZERS),
    "micro_batch": st.none() | st.integers(1, 3),
    "checkpoint": st.integers(0, 3),
    "mode": st.sampled_from(MODES),
    "replay_steps": st.integers(1, 3),
    "autotune": st.booleans(),
    "compile": st.sampled_from(COMPILED),
    "ranks": st.integers(1, 3),
    "without": st.sets(st.sampled_from([*TRICKS])).map(sorted).map(tuple),
}
"""For each choice, values that are right by themselves."""


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([*HOME, *PARTS, *FEEDS]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from([*HOME]), inner, max_size=4)
    ),
    max_leaves=8,
)
tables = st.dictionaries(
    st.sampled_from([*PARTS, "fed", "numeric"]) | st.text(max_size=5),
    st.dictionaries(st.sampled_from([*HOME, "worker"]), anything, max_size=4) | anything,
    max_size=5,
)


def tried(make):
    """The plan that `make` gives, or the problems it reports; any other error is a failure."""
    try:
        return make(), None
    except PlanError as error:
        return None, error.problems


def problems_of(make):
    with pytest.raises(PlanError) as caught:
        make()
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


# --- a value -----------------------------------------------------------------------------------------


def test_a_plan_has_four_parts_in_the_order_in_which_they_rest_on_each_other():
    assert list(PARTS) == ["feed", "numerics", "memory", "execution"] == [f.name for f in dataclasses.fields(Plan)]
    assert Plan() == Plan(feed=Feed(), numerics=Numerics(), memory=Memory(), execution=Execution())


@pytest.mark.parametrize(("part", "choice"), [(part, choice) for choice, part in HOME.items()])
def test_no_part_can_be_changed_in_place(part, choice):
    plan = Plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(getattr(plan, part), choice, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(plan, part, None)


def test_a_choice_has_the_same_name_in_no_two_parts():
    names = Counter(f.name for kind in PARTS.values() for f in dataclasses.fields(kind))
    assert {name for name, count in names.items() if count > 1} == set()
    assert set(HOME) == set(names)


@given(plans(), plans())
def test_plans_are_equal_and_hash_alike_exactly_when_all_choices_are_equal(one, other):
    same = one.choices() == other.choices()
    assert (one == other) is same
    assert (len({one, other}) == 1) is same
    assert (one.changes(other) == {}) is same
    assert (str(one) == str(other)) is same


@given(plans())
def test_a_plan_survives_copying_and_pickling(plan):
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_reads_as_one_line():
    assert str(Plan()) == "gather · fp32 · plain optimizer · batches whole · eager"
    busy = Plan().but(kind="loader", workers=2, prefetch=3, persistent=True, pinned=True, micro_batch=8)
    assert str(busy) == (
        "loader with 2 workers, prefetch 3, persistent, pinned · fp32 · plain optimizer · micro-batch 8 · eager"
    )
    assert "with 1 worker ·" in str(Plan().but(kind="loader", workers=1))
    assert str(Plan().but(checkpoint=3)) == (
        "gather · fp32 · plain optimizer · batches whole, 3 blocks checkpointed · eager"
    )
    assert "micro-batch 4, 1 block checkpointed" in str(Plan().but(micro_batch=4, checkpoint=1))
    assert str(Plan().but(compile="blocks")).endswith(" · eager, blocks compiled")
    assert str(Plan().but(compile="model", mode="captured")).endswith(" · captured, model compiled")
    assert str(Plan().but(without=["short-step", "early-item"])).endswith(" · eager, without early-item, short-step")
    fast = Plan().but(
        kind="resident",
        precision="fp16",
        layout="channels_last",
        optimizer="fused",
        mode="captured",
        replay_steps=8,
        autotune=True,
    )
    assert str(fast) == (
        "resident · fp16, channels_last · fused optimizer · batches whole · captured, 8 steps a replay, cuDNN autotuned"
    )


# --- changing ----------------------------------------------------------------------------------------


def test_but_changes_the_named_choices_and_leaves_the_rest_and_the_plan_itself():
    plan = Plan().but(micro_batch=4)
    changed = plan.but(kind="loader", workers=2, precision="bf16")
    assert plan == Plan(memory=Memory(micro_batch=4))
    assert changed == Plan(
        feed=Feed(kind="loader", workers=2), numerics=Numerics(precision="bf16"), memory=Memory(micro_batch=4)
    )
    assert plan.but() == plan


def test_changes_names_what_differs_with_both_sides():
    before = Plan().but(kind="loader", workers=2)
    after = before.but(workers=4, precision="bf16")
    assert before.changes(after) == {"workers": (2, 4), "precision": ("fp32", "bf16")}
    assert after.changes(before) == {"workers": (4, 2), "precision": ("bf16", "fp32")}


@given(plans(), plans())
def test_applying_the_changes_gives_the_other_plan(one, other):
    assert one.but(**{name: there for name, (_, there) in one.changes(other).items()}) == other


def test_but_reports_misspelt_names_and_wrong_values_of_all_parts_at_once():
    found = problems_of(lambda: Plan().but(presicion="bf16", workers=-1, micro_batch=0, mode="fast"))
    assert found == (
        "no choice is called 'presicion'; did you mean 'precision'?",
        "feed.workers=-1 must be a whole number of at least 0",
        "memory.micro_batch=0 must be a whole number of at least 1",
        "execution.mode='fast' is not a choice; known: captured, eager",
    )


def test_a_part_of_the_wrong_kind_is_refused_with_its_name():
    found = problems_of(lambda: Plan(feed=Numerics(), memory=None))
    assert found == ("feed must be a Feed, not Numerics", "memory must be a Memory, not NoneType")


# --- wrong values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [True, "2", 1.5, -1, None, [2], float("nan"), 2**31, pytest.param(10**5000, id="huge")]
)
def test_workers_must_be_a_whole_number(value):
    (problem,) = problems_of(lambda: Feed(kind="loader", workers=value))
    assert problem.startswith("feed.workers=")


@pytest.mark.parametrize("value", [True, "8", 1.5, 0, -3, float("inf"), b"8"])
def test_a_number_that_may_be_left_open_is_a_whole_number_or_none(value):
    (problem,) = problems_of(lambda: Memory(micro_batch=value))
    assert problem.startswith("memory.micro_batch=")
    (problem,) = problems_of(lambda: Feed(kind="loader", workers=1, prefetch=value))
    assert problem.startswith("feed.prefetch=")
    assert Memory(micro_batch=None).micro_batch is Feed(kind="loader", workers=1, prefetch=None).prefetch is None


@pytest.mark.parametrize("value", [True, "8", 1.5, -3, None, 2**31])
def test_blocks_to_checkpoint_are_a_whole_number(value):
    (problem,) = problems_of(lambda: Memory(checkpoint=value))
    assert problem.startswith("memory.checkpoint=")


def test_what_is_compiled_is_one_of_the_words_for_it():
    (problem,) = problems_of(lambda: Execution(compile="models"))
    assert problem == "execution.compile='models' is not a choice; did you mean 'model'?"
    (problem,) = problems_of(lambda: Execution(compile=True))
    assert problem == "execution.compile=True is not a choice; known: blocks, model, no"


def test_tricks_to_leave_out_are_a_list_of_their_names_in_any_order():
    assert Execution(without=["short-step", "early-item", "short-step"]) == Execution(
        without=("early-item", "short-step")
    )
    known = ", ".join(sorted(TRICKS))
    assert problems_of(lambda: Execution(without=["early-items", "x", 1, ["y"]])) == (
        "execution.without: no trick is called 'early-items'; did you mean 'early-item'?",
        f"execution.without: no trick is called 'x'; known: {known}",
        f"execution.without: no trick is called 1; known: {known}",
        f"execution.without: no trick is called ['y']; known: {known}",
    )
    assert len(problems_of(lambda: Execution(without=["x"] * 10_000))) == len(TRICKS)


@pytest.mark.parametrize("value", ["early-item", None, 1, {"early-item": True}])
def test_tricks_to_leave_out_are_nothing_but_a_list(value):
    (problem,) = problems_of(lambda: Execution(without=value))
    assert problem.startswith("execution.without=")
    assert problem.endswith(", ".join(TRICKS))


def test_a_plan_file_names_the_tricks_to_leave_out_where_there_are_any():
    plan = Plan().but(mode="captured", without=["short-step", "early-item"])
    assert 'without = ["early-item", "short-step"]\n' in plan.to_text()
    assert "without" not in Plan().to_text()
    assert Plan.from_text('hotlap_plan = 1\n[execution]\nwithout = ["early-item"]\n').execution.without == (
        "early-item",
    )


def test_a_plan_file_from_before_compiling_still_loads():
    plan = Plan.from_text('hotlap_plan = 1\n[execution]\nmode = "captured"\n')
    assert plan == Plan().but(mode="captured", compile="no")


def test_a_plan_file_from_before_checkpointing_still_loads():
    assert Plan.from_text("hotlap_plan = 1\n[memory]\nmicro_batch = 4\n") == Plan().but(micro_batch=4, checkpoint=0)


@pytest.mark.parametrize("value", [True, "8", 1.5, 0, -3, None, MOST_REPLAY_STEPS + 1, 2**31])
def test_updates_in_a_replay_are_a_whole_number_that_a_signal_can_wait_for(value):
    (problem,) = problems_of(lambda: Execution(mode="captured", replay_steps=value))
    assert problem.startswith("execution.replay_steps=")
    assert Execution(mode="captured", replay_steps=MOST_REPLAY_STEPS).replay_steps == MOST_REPLAY_STEPS


@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_autotune_is_true_or_false_and_nothing_like_it(value):
    assert problems_of(lambda: Execution(autotune=value)) == (f"execution.autotune={value!r} must be True or False",)


@pytest.mark.parametrize("value", [1, 0, "true", None])
@pytest.mark.parametrize("name", ["persistent", "pinned"])
def test_a_flag_is_true_or_false_and_nothing_like_it(name, value):
    (problem,) = problems_of(lambda: Feed(kind="loader", workers=1, **{name: value}))
    assert problem == f"feed.{name}={value!r} must be True or False"


@pytest.mark.parametrize("value", ["bf61", "FP16x", None, 16, ["fp32"], ("fp32",), b"fp32"])
def test_a_word_that_is_not_a_choice_is_refused(value):
    (problem,) = problems_of(lambda: Numerics(precision=value))
    assert problem.startswith("numerics.precision=")


@pytest.mark.parametrize("value", ["channels_first", "contiguous", None, 1, True, ["as given"]])
def test_a_layout_that_is_not_a_choice_is_refused(value):
    (problem,) = problems_of(lambda: Numerics(layout=value))
    assert problem.startswith("numerics.layout=")


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: Feed(kind="Gather"), "feed.kind='Gather' is not a choice; did you mean 'gather'?"),
        (lambda: Feed(kind="residant"), "feed.kind='residant' is not a choice; did you mean 'resident'?"),
        (lambda: Numerics(precision="TF32"), "numerics.precision='TF32' is not a choice; did you mean 'tf32'?"),
        (
            lambda: Numerics(layout="channels-last"),
            "numerics.layout='channels-last' is not a choice; did you mean 'channels_last'?",
        ),
        (lambda: Execution(mode="capture"), "execution.mode='capture' is not a choice; did you mean 'captured'?"),
    ],
)
def test_a_word_close_to_a_choice_is_answered_with_that_choice(make, meant):
    assert problems_of(make) == (meant,)


@pytest.mark.parametrize(
    ("choices", "both"),
    [
        ({"prefetch": 2}, ["feed.prefetch=2", "feed.workers"]),
        ({"kind": "loader", "prefetch": 2}, ["feed.prefetch=2", "feed.workers"]),
        ({"kind": "loader", "persistent": True}, ["feed.persistent=True", "feed.workers"]),
        ({"workers": 2}, ["feed.workers=2", "feed.kind='gather'"]),
        ({"pinned": True}, ["feed.pinned=True", "feed.kind='gather'"]),
        ({"kind": "stream", "workers": 1}, ["feed.workers=1", "feed.kind='stream'"]),
        ({"kind": "stream", "pinned": True}, ["feed.pinned=True", "feed.kind='stream'"]),
        ({"kind": "resident", "workers": 1}, ["feed.workers=1", "feed.kind='resident'"]),
        ({"kind": "resident", "pinned": True}, ["feed.pinned=True", "feed.kind='resident'"]),
    ],
)
def test_a_contradiction_names_both_sides(choices, both):
    (problem,) = problems_of(lambda: Feed(**choices))
    assert all(side in problem for side in both)


def test_all_contradictions_are_reported_at_once():
    found = problems_of(lambda: Feed(pinned=True, persistent=True, prefetch=2))
    assert [problem.split("=")[0] for problem in found] == ["feed.pinned", "feed.prefetch", "feed.persistent"]


def test_several_updates_in_a_replay_need_a_capture_and_their_data_on_the_device():
    (problem,) = problems_of(lambda: Execution(replay_steps=4))
    assert problem == "execution.replay_steps=4 needs execution.mode='captured'"
    for kind in ("loader", "gather", "stream"):
        (problem,) = problems_of(lambda k=kind: Plan().but(kind=k, mode="captured", replay_steps=4))
        assert problem.startswith(f"execution.replay_steps=4 needs feed.kind='resident', not '{kind}'")
    plan = Plan().but(kind="resident", mode="captured", replay_steps=4)
    assert problems_of(lambda: plan.but(kind="gather"))
    assert problems_of(lambda: plan.but(mode="eager")) == ("execution.replay_steps=4 needs execution.mode='captured'",)
    assert plan.but(kind="gather", mode="eager", replay_steps=1) == Plan()


@given(st.fixed_dictionaries({}, optional=values))
def test_a_plan_of_right_values_is_refused_only_for_a_contradiction_and_never_changed_silently(choices):
    plan, problems = tried(lambda: Plan().but(**choices))
    full = {**Plan().choices(), **choices}
    contradicts = (
        (full["kind"] != "loader" and (full["workers"] or full["pinned"]))
        or (not full["workers"] and (full["prefetch"] is not None or full["persistent"]))
        or (full["replay_steps"] > 1 and (full["mode"] != "captured" or full["kind"] != "resident"))
    )
    if contradicts:
        assert problems
    else:
        assert plan.choices() == full


def test_every_choice_is_drawn_in_these_tests():
    assert set(values) == set(HOME)


def test_wrong_values_are_not_also_called_contradictory():
    assert problems_of(lambda: Feed(workers="2", persistent=True)) == (
        "feed.workers='2' must be a whole number of at least 0",
    )
    assert problems_of(lambda: Execution(mode="fast", replay_steps=4)) == (
        "execution.mode='fast' is not a choice; known: captured, eager",
    )


# --- as a table --------------------------------------------------------------------------------------


@given(plans())
def test_a_plan_round_trips_through_a_dict(plan):
    raw = plan.to_dict()
    assert list(raw) == list(PARTS)
    assert Plan.from_dict(raw) == plan


def test_parts_and_choices_left_out_of_a_table_have_their_defaults():
    assert Plan.from_dict({}) == Plan()
    assert Plan.from_dict({"numerics": {"precision": "bf16"}}) == Plan().but(precision="bf16")


def test_every_mistake_in_a_table_is_reported_at_once():
    raw = {"fed": {}, "feed": {"worker": 1, "workers": True, "pinned": 1}, "memory": 3, "execution": {"mode": ""}}
    assert problems_of(lambda: Plan.from_dict(raw)) == (
        "no part of a plan is called 'fed'; did you mean 'feed'?",
        "feed has no choice 'worker'; did you mean 'workers'?",
        "feed.workers=True must be a whole number of at least 0",
        "feed.pinned=1 must be True or False",
        "memory must be a table of choices, not 3",
        "execution.mode='' is not a choice; known: captured, eager",
    )


@given(anything | tables | st.dictionaries(st.integers() | st.none(), anything, max_size=2))
def test_any_table_is_a_plan_or_a_plan_error(raw):
    plan, problems = tried(lambda: Plan.from_dict(raw))
    if plan is None:
        assert problems
        assert all(problem and "\n" not in problem for problem in problems)
    else:
        asked = [(part, name, value) for part, values in raw.items() for name, value in values.items()]
        assert all(plan.to_dict()[part][name] == value for part, name, value in asked)


# --- as a file ---------------------------------------------------------------------------------------


@given(plans())
def test_a_plan_round_trips_through_its_text(plan):
    assert Plan.from_text(plan.to_text()) == plan


@given(plans())
def test_the_text_is_plain_toml_without_the_choices_left_open(plan):
    raw = tomllib.loads(plan.to_text())
    assert raw.pop("hotlap_plan") == FORMAT
    parts = plan.to_dict().items()
    given = {part: {k: v for k, v in values.items() if v not in (None, [])} for part, values in parts}
    assert raw == given


@given(st.text() | st.text(alphabet='[]=".0123456789truefalse\n feedkindworkershotlap_plan#'))
@example("hotlap_plan = 1\n" + "x=" + "[" * 100_000)
@example("hotlap_plan = 1\n[feed]\nworkers = " + "9" * 5000)
@example("hotlap_plan = 1\n[feed]\nkind = 'loader'\nworkers = 0x" + "f" * 5000)
@example("hotlap_plan = 1\n[feed]\nkind = 2020-13-41")
@example("hotlap_plan = 1\n[feed]\nkind = '''\n\nx'''")
@example("\x00\ufffe\r")
def test_any_text_is_a_plan_or_a_plan_error(text):
    plan, problems = tried(lambda: Plan.from_text(text))
    if plan is None:
        assert problems
        assert all(problem and "\n" not in problem for problem in problems)
    else:
        assert Plan.from_text(plan.to_text()) == plan


@given(tables)
def test_any_table_behind_the_right_format_line_is_a_plan_or_a_plan_error(raw):
    lines = [f"hotlap_plan = {FORMAT}"]
    for part, values in raw.items():
        if isinstance(values, dict) and part.isidentifier() and part.isascii():
            lines.append(f"[{part}]")
            lines += [
                f"{name} = {str(value).lower() if isinstance(value, bool) else value!r}"
                for name, value in values.items()
                if name.isidentifier() and name.isascii()
            ]
    plan, problems = tried(lambda: Plan.from_text("\n".join(lines)))
    assert problems or Plan.from_text(plan.to_text()) == plan


def test_deep_nesting_is_named_as_such():
    assert problems_of(lambda: Plan.from_text("x = " + "[" * 100_000)) == ("not a plan file: nested too deeply",)


def test_text_without_the_format_line_is_no_plan_file():
    assert problems_of(lambda: Plan.from_text("")) == ("not a plan file: the line 'hotlap_plan = 1' is missing",)
    assert "line 1" in problems_of(lambda: Plan.from_text("some words"))[0]


def test_a_newer_format_is_refused_with_what_to_do():
    text = Plan().to_text().replace(f"hotlap_plan = {FORMAT}", f"hotlap_plan = {FORMAT + 1}")
    (problem,) = problems_of(lambda: Plan.from_text(text))
    assert problem == f"plan format {FORMAT + 1} is newer than the {FORMAT} this hotlap reads; update hotlap"


@pytest.mark.parametrize("version", ["true", "1.0", "'1'", "0", "-1", "[1]", "nan"])
def test_what_only_resembles_the_format_is_refused(version):
    (problem,) = problems_of(lambda: Plan.from_text(f"hotlap_plan = {version}\n"))
    assert problem.startswith("not a plan file: hotlap_plan=")


def test_a_file_saved_with_other_line_ends_is_read():
    assert Plan.from_text(Plan().to_text().replace("\n", "\r\n")) == Plan()
