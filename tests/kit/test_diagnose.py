"""`hotlap diagnose`: planted problems are found with their line, their cost and a change that can be applied."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

import hotlap
from hotlap import Job
from hotlap.cli import app
from hotlap.core.errors import HotlapError
from hotlap.kit import calls, other_ways, remedies
from hotlap.kit.call_watch import CallWatch
from hotlap.kit.diagnose import Tried, diagnose_script, findings_of
from hotlap.kit.in_float32 import BLOCK, LEAST_BLOCKS, InFloat32
from hotlap.kit.line_sampler import FEEDING, OWN, TORCH, LineSampler, place_of
from hotlap.kit.observed import EvaluationSeen, LineCost, Observed, Pair
from hotlap.kit.probe import ProbeResult
from hotlap.monitor import aftermath
from hotlap.monitor.findings import Findings
from hotlap.script.running import Target

# --- a script with several problems ------------------------------------------------------------------------

MANY = """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 240
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randn(64), index % 10

def write_log(file, text):
    file.write(text)
    file.flush()
    time.sleep(0.02)

def accuracy(model, x):
    model.eval()
    right = model(x).argmax(1)
    model.train()
    return right

model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Samples(), batch_size=8)
image, valid = torch.randn(1_000_000), torch.randn(50, 64).double()
losses = []
with open("log.txt", "w") as file:
    for epoch in range(30):
        for step, (x, y) in enumerate(loader):
            image = image.clone().clone()
            loss = nn.functional.cross_entropy(model(x.double()), y)
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
            losses.append(loss)
            write_log(file, "an update")
        accuracy(model, valid)
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory, looks_are_forks):
    folder = tmp_path_factory.mktemp("many")
    (folder / "many.py").write_text(MANY)
    with pytest.MonkeyPatch.context() as patch, looks_are_forks():
        patch.chdir(folder)
        found = diagnose_script(Target(path="many.py"), seconds=300, say=lambda _: None)
        yield {one.name: one for one in found.found}, found, folder


def line_of(text):
    return next(at for at, line in enumerate(MANY.split("\n"), 1) if text in line)


def test_a_loader_that_sleeps_is_found_with_the_line_that_sleeps(many):
    feeding = many[0]["feeding"]
    assert feeding.where == f"many.py:{line_of('time.sleep(0.002)')}"
    assert feeding.cost_s >= 900 * 0.016  # eight samples each of 900 updates
    assert "+loader = DataLoader(Samples(), batch_size=8, num_workers=" in feeding.change


def test_a_log_is_found_with_the_line_that_waits_and_the_diff_is_for_the_loop(many):
    logging = many[0]["logging"]
    assert logging.where == f"many.py:{line_of('time.sleep(0.02)')}"
    assert logging.cost_s >= 900 * 0.004  # of 0.02; looks at the stack are few, and fall as they fall
    assert "+            if step % 50 == 0:" in logging.change
    assert '+                write_log(file, "an update")' in logging.change


def test_losses_with_their_graphs_are_found_with_their_list(many):
    kept = many[0]["graphs-kept"]
    assert kept.where == f"many.py:{line_of('losses.append(loss)')}"
    assert kept.cost_s is None
    assert "+            losses.append(loss.detach())" in kept.change


def test_a_graph_that_no_second_pass_uses_is_found(many):
    assert many[0]["graph-retained"].where == f"many.py:{line_of('retain_graph')}"
    assert "+            loss.backward()" in many[0]["graph-retained"].change


def test_what_endangers_the_run_comes_first_and_costs_are_for_the_whole_training(many):
    _, found, _ = many
    assert found.found[0].name == "graphs-kept"
    assert found.over == "900 updates"
    assert found.bound.startswith("bound by ")


def test_an_evaluation_that_records_a_graph_is_found_and_the_diff_decorates_its_function(many):
    evaluation = many[0]["evaluation-gradients"]
    assert evaluation.where == f"many.py:{line_of('right = model(x)')}"
    assert "every 30 updates, in eval mode" in evaluation.evidence
    assert "+@torch.no_grad()\n    def accuracy(model, x):" in evaluation.change.replace("\n def", "\n    def")


def test_a_diagnosis_leaves_the_folder_as_it_was(many):
    assert [one.name for one in many[2].iterdir()] == ["many.py"]


def test_workers_that_are_killed_are_the_finding(tmp_path):
    Path("dies.py").write_text("""
import os, signal, torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 40 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(4)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Samples(), batch_size=4, num_workers=1)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""")
    found = diagnose_script(Target(path="dies.py"), seconds=300, say=lambda _: None)
    assert [one.name for one in found.found] == ["workers-die"]
    assert found.found[0].where == "dies.py:15"
    assert "+loader = DataLoader(Samples(), batch_size=4, num_workers=0)" in found.found[0].change


TRAINS = """
import os, time, torch
{first}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(400):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    {last}
"""


def test_a_variable_that_the_script_sets_itself_is_found_by_a_run_without_it():
    name = '"CUDA_LAUNCH_BLOCKING"'
    waits = f"time.sleep(0.02 if {name} in os.environ else 0.005)"  # long enough to be timed without it, too
    Path("sets.py").write_text(TRAINS.format(first=f'os.environ[{name}] = "1"', last=waits))
    found = diagnose_script(Target(path="sets.py"), seconds=300, say=lambda _: None)
    (one,) = [one for one in found.found if one.name == "variables"]
    assert one.cost_s >= 400 * 0.01


def test_what_there_was_no_time_to_look_for_is_a_note():
    Path("slow.py").write_text(TRAINS.format(first="", last="time.sleep(0.05)"))  # 23 updates take longer than it may
    found = diagnose_script(Target(path="slow.py"), seconds=1, say=lambda _: None)
    assert any("no time left to look for copies and waits, memory that grows" in one for one in found.notes)
    assert any("--seconds" in one for one in found.notes)


def test_a_script_that_does_not_fit_in_memory_is_told_what_finds_the_cause(tmp_path):
    Path("large.py").write_text("raise MemoryError('no room for 80 GiB')\n")
    (found,) = diagnose_script(Target(path="large.py"), seconds=5, say=lambda _: None).found
    assert (found.name, found.evidence) == ("out-of-memory", ("no room for 80 GiB",))
    assert "hotlap memory large.py" in found.change


def test_a_script_that_fails_otherwise_shows_its_error(tmp_path):
    Path("fails.py").write_text("raise KeyError('label')\n")
    done = CliRunner().invoke(app, ["diagnose", "--quiet", "fails.py"])
    assert isinstance(done.exception, HotlapError)
    assert str(done.exception).startswith("fails ended by an error: KeyError: 'label' (fails.py:1)")


# --- jobs and names ----------------------------------------------------------------------------------------


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((8,), float(index), dtype=torch.float64), index % 2


def test_a_job_is_diagnosed_and_is_as_before(monkeypatch):
    monkeypatch.setattr("hotlap.kit.bench.BLOCK_S", 0.001)
    monkeypatch.setattr("hotlap.kit.bench.BLOCKS", 1)
    monkeypatch.setattr("hotlap.kit.diagnose.TIMED_S", 0.1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).double()
    before = [p.clone() for p in model.parameters()]
    job = Job(
        model=model,
        data=DataLoader(Slow(), batch_size=8),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        epochs=5,
        device="cpu",
    )
    found = hotlap.diagnose(job, progress=False)
    assert found.found[0].name == "feeding"
    assert found.over == "40 updates"
    assert found.found[0].cost_s >= 40 * 0.012
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_folder_is_a_run_and_a_number_is_a_process(tmp_path, monkeypatch):
    asked = []
    for name in ("diagnose_run", "diagnose_process"):
        monkeypatch.setattr(aftermath, name, lambda one: asked.append(one) or Findings(name="seen"))
    Path("runs").mkdir()
    for one in ("runs", ["runs"], Path("runs"), "4711", ["4711"], 4711):
        calls.diagnose(one)
    assert asked == [Path("runs"), Path("runs"), Path("runs"), 4711, 4711, 4711]


def test_a_training_that_is_not_there_is_one_line():
    done = CliRunner().invoke(app, ["diagnose", "nothing.py"])
    assert isinstance(done.exception, HotlapError)
    assert str(done.exception) == "there is no file 'nothing.py'"


# --- judging ------------------------------------------------------------------------------------------------

SEEN = ProbeResult(
    updates=100, laps=[[1.0, 3200]], lap_updates=[100], samples_an_update=32, batch_size=32, samples=3200, loader=0
)
FINE = Observed(updates=100, step_s=0.01, total_updates=1000)


def judged(tried=None, seen=SEEN, **observed):
    return findings_of("train", seen, replace(FINE, **observed), tried or Tried(), "train.py --epochs 3")


def test_a_training_without_problems_is_one_line_with_what_bounds_it():
    assert " ".join(judged().summary().split()) == (
        "train: nothing wrong found; bound by computing: the step takes 100 % of the time; 10 ms an update"
    )


def test_float64_costs_its_share_of_what_an_update_computes():
    (found,) = judged(wide=Pair(now_s=0.008, then_s=0.004), feeding_s=0.0009).found
    assert found.name == "float64"
    assert found.cost_s == pytest.approx(0.5 * (0.01 - 0.0009) * 1000)


def test_float64_costs_what_whole_updates_take_longer_if_they_were_tried():
    (found,) = judged(wide=Pair(now_s=0.008, then_s=0.004), wide_updates=Pair(now_s=0.02, then_s=0.016)).found
    assert found.cost_s == pytest.approx(0.2 * 0.01 * 1000)
    assert found.evidence == ("an update takes 20 ms, and 16 ms in float32",)


def test_a_larger_batch_comes_after_a_remedy_that_leaves_the_training_as_it_is():
    tried = Tried(own_sample_s=0.01 / 32, larger=256, larger_sample_s=0.0001)
    log = [LineCost(where="a.py:3", update_s=0.002)]
    assert [one.name for one in judged(tried, own=log).found] == ["own-code", "small-batch"]
    small = [LineCost(where="a.py:3", update_s=0.0005)]
    assert [one.name for one in judged(tried, own=small).found] == ["small-batch", "own-code"]


def test_tries_that_there_was_no_time_for_are_a_note():
    (note,) = judged(Tried(left_out=("to try batches of 256",))).notes
    assert note == "there was no time left to try batches of 256: give it more with --seconds"


def test_float64_that_costs_nothing_is_no_finding():
    assert judged(wide=Pair(now_s=0.004, then_s=0.005)).found == ()


def test_a_model_on_the_cpu_beside_a_gpu_that_works_is_a_finding():
    (found,) = judged(on_cpu=Pair(now_s=0.010, then_s=0.001)).found
    assert (found.name, found.cost_s) == ("on-cpu", pytest.approx(9.0))


def test_one_of_several_gpus_costs_at_most_what_the_others_could_do():
    (found,) = judged(gpus=4).found
    assert (found.name, found.cost_s) == ("one-gpu", pytest.approx(7.5))


def test_waits_for_the_gpu_are_listed_with_their_lines():
    waits = [LineCost(where="a.py:3", what=".item()", update_s=0.004, times=12)]
    (found,) = judged(waits=waits).found
    assert (found.name, found.where, found.cost_s) == ("synchronising", "a.py:3", pytest.approx(4.0))
    assert found.evidence == ("a.py:3: .item() 12 times, up to 4 ms",)


def test_a_larger_batch_is_a_finding_only_beyond_what_a_log_costs():
    tried = Tried(own_sample_s=0.01 / 32, larger=256, larger_sample_s=0.0001)  # 3.2 ms for those of an update
    (found,) = judged(tried).found
    assert (found.name, found.cost_s) == ("small-batch", pytest.approx(6.8))
    assert "your choice" in found.change
    log = [LineCost(where="a.py:3", update_s=0.007)]
    assert [one.name for one in judged(tried, own=log).found] == ["own-code"]
    first, second = judged(tried, wide=Pair(now_s=0.008, then_s=0.004)).found
    assert [(one.name, one.cost_s) for one in (first, second)] == [
        ("float64", pytest.approx(5.0)),
        ("small-batch", pytest.approx(3.4)),
    ]


def test_a_variable_costs_what_an_update_without_it_saves():
    names = ["CUDA_LAUNCH_BLOCKING=1"]
    (found,) = judged(Tried(bare_step_s=0.004), variables=names).found
    assert (found.name, found.cost_s) == ("variables", pytest.approx(6.0))
    assert found.change == "unset CUDA_LAUNCH_BLOCKING"
    harmless = judged(Tried(bare_step_s=0.0099), variables=names)
    assert harmless.found == ()
    assert harmless.notes == ("CUDA_LAUNCH_BLOCKING=1: costs nothing that hotlap could measure",)


def test_an_evaluation_costs_what_its_calls_take_longer_with_gradients():
    seen = EvaluationSeen(seconds=2.0, every=100, with_grad_s=1.5, calls=Pair(now_s=0.3, then_s=0.1), where="a.py:9")
    (found,) = judged(evaluation=seen).found
    assert (found.name, found.cost_s) == ("evaluation-gradients", pytest.approx(10.0))
    assert judged(evaluation=replace(seen, with_grad_s=0.0)).found == ()


def test_a_slow_first_epoch_is_a_finding():
    (found,) = judged(first_epoch=["steps became slower"], slower_s=3.0, epoch_updates=250).found
    assert (found.name, found.cost_s) == ("first-epoch", 12.0)


def test_memory_that_grows_too_little_to_matter_is_a_note():
    held = {"line": "a.py:4 in main", "bytes_an_update": 4, "tensors_an_update": 1.0, "holder": "means of main"}
    little, much = judged(held=[held]), judged(held=[{**held, "bytes_an_update": 2**20}])
    assert (little.found, len(little.notes)) == ((), 1)
    assert (much.found[0].name, much.found[0].where, much.found[0].cost_s) == ("memory-grows", "a.py:4", None)
    assert much.found[0].grows_bytes == 2**20


# --- the lines that take the time --------------------------------------------------------------------------


class Seeing(Dataset):
    def __init__(self):
        self.place = None

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.place, _ = place_of(sys._getframe())
        return index


class Inside(nn.Module):
    def forward(self, x):
        self.place, _ = place_of(sys._getframe())
        return x


def test_a_line_is_known_for_loading_computing_or_the_scripts_own():
    data, module = Seeing(), Inside()
    list(DataLoader(data))
    module(torch.zeros(1))
    own, _ = place_of(sys._getframe())
    assert [data.place.part, module.place.part, own.part] == [FEEDING, TORCH, OWN]
    assert own.file == data.place.file == __file__


def test_a_line_is_known_with_the_library_and_the_line_of_the_loop_that_lead_there():
    seen = []
    sorted([0], key=lambda _: seen.append(place_of(sys._getframe(), sys._getframe(1).f_code)))
    (place, through) = seen[0]
    assert (place.caller, through) == ((__file__, place.line), "")


def test_a_line_that_saves_by_torch_computes_nothing():
    class File:
        def write(self, data):
            self.seen = place_of(sys._getframe(1))
            return len(data)

        def flush(self):
            pass

    file = File()
    torch.save({"weight": torch.zeros(3)}, file)
    place, through = file.seen
    assert (place.file, place.part, through) == (__file__, OWN, "torch.save")


def test_the_sampler_finds_the_line_that_takes_the_time():
    import threading

    sampler = LineSampler(threading.get_ident(), every_s=0.001)
    sampler.start()
    until = time.monotonic() + 30
    while sampler.watched_s < 0.2 and time.monotonic() < until:
        time.sleep(0.01)  # here
    sampler.stop()
    most, _ = max(sampler.seconds.items(), key=lambda row: row[1])
    assert remedies.text_at(f"{most.file}:{most.line}").endswith("# here")


# --- calls of torch ------------------------------------------------------------------------------------------


def copies_of(work):
    watch = CallWatch()
    with watch:
        work()
        watch.update_ends()
    return [(one.what, one.times) for one in watch.copies()]


def test_a_copy_is_needless_if_neither_side_changes_after_it():
    image = torch.randn(100_000)
    assert copies_of(lambda: image.clone()) == [(".clone()", 1.0)]
    assert copies_of(lambda: image.clone().add_(1)) == []
    assert copies_of(lambda: (image.clone(), image.add_(1))) == []


def test_a_change_of_type_a_small_copy_and_a_copy_of_a_weight_are_no_needless_copies():
    image, weight = torch.randn(100_000), nn.Parameter(torch.randn(100_000))
    assert copies_of(lambda: image.to(torch.float64)) == []
    assert copies_of(lambda: torch.zeros(10).clone()) == []
    assert copies_of(lambda: weight.clone()) == []


def test_a_kept_graph_is_reported_unless_another_backward_pass_follows():
    def backward(times):
        watch = CallWatch()
        with watch:
            loss = nn.Parameter(torch.ones(2)).sum()
            for _ in range(times):
                loss.backward(retain_graph=True)
            watch.update_ends()
        return len(watch.retained())

    assert (backward(1), backward(2)) == (1, 0)


def test_calls_that_serve_a_reading_alone_are_those_without_a_graph():
    weight, watch = nn.Parameter(torch.ones(1000)), CallWatch()
    with watch:
        loss = weight.sum()  # one
        norm = weight.detach().norm()  # two
        watch.update_ends()
    assert (norm > 0, loss.requires_grad) == (True, True)
    here = sys._getframe().f_code.co_firstlineno
    assert watch.readings_at(__file__, here + 3) == 0
    assert watch.readings_at(__file__, here + 4) > 0


def test_time_without_a_core_is_no_time_of_work_on_the_cpu():
    pair = other_ways.in_turn(lambda: time.sleep(0.05), lambda: None)
    assert pair.now_s < 0.04


def test_a_float64_training_runs_in_float32_and_back_and_the_script_sees_float64():
    model = nn.Sequential(nn.LSTM(4, 3, batch_first=True)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    narrow, kinds, states = InFloat32([model], optimizer), [], []
    assert InFloat32.applies([model])
    for _ in range(2 * LEAST_BLOCKS * (BLOCK + 1)):
        outputs, (hidden, _) = model(torch.randn(2, 5, 4).double())
        loss = nn.functional.mse_loss(outputs, torch.zeros(2, 5, 3).double()) + hidden.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.dtype == torch.float64
        kinds.append(next(model.parameters()).dtype)
        states += [(narrow.is_on, one["exp_avg"].dtype) for one in optimizer.state.values()]
        narrow.update_took(1.0 if narrow.is_on else 3.0)
    assert set(kinds) == {torch.float64, torch.float32}
    assert set(states) == {(False, torch.float64), (True, torch.float32)}
    assert narrow.pair() == Pair(now_s=3.0, then_s=1.0)
    assert next(model.parameters()).dtype == torch.float64


def test_other_ways_leave_gradients_and_weights_alone():
    model, x = nn.Linear(4, 2).double(), torch.randn(3, 4).double()
    before = model.weight.clone()
    pairs = [other_ways.in_float32(model, (x,), {}), other_ways.without_gradients(model, (x,), {})]
    assert all(one.now_s > 0 and one.then_s > 0 for one in pairs)
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)
    assert model.weight.dtype == torch.float64


# --- changes as diffs ------------------------------------------------------------------------------------------

SOURCE = """loader = DataLoader(data, batch_size=8,
    num_workers=0,
)
for epoch in range(3):
    for x in loader:
        x = torch.tensor(x)
        loss = model(x)
        loss.backward()
        log(loss)
    for x in valid:
        total += model(x)
"""


@pytest.fixture
def source(tmp_path):
    Path("a.py").write_text(SOURCE)


def changed(diff):
    """The lines that a diff takes out and puts in, and none of its head."""
    return [line for line in diff.split("\n")[2:] if line[:1] in "+-"]


def test_an_argument_is_set_where_it_stands_or_at_the_end(source):
    assert changed(remedies.argument_set("a.py:1", "num_workers", "2")) == [
        "-    num_workers=0,",
        "+    num_workers=2,",
    ]
    assert changed(remedies.argument_set("a.py:1", "pin_memory", "True")) == ["-)", "+, pin_memory=True)"]


def test_a_statement_runs_now_and_then_by_a_counter(source):
    assert changed(remedies.only_every("a.py:9", 50)) == [
        "-        log(loss)",
        "+        if update % 50 == 0:  # count updates in your loop",
        "+            log(loss)",
    ]


def test_the_loop_of_an_evaluation_goes_under_no_grad_and_not_the_training_around_it(source):
    diff = remedies.under_no_grad("a.py:11")
    assert "+    with torch.no_grad():" in diff
    assert "+        for x in valid:" in diff
    assert "for epoch" not in diff.replace("@@ ", "")


def test_a_copy_goes_and_the_tensor_stays(source):
    assert changed(remedies.lines_changed(["a.py:6"], remedies.without_copy)) == [
        "-        x = torch.tensor(x)",
        "+        x = x",
    ]


def test_float64_becomes_float32(source):
    assert remedies.narrowed("x = np.zeros(3, dtype=np.float64); m.double()") == (
        "x = np.zeros(3, dtype=np.float32); m.float()"
    )


def test_a_place_that_cannot_be_read_gives_no_diff():
    assert remedies.argument_set("gone.py:3", "num_workers", "2") == ""
    assert remedies.under_no_grad("") == ""
    Path("broken.py").write_text("for x in\n")
    assert remedies.only_every("broken.py:1", 50) == ""
