"""What users get wrong with data, shapes and arguments: one line that names it, before or in the first step."""

import logging
import math

import numpy as np
import pytest
import torch
from plain import class_data, parameters_of, small_mlp
from torch import nn

from hotlap import Job, JobError, TrainingError, fit
from hotlap.core.data_checks import value_warnings

FEATURES = class_data()[0].shape[1]
CLASSES = 3


def job_for(**changes):
    model = changes.pop("model", None) or small_mlp()
    given = {
        "model": model,
        "data": class_data(),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "batch_size": 10,
        "epochs": 2,
        "device": "cpu",
    }
    return Job(**{**given, **changes})


def quiet(job, tmp_path, **settings):
    return fit(job, plan="off", out=tmp_path / "run", progress=False, **settings)


def spoilt(row=7, value=math.nan):
    x, y = class_data()
    x = x.clone()
    x[row, 1] = value
    return x, y


def test_a_nan_in_the_data_is_named_with_its_row_before_training(tmp_path, caplog):
    with pytest.raises(TrainingError):
        quiet(job_for(data=spoilt()), tmp_path)
    first = next(record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert first.startswith("data[0] holds 1 number that is NaN or infinite, the first in row 7;")


def test_weights_that_are_nan_end_the_training_by_an_error_that_names_the_row(tmp_path):
    with pytest.raises(TrainingError, match=r"(?s)weights are not finite.*sample 7.*data\[0\] holds 1 number.* row 7"):
        quiet(job_for(data=spoilt()), tmp_path, save_every=1)


def test_nothing_is_saved_of_weights_that_are_nan(tmp_path):
    with pytest.raises(TrainingError):
        quiet(job_for(data=spoilt()), tmp_path, save_every=0)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_early_stopping_keeps_the_best_weights_of_a_training_whose_weights_become_nan(tmp_path):
    class Bursting(nn.Module):
        """Gives NaN from the third epoch on."""

        def __init__(self):
            super().__init__()
            self.inner, self.calls = small_mlp(), 0

        def forward(self, x):
            self.calls += self.training
            return self.inner(x) * (math.nan if self.calls > 10 and self.training else 1.0)

    model = Bursting()
    job = job_for(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        epochs=9,
        valid=class_data(20, seed=3),
        patience=5,
    )
    run = quiet(job, tmp_path)
    assert run.stopped.startswith("early: the weights are not finite")
    assert run.best["epoch"] <= 2
    assert parameters_of(run.model).isfinite().all()


def test_numbers_that_are_masked_may_be_nan(tmp_path):
    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_mlp()

        def forward(self, x):
            return self.inner(x.nan_to_num())

    model = Masking()
    run = quiet(job_for(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), data=spoilt()), tmp_path)
    assert run.steps == 10
    assert "row 7" in run.problems[0]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (torch.zeros(4, 2), []),
        (np.zeros((4, 2), "float16"), []),
        ((torch.zeros(4), torch.tensor([0.0, 1e29, 0.0, 0.0])), ["data[1] holds numbers as large as 1e+29"]),
        (np.array([[0.0], [-np.inf]]), ["data holds 1 number that is NaN or infinite, the first in row 1"]),
        (torch.arange(4), []),
        ([1.0, math.nan], []),
    ],
    ids=["zeros", "half", "large", "infinite", "whole", "a dataset"],
)
def test_values_that_spoil_weights_are_found_in_columns_alone(data, found):
    lines = value_warnings("data", data)
    assert [line.split(";")[0] for line in lines] == found


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"data": (torch.randn(50, FEATURES + 2, dtype=torch.float64), class_data()[1])},
            f"a linear layer of the model takes {FEATURES} features and was given {FEATURES + 2}",
        ),
        ({"data": (class_data()[0], class_data()[1] + 1)}, f"the target holds class {CLASSES}, which the model has no"),
        ({"data": (class_data()[0], class_data()[1][:, None])}, "the loss takes one class for each sample"),
        ({"data": (class_data()[0], class_data()[1].int())}, "classes as int64"),
        ({"data": (class_data()[0], class_data()[1].float())}, "classes as int64"),
        (
            {"loss": nn.BCEWithLogitsLoss(), "data": (class_data()[0], class_data()[1].float())},
            f"the model gives [10, {CLASSES}], the target is [10]",
        ),
        ({"loss": lambda model, batch: 0.5}, "the loss returned float; it must return a scalar mean"),
    ],
    ids=["width", "labels from 1", "labels in a column", "int32", "float", "shapes of BCE", "a float as loss"],
)
def test_sizes_that_do_not_fit_get_one_line_in_the_first_step(changes, line, tmp_path):
    with pytest.raises(TrainingError) as caught:
        quiet(job_for(**changes), tmp_path)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_a_part_and_a_batch_beyond_the_data_are_noted(tmp_path, capsys):
    model = small_mlp()
    job = job_for(model=model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.01), batch_size=64)
    fit(job, plan="off", out=tmp_path / "run")
    shown = capsys.readouterr().err
    total = len(list(model.parameters()))
    assert f"note   the optimizer holds 2 of the model's {total} parameter tensors that require gradients" in shown
    assert "note   batch_size=64 is larger than the data: each epoch is one batch of 50 samples" in shown


def test_fit_of_a_model_and_data_says_that_it_takes_a_job():
    with pytest.raises(JobError, match=r"fit takes one Job, not \(Sequential, Tensor, Tensor\)"):
        fit(small_mlp(), *class_data())


def test_on_evaluation_gets_the_figures_of_each_and_its_errors_end_the_training(tmp_path):
    seen = []
    run = quiet(job_for(valid=class_data(20, seed=3)), tmp_path / "a", on_evaluation=seen.append)
    assert seen == run.history

    def refuse(record):
        raise LookupError(f"enough at epoch {record['epoch']}")

    with pytest.raises(LookupError, match="enough at epoch 1"):
        quiet(job_for(), tmp_path / "b", on_evaluation=refuse)


def test_a_run_shows_its_summary_in_a_notebook_and_names_its_folder(tmp_path):
    run = quiet(job_for(), tmp_path)
    assert run.folder == run.path == tmp_path / "run"
    assert run._repr_html_().startswith("<pre>")
    assert "score " in run._repr_html_()
