"""In which numbers a step computes, and that the process's switches are afterwards as they were."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hotlap.core.plan import PRECISIONS, Execution, Numerics
from hotlap.engine.precision import Switches, precision_context, why_not_precision
from hotlap.machine import dtype_facts
from hotlap.machine.dtypes import DtypeFact, Support
from hotlap.machine.tf32 import Tf32

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn

IS_EMULATED = dtype_facts(CPU)["bf16"].support is Support.EMULATED
"""Whether this CPU has no instructions for bf16."""

needs_tree = pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="this torch has the old switches only")


def switches(precision="fp32", autotune=False, device=CUDA):
    """The switches are of the process, not of the GPU, so that they can be looked at without one."""
    return Switches(Numerics(precision=precision), Execution(autotune=autotune), device)


def read(get):
    try:
        return get()
    except RuntimeError:
        return "contradicts"


def seen():
    """All that a user can read, through the old switches and the new ones."""
    return {
        "matmul": read(lambda: MATMUL.fp32_precision),
        "conv": read(lambda: CUDNN.conv.fp32_precision),
        "rnn": read(lambda: CUDNN.rnn.fp32_precision),
        "cuda": read(lambda: CUDNN.fp32_precision),
        "all": read(lambda: torch.backends.fp32_precision),
        "mkldnn": read(lambda: torch.backends.mkldnn.matmul.fp32_precision),
        "old matmul": read(lambda: MATMUL.allow_tf32),
        "old cudnn": read(lambda: CUDNN.allow_tf32),
        "old word": read(torch.get_float32_matmul_precision),
        "benchmark": CUDNN.benchmark,
    }


def reset():
    """The switches as torch begins with them."""
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32, CUDNN.benchmark = True, False
    if hasattr(MATMUL, "fp32_precision"):
        torch.backends.fp32_precision = CUDNN.fp32_precision = MATMUL.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture(autouse=True)
def as_torch_has_them():
    reset()
    yield
    reset()


def setter(holder, name, value):
    return lambda: setattr(holder, name, value)


ACTIONS = {
    **{f"matmul {v}": setter(MATMUL, "fp32_precision", v) for v in ("none", "ieee", "tf32")},
    **{f"conv {v}": setter(CUDNN.conv, "fp32_precision", v) for v in ("none", "ieee", "tf32")},
    **{f"rnn {v}": setter(CUDNN.rnn, "fp32_precision", v) for v in ("none", "ieee", "tf32")},
    **{f"cuda {v}": setter(CUDNN, "fp32_precision", v) for v in ("none", "ieee", "tf32")},
    **{f"all {v}": setter(torch.backends, "fp32_precision", v) for v in ("none", "ieee", "tf32")},
    **{f"old matmul {v}": setter(MATMUL, "allow_tf32", v) for v in (False, True)},
    **{f"old cudnn {v}": setter(CUDNN, "allow_tf32", v) for v in (False, True)},
    **{f"old word {v}": (lambda v=v: torch.set_float32_matmul_precision(v)) for v in ("highest", "high", "medium")},
}


# --- switches --------------------------------------------------------------------------------------


@needs_tree
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=4), st.sampled_from([True, False]))
def test_whatever_a_user_has_set_by_either_api_is_there_again_afterwards(done, autotune):
    reset()
    for name in done:
        ACTIONS[name]()
    before = seen()
    with switches("tf32", autotune):
        inside = seen()
        assert inside["matmul"] == inside["conv"] == inside["rnn"] == "tf32"
        # Who reads the old ones inside is neither told the contrary nor given an error, unless the user made it so.
        assert inside["old matmul"] is True or before["matmul"] == "tf32"
        assert inside["old cudnn"] is True or before["conv"] == before["rnn"] == "tf32"
        assert inside["benchmark"] is autotune
        assert {name: inside[name] for name in ("cuda", "all", "mkldnn")} == {
            name: before[name] for name in ("cuda", "all", "mkldnn")
        }
    assert seen() == before


@needs_tree
@pytest.mark.parametrize("above", ["all", "cuda"])
def test_a_switch_that_followed_the_one_above_it_still_follows(above):
    ACTIONS[f"{above} ieee"]()
    with switches("tf32"):
        assert MATMUL.fp32_precision == "tf32"
    assert MATMUL.fp32_precision == "ieee"
    ACTIONS[f"{above} tf32"]()
    assert MATMUL.fp32_precision == "tf32"


@needs_tree
def test_a_switch_that_stood_by_itself_still_does():
    MATMUL.fp32_precision = "ieee"
    with switches("tf32"):
        pass
    torch.backends.fp32_precision = "tf32"
    assert MATMUL.fp32_precision == "ieee"


@pytest.mark.parametrize(
    ("precision", "support", "is_on"),
    [("bf16", Support.EMULATED, False), ("bf16", Support.HARDWARE, True), ("fp32", Support.EMULATED, True)],
)
def test_where_a_cpu_has_no_bf16_torch_does_not_try_onednn_and_leave_it_off(precision, support, is_on, monkeypatch):
    fact = DtypeFact(support=support, reason="", kernel="ran")
    monkeypatch.setattr("hotlap.machine.dtype_fact", lambda device, dtype: fact)
    mine = switches(precision, device=CPU)
    assert bool(mine) is not is_on
    for _ in range(2):
        with mine, mine:
            assert torch._C._get_mkldnn_enabled() is is_on
        assert torch._C._get_mkldnn_enabled()


def test_the_same_switches_can_be_entered_again_also_inside_themselves():
    mine = switches("tf32", autotune=True)
    before = seen()
    for _ in range(2):
        with mine:
            with mine:
                assert MATMUL.allow_tf32
                assert CUDNN.benchmark
            assert MATMUL.allow_tf32
            assert CUDNN.benchmark
        assert seen() == before


def test_switches_are_put_back_after_an_error_too():
    before = seen()
    with pytest.raises(ZeroDivisionError), switches("tf32", autotune=True):
        raise ZeroDivisionError
    assert seen() == before


def test_autotuning_that_the_user_has_on_stays_on():
    CUDNN.benchmark = True
    with switches(autotune=True):
        pass
    assert CUDNN.benchmark


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("user", ["old matmul True", "old matmul False", "conv ieee", "all tf32"])
def test_in_every_other_precision_the_users_switches_stay_as_they_are(precision, user):
    if not hasattr(MATMUL, "fp32_precision") and not user.startswith("old"):
        return
    ACTIONS[user]()
    before = seen()
    with switches(precision):
        assert seen() == before
    assert seen() == before


@pytest.mark.parametrize(("precision", "autotune"), list(itertools.product(PRECISIONS, [True, False])))
def test_switches_are_false_exactly_where_there_is_nothing_to_switch(precision, autotune):
    assert bool(switches(precision, autotune)) is (precision in ("tf32", "bf16", "fp16") or autotune)
    assert bool(switches(precision, autotune, CPU)) is (precision == "bf16" and IS_EMULATED)


def test_torch_before_the_new_switches_is_switched_by_the_old_ones(monkeypatch):
    class Flags:
        allow_tf32 = False

    class Backends:
        cudnn = Flags()

        class cuda:  # noqa: N801
            matmul = Flags()

    monkeypatch.setattr(torch, "backends", Backends)
    with Tf32(), Tf32():
        assert Backends.cudnn.allow_tf32
        assert Backends.cuda.matmul.allow_tf32
    with Tf32(convolutions=False):
        assert not Backends.cudnn.allow_tf32
        assert Backends.cuda.matmul.allow_tf32
    assert not Backends.cudnn.allow_tf32
    assert not Backends.cuda.matmul.allow_tf32


# --- autocast --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_forward_passes_compute_in_the_precision_and_weights_stay_as_they_are(precision, dtype):
    layer = nn.Linear(4, 3)
    context = precision_context(Numerics(precision=precision), CPU, [layer])
    for _ in range(2):
        with context():
            output = layer(torch.ones(2, 4))
        assert output.dtype is dtype
        output.float().sum().backward()
        assert layer.weight.grad.dtype is layer.weight.dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


# --- what a device can -------------------------------------------------------------------------------


def test_a_cpu_trains_in_all_but_tf32():
    assert [why_not_precision(precision, CPU) for precision in ("fp32", "bf16", "fp16")] == [None] * 3
    assert why_not_precision("tf32", CPU) == "tf32 is absent on this cpu: a format of NVIDIA GPUs"


def test_a_pretended_gpu_has_the_precisions_of_the_real_one(monkeypatch):
    monkeypatch.setenv("HOTLAP_PRETEND", "t4")
    assert why_not_precision("fp16", CPU) is why_not_precision("fp32", CPU) is None
    assert "acting as" in why_not_precision("bf16", CPU)
    assert why_not_precision("tf32", CPU).startswith("tf32 is absent")
    monkeypatch.setenv("HOTLAP_PRETEND", "a100-40")
    assert [why_not_precision(precision, CPU) for precision in PRECISIONS] == [None] * 4


def test_a_precision_that_torch_does_not_autocast_to_is_refused(monkeypatch):
    from hotlap.engine import precision

    @contextmanager
    def nothing(*_, **__):
        yield

    precision._autocasts.cache_clear()
    monkeypatch.setattr(torch, "autocast", nothing)
    try:
        assert "no autocast to fp16 on cpu" in why_not_precision("fp16", CPU)
    finally:
        precision._autocasts.cache_clear()
