"""`hotlap run` samples a script where the user names a folder, and leaves no thread where not."""

import pytest
import torch
from fake_nvml import FakeNvml
from sampling import sample_eagerly, sampler_threads, when
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.monitor.hardware import GpuReader
from hotlap.script.live import LiveScript, Standing
from hotlap.script.session import Session, Settings
from hotlap.store.run_folder import RunFolder
from hotlap.store.telemetry import read_live, read_samples
from hotlap.tuner.budget import Length


def train(each=lambda step: None):
    torch.manual_seed(1)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(64, 6), torch.zeros(64, dtype=torch.long)), batch_size=8)
    step = 0
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            each(step)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture(autouse=True)
def _eager(monkeypatch, tmp_path):
    sample_eagerly(monkeypatch)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("plan", [None, "max"])
def test_without_a_folder_no_thread_of_hotlaps_is_ever_there(plan):
    threads = []
    with Session(Settings(name="train", plan=plan)):
        train(lambda step: threads.extend(sampler_threads()))
    assert threads == []


@pytest.mark.parametrize("plan", [None, "max"])
def test_with_a_folder_the_script_is_sampled_until_its_end_also_where_hotlap_is_idle(tmp_path, plan):
    out, seen = tmp_path / "run", []

    def each(step):
        if step == 60:
            when(lambda: (read_live(out) or {}).get("step") == 60)
            seen.append(read_live(out))

    with Session(Settings(name="train", plan=plan, out=out)):
        weights = train(each)
    (live,) = seen
    assert (live["kind"], live["unit"], live["name"], live["ended"]) == ("run", "updates", "train", False)
    assert sampler_threads() == []
    assert read_live(out)["ended"] is True
    assert read_samples(out)[-1]["step"] <= 64
    assert RunFolder.open(out).read_plan() is not None
    assert all(torch.equal(one, other) for one, other in zip(weights, train(), strict=True))


def test_a_folder_that_cannot_be_made_stops_no_script(tmp_path):
    (tmp_path / "file").write_text("")
    with Session(Settings(name="train", out=tmp_path / "file" / "run")):
        weights = train()
    assert all(torch.equal(one, other) for one, other in zip(weights, train(), strict=True))


def test_on_a_gpu_the_state_says_what_the_gpu_shows_of_its_bound(tmp_path):
    standing = Standing(100, Length(500), Plan(), Ledger(), False)
    live = LiveScript("train", tmp_path, torch.device("cpu"), lambda: standing)
    live._device = torch.device("cuda")
    for nvml, bound in (
        (FakeNvml(busy=20), "launching"),
        (FakeNvml(reasons=0x40, sm=900), "throttling"),
        (FakeNvml(), None),
    ):
        live._gpu = GpuReader(nvml, 0)
        live._samples.clear()
        assert live.state(live.read()).get("bound", {}).get("by") == bound


def test_a_script_that_fails_says_so_to_who_watches(tmp_path):
    def each(step):
        if step == 60:
            when((tmp_path / "run" / "live.json").is_file)
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"), Session(Settings(name="train", out=tmp_path / "run")):
        train(each)
    live = read_live(tmp_path / "run")
    assert (live["ended"], live["stopped"]) == (True, "by an error: ValueError")
