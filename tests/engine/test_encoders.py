"""Encoders made fit to be recorded: the same numbers, nothing read back, and the model as it was afterwards."""

import copy
import functools
import pickle
import sys
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from tiny_encoders import ENCODERS, WAYS, batch, tiny
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hotlap import Plan, Rig
from hotlap.core.plan import Execution, Numerics
from hotlap.engine import step_cache as steps_module
from hotlap.engine.assists.rewiring import rewire
from hotlap.engine.capture.fingerprint import QuickCheck, fingerprint
from hotlap.engine.capture.recording import Watch
from hotlap.engine.precision import Switches
from hotlap.script.calls.call import ModuleCall

pytest.importorskip("transformers")
CPU = torch.device("cpu")


def trained(model, given, *, precision=None, seed=3):
    """Loss and gradients of one step, with the dropout of that seed."""
    model.zero_grad()
    torch.manual_seed(seed)
    with Switches(Numerics(precision="bf16" if precision else "fp32"), Execution(), CPU):
        with torch.autocast("cpu", dtype=precision) if precision else nullcontext():
            loss = model(**given).loss
        loss.backward()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(mine, theirs, tolerance):
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


# --- the numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_loss_and_gradients_are_the_same_with_it_and_after_it(name, attention, padded, precision):
    model, given = tiny(name, attention), batch(padded=padded)
    try:
        theirs = trained(model, given, precision=precision)
    except RuntimeError as error:
        pytest.skip(f"the library's own step fails: {error}")  # DeBERTa's masks, in bf16
    with rewire(model):
        mine = trained(model, given, precision=precision)
    after = trained(model, given, precision=precision)
    same(after, theirs, 0)
    # A mask that hides nothing is left out by the library, and made here: fused attention takes another kernel, and
    # scores in bf16 are added to zeros in fp32.
    exact = padded or (attention == "eager" and precision is None) or name.startswith("deberta")
    same(mine, theirs, 0 if exact else 1e-6 if precision is None else 1e-3)


@pytest.mark.parametrize("with_mask", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_a_bare_model_gives_the_same_in_evaluation_and_training(name, attention, with_mask):
    model, given = tiny(name, attention, head="Model"), batch()
    given = {name: given[name] for name in (("input_ids", "attention_mask") if with_mask else ("input_ids",))}
    for mode in (True, False):
        model.train(mode)
        torch.manual_seed(3)
        theirs = model(**given).last_hidden_state
        torch.manual_seed(3)
        with rewire(model):
            mine = model(**given).last_hidden_state
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("labels", [[0, -1, 2, -100], [1, 1, 1, 1], [-1, -1, -1, 2]])
@pytest.mark.parametrize("name", ["deberta", "deberta-v3"])
def test_labels_below_zero_are_left_out_of_the_loss_as_the_library_does(name, labels):
    model, given = tiny(name), batch() | {"labels": torch.tensor(labels)}
    theirs = trained(model, given)
    with rewire(model):
        same(trained(model, given), theirs, 0)


def test_a_batch_without_any_label_has_a_loss_and_gradients_of_zero():
    model, given = tiny("deberta-v3"), batch() | {"labels": torch.full((4,), -1)}
    assert not model(**given).loss.requires_grad  # the library's own cannot be differentiated
    with rewire(model):
        loss, gradients = trained(model, given)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients if gradient is not None)


def test_outputs_keep_their_form_and_other_losses_are_the_librarys_own():
    model, given = tiny("deberta-v3").eval(), batch()
    soft = given | {"labels": torch.rand(4, 3)}
    number = tiny("deberta-v3", num_labels=1).eval()
    for one, what in [(model, given | {"return_dict": False}), (model, given), (model, soft), (number, given)]:
        what = what if one is model else what | {"labels": torch.rand(4)}
        theirs = one(**what)
        with rewire(one):
            mine = one(**what)
        assert type(mine) is type(theirs)
        assert list(mine) == list(theirs) if isinstance(theirs, dict) else len(mine) == len(theirs)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


# --- what would stop a recording ---------------------------------------------------------------------


class CopiedFromHostError(Exception):
    """What `torch.tensor` makes on a device has to be copied there."""


class There(torch.Tensor):
    """A tensor on a device that is not the host's; its numbers are kept aside, in `inner`."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device="meta"
        )

    def __init__(self, inner):
        self.inner = inner

    def __torch_dispatch__(self, *_):
        raise AssertionError("to be used inside Device")


class Device(TorchDispatchMode):
    """Inside, `meta` is a device with memory of its own; what the host would have to wait for is noted."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

    def __init__(self):
        super().__init__()
        self.waits, self.made = [], []

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = [tensor for tensor in tensors if not isinstance(tensor, There)]
        is_there = len(here) < len(tensors)
        goes_there = str(kwargs.get("device")) == "meta"
        if "device" in kwargs:
            kwargs["device"] = CPU
        self.made.append(name)
        is_copied = (name == "_to_copy" and here and goes_there) or (name == "copy_" and here and is_there)
        # A plain tensor of `meta` was made by torch.tensor(…, device=…), which copies a number from the host.
        is_picked = name.startswith("index") and any(tensor.dtype == torch.bool for tensor in tensors[1:])
        if (is_there and (name in self.READS or is_picked)) or is_copied or any(tensor.is_meta for tensor in here):
            self.waits.append(name)
        if any(tensor.is_meta for tensor in here):
            raise CopiedFromHostError
        assert not is_there or is_copied or not any(tensor.dim() for tensor in here), "host and device in one operation"
        inner = tree_map(lambda leaf: leaf.inner if isinstance(leaf, There) else leaf, (args, kwargs))
        found = function(*inner[0], **inner[1])
        if not is_there and not goes_there:
            return found
        known = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, There)}
        return tree_map(lambda leaf: _wrapped(leaf, known) if isinstance(leaf, torch.Tensor) else leaf, found)


def _wrapped(tensor, known):
    return known[id(tensor)] if id(tensor) in known else There(tensor)


def sent(thing):
    """A model or a batch, moved to that device; inside `Device`."""
    if isinstance(thing, dict):
        return {name: There(tensor) for name, tensor in thing.items()}
    for layer in thing.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                layer._parameters[name] = nn.Parameter(There(parameter.detach()))
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                layer._buffers[name] = There(buffer)
    return thing


def waits_of(model, *widths, without=()):
    """What the last of some training steps, of batches of these widths, waits for, and what it runs."""
    for width in widths:
        given = {name: tensor for name, tensor in sent(batch(width)).items() if name not in without}
        with Device() as device, suppress(CopiedFromHostError):  # which is noted among the waits
            model(**given).loss.backward()
    return device.waits, device.made


@pytest.mark.parametrize("without", [(), ("attention_mask",)], ids=["mask", "no mask"])
@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_nothing_is_read_back_or_copied_from_the_host_in_a_step(name, attention, without):
    with Device():
        model = sent(tiny(name, attention))
    if not without:
        assert waits_of(model, 12)[0] != []
    with rewire(model):
        assert waits_of(model, 12, 12, without=without)[0] == []


@pytest.mark.parametrize("name", ["deberta", "deberta-v2", "deberta-v3", "mpnet"])
def test_relative_positions_are_made_once_for_each_width(name):
    def builds(width):
        return waits_of(model, width)[1].count("log" if name == "mpnet" else "arange")

    with Device():
        model = sent(tiny(name))
    adapted = rewire(model)
    with adapted:
        first, again, other = builds(12), builds(12), builds(9)
        assert first > again == 0
        assert other == first
        assert builds(12) == builds(9) == 0
    with adapted:  # they are kept as long as what was recorded may read them
        assert builds(12) == 0


def test_positions_made_in_inference_mode_serve_in_training():
    model, given = tiny("deberta-v3"), batch()
    theirs = trained(model, given)
    with rewire(model):
        with torch.inference_mode():
            model(**given)
        same(trained(model, given), theirs, 0)


# --- the model stays as it was -----------------------------------------------------------------------


def library_of(model):
    names = [name for name in sys.modules if name.startswith("transformers.") and "__" not in name]
    kinds = {kind for layer in model.modules() for kind in type(layer).__mro__}
    return {name: dict(vars(sys.modules[name])) for name in names}, {kind: dict(vars(kind)) for kind in kinds}


@pytest.mark.parametrize("name", ENCODERS)
def test_undoing_leaves_no_trace_in_the_model_and_none_in_the_library(name):
    model, given = tiny(name), batch()
    trained(model, given)  # the library notes in its configuration what kind of labels it saw
    model.zero_grad()
    before, library = pickle.dumps(model), library_of(model)
    attributes = [list(vars(layer)) for layer in model.modules()]
    adapted = rewire(model)
    assert adapted.what
    assert pickle.dumps(model) == before
    adapted.apply()
    assert [list(vars(layer)) for layer in model.modules()] != attributes
    assert model.state_dict().keys() == pickle.loads(before).state_dict().keys()
    assert library_of(model) == library
    trained(model, given)
    adapted.undo()
    model.zero_grad()
    assert [list(vars(layer)) for layer in model.modules()] == attributes
    assert pickle.dumps(model) == before
    assert library_of(model) == library


def test_another_model_of_the_same_kind_is_not_touched():
    with Device():
        model, other = sent(tiny("bert")), sent(tiny("bert"))
    with rewire(model):
        assert waits_of(model, 12)[0] == []
        assert waits_of(other, 12)[0] != []


@pytest.mark.parametrize("name", ["deberta-v3", "mpnet"])
def test_a_copy_of_an_adapted_model_works_by_itself(name):
    model, given = tiny(name), batch()
    theirs = trained(model, given)
    with rewire(model):
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        next(model.parameters()).zero_()
    same(trained(copied, given), theirs, 0)
    same(trained(loaded, given), theirs, 0)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_capture_sees_no_change_from_step_to_step_nor_between_uses(name):
    model, given = tiny(name).eval(), batch()  # dropout draws from the host's randomness here
    trained(model, given)
    adapted = rewire(model)
    outside, glance = fingerprint([model]), QuickCheck([model])
    with adapted:
        inside = fingerprint([model])
        for _ in range(2):
            with Watch([model], CPU) as watch:
                model(**given).loss.backward()
            assert watch.reason is None
        assert fingerprint([model]) == inside
    with adapted:
        assert fingerprint([model]) == inside != outside
    model.zero_grad()
    assert fingerprint([model]) == outside
    assert glance.still_holds()


def test_a_method_that_somebody_has_put_into_the_model_stays_theirs():
    model, given = tiny("distilbert", head="Model"), batch()
    del given["labels"]
    adapted, calls = rewire(model), []

    def mine(*args, **kwargs):
        calls.append(1)
        return type(model).forward(model, *args, **kwargs)

    model.forward = mine
    with adapted:
        model(**given)
    assert calls == [1]
    assert vars(model)["forward"] is mine


def test_an_error_in_a_step_leaves_the_model_as_it_was():
    model = tiny("bert")
    work = rewire(model).during(model.forward)
    with pytest.raises(ValueError, match="input_ids"):
        work()
    assert all("_create_attention_masks" not in vars(layer) for layer in model.modules())


class Recorder:
    """Records work by doing it, and replays it by doing it again."""

    def __init__(self, device):
        self.aside = nullcontext

    def record(self, work):
        work()
        return SimpleNamespace(replay=work)


class Spy(nn.Module):
    """Notes at each call whether the model is in the form fit to be recorded."""

    def __init__(self, model):
        super().__init__()
        self.look = lambda: seen.append("_create_attention_masks" in vars(model))

    def forward(self, x):
        self.look()
        return torch.tanh(x)


seen = []


def test_calls_of_a_script_run_in_that_form_where_they_are_recorded_and_in_no_other():
    model, given = tiny("bert"), batch()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):  # it draws from the host's randomness here
            layer.p = 0.0
    theirs = trained(model, given)
    model.bert.pooler.activation = Spy(model.bert)
    call = ModuleCall(model, device=CPU, make_recorder=Recorder)
    call.use(Numerics(), Execution(mode="captured"))
    original = functools.partial(nn.Module.__call__, model)
    seen.clear()
    for _ in range(6):
        model.zero_grad()
        loss = call(original, (), given).loss
        loss.backward()
    assert call.given_up is None
    assert call._way.recorded == 1
    assert seen
    assert all(seen)
    same((loss.detach(), [p.grad for p in model.parameters()]), theirs, 1e-6)
    seen.clear()
    model(**given)
    assert seen == [False]


def test_a_rig_runs_steps_in_that_form_under_a_captured_plan_alone(monkeypatch):
    # Without a GPU what would be recorded is run eagerly.
    monkeypatch.setattr(steps_module, "CapturedStep", type("Eagerly", (), {"__new__": lambda kind, eager, **_: eager}))
    monkeypatch.setattr(steps_module, "Recorder", lambda device: None)
    monkeypatch.setattr(steps_module, "ReplayOutputs", lambda device: None)
    monkeypatch.setattr(Rig, "supports", lambda rig, plan: None)
    monkeypatch.setattr(steps_module.StepCache, "_why_split", lambda steps, execution: "this is a test")
    model, given = tiny("bert"), batch()
    model.bert.pooler.activation = Spy(model.bert)
    attributes = [list(vars(layer)) for layer in model.modules()]
    rig = Rig(model, functools.partial(torch.optim.SGD, lr=0.1), lambda model, batch: model(**batch).loss, device="cpu")
    seen.clear()
    for mode in ("eager", "captured", "captured", "eager", "captured"):
        rig.use(Plan().but(mode=mode))
        rig.advance(given)
    assert seen == [False, True, True, False, True]
    assert [list(vars(layer)) for layer in model.modules()] == attributes


# --- what it is for, and what not --------------------------------------------------------------------


def test_an_encoder_is_found_inside_the_users_own_model_and_under_a_class_of_their_own():
    from transformers import BertModel

    class Own(BertModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Own(tiny("bert", "sdpa").config)

        def forward(self, input_ids, attention_mask):
            return self.body(input_ids, attention_mask).last_hidden_state.sum()

    with Device():
        model = sent(Head())
    given = sent(batch())
    del given["labels"]
    for context, waits in ((nullcontext(), 1), (rewire(model), 0)):
        with context, Device() as device:
            model(**given).backward()
        assert len(device.waits) == waits


def test_there_is_nothing_to_adapt_in_a_model_of_another_library():
    assert rewire(nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 2))) is None


def test_the_library_is_not_imported_to_find_out(monkeypatch):
    model = tiny("bert")
    monkeypatch.delitem(sys.modules, "transformers")
    assert rewire(model) is None
    assert "transformers" not in sys.modules


def test_a_library_without_the_names_it_looks_for_is_left_alone(monkeypatch):
    from transformers import masking_utils

    monkeypatch.delattr(masking_utils, "is_tracing")
    adapted = rewire(tiny("bert"))
    assert adapted is None or not any("read back" in what for what in adapted.what)
