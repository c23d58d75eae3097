"""Files of answers: the file's own cells and types, and the answers behind them."""

import csv
import datetime
from decimal import Decimal

import numpy as np
import pytest
from recipe_data import write_rows

from hotlap.core.errors import DataError
from hotlap.recipes.answers import answered as rows_answered
from hotlap.recipes.answers import write_answers
from hotlap.recipes.tables import read_table


def test_a_parquet_file_of_answers_has_nothing_where_nothing_is(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [["1", "2024-01-05 10:00", "yes", "", "a"], ["", "", "", "", ""], ["2.5", "2024-01-06 11:30", "no", "", "b"]]
    data = write_rows(tmp_path / "t.csv", ["number", "date", "flag", "empty", "word"], rows)
    table = read_table(data)
    names = list(table.columns)
    write_answers(tmp_path / "t.parquet", data, table, names, np.array([0, 2]), {"answer": [0.1, 0.2]})
    found = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["answer"] for row in found] == [0.1, None, 0.2]
    assert found[1] == dict.fromkeys([*names, "answer"])
    assert (found[2]["number"], found[2]["flag"], found[2]["word"]) == (2.5, False, "b")
    assert found[0]["date"].isoformat() == "2024-01-05T10:00:00"


def answered(tmp_path, data, name):
    table = read_table(data)
    out = tmp_path / name
    write_answers(out, data, table, list(table.columns), np.arange(len(table)), {"answer": [1] * len(table)})
    return out


def test_cells_of_the_file_are_written_as_they_are(tmp_path):
    rows = [["NA", "007", "null"], ["US", "0.10", "-"]]
    data = write_rows(tmp_path / "t.csv", ["country", "code", "note"], rows)
    with answered(tmp_path, data, "a.csv").open() as file:
        assert list(csv.reader(file)) == [["country", "code", "note", "answer"], *([*row, "1"] for row in rows)]


def test_space_around_cells_is_written_as_it_is_and_does_not_count(tmp_path):
    lines = [" A1, said the goal team,1 ", "A2,  x ,2", ' "a, b", "c\n d", 3', '"he said, ""no""", said,4', "A5,y,5"]
    data = tmp_path / "t.csv"
    data.write_text("\n".join(["id, text,number", *lines, ""]))
    table = read_table(data)
    assert list(table.columns) == ["id", "text", "number"]
    assert table["id"].texts() == ["A1", "A2", "a, b", 'he said, "no"', "A5"]
    assert table["text"].texts() == ["said the goal team", "x", "c\n d", "said", "y"]
    assert table["number"].kind == "whole number"
    with answered(tmp_path, data, "a.csv").open(newline="") as file:
        first, *rows = csv.reader(file)
    assert first == ["id", "text", "number", "answer"]
    assert rows == [
        [" A1", " said the goal team", "1 ", "1"], ["A2", "  x ", "2", "1"], ["a, b", "c\n d", " 3", "1"],
        ['he said, "no"', " said", "4", "1"], ["A5", "y", "5", "1"],
    ]  # fmt: skip


def test_rows_without_an_answer_are_counted_and_the_first_is_named(tmp_path):
    rows = [[f"2024-01-0{at}", at] for at in range(1, 6)]
    table = read_table(write_rows(tmp_path / "t.csv", ["time", "close"], rows))
    found = rows_answered(table, ["time", "close"], np.array([2, 3, 4]))
    assert found.line == "3 of 5 rows answered"
    assert "2 of 5 rows have no answer: their cells are empty, the first in row 1 below" in found.missing
    assert "where time is '2024-01-01" in found.missing
    whole = rows_answered(table, ["close"], np.arange(5))
    assert (whole.line, whole.missing) == ("5 rows answered", "")


def test_columns_of_a_parquet_file_are_written_with_their_types(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    given = arrow.table(
        {
            "id": arrow.array([7, None], arrow.uint64()),
            "large": arrow.array([2**63 + 1234567, 2**64 - 3], arrow.uint64()),
            "price": arrow.array([Decimal("12345678901234567.89"), Decimal("1.10")], arrow.decimal128(25, 2)),
            "at": arrow.array([datetime.time(10, 30), None], arrow.time32("ms")),
            "when": arrow.array([0, 10**6], arrow.timestamp("us", tz="UTC")),
        }
    )
    data = tmp_path / "t.parquet"
    parquet.write_table(given, data)
    table = read_table(data)
    assert table["id"].kind == "whole number"
    assert table["large"].texts() == [str(2**63 + 1234567), str(2**64 - 3)]
    found = parquet.read_table(answered(tmp_path, data, "a.parquet"))
    assert found.select(given.column_names).to_pylist() == given.to_pylist()
    assert {one.name: one.type for one in given.schema}.items() <= {one.name: one.type for one in found.schema}.items()
    with answered(tmp_path, data, "a.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["id"], second["id"]) == ("7", "")
    assert (first["large"], first["price"], second["price"]) == (str(2**63 + 1234567), "12345678901234567.89", "1.10")


def test_files_whose_unread_columns_differ_are_answered_by_what_they_share(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "both").mkdir()
    first = arrow.table({"id": [1, 2], "raw": [b"a", b"b"]})
    parquet.write_table(first, tmp_path / "both" / "a.parquet")
    parquet.write_table(first.drop_columns("raw"), tmp_path / "both" / "b.parquet")
    found = parquet.read_table(answered(tmp_path, tmp_path / "both", "a.parquet"))
    assert found.to_pydict() == {"id": [1, 2, 1, 2], "answer": [1] * 4}
    with answered(tmp_path, tmp_path / "both", "a.csv").open() as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["1", "2", "1", "2"]


def test_a_parquet_file_with_two_columns_of_a_name_is_refused_in_one_line(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_arrays([arrow.array([1]), arrow.array([2])], names=["x", "x"])
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="has the column 'x' 2 times; give each a name of its own"):
        read_table(tmp_path / "t.parquet")
