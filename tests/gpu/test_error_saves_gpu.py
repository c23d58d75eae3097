"""On a GPU too, an error of the user's own code costs no step, and an evaluation that it ended is made again."""

import pytest
import torch
from plain import class_data, small_mlp
from torch import nn

from hotlap import Job, fit


class BrokenError(ValueError):
    """What the user's code raises."""


def job(fails_at=None):
    """Fails in the so manieth evaluation."""
    passes = []
    model = small_mlp(dtype=torch.float32)

    def forward(model, batch):
        x, y = batch
        passes.append(not model.training)
        if passes[-1] and sum(passes) == fails_at:
            raise BrokenError("it is broken")
        return model(x), y

    return Job(
        model=model, data=class_data(dtype=torch.float32), valid=class_data(30, dtype=torch.float32, seed=9),
        loss=nn.CrossEntropyLoss(), forward=forward, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        batch_size=8, epochs=3, eval_batch=30, device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("plan", ["off", {"kind": "resident"}])
def test_an_evaluation_that_an_error_ended_is_made_when_the_run_goes_on(tmp_path, plan):
    with pytest.raises(BrokenError) as caught:
        fit(job(fails_at=2), out=tmp_path / "broken", plan=plan, progress=False)
    assert caught.value.__notes__[-1].startswith("saved at step 14;")
    resumed = fit(job(), resume=tmp_path / "broken", plan=plan, progress=False, allow_changes=True)
    whole = fit(job(), out=tmp_path / "whole", plan=plan, progress=False)
    losses = [[(one["step"], one["train_loss"], one["valid_loss"]) for one in run.history] for run in (resumed, whole)]
    assert [step for step, *_ in losses[0]] == [7, 14, 21]
    for mine, other in zip(*losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
