"""Kernels of attention chosen by their time: here the times are made up, and the kernels are those of a CPU."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_encoders import FUSED, batch, tiny
from torch import nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hotlap import Plan, Rig
from hotlap.core.tricks import ATTENTION_KERNEL
from hotlap.engine.assists import attention
from hotlap.engine.assists.attention import (
    Attention,
    Call,
    Choice,
    alike,
    candidates,
    fastest,
    in_words,
    is_finite_where,
    masks_of,
    own_kernel,
)
from hotlap.engine.capture import captured_step as capture_module
from hotlap.engine.capture.captured_step import WARM_UPDATES, CapturedStep, ReplayOutputs, signature
from hotlap.engine.precision import Switches
from hotlap.engine.step import Window

MATH, FLASH, EFFICIENT = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN = SDPBackend.CUDNN_ATTENTION
OWN = F.scaled_dot_product_attention


class Clock:
    """Stands in for what looks for kernels and times them: math, which a CPU has too, is the faster one."""

    def __init__(self, monkeypatch, *, seconds=(2.0, 1.0), kernel=MATH):
        self.timed, self.seconds, self.kernel = [], seconds, kernel
        monkeypatch.setattr(attention, "_known", {})
        monkeypatch.setattr(attention, "candidates", lambda call, own: [self.kernel])
        monkeypatch.setattr(attention, "timed", self.time)

    def time(self, call, kernels):
        torch.rand(3)  # as dropout does
        self.timed.append(call.query.shape[-2])
        return {None: self.seconds[0], self.kernel: self.seconds[1]}


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def forced(monkeypatch):
    """The kernels that calls were made by; None for torch's choice."""
    made, by = [], Call.by

    def noted(self, kernel):
        made.append(kernel)
        return by(self, kernel)

    monkeypatch.setattr(Call, "by", noted)
    return made


def silent(why, cost_s):
    """Hears what was chosen."""


def tensors(width=6, *, grad=False, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(3, 2, 2, width, 8, generator=generator, dtype=dtype)
    return [tensor.clone().requires_grad_(grad) for tensor in made]


# --- what is seen, and what it is answered with ----------------------------------------------------------


def test_a_call_is_answered_by_the_faster_kernel_to_the_last_bit(clock):
    query, key, value = tensors()
    with Attention(silent):
        answer = F.scaled_dot_product_attention(query, key, value, scale=0.3)
    with sdpa_kernel(MATH):
        expected = OWN(query, key, value, scale=0.3)
    assert torch.equal(answer, expected)
    assert not torch.equal(answer, OWN(query, key, value, scale=0.3))  # or this would prove nothing


def test_a_shape_is_timed_once_in_the_process(clock):
    for _ in range(2):
        with Attention(silent):
            for width in (6, 9, 6):
                F.scaled_dot_product_attention(*tensors(width))
    assert clock.timed == [6, 9]


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": True},
        {"dropout_p": 0.5},
        {"scale": 0.5},
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool)},
        {"attn_mask": torch.zeros(6, 6)},
        {"attn_mask": torch.ones(1, 6, dtype=torch.bool).expand(6, 6)},
    ],
    ids=["causal", "dropout", "scale", "mask", "bias", "broadcast"],
)
def test_what_a_kernel_may_care_for_is_timed_apart(clock, changes):
    with Attention(silent):
        F.scaled_dot_product_attention(*tensors(grad=True))
        F.scaled_dot_product_attention(*tensors(grad=True), **changes)
    assert len(clock.timed) == 2


def test_gradients_autocast_layout_and_switches_are_timed_apart(clock):
    with Attention(silent):
        F.scaled_dot_product_attention(*tensors())
        F.scaled_dot_product_attention(*tensors(grad=True))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            F.scaled_dot_product_attention(*tensors())
        F.scaled_dot_product_attention(*(tensor.mT.contiguous().mT for tensor in tensors()))
        with sdpa_kernel([MATH, FLASH]):
            F.scaled_dot_product_attention(*tensors())
    assert len(clock.timed) == 5


def test_layers_of_torch_are_seen(clock, forced):
    x = torch.randn(2, 5, 8)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with Attention(silent):
        nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, need_weights=False)
        layer(x)
    assert forced == [MATH, MATH]


@pytest.mark.parametrize("name", FUSED)
def test_encoders_of_transformers_are_seen(clock, forced, name):
    model = tiny(name, "sdpa")
    with Attention(silent):
        model(**batch(12, padded=True, samples=4, seed=0))
    assert forced
    assert set(forced) == {MATH}


def test_outside_torch_is_as_it_was_even_after_an_error(clock):
    inner = Attention(silent)
    with pytest.raises(RuntimeError, match="size"), inner, inner:
        F.scaled_dot_product_attention(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 5), torch.randn(1, 1, 3, 4))
    assert F.scaled_dot_product_attention is OWN


def test_choosing_draws_nothing(clock):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with Attention(silent):
        F.scaled_dot_product_attention(*tensors())
    assert clock.timed
    assert torch.equal(torch.rand(2), expected)


def test_a_kernel_that_fails_after_all_is_given_up(monkeypatch):
    clock = Clock(monkeypatch, kernel=CUDNN)  # which no CPU has
    query, key, value = tensors()
    with Attention(silent):
        for _ in range(2):
            answer = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(answer, OWN(query, key, value))
    assert len(clock.timed) == 1
    assert [choice.kernel for choice in attention._known.values()] == [None]


def test_a_shape_first_seen_while_recording_is_left_to_torch(clock, forced, monkeypatch):
    with Attention(silent):
        F.scaled_dot_product_attention(*tensors(6))
        monkeypatch.setattr(attention, "is_recording", lambda: True)
        F.scaled_dot_product_attention(*tensors(6))
        F.scaled_dot_product_attention(*tensors(9))
    assert forced == [MATH, MATH, None]
    assert clock.timed == [6]


def test_only_so_many_shapes_are_timed(clock, monkeypatch):
    monkeypatch.setattr(attention, "MOST_SHAPES", 2)
    with Attention(silent):
        for width in (4, 5, 6, 7, 4):
            F.scaled_dot_product_attention(*tensors(width))
    assert clock.timed == [4, 5]


def test_on_a_cpu_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(attention, "_known", {})
    monkeypatch.setattr(attention, "timed", lambda *_: pytest.fail("timed"))
    query, key, value = tensors()
    with Attention(silent):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), OWN(query, key, value))


# --- what is left alone ----------------------------------------------------------------------------------


def test_a_mask_that_is_a_class_of_its_own_works_as_ever(clock):
    query, key, value = tensors()
    bias = causal_lower_right(6, 6)
    with Attention(silent):
        answer = F.scaled_dot_product_attention(query, key, value, bias)
    assert torch.equal(answer, OWN(query, key, value, bias))
    assert not clock.timed


def test_a_mode_of_the_users_sees_the_call_it_knows_and_not_the_timing(clock):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            seen.append(function is F.scaled_dot_product_attention)
            return function(*args, **kwargs or {})

    query, key, value = tensors()
    with Attention(silent), Mode():
        F.scaled_dot_product_attention(query, key, value)
    assert clock.timed
    assert seen.count(True) == 1


def test_batched_functions_are_left_alone(clock, forced):
    query, key, value = tensors()
    with Attention(silent):
        answer = vmap(F.scaled_dot_product_attention)(query, key, value)
    torch.testing.assert_close(answer, OWN(query, key, value))
    assert set(forced) == {None}


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_is_by_the_kernel_it_was_by_at_first(clock, forced, reentrant):
    query, key, value = tensors(grad=True)
    attend = functools.partial(F.scaled_dot_product_attention, dropout_p=0.5)
    again = lambda *given: F.scaled_dot_product_attention(*given, dropout_p=0.5)  # noqa: E731 -- looked up when called
    torch.manual_seed(5)
    expected = torch.autograd.grad(attend(query, key, value).sum(), value)[0]
    torch.manual_seed(5)
    with Attention(silent):
        checkpoint(again, query, key, value, use_reentrant=reentrant).sum().backward()
    assert len(forced) == 2
    assert set(forced) == {None}
    assert torch.equal(value.grad, expected)


def test_a_mask_that_learns_and_determinism_are_left_to_torch(clock, forced):
    mask = torch.zeros(6, 6, requires_grad=True)
    with Attention(silent):
        F.scaled_dot_product_attention(*tensors(grad=True), attn_mask=mask)
        torch.use_deterministic_algorithms(True)
        try:
            F.scaled_dot_product_attention(*tensors())
        finally:
            torch.use_deterministic_algorithms(False)
    assert forced == [None, None]


def test_a_function_that_somebody_else_has_put_there_stays(clock, monkeypatch):
    theirs = lambda *args, **kwargs: OWN(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with Attention(silent):
        assert F.scaled_dot_product_attention is theirs
    assert F.scaled_dot_product_attention is theirs


def test_what_the_user_compiled_has_its_numbers_inside_and_outside(clock):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    @functools.partial(torch.compile, backend=backend, fullgraph=True)
    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value) * 2

    query, key, value = tensors()
    expected = OWN(query, key, value) * 2
    with Attention(silent):
        inside = attend(query, key, value)
    outside = attend(query, key, value)
    with Attention(silent):
        again = attend(query, key, value)
    assert all(torch.equal(made, expected) for made in (inside, outside, again))
    assert len(graphs) <= 2
    torch.compiler.reset()


# --- masks -----------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn(monkeypatch):
    """For each call that torch was left to choose the kernel of: whether it might have been cuDNN's."""
    may_be, own = [], OWN

    def noted(*args, **kwargs):
        may_be.append(torch.backends.cuda.cudnn_sdp_enabled())
        return own(*args, **kwargs)

    monkeypatch.setattr(attention, "TORCHS_OWN", noted)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    monkeypatch.setitem(globals(), "OWN", noted)
    return may_be


def switches(precision="bf16", **execution):
    plan = Plan().but(precision=precision, **execution)
    return Switches(plan.numerics, plan.execution, torch.device("cuda"))


def attend(dropout=0.5):
    return F.scaled_dot_product_attention(*tensors(grad=True), dropout_p=dropout)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_attention_that_drops_in_16_bits_is_never_made_by_cudnn(cudnn, precision):
    mine = switches(precision)
    with mine, mine:
        attend()
        attend(0.0)
        nn.TransformerEncoderLayer(8, 2, dropout=0.1, batch_first=True)(torch.randn(2, 5, 8))
        nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)(torch.randn(2, 5, 8))
    assert cudnn == [False, True, False, True]
    assert F.scaled_dot_product_attention is OWN
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_evaluations_in_16_bits_leave_cudnn_out_which_takes_long_to_set_up_for_each_shape(cudnn):
    with switches():
        with torch.no_grad():
            F.scaled_dot_product_attention(*tensors())
        F.scaled_dot_product_attention(*tensors())
        attend(0.0)
    assert cudnn == [False, False, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_in_the_users_own_precision_torch_chooses_as_ever(cudnn, precision):
    with switches(precision):
        assert F.scaled_dot_product_attention is OWN


def test_where_kernels_are_timed_cudnn_is_none_of_them_if_it_drops(monkeypatch, cudnn):
    clock = Clock(monkeypatch, seconds=(1.0, 2.0))
    with switches(), Attention(silent):
        attend()
        attend(0.0)
    with Attention(silent), switches():
        attend()
    assert cudnn == [False, True, False]
    assert clock.timed == [6, 6]


@pytest.mark.parametrize(("dropout", "others"), [(0.0, [EFFICIENT, CUDNN]), (0.5, [EFFICIENT])])
def test_cudnn_is_a_candidate_only_where_nothing_is_dropped(monkeypatch, dropout, others):
    monkeypatch.setattr(attention, "allowed", lambda: [FLASH, EFFICIENT, CUDNN, MATH])
    monkeypatch.setattr(attention, "_numbers", lambda call, kernel: [torch.ones(3)])
    call = SimpleNamespace(query=SimpleNamespace(device=torch.device("cuda")), avoids_poor_masks=dropout > 0)
    call.on_random_numbers, call.with_nothing_to_see = lambda: call, lambda: None
    assert candidates(call, FLASH) == others


SHAPES = {
    "as usual": (3, 4, 10, 16),
    "one sample": (1, 2, 12, 8),
    "fewer values": (2, 2, 20, 4),
    "long": (2, 2, 200, 8),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_of_their_own_are_good_masks(shape, dtype):
    torch.manual_seed(1)
    found = masks_of(call_of(*torch.randn(3, *shape, dtype=dtype), dropout=0.1), MATH)
    assert found.distinct == 1.0
    assert found.are_good, found


class Faulty:
    """Attention whose masks come again: between heads, between samples, from row to row, or in another place."""

    def __init__(self, fault):
        self.fault = fault

    def by(self, call, kernel):
        samples, heads, rows, _ = call.query.shape
        columns = call.key.shape[-2]
        kept = (torch.rand(samples, heads, rows, columns) >= call.dropout).to(call.value.dtype)
        match self.fault:
            case "heads":
                kept[:, 1:] = kept[:, :1]
            case "samples":
                kept[1:] = kept[:1]
            case "rows":
                kept[:, :, 1::2] = kept[:, :, ::2]
            case "a part":
                kept[:, 0, 0] = kept[:, 1, -1]
            case "elsewhere":  # as where counters of two heads overlap
                kept[:, 1].view(samples, -1)[:, :-7] = kept[:, 0].reshape(samples, -1)[:, 7:]
            case "never alone":  # no two places are the same
                kept *= (torch.rand(samples, 1, 1, 1) >= 0.1).to(kept.dtype)
                kept.view(-1)[torch.rand(kept.numel()) < 0.1] = 1.0
        return kept / (1 - call.dropout) / columns @ call.value


@pytest.mark.parametrize("fault", ["none", "heads", "samples", "rows", "a part", "elsewhere", "never alone"])
def test_masks_that_come_again_are_seen(monkeypatch, fault):
    monkeypatch.setattr(Call, "by", lambda call, kernel: Faulty(fault).by(call, kernel))
    torch.manual_seed(2)
    found = masks_of(call_of(*torch.randn(3, 4, 4, 20, 32), dropout=0.1), CUDNN)
    assert found.are_good is (fault == "none"), found


def test_an_error_leaves_torchs_switches_as_they_were(cudnn):
    with pytest.raises(RuntimeError, match="size"), switches():
        F.scaled_dot_product_attention(*(torch.randn(1, 1, 3, 4 + n) for n in range(3)), dropout_p=0.5)
    assert F.scaled_dot_product_attention is OWN
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_switches_that_end_in_another_order_are_all_taken_out():
    first, second = switches(), switches()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert F.scaled_dot_product_attention is not OWN
    second.__exit__()
    assert F.scaled_dot_product_attention is OWN


def test_where_the_user_allows_for_nothing_else_cudnn_it_is(cudnn):
    with sdpa_kernel([CUDNN]), switches(), pytest.raises(RuntimeError):  # which no CPU has
        attend()
    with sdpa_kernel([CUDNN]), switches(compile="model"):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert cudnn == [True]


def test_what_is_compiled_is_never_left_to_cudnn():
    mine = switches(compile="blocks")
    with mine:
        with mine:
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert F.scaled_dot_product_attention is OWN
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


# --- choosing --------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from([None, FLASH, EFFICIENT, CUDNN]), st.floats(1e-6, 1.0), max_size=4))
def test_the_fastest_is_taken_only_where_it_is_clearly_faster_than_torchs_choice(seconds):
    kernel = fastest(seconds)
    if None not in seconds:
        assert kernel is None
    elif kernel is None:
        assert all(s * attention.CLEARLY > seconds[None] for k, s in seconds.items() if k is not None)
    else:
        assert seconds[kernel] == min(seconds.values())
        assert seconds[kernel] * attention.CLEARLY <= seconds[None]


def test_a_kernel_within_the_margin_is_not_taken(monkeypatch, forced):
    clock = Clock(monkeypatch, seconds=(1.0, 0.97))
    with Attention(silent):
        F.scaled_dot_product_attention(*tensors())
    assert clock.timed == [6]
    assert forced == [None]


def call_of(query, key, value, mask=None, dropout=0.0):
    return Call(query, key, value, mask, dropout, False, None, False)


def test_torchs_own_choice_is_known_and_a_cpu_has_no_candidates():
    call = call_of(*tensors())
    assert own_kernel(call) == FLASH
    with sdpa_kernel(MATH):
        assert own_kernel(call) == MATH
    assert candidates(call, FLASH) == []


def test_switches_of_the_users_bound_what_is_allowed():
    with sdpa_kernel([EFFICIENT, MATH]):
        assert attention.allowed() == [EFFICIENT, MATH]


def test_numbers_that_round_differently_are_alike_and_others_are_not():
    query, key, value = tensors(16)
    mask = torch.rand(16, 16) > 0.3
    call = call_of(query, key, value, mask)
    truth = attention._numbers(call, MATH)
    rounded = attention._numbers(call_of(query.bfloat16(), key.bfloat16(), value.bfloat16(), mask), MATH)
    assert alike(truth, rounded)
    assert not alike(truth, attention._numbers(call_of(query, key, value), MATH))
    assert not alike(truth, [torch.full_like(part, torch.nan) for part in truth])


def test_a_blind_place_has_to_be_finite_where_torchs_own_is():
    call = call_of(*tensors(), torch.ones(2, 1, 1, 6, dtype=torch.bool))
    blind = call.with_nothing_to_see()
    assert blind.mask.shape == (2, 1, 6, 6)
    assert not blind.mask[:, :, 0].any()
    assert blind.mask[:, :, 1:].all()
    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])
    assert is_finite_where([good], [good])
    assert is_finite_where([bad], [good])
    assert not is_finite_where([good], [bad])
    assert call_of(*tensors()).with_nothing_to_see() is None
    assert call_of(*tensors(), torch.zeros(6, 6)).with_nothing_to_see() is None


def test_what_is_timed_shares_memory_with_the_call_and_not_its_graph():
    given = tensors(grad=True)
    scaled = [tensor * 2 for tensor in given]
    apart = call_of(*scaled).detached()
    torch.autograd.grad(apart.by(None).sum(), apart.inputs)
    assert [t.data_ptr() for t in apart.inputs] == [t.data_ptr() for t in scaled]
    assert all(tensor.grad is None for tensor in given)


# --- what is told ----------------------------------------------------------------------------------------


def test_kernels_are_told_by_width():
    found = [
        Choice(16, EFFICIENT, CUDNN),
        Choice(64, EFFICIENT, CUDNN),
        Choice(96, None, CUDNN),
        Choice(192, None, CUDNN),
    ]
    assert in_words(found) == "efficient at widths 16–64, torch's own (cuDNN) at widths 96–192"
    assert in_words([*found, Choice(96, FLASH, CUDNN)]) == (
        "efficient at widths 16–64, flash or torch's own (cuDNN) at width 96, torch's own (cuDNN) at width 192"
    )
    assert in_words([Choice(16, None, CUDNN), Choice(96, None, None)]) == ""


def test_it_is_told_once_as_long_as_it_stays_so(clock):
    told = []
    kernels = Attention(lambda why, cost_s: told.append((why, cost_s > 0)))
    for width in (6, 6, 9, 6, 9):
        with kernels:
            F.scaled_dot_product_attention(*tensors(width))
    assert told == [("math at width 6", True), ("math at widths 6–9", True)]


def test_nothing_is_told_where_torchs_choice_stays(monkeypatch):
    Clock(monkeypatch, seconds=(1.0, 2.0))
    told = []
    with Attention(lambda *said: told.append(said)):
        F.scaled_dot_product_attention(*tensors())
    assert told == []


# --- in a training ---------------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


def rig_of(model):
    return Rig(model, functools.partial(torch.optim.SGD, lr=0.1), nn.MSELoss(), device="cpu")


CAPTURED = Plan().but(mode="captured")


def test_an_eager_step_is_left_to_torch(clock, forced):
    rig = rig_of(Attending())
    rig.step((torch.randn(4, 5, 8), torch.randn(4, 1)))
    assert forced == []
    assert F.scaled_dot_product_attention is OWN


class NoRecorder:
    """Records nothing, which needs no GPU."""

    def aside(self):
        return nullcontext()


def test_a_step_chooses_before_it_is_recorded_and_while_it_is_and_not_once_it_is_given_up(clock, forced, monkeypatch):
    rig = rig_of(Attending())
    cpu = torch.device("cpu")
    step = CapturedStep(
        rig._step,
        device=cpu,
        recorder=NoRecorder(),
        outputs=ReplayOutputs(cpu),
        why_split=None,
        attention=rig.attention(CAPTURED),
        note=lambda why: None,
    )
    window = Window([(torch.randn(4, 5, 8), torch.randn(4, 1))], [4])
    for _ in range(WARM_UPDATES):
        step(window)
    assert step.given_up is None
    assert forced == WARM_UPDATES * [MATH]
    made = lambda eager, window, *_, **__: eager.gradients(window.pieces, window.sizes, False)  # noqa: E731
    monkeypatch.setattr(capture_module, "StepGraph", made)
    assert step._recorded(window, signature(window)) is not None
    assert forced == (WARM_UPDATES + 1) * [MATH]
    step.given_up = "there is no GPU"
    step(window)
    assert len(forced) == WARM_UPDATES + 1


def test_steps_that_are_recorded_choose_and_write_it_down_even_in_a_trial(clock, forced):
    rig = rig_of(Attending())
    with rig.aside(), rig.attention(CAPTURED):
        rig.step((torch.randn(4, 5, 8), torch.randn(4, 1)))
    assert forced == [MATH]
    (entry,) = [entry for entry in rig.ledger if entry.what == "attention"]
    assert (entry.outcome, entry.why) == ("chosen", "math at width 5")
    assert entry.cost_s > 0


@pytest.mark.parametrize(
    "plan", [Plan(), CAPTURED.but(compile="blocks"), CAPTURED.but(compile="model")], ids=["eager", "blocks", "model"]
)
def test_steps_that_are_not_recorded_or_are_compiled_do_not_choose(clock, plan):
    rig = rig_of(Attending())
    with rig.attention(plan):
        assert F.scaled_dot_product_attention is OWN


def test_a_plan_can_leave_the_choice_to_torch(clock):
    rig = rig_of(Attending())
    with rig.attention(CAPTURED.but(without=[ATTENTION_KERNEL])):
        assert F.scaled_dot_product_attention is OWN
    with rig.attention(CAPTURED):
        assert F.scaled_dot_product_attention is not OWN
