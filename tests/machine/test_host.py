"""A battery and a swap whose figures are planted: what a machine says of them, and the doctor."""

from types import SimpleNamespace

import psutil
import pytest

from hotlap.machine import examine
from hotlap.machine.host import SWAPS, battery_charge, swapped_bytes


@pytest.mark.parametrize(
    ("battery", "charge"),
    [
        (None, None),
        (SimpleNamespace(percent=61.5, power_plugged=True), None),
        (SimpleNamespace(percent=61.5, power_plugged=None), None),
        (SimpleNamespace(percent=61.5, power_plugged=False), 0.615),
    ],
)
def test_only_a_machine_that_runs_on_its_battery_has_a_charge(battery, charge, monkeypatch):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert battery_charge() == charge


def test_a_system_that_knows_no_batteries_has_none(monkeypatch):
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    assert battery_charge() is None


def test_pages_in_and_out_of_swap_are_added_up(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 5\npswpin 3\npswpout 4\nzswpin 9\n")
    assert swapped_bytes(tmp_path) % 7 == 0
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 5\n")
    assert swapped_bytes(tmp_path) is None
    assert swapped_bytes(tmp_path / "nowhere") is None


def test_the_doctor_names_a_battery_and_swapping_and_what_to_do(world, card):
    swapped = iter([0, 10 * SWAPS])
    clock = iter([0.0, 2.0])
    report = examine(
        world=world(card("h200"), battery=lambda: 0.62, swapped=lambda: next(swapped), clock=lambda: next(clock))
    )
    found = {problem.key: problem for problem in report.problems}
    assert found["battery"].what == "this machine runs on its battery (62%)"
    assert "plug" in found["battery"].do
    assert found["swapping"].what == "this machine swaps: 10.0 MiB a second go to its disk and back"
    assert report.fit


def test_the_doctor_says_nothing_of_a_page_now_and_then(world, card):
    swapped = iter([0, SWAPS])
    clock = iter([0.0, 2.0])
    report = examine(world=world(card("h200"), swapped=lambda: next(swapped), clock=lambda: next(clock)))
    assert "swapping" not in {problem.key for problem in report.problems}
