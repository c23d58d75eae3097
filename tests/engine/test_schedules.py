"""Learning rates on the device follow the schedule, also where only the device knows which updates were made."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from hotlap.engine.schedules import AHEAD, Rates, Schedule, moves_rates_only

CPU = torch.device("cpu")
SCHEDULES = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
}


def made(name="exponential", *, counted, updates=8):
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizer = torch.optim.AdamW(
        [{"params": layers[0].parameters(), "lr": 0.1}, {"params": layers[1].parameters(), "lr": 0.01}], fused=True
    )
    schedule = Schedule(SCHEDULES[name](optimizer))
    optimizer._opt_called = True
    return optimizer, schedule, Rates(optimizer, schedule, CPU, updates=updates, counted=counted)


def expected(name, count):
    optimizer, schedule, _ = made(name, counted=False)
    rows = []
    for _ in range(count):
        rows.append([group["lr"] for group in optimizer.param_groups])
        schedule.move()
    return rows


def read(optimizer, rates, update):
    with rates.given(update):
        return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_hold_the_rates_of_the_updates_to_come_and_the_host_keeps_plain_numbers(name):
    optimizer, _, rates = made(name, counted=False)
    rates.write(4)
    found = [read(optimizer, rates, update) for update in range(4)]
    rates.ended()
    rates.write(3)
    found += [read(optimizer, rates, update) for update in range(3)]
    rates.ended()
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected(name, 7)))
    assert all(type(group["lr"]) is float for group in optimizer.param_groups)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected(name, 8)[-1])


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.sampled_from(sorted(SCHEDULES)))
@settings(max_examples=30, deadline=None)
def test_a_counted_schedule_moves_with_real_updates_alone(skips, name):
    optimizer, _, rates = made(name, counted=True)
    rows, real = expected(name, 40), 0
    for number, skipped in enumerate(skips):
        rates.write(1)
        assert read(optimizer, rates, 0) == pytest.approx(rows[real], rel=1e-6)
        rates.made(torch.tensor(float(skipped)))
        real += not skipped
        if number % 7 == 6:
            rates.settle()
            assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rows[real])
    rates.settle()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rows[real])


def test_a_counted_schedule_goes_on_beyond_what_was_drawn_up():
    optimizer, _, rates = made("lambda", counted=True)
    rows = expected("lambda", AHEAD + 20)
    for number in range(AHEAD + 10):
        rates.write(1)
        assert read(optimizer, rates, 0) == pytest.approx(rows[number], rel=1e-6)
        rates.made(torch.tensor(0.0))


@pytest.mark.parametrize("counted", [False, True])
def test_a_rate_that_the_user_changes_takes_effect_at_once(counted):
    optimizer, _schedule, rates = made("exponential", counted=counted)
    for _ in range(3):
        rates.write(1)
        read(optimizer, rates, 0)
        rates.made(torch.tensor(0.0))
        rates.ended()
    optimizer.param_groups[0]["lr"] = 7.0
    rates.write(1)
    # The other group's went on from where it was.
    assert read(optimizer, rates, 0) == pytest.approx([7.0, 0.01 * 0.9**3])


def test_an_update_that_failed_moves_no_schedule():
    optimizer, _, rates = made("exponential", counted=False)
    for _ in range(3):  # none of them ended
        rates.write(1)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("counted", [False, True])
def test_a_group_that_is_added_in_the_middle_gets_its_rate(counted):
    optimizer, _, rates = made("exponential", counted=counted)
    rates.write(1)
    optimizer.add_param_group({"params": nn.Linear(1, 1).parameters(), "lr": 0.5})
    if not counted:
        rates.write(1)
        assert read(optimizer, rates, 0)[2] == pytest.approx(0.5)


def test_drawing_a_schedule_up_leaves_no_trace_in_it():
    _optimizer, schedule, rates = made("sequential", counted=True)
    before = copy.deepcopy(schedule.scheduler.state_dict())
    rates.write(1)
    assert repr(schedule.scheduler.state_dict()) == repr(before)


def test_a_schedule_that_moves_the_momentum_is_told_apart():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    assert moves_rates_only(Schedule(lr_scheduler.ExponentialLR(optimizer, 0.9)), optimizer)
    cycle = Schedule(lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10))
    lr, momentum = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
    assert not moves_rates_only(cycle, optimizer)
    assert (lr, momentum) == (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"])
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=5), cycle.scheduler]
    late = Schedule(lr_scheduler.SequentialLR(optimizer, parts, [5]))
    assert not moves_rates_only(late, optimizer)
