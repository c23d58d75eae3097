"""The engine on a real GPU: the same numbers as a plain loop, under every plan, without waiting inside a step."""

import itertools
import subprocess
import sys

import pytest
import torch
from plain import class_data, parameters_of, small_mlp, twins
from torch import nn
from waiting import no_waiting

from hotlap import Job, Plan, Rig, fit
from hotlap.data.order import mix
from hotlap.store import tensors

DEVICE = "cuda"
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
FEEDS = [
    {"kind": "gather"},
    {"kind": "loader"},
    {"kind": "loader", "pinned": True},
    {"kind": "loader", "workers": 2, "pinned": True, "persistent": True},
]


def plain_gpu_loop(model, optimizer, loss, data, *, batch, epochs, clip=None, autocast=False):
    x, y = (t.to(DEVICE) for t in data)
    for epoch in range(epochs):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(mix(0, epoch)))
        for chosen in order.split(batch):
            chosen = chosen.to(DEVICE)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                value = loss(model(x[chosen]), y[chosen])
            value.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("feed", "micro", "kind"),
    # Starting workers takes seconds, and how they bring pieces does not depend on the kind of optimizer.
    [c for c in itertools.product(FEEDS, [None, 5], ["plain", "fused"]) if "workers" not in c[0] or c[2] == "plain"],
)
def test_every_plain_plan_gives_the_numbers_of_the_plain_loop(name, feed, micro, kind):
    data = class_data(50)
    mine, theirs = twins(small_mlp().to(DEVICE))
    plain_gpu_loop(
        theirs, OPTIMIZERS[name](theirs.parameters()), nn.CrossEntropyLoss(), data, batch=16, epochs=2, clip=0.5
    )
    plan = Plan().but(**feed, micro_batch=micro, optimizer=kind)
    rig = Rig(mine, OPTIMIZERS[name], nn.CrossEntropyLoss(), clip=0.5, device=DEVICE)
    if kind == "fused" and name == "rmsprop":
        assert "no fused kernel" in rig.supports(plan)
        return
    rig.use(plan)
    for window in rig.feed(data, batch_size=8, accumulate=2, epochs=2):
        rig.step(window)
    rig.close()
    torch.testing.assert_close(parameters_of(mine), parameters_of(theirs), rtol=1e-7, atol=1e-10)


def test_the_users_own_plan_is_bit_equal_to_the_plain_loop():
    data = class_data(50, dtype=torch.float32)
    mine, theirs = twins(small_mlp(dtype=torch.float32).to(DEVICE))
    plain_gpu_loop(
        theirs, OPTIMIZERS["adam"](theirs.parameters()), nn.CrossEntropyLoss(), data, batch=8, epochs=3, clip=1.0
    )
    rig = Rig(mine, OPTIMIZERS["adam"], nn.CrossEntropyLoss(), clip=1.0, device=DEVICE)
    for window in rig.feed(data, batch_size=8, epochs=3):
        rig.step(window)
    assert torch.equal(parameters_of(mine), parameters_of(theirs))


def test_bf16_is_bit_equal_to_a_plain_loop_under_autocast():
    data = class_data(50, dtype=torch.float32)
    mine, theirs = twins(small_mlp(dtype=torch.float32).to(DEVICE))
    plain_gpu_loop(
        theirs, OPTIMIZERS["adam"](theirs.parameters()), nn.CrossEntropyLoss(), data, batch=8, epochs=3, autocast=True
    )
    rig = Rig(mine, OPTIMIZERS["adam"], nn.CrossEntropyLoss(), plan=Plan().but(precision="bf16"), device=DEVICE)
    for window in rig.feed(data, batch_size=8, epochs=3):
        rig.step(window)
    assert torch.equal(parameters_of(mine), parameters_of(theirs))


def test_plans_switched_in_the_middle_of_an_epoch_change_nothing_beyond_rounding():
    data = class_data(64)
    mine, theirs = twins(small_mlp().to(DEVICE))
    plain_gpu_loop(theirs, OPTIMIZERS["adamw"](theirs.parameters()), nn.CrossEntropyLoss(), data, batch=4, epochs=2)
    rig = Rig(mine, OPTIMIZERS["adamw"], nn.CrossEntropyLoss(), device=DEVICE)
    switches = {
        3: Plan().but(optimizer="fused"),
        7: Plan().but(kind="loader", workers=2, pinned=True),
        12: Plan().but(micro_batch=3),
        20: Plan().but(optimizer="fused", kind="loader"),
        25: Plan(),
    }
    for window in rig.feed(data, batch_size=4, epochs=2):
        rig.step(window)
        if rig.steps in switches:
            rig.use(switches[rig.steps])
    rig.close()
    torch.testing.assert_close(parameters_of(mine), parameters_of(theirs), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("micro", [None, 16])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_no_step_waits_for_the_gpu(name, kind, micro, precision):
    """Data is on the GPU already, since a copy from pageable memory waits in the driver."""
    data = tuple(t.to(DEVICE) for t in class_data(50, dtype=torch.float32))
    rig = Rig(
        small_mlp(dtype=torch.float32),
        OPTIMIZERS[name],
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        clip=1.0,
        schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        plan=Plan().but(optimizer=kind, micro_batch=micro, precision=precision),
        device=DEVICE,
    )
    for _ in range(3):
        rig.step(data)
    torch.cuda.synchronize()
    with no_waiting():
        for _ in range(3):
            rig.step(data)


class Restless(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 3))

    def forward(self, x):
        return self.layers(x)


def test_training_goes_on_from_a_snapshot_as_if_nothing_had_been():
    def trained(detour):
        torch.manual_seed(5)
        rig = Rig(Restless(), OPTIMIZERS["adamw"], nn.CrossEntropyLoss(), device=DEVICE)
        for window in rig.feed(class_data(60, dtype=torch.float32), batch_size=8, epochs=2):
            rig.step(window)
            if detour and rig.steps == 4:
                snapshot = rig.snapshot()
                rig.use(Plan().but(optimizer="fused"))
                for _ in range(5):
                    rig.step(window)
                rig.evaluate(class_data(20, dtype=torch.float32))
                rig.use(Plan())
                rig.restore(snapshot)
        return parameters_of(rig.model)

    assert torch.equal(trained(False), trained(True))


def test_evaluation_changes_nothing_and_is_exact():
    rig = Rig(Restless(), OPTIMIZERS["adamw"], nn.CrossEntropyLoss(), device=DEVICE)
    data = class_data(71, dtype=torch.float32)
    rig.step(next(rig.feed(data, batch_size=8, epochs=1)))
    weights, state = parameters_of(rig.model).clone(), torch.cuda.get_rng_state()
    scores = rig.evaluate(data, ["accuracy", "macro_f1"])
    assert torch.equal(weights, parameters_of(rig.model))
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert rig.model.training
    rig.model.eval()
    output = rig.model(data[0].to(DEVICE)).cpu()
    assert scores["accuracy"] == pytest.approx((output.argmax(1) == data[1]).double().mean().item())
    assert scores["loss"] == pytest.approx(nn.functional.cross_entropy(output, data[1]).item(), rel=1e-5)


def test_an_evaluation_batch_that_does_not_fit_is_halved_until_it_does():
    script = """
import torch
from torch import nn
from hotlap import Rig
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen = []
    def forward(self, x):
        self.seen.append(len(x))
        torch.empty(len(x), 64 * 2**20, dtype=torch.uint8, device=x.device)  # 64 MiB a sample
        return self.layer(x)
model = Wide()
rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), device="cuda")
free, total = torch.cuda.mem_get_info()
torch.cuda.set_per_process_memory_fraction(2 * 2**30 / total)
scores = rig.evaluate((torch.randn(64, 4), torch.randint(2, (64,))), ["accuracy"], batch_size=64)
assert model.seen[0] == 64 and model.seen[-1] in (8, 16), model.seen
print("ok", scores)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok")


def test_an_optimizer_with_state_follows_its_model_to_the_gpu():
    model = small_mlp(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    nn.functional.cross_entropy(model(class_data(dtype=torch.float32)[0]), class_data()[1]).backward()
    optimizer.step()
    rig = Rig(model, optimizer, nn.CrossEntropyLoss(), device=DEVICE)
    rig.step(class_data(dtype=torch.float32))
    state = next(iter(optimizer.state.values()))
    assert state["exp_avg"].device.type == "cuda"
    assert int(state["step"]) == 2


def test_fit_trains_on_the_gpu_by_itself_and_leaves_a_model_for_the_cpu(tmp_path):
    from safetensors.torch import load_file

    model = small_mlp(dtype=torch.float32)
    before = torch.cuda.get_rng_state()
    job = Job(
        model=model,
        data=class_data(200, dtype=torch.float32),
        valid=class_data(50, dtype=torch.float32, seed=3),
        metrics=["accuracy"],
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        batch_size=20,
        epochs=3,
        patience=5,
    )
    run = fit(job, out=tmp_path / "run", require_gpu=True, progress=False)
    assert next(run.model.parameters()).device.type == "cuda"
    assert torch.equal(before, torch.cuda.get_rng_state())
    stored = load_file(run.path / "model.safetensors")
    for name, value in run.model.state_dict().items():
        assert torch.equal(stored[name], value.cpu())


def test_the_demo_reaches_its_score_on_the_gpu(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hotlap", "demo", "--require-gpu", "--quiet", "--json", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    import json

    figures = json.loads(done.stdout)
    assert figures["best"]["accuracy"] > 0.97


def test_a_pretended_t4_is_not_given_bf16(monkeypatch):
    rig = Rig(small_mlp(), OPTIMIZERS["sgd"], nn.CrossEntropyLoss(), device=DEVICE)
    assert rig.supports(Plan().but(precision="bf16")) is None
    monkeypatch.setenv("HOTLAP_PRETEND", "t4")
    assert "bf16" in rig.supports(Plan().but(precision="bf16"))


def test_copies_on_the_host_are_the_same_numbers(monkeypatch):
    monkeypatch.setattr(tensors, "AT_ONCE_BYTES", 4096)
    given = {str(n): torch.randn(n % 7, 3 * n, device=DEVICE) for n in range(40)}
    given["scalar"] = torch.tensor(3.0, device=DEVICE)
    given["turned"] = torch.randn(2, 3, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
    given["whole"], given["half"] = torch.arange(5, device=DEVICE), torch.randn(5, device=DEVICE).half()
    copied = tensors.copied_to_host(given)
    assert list(copied) == list(given)
    for name, tensor in given.items():
        torch.testing.assert_close(copied[name], tensor.cpu(), rtol=0, atol=0)
        assert copied[name].is_contiguous()
