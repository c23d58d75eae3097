"""Bars of prices: read as people write them, refused by the row, and never seen before they are complete."""

import csv
import io
import logging
import re
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.core.errors import DataError
from hotlap.recipes.bars import Bars, bars_from, frame_name, last_complete, resampled

START = int(datetime(2024, 1, 8, tzinfo=UTC).timestamp())  # a Monday
PRICES = ("open", "high", "low", "close")


def columns(rows=6, start=START, step=900, **changes):
    at = np.arange(rows, dtype=np.float64)
    made = {
        "time": start + step * np.arange(rows),
        "open": 10 + at,
        "high": 12 + at,
        "low": 9 + at,
        "close": 11 + at,
        "volume": 100 + at,
    }
    return {**made, **changes}


def changed(values, row, value):
    values = values.copy()
    values[row] = value
    return values


def bars_at(minutes, seconds=900, *, seed=0):
    """Bars that begin so many minutes after the start, with prices by chance."""
    chance = np.random.default_rng(seed)
    base = chance.uniform(9, 11, len(minutes))
    opens, closes = base, base + chance.normal(size=len(minutes)) / 10
    return Bars(
        times=START + 60 * np.asarray(minutes),
        open=opens,
        high=np.maximum(opens, closes) + chance.random(len(minutes)),
        low=np.minimum(opens, closes) - chance.random(len(minutes)),
        close=closes,
        volume=chance.integers(0, 9, len(minutes)),
        seconds=seconds,
    )


def same(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("times", *PRICES, "volume"))


def test_a_csv_as_exchanges_write_it_is_read():
    text = (
        "Date,Open,High,Low,Close,Adj Close,Volume\n"
        "2024-01-08 00:00,1.5,2.5,1,2,1.9,7\n"
        "2024-01-08 00:15,2,3,1.5,2.5,2.4,8\n"
    )
    rows = list(csv.DictReader(io.StringIO(text)))
    (bars,) = bars_from({name: [row[name] for row in rows] for name in rows[0]})
    assert bars.times.tolist() == [START, START + 900]
    assert bars.close.tolist() == [2, 2.5]  # not the adjusted one, which is of another scale than open, high and low
    assert bars.volume.tolist() == [7, 8]
    assert (bars.seconds, bars.symbol, bars.times.dtype, bars.open.dtype) == (900, "", np.int64, np.float64)


@pytest.mark.parametrize(
    "names",
    [
        {"time": "DateTime", "close": "Adj Close", "volume": "Tick_Volume"},
        {"time": "timestamp", "open": "O", "high": "H", "low": "L", "close": "price", "volume": "vol"},
        {"time": "<DATE>", "open": "<OPEN>", "volume": "<TICKVOL>", "close": " CLOSE "},
        {"time": "Open time"},
    ],
)
def test_names_are_understood_as_people_write_them(names):
    plain = columns()
    (bars,) = bars_from({names.get(name, name): values for name, values in plain.items()} | {"spread": np.zeros(6)})
    assert same(bars, bars_from(plain)[0])


@pytest.mark.parametrize(
    "write",
    [
        lambda at: at * 1000,
        lambda at: at * 10**6,
        lambda at: at * 10**9,
        lambda at: at.astype(np.float64),
        lambda at: at.astype(str),
        lambda at: at.astype("datetime64[s]"),
        lambda at: at.astype("datetime64[s]").astype("datetime64[ns]"),
        lambda at: [datetime.fromtimestamp(t, UTC).isoformat() for t in at],
        lambda at: [datetime.fromtimestamp(t, UTC).strftime("%Y.%m.%d %H:%M") for t in at],
        lambda at: [datetime.fromtimestamp(t, UTC).strftime("%Y/%m/%d %H:%M:%SZ") for t in at],
        lambda at: [datetime.fromtimestamp(t + 7200, UTC).strftime("%Y-%m-%dT%H:%M+02:00") for t in at],
    ],
)
def test_times_in_every_usual_form_are_the_same_seconds(write):
    plain = columns()
    (bars,) = bars_from({**plain, "time": write(plain["time"])})
    assert bars.times.tolist() == plain["time"].tolist()


@pytest.mark.parametrize(
    "write",
    [
        lambda moments: [moment.strftime("%Y.%m.%d") for moment in moments],
        lambda moments: np.array([moment.date() for moment in moments], dtype="datetime64[s]"),
        lambda moments: np.array([int(moment.strftime("%Y%m%d")) for moment in moments]),
    ],
)
def test_a_day_and_an_hour_in_two_columns_are_one_time(write):
    plain = columns()
    moments = [datetime.fromtimestamp(t, UTC) for t in plain["time"]]
    two = {"Date": write(moments), "Time": [m.strftime("%H:%M") for m in moments]}
    (bars,) = bars_from({**two, **{name: values for name, values in plain.items() if name != "time"}})
    assert bars.times.tolist() == plain["time"].tolist()


@pytest.mark.parametrize("days", [[20240108, 20240109, 20240110], ["20240108", "20240109", "20240110"]])
def test_days_written_as_one_number_are_days(days):
    (bars,) = bars_from({**columns(3), "time": days})
    assert bars.times.tolist() == [START, START + 86400, START + 2 * 86400]
    assert bars.seconds == 86400


def test_each_symbol_has_its_own_bars_in_the_order_of_the_file_and_knows_its_rows():
    one, other = columns(4), columns(4, open=np.full(4, 20.0), high=np.full(4, 30.0))
    mixed = {name: np.stack([one[name], other[name]], 1).reshape(-1) for name in one}
    found = bars_from({**mixed, "Ticker": ["B", "A"] * 4})
    assert [bars.symbol for bars in found] == ["B", "A"]
    assert same(found[0], bars_from(one)[0])
    assert same(found[1], bars_from(other)[0])
    assert found[1].rows.tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize("name", ["Name", "ASSET", "instrument", "coin", "Stock", "code", "ISIN", "pair"])
def test_symbols_are_found_under_every_usual_name(name):
    one = columns(4)
    both = {kind: np.tile(values, 2) for kind, values in one.items()}
    found = bars_from({**both, name: ["A"] * 4 + ["B"] * 4})
    assert [bars.symbol for bars in found] == ["A", "B"]
    assert same(found[1], bars_from(one)[0])


@pytest.mark.parametrize("values", [[f"bar {at}" for at in range(6)], [""] * 6, [7.0, 8.0] * 3])
def test_a_name_for_every_bar_a_number_or_nothing_is_no_symbol(values):
    (bars,) = bars_from({**columns(), "name": values})
    assert bars.symbol == ""


def test_a_repeated_time_is_refused_with_its_files_and_the_column_that_may_be_missing():
    plain = columns(6)
    plain["time"] = changed(plain["time"], [4], plain["time"][1])
    cure = "where rows are of several symbols, name these in a column called symbol, else keep one of them"
    for files, rows in (((), ("row 5", "row 2")), ((("a.csv", 3), ("b.csv", 3)), ("b.csv row 2", "a.csv row 2"))):
        with pytest.raises(DataError) as error:
            bars_from(plain, files=files)
        assert str(error.value) == f"{rows[0]}: its time 2024-01-08T00:15:00 is that of {rows[1]} too; {cure}"


@pytest.mark.parametrize("start", [START, START + 900 * 96])
def test_files_of_one_symbol_with_bars_of_two_lengths_are_refused_by_their_names(start):
    quarters, hours = columns(96), columns(60, start=start, step=3600)
    both = {name: np.concatenate([quarters[name], hours[name]]) for name in quarters}
    with pytest.raises(DataError) as error:
        bars_from({**both, "symbol": ["X"] * 156}, files=(("quarters.csv", 96), ("hours.csv", 60)))
    assert str(error.value) == "X: quarters.csv has bars of m15, and hours.csv of h1; give those of one length"


def test_a_file_of_bars_that_are_traded_seldom_is_of_their_length_all_the_same():
    often, seldom = columns(96), columns(60, start=START + 86400, step=1800)
    seldom["time"][30:] -= 900
    both = {name: np.concatenate([often[name], seldom[name]]) for name in often}
    (bars,) = bars_from(both, files=(("often.csv", 96), ("seldom.csv", 60)))
    assert (len(bars), bars.seconds) == (156, 900)


def test_missing_volume_is_zero_with_a_warning(caplog):
    plain = columns()
    del plain["volume"]
    with caplog.at_level(logging.WARNING):
        (bars,) = bars_from(plain)
    assert bars.volume.tolist() == [0] * 6
    assert "no column for volume" in caplog.text


@pytest.mark.parametrize(("volume", "taken"), [(np.zeros(6), "ticks"), (np.arange(6.0), "volume")])
def test_ticks_are_the_volume_where_there_is_no_other(volume, taken):
    plain, ticks = columns(), np.arange(6.0) + 7
    del plain["volume"]
    (bars,) = bars_from({**plain, "<TICKVOL>": ticks, "<VOL>": volume})
    assert bars.volume.tolist() == {"ticks": ticks, "volume": volume}[taken].tolist()


def test_rows_out_of_order_are_sorted_with_a_warning(caplog):
    plain = columns()
    order = np.array([5, 4, 3, 0, 1, 2])
    mixed = {name: values[order] for name, values in plain.items()}
    with caplog.at_level(logging.WARNING):
        (bars,) = bars_from({**mixed, "pair": ["EURUSD"] * 6})
    assert same(bars, bars_from(plain)[0])
    assert bars.rows.tolist() == [3, 4, 5, 2, 1, 0]
    assert "sorted by time: EURUSD" in caplog.text
    caplog.clear()
    bars_from(plain)
    assert not caplog.text


def test_one_row_of_another_symbol_between_is_not_out_of_order(caplog):
    one = columns(3)
    two = {name: np.concatenate([values[:2], values[:2], values[2:]]) for name, values in one.items()}
    bars_from({**two, "symbol": ["A", "A", "B", "B", "A"]})
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "row", "value", "said"),
    [
        ("close", 3, np.nan, "X, row 4: close is missing; mend it, or leave the row out"),
        ("open", 2, -1.5, "X, row 3: open is -1.5; a price must be above zero"),
        ("low", 1, 0.0, "X, row 2: low is 0.0; a price must be above zero"),
        ("high", 4, 1.0, "X, row 5: high 1.0 is below low 13.0"),
        ("high", 4, np.inf, "X, row 5: high is inf, which is no price"),
        ("volume", 0, -2.0, "X, row 1: volume is -2.0; give a number of at least 0"),
        ("time", 3, START + 1800, "X, row 4: its time 2024-01-08T00:30:00 is that of row 3 too; keep one of them"),
        ("time", 3, START + 2000, "X, row 4: it begins 200 s after row 3, and bars are 900 s long"),
    ],
)
def test_an_impossible_bar_is_refused_with_its_symbol_row_and_value(name, row, value, said):
    plain = columns()
    with pytest.raises(DataError, match=re.escape(said)) as error:
        bars_from({**plain, name: changed(plain[name], row, value), "symbol": ["X"] * 6})
    assert "\n" not in str(error.value)


def test_rows_in_errors_are_those_of_the_file_not_of_the_sorted_bars():
    plain = columns()
    backwards = {name: values[::-1] for name, values in plain.items()}
    with pytest.raises(DataError, match="row 2: close is missing"):
        bars_from({**backwards, "close": changed(backwards["close"], 1, np.nan)})


def test_all_mistakes_come_at_once_and_each_kind_once():
    plain = columns()
    bad = {"close": changed(plain["close"], [1, 2, 5], -1), "low": changed(plain["low"], 0, np.nan)}
    with pytest.raises(DataError) as error:
        bars_from({**plain, **bad, "symbol": ["A", "A", "A", "B", "B", "B"]})
    assert str(error.value).split("\n") == [
        "the bars have 3 mistakes:",
        "  - A, row 1: low is missing; mend it, or leave the row out",
        "  - A, row 2: close is -1.0; a price must be above zero (and 1 more like it)",
        "  - B, row 6: close is -1.0; a price must be above zero",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"close": ["1", "2", "x", "4", "5", "6"]}, "row 3: close is 'x', which is no number"),
        ({"close": ["1", "2", "", "4", "5", "6"]}, "row 3: close is missing"),
        ({"close": [1.0, None, 3.0, 4.0, 5.0, 6.0]}, "row 2: close is missing"),
        ({"time": ["2024-01-08", "01/09/2024", "", "", "", ""]}, "row 2: its time is '01/09/2024'; write it as"),
        ({"time": np.array([1e9, np.nan, 1, 1, 1, 1])}, "row 2: its time is missing"),
        ({"time": np.array(["2024-01-08", "NaT"] * 3, "datetime64[s]")}, "row 2: its time is missing"),
        ({"volume": np.zeros(5)}, "columns must be of one length"),
        ({"Close": np.zeros(6)}, "two columns are called 'close'"),
    ],
)
def test_values_that_cannot_be_read_are_refused_with_their_row(changes, said):
    with pytest.raises(DataError, match=re.escape(said)):
        bars_from({**columns(), **changes})


def test_a_column_that_is_missing_is_asked_for_by_the_names_it_may_have():
    plain = columns()
    del plain["high"]
    with pytest.raises(DataError, match=r"no column for high: name one 'high' or 'h'; there are \['time', 'open'"):
        bars_from(plain)


def test_a_single_bar_needs_a_default_length():
    with pytest.raises(DataError, match="bars of 0 s: a single bar does not say how long it is; give more of them"):
        bars_from(columns(1))
    assert bars_from(columns(1), default_seconds=900)[0].seconds == 900


def test_a_few_bars_of_a_symbol_are_as_long_as_those_of_the_longest():
    long, one, two = columns(60), columns(1), columns(2, step=2 * 86400)
    both = {name: np.concatenate([long[name], one[name], two[name]]) for name in long}
    found = bars_from({**both, "symbol": ["A"] * 60 + ["B"] + ["C"] * 2})
    assert [(bars.symbol, len(bars), bars.seconds) for bars in found] == [("A", 60, 900), ("B", 1, 900), ("C", 2, 900)]
    assert bars_from(two, default_seconds=3600)[0].seconds == 3600


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (
            np.arange("2020-01", "2024-01", dtype="datetime64[M]").astype("datetime64[s]"),
            "row 3: it begins 2505600 s after row 2, and bars are 2678400 s long; "
            "months differ in length: give bars of weeks or days (and 19 more like it)",
        ),
        (
            START + np.cumsum([60, 60, 35] * 16),
            "row 3: it begins 35 s after row 2, and bars are 60 s long; "
            "leave it out where few are so, else give bars of one length (and 15 more like it)",
        ),
    ],
)
def test_bars_that_are_not_of_one_length_are_refused_with_what_can_be_done(times, said):
    with pytest.raises(DataError) as error:
        bars_from({**columns(48), "time": times})
    assert str(error.value) == said


def test_bars_made_by_hand_are_checked_too():
    ones = np.ones(3)
    prices = {"open": ones, "high": ones, "low": ones, "close": ones}
    with pytest.raises(DataError, match="the columns of bars differ in length"):
        Bars(times=900 * np.arange(3), **prices, volume=np.zeros(2), seconds=900)
    with pytest.raises(DataError, match="row 3: it begins -900 s after row 2"):
        Bars(times=[0, 1800, 900], **prices, volume=ones, seconds=900)
    with pytest.raises(DataError, match="there are no bars"):
        Bars(times=[], **dict.fromkeys((*PRICES, "volume"), ones[:0]), seconds=900)


def test_an_hour_holds_its_quarters():
    hours = resampled(bars_from(columns(6, start=START + 1800))[0], 3600)
    assert hours.times.tolist() == [START, START + 3600]
    assert hours.open.tolist() == [10, 12]
    assert hours.high.tolist() == [13, 17]
    assert hours.low.tolist() == [9, 11]
    assert hours.close.tolist() == [12, 16]
    assert hours.volume.tolist() == [201, 102 + 103 + 104 + 105]
    assert hours.seconds == 3600


@pytest.mark.parametrize(("rows", "unfinished"), [(3, True), (4, False), (5, True), (8, False)])
def test_the_last_bar_is_marked_while_it_may_still_grow(rows, unfinished):
    assert resampled(bars_from(columns(rows))[0], 3600).unfinished is unfinished


@pytest.mark.parametrize(
    ("seconds", "begins"),
    [(14400, "2024-01-10T12"), (86400, "2024-01-10"), (7 * 86400, "2024-01-08"), (5400, "2024-01-10T13:30")],
)
def test_longer_bars_begin_where_the_calendar_says(seconds, begins):
    moment = int(datetime(2024, 1, 10, 14, 45, tzinfo=UTC).timestamp())
    longer = resampled(bars_from(columns(1, start=moment), default_seconds=900)[0], seconds)
    assert longer.times.astype("datetime64[s]")[0] == np.datetime64(begins)


@pytest.mark.parametrize("seconds", [1000, 450, 0, -3600, 3600.5, "h1"])
def test_bars_that_cannot_be_made_of_shorter_ones_are_refused(seconds):
    with pytest.raises(DataError, match="cannot be made of bars of 900 s; give a multiple of it"):
        resampled(bars_from(columns())[0], seconds)


some_minutes = st.lists(st.integers(0, 60), min_size=1, max_size=60, unique=True).map(
    lambda quarters: [15 * quarter for quarter in sorted(quarters)]
)


@settings(max_examples=100, deadline=None)
@given(minutes=some_minutes, quarters=st.sampled_from([1, 2, 4, 6, 16, 96]), late=st.integers(0, 14))
def test_longer_bars_are_those_of_a_plain_loop(minutes, quarters, late):
    bars = bars_at([minute + late for minute in minutes])
    longer = resampled(bars, 900 * quarters)
    by_begin = {}
    for at, time in enumerate(bars.times.tolist()):
        by_begin.setdefault(time - (time - START) % (900 * quarters), []).append(at)
    assert longer.times.tolist() == list(by_begin)
    for at, inside in enumerate(by_begin.values()):
        assert longer.open[at] == bars.open[inside[0]]
        assert longer.high[at] == max(bars.high[inside])
        assert longer.low[at] == min(bars.low[inside])
        assert longer.close[at] == bars.close[inside[-1]]
        assert longer.volume[at] == sum(bars.volume[inside])  # whole numbers, so exactly
        assert longer.rows[at] == inside[0]
    two_steps = resampled(resampled(bars, 1800), 7200)
    assert same(two_steps, resampled(bars, 7200))


def test_a_quarter_sees_the_hour_that_ends_with_it_and_no_other_quarter_does_before():
    quarters = bars_at([15 * at for at in range(10)])
    places = last_complete(quarters, resampled(quarters, 3600))
    assert places.tolist() == [-1, -1, -1, 0, 0, 0, 0, 1, 1, 1]


def test_a_second_before_its_end_an_hour_is_not_complete():
    hours = resampled(bars_at([0, 15, 30, 45, 60]), 3600)
    early, on_time = bars_at([45, 60]), bars_at([45, 60])
    early = replace(early, times=early.times - 1)
    assert last_complete(early, hours).tolist() == [-1, 0]
    assert last_complete(on_time, hours).tolist() == [0, 0]


def test_an_hour_over_which_trade_stopped_is_seen_by_the_next_bar():
    quarters = bars_at([0, 15, 240, 255])
    assert last_complete(quarters, resampled(quarters, 3600)).tolist() == [-1, -1, 0, 0]


def test_an_unfinished_bar_is_never_seen_even_by_bars_that_go_on():
    quarters = bars_at([15 * at for at in range(12)])
    part = bars_at([15 * at for at in range(6)])
    assert last_complete(quarters, resampled(part, 3600)).tolist() == [-1] * 3 + [0] * 9


@settings(max_examples=100, deadline=None)
@given(minutes=some_minutes, quarters=st.sampled_from([1, 2, 4, 16]), late=st.integers(0, 14))
def test_no_bar_sees_a_longer_bar_that_holds_later_bars(minutes, quarters, late):
    bars = bars_at([minute + late for minute in minutes])
    longer = resampled(bars, 900 * quarters)
    for at, place in enumerate(last_complete(bars, longer).tolist()):
        complete = [
            k for k, begin in enumerate(longer.times.tolist()) if begin + 900 * quarters <= bars.times[at] + 900
        ]
        assert place == (max(complete) if complete else -1)
        if place >= 0:
            begin = longer.times[place]
            inside = np.flatnonzero((bars.times >= begin) & (bars.times < begin + 900 * quarters))
            assert inside.max() <= at


@pytest.mark.parametrize(
    ("seconds", "name"), [(900, "m15"), (3600, "h1"), (14400, "h4"), (86400, "d1"), (5400, "m90"), (30, "s30")]
)
def test_frames_are_called_as_traders_do(seconds, name):
    assert frame_name(seconds) == name
