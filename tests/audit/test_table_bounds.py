"""Files of tables that would never end, or would fill the memory, are refused in one line before they do."""

import csv
import gzip
import io
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest

from hotlap.core.errors import DataError
from hotlap.recipes import csv_files, parquet_files
from hotlap.recipes.csv_files import TextFile
from hotlap.recipes.kinds import Cells, infer_column
from hotlap.recipes.tables import column_lines, plain_cells, read_table


@pytest.fixture
def small(monkeypatch):
    """A machine on which so many bytes of memory are free."""

    def free(size):
        for module in (csv_files, parquet_files):
            monkeypatch.setattr(module, "read_memory", lambda: SimpleNamespace(free_bytes=size))

    return free


def refused(path):
    with pytest.raises(DataError) as caught:
        read_table(path)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("name", ["pipe.csv", "pipe.parquet"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / name)
    assert refused(tmp_path / name) == f"cannot read {tmp_path / name}: it is not a regular file"


def test_a_device_is_refused_and_not_read(tmp_path):
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    assert refused(tmp_path / "zero.csv") == f"cannot read {tmp_path / 'zero.csv'}: it is not a regular file"


def test_a_file_larger_than_the_memory_is_refused_unread(tmp_path, small):
    small(4_000_000)
    with (tmp_path / "large.csv").open("wb") as file:
        file.truncate(1_000_001)
    assert refused(tmp_path / "large.csv").endswith("it has 1,000,001 bytes; hotlap reads at most 1,000,000")


def test_a_small_gzip_file_does_not_become_a_large_table(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "SMALL_BYTES", 1000)
    with gzip.open(tmp_path / "bomb.csv.gz", "wb") as file:
        file.write(b"a,b\n" + b"1,2\n" * 1_000_000)
    assert "unpacks to more than" in refused(tmp_path / "bomb.csv.gz")
    monkeypatch.setattr(csv_files, "SMALL_BYTES", 10_000_000)
    assert len(read_table(tmp_path / "bomb.csv.gz")) == 1_000_000


def test_a_parquet_file_that_repeats_a_value_without_end_is_refused(tmp_path, small):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = arrow.DictionaryArray.from_arrays(np.zeros(10_000, np.int32), ["x" * 1_000_000])
    parquet.write_table(arrow.table({"a": texts}), tmp_path / "texts.parquet", compression="zstd")
    assert (tmp_path / "texts.parquet").stat().st_size < 10_000
    small(2_000_000_000)
    assert "holds texts of 9.3 GiB in all; at most 954 MiB are read" in refused(tmp_path / "texts.parquet")
    parquet.write_table(arrow.table({"a": np.zeros(1_000_000, np.int64)}), tmp_path / "zeros.parquet")
    small(2_000_000)
    assert "has 1,000,000 rows and 1,000,000 values, which need 15.3 MiB" in refused(tmp_path / "zeros.parquet")


def test_texts_of_a_parquet_file_are_written_back_in_their_own_type(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    given = arrow.table({"a": ["x", None, "y", ""], "b": arrow.array(["p", "q", None, "p"]).dictionary_encode()})
    parquet.write_table(given, tmp_path / "data.parquet")
    table = read_table(tmp_path / "data.parquet")
    assert [table[name].texts() for name in "ab"] == [["x", "", "y", ""], ["p", "q", "", "p"]]
    assert {name: one.type for name, one in parquet_files.arrow_columns_of([tmp_path / "data.parquet"]).items()} == {
        one.name: one.type for one in given.schema
    }


def test_many_columns_are_named_in_one_pass_and_shown_in_part(tmp_path):
    names = [f"c{number}" for number in range(5000)]
    (tmp_path / "wide.csv").write_text("\n".join([",".join(names), *(",".join("1" * 5000) for _ in range(3))]) + "\n")
    table = read_table(tmp_path / "wide.csv")
    assert len(table.columns) == 5000
    assert column_lines(table)[-1] == "and 4,800 more columns"
    # What asks of each name how often it comes would compare strings 25 million times.
    compared = []

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(1)
            return str.__eq__(self, other)

    TextFile._named(SimpleNamespace(file=tmp_path, has_names=True), list(map(Name, names)), is_given=True)
    assert len(compared) < 20_000


def test_memory_that_runs_out_all_the_same_is_told_in_one_line(tmp_path, monkeypatch):
    def full(*args):
        raise MemoryError

    monkeypatch.setattr(TextFile, "_columns", full)
    (tmp_path / "data.csv").write_text("a,b\n1,2\n")
    assert "needs more memory than there is" in refused(tmp_path / "data.csv")


def test_seconds_that_no_date_has_are_refused_with_their_line(tmp_path):
    (tmp_path / "data.csv").write_text("a,b\n1,2\n9223372036854775,3\n")
    with pytest.raises(DataError, match=r"line 3: '9223372036854775' in column 'a' is no date"):
        read_table(tmp_path / "data.csv", kinds={"a": "date"})


# --- read in blocks, the same cells ---------------------------------------------------------------------

WORDS = [
    "1", "-2", "007", "1.5", "1e3", ".5", "inf", "nan", "", "-", "NA", " 4", "5 ", "x", "Yes", "no", "true",
    "2024-01-05", "2024-01-05 10:00", "1_000", "+7", "9223372036854775807", "9223372036854775808",
    "é", "日本", "a b", "1\u00a0", "  ",
]  # fmt: skip


@pytest.mark.parametrize("quoted", [False, True])
def test_cells_are_those_that_the_file_writes_whatever_the_blocks(tmp_path, monkeypatch, quoted):
    draw = random.Random(0)
    for trial in range(150):
        monkeypatch.setattr(csv_files, "_BLOCK", draw.choice([8, 50, 10**6]))
        monkeypatch.setattr(csv_files, "_ROWS", draw.choice([1, 3, 10**4]))
        names = [f"c{place}" for place in range(draw.randrange(1, 6))]
        rows = [names, *([draw.choice(WORDS) for _ in names] for _ in range(draw.randrange(1, 30)))]
        if quoted:
            rows = [rows[0], *([cell + draw.choice(["", "\n", ",", '"']) for cell in row] for row in rows[1:])]
        # A line with nothing in it is no row.
        rows = [row for row in rows if row != [""]]
        written = io.StringIO(newline="")
        csv.writer(written, lineterminator=draw.choice(["\n", "\r\n"])).writerows(rows)
        path = tmp_path / f"{trial}.csv"
        path.write_bytes(written.getvalue().encode())
        if len(rows) == 1:
            continue
        table = read_table(path, header=True)
        plain = plain_cells(path, table)
        assert [list(cells) for cells in zip(*(plain[name] for name in rows[0]), strict=True)] == rows[1:]


def test_a_column_is_understood_alike_in_parts_and_as_a_list():
    draw = random.Random(1)
    for _ in range(400):
        words = [draw.choice(draw.sample(WORDS, 3)) for _ in range(draw.randrange(1, 30))]
        if draw.random() < 0.6:
            words = [draw.choice(["1", "22", "", "NA", " 3", "4.5"]) for _ in words]
        cut = draw.randrange(len(words))
        parts = [Cells.END.join(part) for part in (words[:cut], words[cut:]) if part]
        one, other = infer_column("a", Cells(parts, len(words))), infer_column("a", words)
        assert (one.kind, one.categories, one.values.dtype) == (other.kind, other.categories, other.values.dtype)
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.present, other.present)


def test_numbers_are_never_held_as_words(monkeypatch):
    monkeypatch.setattr("hotlap.recipes.kinds._Words.of_cells", None)
    column = infer_column("a", Cells([Cells.END.join(["1", "NA", "3"]), "4.5"], 4))
    assert (column.kind, column.texts()) == ("number", ["1.0", "", "3.0", "4.5"])
