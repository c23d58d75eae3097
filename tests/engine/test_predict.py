"""Predictions: the model's outputs for all data, in its order, leaving no trace."""

import pytest
import torch
from plain import class_data, small_mlp
from torch import nn

from hotlap import Plan, Rig
from hotlap.core.errors import JobError


def rig(model=None, plan=None, **settings):
    return Rig(model or small_mlp(), lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), plan=plan, **settings)


@pytest.mark.parametrize("kind", ["gather", "loader", "resident"])
def test_outputs_come_in_the_order_of_the_data_under_every_feed(kind):
    mine, data = rig(plan=Plan().but(kind=kind)), class_data(71)
    mine.model.insert(1, nn.Dropout(0.5))
    before = torch.get_rng_state()
    found = mine.predict(data, batch_size=16)
    assert mine.model.training
    assert torch.equal(before, torch.get_rng_state())
    mine.model.eval()
    torch.testing.assert_close(found, mine.model(data[0]).detach())


def test_outputs_in_containers_keep_them():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3, dtype=torch.float64)

        def forward(self, x):
            return {"a": self.layer(x), "b": (x,)}

    model, data = Two(), class_data(20)
    mine = rig(model, forward=lambda model, batch: (model(batch[0]), batch[1]))
    found = mine.predict(data, batch_size=8)
    torch.testing.assert_close(found["a"], model.layer(data[0]).detach())
    assert torch.equal(found["b"][0], data[0])


def test_images_are_prepared_but_not_augmented_for_predictions_and_evaluation():
    seen = []

    def prepare(batch):
        return batch[0] * 2, batch[1]

    def augment(batch):
        seen.append(len(batch[0]))
        return batch[0] + 100, batch[1]

    mine, data = rig(prepare=prepare, augment=augment), class_data(20)
    expected = mine.model(data[0] * 2).detach()
    torch.testing.assert_close(mine.predict(data), expected)
    assert mine.evaluate(data)["loss"] == pytest.approx(float(nn.functional.cross_entropy(expected, data[1])))
    assert not seen
    mine.step(data)
    assert seen == [20]


def test_data_that_is_none_is_refused():
    with pytest.raises(JobError, match="data"):
        rig().predict(None)


def test_inputs_alone_are_enough_for_predictions():
    mine, (x, _) = rig(), class_data(20)
    expected = mine.model(x).detach()
    torch.testing.assert_close(mine.predict(x, batch_size=8), expected)
    torch.testing.assert_close(mine.predict((x,), batch_size=8), expected)


def test_predictions_of_a_lower_precision_can_be_read_by_numpy():
    mine = rig(small_mlp(dtype=torch.float32), plan=Plan().but(precision="bf16"))
    assert mine.predict(class_data(8, dtype=torch.float32)).numpy().dtype == "float32"


@pytest.mark.parametrize("size", [0, -1, 2.5, "8", True])
def test_a_batch_size_that_is_none_is_refused_in_one_line(size):
    with pytest.raises(JobError, match="batch_size"):
        rig().predict(class_data(8), batch_size=size)
    with pytest.raises(JobError, match="batch_size"):
        rig().evaluate(class_data(8), batch_size=size)


def test_a_loss_of_output_and_target_that_is_no_module_is_explained():
    from hotlap.core.errors import TrainingError

    mine = Rig(
        nn.Linear(5, 3, dtype=torch.float64),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda output, target: nn.functional.cross_entropy(output, target),
    )
    with pytest.raises(TrainingError, match=r"f\(model, batch\)"):
        mine.step(class_data(8))
