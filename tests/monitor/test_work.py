"""The work of an update is counted as a GPU would make it, and counting leaves the optimizer as it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hotlap.machine.prediction import Work
from hotlap.monitor.bound import least_traffic
from hotlap.monitor.work import count_work


def updates(model, x, loss=None, optimizer=None):
    """Makes an update at each call; the first one is made."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    loss = loss or (lambda output: output.square().mean())

    def update():
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

    update()
    return update, optimizer


def test_the_optimizer_is_counted_apart_and_on_lists_as_on_a_gpu():
    few, many = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(count))) for count in (2, 12))
    works = []
    for model in (few, many):
        update, optimizer = updates(model, torch.randn(4, 8))
        works.append(count_work(update))
        assert [group["foreach"] for group in optimizer.param_groups] == [None]
        assert works[-1].least_step_bytes == least_traffic(optimizer)
        assert works[-1].least_step_bytes < works[-1].step_bytes
    # An operation on a list counts once, however many tensors it takes.
    by_hand = [work.operations - work.launches for work in works]
    assert by_hand[0] == by_hand[1] > 0


def test_several_updates_are_counted_on_average():
    update, _ = updates(nn.Linear(8, 3), torch.randn(4, 8))
    assert count_work(update, 3) == count_work(update)


def test_a_step_that_makes_the_passes_itself_counts_as_passes():
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def passes():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    work = count_work(lambda: optimizer.step(passes))
    assert work.total_flops == 2 * 2 * 4 * 8 * 3
    assert (work.step_bytes, work.least_step_bytes) == (0, 0)


def test_convolutions_are_in_tf32_by_default_and_products_where_the_switch_is_on():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    update, _ = updates(model, torch.randn(2, 3, 8, 8))
    asked = count_work(update).flops
    assert set(asked) == {"tf32", "fp32"}
    torch.set_float32_matmul_precision("high")
    try:
        switched = count_work(update).flops
    finally:
        torch.set_float32_matmul_precision("highest")
    assert switched == {"tf32": sum(asked.values())}


def test_numbers_in_16_bits_and_in_64_are_counted_under_their_formats():
    x = torch.randn(4, 8)
    cast, _ = updates(nn.Linear(8, 3), x, loss=lambda output: output.float().square().mean())
    with torch.autocast("cpu", torch.bfloat16):
        assert set(count_work(cast).flops) == {"bf16"}
    wide, _ = updates(nn.Linear(8, 3).double(), x.double())
    assert set(count_work(wide).flops) == {"fp64"}


def test_in_16_bits_half_of_the_bytes_move_but_for_whole_numbers():
    x = torch.randn(64, 64, requires_grad=True)
    plain = count_work(lambda: (x * 2).sum())
    assert plain.narrow_bytes == plain.bytes / 2
    tokens = torch.arange(64)
    whole = count_work(lambda: tokens * 2)
    assert whole.narrow_bytes == whole.bytes


def test_a_recurrent_layer_launches_a_kernel_for_each_step_and_layer():
    x = torch.randn(5, 7, 4, requires_grad=True)
    layer = nn.LSTM(4, 8, num_layers=2, batch_first=True)
    forward = count_work(lambda: layer(x))
    assert forward.launches == forward.operations + 2 * (7 - 1)


@pytest.mark.parametrize(("kind", "unfused"), [(nn.LSTM, False), (nn.GRU, True), (nn.RNN, True), (nn.Linear, False)])
def test_recurrent_layers_that_the_cpu_splits_are_noticed(kind, unfused):
    layer = kind(4, 8)
    assert count_work(lambda: layer(torch.randn(5, 7, 4, requires_grad=True))).unfused is unfused


def test_attention_with_dropout_is_one_operation_as_on_a_gpu():
    q = torch.randn(2, 2, 8, 16, requires_grad=True)
    by_position, by_name = (
        count_work(lambda: F.scaled_dot_product_attention(q, q, q, None, 0.5)),
        count_work(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)),
    )
    assert by_position == by_name == count_work(lambda: F.scaled_dot_product_attention(q, q, q))
    assert by_name.operations == 1
    dropped = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert not torch.equal(dropped, F.scaled_dot_product_attention(q, q, q))  # afterwards it drops again


def test_a_step_that_fails_leaves_torch_and_the_optimizer_as_they_were():
    attention = F.scaled_dot_product_attention
    update, optimizer = updates(nn.Linear(8, 3), torch.randn(4, 8))
    optimizer.param_groups[0]["lr"] = "high"
    with pytest.raises(TypeError):
        count_work(update)
    assert optimizer.param_groups[0]["foreach"] is None
    assert F.scaled_dot_product_attention is attention


def test_a_negative_figure_is_refused_by_its_name():
    with pytest.raises(ValueError, match="launches=-1 must be a number and not negative"):
        Work(operations=1, launches=-1, flops={}, bytes=1, narrow_bytes=1)
