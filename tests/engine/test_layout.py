"""Images the other way round in memory: the same numbers, the same objects, and state that follows its parameter."""

import copy

import pytest
import torch
from torch import nn

from hotlap.engine.layout import Layout, laid_out_as, why_not_channels_last
from hotlap.engine.optimizers import Fusion
from hotlap.engine.snapshot import Snapshot
from hotlap.store.encoding import decode, encode, to_json
from hotlap.store.files import from_json
from hotlap.store.tensors import tensor_pieces, tensors_from

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


class Pictures(nn.Module):
    """Convolutions of every shape whose strides are ambiguous, and a picture among the buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),  # a norm follows: its gradient would be noise
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=8, padding=1),  # one channel in
            nn.Conv2d(8, 4, 1),  # one by one
            nn.ConvTranspose2d(4, 4, 2),
            nn.Conv2d(4, 1, 3),  # one channel out
        )
        self.register_buffer("mean", torch.rand(1, 3, 6, 6))
        self.head = nn.Linear(25, 3)

    def forward(self, x):
        return self.head(self.layers(x - self.mean).flatten(1))


def pictures():
    return Pictures().double()


def data(number=0):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=generator), torch.randint(
        3, (4,), generator=generator
    )


def train(model, optimizer, layout=None, steps=3, first=0):
    for number in range(first, first + steps):
        x, y = data(number)
        if layout is not None:
            x = layout.batch(x)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def everything(model, optimizer):
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [*tensors, *(v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))]


def assert_same_strides(model, optimizer):
    """Gradients and state lie as their parameter does; a dimension of 1 has no stride that matters."""

    def strides(tensor):
        return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]

    for parameter in model.parameters():
        held = [parameter.grad, *optimizer.state.get(parameter, {}).values()]
        for tensor in held:
            if isinstance(tensor, torch.Tensor) and tensor.shape == parameter.shape:
                assert strides(tensor) == strides(parameter)


def test_only_convolutions_over_images_or_volumes_gain_anything():
    assert why_not_channels_last([Pictures()]) is None
    assert why_not_channels_last([nn.Conv3d(1, 1, 1)]) is None
    assert why_not_channels_last([nn.Linear(1, 1), nn.ConvTranspose3d(1, 1, 1)]) is None
    assert "the model has none" in why_not_channels_last([nn.Conv1d(1, 1, 1), nn.BatchNorm2d(3)])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("when", ["first", "middle", "back"])
def test_training_is_the_same_either_way_round(name, fused, when):
    model, plain = pictures(), pictures()
    optimizer, other = KINDS[name](model.parameters()), KINDS[name](plain.parameters())
    if fused and "fused" not in optimizer.defaults:
        return
    Fusion(optimizer).set(fused)
    layout = Layout([model], optimizer)
    if when == "first":
        layout.set("channels_last")
    train(model, optimizer, layout if when == "first" else None)
    if when != "first":
        layout.set("channels_last")
    assert_same_strides(model, optimizer)
    train(model, optimizer, layout, first=3)
    assert_same_strides(model, optimizer)
    if when == "back":
        layout.set("as given")
        assert all(p.is_contiguous() for p in model.parameters())
        assert_same_strides(model, optimizer)
    train(model, optimizer, first=6)
    train(plain, other, steps=9)
    for mine, theirs in zip(everything(model, optimizer), everything(plain, other), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-10, atol=1e-12)


def test_tensors_stay_the_same_objects_with_the_same_numbers():
    model = pictures()
    optimizer = KINDS["adamw"](model.parameters())
    train(model, optimizer)
    objects = [id(t) for t in (*model.parameters(), *model.buffers())]
    numbers = [t.clone() for t in everything(model, optimizer)]
    layout = Layout([model], optimizer)
    layout.set("channels_last")
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == objects
    assert all(p.is_contiguous(memory_format=LAST) for p in model.parameters() if p.ndim == 4)
    assert not model.layers[0].weight.is_contiguous()
    assert model.mean.is_contiguous(memory_format=LAST)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), numbers, strict=True))
    layout.set("as given")
    assert all(t.is_contiguous() for t in everything(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), numbers, strict=True))


def test_setting_the_layout_in_force_again_moves_nothing():
    model = pictures()
    optimizer = KINDS["adamw"](model.parameters())
    train(model, optimizer)
    layout = Layout([model], optimizer)
    for wanted in ("as given", "channels_last", "as given"):
        layout.set(wanted)
        places = [t.data_ptr() for t in everything(model, optimizer)]
        layout.set(wanted)
        assert [t.data_ptr() for t in everything(model, optimizer)] == places


def test_as_given_is_the_way_the_user_had_it():
    model = pictures().to(memory_format=LAST)
    model.layers[3].weight.data = model.layers[3].weight.data.contiguous()
    optimizer = KINDS["adamw"](model.parameters())
    given = [t.stride() for t in (*model.parameters(), *model.buffers())]
    layout = Layout([model], optimizer)
    layout.set("as given")
    layout.set("channels_last")
    layout.set("channels_last")
    layout.set("as given")
    assert [t.stride() for t in (*model.parameters(), *model.buffers())] == given


def test_volumes_have_a_layout_of_their_own():
    model = nn.Conv3d(2, 4, 3).double()
    optimizer = KINDS["adamw"](model.parameters())
    layout = Layout([model], optimizer)
    layout.set("channels_last")
    assert model.weight.is_contiguous(memory_format=LAST_3D)
    batch = layout.batch(torch.randn(2, 2, 4, 4, 4).double())
    assert batch.is_contiguous(memory_format=LAST_3D)
    model(batch).sum().backward()
    optimizer.step()
    assert_same_strides(model, optimizer)


def test_weights_that_two_layers_share_are_still_shared():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].weight = model[0].weight
    Layout([model], KINDS["sgd"](model.parameters())).set("channels_last")
    assert model[1].weight is model[0].weight
    assert model[0].weight.is_contiguous(memory_format=LAST)


def test_what_is_no_plain_tensor_of_its_own_is_left_alone():
    model = nn.Conv2d(3, 4, 3)
    model.register_buffer("wide", torch.ones(1, 3, 1, 1).expand(2, 3, 4, 4))
    model.register_buffer("thin", torch.eye(3).to_sparse())
    Layout([model], KINDS["sgd"](model.parameters())).set("channels_last")
    assert 0 in model.wide.stride()
    assert model.thin.is_sparse


def test_images_of_a_batch_are_turned_and_all_else_is_not():
    layout = Layout([nn.Conv2d(3, 4, 3)], torch.optim.SGD(nn.Conv2d(3, 4, 3).parameters()))
    batch = {
        "bytes": torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
        "halves": [torch.zeros(2, 3, 4, 4, dtype=torch.float16), torch.zeros(2, 3, 2, 4, 4)],
        "classes": (torch.zeros(2, 3, 4, 4, dtype=torch.int64), torch.zeros(2, 3), "name"),
    }
    turned = layout.batch(batch)
    assert turned["bytes"].is_contiguous(memory_format=LAST)
    assert turned["halves"][0].is_contiguous(memory_format=LAST)
    assert turned["halves"][1].is_contiguous(memory_format=LAST_3D)
    assert turned["classes"][0] is batch["classes"][0]
    assert turned["classes"][1:] == (batch["classes"][1], "name")
    again = layout.batch(turned)
    assert again["bytes"] is turned["bytes"]
    assert again["halves"][0] is turned["halves"][0]


# --- state that comes from elsewhere ---------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("taken", ["channels_last", "as given"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_snapshot_taken_in_one_layout_is_restored_in_the_other(name, taken, gone):
    """`gone`: what the snapshot holds of the optimizer is not there any more, and has to be made anew."""
    other = "as given" if taken == "channels_last" else "channels_last"
    model, plain = pictures(), pictures()
    optimizer, theirs = KINDS[name](model.parameters()), KINDS[name](plain.parameters())
    if "fused" in optimizer.defaults:
        Fusion(optimizer).set(True)
    layout = Layout([model], optimizer)
    layout.set(taken)
    early = Snapshot([model], optimizer, None, torch.device("cpu"))
    train(model, optimizer, layout)
    numbers = [t.clone() for t in everything(model, optimizer)]
    snapshot = Snapshot([model], optimizer, None, torch.device("cpu"))
    train(model, optimizer, layout)
    layout.set(other)
    strides = [p.stride() for p in model.parameters()]
    if gone:
        early.restore()
    places = [p.data_ptr() for p in model.parameters()]
    snapshot.restore()
    assert [p.data_ptr() for p in model.parameters()] == places
    assert [p.stride() for p in model.parameters()] == strides
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), numbers, strict=True))
    assert_same_strides(model, optimizer)
    train(model, optimizer, layout if other == "channels_last" else None, first=3)
    train(plain, theirs, steps=6)
    for mine, expected in zip(everything(model, optimizer), everything(plain, theirs), strict=True):
        torch.testing.assert_close(mine.double(), expected.double(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad"])
@pytest.mark.parametrize("stored", ["channels_last", "as given"])
def test_stored_state_put_into_the_other_layout_follows_it_once_the_layout_is_set(name, stored):
    """As a checkpoint is put back: weights are copied, and the optimizer is given state as it was stored."""
    other = "as given" if stored == "channels_last" else "channels_last"
    source = pictures()
    optimizer = KINDS[name](source.parameters())
    layout = Layout([source], optimizer)
    layout.set(stored)
    train(source, optimizer, layout)
    tensors = {}
    text = to_json(encode([optimizer.state[p] for p in source.parameters()], tensors, "state"))
    stored_tensors = tensors_from(b"".join(bytes(piece) for piece in tensor_pieces(tensors)), "x")
    state = decode(from_json(text, "x"), stored_tensors, torch.device("cpu"))

    model = pictures()
    again = KINDS[name](model.parameters())
    layout_again = Layout([model], again)
    layout_again.set(other)
    model.load_state_dict(copy.deepcopy(source.state_dict()))
    for parameter, values in zip(model.parameters(), state, strict=True):
        again.state[parameter] = values
    layout_again.set(other)
    assert_same_strides(model, again)
    Fusion(again).set(True)
    train(model, again, first=3)
    layout.set("as given")
    train(source, optimizer, first=3)
    for mine, theirs in zip(everything(model, again), everything(source, optimizer), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-10, atol=1e-12)


def test_fused_kernels_on_the_cpu_pair_numbers_by_place_so_strides_have_to_agree():
    """Why state has to follow: torch looks at no strides here, and no error tells."""
    weight = torch.randn(4, 3, 2, 2)
    results = []
    for turned in (False, True):
        parameter = nn.Parameter(weight.clone())
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
        for number in range(2):
            parameter.grad = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(number))
            optimizer.step()
            if turned:
                optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].to(memory_format=LAST)
        results.append(parameter.detach())
    assert not torch.allclose(*results)


def test_a_tensor_that_lies_as_its_owner_does_is_handed_back_itself():
    owner = torch.zeros(2, 3, 4, 4).to(memory_format=LAST)
    same, turned = torch.ones_like(owner), torch.ones(2, 3, 4, 4)
    assert laid_out_as(owner, same) is same
    assert laid_out_as(owner, turned).stride() == owner.stride()
    other_shape, sparse = torch.ones(3), torch.eye(3).to_sparse()
    assert laid_out_as(owner, other_shape) is other_shape
    assert laid_out_as(owner, sparse) is sparse
