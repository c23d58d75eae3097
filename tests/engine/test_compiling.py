"""Compiled steps: the numbers of plain ones, whatever the compiler does; and a model that knows nothing of it."""

import copy
import functools
import io
import signal
import time

import psutil
import pytest
import torch
from plain import class_data
from torch import nn

from hotlap import Plan, Rig
from hotlap.core.errors import PlanError, TrainingError
from hotlap.engine import compiling
from hotlap.engine.assists.norms import counted_at_once
from hotlap.engine.blocks import repeated_blocks
from hotlap.engine.capture.recording import Watch
from hotlap.engine.compiling import CompiledStep, why_not_compiled
from hotlap.tuner.laps import LapClock

CPU = torch.device("cpu")
CHOICES = ("model", "blocks")
DATA = class_data(48, dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.layer(x))))


class Net(nn.Module):
    """A stem with a batch norm of its own, blocks and a head; `inside` runs between them, as code of the user's."""

    def __init__(self, dropout=0.0, blocks=3, inside=None):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(8, 3)
        self.inside = inside

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if self.inside is not None:
            x = self.inside(x)
        return self.head(x)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def rig_for(model, what="no", **choices):
    return Rig(model, sgd, nn.CrossEntropyLoss(), plan=Plan().but(compile=what, **choices), device="cpu")


def trained(model, what="no", *, data=DATA, batch=8, epochs=1, between=None, **choices):
    """Losses and gradients of all steps, and the rig."""
    torch.manual_seed(7)
    rig = rig_for(model, what, **choices)
    losses, gradients = [], []
    for window in rig.feed(data, batch_size=batch, epochs=epochs):
        losses.append(rig.step(window))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        if between is not None:
            between(rig)
    return torch.stack(losses), torch.stack(gradients), rig


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def entries(rig, outcome):
    return [entry for entry in rig.ledger if (entry.what, entry.outcome) == ("compile", outcome)]


@pytest.fixture(scope="module", autouse=True)
def patient():
    """The compiler may take as long as it likes: on a busy machine that is minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "MOST_S", 7200.0)
        yield


@pytest.fixture
def quick(monkeypatch):
    """A compiler that makes no code, and so computes bit by bit what is computed without it."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")


def broken(graph, inputs):
    raise RuntimeError("no such instruction\nand many lines more")


# --- the real compiler -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    """One real compile: of blocks that drop out, since these are compiled once for all."""
    return trained(Net(dropout=0.5), "blocks", epochs=2)


@pytest.fixture(scope="module")
def same_maths():
    """Another one, of blocks that do not, to be held against plain ones."""
    return trained(Net(), "blocks")


def test_losses_and_gradients_of_real_compiled_code_are_those_of_plain_steps_to_rounding(same_maths):
    losses, gradients, rig = same_maths
    plain_losses, plain_gradients, plain = trained(Net())
    assert not rig.given_up
    torch.testing.assert_close(losses, plain_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, plain_gradients, rtol=1e-3, atol=1e-5)
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(rig.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)


def test_real_compiling_is_paid_for_in_the_ledger_once_and_blocks_share_it(same_maths):
    rig = same_maths[2]
    (made,) = entries(rig, "measured")
    assert made.cost_s > 0
    assert made.figures == {"graphs": 1, "breaks": 0}
    assert made.why.startswith("torch.compile of the blocks took ")


def test_dropout_of_real_compiled_code_differs_from_step_to_step(compiled):
    rig = compiled[2]
    assert rig.given_up is None
    window = (DATA[0][:8], DATA[1][:8])
    seen = []
    for _ in range(4):
        snapshot = rig.snapshot()
        rig.step(window)
        seen.append(torch.cat([p.grad.flatten() for p in rig.model.parameters()]))
        draws = torch.get_rng_state()
        rig.restore(snapshot)
        torch.set_rng_state(draws)
    assert all(not torch.equal(one, other) for n, one in enumerate(seen) for other in seen[:n])
    rig.restore(snapshot)
    rig.step(window)
    assert torch.equal(torch.cat([p.grad.flatten() for p in rig.model.parameters()]), seen[-1])


# --- plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("what", CHOICES)
def test_under_a_compiler_that_makes_no_code_all_is_bit_by_bit_the_same(quick, what, dropout):
    losses, gradients, rig = trained(Net(dropout), what, epochs=2)
    plain_losses, plain_gradients, plain = trained(Net(dropout), epochs=2)
    assert len(entries(rig, "measured")) == 1
    assert torch.equal(losses, plain_losses)
    assert torch.equal(gradients, plain_gradients)
    assert_same_state(state_of(rig.model), state_of(plain.model))


@pytest.mark.parametrize("what", CHOICES)
def test_a_model_of_torchs_own_classes_is_compiled_too(quick, what):
    def model():
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)]
        return nn.Sequential(nn.Linear(5, 8), *layers, nn.Linear(8, 3))

    losses, _, rig = trained(model(), what)
    assert entries(rig, "measured")[0].figures["graphs"] == 1
    assert torch.equal(losses, trained(model())[0])


def test_plans_may_alternate_step_by_step_and_nothing_is_compiled_twice(quick):
    turns = [Plan().but(compile=what) for what in ("no", "model", "blocks", "model", "no", "blocks")]

    def change(rig):
        rig.use(turns[rig.steps % len(turns)])

    model = Net(0.3)
    rig = None
    torch.manual_seed(7)
    rig = rig_for(model)
    rig.keep_plans()
    losses = []
    for window in rig.feed(DATA, batch_size=8, epochs=3):
        change(rig)
        losses.append(rig.step(window))
    assert torch.equal(torch.stack(losses), trained(Net(0.3), epochs=3)[0])
    assert len(entries(rig, "measured")) == 2


def test_micro_batches_and_other_precisions_are_compiled_alike(quick):
    choices = {"precision": "bf16", "micro_batch": 4}
    losses, _, rig = trained(Net(), "model", **choices)
    assert torch.equal(losses, trained(Net(), **choices)[0])
    assert len(entries(rig, "measured")) == 1


def test_between_steps_the_model_is_as_the_user_gave_it(quick):
    model = Net()
    inside = {name: dict(vars(layer)) for name, layer in model.named_modules()}
    rig = trained(model, "blocks")[2]
    assert rig.model is model
    for name, layer in model.named_modules():
        assert vars(layer).keys() == inside[name].keys()
    twin = copy.deepcopy(model)
    assert_same_state(state_of(twin), state_of(model))
    file = io.BytesIO()
    torch.save(model.blocks[0], file)
    file.seek(0)
    assert_same_state(state_of(torch.load(file, weights_only=False)), state_of(model.blocks[0]))


def test_evaluation_runs_uncompiled(quick):
    rig = trained(Net(), "model")[2]
    before = rig.warmup_steps
    assert rig.evaluate(DATA, batch_size=16)["loss"] > 0
    assert rig.warmup_steps == before == 1


def test_a_hook_that_comes_after_compiling_runs(quick):
    rig = trained(Net(), "model")[2]
    seen = []
    rig.model.blocks[1].layer.register_forward_hook(lambda *_: seen.append(1))
    rig.step((DATA[0][:8], DATA[1][:8]))
    assert seen == [1]


def test_laps_are_not_timed_while_something_is_compiled(quick):
    rig = rig_for(Net(), "model")
    windows = rig.feed(DATA, batch_size=8, epochs=1)
    clock = LapClock(rig)
    before = rig.warmup_steps
    rig.step(next(windows))
    assert rig.warmup_steps == before + 1
    clock.stepped(1)
    assert not clock._timing
    rig.step(next(windows))
    assert rig.warmup_steps == before + 1
    clock.stepped(1)
    assert clock._timing


def test_what_was_compiled_aside_is_paid_for_and_kept(quick):
    rig = rig_for(Net())
    window = (DATA[0][:8], DATA[1][:8])
    with rig.aside():
        rig.use(Plan().but(compile="model"))
        rig.step(window)
    (made,) = entries(rig, "measured")
    assert made.cost_s > 0
    assert made.plan == rig.plan == Plan()


# --- shapes ------------------------------------------------------------------------------------------


def test_the_last_shorter_batch_of_an_epoch_is_not_worth_compiling(quick):
    losses, _, rig = trained(Net(), "model", data=class_data(122, dtype=torch.float32), batch=5, epochs=3)
    assert torch.equal(losses, trained(Net(), data=class_data(122, dtype=torch.float32), batch=5, epochs=3)[0])
    assert len(entries(rig, "measured")) == 1


def test_the_second_shape_makes_code_for_all_that_come(quick):
    rig, plain = rig_for(Net(), "model"), rig_for(Net())
    for _ in range(4):
        for size in (2, 4, 6, 8):
            batch = (DATA[0][:size], DATA[1][:size])
            assert torch.equal(rig.step(batch), plain.step(batch))
    assert len(entries(rig, "measured")) == 2
    assert rig.given_up is None


class Reads(nn.Module):
    """Sequences of any width."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 3)
        for block in self.blocks:
            block.norm = nn.LayerNorm(8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_all_widths_of_as_many_samples_are_compiled_from_the_third_on_at_once(quick):
    rig, plain = rig_for(Reads(), "blocks"), rig_for(Reads())
    step, classes = rig._step, DATA[1][:4]
    for number, width in enumerate((16, 24, 24, 32, 40, 48, 16)):
        batch = (torch.randn(4, width, 8, generator=torch.Generator().manual_seed(number)), classes)
        assert torch.equal(rig.step(batch), plain.step(batch))
    assert len(step._batches) == 5
    assert len(entries(rig, "measured")) == 2


def test_so_many_shapes_are_compiled_and_no_more(quick, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_SHAPES", 3)
    rig = rig_for(Reads(), "blocks")
    for width in (16, 24, 24, 32, 40, 40, 48, 48):
        rig.step((torch.randn(4, width, 8), DATA[1][:4]))
    assert len(rig._step._batches) == 3


def test_what_varies_in_one_model_does_not_in_the_next(quick):
    for sizes in ((8, 4, 4), (8, 8)):
        rig = rig_for(Net(), "model")
        for size in sizes:
            rig.step((DATA[0][:size], DATA[1][:size]))
        assert len(entries(rig, "measured")) == len(set(sizes))


# --- under capture -----------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch):
    """What a compiler that makes no code was given."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compiling, "BACKEND", backend)
    return found


def test_whoever_looks_on_at_a_step_sees_no_compiler_and_is_not_compiled(graphs):
    rig, batch = rig_for(Net(), "model"), (DATA[0][:8], DATA[1][:8])
    rig._step.look = lambda loss: None
    for number in range(3):
        with Watch(rig.modules, CPU) as watch:
            hooks = len(torch.nn.modules.module._global_forward_hooks)
            rig.step(batch)
            assert len(torch.nn.modules.module._global_forward_hooks) == hooks
        assert watch.reason is None
        assert len(graphs) == 1, f"window {number}"
    rig._step.look = None
    rig.step(batch)
    assert len(graphs) == 1


def test_while_a_step_is_recorded_nothing_is_compiled(graphs, monkeypatch):
    rig, batch, other = rig_for(Net(), "model"), (DATA[0][:8], DATA[1][:8]), (DATA[0][:4], DATA[1][:4])
    rig.step(batch)
    monkeypatch.setattr(CompiledStep, "_is_recording", lambda self: True)
    norm = rig.model.blocks[0].norm
    counter, before = norm.num_batches_tracked, int(norm.num_batches_tracked)
    with counted_at_once([(norm, 1)]):
        rig._step.gradients([batch], [8], False)
        assert norm.num_batches_tracked is None
    assert norm.num_batches_tracked is counter
    assert int(counter) == before + 1
    rig._step.gradients([other], [4], False)
    assert len(graphs) == 1


# --- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", CHOICES)
def test_where_the_compiler_fails_the_batch_at_hand_is_trained_on_all_the_same(monkeypatch, what):
    monkeypatch.setattr(compiling, "BACKEND", broken)
    losses, gradients, rig = trained(Net(0.3), what)
    plain_losses, plain_gradients, plain = trained(Net(0.3))
    assert torch.equal(losses, plain_losses)
    assert torch.equal(gradients, plain_gradients)
    assert_same_state(state_of(rig.model), state_of(plain.model))
    (fault,) = entries(rig, "fault")
    assert fault.why == ("runs uncompiled, since the compiler failed with RuntimeError: no such instruction")
    assert fault.cost_s > 0
    assert rig.given_up == "the compiler failed with RuntimeError: no such instruction"


def test_a_failure_for_a_later_shape_ends_it_too(monkeypatch):
    calls = []

    def at_first(graph, inputs):
        calls.append(graph)
        return graph.forward if len(calls) == 1 else broken(graph, inputs)

    monkeypatch.setattr(compiling, "BACKEND", at_first)
    mine, theirs = rig_for(Net(), "model"), rig_for(Net())
    for size in (8, 4, 4, 8):
        batch = (DATA[0][:size], DATA[1][:size])
        assert torch.equal(mine.step(batch), theirs.step(batch))
    assert len(calls) == 2
    assert "no such instruction" in mine.given_up
    assert_same_state(state_of(mine.model), state_of(theirs.model))


def test_a_plan_that_was_given_up_can_be_left_and_taken_again(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", broken)
    rig = trained(Net(), "model")[2]
    rig.use(Plan())
    assert rig.given_up is None
    rig.use(Plan().but(compile="model"))
    rig.step((DATA[0][:8], DATA[1][:8]))
    assert len(entries(rig, "fault")) == 1


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="alarms need POSIX")
def test_a_compiler_that_hangs_is_stopped_and_the_alarm_is_put_away(monkeypatch):
    left = []

    def hangs(graph, inputs):
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        signal.setitimer(signal.ITIMER_REAL, 1e-3)  # here and nowhere before, however slow the machine is
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(compiling, "BACKEND", hangs)
    losses, _, rig = trained(Net(0.3), "blocks")
    assert torch.equal(losses, trained(Net(0.3))[0])
    assert len(left) == 1
    assert 0 < left[0] <= compiling.MOST_S
    assert rig.given_up == "compiling took longer than 2 h 0 min"
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_after_a_compiler_that_hangs_none_of_its_processes_is_left(monkeypatch):
    from torch._inductor.async_compile import AsyncCompile

    before = set(psutil.Process().children(recursive=True))

    def hangs(graph, inputs):
        pool = AsyncCompile.process_pool()
        for _ in range(2):
            pool.submit(functools.partial(time.sleep, 3600))
        while len(set(psutil.Process().children(recursive=True)) - before) < 2:  # a leader, and a worker that sleeps
            time.sleep(0.05)
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 5.0)
        pool.submit(functools.partial(time.sleep, 3600)).result()

    monkeypatch.setattr("torch._inductor.config.compile_threads", 2)
    monkeypatch.setattr("torch._inductor.config.worker_start_method", "subprocess")
    monkeypatch.setattr(compiling, "BACKEND", hangs)
    AsyncCompile.process_pool.cache_clear()
    losses, _, rig = trained(Net(0.3), "blocks")
    assert rig.given_up == "compiling took longer than 2 h 0 min"
    assert torch.equal(losses, trained(Net(0.3))[0])
    left = set(psutil.Process().children(recursive=True)) - before
    assert [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="alarms need POSIX")
def test_an_alarm_of_the_users_own_is_left_alone(quick, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_S", 0.0)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        rig = trained(Net(), "blocks")[2]
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rig.given_up is None


def test_a_storm_of_recompiling_is_stopped(quick, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_RECOMPILES", 3)

    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 1 / self.calls)

    losses, _, rig = trained(Counting(), "model", epochs=4)
    assert torch.equal(losses, trained(Counting(), epochs=4)[0])
    assert rig.given_up == "it was recompiled 4 times for known shapes"
    assert len(entries(rig, "measured")) == 5
    (fault,) = entries(rig, "fault")
    assert "4 times" in fault.why


def test_a_storm_of_graph_breaks_is_stopped(quick):
    class Breaking(Net):
        def forward(self, x):
            for number in range(12):
                x = _torn(x, str(number))  # of words, each makes code of its own
            return super().forward(x)

    losses, _, rig = trained(Breaking(), "model")
    assert torch.equal(losses, trained(Breaking())[0])
    assert rig.given_up.startswith("it has ")
    assert len(entries(rig, "fault")) == 1


@torch._dynamo.disable
def _left_to_python(x):
    return x


def _torn(x, number):
    x = x + int(number)
    x = _left_to_python(x)
    return x - int(number)


def test_a_few_graph_breaks_are_borne(quick):
    losses, _, rig = trained(Net(inside=_left_to_python), "model")
    assert torch.equal(losses, trained(Net(inside=_left_to_python))[0])
    assert rig.given_up is None
    (made,) = entries(rig, "measured")
    assert made.figures["breaks"] == 1


@pytest.mark.parametrize("after", [0, 3])
def test_an_error_of_the_users_own_comes_up_as_it_would(quick, after):
    calls = []

    def angry(x):
        calls.append(1)
        if len(calls) > after:
            raise KeyError("the user's own")
        return x

    with pytest.raises(KeyError, match="the user's own") as caught:
        trained(Net(inside=torch._dynamo.disable(angry)), "model")
    assert caught.value.__context__ is None


def test_shapes_that_do_not_fit_are_explained_as_without_compiling(quick):
    rig = rig_for(Net(), "model")
    with pytest.raises(TrainingError, match="takes 5 features and was given 6") as caught:
        rig.step((torch.zeros(4, 6), DATA[1][:4]))
    assert type(caught.value.__cause__) is RuntimeError
    assert rig.given_up is None
    rig.step((DATA[0][:8], DATA[1][:8]))
    assert entries(rig, "measured")


# --- what is supported -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", CHOICES)
def test_a_model_that_is_compiled_already_is_left_alone(what):
    inside = Net()
    inside.blocks[0].compile(backend="eager")
    for model in (torch.compile(Net(), backend="eager"), inside):
        with pytest.raises(PlanError, match="the model is compiled already"):
            rig_for(model, what)


def test_a_model_compiled_by_its_user_later_on_calls_what_it_called(quick):
    rig = rig_for(Net(), "blocks")
    rig.model.blocks[0].compile(backend="eager")
    theirs = rig.model.blocks[0]._compiled_call_impl
    rig.step((DATA[0][:8], DATA[1][:8]))
    assert rig.model.blocks[0]._compiled_call_impl is theirs
    assert rig.model.blocks[1]._compiled_call_impl is None


def test_blocks_need_a_model_that_repeats_some():
    assert not repeated_blocks(nn.Linear(5, 3))
    assert why_not_compiled(nn.Linear(5, 3), "blocks", CPU) == "the model repeats no blocks that could be compiled"
    assert why_not_compiled(Net(), "blocks", CPU) is None


def test_a_cpu_needs_a_compiler_for_c_plus_plus(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = why_not_compiled(Net(), "model", CPU)
    assert reason.startswith("torch.compile needs a C++ compiler on a CPU, and no-such-compiler was not found")


def test_a_torch_that_compiles_backward_passes_late_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("hotlap.engine.compiling.EARLY_BACKWARD", "no_such_setting")
    assert "only while they run" in why_not_compiled(Net(), "model", torch.device("cpu"))


def test_other_devices_and_windows_are_refused_in_one_line(monkeypatch):
    assert "mps" in why_not_compiled(Net(), "model", torch.device("mps"))
    monkeypatch.setattr("sys.platform", "win32")
    assert "Windows" in why_not_compiled(Net(), "model", CPU)


def test_a_gpu_needs_triton_and_a_capability(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "Triton" in why_not_compiled(Net(), "model", cuda)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert "this one has 6.1" in why_not_compiled(Net(), "model", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not_compiled(Net(), "model", cuda) is None


def test_checkpointed_blocks_are_not_compiled():
    with pytest.raises(PlanError, match="blocks that are not compiled"):
        rig_for(Net(), "model", checkpoint=2)
