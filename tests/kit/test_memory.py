"""`hotlap memory`: an account that adds up, by kind and layer, what would bring it down, and what grows."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain import parameters_of
from torch import nn
from typer.testing import CliRunner

import hotlap
from hotlap import Job, machine
from hotlap.cli import app
from hotlap.core.errors import HotlapError
from hotlap.kit import memory as kit
from hotlap.kit import savings
from hotlap.kit.memory import draw_course, memory_of_script
from hotlap.kit.probe import ProbeResult, ScriptTrials
from hotlap.monitor import savings as predicted
from hotlap.monitor.growing_memory import FIRST, TURNS, GrowthWatch, grown
from hotlap.script.running import Target

WIDTH, LENGTH, BATCH, BLOCKS = 16, 8, 32, 3


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("hotlap.kit.bench.BLOCK_S", 0.001)
    monkeypatch.setattr("hotlap.kit.bench.BLOCKS", 1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.blocks(x).mean(1))


def job(model=None, **changes):
    model = model or Encoder()
    settings = {
        "data": (torch.randn(64, LENGTH, WIDTH), torch.randint(3, (64,))),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters()),
        "batch_size": BATCH,
        "epochs": 1,
        "device": "cpu",
    }
    return Job(model=model, **{**settings, **changes})


def weights_bytes(model):
    return sum(p.numel() * 4 for p in model.parameters())


@pytest.fixture(scope="module")
def found():
    return hotlap.memory(job(), progress=False)


def test_the_kinds_add_up_to_the_peak_and_hold_what_they_should(found):
    weights = weights_bytes(Encoder())
    assert sum(found.kinds.values()) == found.counted_bytes == found.peak_bytes
    assert found.kinds["parameters"] == weights
    # Adam keeps two values for each weight, and a count for each tensor.
    assert found.kinds["optimizer"] == 2 * weights + 4 * len(list(Encoder().parameters()))
    assert found.kinds["batch"] >= BATCH * (LENGTH * WIDTH * 4 + 8)
    assert found.samples == BATCH
    # Between updates, weights and the optimizer's state are there, and gradients until they are set to none.
    lasting = found.kinds["parameters"] + found.kinds["optimizer"]
    assert lasting <= found.lasting_bytes <= lasting + weights + found.kinds["batch"]
    assert "between updates" in found.summary()


def test_activations_are_told_by_layer(found):
    assert sum(found.layers.values()) == found.kinds["activations"]
    assert {f"blocks.layers.{n}.self_attn" for n in range(BLOCKS)} <= set(found.layers)
    # What its dropout gives goes into the next layer, and is kept for its gradient.
    assert found.layers["blocks.layers.0.dropout"] >= BATCH * LENGTH * 4 * WIDTH * 4


def test_activations_of_a_plain_network_are_what_its_layers_give():
    """At the peak, in the backward pass, what the ReLU gave is still there; what is not needed has gone before."""
    model = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 3))
    plain = job(model, data=(torch.randn(64, 10), torch.randint(3, (64,))))
    layers = hotlap.memory(plain, progress=False).layers
    assert layers["1"] == BATCH * 100 * 4
    assert "0" not in layers
    assert "2" not in layers


def test_what_would_bring_it_down_is_predicted_and_the_first_two_are_tried(found):
    smaller, checkpointed = found.savings[:2]
    assert smaller.what == "micro-batches of 16, 2 accumulated"
    assert checkpointed.what == f"all {BLOCKS} blocks checkpointed"
    for one in (smaller, checkpointed):
        assert one.peak_bytes < found.peak_bytes
        assert one.step_s > 0
        assert abs(one.predicted_bytes - one.peak_bytes) < 0.2 * one.peak_bytes
    (shorter,) = found.savings[3:]
    assert shorter.what == f"{LENGTH // 2} tokens in place of {LENGTH}"
    assert shorter.predicted_step_s == found.step_s / 2
    assert shorter.peak_bytes is None
    as_it_is, *lines = savings.table(found.savings, found.peak_bytes, found.step_s)[1:]
    assert as_it_is.strip().startswith("unchanged")
    assert [line.endswith("not tried: it changes what the model learns") for line in lines] == [
        False,
        False,
        False,
        True,
    ]


def with_bf16(monkeypatch, support):
    """Has the CPU as one that has bf16 so."""
    facts = machine.dtype_facts(torch.device("cpu"))
    facts = {**facts, "bf16": replace(facts["bf16"], support=support, reason="it says so")}
    monkeypatch.setattr(predicted.machine, "dtype_fact", lambda device, dtype: facts[dtype])


@pytest.fixture
def without_onednn():
    """It fails on a CPU that is only said to have bf16."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


def test_half_precision_is_timed_where_the_hardware_has_it(monkeypatch, without_onednn):
    with_bf16(monkeypatch, machine.Support.HARDWARE)
    model = nn.Sequential(nn.Linear(10, 200), nn.ReLU(), nn.Linear(200, 3))
    found = hotlap.memory(job(model, data=(torch.randn(64, 10), torch.randint(3, (64,)))), progress=False)
    cast = found.savings[2]
    assert cast.what == "bf16 autocast"
    assert cast.predicted_step_s is None
    assert 0 < cast.peak_bytes < found.peak_bytes
    assert cast.step_s > 0


def test_half_precision_is_predicted_and_not_tried_where_it_is_emulated(monkeypatch):
    with_bf16(monkeypatch, machine.Support.EMULATED)
    facts = predicted.model_facts(nn.Linear(2, 2), None, torch.device("cpu"))
    kinds = {"parameters": 10, "activations": 60}
    figures = {"samples": 1, "effective_batch": 1, "peak_bytes": 100, "step_s": 1.0}
    update = predicted.Update(kinds=kinds, layers={}, outputs={}, **figures)
    cast, smaller = savings.savings(update, facts, trials=None)[2:]
    assert (cast.predicted_bytes, cast.peak_bytes, cast.why_not) == (75, None, "it says so")
    assert smaller.why_not == "their size is unknown"


def test_what_cannot_be_had_is_told_with_its_reason():
    model = nn.Sequential(nn.Linear(10, 3))
    plain = job(model, data=(torch.randn(64, 10), torch.randint(3, (64,))), batch_size=1)
    found = hotlap.memory(plain, progress=False)
    reasons = {one.what: one.why_not for one in found.savings if one.predicted_bytes is None}
    assert reasons == {
        "micro-batches": "1 at once is the smallest batch that trains",
        "checkpointing": "Sequential has no repeated blocks",
    }
    assert "impossible: Sequential has no repeated blocks" in found.summary()


def test_the_job_is_left_as_it_was():
    mine = job()
    before, chance = parameters_of(mine.model).clone(), torch.get_rng_state()
    hotlap.memory(mine, progress=False)
    assert torch.equal(parameters_of(mine.model), before)
    assert torch.equal(torch.get_rng_state(), chance)
    assert not mine.optimizer.state
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in mine.model.parameters())
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_nothing_grows_where_nothing_is_held(found):
    assert found.held == ()
    assert "grows      nothing" in found.summary()


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.outputs = nn.Linear(LENGTH * WIDTH, 3), []

    def forward(self, x):
        made = self.layer(x.flatten(1))
        self.outputs.append(made * 2)  # held
        return made


def test_memory_that_grows_is_found_with_the_line_and_the_holder():
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# held"))
    (held,) = hotlap.memory(job(Keeps()), progress=False).held
    assert held.line.endswith(f"test_memory.py:{line} in forward")
    assert held.holder == "Keeps.outputs"
    assert held.bytes_an_update == BATCH * 3 * 4
    assert held.tensors_an_update == 1


def test_what_a_hook_holds_is_told_by_its_layer_and_not_by_who_asked():
    kept, model = [], nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * WIDTH, 3))
    model[1].register_forward_hook(lambda layer, given, made: kept.append(made))
    (held,) = hotlap.memory(job(model), progress=False).held
    assert held.line == "no line of yours, while 1 or a hook of it ran"
    assert held.holder.startswith("kept of test_what_a_hook_holds")


def test_the_course_of_an_update_is_drawn(found, tmp_path):
    path = tmp_path / "memory.svg"
    found.draw(path)
    words = "".join(ElementTree.parse(path).getroot().itertext())
    assert "peak" in words
    assert {kind for kind, _ in found.course} >= {"activations", "backward", "update"}
    assert max(size for _, size in found.course) == found.peak_bytes
    with pytest.raises(HotlapError, match="nothing to draw"):
        draw_course([], path, "none")


def test_a_batch_that_does_not_fit_is_told_in_one_line():
    class Full(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(LENGTH * WIDTH, 3)

        def forward(self, x):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(HotlapError, match="32 samples at once does not fit: CUDA out of memory"):
        hotlap.memory(job(Full()), progress=False)


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

block = lambda: nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
model = nn.Sequential(nn.Linear(10, 100), block(), block(), block(), nn.Linear(100, 2))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(2560, 10), torch.randint(2, (2560,))), batch_size=256)
losses = []
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "mine.py"
    path.write_text(SCRIPT)
    return Target(path=str(path))


@pytest.fixture(scope="module")
def found_of_script(script, looks_are_forks):
    with looks_are_forks(after=1):
        return memory_of_script(script)


def test_a_scripts_memory_is_told_and_what_it_holds_is_found(found_of_script):
    found = found_of_script
    weights = (10 * 100 + 100 + 6 * (100 * 100 + 100) + 100 * 2 + 2) * 4
    assert found.kinds["parameters"] == weights
    assert found.kinds["optimizer"] == 2 * weights + 4 * 16
    assert found.layers["1.1"] == found.layers["1.3"] == 256 * 100 * 4
    assert sum(found.kinds.values()) == found.peak_bytes
    # Samples are views of the dataset, which is there whatever the batch.
    assert found.kinds["before"] == 2560 * (10 + 2) * 4
    (held,) = found.held
    assert held.line.endswith("mine.py:14 in <module>")
    assert held.holder == "__main__.losses"


def test_what_would_bring_a_scripts_memory_down_is_predicted_and_tried(found_of_script):
    found = found_of_script
    smaller, checkpointed, cast = found.savings
    assert smaller.what == "micro-batches of 128, 2 accumulated"
    assert checkpointed.what == "all 3 blocks checkpointed"
    for one in (smaller, checkpointed):
        assert one.peak_bytes < found.peak_bytes
        assert one.step_s > 0
        assert one.predicted_step_s >= found.step_s
        assert abs(one.predicted_bytes - one.peak_bytes) < 0.08 * one.peak_bytes
    # Gradients lie beside the activations of every micro-batch, as while they are accumulated: a fifth of it all.
    assert found.kinds["parameters"] > 0.15 * smaller.peak_bytes
    assert cast.what == "bf16 autocast"
    assert cast.predicted_bytes < found.peak_bytes
    assert "checkpointing: put torch.utils.checkpoint around each block" in found.summary()
    assert json.loads(json.dumps(found.to_dict()))["savings"][0]["peak_bytes"] == smaller.peak_bytes


def test_a_script_is_tried_in_half_precision_as_hotlap_run_has_it(script, found_of_script):
    own = ProbeResult(samples_an_update=256, loader=0)
    tried = ScriptTrials(script, own, say=lambda line: None).in_precision("bf16")
    assert tried.why_not is None
    assert tried.peak_bytes < found_of_script.peak_bytes
    assert tried.step_s > 0


LEAKS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(10, 2)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(640, 10), torch.randint(2, (640,))), batch_size=32)
kept, outputs = [], torch.zeros(0)

def main(how):
    global outputs
    total, number = 0.0, 0
    for epoch in range(100_000):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            number += 1
            if "added up" in how:
                total = total + loss
            if how == "kept and added up":
                kept.append(out.detach())
            elif how == "joined":
                outputs = torch.cat([outputs, out.detach()])
            elif how == "every second" and number % 2:
                kept.append(out.detach())
            elif how == "the last two":
                kept.append(out)
                del kept[:-2]
            elif how == "numbers":
                kept.append(loss.item())

main(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("how", "line", "size", "said"),
    [
        ("added up", "", 0, "steps of autograd an update: a tensor of shape () keeps all its history"),
        ("joined", "leaks.py:28 in main", 32 * 2 * 4, "in a tensor that grows"),
        ("every second", "leaks.py:18 in main", 32 * 2 * 4 // 2, "(0.5 tensors)"),
    ],
)
def test_other_ways_to_grow_are_told_with_what_can_be_seen_of_them(tmp_path, monkeypatch, how, line, size, said):
    monkeypatch.setattr(kit, "savings", lambda *_: [])
    path = tmp_path / "leaks.py"
    path.write_text(LEAKS)
    (held,) = memory_of_script(Target(path=str(path), args=[how])).held
    assert held.line.endswith(line)
    assert held.bytes_an_update == size
    assert said in str(held)
    holder = {"added up": "total of main", "joined": "__main__.outputs", "every second": "__main__.kept"}[how]
    assert held.holder == holder
    assert str(held).endswith(f", held by {holder}")


def test_a_loss_that_is_added_up_is_told_beside_tensors_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "savings", lambda *_: [])
    path = tmp_path / "leaks.py"
    path.write_text(LEAKS)
    kept, added = memory_of_script(Target(path=str(path), args=["kept and added up"])).held
    assert kept.holder == "__main__.kept"
    assert "steps of autograd an update" in str(added)
    assert added.holder == "total of main"


@pytest.mark.parametrize("how", ["the last two", "numbers"])
def test_what_is_let_go_of_does_not_grow(tmp_path, monkeypatch, how):
    monkeypatch.setattr(kit, "savings", lambda *_: [])
    path = tmp_path / "leaks.py"
    path.write_text(LEAKS)
    assert memory_of_script(Target(path=str(path), args=[how])).held == ()


class Allocator:
    """Counts nothing but what it is told."""

    def __init__(self, monkeypatch, allocated, reserved):
        self.device, self.pieces, self.bytes, self.turn = torch.device("cuda"), {}, 100, 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[self.turn - 1])
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[self.turn - 1])


@pytest.mark.parametrize(
    ("allocated", "reserved", "said"),
    [
        ([100 + 8 * n for n in range(TURNS)], [10**6] * TURNS, "8 B an update outside of operations"),
        ([100] * TURNS, [2**20 * n for n in range(TURNS)], "1.0 MiB an update that torch takes from the GPU"),
        ([100] * TURNS, [10**6] * TURNS, None),
        ([100, 150, *[160] * (TURNS - 2)], [10**6 + n % 2 for n in range(TURNS)], None),
    ],
)
def test_growth_that_only_the_allocator_sees_is_told_without_a_line(monkeypatch, allocated, reserved, said):
    turns = GrowthWatch(Allocator(monkeypatch, allocated, reserved))
    while not turns.are_done:
        turns.end()
    found = [str(one) for one in turns.growth()]
    assert [said in one for one in found] == ([True] if said else [])


@given(st.lists(st.integers(0, 10**9), min_size=TURNS, max_size=TURNS))
def test_only_what_rises_in_every_update_grows(levels):
    rises = all(before < after for before, after in pairwise(levels[FIRST - 1 :]))
    assert (grown(levels) > 0) == rises


def test_the_command_prints_json_and_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kit_memory_jobs.py").write_text(
        "import torch\nfrom torch import nn\nfrom hotlap import Job\n\ndef job():\n"
        "    data = torch.randn(32, 4), torch.randint(2, (32,))\n"
        "    return Job(model=nn.Linear(4, 2), data=data, loss=nn.CrossEntropyLoss(), batch_size=8, epochs=1,\n"
        "               optimizer=lambda p: torch.optim.SGD(p, lr=0.1), device='cpu')\n"
    )
    words = ["memory", "--json", "--quiet", "--picture", "m.svg", "kit_memory_jobs:job"]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["kinds"]["parameters"] == (4 * 2 + 2) * 4
    assert (tmp_path / "m.svg").is_file()
    again = CliRunner().invoke(app, words)
    assert str(again.exception) == "m.svg is there already; name another file with --picture"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("m.png", "m.png is no file that can be written; give --picture a name that ends in .svg"),
        ("m", "m is no file that can be written; give --picture a name that ends in .svg"),
        ("none/m.svg", "there is no folder none to write m.svg into; make it, or name another"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_trained(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["memory", "--picture", name, "never_looked_at:job"])
    assert (done.exit_code, str(done.exception)) == (1, said)
    assert not list(tmp_path.iterdir())
