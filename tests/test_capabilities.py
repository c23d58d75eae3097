"""docs/capabilities.md names a test for each capability; the test has to be there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| ([\d, -]+) \| .* \| `(tests/[\w/]+\.py)::(\w+)` \|$", (ROOT / "docs/capabilities.md").read_text(), re.M
)


def test_the_list_is_not_empty():
    assert len(ROWS) > 20


@pytest.mark.parametrize(("number", "file", "test"), ROWS, ids=[f"{n} {t}" for n, _, t in ROWS])
def test_the_test_of_a_capability_exists(number, file, test):
    assert f"def {test}(" in (ROOT / file).read_text()
