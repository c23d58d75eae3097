"""Tables: files as people have them become columns of the right kinds, or one clear line."""

import csv
import gzip
import io
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.core.errors import DataError
from hotlap.recipes.kinds import MISSING
from hotlap.recipes.tables import Table, column_lines, read_table


@pytest.fixture
def written(tmp_path):
    def write(content, name="train.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def one_column(write, *cells, **options):
    """The column that a file of these cells has; a second column keeps empty cells from being empty lines."""
    out = io.StringIO()
    csv.writer(out).writerows([["x", "other"], *([cell, "o"] for cell in cells)])
    return read_table(write(out.getvalue()), **options)["x"]


def refused(path, **options):
    """The one line that says why a file is not read."""
    with pytest.raises(DataError) as error:
        read_table(path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- kinds ---------------------------------------------------------------------------------------------


def test_numbers_are_read_with_their_missing_values(written):
    column = one_column(written, "1.5", "", "-2e3", "NaN", " 7 ", ".25", "inf", "3.")
    assert column.kind == "number"
    assert column.values.dtype == np.float64
    assert np.array_equal(column.values, [1.5, np.nan, -2000, np.nan, 7, 0.25, np.inf, 3], equal_nan=True)
    assert column.missing.tolist() == [False, True, False, True, False, False, False, False]


def test_whole_numbers_keep_all_digits_though_some_are_missing(written):
    column = one_column(written, "9007199254740993", "NA", "-1", "+5", "0")
    assert column.kind == "whole number"
    assert column.values.dtype == np.int64
    assert column.values.tolist() == [9007199254740993, 0, -1, 5, 0]
    assert column.missing.tolist() == [False, True, False, False, False]


def test_zeros_and_ones_stay_whole_numbers(written):
    assert one_column(written, "0", "1", "1", "0").kind == "whole number"


@pytest.mark.parametrize("cells", [("True", "false", "TRUE"), ("yes", "No", "YES"), ("yes", "yes", "yes")])
def test_flags_are_true_and_false_or_yes_and_no_in_any_case(written, cells):
    column = one_column(written, *cells, "n/a")
    assert column.kind == "flag"
    assert column.values.dtype == bool
    assert column.values.tolist() == [cell.lower() in ("true", "yes") for cell in cells] + [False]
    assert column.missing.tolist() == [False, False, False, True]


def test_flags_remember_their_words(written):
    column = one_column(written, "No", "Yes", "no", "")
    assert column.categories == ("No", "Yes")
    assert column.texts() == ["No", "Yes", "No", ""]


@pytest.mark.parametrize(
    "word", ["", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "-", "?", "<NA>", "NaT"]
)
def test_usual_words_for_a_missing_value_are_missing(written, word):
    column = one_column(written, "1", word, "2")
    assert column.kind == "whole number"
    assert column.missing.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("cell", "moment"),
    [
        ("2024-02-29", "2024-02-29T00:00:00"),
        ("2024-02", "2024-02-01T00:00:00"),
        ("2024/02/29", "2024-02-29T00:00:00"),
        ("2024.02.29 10:15", "2024-02-29T10:15:00"),
        ("2024-02-29 10:15:30", "2024-02-29T10:15:30"),
        ("2024-02-29T10:15:30Z", "2024-02-29T10:15:30"),
        ("2024-02-29T10:15:30+02:00", "2024-02-29T08:15:30"),
        ("2024-02-29 10:15:30-0530", "2024-02-29T15:45:30"),
        ("2024-02-29 10:15:30 UTC", "2024-02-29T10:15:30"),
        ("9999-12-31", "9999-12-31T00:00:00"),
    ],
)
def test_dates_are_moments_in_utc_by_the_second(written, cell, moment):
    column = one_column(written, cell, "", "2023-01-01")
    assert column.kind == "date"
    assert column.values.dtype == np.dtype("datetime64[s]")
    assert column.values[0] == np.datetime64(moment)
    assert np.isnat(column.values[1])
    assert column.missing.tolist() == [False, True, False]


def test_parts_of_seconds_are_kept(written):
    column = one_column(written, "2024-01-01 00:00:00.123456", "2024-01-01 00:00:01")
    assert column.values.dtype == np.dtype("datetime64[ns]")
    assert column.values[0] == np.datetime64("2024-01-01T00:00:00.123456")


def test_a_month_of_13_is_no_date(written):
    assert one_column(written, "2024-13-01", "2024-01-01").kind == "text"


def test_seconds_since_1970_are_dates_only_where_wanted(written):
    assert one_column(written, "0", "86400").kind == "whole number"
    told = one_column(written, "0", "86400", kinds={"x": "date"})
    assert told.values.tolist() == np.array(["1970-01-01", "1970-01-02"], "datetime64[s]").tolist()


def test_few_words_that_come_back_are_categories_and_many_are_text(written):
    column = one_column(written, "red", "blue", "red", "-", "blue")
    assert (column.kind, column.categories) == ("category", ("blue", "red"))
    assert column.values.dtype == np.int32
    assert column.values.tolist() == [1, 0, 1, -1, 0]
    texts = one_column(written, "a fine film", "dull", "", "I left early")
    assert texts.kind == "text"
    assert texts.values.tolist() == ["a fine film", "dull", "", "I left early"]
    assert texts.missing.tolist() == [False, False, True, False]


def test_long_texts_that_come_back_are_text_all_the_same(written):
    assert one_column(written, *["one " * 30, "two " * 30] * 20).kind == "text"


def test_numbers_with_leading_zeros_or_too_many_digits_are_identifiers(written):
    column = one_column(written, "01234", "98765", "01234", "98765")
    assert column.categories == ("01234", "98765")
    long = "12345678901234567890"
    assert one_column(written, long, long + "1").values.tolist() == [long, long + "1"]


def test_an_underscore_makes_no_number(written):
    assert one_column(written, "1_000", "2_000", "1_000", "2_000").kind == "category"


def test_decimal_commas_are_read_unless_they_may_part_thousands(written):
    path = written("a;b\n1,5;1,500\n2;2,250\n-0,25;1,125\n")
    table = read_table(path)
    assert table["a"].values.tolist() == [1.5, 2.0, -0.25]
    assert table["b"].kind == "text"


def test_a_column_without_values_is_empty(written):
    column = one_column(written, "", "NA", "-")
    assert column.kind == "empty"
    assert column.missing.all()
    assert np.isnan(column.values).all()


def test_kinds_can_be_given(written):
    path = written("zip,n,text\n1,1,a\n10,2.0,b\n2,3,a\n")
    table = read_table(path, kinds={"zip": "category", "n": "number", "text": "text"})
    assert table["zip"].categories == ("1", "2", "10")
    assert table["n"].values.tolist() == [1, 2, 3]
    assert table["text"].kind == "text"


def test_whole_numbers_that_are_told_may_be_written_with_a_point(written):
    column = one_column(written, "1", "2.0", "", "-3.0", kinds={"x": "whole number"})
    assert column.values.tolist() == [1, 2, 0, -3]
    assert column.values.dtype == np.int64


def test_a_file_read_with_the_kinds_of_another_is_read_alike(written):
    first = read_table(written("id,c\n" + "".join(f"{n}.5,{'ab'[n % 2]}\n" for n in range(9))))
    second = read_table(written("id,c\n1,a\n2,b\n", "test.csv"), kinds=first.kinds)
    assert second.kinds == first.kinds == {"id": "number", "c": "category"}


def test_a_value_that_is_not_of_the_kind_told_is_named_with_its_line(written):
    path = written('t,x\n"two\nlines",1\nb,2\nc,many\n')
    assert refused(path, kinds={"x": "number"}) == f"{path} line 5: 'many' in column 'x' is no number"
    assert refused(path, kinds={"x": "whole number"}).startswith(f"{path} line 5: 'many' in column 'x' is no whole")
    assert refused(path, kinds={"x": "date"}).startswith(f"{path} line ")
    assert refused(path, kinds={"x": "flag"}).startswith(f"{path} line 4: '2' in column 'x' is no flag")
    assert "did you mean 'number'?" in refused(path, kinds={"x": "numbr"})
    assert "has no column 'y'" in refused(path, kinds={"y": "number"})


# --- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_delimiters_and_line_ends_are_found(written, delimiter, end):
    rows = [["name", "note"], ["a", "x, y; z | w"], ["b", "plain"], ["c", 'says "hi"\nand goes']]
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator=end).writerows(rows)
    table = read_table(written(out.getvalue()))
    assert list(table.columns) == ["name", "note"]
    assert table["note"].values.tolist() == [row[1] for row in rows[1:]]


def test_a_mark_at_the_beginning_is_no_part_of_the_first_name(written):
    table = read_table(written("\ufeffä,b\n1,2\n".encode()))
    assert list(table.columns) == ["ä", "b"]


def test_gzip_and_tsv_are_read(written):
    path = written(gzip.compress(b"a,b\n1,x\n"), "train.csv.gz")
    assert read_table(path)["a"].values.tolist() == [1]
    assert read_table(written("a, b\tc\n1, 2\t3\n", "t.tsv"))["c"].values.tolist() == [3]


def test_empty_lines_do_not_count(written):
    assert len(read_table(written("a,b\n\n1,2\n\n3,4\n\n\n"))) == 2


def test_a_field_longer_than_csv_reads_by_itself_is_read(written):
    csv.field_size_limit(1000)
    text = "x" * 200_000
    assert read_table(written(f"a,b\n{text},1\n"))["a"].values.tolist() == [text]
    assert csv.field_size_limit(131_072) == 1000


def test_a_first_row_of_numbers_is_no_header_unless_told(written):
    path = written("1,2.5\n3,4.5\n")
    table = read_table(path)
    assert list(table.columns) == ["column_0", "column_1"]
    assert table["column_0"].values.tolist() == [1, 3]
    assert "no header" in table.notes[0]
    assert list(read_table(path, header=True).columns) == ["1", "2.5"]
    assert list(read_table(written("in/a.JPG,cat\nin/b.JPG,dog\n")).columns) == ["column_0", "column_1"]
    words = read_table(written("a,b\nc,d\n"), header=False)
    assert words["column_1"].values.tolist() == ["b", "d"]


def test_a_missing_name_is_made_up_with_a_note(written):
    table = read_table(written(",a\n0,x\n1,y\n"))
    assert list(table.columns) == ["column_0", "a"]
    assert table.notes == ("field 1 of train.csv has no name; it is called 'column_0'",)


def test_a_folder_is_read_as_one_table_in_order_of_names(written, tmp_path):
    written("a,b\n3,z\n", "many/2.csv")
    written("b,a\nx,1\ny,2\n", "many/1.csv")
    written("no table", "many/readme.txt")
    written("no,thing\n1,2\n", "many/.hidden.csv")
    table = read_table(tmp_path / "many")
    assert table["a"].values.tolist() == [1, 2, 3]
    assert table["b"].values.tolist() == ["x", "y", "z"]
    assert table.files == (("1.csv", 2), ("2.csv", 1))


def test_the_kind_of_a_column_is_that_of_all_files(written, tmp_path):
    written("a\n1\n2\n", "many/1.csv")
    written("a\n2.5\n", "many/2.csv")
    assert read_table(tmp_path / "many")["a"].values.tolist() == [1.0, 2.0, 2.5]


def test_rows_are_taken_by_their_numbers(written):
    table = read_table(written("a,b\n1,x\n,y\n3,x\n4,y\n"))
    part = table.rows(np.array([3, 0]))
    assert isinstance(part, Table)
    assert len(part) == 2
    assert part["a"].values.tolist() == [4, 1]
    assert part["a"].missing is None
    assert part["b"].texts() == ["y", "x"]
    assert part["b"].categories == ("x", "y")
    assert table.rows(np.array([1]))["a"].missing.tolist() == [True]


def test_each_column_is_described_in_a_line(written):
    rows = "".join(f"{n},{'ab'[n % 2]},{'' if n % 4 else n / 2},2024-01-{n + 1:02}\n" for n in range(8))
    lines = column_lines(read_table(written("id,grade,,day\n" + rows)))
    assert lines == [
        "id        whole number                   e.g. 0",
        "grade     category of 2                  e.g. 'a'",
        "column_2  number         75.0 % missing  e.g. 0.0",
        "day       date                           e.g. 2024-01-01",
        "note: field 3 of train.csv has no name; it is called 'column_2'",
    ]


def test_infinite_numbers_are_counted(written):
    assert "number, 1 infinite" in column_lines(read_table(written("a\n1.5\ninf\n")))[0]


words = st.text(st.characters(codec="utf-8", exclude_characters="\0\r", exclude_categories=("Cs",)), max_size=6)


@settings(max_examples=150, deadline=None)
@given(
    cells=st.lists(st.lists(words, min_size=2, max_size=2), min_size=1, max_size=8), delimiter=st.sampled_from(",;|")
)
def test_cells_told_to_be_text_come_back_as_they_were_written(tmp_path_factory, cells, delimiter):
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([["first", "second"], *cells])
    path = tmp_path_factory.mktemp("t") / "t.csv"
    path.write_bytes(out.getvalue().encode())
    table = read_table(path, kinds={"first": "text", "second": "text"})
    for place, name in enumerate(table.columns):
        stripped = [row[place].strip() for row in cells]
        assert table[name].texts() == ["" if word in MISSING else word for word in stripped]


numbers = st.floats(allow_nan=False, width=64)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(numbers, min_size=1, max_size=20), wholes=st.lists(st.integers(-(2**63) + 1, 2**63 - 1)))
def test_numbers_come_back_with_every_bit(tmp_path_factory, values, wholes):
    wholes = (wholes + [0] * len(values))[: len(values)]
    path = tmp_path_factory.mktemp("t") / "t.csv"
    path.write_text("x,n\n" + "".join(f"{x!r},{n}\n" for x, n in zip(values, wholes, strict=True)))
    table = read_table(path)
    assert np.array_equal(table["x"].values, values)
    assert table["n"].values.tolist() == wholes
    assert table["n"].texts() == list(map(str, wholes))


# --- errors --------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_named_with_one_that_is(written, tmp_path):
    written("a\n1\n")
    path = tmp_path / "trian.csv"
    assert refused(path) == f"{path} does not exist; did you mean 'train.csv'?"


def test_files_without_rows_are_refused(written):
    path = written("")
    assert refused(path) == f"{path} is empty; give it a header and rows"
    path = written("\n\n")
    assert "is empty" in refused(path)
    path = written("a,b\n")
    assert refused(path) == f"{path} has a header ('a', 'b') and no rows; give it at least one"


def test_broken_rows_are_refused_with_the_line_of_the_first(written):
    path = written('a,b\n"x\ny",1\n\nfine,2\none,two,three\nlone\n')
    assert refused(path) == (
        f"{path} line 6 has 3 fields and the header 2, the first of 2 such rows: 'one,two,three'; "
        "quote fields that hold ','"
    )
    path = written("a,b\n1,2\n3\n")
    assert refused(path) == f"{path} line 3 has 1 field and the header 2: '3'; complete it"


def test_a_quote_that_is_not_closed_is_refused_where_it_opens(written):
    path = written('a,b\n1,x\n2,"open\n3,y\n4,z\n')
    assert refused(path).startswith(f"{path} line 3: a quote is opened and never closed; ")
    path = written('a,b\n1,x\n2,"he said "hi" to me"\n')
    assert refused(path).startswith(f"{path} line 3: ")


def test_what_is_not_utf_8_is_refused_with_its_place(written):
    for mark in (b"", b"\xef\xbb\xbf"):
        content = mark + b"a,b\n1,caf\xe9\n"
        said = refused(written(content))
        assert f"byte 0xe9 at position {content.index(0xE9)}, on line 2" in said
        # Not latin1, in which the dashes and quotes of Windows are control characters.
        assert "iconv -f cp1252 -t utf-8 train.csv" in said


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04\x14\0", "Excel"),
        ("a,b\n1,2\n".encode("utf-16"), "UTF-16"),
        (b"PAR1 and more\0", "Parquet"),
        (b"\xff\xd8\xff\xe0", "it is a JPEG picture"),
        (b"\x89PNG\r\n", "it is a PNG picture"),
        (b"a,b\n1,\0\n", "byte 6 is zero"),
    ],
)
def test_what_is_no_text_is_refused(written, content, what):
    said = refused(written(content))
    assert "is no text file of UTF-8" in said
    assert what in said


def test_a_header_that_begins_with_pk_is_a_header(written):
    assert list(read_table(written("PK,name\n1,a\n")).columns) == ["PK", "name"]


def test_a_damaged_gzip_file_is_refused(written):
    assert "damaged gzip" in refused(written(gzip.compress(b"a,b\n1,2\n" * 99)[:-12], "t.csv.gz"))


def test_names_that_come_twice_are_refused(written):
    path = written("a,b,a\n1,2,3\n")
    assert refused(path) == f"{path} has the column 'a' 2 times (fields 1, 3); give each a name of its own"


def test_a_name_that_comes_thousands_of_times_is_refused_in_a_short_line(written):
    path = written(",".join(["a" * 1000] * 9000) + "\n" + ",".join(["1"] * 9000) + "\n")
    assert "9,000 times (fields 1, 2, 3, 4 …); give" in refused(path)
    assert len(refused(path)) < 300


def test_a_column_that_is_not_there_is_named_with_one_that_is(written):
    path = written("text,label\na,b\n")
    with pytest.raises(DataError, match=re.escape(f"{path} has no column 'lable'; did you mean 'label'?")):
        read_table(path)["lable"]


def test_folders_that_are_no_table_are_refused(written, tmp_path):
    (tmp_path / "none").mkdir()
    assert "has no tables" in refused(tmp_path / "none")
    written("a,b\n1,2\n", "unlike/1.csv")
    second = written("a,c\n1,2\n", "unlike/2.csv")
    said = f"{second} lacks 'b' and adds 'c', unlike 1.csv; give all the same columns"
    assert refused(tmp_path / "unlike") == said
    written("a\n1\n", "mixed/1.csv")
    written("", "mixed/2.parquet")
    assert "both CSV and Parquet" in refused(tmp_path / "mixed")


# --- Parquet -------------------------------------------------------------------------------------------


def test_parquet_without_pyarrow_says_how_to_get_it(written, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    path = written(b"PAR1", "t.parquet")
    assert refused(path) == f"{path} needs pyarrow: pip install '.[recipes]' in a clone of hotlap"


def test_parquet_columns_have_the_kinds_of_their_types(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    when = np.array(["2024-01-01T00:00:00", "2024-01-02T12:00:00", "NaT"], "datetime64[us]")
    table = arrow.table(
        {
            "whole": arrow.array([1, None, 2**62]),
            "number": arrow.array([1.5, float("nan"), None]),
            "flag": [True, False, None],
            "date": when,
            "word": arrow.array(["007", None, "1"]),
            "codes": arrow.array(["a", "b", "a"]).dictionary_encode(),
            "nothing": arrow.array([None, None, None], "int32"),
            "list": [[1], [2], [3]],
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    found = read_table(tmp_path / "t.parquet")
    assert found["whole"].values.tolist() == [1, 0, 2**62]
    assert found["whole"].missing.tolist() == [False, True, False]
    assert np.array_equal(found["number"].values, [1.5, np.nan, np.nan], equal_nan=True)
    assert found["flag"].texts() == ["true", "false", ""]
    assert found["date"].texts() == ["2024-01-01T00:00:00", "2024-01-02T12:00:00", ""]
    assert found["date"].values.dtype == np.dtype("datetime64[s]")
    assert found["word"].values.tolist() == ["007", "", "1"]
    assert found["codes"].texts() == ["a", "b", "a"]
    assert found["nothing"].kind == "empty"
    assert "list" not in found
    assert found.notes[0].startswith("column 'list' of t.parquet holds list<")
    told = read_table(tmp_path / "t.parquet", kinds={"whole": "category"})
    assert told["whole"].categories == ("1", str(2**62))


def test_parquet_files_of_a_folder_are_concatenated(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, rows in (("1", [1, None]), ("2", [3, 4])):
        parquet.write_table(arrow.table({"n": arrow.array(rows), "w": ["a", name]}), tmp_path / f"{name}.parquet")
    table = read_table(tmp_path)
    assert table["n"].values.tolist() == [1, 0, 3, 4]
    assert table["n"].missing.tolist() == [False, True, False, False]
    assert table["w"].texts() == ["a", "1", "a", "2"]
    assert table.files == (("1.parquet", 2), ("2.parquet", 2))


def test_a_file_that_is_no_parquet_is_refused(written):
    pytest.importorskip("pyarrow")
    assert "cannot be read as Parquet" in refused(written(b"nothing of the sort", "t.parquet"))
