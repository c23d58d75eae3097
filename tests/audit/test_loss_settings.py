"""Settings of a loss that change in mid-training count from the next step on, however the batch is cut."""

import copy

import pytest
import torch
from plain import class_data, parameters_of, small_mlp
from torch import nn

from hotlap import Job, JobError, Rig, TrainingError, fit
from hotlap.core.plan import Plan

CHANGES = {
    "label_smoothing": 0.5,
    "weight": torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64),
    "ignore_index": 1,
    "reduction": "sum",
}


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_of_the_loss_changed_in_mid_training_is_obeyed_by_the_next_step(name, micro):
    model, data = small_mlp(), class_data(12)
    twin = copy.deepcopy(model)
    loss, own = nn.CrossEntropyLoss(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    rig = Rig(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, plan=Plan().but(micro_batch=micro))
    for step in range(3):
        if step == 1:
            setattr(loss, name, CHANGES[name])
            setattr(own, name, CHANGES[name])
        rig.step(data)
        optimizer.zero_grad()
        own(twin(data[0]), data[1]).backward()
        optimizer.step()
    torch.testing.assert_close(parameters_of(model), parameters_of(twin))


@pytest.mark.parametrize("name", CHANGES)
def test_an_evaluation_obeys_the_settings_that_the_loss_has_now(name):
    model, data, loss = small_mlp(), class_data(12), nn.CrossEntropyLoss()
    rig = Rig(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    rig.evaluate(data)
    setattr(loss, name, CHANGES[name])
    expected = loss(model(data[0]), data[1]).detach()
    if name == "reduction":
        expected = expected / 12
    assert rig.evaluate(data, batch_size=5)["loss"] == pytest.approx(float(expected))


def test_targets_are_counted_anew_where_the_ignored_class_changes_though_none_was_in_the_data():
    model, data, loss = small_mlp(), class_data(12), nn.CrossEntropyLoss()
    rig = Rig(model, torch.optim.SGD(model.parameters(), lr=0.0), loss)
    for step, window in enumerate(rig.feed(data, batch_size=6, epochs=2)):
        if step == 2:
            rig.totals.reset()
            loss.ignore_index = 1
        rig.step(window)
    assert rig.totals.mean() == pytest.approx(float(loss(model(data[0]), data[1]).detach()))


def test_a_loss_whose_forward_was_replaced_is_not_taken_for_torchs_own():
    model, data, loss = small_mlp(), class_data(12), nn.CrossEntropyLoss()
    loss.forward = lambda output, target: output.square().mean()
    rig = Rig(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    assert rig.evaluate(data, batch_size=12)["loss"] == pytest.approx(float(model(data[0]).square().mean().detach()))


def job(model):
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model=model, data=class_data(), loss=nn.CrossEntropyLoss(), optimizer=made, batch_size=8, epochs=1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fit_without_gradients_is_refused_in_one_clear_line(mode, tmp_path):
    one = job(small_mlp())
    with mode(), pytest.raises(TrainingError, match=rf"torch\.{mode.__name__}\(\) is active") as raised:
        fit(one, out=tmp_path / "run", progress=False)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_step_without_gradients_is_refused_in_one_clear_line():
    model = small_mlp()
    rig = Rig(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    with torch.no_grad(), pytest.raises(TrainingError, match=r"torch\.no_grad\(\) is active"):
        rig.step(class_data(8))


def test_a_model_made_in_inference_mode_is_a_mistake_of_the_job():
    with torch.inference_mode():
        model = small_mlp()
    with pytest.raises(JobError, match=r"made inside torch\.inference_mode"):
        job(model)
