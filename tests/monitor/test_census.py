"""What a step does is counted rightly, and counting changes nothing."""

import pytest
import torch
from plain import class_data, parameters_of, twins
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotlap import Plan, Rig
from hotlap.monitor import census as room
from hotlap.monitor.census import Census, census, makes_the_host_wait

FLOAT = 4


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine the threads of such small models do nothing but wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, 5, 4))[0][:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x.view(-1, 5, 4)).mean(1))


class Picture(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 6, 3, groups=3), nn.Flatten(), nn.Linear(36, 3),
        )  # fmt: skip


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(20, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [Dropping, Picture, Recurrent, Attending])
def test_a_step_that_is_counted_is_a_step_like_any_other(kind, optimizer, precision):
    def trained(model, counted):
        torch.manual_seed(7)
        rig = Rig(model, OPTIMIZERS[optimizer], nn.CrossEntropyLoss(), clip=1.0, device="cpu")
        rig.use(Plan().but(precision=precision, micro_batch=8))
        losses = []
        for number, window in enumerate(rig.feed(data, batch_size=16, epochs=2)):
            if number in counted:
                assert census(lambda window=window: losses.append(rig.step(window))).operations > 20
            else:
                losses.append(rig.step(window))
        return parameters_of(model), torch.stack(losses), torch.get_rng_state(), *model.buffers()

    torch.manual_seed(0)
    data = class_data(64, inputs=20, dtype=torch.float32)
    one, other = twins(kind())
    for plain, counted in zip(trained(one, []), trained(other, [1, 2, 5]), strict=True):
        assert torch.equal(plain, counted)


def test_a_linear_layer_takes_two_operations_for_each_weight_and_sample_in_each_product():
    layer, x = nn.Linear(8, 16), torch.randn(4, 8)
    product = 2 * 4 * 8 * 16
    assert census(lambda: layer(x)).flops == product
    # The input needs no gradient, so backward makes one product.
    assert census(lambda: layer(x).sum().backward()).flops == 2 * product
    x.requires_grad_()
    assert census(lambda: layer(x).sum().backward()).flops == 3 * product


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_takes_as_much_for_each_gradient_as_forward_also_in_groups(groups, transposed):
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 8, 3, groups=groups)
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    places = 6 * 6 if transposed else 4 * 4
    forward = 2 * 2 * places * 9 * 4 * 8 // groups
    assert census(lambda: layer(x)).flops == forward
    assert census(lambda: layer(x).sum().backward()).flops == 3 * forward
    x.requires_grad_(False)
    assert census(lambda: layer(x).sum().backward()).flops == 2 * forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_recurrent_layer_meets_every_step_with_every_matrix(kind, gates, dtype):
    layer = kind(6, 8, num_layers=2, bidirectional=True).to(dtype)
    x = torch.randn(5, 3, 6, dtype=dtype, requires_grad=True)
    forward = 2 * 15 * 2 * gates * 8 * ((6 + 8) + (16 + 8))
    assert census(lambda: layer(x)).flops == forward
    # Some kernels leave out the gradient of the first hidden state.
    assert 2.5 * forward < census(lambda: layer(x)[0].sum().backward()).flops <= 3 * forward


def test_attention_is_counted_and_half_of_it_where_it_sees_no_future():
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    forward = 4 * 2 * 3 * 16 * 16 * 8
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        whole = census(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
        causal = census(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward())
    assert whole.flops == 3.5 * forward  # backward makes the scores again
    assert causal.flops == whole.flops / 2


def test_only_operations_that_write_are_counted():
    x = torch.randn(10, 10)

    def run():
        y = x + 1
        z = y.view(-1).detach()[10:].reshape(9, 10).t()
        torch.empty(1000)
        torch._C._nn.gelu(z.mul_(2))

    assert census(run) == Census(operations=3, flops=0, bytes=FLOAT * (2 * 100 + 2 * 90 + 2 * 90))
    assert census(lambda: x.t().unsqueeze(0).detach()) == Census(operations=0, flops=0, bytes=0)
    assert census(lambda: None) == Census(operations=0, flops=0, bytes=0)


@pytest.mark.parametrize(
    ("name", "out", "kwargs", "waits"),
    [
        ("_local_scalar_dense", 1.0, {}, True),
        ("nonzero", torch.empty(1, device="meta"), {}, True),
        ("_to_copy", torch.empty(1), {}, True),
        ("_to_copy", torch.empty(1), {"non_blocking": True}, False),
        ("_to_copy", torch.empty(1, device="meta"), {}, False),
        ("mul", torch.empty(1, device="meta"), {}, False),
    ],
)
def test_reading_back_from_a_device_makes_the_host_wait(name, out, kwargs, waits):
    class OnGpu:  # what is read is on a GPU, which this machine may lack
        device = torch.device("cuda")

    assert makes_the_host_wait(name, [OnGpu()], kwargs, out) is waits
    assert makes_the_host_wait(name, [torch.empty(1)], kwargs, out) is False


def test_what_is_shared_or_expanded_is_read_once_and_what_is_overwritten_not_at_all():
    x, big = torch.randn(100), torch.randn(1).expand(100)
    assert census(lambda: x * x).bytes == FLOAT * 200
    assert census(lambda: x * big).bytes == FLOAT * 201
    assert census(lambda: x.zero_()).bytes == FLOAT * 100
    assert census(lambda: torch.add(x, 1, out=x.new_empty(100))).bytes == FLOAT * 200


def test_rows_of_a_large_table_cost_what_they_hold():
    table, rows = nn.Embedding(10_000, 16), torch.arange(4)
    data = table.weight.detach().clone()
    for run in (
        lambda: F.embedding(rows, table.weight),
        lambda: data[rows],
        lambda: data.index_select(0, rows),
        lambda: data.index_put_((rows,), torch.zeros(4, 16)),
    ):
        assert 2 * FLOAT * 64 <= census(run).bytes < 5 * FLOAT * 64
    # Its gradient is a table, written whole.
    assert census(lambda: table(rows).sum().backward()).bytes > FLOAT * 160_000


def test_sparse_gradients_are_counted_too():
    table = nn.Embedding(10_000, 16, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def run():
        optimizer.zero_grad()
        table(torch.arange(4)).sum().backward()
        optimizer.step()

    run()
    assert 0 < census(run).bytes < FLOAT * 160_000


def test_an_operation_on_a_list_is_one_on_each_of_its_tensors_on_a_cpu():
    tensors = [torch.randn(3) for _ in range(7)]
    assert census(lambda: torch._foreach_mul_(tensors, 2.0)) == Census(operations=7, flops=0, bytes=7 * 2 * 3 * FLOAT)


def test_the_whole_step_of_a_rig_is_counted_backward_and_update_too():
    model = nn.Sequential(nn.Linear(20, 50, bias=False), nn.ReLU(), nn.Linear(50, 3, bias=False))
    data = class_data(32, inputs=20, dtype=torch.float32)
    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), device="cpu")
    first, second = rig.feed(data, batch_size=16, epochs=1)
    rig.step(first)
    counted = census(lambda: rig.step(second))
    assert counted.flops == 2 * 16 * (2 * 20 * 50 + 3 * 50 * 3)
    assert 10 <= counted.operations <= 30
    weights = 20 * 50 + 50 * 3
    assert counted.bytes > FLOAT * 6 * weights  # read twice, gradient written and read, weight read and written


def test_what_a_step_raises_comes_through_and_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError):
        census(lambda: 1 / 0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_an_operation_that_cannot_be_counted_stops_nothing(monkeypatch):
    def unknown(*_):
        raise AssertionError("shapes do not fit")

    monkeypatch.setattr(room, "flops_of", unknown)
    a, out = torch.randn(4, 4), []
    assert census(lambda: out.append(a @ a)) == Census(operations=1, flops=0, bytes=FLOAT * 32)
    assert torch.equal(out[0], a @ a)


def test_a_model_that_is_compiled_is_counted_as_it_was_written():
    layer, x = nn.Linear(8, 16), torch.randn(4, 8)
    compiled = torch.compile(layer, backend="eager")
    plain = census(lambda: layer(x))
    assert census(lambda: compiled(x)) == plain
    compiled(x)
    assert census(lambda: compiled(x)) == plain
