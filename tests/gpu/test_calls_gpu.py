"""Calls of a script's modules under plans on a real GPU: the losses of the plain loop, whatever the script does."""

import copy
import functools
import gc
import itertools
from types import SimpleNamespace

import calling
import pytest
import torch
from calling import CAPTURED, OWN
from small_networks import Cnn, Lstm, Mlp
from torch import nn
from torch.utils.checkpoint import checkpoint
from waiting import no_waiting

from hotlap.core.plan import Execution, Numerics
from hotlap.script.calls import eager
from hotlap.tuner.moment import without_dropout

DEVICE = torch.device("cuda")
STEPS = 20


@pytest.fixture(autouse=True)
def nothing_stays():
    """Captures of recurrent layers that drop out bind the device's generator as long as they are there."""
    yield
    gc.collect()


class Scripted(calling.Scripted):
    def __init__(self, module, plan=OWN, **settings):
        super().__init__(module, plan, device=DEVICE, make_recorder=None, **settings)

    @property
    def recorded(self):
        return self.call._way.recorded


def plan_of(precision="fp32", mode="captured", **numerics):
    return Numerics(precision=precision, **numerics), Execution(mode=mode)


class Transformer(nn.Module):
    shape = (12, 16)

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


MODELS = [Mlp, Transformer, Lstm, Cnn]


def data_of(kind, steps=STEPS, size=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, *kind.shape, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(steps)
    ]


def train(model, module, data, *, set_to_none=True, accumulate=1, between=None):
    """A plain loop as people write it; its losses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for number, (x, y) in enumerate(data):
        if between is not None:
            between(number, module)
        loss = nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)) / accumulate
        loss.backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def both(kind, mine_plan, theirs_plan=OWN, *, seed=3, data=None, dropout=0.0, **how):
    """Losses and modules of one loop under two plans, and the first one's model."""
    data = data or data_of(kind)
    found = []
    for plan in (mine_plan, theirs_plan):
        module = kind(dropout).to(DEVICE)
        model = Scripted(module, plan)
        torch.manual_seed(seed)
        found.append((train(model, module, data, **how), module, model))
    return *found, found[0][2]


def assert_like(mine, theirs, rtol=1e-3, atol=1e-4):
    torch.testing.assert_close(mine[0], theirs[0], rtol=rtol, atol=atol)


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


# --- the plain loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "precision"), list(itertools.product(MODELS, ["fp32", "tf32", "bf16"])))
def test_a_captured_loop_has_the_losses_of_the_eager_one(kind, precision):
    mine, theirs, model = both(kind, plan_of(precision), plan_of(precision, "eager"))
    assert model.call.given_up is None
    assert model.recorded == 1
    assert model.call.warmup_steps <= 5
    assert_like(mine, theirs, rtol={"fp32": 1e-3, "tf32": 3e-3, "bf16": 2e-2}[precision], atol=1e-3)


def test_weights_and_buffers_are_the_eager_ones_too():
    mine, theirs, model = both(Mlp, CAPTURED)
    assert model.recorded == 1
    torch.testing.assert_close(mine[1].state_dict(), theirs[1].state_dict(), rtol=1e-3, atol=1e-4)
    assert mine[1][1].num_batches_tracked == STEPS


@pytest.mark.parametrize("kind", MODELS)
def test_bf16_stays_near_fp32_and_gives_fp32_back(kind):
    module = kind().to(DEVICE)
    model = Scripted(module, plan_of("bf16", "eager"))
    x, y = (part.to(DEVICE) for part in data_of(kind, 1)[0])
    for _ in range(2):
        module.zero_grad()
        out = model(x)
        nn.functional.cross_entropy(out, y).backward()
    made = torch.cat([g.flatten() for g in gradients(module).values()])
    module.zero_grad()
    nn.functional.cross_entropy(module(x), y).backward()
    truth = torch.cat([g.flatten() for g in gradients(module).values()])
    assert out.dtype is made.dtype is torch.float32
    assert torch.cosine_similarity(made, truth, dim=0) > 0.99
    assert not torch.equal(made, truth)


class Stateful(nn.Module):
    """An LSTM that goes on with the state of the last call where it has as many rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head, self.state = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 4), None

    def forward(self, x):
        state = self.state if self.state is not None and self.state[0].shape[1] == len(x) else None
        out, new = self.rnn(x, state)
        self.state = tuple(one.detach() for one in new) if self.training else self.state
        return self.head(out[:, -1])


@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_a_state_kept_from_calls_in_bf16_is_taken_by_an_evaluation_in_fp32(mode):
    module = Stateful().to(DEVICE)
    model = Scripted(module, plan_of("bf16", mode))
    for number in range(STEPS):
        model(torch.randn(4, 6, 5, device=DEVICE)).square().mean().backward()
        assert [one.dtype for one in module.state] == [torch.float32] * 2
        if number % 3 == 0:
            module.eval()
            with torch.no_grad():
                assert model(torch.randn(4, 6, 5, device=DEVICE)).dtype == torch.float32
            module.train()


@pytest.mark.parametrize(("set_to_none", "accumulate"), [(True, 3), (False, 1), (False, 2)])
def test_gradients_add_up_as_they_do_eagerly(set_to_none, accumulate):
    mine, theirs, model = both(Mlp, CAPTURED, set_to_none=set_to_none, accumulate=accumulate)
    assert model.recorded == 1
    assert_like(mine, theirs)
    torch.testing.assert_close(mine[1].state_dict(), theirs[1].state_dict(), rtol=1e-3, atol=1e-4)


def test_shapes_that_come_often_are_recorded_and_the_others_are_not():
    sizes = [32, 16] * 10 + [7, 32, 16, 5]
    data = [data_of(Mlp, 1, size, seed)[0] for seed, size in enumerate(sizes)]
    mine, theirs, model = both(Mlp, CAPTURED, data=data)
    assert model.recorded == 2
    assert model.call.warmup_steps == 2 * 4 + 2
    assert_like(mine, theirs)
    pools = {graph._forward.pool() for graph in model.call._way._recordings.graphs.values()}
    pools |= {graph._backward.pool() for graph in model.call._way._recordings.graphs.values()}
    assert len(pools) == 1  # all of them in one memory


def test_evaluation_in_between_is_the_scripts_own_to_the_bit():
    seen = []

    def evaluate(number, module):
        x = data_of(Mlp, 1, 8, number)[0][0].to(DEVICE)
        if number % 4 == 3:
            module.eval()
            with torch.no_grad():
                seen.append(torch.equal(model(x), module(x)))
            module.train()

    module = Mlp().to(DEVICE)
    model = Scripted(module, CAPTURED)
    train(model, module, data_of(Mlp), between=evaluate)
    assert seen == [True] * 5
    assert model.recorded == 1


def test_a_replayed_step_waits_for_nothing():
    module = Mlp().to(DEVICE)
    model = Scripted(module, CAPTURED)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    x, y = (part.to(DEVICE) for part in data_of(Mlp, 1)[0])

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(6):
        step()
    assert model.recorded == 1
    with no_waiting():
        step()


# --- memory -----------------------------------------------------------------------------------------


def warmed(kind=Mlp, plan=CAPTURED):
    module = kind().to(DEVICE)
    model = Scripted(module, plan)
    for x, _ in data_of(kind, 4):
        model(x.to(DEVICE)).sum().backward()
    assert model.recorded == 1, model.call.given_up
    return model


def test_kept_outputs_and_gradients_stay_what_they_were():
    model, kept = warmed(), []
    for x, _ in data_of(Mlp, 4):
        model.module.zero_grad()
        out = model(x.to(DEVICE))
        out.pow(2).sum().backward()
        grad = model.module[0].weight.grad
        kept.append((out, out.clone(), grad, grad.clone()))
    for out, out_then, grad, grad_then in kept:
        assert torch.equal(out, out_then)
        assert torch.equal(grad, grad_then)
    assert len({grad.data_ptr() for *_, grad, _ in kept}) == 4


def tidied():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def reserved_mb():
    tidied()
    return torch.cuda.memory_reserved() / 2**20


def allocated_mb():
    tidied()
    return torch.cuda.memory_allocated() / 2**20


def recorded_mb():
    """Memory of the pools that graphs compute in, whether a tensor is in it or not."""
    tidied()
    segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]
    return sum(one["total_size"] for one in segments) / 2**20


def test_shapes_share_their_memory_and_give_it_back_when_all_is_forgotten():
    module = nn.Sequential(nn.Linear(256, 2048), nn.Tanh(), nn.Linear(2048, 256)).to(DEVICE)
    model = Scripted(module)

    def steps(rows, count):
        x = torch.randn(rows, 256, device=DEVICE)
        for _ in range(count):
            module.zero_grad()
            model(x).sum().backward()
        module.zero_grad()

    steps(65536, 2)  # its hidden layer takes half a gigabyte
    before, allocated, in_pools = reserved_mb(), allocated_mb(), recorded_mb()
    model.call.use(*CAPTURED)
    steps(65536, 5)
    one = reserved_mb()
    steps(61440, 5)
    two = reserved_mb()
    assert model.recorded == 2
    assert one - before > 1000
    assert two - one < 0.5 * (one - before)
    assert recorded_mb() - in_pools > 500
    model.call.use(*OWN)
    model.call.forget()
    assert recorded_mb() <= in_pools
    # Workspaces of cuBLAS for the stream that records stay. Each may be cut out of a large block that the allocator
    # had at hand, and then has to keep: what is reserved tells nothing.
    assert allocated_mb() - allocated < 256


# --- what scripts do with outputs -------------------------------------------------------------------


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x).view(-1)


def gan(critic, maker, modules, waiting, steps=STEPS):
    optimizers = [torch.optim.Adam(module.parameters(), lr=2e-3, betas=(0.5, 0.999)) for module in modules]
    generator, losses = torch.Generator(DEVICE).manual_seed(4), []
    draw = functools.partial(torch.randn, device=DEVICE, generator=generator)
    for _ in range(steps):
        optimizers[0].zero_grad()
        fake = maker(draw(16, 4))
        outs = [critic(fake.detach()), *(critic(draw(16, 6)) for _ in range(waiting - 1))]
        loss = sum(nn.functional.softplus(out).mean() for out in outs)
        loss.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        judged = nn.functional.softplus(-critic(fake)).mean()
        judged.backward()
        optimizers[1].step()
        losses += [loss.detach(), judged.detach()]
    return torch.stack(losses)


@pytest.mark.parametrize("waiting", [1, 2, 3])
def test_a_gan_is_right_however_many_calls_wait_for_their_backward_pass(waiting):
    found, models = [], []
    for plan in (CAPTURED, OWN):
        torch.manual_seed(2)
        modules = [Critic().to(DEVICE), nn.Linear(4, 6).to(DEVICE)]
        models.append([Scripted(module, plan) for module in modules])
        found.append(gan(*models[-1], modules, waiting))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)
    critic, maker = models[0]
    assert critic.call.given_up is None
    assert critic.recorded >= 2
    assert maker.recorded == 1


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.drop(self.norm(torch.tanh(self.trunk(x))))
        return self.first(hidden), self.second(hidden)


@pytest.mark.parametrize("surprise", ["create_graph", "retain_graph", "other outputs"])
def test_what_the_script_does_for_the_first_time_after_a_recording_is_right(surprise):
    def steps(run, module):
        torch.manual_seed(6)
        for number in range(8):
            x = torch.randn(8, 6, device=DEVICE).requires_grad_()
            module.zero_grad()
            first, second = run(x)
            if number != 6:
                first.pow(2).sum().backward()
                continue
            if surprise == "create_graph":
                (slope,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
                slope.norm().backward()
            elif surprise == "retain_graph":
                first.pow(2).sum().backward(retain_graph=True)
                second.pow(2).sum().backward()
            else:
                second.pow(2).sum().backward()
            odd = gradients(module)
        return odd, gradients(module), dict(module.named_buffers()), torch.rand(2, device=DEVICE)

    mine, theirs = Heads().to(DEVICE), Heads().to(DEVICE)
    model = Scripted(mine, CAPTURED)
    torch.testing.assert_close(steps(model, mine), steps(theirs, theirs), rtol=1e-3, atol=1e-5)
    assert model.call.given_up is None


def test_a_graph_that_is_kept_by_habit_is_differentiated_twice():
    module = Mlp().to(DEVICE)
    model = Scripted(module, CAPTURED)
    for x, _ in data_of(Mlp, 8):
        module.zero_grad()
        loss = model(x.to(DEVICE)).pow(2).sum()
        loss.backward(retain_graph=True)
    once = gradients(module)
    loss.backward()
    assert model.recorded >= 1
    for name, grad in gradients(module).items():
        torch.testing.assert_close(grad, 2 * once[name])


def test_gradients_that_are_differentiated_themselves_are_left_to_the_script():
    def penalties(run, module):
        optimizer, losses = torch.optim.Adam(module.parameters(), lr=2e-3), []
        generator = torch.Generator(DEVICE).manual_seed(1)
        for _ in range(10):
            x = torch.randn(16, 6, device=DEVICE, generator=generator)
            optimizer.zero_grad()
            score = run(x).mean()
            mixed = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(run(mixed).sum(), mixed, create_graph=True)
            loss = score + (slope.norm(dim=1) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    mine, theirs = Critic().to(DEVICE), Critic().to(DEVICE)
    model = Scripted(mine, CAPTURED)
    torch.testing.assert_close(penalties(model, mine), penalties(theirs, theirs), rtol=1e-3, atol=1e-5)
    assert model.recorded == 1  # the plain ones


# --- randomness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Mlp, Transformer, Cnn])
def test_dropout_draws_what_it_would_have_drawn(kind):
    mine, theirs, model = both(kind, CAPTURED, dropout=0.3)
    assert model.recorded == 1
    assert_like(mine, theirs)


@pytest.mark.parametrize("kind", [Mlp, Lstm])
def test_masks_differ_from_replay_to_replay_and_have_the_right_rate(kind):
    x = data_of(kind, 1, 64)[0][0].to(DEVICE)

    def outputs(plan):
        module = kind(0.5).to(DEVICE)
        model = Scripted(module, plan)
        found = []
        for _ in range(100):
            out = model(x)
            out.sum().backward()
            found.append(out.detach().pow(2).mean())
        return torch.stack(found).double(), model

    mine, model = outputs(CAPTURED)
    theirs, _ = outputs(OWN)
    assert model.recorded == 1, model.call.given_up
    assert len(mine.unique()) > 95
    assert abs(mine.mean() - theirs.mean()) < 5 * theirs.std() / 100**0.5
    assert 0.6 < mine.std() / theirs.std() < 1.6


def test_a_seed_set_in_the_middle_leaves_recordings_of_recurrent_layers_as_they_are():
    x = data_of(Lstm, 1, 64)[0][0].to(DEVICE)
    module = Lstm(0.5).to(DEVICE)
    model = Scripted(module, CAPTURED)
    for number in range(24):
        if number in (8, 16):
            torch.manual_seed(number)
            assert model.recorded == 1, model.call.given_up
            firsts = model.call.warmup_steps
        if number == 12:
            model(x[:7]).sum().backward()
        if number > 12:
            torch.cuda.empty_cache()  # the state of cuDNN's dropout has been made again elsewhere
        model(x).sum().backward()
        if number in (8, 16):
            assert model.call.warmup_steps == firsts
    assert model.recorded == 1, model.call.given_up
    assert all(p.isfinite().all() for p in module.parameters())


def test_a_seed_set_before_the_recording_does_not_hinder_it():
    x = data_of(Lstm, 1, 64)[0][0].to(DEVICE)
    model = Scripted(Lstm(0.5).to(DEVICE), CAPTURED)
    for number in range(6):
        torch.manual_seed(min(number, 2))  # cuDNN then waits for the device
        model(x).sum().backward()
    for _ in range(6):
        model(x).sum().backward()
    assert model.recorded == 1, model.call.given_up


def test_a_trial_of_recurrent_layers_that_drop_is_a_replay_and_what_it_recorded_stays():
    module = Lstm(0.5).to(DEVICE)
    model = Scripted(module)
    x = data_of(Lstm, 1)[0][0].to(DEVICE)
    for _ in range(2):
        model.call.remember_next()
        model(x).sum().backward()
    trial = functools.partial(model.call.trial, *model.call.last_inputs, model.call.last_output_grads)
    for _ in range(2):
        trial(*OWN)
        outputs, found = trial(*CAPTURED)
        assert all(made.isfinite().all() for made in (*outputs, *found.values()))
    model.call.use(*CAPTURED)
    for _ in range(3):
        assert model.recorded == 1, model.call.given_up
        model(x).sum().backward()
    assert model.call.warmup_steps == 0


def test_a_checkpointed_module_is_right():
    class Checkpointed(Mlp):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    mine, theirs, model = both(Checkpointed, CAPTURED, dropout=0.5)
    assert model.call.given_up is not None
    assert_like(mine, theirs)


# --- what is given up, and void ----------------------------------------------------------------------


class Reads(Mlp):
    def forward(self, x):
        return super().forward(x * 2 if x.mean().item() > 0 else x)


class Breaks(Mlp):
    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return super().forward(x)


@pytest.mark.parametrize(("kind", "reason"), [(Reads, "test_calls_gpu.py:"), (Breaks, "cannot be recorded")])
def test_what_cannot_be_recorded_runs_on_as_it_did(kind, reason):
    mine, theirs, model = both(kind, CAPTURED, dropout=0.2)
    assert reason in model.call.given_up
    assert_like(mine, theirs)
    torch.cuda.get_rng_state()
    assert torch.rand(2, device=DEVICE).sum() >= 0


def test_lengths_on_the_host_are_not_frozen():
    class Packs(Lstm):
        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.lstm(packed)[1][0][-1].repeat(1, 2))

    module = Packs().to(DEVICE)
    model = Scripted(module, CAPTURED)
    for seed in range(8):
        x = data_of(Lstm, 1, 8, seed)[0][0].to(DEVICE)
        lengths = torch.randint(1, 10, (8,), generator=torch.Generator().manual_seed(seed))
        out = model(x, lengths)
        torch.testing.assert_close(out, module(x, lengths))
        out.sum().backward()
    assert "lies on cpu" in model.call.given_up


def test_what_changes_in_the_module_makes_a_capture_void():
    def meddle(number, module):
        if number == 6:
            module[1].eval()
        if number == 9:
            module[3].p = 0.7
        if number == 12:
            module[0].weight.requires_grad_(False)
        if number == 15:
            module[2] = nn.Tanh()
        if number == 18:
            module.load_state_dict({name: tensor + 0.1 for name, tensor in module.state_dict().items()})
        if number == 21:
            module[4].weight = nn.Parameter(module[4].weight.detach())
            module[1].train()

    mine, theirs, model = both(Mlp, CAPTURED, data=data_of(Mlp, 26), dropout=0.2, between=meddle)
    assert model.call.given_up is None
    assert_like(mine, theirs)


def test_hooks_on_parameters_run_as_ever():
    class Hooked(Mlp):
        def __init__(self, dropout):
            super().__init__(dropout)
            self[0].weight.register_hook(lambda grad: grad * 3)

    mine, theirs, model = both(Hooked, CAPTURED)
    assert model.recorded == 1
    assert_like(mine, theirs)


# --- precision and layout ----------------------------------------------------------------------------


def error_of_gradients(plan):
    torch.manual_seed(0)
    left, right = (torch.randn(512, 512, dtype=torch.float64) for _ in range(2))
    layer = nn.Linear(512, 512, bias=False).to(DEVICE)
    model = Scripted(layer, plan)
    for _ in range(6):
        layer.zero_grad()
        model(left.to(DEVICE, torch.float32)).backward(right.to(DEVICE, torch.float32))
    truth = right.T @ left
    return float((layer.weight.grad.cpu().double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_tf32_holds_in_backward_and_nowhere_else(mode):
    assert error_of_gradients(plan_of("fp32", mode)) < 2e-6
    assert error_of_gradients(plan_of("tf32", mode)) > 2e-5
    assert error_of_gradients(plan_of("fp32", mode)) < 2e-6


@pytest.mark.parametrize("mode", ["eager", "captured"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_channels_last_has_the_losses_of_the_other_layout(mode, precision):
    plan = plan_of(precision, mode, layout="channels_last")
    mine, theirs, model = both(Cnn, plan, plan_of(precision, "eager"))
    assert model.call.given_up is None
    assert_like(mine, theirs, rtol=2e-2 if precision == "bf16" else 3e-3, atol=2e-3)
    before = {name: tensor.clone() for name, tensor in mine[1].state_dict().items()}
    model.call.use(*OWN)
    assert all(torch.equal(before[name], tensor) for name, tensor in mine[1].state_dict().items())
    assert mine[1].layers[0].weight.is_contiguous()


def test_plans_take_turns_and_keep_what_they_recorded():
    plans = [CAPTURED, plan_of(layout="channels_last"), OWN, plan_of("bf16")]
    modules = [Cnn().to(DEVICE), Cnn().to(DEVICE)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.02) for module in modules]
    model = Scripted(modules[0])
    losses, firsts = [[], []], {}
    for number, (x, y) in enumerate(data_of(Cnn, 48)):
        plan = plans[number // 6 % 4]
        model.call.use(*plan)
        for run, optimizer, told in zip((model, modules[1]), optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            optimizer.step()
            told.append(loss.detach())
        firsts.setdefault(plan, []).append(model.call.warmup_steps)
    torch.testing.assert_close(torch.stack(losses[0]), torch.stack(losses[1]), rtol=5e-2, atol=2e-2)
    for plan in plans:
        assert firsts[plan][5] == firsts[plan][-1], plan  # in its second turn each goes on at its pace
    model.call.tidy()
    assert len(model.call._ways) == 1


@pytest.mark.parametrize("mode", ["eager", "captured"])
@pytest.mark.parametrize("size", [1.0, 1e-7])
def test_fp16_gives_true_gradients_where_bf16_is_not(monkeypatch, mode, size):
    absent = SimpleNamespace(support="absent", reason="")
    monkeypatch.setattr(eager.machine, "dtype_fact", lambda *_: absent)
    monkeypatch.setattr(eager, "why_not_precision", lambda *_: None)
    module = Mlp().to(DEVICE)
    model = Scripted(module, plan_of("fp16", mode))
    x = data_of(Mlp, 1)[0][0].to(DEVICE)
    weights = torch.randn(32, 3, device=DEVICE) * size
    for _ in range(8):
        module.zero_grad()
        (model(x) * weights).sum().backward()
    made = torch.cat([g.flatten() for g in gradients(module).values()])
    assert model.call.given_up is None
    module.zero_grad()
    (module(x) * weights).sum().backward()
    truth = torch.cat([g.flatten() for g in gradients(module).values()])
    assert not torch.equal(made, truth)
    assert (made - truth).norm() < 2e-2 * truth.norm()


def test_a_capture_in_the_scripts_own_autocast_with_its_scaler():
    def run(plan):
        module = Transformer().to(DEVICE)
        model = Scripted(module, plan)
        optimizer, scaler, losses = torch.optim.AdamW(module.parameters(), lr=3e-3), torch.amp.GradScaler("cuda"), []
        for x, y in data_of(Transformer):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x.to(DEVICE))
                loss = nn.functional.cross_entropy(out, y.to(DEVICE))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        assert out.dtype is torch.float16
        return torch.stack(losses), model

    mine, model = run(CAPTURED)
    assert model.recorded == 1, model.call.given_up
    assert "autocast itself" in model.call.supports(*plan_of("bf16", "eager"))
    torch.testing.assert_close(mine, run(OWN)[0], rtol=2e-2, atol=2e-3)


# --- trials -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_a_trial_of_a_capture_agrees_with_one_of_the_own_plan_and_leaves_no_trace(kind):
    module = kind(0.0 if kind is Lstm else 0.3).to(DEVICE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    model = Scripted(module)
    for x, y in data_of(kind, 3):
        model.call.remember_next()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()
    before = copy.deepcopy(module.state_dict()), gradients(module), torch.cuda.get_rng_state(), torch.get_rng_state()
    args, kwargs = model.call.last_inputs
    trial = functools.partial(model.call.trial, args, kwargs, model.call.last_output_grads)
    torch.testing.assert_close(trial(*CAPTURED), trial(*OWN), rtol=1e-3, atol=1e-4)
    with without_dropout([module]):  # of 16 bits it draws other masks from the same seed
        torch.testing.assert_close(trial(*plan_of("bf16")), trial(*OWN), rtol=5e-2, atol=5e-2)
    after = module.state_dict(), gradients(module), torch.cuda.get_rng_state(), torch.get_rng_state()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    model.call.use(*CAPTURED)
    firsts = model.call.warmup_steps
    model(x.to(DEVICE)).sum().backward()
    assert model.call.warmup_steps == firsts  # what was recorded for the trial is at hand
