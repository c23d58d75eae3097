"""Plans as files: what is wrong is told with the file's name on every line."""

import pytest

from hotlap.core.errors import PlanError, StoreError
from hotlap.core.plan import Plan
from hotlap.store.files import load_plan, save_plan

BUSY = Plan().but(kind="loader", workers=2, prefetch=4, persistent=True, precision="bf16", micro_batch=8)


@pytest.mark.parametrize("plan", [Plan(), BUSY])
@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_plan_comes_back_from_its_file(tmp_path, plan, kind):
    path = kind(tmp_path / "plan.toml")
    save_plan(plan, path)
    assert load_plan(path) == plan
    save_plan(Plan(), path)
    assert load_plan(path) == Plan()


def test_every_mistake_in_a_file_is_told_with_its_name(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("hotlap_plan = 1\n[feed]\nworkers = -1\n[nmerics]\n")
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert caught.value.problems == (
        f"{path}: feed.workers=-1 must be a whole number of at least 0",
        f"{path}: no part of a plan is called 'nmerics'; did you mean 'numerics'?",
    )


@pytest.mark.parametrize("text", ["", "words", "hotlap_plan = 99", "[feed]", "hotlap_plan = 1\nfeed = 3"])
def test_text_that_is_no_plan_is_told_with_the_files_name(tmp_path, text):
    path = tmp_path / "some file.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert all(problem.startswith(f"{path}: ") for problem in caught.value.problems)
    assert "\n" not in str(caught.value)


def test_a_binary_file_a_folder_and_no_file_are_told_in_one_line(tmp_path):
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x80\x00\xff\xfe" * 99)
    for path, reason in [
        (garbage, "it is not a text file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "missing.toml", "No such file or directory"),
        (garbage / "below", "Not a directory"),
    ]:
        with pytest.raises(StoreError) as caught:
            load_plan(path)
        assert str(caught.value) == f"cannot read {path}: {reason}"


def test_a_plan_saved_by_an_editor_of_another_system_is_read(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xef\xbb\xbf" + BUSY.to_text().replace("\n", "\r\n").encode())
    assert load_plan(path) == BUSY


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(StoreError, match=r"cannot write .*No such file or directory"):
        save_plan(Plan(), tmp_path / "no" / "plan.toml")
