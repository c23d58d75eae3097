"""Pictures: well-formed SVG files that show what they were given."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.core.errors import DataError
from hotlap.plots import confusion_picture, curves, importance_bars, round_marks, search_history
from hotlap.plots.axes import MOST_POINTS

SVG = "{http://www.w3.org/2000/svg}"


def drawn(path):
    """The picture, its words, and the points of each of its lines."""
    root = ElementTree.parse(path).getroot()
    words = [text.text for text in root.iter(f"{SVG}text")]
    paths = [path for path in root.iter(f"{SVG}path") if "line" in path.get("class") and "L" in path.get("d")]
    lines = [[tuple(map(float, p.split())) for p in path.get("d")[1:].split("L")] for path in paths]
    return root, words, lines


def history(steps=5, **more):
    return [
        {"step": 100 * n, "epoch": n, "train_loss": 2 / n, "valid_loss": 2.1 / n, "accuracy": 1 - 0.5 / n, "lr": 0.1}
        | {name: value(n) for name, value in more.items()}
        for n in range(1, steps + 1)
    ]


def test_losses_and_a_metric_are_drawn_over_the_steps(tmp_path):
    curves({"GRU": history()}, tmp_path / "curves.svg")
    root, words, lines = drawn(tmp_path / "curves.svg")
    assert [len(line) for line in lines] == [5, 5, 5]
    train, valid, metric = lines
    assert {"loss", "GRU, training", "GRU, validation", "accuracy on validation", "step", "0", "500"} <= set(words)
    # Points lie where their numbers put them: steps at equal distances, losses falling by 1 / n.
    gaps = np.diff([x for x, _ in valid])
    assert gaps == pytest.approx([gaps[0]] * 4, abs=0.2)
    heights = np.array([y for _, y in valid])
    assert (heights[1] - heights[0]) / (heights[4] - heights[0]) == pytest.approx((1 / 2) / (4 / 5), abs=0.01)
    assert all(one[1] > other[1] for one, other in zip(train, valid, strict=True))
    assert metric[0][1] > metric[-1][1]
    assert all(0 <= x <= 760 for line in lines for x, _ in line)
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "GRU accuracy 0.9 at step 500" in titles


def test_several_trainings_have_a_colour_each(tmp_path):
    curves({"GRU": history(), "dense": history(3)}, tmp_path / "curves.svg")
    root, words, lines = drawn(tmp_path / "curves.svg")
    assert {"GRU", "dense", "dashed: training", "solid: validation"} <= set(words)
    assert [len(line) for line in lines] == [5, 5, 3, 3, 5, 3]
    drawn_lines = [path for path in root.iter(f"{SVG}path") if "L" in path.get("d")]
    assert [path.get("class").split()[-1] for path in drawn_lines] == [f"c{n}" for n in (0, 0, 1, 1, 0, 1)]
    assert len({path.get("stroke") for path in drawn_lines}) == 2


def test_macro_f1_is_drawn_where_there_is_one(tmp_path):
    curves({"GRU": history(macro_f1=lambda n: 0.5)}, tmp_path / "curves.svg")
    assert "macro_f1 on validation" in drawn(tmp_path / "curves.svg")[1]


def test_numbers_that_are_none_are_left_out(tmp_path):
    records = history(6)
    records[2]["train_loss"], records[3]["train_loss"], records[0]["valid_loss"] = math.nan, math.inf, None
    curves({"GRU": records}, tmp_path / "curves.svg")
    assert [len(line) for line in drawn(tmp_path / "curves.svg")[2]] == [4, 5, 6]
    assert "nan" not in (tmp_path / "curves.svg").read_text()


def test_a_single_record_is_a_dot(tmp_path):
    curves({"GRU": history(1)}, tmp_path / "curves.svg")
    root, _, lines = drawn(tmp_path / "curves.svg")
    assert lines == []
    assert len([one for one in root.iter() if "mark" in (one.get("class") or "").split()]) == 3


def test_long_histories_are_thinned(tmp_path):
    curves({"GRU": history(5000)}, tmp_path / "curves.svg")
    assert [len(line) for line in drawn(tmp_path / "curves.svg")[2]] == [MOST_POINTS] * 3


def test_a_training_without_losses_is_refused(tmp_path):
    with pytest.raises(DataError, match="there is no loss in the history"):
        curves({"GRU": [{"step": 1, "train_loss": math.nan}]}, tmp_path / "curves.svg")


def test_a_picture_is_readable_in_light_and_dark_and_needs_nothing_else(tmp_path):
    curves({"GRU": history()}, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1  # the name of the format
    assert "<script" not in text


def test_names_may_hold_anything(tmp_path):
    name = "a <b> & \"c\" 'd' \x07 \n Ω"
    curves({name: history(), "other": history()}, tmp_path / "curves.svg")
    assert "a <b> & \"c\" 'd' \\x07 \\n Ω" in drawn(tmp_path / "curves.svg")[1]
    confusion_picture([[1, 0], [0, 1]], [name, "other"], tmp_path / "confusion.svg")
    assert "a <b> & \"c\" 'd' \\x07 \\n Ω" in drawn(tmp_path / "confusion.svg")[1]


def test_confusion_shows_counts_and_shares_of_the_true_class(tmp_path):
    confusion_picture(np.array([[30, 10], [0, 5]]), ["no", "yes"], tmp_path / "confusion.svg")
    root, words, _ = drawn(tmp_path / "confusion.svg")
    assert words.count("no") == words.count("yes") == 2
    assert {"30", "75 %", "10", "25 %", "5", "100 %"} <= set(words)
    shades = [rect.get("opacity") for rect in root.iter(f"{SVG}rect") if rect.get("opacity")]
    assert shades == ["0.750", "0.250", "0.000", "1.000"]


def test_confusion_of_many_classes_stays_small_and_of_none_is_refused(tmp_path):
    confusion_picture(np.eye(40, dtype=int), [f"class {n}" for n in range(40)], tmp_path / "confusion.svg")
    width = float(drawn(tmp_path / "confusion.svg")[0].get("width"))
    assert width < 900
    with pytest.raises(DataError, match=r"shape \(2, 2\), and there are 3 classes"):
        confusion_picture([[1, 0], [0, 1]], ["a", "b", "c"], tmp_path / "no.svg")


@settings(max_examples=300, deadline=None)
@given(low=st.floats(-1e6, 1e6), size=st.floats(1e-6, 1e7), most=st.integers(3, 10))
def test_marks_are_round_and_few_and_reach_from_end_to_end(low, size, most):
    high = low + size * max(1.0, abs(low) * 1e-4)
    marks = round_marks(low, high, most)
    assert 2 <= len(marks) <= most
    step = marks[1] - marks[0]
    assert marks[0] <= low + 1e-6 * step
    assert marks[-1] >= high - 1e-6 * step
    digit = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(digit - one) for one in (1, 2, 5, 10)) < 1e-3


def test_marks_are_the_numbers_people_would_choose():
    assert round_marks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert round_marks(0.13, 1.26) == [0, 0.5, 1.0, 1.5]
    assert round_marks(250, 3000, most=8) == [0, 500, 1000, 1500, 2000, 2500, 3000]


def test_pictures_have_plain_colours_where_css_variables_are_unknown(tmp_path):
    curves(
        {"GRU": [{"step": 1, "train_loss": 1.0, "valid_loss": 2.0}, {"step": 2, "train_loss": 0.5}]}, tmp_path / "a.svg"
    )
    confusion_picture([[3, 1], [0, 2]], ["a", "b"], tmp_path / "b.svg")
    for name in ("a.svg", "b.svg"):
        text = (tmp_path / name).read_text()
        assert "var(" not in text
        shapes = re.findall(r"<(?:path|circle|rect) [^>]*>", text)
        assert shapes
        assert all(re.search(r'(?:fill|stroke)="#[0-9a-f]{6}"', shape) for shape in shapes)


def test_a_search_has_a_dot_for_each_trial_and_a_line_for_the_best_so_far(tmp_path):
    search_history([(1, 3.0), (2, 4.0), (4, 2.0)], [(1, 3.0), (2, 3.0), (4, 2.0)], "valid_loss", tmp_path / "h.svg")
    root, words, lines = drawn(tmp_path / "h.svg")
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert [one for one in titles if one.startswith("a trial")] == [
        f"a trial {score} at trial {at}" for at, score in ((1, 3), (2, 4), (4, 2))
    ]
    assert len(lines) == 1
    assert "trial" in words


def test_importance_has_a_bar_for_each_value_the_largest_first(tmp_path):
    importance_bars({"width": 0.2, "lr": 0.8}, tmp_path / "i.svg")
    root, words, _ = drawn(tmp_path / "i.svg")
    assert words[1:] == ["lr", "80 %", "width", "20 %"]
    widths = [float(rect.get("width")) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "cell"]
    assert widths == [440.0, 110.0]
