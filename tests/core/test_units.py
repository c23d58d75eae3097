"""Numbers as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap.core.units import GIB, KIB, MIB, show_bytes, show_rate, show_seconds


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (200 * KIB, "200 KiB"),
        (MIB - 1, "1.0 MiB"),
        (GIB - 1, "1.0 GiB"),
        (3.25 * GIB, "3.2 GiB"),
        (1024 * GIB, "1.0 TiB"),
        (5000 * 1024 * GIB, "5000.0 TiB"),
        (-1536, "-1.5 KiB"),
        (-200 * KIB, "-200 KiB"),
    ],
)
def test_bytes_are_shown_in_the_unit_they_fill(n, text):
    assert show_bytes(n) == text


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (0, "0 s"),
        (2.5e-6, "2.5 µs"),
        (0.000999, "999 µs"),
        (0.0009999, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9999, "1 s"),
        (1.234, "1.23 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 0 s"),
        (75, "1 min 15 s"),
        (3599.6, "1 h 0 min"),
        (7322, "2 h 2 min"),
        (360_000, "100 h 0 min"),
        (-75, "-1 min 15 s"),
        (math.inf, "inf s"),
        (math.nan, "nan s"),
    ],
)
def test_seconds_are_shown_in_the_unit_they_fill(s, text):
    assert show_seconds(s) == text


@given(st.floats(1e-6, 1e7))
def test_seconds_are_never_shown_with_an_exponent(s):
    assert "e" not in show_seconds(s)


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0"),
        (0.1234, "0.123"),
        (12.34, "12.3"),
        (99.99, "100"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (math.nan, "nan"),
    ],
)
def test_rates_have_three_digits_or_whole_thousands(rate, text):
    assert show_rate(rate) == text
