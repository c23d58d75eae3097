"""The view in a terminal of any size: what it says, and that it fits."""

from pathlib import Path

import pytest

from hotlap.monitor.screen import BARS, PLAIN, View, lines, spark
from hotlap.monitor.trainings import Training

HOST = {
    "cores": 16, "cores_busy": 3.2, "ram_used_bytes": 21 * 2**30, "ram_bytes": 128 * 2**30, "shm_used_bytes": 2**20,
    "shm_bytes": 64 * 2**30, "disk_used_bytes": 2**30, "disk_bytes": 41 * 2**30,
}  # fmt: skip
CARD = {
    "index": 0, "name": "NVIDIA H200", "busy": 0.97, "memory_used_bytes": 62 * 2**30, "memory_bytes": 140 * 2**30,
    "power_w": 412.0, "power_limit_w": 700.0, "sm_mhz": 1650.0, "most_sm_mhz": 1980.0, "temperature_c": 54.0,
    "throttled": [], "pcie_in_bytes_per_s": 2.0**20,
}  # fmt: skip
STATE = {
    "pid": 4711, "at": 1e9, "kind": "fit", "name": "Net", "device": "cuda:0", "doing": "training", "step": 1200,
    "steps": 5000, "unit": "steps", "epoch": 3, "epochs": 10, "steps_per_s": 134.2, "samples_per_s": 34304.0,
    "left_s": 200.0, "elapsed_s": 61.0, "losses": [[step, 100.0 - step] for step in range(50)],
    "metrics": {"step": 1000, "epoch": 2, "train_loss": 0.52, "valid_loss": 0.61, "lr": 0.1}, "is_tuning": True,
    "bound": {"by": "feeding", "why": "the host waits for batches 70 % of the time", "answer": "add workers"},
    "headway": {"line": "200 TFLOPS · 20 % of the peak (MFU)"},
    "ledger": [
        {"step": 40 + n, "outcome": "kept", "what": f"move {n}", "ratio": 1.5, "why": "same maths"} for n in range(5)
    ],
    "sample": {
        "gpus": [CARD], "host": HOST,
        "torch": {"allocated_bytes": 2**30, "reserved_bytes": 3 * 2**30, "peak_bytes": 2**31},
    },
}  # fmt: skip


def training(status="running", folder="runs/Net-1", **changes):
    return Training(folder=Path(folder), status=status, state={**STATE, **changes})


def view(*trainings, gpus=(CARD,), **changes):
    return View(**{"at": 1e9, "gpus": [*gpus], "gpu_why": None, "host": HOST, "trainings": [*trainings], **changes})


def text(*args, width=80, height=None, **changes):
    return [line.text for line in lines(view(*args, **changes), width, height)]


def test_it_shows_the_gpu_the_host_and_all_of_a_training():
    shown = text(training())
    assert shown[1:] == [
        "GPU 0  NVIDIA H200  97 % busy  62.0 GiB of 140 GiB  412 of 700 W",
        "       1,650 of 1,980 MHz  54 °C  PCIe 1.0 MiB/s in",
        "host   3.2 of 16 cores  RAM 21.0 GiB of 128 GiB  shm 1.0 MiB of 64.0 GiB",
        "       disk 40.0 GiB free",
        "",
        "runs/Net-1  pid 4711  fit  Net on cuda:0",
        "  training   1,200 of 5,000 steps  ━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 24 %  epoch 3 of 10",
        "  pace       134 steps/s  34,304 samples/s  3 min 20 s left  1 min 1 s so far",
        "             tuning",
        "  loss       51  " + spark([100.0 - step for step in range(50)], 63),
        "  last       train_loss 0.52  valid_loss 0.61",
        "  memory     1.0 GiB in tensors, 2.0 GiB at the peak, 80.0 GiB of the GPU free",
        "  bound by   feeding: the host waits for batches 70 % of the time",
        "             → add workers",
        "  reaches    200 TFLOPS · 20 % of the peak (MFU)",
        "  ledger     42 kept  move 2 1.5x: same maths",
        "             43 kept  move 3 1.5x: same maths",
        "             44 kept  move 4 1.5x: same maths",
    ]


@pytest.mark.parametrize("height", [12, 24, 50])
@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_it_fits_every_terminal_and_says_what_it_leaves_out(width, height, count):
    shown = text(*[training(folder=f"runs/{'long-' * 30}{n}") for n in range(count)], width=width, height=height)
    assert len(shown) <= height
    assert max(map(len, shown)) <= width
    heads = sum(line.startswith("runs/") for line in shown)
    assert heads >= min(count, 1)
    if heads < count:
        assert shown[-1].startswith(f"and {count - heads} more training")


def test_with_little_room_a_training_shows_less_of_its_ledger():
    whole = text(training(), training())
    less = text(training(), training(), height=len(whole) - 1)
    assert [sum(move in line for line in whole) for move in ("move 3", "move 4")] == [2, 2]
    assert [sum(move in line for line in less) for move in ("move 3", "move 4")] == [0, 2]


def test_lowered_clocks_are_named():
    shown = lines(view(gpus=[{**CARD, "throttled": ["heat", "power limit"]}]), 100)
    (line,) = [line for line in shown if "clocks lowered: heat, power limit" in line.text]
    assert line.style == "yellow"


def test_processes_on_a_gpu_are_counted():
    assert "       1,650 of 1,980 MHz  54 °C  PCIe 1.0 MiB/s in  2 processes" in text(gpus=[{**CARD, "others": 2}])
    assert any(line.endswith("  1 process") for line in text(gpus=[{**CARD, "others": 1}]))


def test_a_note_is_whole_in_any_width():
    note = "a note of many words " * 10
    assert " ".join(" ".join(text(note=note, width=40)[-8:]).split()).endswith(note.strip())


def test_without_a_gpu_it_says_why():
    assert "GPU    none to be seen: no driver" in text(gpus=(), gpu_why="no driver")


def test_figures_that_the_driver_lacks_are_left_out():
    assert text(gpus=[{"index": 1, "name": "old"}], host={})[1:] == ["GPU 1  old"]


def test_an_end_a_kill_and_silence_are_told_apart():
    assert "  ended      after all steps · 1,200 of 5,000 steps · 1 min 1 s" in text(
        training("ended", stopped="after all steps")
    )
    killed = text(training("killed"))
    assert any(line.startswith("  gone       its process was killed or crashed, last seen") for line in killed)
    assert "             go on with: hotlap resume runs/Net-1" in killed
    assert any("nothing heard for" in line for line in text(training("silent")))
    assert any(line.startswith("  evaluating 1,200 of") for line in text(training(doing="evaluating")))


def test_on_the_cpu_the_memory_is_that_of_the_host():
    shown = text(training(device="cpu", sample={"host": {**HOST, "own_ram_bytes": 2**29}}))
    assert "  memory     512 MiB of RAM, 107 GiB free" in shown


@pytest.mark.parametrize("wrong", [None, "x", [], {}, [3], [[1]], [["a", "b"]], True, {"by": 3}, -1.5])
@pytest.mark.parametrize("name", sorted(set(STATE) - {"pid", "at"}))
def test_whatever_a_strangers_state_holds_it_is_shown(name, wrong):
    assert text(training(**{name: wrong}))


def test_names_cannot_drive_the_terminal():
    shown = text(training(folder="runs/\x1b[2J", name="\x07Net", metrics={"\x1b]0;x\x07": 1.0}))
    assert all(line.isprintable() for line in shown)


def test_of_a_process_from_outside_it_shows_what_can_be_seen():
    process = {
        "pid": 12, "command": "python train.py", "seconds": 75.0, "cores_busy": 1.5, "ram_bytes": 2**30, "threads": 9,
        "children": 2, "children_ram_bytes": 2**29, "gpus": [0],
    }  # fmt: skip
    shown = text(process=process, note="not a training that hotlap samples")
    assert shown[-8:] == [
        "", "process 12  python train.py", "  running    for 1 min 15 s, 9 threads", "  work       1.50 cores",
        "  memory     1.0 GiB of RAM, 2 child processes with 512 MiB", "  on         GPU 0", "",
        "not a training that hotlap samples",
    ]  # fmt: skip


def test_a_curve_has_the_mean_of_each_part():
    assert spark([], 10) == ""
    assert spark([1.0], 10) == BARS[0]
    assert spark([0.0, 1.0], 10) == BARS[0] + BARS[-1]
    assert spark([*range(80)], 8) == BARS
    assert spark([3.0] * 100, 5) == BARS[0] * 5


def test_for_an_ascii_terminal_every_sign_has_one_of_ascii():
    shown = "".join(text(training(), gpus=[{**CARD, "throttled": ["heat"]}])).translate(PLAIN)
    assert shown.isascii()


@pytest.mark.parametrize("odd", [None, -1e18, 1e-300, True, "text", [], {}, [[1]], "\x1b[31m" * 100], ids=repr)
def test_values_of_any_kind_in_a_strangers_state_end_no_view(odd):
    of_torch = dict.fromkeys(STATE["sample"]["torch"], odd)
    samples = [odd, {"gpus": odd, "torch": odd, "host": odd}, {"gpus": [odd]}, {"gpus": [CARD], "torch": of_torch}]
    samples += [{"host": {**HOST, "own_ram_bytes": 1, "ram_used_bytes": odd}}]
    entry = dict.fromkeys(("step", "outcome", "what", "why", "ratio"), odd)
    changes = [{name: odd} for name in STATE if name not in ("pid", "at")] + [{"sample": sample} for sample in samples]
    changes += [{"losses": [odd, [1, odd]]}, {"ledger": [odd, entry]}, {"bound": {"by": "feeding", "why": odd}}]
    for change in changes:
        shown = text(training(**change), height=24)
        assert len(shown) <= 24
        assert all(len(line) <= 80 and line.isprintable() for line in shown)
