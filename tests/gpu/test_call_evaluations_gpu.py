"""Evaluation calls of a script under a capture on a real GPU: replayed, with the script's own numbers."""

import copy
import functools
import gc

import calling
import pytest
import torch
from calling import CAPTURED, OWN
from small_networks import Cnn, Lstm, Mlp
from torch import nn
from waiting import no_waiting

from hotlap.core.plan import Execution, Numerics
from hotlap.machine.tf32 import Tf32
from hotlap.script.calls import evaluations as call_evaluations
from hotlap.script.calls.evaluation_graph import ROUNDING
from hotlap.script.calls.evaluations import SEEN

DEVICE = torch.device("cuda")
WARM = SEEN + 1
"""Calls of a kind before the first that is a replay."""


@pytest.fixture(autouse=True)
def nothing_stays():
    """Captures of recurrent layers that drop out bind the device's generator as long as they are there."""
    yield
    gc.collect()


class Scripted(calling.Scripted):
    def __init__(self, module, plan=CAPTURED, **settings):
        super().__init__(module, plan, device=DEVICE, make_recorder=None, **settings)

    @property
    def recorded(self):
        """Kinds of evaluation calls."""
        return self.evaluations.recorded


class Transformer(nn.Module):
    """In evaluation without gradients torch's encoder layers take a way of their own."""

    shape = (12, 16)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, x, padding=None):
        return self.head(self.layers(x, src_key_padding_mask=padding)[:, 0])


MODELS = [Mlp, Cnn, Lstm, Transformer]


def inputs(kind, count, size=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, *kind.shape, generator=generator).to(DEVICE) for _ in range(count)]


def assert_same(mine, theirs):
    """To the bit; where a library takes another kernel in a recording, to the rounding that is allowed for."""
    assert mine.dtype is theirs.dtype
    assert mine.stride() == theirs.stride()
    if not torch.equal(mine, theirs):
        gap = (mine - theirs).abs().max().item()
        assert gap <= ROUNDING[theirs.dtype] * theirs.abs().max().item()


def warmed(make=Mlp, mode=torch.no_grad, calls=WARM + 1):
    module = make().to(DEVICE).eval()
    model = Scripted(module)
    with mode():
        for x in inputs(module, calls):
            model(x)
    assert model.recorded == 1, (model.evaluations.refused, model.evaluations.given_up)
    return model


# --- the plain case ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", MODELS)
def test_evaluation_is_replayed_with_the_scripts_own_numbers(kind, mode):
    model = warmed(kind, mode)
    with mode():
        for x in inputs(kind, 6, seed=2):
            made, truth = model(x), model.module(x)
            assert_same(made, truth)
            assert made.is_inference() == truth.is_inference() == (mode is torch.inference_mode)
    assert model.recorded == 1


@pytest.mark.parametrize("kind", [Mlp, Cnn])
def test_where_the_kernels_are_the_same_so_is_every_bit(kind):
    model = warmed(kind)
    with torch.no_grad():
        assert all(torch.equal(model(x), model.module(x)) for x in inputs(kind, 6, seed=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_the_scripts_own_autocast_outputs_have_its_dtype(dtype):
    module = Transformer().to(DEVICE).eval()
    model = Scripted(module)
    for x in inputs(Transformer, WARM + 4):
        with torch.no_grad(), torch.autocast("cuda", dtype=dtype):
            made, truth = model(x), module(x)
        assert_same(made, truth)
        assert made.dtype is dtype
    assert model.recorded == 1, model.evaluations.refused
    with torch.no_grad():
        module.head.weight.mul_(2)  # no cast of the weights as they were is kept
        with torch.autocast("cuda", dtype=dtype):
            assert_same(model(x), module(x))


def test_the_plans_own_precision_is_not_that_of_evaluation():
    module = Mlp().to(DEVICE).eval()
    model = Scripted(module, (Numerics(precision="bf16"), Execution(mode="captured")))
    with torch.no_grad():
        for x in inputs(Mlp, WARM + 4):
            assert_same(model(x), module(x))
    assert model.recorded == 1, model.evaluations.refused


def test_a_replay_waits_for_nothing():
    model, (x,) = warmed(), inputs(Mlp, 1)
    with torch.no_grad(), no_waiting():
        made = model(x)
    with torch.no_grad():
        assert_same(made, model.module(x))


def test_outputs_are_in_memory_of_their_own():
    model = warmed()
    with torch.no_grad():
        made = [(out, out.clone()) for out in map(model, inputs(Mlp, 4))]
    assert len({out.data_ptr() for out, _ in made}) == 4
    assert all(torch.equal(out, then) for out, then in made)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_outputs_that_share_memory_still_do(mode):
    class Halves(Mlp):
        def forward(self, x):
            hidden = self[0](x)
            first, second = hidden.chunk(2, 1)
            return {"halves": (first, second), "turned": hidden.t(), "out": super().forward(x), "name": "halves"}

    model = warmed(Halves, mode)
    (x,) = inputs(Mlp, 1, seed=5)
    with mode():
        mine, theirs = model(x), model.module(x)
    for one, other in zip((*mine["halves"], mine["turned"]), (*theirs["halves"], theirs["turned"]), strict=True):
        assert_same(one, other)
        assert one.untyped_storage().data_ptr() == mine["turned"].untyped_storage().data_ptr()
    assert_same(mine["out"], theirs["out"])
    assert mine["name"] == "halves"


def test_a_layout_of_the_plans_gives_outputs_as_the_script_has_them():
    plan = Numerics(layout="channels_last")
    found = []
    for mode in ("captured", "eager"):
        module = Cnn().to(DEVICE).eval()
        model = Scripted(module, (plan, Execution(mode=mode)))
        with torch.no_grad():
            found.append([model(x) for x in inputs(Cnn, WARM + 3)])
        if mode == "captured":
            assert model.recorded == 1, model.evaluations.refused
    for mine, theirs in zip(*found, strict=True):
        assert_same(mine, theirs)


# --- beside training --------------------------------------------------------------------------------


def evaluated(run, module, xs, mode=torch.no_grad):
    module.eval()
    with mode():
        made = [run(x) for x in xs]
    module.train()
    return made


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", MODELS)
def test_training_and_evaluation_take_turns_and_both_keep_their_recordings(kind, mode):
    """Each evaluation sees the weights of its moment."""
    module = kind().to(DEVICE)
    model = Scripted(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for epoch in range(4):
        for x in inputs(kind, 6, size=32, seed=epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x.flatten(1).sum(1).gt(0).long()).backward()
            optimizer.step()
        xs = inputs(kind, 6, seed=10 + epoch)
        for made, truth in zip(evaluated(model, module, xs, mode), evaluated(module, module, xs, mode), strict=True):
            assert_same(made, truth)
        if epoch == 0:
            firsts = model.call.warmup_steps
    assert model.recorded == 1, model.evaluations.refused
    assert model.call._way.recorded == 1, model.call.given_up
    assert model.call.warmup_steps == firsts


def test_an_evaluation_in_the_middle_of_a_step_leaves_its_backward_pass_alone():
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(20, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3)).to(DEVICE)
    theirs = copy.deepcopy(mine)
    model = Scripted(mine)
    for x in inputs(Mlp, 3 * WARM, size=64):
        for run, module in ((model, mine), (theirs, theirs)):
            module.zero_grad()
            out = run(x)
            (judged,) = evaluated(run, module, [x])
            (out * judged.softmax(1)).sum().backward()
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    assert model.recorded == 1, model.evaluations.refused
    assert model.call._way.recorded >= 1
    training = {graph._forward.pool() for graph in model.call._way._recordings.graphs.values()}
    assert evaluation_graph(model)._graph.pool() not in training


def evaluation_graph(model):
    (graph,) = (kind.graph for kind in model.evaluations._kinds.values() if kind.is_recorded)
    return graph


def test_kinds_share_their_memory_and_do_not_disturb_each_other():
    model = Scripted(Mlp().to(DEVICE).eval())
    with torch.no_grad():
        for small, large in zip(inputs(Mlp, 2 * WARM, size=8), inputs(Mlp, 2 * WARM, size=64, seed=2), strict=True):
            assert torch.equal(model(small), model.module(small))
            assert torch.equal(model(large), model.module(large))
    assert model.recorded == 2
    assert len({kind.graph._graph.pool() for kind in model.evaluations._kinds.values()}) == 1


def test_on_another_stream_calls_are_eager():
    model, (x,) = warmed(), inputs(Mlp, 1)
    graph, other = evaluation_graph(model), torch.cuda.Stream()
    kept = graph.outputs[0].clone()
    other.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(other):
        for _ in range(WARM + 2):
            made = model(2 * x)
    torch.cuda.synchronize()
    with torch.no_grad():
        assert_same(made, model.module(2 * x))
    assert torch.equal(graph.outputs[0], kept)
    assert model.recorded == 1


# --- what makes it void -----------------------------------------------------------------------------


def test_weights_that_were_changed_in_place_are_seen_by_the_next_replay():
    model = warmed()
    graph = evaluation_graph(model)
    with torch.no_grad():
        for change in (
            lambda module: module[0].weight.mul_(0.5),
            lambda module: module[1].running_mean.add_(1),
            lambda module: module.load_state_dict({n: t + 1 for n, t in module.state_dict().items()}),
        ):
            change(model.module)
            (x,) = inputs(Mlp, 1)
            assert torch.equal(model(x), model.module(x))
            assert evaluation_graph(model) is graph


def assigned(module):
    module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()}, assign=True)


CHANGES = {
    "weights put in": assigned,
    "a new weight": lambda module: setattr(module[4], "weight", nn.Parameter(torch.randn(3, 64, device=DEVICE))),
    "to and fro": lambda module: module.double().float(),
    "a new layer": lambda module: module.insert(3, nn.Sigmoid().eval()),
    "a hook": lambda module: module[2].register_forward_hook(lambda _, __, out: out * 2),
    "a setting": lambda module: setattr(module[1], "eps", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_the_module_makes_a_recording_void(change):
    model = warmed()
    before = evaluation_graph(model)
    CHANGES[change](model.module)
    with torch.no_grad():
        for x in inputs(Mlp, 2 * WARM):
            assert torch.equal(model(x), model.module(x))
    if change not in ("a hook", "to and fro"):  # what comes back may lie where it was
        assert evaluation_graph(model) is not before
    assert model.recorded == (0 if change == "a hook" else 1), model.evaluations.refused


def test_switches_of_the_process_are_heeded():
    torch.manual_seed(0)
    module = nn.Linear(512, 512, bias=False).to(DEVICE).eval()
    model, x = Scripted(module), torch.randn(64, 512, device=DEVICE)
    with torch.no_grad():
        for _ in range(WARM + 2):
            exact = model(x)
        with Tf32():
            rough = [model(x) for _ in range(WARM + 2)][-1]
            assert torch.equal(rough, module(x))
        assert not torch.equal(rough, exact)
        assert torch.equal(model(x), exact)
    assert model.recorded == 2


# --- what is refused --------------------------------------------------------------------------------


class Reads(Mlp):
    def forward(self, x):
        return super().forward(x * 2 if x.mean().item() > 0 else x)


class Draws(Mlp):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class Sends(Mlp):
    def forward(self, x):
        return super().forward(x).cpu()


class Breaks(Mlp):
    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return super().forward(x)


class Overwrites(Mlp):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Keeps(Mlp):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


UNFIT = {
    Reads: "test_call_evaluations_gpu.py:",
    Draws: "draws random numbers",
    Sends: "not all of its outputs are on",
    Breaks: "",
    Overwrites: "in place",
    Keeps: "'last'",
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", UNFIT)
def test_what_cannot_be_replayed_is_refused_and_runs_as_ever(kind, mode):
    def run(model):
        torch.manual_seed(3)
        with mode():
            return [model(x) for x in inputs(Mlp, 2 * WARM)], torch.rand(2, device=DEVICE)

    mine = kind().to(DEVICE).eval()
    theirs = copy.deepcopy(mine)
    model = Scripted(mine)
    made, truth = run(model), run(theirs)
    assert all(map(torch.equal, made[0], truth[0]))
    assert torch.equal(made[1], truth[1])
    assert model.recorded == 0
    if kind is Keeps and mode is torch.inference_mode:
        assert model.evaluations.refused == ["it holds tensors made in inference mode"]
    else:
        assert UNFIT[kind] in " ".join(model.evaluations.refused)
    assert model.call.given_up is None


def test_a_copy_to_the_host_that_nobody_waits_for_is_none_of_a_replays():
    class SendsAhead(Mlp):
        def forward(self, x):
            made = super().forward(x)
            return made, made.to("cpu", non_blocking=True)

    model = Scripted(SendsAhead().to(DEVICE).eval())
    with torch.no_grad():
        for x in inputs(Mlp, 2 * WARM):
            made, sent = model(x)
            torch.cuda.synchronize()
            assert torch.equal(made.cpu(), sent)
    assert model.evaluations.refused == ["not all of its outputs are on cuda:0"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_leaves_padding_out_is_right_whether_it_is_replayed_or_not():
    module = Transformer().to(DEVICE).eval()
    model = Scripted(module)
    with torch.no_grad():
        for number, x in enumerate(inputs(Transformer, 2 * WARM)):
            padding = torch.arange(12, device=DEVICE).expand(16, 12) >= 12 - number % 5
            assert_same(model(x, padding), module(x, padding))
            assert_same(model(x), module(x))
    assert model.recorded >= 1


def test_a_recording_made_in_inference_mode_leaves_the_randomness_of_the_device_to_training():
    gc.collect()  # it may be the first graph of the process
    model = warmed(functools.partial(Mlp, 0.5), torch.inference_mode)
    module = model.module.train()
    for x in inputs(Mlp, 8):
        model(x).sum().backward()
    assert model.call._way.recorded == 1, model.call.given_up
    with torch.no_grad():
        assert len({module[3](torch.ones(64, device=DEVICE)).sum().item() for _ in range(8)}) > 1
    made = evaluated(model, module, inputs(Mlp, 2), torch.inference_mode)
    assert all(map(torch.equal, made, evaluated(module, module, inputs(Mlp, 2), torch.inference_mode)))


def test_a_recurrent_layer_that_drops_in_training_is_replayed_in_evaluation():
    module = Lstm(0.5).to(DEVICE)
    model = Scripted(module)
    for x in inputs(Lstm, WARM + 6):
        model(x).sum().backward()
        module.zero_grad()
        (made,), (truth,) = evaluated(model, module, [x]), evaluated(module, module, [x])
        assert_same(made, truth)
    assert model.recorded == 1, model.evaluations.refused
    assert model.call._way.recorded == 1, model.call.given_up


# --- memory -----------------------------------------------------------------------------------------


def recorded_mb():
    """Memory of the pools that graphs compute in; nothing is collected for it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]
    return sum(one["total_size"] for one in segments) / 2**20


@pytest.mark.parametrize("how", ["forget", "tidy", "give up"])
def test_memory_is_given_back_when_it_is_let_go_of(how):
    gc.collect()
    module = nn.Sequential(nn.Linear(256, 2048), nn.Tanh(), nn.Linear(2048, 256)).to(DEVICE).eval()
    model, x = Scripted(module), torch.randn(65536, 256, device=DEVICE)
    before = recorded_mb()
    with torch.no_grad():
        for _ in range(WARM + 1):
            model(x)
    assert model.recorded == 1, model.evaluations.refused
    assert recorded_mb() - before > 500
    if how == "forget":
        model.call.forget()
    elif how == "tidy":
        model.call.use(*OWN)
        model.call.tidy()
    else:
        model.call._way._give_up("on purpose")
    assert recorded_mb() <= before


def test_where_memory_is_short_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(call_evaluations, "LEAST_FREE", 1.0)
    model = Scripted(Mlp().to(DEVICE).eval())
    with torch.no_grad():
        for x in inputs(Mlp, 2 * WARM):
            assert torch.equal(model(x), model.module(x))
    assert "memory" in model.evaluations.given_up
    assert model.recorded == 0


def test_memory_that_runs_out_while_recording_ends_it():
    class Hungry(Mlp):
        def forward(self, x):
            if torch.cuda.is_current_stream_capturing():
                torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
            return super().forward(x)

    model = Scripted(Hungry().to(DEVICE).eval())
    with torch.no_grad():
        for size in (16, 8):
            for x in inputs(Mlp, 2 * WARM, size=size):
                assert torch.equal(model(x), model.module(x))
    refused = [kind.refused for kind in model.evaluations._kinds.values()]
    assert "out of memory" in (model.evaluations.given_up or ""), refused
    assert torch.rand(2, device=DEVICE).sum() >= 0
    assert model.call.given_up is None
