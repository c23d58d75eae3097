"""Out of memory under `hotlap run`: the forward pass again in pieces, or the script's own error and advice.

The memory limit is a real one, of the host: torch's CPU allocator fails.
"""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

from hotlap.script.calls.pieces import fits, in_pieces, why_not_in_pieces
from hotlap.script.out_of_memory import ForwardRescue
from hotlap.script.session import Session, Settings

CPU = torch.device("cpu")
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 MiB"

SCRIPT = """
import json, resource, sys
import torch
from torch import nn

kind, room_mib, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
WIDTH, BATCH, LAYERS = 512, 4096, 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "norm" else nn.Identity()
        self.scales = nn.Parameter(torch.ones(LAYERS, WIDTH))

    def forward(self, x):
        x = self.norm(self.first(x))
        for scale in self.scales:  # much memory, little work
            x = torch.tanh(x * scale)
        if kind == "steep":  # no memory forward, 128 MiB backward
            x = x.unsqueeze(1).expand(-1, 16, -1).mean(1)
        return self.head(x)


def held():
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[5]) * resource.getpagesize()


def limited(mib):
    if room_mib:
        resource.setrlimit(resource.RLIMIT_DATA, (held() + mib * 2**20, resource.RLIM_INFINITY))


model = Net()
x, y = torch.randn(2 * BATCH, 8), torch.randint(3, (2 * BATCH,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = Net()
nn.functional.cross_entropy(other(x[:64]), y[:64]).backward()
limited(room_mib)
for step in range(steps):
    size = BATCH // 8 if kind == "late" and step < 6 else BATCH
    rows = slice(step % 2 * size, (step % 2 + 1) * size)
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    if kind == "backward":
        limited(1)
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    valid = nn.functional.cross_entropy(model(x), y).item()
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps([loss.item(), valid, [p.flatten()[:50].tolist() for p in model.parameters()]]))
"""


@pytest.fixture
def script(forks, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*words, plain=False):
        before = () if plain else ("-m", "hotlap", "run", "--out", tmp_path / "run")
        return forks.run(*before, "train.py", *words, cwd=tmp_path, OMP_NUM_THREADS="1", HOTLAP_PLAN="auto")

    return run


@pytest.mark.parametrize(("kind", "room_mib", "step"), [("first", 72, 0), ("late", 72, 6), ("steep", 215, 0)])
def test_a_script_that_runs_out_of_memory_goes_on_in_pieces_with_the_numbers_of_an_unlimited_run(
    script, tmp_path, kind, room_mib, step
):
    theirs = script(kind, 0, 8, plain=True)
    mine = script(kind, room_mib, 8)
    assert (mine.returncode, theirs.returncode) == (0, 0), mine.stderr
    for one, other in zip(json.loads(mine.stdout), json.loads(theirs.stdout), strict=True):
        torch.testing.assert_close(torch.tensor(one[0] if isinstance(one, list) else one), torch.tensor(
            other[0] if isinstance(other, list) else other), rtol=1e-4, atol=1e-6)  # fmt: skip
    line = f"out of memory at step {step}: the forward pass of Net runs in "
    assert line in mine.stderr
    assert "pieces, computed again in the backward pass" in mine.stderr
    assert ("computed again in the backward pass, which would have run out of memory" in mine.stderr) is (
        kind == "steep"
    )
    ledger = [json.loads(entry) for entry in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert [entry["what"] for entry in ledger if line in str(entry.get("why"))] == ["out of memory"]


@pytest.mark.parametrize(
    ("kind", "room_mib", "why"),
    [
        ("norm", 60, "because its batch norms compute over the whole batch"),
        ("backward", 1000, "it did not happen in a forward pass"),
    ],
)
def test_where_pieces_are_no_answer_the_script_fails_as_without_hotlap_with_one_line_of_advice(
    script, kind, room_mib, why
):
    theirs, mine = script(kind, room_mib, 3, plain=True), script(kind, room_mib, 3)
    assert mine.returncode == theirs.returncode == 1
    own = [line for line in theirs.stderr.splitlines() if line.startswith("RuntimeError")]
    assert own == [line for line in mine.stderr.splitlines() if line.startswith("RuntimeError")]
    (line,) = [line for line in mine.stderr.splitlines() if line.startswith("hotlap  out of memory: ")]
    assert why in line
    assert line.endswith(f"what would help: hotlap memory train.py {kind} {room_mib} 3")


def test_forward_pieces_can_be_left_out(forks, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--without", "forward-pieces", "train.py", "first", 60, 3)
    done = forks.run("-m", "hotlap", "run", *words, cwd=tmp_path, OMP_NUM_THREADS="1", HOTLAP_PLAN="auto")
    assert done.returncode == 1
    assert "DefaultCPUAllocator: can't allocate memory" in done.stderr


# --- pieces ----------------------------------------------------------------------------------------------


class Named(nn.Module):
    """Takes a mask for all samples, gives a dict."""

    def __init__(self):
        super().__init__()
        self.one, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x, *, mask, scale=1.0):
        return {"out": self.drop(self.one(x)) * mask * scale, "kept": (x[:, :2], "a word")}


def test_outputs_and_gradients_are_those_of_the_whole_call():
    model = Named()
    model.drop.p = 0.0
    x, mask = torch.randn(7, 6, requires_grad=True), torch.rand(6)
    whole = model(x, mask=mask)
    pieces = in_pieces(model, model.__call__, (x,), {"mask": mask}, 3)
    torch.testing.assert_close(pieces["out"], whole["out"])
    assert torch.equal(pieces["kept"][0], whole["kept"][0])
    assert pieces["kept"][1] == "a word"
    inputs = [x, *model.parameters()]
    for one, other in zip(
        torch.autograd.grad(pieces["out"].square().mean(), inputs),
        torch.autograd.grad(whole["out"].square().mean(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_the_backward_pass_draws_the_masks_of_the_forward_pass_though_the_script_has_called_eval():
    model, x = Named(), torch.ones(8, 6, requires_grad=True)
    with torch.no_grad():
        model.one.weight.copy_(torch.eye(6))
        model.one.bias.zero_()
    out = in_pieces(model, model.__call__, (x,), {"mask": torch.ones(6)}, 4)["out"]
    model.eval()
    (grad,) = torch.autograd.grad(out.sum(), [x])
    assert torch.equal(grad, out.detach())
    assert 0 < int((out == 0).sum()) < 48
    assert not model.training


def test_a_trial_leaves_no_trace_and_fails_where_a_piece_is_too_large():
    model, x = Named(), torch.randn(8, 6)
    drawn = torch.get_rng_state()
    fits(model, model.__call__, (x,), {"mask": torch.ones(6)}, 2, CPU)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in model.parameters())


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class WithLoss(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out.mean(), out


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Drawing(nn.Linear):
    def forward(self, x):
        noisy = x + torch.rand_like(x) if self.training else x
        return super().forward(noisy)


class Masked(nn.Linear):
    """Its mask is as wide as the batch, but belongs to columns."""

    def forward(self, x, mask):
        return super().forward(x * mask.unsqueeze(0).expand(len(x), -1)[:, : x.shape[1]])


class Writing(nn.Linear):
    def forward(self, x):
        x += 1
        return super().forward(x)


def norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def hooked():
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: nn.Linear(4, 4), None),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), None),
        (lambda: Drawing(4, 4), None),
        (lambda: norm().eval(), None),
        (norm, "batch norms compute over the whole batch"),
        (lambda: Centred(4, 4), "depend on the samples beside it"),
        (lambda: WithLoss(4, 4), "without the batch's dimension, such as a loss"),
        (lambda: Counting(4, 4), "changes its attribute 'calls'"),
        (lambda: Writing(4, 4), "it writes to its arguments"),
        (hooked, "has hooks of the script"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "changes"),
    ],
)
def test_a_call_is_cut_only_where_that_keeps_its_meaning(model, why):
    model = model()
    x, drawn = torch.randn(6, 4), torch.get_rng_state()
    kept = x.clone()
    found = why_not_in_pieces(model, model.__call__, (x,), {}, CPU)
    assert found is None if why is None else why in str(found)
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert getattr(model, "calls", 0) == 0


def test_a_mask_that_happens_to_be_as_long_as_the_batch_is_not_cut_unseen():
    model, x, mask = Masked(4, 4), torch.randn(4, 4), torch.tensor([1.0, 0.0, 3.0, 0.5])
    assert why_not_in_pieces(model, model.__call__, (x, mask), {}, CPU) is not None


# --- which calls -----------------------------------------------------------------------------------------


class Small(nn.Module):
    """Fits so many samples at a time."""

    def __init__(self, most):
        super().__init__()
        self.inner, self.most, self.sizes = nn.Linear(4, 4), most, Sizes()

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError(MESSAGE)
        return self.inner(x)


class Sizes:
    """Outside of what is put back after a failed call."""


def test_calls_without_gradients_are_cut_too_and_later_ones_at_once():
    lines, model, x = [], Small(2), torch.randn(8, 4)
    rescue = ForwardRescue(lambda: True, lines.append)
    rescue.watch([model])
    try:
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(model(x), model.inner(x))
            assert model(x[:2]).shape == (2, 4)
    finally:
        rescue.remove()
    assert lines == ["the forward pass of Small runs in 4 pieces (without gradients)"]
    with pytest.raises(torch.OutOfMemoryError):
        model(x)


def test_a_call_that_fails_otherwise_fails_as_before():
    model = nn.Linear(4, 4)
    rescue = ForwardRescue(lambda: True, lambda _: None)
    rescue.watch([model])
    try:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.randn(8, 3))
    finally:
        rescue.remove()
    assert "__call__" not in vars(nn.Linear)


# --- the backward pass -----------------------------------------------------------------------------------


class Steep(torch.autograd.Function):
    """Its backward pass fits so many samples; it counts those that it makes."""

    most, made = 4, []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Steep.made.append(len(grad))
        if len(grad) > Steep.most:
            raise torch.OutOfMemoryError(MESSAGE)
        return grad.clone()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(Steep.apply(self.inner(x)))


@pytest.fixture
def rescued(monkeypatch):
    """A model that is watched, on a device with so many bytes free."""
    Steep.made, lines, model = [], [], Net()
    rescue = ForwardRescue(lambda: True, lines.append)
    rescue.watch([model])

    def with_free(count):
        monkeypatch.setattr("hotlap.script.out_of_memory.free_bytes", lambda device: count)
        return model, lines

    yield with_free
    rescue.remove()


def test_a_backward_pass_that_would_not_fit_is_seen_before_the_script_gets_the_outputs(rescued):
    (model, lines), x = rescued(0), torch.ones(8, 4)
    model.drop.p = 0.0
    out = model(x)
    assert all(parameter.grad is None for parameter in model.parameters())
    out.square().mean().backward()
    assert lines == [
        "the forward pass of Net runs in 2 pieces, computed again in the backward pass, which would have run out of "
        "memory"
    ]
    theirs = torch.autograd.grad(model.inner(x).square().mean(), model.inner.weight)[0]
    torch.testing.assert_close(model.inner.weight.grad, theirs)


def test_a_backward_pass_that_fits_leaves_outputs_and_masks_as_they_are(rescued):
    (model, lines), x = rescued(0), torch.ones(4, 4)
    torch.manual_seed(0)
    mine = model(x)
    torch.manual_seed(0)
    theirs = model.forward(x)
    assert torch.equal(mine, theirs)
    assert lines == []


def test_nothing_is_rehearsed_where_memory_is_ample_and_the_script_fails_in_its_own_backward_pass(rescued):
    model, lines = rescued(2**50)
    out = model(torch.ones(8, 4))
    assert Steep.made == []
    with pytest.raises(torch.OutOfMemoryError):
        out.sum().backward()
    assert lines == []


def test_a_larger_call_is_rehearsed_though_many_smaller_ones_went_through(rescued):
    model, lines = rescued(0)
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    assert len(Steep.made) == 22  # the first two were rehearsed
    model(torch.ones(8, 4))
    assert len(lines) == 1


def test_calls_are_whole_again_once_memory_has_returned_and_a_try_that_fails_is_cut_again(rescued, monkeypatch):
    monkeypatch.setattr("hotlap.script.out_of_memory.WAIT", 4)
    monkeypatch.setattr(Steep, "most", 4)
    (model, lines), x = rescued(2**20), torch.ones(8, 4)
    monkeypatch.setattr("hotlap.script.out_of_memory._is_tight", lambda module, held: True)

    def calls(count):
        for _ in range(count):
            model(x).sum().backward()
        return [line.split(" in the backward")[0].removeprefix("the forward pass of Net runs ") for line in lines]

    cut, whole = "in 2 pieces, computed again", "whole again, since memory has returned"
    assert calls(12) == [cut]
    rescued(2**30)
    assert calls(4) == [cut, whole, cut]  # it fits no better
    rescued(2**34)
    assert calls(4) == [cut, whole, cut]  # and the next try waits for 8 calls
    monkeypatch.setattr(Steep, "most", 8)
    assert calls(8) == [cut, whole, cut, whole]
    Steep.made.clear()
    calls(1)
    assert set(Steep.made) == {8}


def test_weights_that_a_script_computes_for_a_call_raise_no_warning_of_torchs(tmp_path):
    """They are no leaves, and torch warns where their gradients are read."""
    model, x = nn.Linear(3, 1), torch.ones(4, 3)
    with Session(Settings(name="test", out=tmp_path / "run")), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            weights = {name: weight * 1.0 for name, weight in model.named_parameters()}
            functional_call(model, weights, x).sum().backward()
            optimizer.step()
    assert not [str(warning.message) for warning in warned]
