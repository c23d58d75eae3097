"""Scripts that record CUDA graphs of their own: nothing of hotlap is recorded, and nothing breaks the recording."""

import pytest
import torch
from torch import nn

from hotlap.core.plan import Plan
from hotlap.script.session import Session, Settings
from hotlap.script.training import ComputeTimer
from hotlap.store.files import save_plan

DEVICE = torch.device("cuda")


def trained(warm):
    """A whole step that the script records itself, as torch's documentation shows it; the weights at the end."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(DEVICE)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(8, 16, device=DEVICE), torch.randn(8, 4, device=DEVICE)

    def step():
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(network(x), y).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(30):
        x.copy_(torch.randn(8, 16, generator=torch.Generator().manual_seed(number)))
        graph.replay()
    return [weight.detach().cpu() for weight in network.parameters()]


@pytest.mark.parametrize("plan", [None, Plan().but(mode="captured", optimizer="fused")], ids=["auto", "captured"])
@pytest.mark.parametrize("warm", [3, 4, 11, 40])
def test_a_step_that_the_script_records_itself_is_left_alone(warm, plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    truth = trained(warm)
    if plan is not None:
        save_plan(plan, tmp_path / "plan.toml")
        plan = str(tmp_path / "plan.toml")
    with Session(Settings(name="test", out=tmp_path / "run", plan=plan)):
        found = trained(warm)
    for one, other in zip(truth, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert "fault" not in capsys.readouterr().err


@pytest.mark.parametrize("host_s", [0.0, 0.004])
def test_what_the_device_computes_for_a_step_does_not_depend_on_the_host(host_s):
    import time

    a, busy, looked = torch.randn(2048, 2048, device=DEVICE), ComputeTimer(DEVICE), 0

    def step():
        time.sleep(host_s)
        for _ in range(8):
            torch.mm(a, a)

    for _ in range(3):
        step()
    truths = []
    for _ in range(5):  # the shortest, since other processes may share the device and the host
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)
        began.record()
        step()
        ended.record()
        ended.synchronize()
        truths.append(began.elapsed_time(ended) / 1000)
    for _ in range(30):
        step()
        looked += busy.stepped()
    assert 2 <= looked <= 6
    assert busy.step_s == pytest.approx(min(truths), rel=0.5)
