"""Weights are stored so that plain PyTorch loads them, in a process that knows nothing of hotlap."""

import copy
import errno
import inspect
import logging
import resource
import textwrap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from hotlap.core.errors import StoreError
from hotlap.store.weights import plain_state, save_weights, unwrapped


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Convolved(nn.Module):
    """Buffers of several kinds, a part called `module`, and a parameter that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("forgotten", torch.ones(2), persistent=False)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float16))


MODELS = [Tied, Convolved, Half]


def trained(kind):
    torch.manual_seed(3)
    model = kind()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


def same(one, other):
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for kind in MODELS:
        save_weights(trained(kind), folder / f"{kind.__name__}.safetensors")
        torch.save(trained(kind).state_dict(), folder / f"{kind.__name__}.pt")
    return folder


def test_plain_pytorch_loads_every_kind_of_model_strictly_without_hotlap(files, torch_forks):
    classes = "\n".join(textwrap.dedent(inspect.getsource(kind)) for kind in MODELS)
    code = f"""
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from torch import nn

{classes}
folder = Path(sys.argv[1])
for kind in ({", ".join(kind.__name__ for kind in MODELS)}):
    model = kind()
    model.load_state_dict(load_file(folder / f"{{kind.__name__}}.safetensors"), strict=True)
    expected = torch.load(folder / f"{{kind.__name__}}.pt", weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.pop(name)) , name
    assert not expected
assert not [name for name in sys.modules if name.startswith("hotlap")]
print("loaded")
"""
    done = torch_forks.run("-c", code, files, cwd=files)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr


@pytest.mark.parametrize("kind", MODELS)
def test_every_name_has_its_own_tensor_with_its_own_dtype(files, kind):
    stored = load_file(files / f"{kind.__name__}.safetensors")
    expected = trained(kind).state_dict()
    same({name: stored[name] for name in expected}, expected)
    assert set(stored) == set(expected)


def test_tied_weights_stay_tied_after_loading(files):
    model = Tied()
    model.load_state_dict(load_file(files / "Tied.safetensors"))
    assert model.head.weight is model.embed.weight


def compiled_by_name(model):
    """What torch.compile makes of a model, as far as names go, without the seconds that it takes to import."""
    wrapper = nn.Module()
    wrapper._orig_mod = model
    return wrapper


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        compiled_by_name,
        lambda model: nn.DataParallel(compiled_by_name(model)),
        lambda model: compiled_by_name(nn.DataParallel(model)),
    ],
)
@pytest.mark.parametrize("kind", [Tied, Convolved])
def test_wrappers_leave_no_trace_in_the_names(wrap, kind):
    model = trained(kind)
    wrapped = wrap(copy.deepcopy(model))
    assert list(wrapped.state_dict()) != list(model.state_dict())
    same(plain_state(wrapped), model.state_dict())
    assert isinstance(unwrapped(wrapped), kind)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_torch_compile_leaves_no_trace_in_the_names():
    model = trained(Convolved)
    wrapped = torch.compile(model, backend="eager")
    assert next(iter(wrapped.state_dict())).startswith("_orig_mod.")
    same(plain_state(wrapped), model.state_dict())


def test_a_model_of_ones_own_keeps_a_part_called_module():
    assert "module.0.weight" in plain_state(trained(Convolved))
    assert unwrapped(model := Convolved()) is model


def test_the_state_is_a_copy_that_later_training_does_not_change():
    model = nn.Linear(2, 2)
    state = plain_state(model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    same(state, before)
    assert all(not tensor.requires_grad and tensor.is_contiguous() for tensor in state.values())


def test_a_buffer_that_repeats_its_memory_is_written_out(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("spread", torch.arange(3.0).expand(4, 3))
    save_weights(model, tmp_path / "w")
    assert load_file(tmp_path / "w")["spread"].tolist() == [[0.0, 1.0, 2.0]] * 4


class Remembering(nn.Linear):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


def test_state_that_is_no_tensor_is_left_out_and_said_so(tmp_path, caplog):
    model = nn.Sequential(Remembering(2, 2))
    with caplog.at_level(logging.WARNING, "hotlap"):
        save_weights(model, tmp_path / "w")
    assert [record.getMessage() for record in caplog.records] == [
        "hotlap saves tensors only and left out: 0._extra_state; load with strict=False"
    ]
    missing = model.load_state_dict(load_file(tmp_path / "w"), strict=False)
    assert missing.missing_keys == ["0._extra_state"]
    assert missing.unexpected_keys == []


def test_extra_state_that_is_a_tensor_is_kept(tmp_path, caplog):
    class Kept(nn.Linear):
        def get_extra_state(self):
            return torch.ones(3)

    save_weights(Kept(2, 2), tmp_path / "w")
    assert "_extra_state" in load_file(tmp_path / "w")
    assert not caplog.records


def test_what_is_said_about_the_file_is_in_its_head(tmp_path):
    save_weights(nn.Linear(2, 2), tmp_path / "w", {"format": "pt", "written_by": "hotlap"})
    with safe_open(tmp_path / "w", "pt") as file:
        assert file.metadata() == {"format": "pt", "written_by": "hotlap"}


def test_a_file_that_does_not_fit_is_told_and_the_old_one_kept(tmp_path):
    path = tmp_path / "w"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        with pytest.raises(StoreError) as caught:
            save_weights(nn.Linear(500, 500), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == f"cannot write {path}: File too large"
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["w"]


def test_a_missing_folder_is_told(tmp_path):
    with pytest.raises(StoreError, match="No such file or directory") as caught:
        save_weights(nn.Linear(2, 2), tmp_path / "no" / "w")
    assert caught.value.__cause__.errno == errno.ENOENT
