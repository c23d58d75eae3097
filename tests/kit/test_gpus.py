"""`hotlap gpus --job`: predicted times, what fits, what to take; of a job and of a script."""

import json
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plain import parameters_of
from torch import nn
from typer.testing import CliRunner

import hotlap
from hotlap import Job, Sequences
from hotlap.cli import app
from hotlap.core.units import GIB
from hotlap.kit import gpus as kit
from hotlap.kit.gpus import GpusFound
from hotlap.kit.probe import ProbeResult
from hotlap.machine.catalogue import CATALOGUE, find_gpu
from hotlap.machine.prediction import Work, as_it_is_s, at_best_s
from hotlap.monitor.savings import Saving

LARGE = Work(
    operations=200, launches=190, flops={"tf32": 2e12}, bytes=4e10, narrow_bytes=2e10,
    step_bytes=1e9, least_step_bytes=4e8,
)  # fmt: skip
SMALL = replace(LARGE, flops={"fp32": 1e6}, bytes=1e6, narrow_bytes=5e5, step_bytes=1e5, least_step_bytes=1e5)
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(1600, 10), torch.randint(3, (1600,)))
model = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 3))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(100_000):
    for x, y in DataLoader(data, 32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("hotlap.kit.bench.BLOCK_S", 0.001)
    monkeypatch.setattr("hotlap.kit.bench.BLOCKS", 1)


def found(**changes):
    figures = {"work": LARGE, "samples": 32, "peak_bytes": 2 * GIB, "epoch_updates": 100, "updates": 300}
    return GpusFound(name="planted", device="cpu", **{**figures, **changes})


def of_planted(work):
    account = {"kinds": {}, "layers": {}, "outputs": {}, "peak_bytes": GIB}
    return kit._found("planted", ProbeResult(account=account, laps=[[1, 1]]), work, 0.1)


def rows(one):
    return {row.gpu.key: row for row in one.rows}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 3))


def job(model=None):
    data = (torch.randn(100, 10), torch.randint(3, (100,)))
    made = {"data": data, "loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.AdamW}
    return Job(model=model or network(), **made, batch_size=32, epochs=3, device="cpu")


# --- of real trainings ---------------------------------------------------------------------------------------


def test_a_job_is_counted_and_is_as_before_afterwards():
    model = network()
    before = [one.clone() for one in parameters_of(model)]
    one = hotlap.gpus(job(model), progress=False)
    assert all(map(torch.equal, before, parameters_of(model)))
    # Its first layer needs no gradient for its input.
    assert one.work.flops == {"fp32": 2 * 32 * (2 * 10 * 100 + 3 * 100 * 3)}
    assert (one.samples, one.epoch_updates, one.updates) == (32, 4, 12)
    assert rows(one)["h200"].as_it_is_s == as_it_is_s(one.work, find_gpu("h200"))
    assert one.peak_bytes == hotlap.memory(job(), progress=False).peak_bytes


def test_a_script_has_the_work_of_the_same_job(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = CliRunner().invoke(app, ["gpus", "--json", "--quiet", "--job", "train.py"])
    assert done.exit_code == 0, done.output
    seen, of_job = json.loads(done.stdout), hotlap.gpus(job(), progress=False)
    assert seen["work"]["flops"] == of_job.work.flops
    assert seen["work"]["least_step_bytes"] == of_job.work.least_step_bytes
    assert abs(seen["work"]["operations"] - of_job.work.operations) < 5
    assert (seen["samples"], seen["epoch_updates"], seen["updates"]) == (32, 50, None)
    assert [one["gpu"] for one in seen["gpus"]] == [gpu.key for gpu in CATALOGUE]
    assert "how many epochs the script trains is unknown" in seen["notes"]


def test_the_command_shows_each_gpu_within_80_columns(tmp_path, monkeypatch):
    (tmp_path / "work_here.py").write_text(
        textwrap.dedent("""
            import torch
            from torch import nn
            import hotlap

            model = nn.Linear(10, 3)
            data = (torch.randn(64, 10), torch.randint(3, (64,)))
            optimizer = torch.optim.AdamW
            job = hotlap.Job(
                model=model, data=data, loss=nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=16, epochs=2
            )
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(app, ["gpus", "--quiet", "--job", "work_here:job"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert {gpu.key for gpu in CATALOGUE} <= {word for line in lines for word in line[2:].split()[:1]}
    assert "4 updates an epoch, 8 in all" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "to predict the time of 'train.py' on each GPU: hotlap gpus --job TRAINING"),
        (["--job"], "which training?"),
        (["--job", "--pretend", "t4", "train.py"], "set HOTLAP_PRETEND"),
        (["--job", "nonsense"], "'nonsense' is no training"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(words, said):
    done = CliRunner().invoke(app, ["gpus", *words])
    assert said in str(done.exception)


def test_times_are_of_ordinary_batches_and_memory_is_of_the_longest():
    def counted(lengths):
        texts = Sequences({"x": [torch.ones(n, dtype=torch.long) for n in lengths]}, columns={"y": torch.zeros(64)})
        model = nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 1))
        forward = lambda model, batch: (model(batch["x"]).mean((1, 2)), batch["y"])  # noqa: E731
        made = {"loss": nn.MSELoss(), "optimizer": torch.optim.AdamW, "batch_size": 4, "epochs": 1, "device": "cpu"}
        return hotlap.gpus(Job(model=model, data=texts, forward=forward, **made), progress=False)

    mixed, long = counted([4] * 60 + [128] * 4), counted([128] * 64)
    assert mixed.work.total_flops < long.work.total_flops
    assert mixed.peak_bytes == long.peak_bytes


def test_what_a_script_evaluates_between_updates_is_no_work_of_them(tmp_path):
    evaluates = "\n        if (made := globals().get('made', 0) + 1) % 2 == 0:\n            with torch.no_grad():\n"
    evaluates += "                for x, _ in DataLoader(data, 100):\n                    model(x)"
    (tmp_path / "plain.py").write_text(SCRIPT)
    (tmp_path / "evaluates.py").write_text(SCRIPT.rstrip() + evaluates)
    plain, evaluating = (hotlap.gpus(name, progress=False).work for name in ("plain.py", "evaluates.py"))
    assert evaluating.total_flops == plain.total_flops


def test_recurrent_layers_that_the_cpu_splits_are_noted():
    assert any("recurrent" in note for note in of_planted(replace(LARGE, unfused=True)).notes)
    assert not any("recurrent" in note for note in of_planted(LARGE).notes)


# --- of planted work -----------------------------------------------------------------------------------------


def test_the_table_says_what_a_gpu_lacks_and_which_were_never_measured():
    lines = {line[2:].split()[0]: line for line in found().summary().splitlines() if line[2:].strip()}
    assert lines["p100"].endswith("no kernels in default builds of torch")
    assert lines["t4"].endswith("fp16")  # it has no bf16
    assert lines["l4"].endswith("bf16")
    marked = {gpu.key for gpu in CATALOGUE if lines[gpu.key].startswith("?")}
    assert marked == {gpu.key for gpu in CATALOGUE} - {"h200"}
    assert "?          never measured: at least that far off" in found().summary()
    assert max(map(len, found().summary().splitlines())) <= 80


@pytest.mark.parametrize(
    ("flops", "shown"), [(1.2e6, "1.2 MFLOP"), (4.104e11, "410 GFLOP"), (9.999e11, "1 TFLOP"), (5e15, "5,000 TFLOP")]
)
def test_arithmetic_is_shown_in_three_digits(flops, shown):
    assert f" {shown}, " in found(work=replace(LARGE, flops={"fp32": flops})).summary()


@pytest.mark.parametrize(
    ("lengths", "title"), [((100, 300), "whole run"), ((100, None), "epoch"), ((None, None), "step")]
)
def test_times_are_of_the_longest_known_part(lengths, title):
    one = found(epoch_updates=lengths[0], updates=lengths[1])
    head = next(line for line in one.summary().splitlines() if "GPU" in line)
    assert head.split("  ")[-1].strip() == title
    assert max(map(len, one.summary().splitlines())) <= 80


def test_a_measured_step_corrects_the_times_as_it_is_on_all_gpus():
    plain, corrected = rows(found()), rows(found(here="h200", step_s=0.03, correction=2.0))
    for key, row in corrected.items():
        assert row.as_it_is_s == 2 * plain[key].as_it_is_s
        assert row.at_best_s == plain[key].at_best_s
    assert "* here     30 ms were measured" in found(here="h200", step_s=0.03, correction=2.0).summary()


def test_a_gpu_that_is_here_is_the_one_that_corrects_unless_another_is_pretended(monkeypatch):
    seen = ProbeResult(
        device="cuda:1", peak_bytes=GIB, account={"kinds": {}, "layers": {}, "outputs": {}}, laps=[[1, 1]]
    )
    gpus = (SimpleNamespace(index=0, model="t4"), SimpleNamespace(index=1, model="h200"))
    here = SimpleNamespace(gpus=gpus, pretended=None)
    monkeypatch.setattr(kit.machine, "detect", lambda: here)
    step_s = 3 * as_it_is_s(LARGE, find_gpu("h200"))
    one = kit._found("planted", seen, LARGE, step_s)
    assert (one.here, one.step_s) == ("h200", step_s)
    assert one.correction == pytest.approx(3)
    here.pretended = find_gpu("t4")
    assert kit._found("planted", seen, LARGE, step_s).correction == 1


def test_what_needs_too_much_memory_does_not_fit():
    one = found(peak_bytes=15 * GIB)
    assert {key for key, row in rows(one).items() if not row.fits} == {"p100", "v100", "t4", "rtx3080"}
    assert one.least.gpu.key == "l4"
    whole = found(peak_bytes=200 * GIB)
    assert whole.least is None
    assert whole.recommended is None
    assert whole.to_dict()["least"] is None
    assert "least      does not fit: needs 200 GiB" in whole.summary()


def test_a_tenth_of_the_memory_stays_free():
    usable = find_gpu("rtx3080").usable_bytes
    assert rows(found(peak_bytes=int(0.9 * usable)))["rtx3080"].fits
    assert not rows(found(peak_bytes=int(0.9 * usable) + 1))["rtx3080"].fits


def test_what_lowers_the_peak_is_listed_where_a_smaller_gpu_then_trains():
    ways = (
        Saving(what="micro-batches of 16, 2 accumulated", predicted_bytes=8 * GIB),
        Saving(what="all 12 blocks checkpointed", predicted_bytes=14 * GIB),
        Saving(what="bf16 autocast", predicted_bytes=12 * GIB),
        Saving(what="64 tokens in place of 128", predicted_bytes=GIB, changes="it changes what the model learns"),
        Saving(what="checkpointing", why_not="no blocks"),
    )
    one = found(peak_bytes=16 * GIB, savings=ways)
    assert one.least.gpu.key == "l4"
    smaller = {what: row.gpu.key for what, row in one.smaller}
    assert smaller == {"micro-batches of 16, 2 accumulated": "rtx3080", "bf16 autocast": "t4"}
    assert "with bf16 autocast: t4, 12.0 GiB predicted" in one.summary()


def test_the_recommended_gpu_has_head_room_and_is_nearly_as_fast_as_the_fastest():
    assert found(work=SMALL).recommended.gpu.key == "rtx3080"  # launches bound it on all GPUs alike
    assert found(work=SMALL, peak_bytes=9 * GIB).recommended.gpu.key == "t4"
    large = found().recommended
    fastest_s = min(row.at_best_s for row in found().rows)
    assert large.at_best_s <= 1.5 * fastest_s
    assert all(
        at_best_s(LARGE, gpu) > 1.5 * fastest_s
        for gpu in CATALOGUE
        if gpu.has_kernels and gpu.fp16_flops < large.gpu.fp16_flops
    )
    tight = found(peak_bytes=int(find_gpu("h200").usable_bytes / 1.2))
    assert tight.least.gpu.key == "h200"
    assert tight.recommended is None


def test_arithmetic_in_fp64_is_noted():
    assert any("fp64" in note for note in of_planted(replace(LARGE, flops={"fp64": 1e12})).notes)
