"""An error of the user's own code or data costs no step that was made before it."""

import pytest
import torch
from killed import outcome
from plain import class_data, small_mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hotlap import Job, fit


class BrokenError(ValueError):
    """What the user's code raises."""


class Samples(Dataset):
    """Raises at a sample, the second time that it is fetched."""

    def __init__(self, broken=None):
        self.x, self.y = class_data()
        self.broken, self.fetched = broken, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.fetched += index == self.broken
        if index == self.broken and self.fetched == 2:
            raise BrokenError("the data is broken")
        return self.x[index], self.y[index]


class Net(nn.Module):
    """Draws at random in training; fails in the so manieth forward pass of training, or of evaluation."""

    def __init__(self, training_at=None, evaluation_at=None):
        super().__init__()
        self.inner = nn.Sequential(small_mlp(), nn.Dropout(0.2))
        self.at, self.passes = {True: training_at, False: evaluation_at}, {True: 0, False: 0}

    def forward(self, x):
        self.passes[self.training] += 1
        if self.passes[self.training] == self.at[self.training]:
            raise BrokenError("the model is broken")
        return self.inner(x)


def job(data=None, model=None, **changes):
    """50 samples in batches of 8: seven updates an epoch, and an evaluation of one batch."""
    model = model or Net()
    settings = {
        "data": data or Samples(),
        "valid": class_data(30, seed=9),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "batch_size": 8,
        "epochs": 3,
        "device": "cpu",
    }
    return Job(model=model, **{**settings, **changes})


def failed(run, broken, **settings):
    """The note that the error of a training carries."""
    with pytest.raises(BrokenError) as caught:
        fit(broken, out=run, progress=False, **settings)
    return getattr(caught.value, "__notes__", [])


def ends_alike(tmp_path, **changes):
    """Whether the run that an error ended comes to what a run without an error comes to."""
    fit(job(**changes), resume=tmp_path / "broken", progress=False, allow_changes=True)
    fit(job(**changes), out=tmp_path / "whole", progress=False)
    return outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


def test_an_error_in_the_data_saves_the_steps_made_and_says_how_to_go_on(tmp_path):
    run = tmp_path / "broken"
    sample, note = failed(run, job(Samples(broken=7)))
    assert "sample 7" in sample
    step = int((run / "checkpoints").glob("step-*").__next__().name.removeprefix("step-"))
    assert 7 <= step < 14  # it is fetched once in each epoch
    assert note.startswith(f"saved at step {step}; once the error is mended, go on with: hotlap resume {run}")
    assert ends_alike(tmp_path)


def test_an_error_in_a_workers_data_saves_too(tmp_path):
    broken = DataLoader(Samples(broken=7), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    (note,) = failed(tmp_path / "broken", job(broken, batch_size=None))
    assert note.startswith("saved at step ")


@pytest.mark.parametrize("valid", [True, False])
def test_an_error_in_the_model_leaves_nothing_of_the_step_it_ended(tmp_path, valid):
    changes = {} if valid else {"valid": None}
    # The second epoch's last batch is of a shape that went through once, so all that a step moves is put back.
    (note,) = failed(tmp_path / "broken", job(model=Net(training_at=14), **changes))
    assert note.startswith("saved at step 13;")
    assert ends_alike(tmp_path, **changes)


def test_an_error_in_the_first_step_of_an_epoch_keeps_the_record_of_the_one_before(tmp_path):
    failed(tmp_path / "broken", job(model=Net(training_at=8), valid=None))
    fit(job(valid=None), resume=tmp_path / "broken", progress=False, allow_changes=True)
    assert [record["epoch"] for record in outcome(tmp_path / "broken")[1]] == [1, 2, 3]


@pytest.mark.parametrize("changes", [{}, {"eval_every": 4}])
def test_an_evaluation_that_an_error_ended_is_made_when_the_run_goes_on(tmp_path, changes):
    (note,) = failed(tmp_path / "broken", job(model=Net(evaluation_at=2), **changes))
    assert note.startswith(f"saved at step {2 * changes.get('eval_every', 7)};")
    assert ends_alike(tmp_path, **changes)


class Halfway(torch.optim.SGD):
    """Fails in its third update, with one weight changed."""

    made = 0

    def step(self, closure=None):
        self.made += 1
        if self.made == 3:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise BrokenError("the optimizer is broken")
        return super().step(closure)


def test_weights_that_are_half_updated_are_not_saved(tmp_path):
    model = Net()
    (note,) = failed(tmp_path / "broken", job(model=model, optimizer=Halfway(model.parameters(), lr=0.1)))
    assert note.startswith("step 2 is not saved (the update of step 2 had begun); once the error is mended, go on")
    assert not (tmp_path / "broken" / "checkpoints").exists()


def test_the_error_is_raised_though_nothing_can_be_saved(tmp_path, monkeypatch):
    def full(*args):
        raise RuntimeError("the device answers no more")

    monkeypatch.setattr("hotlap.fitting.session.export_state", full)
    (note,) = failed(tmp_path / "broken", job(model=Net(training_at=3)))
    assert note.startswith("step 2 is not saved (the device answers no more)")


@pytest.mark.parametrize("settings", [{"save_every": 0}, {}])
def test_where_there_is_nothing_to_save_the_error_is_left_as_it_is(tmp_path, settings):
    at = 5 if settings else 1
    assert failed(tmp_path / "broken", job(model=Net(training_at=at)), **settings) == []
