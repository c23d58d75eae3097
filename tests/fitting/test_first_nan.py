"""A training that ends since its numbers are not finite names where that began: step, samples, layer and values."""

import math
import os
import signal

import pytest
import torch
from plain import class_data, parameters_of
from torch import nn

import hotlap
from hotlap.core.errors import DivergedError
from hotlap.fitting import first_nan, session

SAMPLES = 60


def floats(count=SAMPLES, seed=0):
    x, y = class_data(count, seed=seed)
    return x.float(), y


class Layers(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(**changes):
    given = {
        "model": Layers(),
        "data": floats(),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda weights: torch.optim.SGD(weights, lr=0.05),
        "batch_size": 10,
        "epochs": 3,
        "order": "as given",
        "device": "cpu",
    }
    save_every = changes.pop("save_every", 0)
    return hotlap.fit(hotlap.Job(**{**given, **changes}), plan="off", save_every=save_every, out="run", progress=False)


def words_of(**changes):
    with pytest.raises(DivergedError) as raised:
        trained(**changes)
    return str(raised.value)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Late(nn.Tanh):
    """Gives NaN from its sixteenth training call on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x) * (math.nan if self.calls > 15 else 1.0)


@pytest.mark.parametrize("save_every", [0, 4])
def test_a_layer_that_gives_nan_is_named_with_its_step_batch_and_values(save_every):
    model = Layers()
    model[1] = Late()
    found = words_of(model=model, save_every=save_every)
    assert "it begins at step 16, epoch 3, batch 4 of 6 (samples 30, 31, 32, 33" in found
    assert "the output of 1 (Late) is not finite" in found
    assert "its output: 80 NaN of 80 numbers" in found
    assert "its inputs: all finite of 80 numbers" in found
    assert "try a smaller learning rate" in found


def test_a_sample_that_is_not_finite_is_named():
    x, y = floats()
    x[43, 2] = math.inf
    found = words_of(data=(x, y))
    assert "step 5, epoch 1, batch 5 of 6 (sample 43)" in found
    assert "(the batch itself)" in found
    assert "1 Inf of 50 numbers" in found


def test_a_target_that_is_not_finite_is_named():
    x, _ = floats()
    y = torch.zeros(SAMPLES, 3)
    y[7, 1] = math.nan
    found = words_of(data=(x, y), loss=nn.MSELoss())
    assert "batch 1 of 6 (sample 7): the input of the loss MSELoss is not finite" in found


class Root(nn.Module):
    """The square root, whose gradient at 0 is infinite."""

    def forward(self, x):
        return (x * 0).sqrt()


def test_a_gradient_that_is_not_finite_names_the_layers_between_which_it_began():
    model = Layers()
    model[1] = Root()
    found = words_of(model=model)
    assert "step 1, epoch 1, batch 1 of 6" in found
    assert "in the backward pass, the gradient between 1 (Root) and 0 (Linear) is not finite" in found


def test_an_update_that_is_not_finite_names_the_weight():
    found = words_of(
        loss=lambda model, batch: 1e3 * nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=3e38),
    )
    assert "the update makes" in found
    assert "of the model not finite, though its gradient is finite" in found
    assert "learning rate 3e+38" in found


class Masked(nn.Module):
    """Puts minus infinity where it wants none, as a mask of attention does."""

    def __init__(self):
        super().__init__()
        self.inner, self.masking, self.outer = nn.Linear(5, 8), Mask(), nn.Linear(8, 3)
        self.late = Late()

    def forward(self, x):
        return self.late(self.outer(self.masking(self.inner(x)).softmax(1)))


class Mask(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.arange(8) > 5, -math.inf)


def test_infinities_that_good_steps_have_too_are_not_the_origin():
    assert "the output of late (Late) is not finite" in words_of(model=Masked())


def test_the_model_keeps_the_last_finite_weights_and_the_ledger_the_reason(tmp_path):
    model = Layers()
    model[1] = Late()
    words_of(model=model, save_every=4)
    assert bool(parameters_of(model).isfinite().all())
    lines = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert "the output of 1 (Late) is not finite" in lines


def test_no_checkpoint_holds_weights_that_are_not_finite(tmp_path):
    model = Layers()
    model[1] = Late()
    words_of(model=model, save_every=1)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000000014", "step-000000015"]


def test_with_nothing_to_go_back_to_it_names_what_is_known(monkeypatch):
    monkeypatch.setattr(session, "KEPT_BYTES", 0)
    model = Layers()
    model[1] = Late()
    found = words_of(model=model)
    assert "it begins between step 12 and here" in found
    assert "the last batch: epoch 3, batch 6 of 6 (samples 50" in found
    assert "not finite: 4 parameters, such as 0.weight" in found


def test_what_functions_hold_is_copied_only_if_it_is_small():
    model = Layers()
    model[1] = Late()
    large = torch.ones(session.KEPT_BYTES)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * large[0]

    assert "it begins between step 12 and here" in words_of(model=model, loss=loss)


def test_steps_that_take_another_course_when_made_again_name_no_origin():
    class Clocked(nn.Tanh):
        def forward(self, x):
            return super().forward(x) * (math.nan if next(count) >= 15 else 1.0)

    count = iter(range(10**6))  # goes on, whatever is put back
    model = Layers()
    model[1] = Clocked()
    found = words_of(model=model)
    assert "it begins between step 12 and here" in found
    assert "(Clocked)" not in found


def test_an_update_that_was_skipped_before_is_no_origin():
    x, y = floats()
    x[3, 2] = math.nan
    found = words_of(
        data=(x, y),
        skip_nonfinite=True,
        loss=lambda model, batch: 1e3 * nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=5e-5),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda made: 1.0 if made < 8 else 1e42),
    )
    assert "it begins at step 11, epoch 2, batch 5 of 6" in found
    assert "the update makes" in found


def test_8_bit_and_sparse_numbers_can_be_asked():
    bad = torch.tensor([1.0, math.nan])
    for form in (torch.Tensor.to_sparse, lambda one: one.to(torch.float8_e4m3fn), lambda one: one.half()):
        assert first_nan.are_finite([form(torch.ones(2))])
        assert not first_nan.are_finite([form(torch.ones(2)), form(bad)])


def test_with_better_weights_kept_the_run_ends_with_them_and_names_the_layer():
    model = Layers()
    model[1] = Late()
    run = trained(model=model, valid=floats(20, seed=1), patience=5)
    assert run.stopped.startswith("early: the weights are not finite")
    assert any("the output of 1 (Late) is not finite" in problem for problem in run.problems)
    assert bool(parameters_of(run.model).isfinite().all())
    assert run.best["step"] <= 12


class TestSkippedUpdates:
    """Updates that are skipped, as `skip_nonfinite=True` asks for."""

    def test_one_is_counted_and_moves_no_schedule(self):
        rates = []
        x, y = floats()
        x[43, 2] = math.nan
        run = trained(
            data=(x, y),
            skip_nonfinite=True,
            schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda made: rates.append(made) or 1.0
            ),
        )
        assert (run.steps, run.updates) == (18, 15)
        assert max(rates) == 15
        assert "skipped   3 updates whose gradients were not finite" in run.summary()
        assert run.samples == 3 * SAMPLES
        assert all(math.isfinite(record["train_loss"]) for record in run.history)

    @pytest.mark.parametrize("choices", [{}, {"micro_batch": 4}, {"precision": "bf16"}, {"feed": "resident"}])
    def test_one_is_counted_under_every_plan(self, choices):
        x, y = floats()
        x[43, 2] = math.nan
        job = hotlap.Job(
            model=Layers(), data=(x, y), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, batch_size=10,
            epochs=2, skip_nonfinite=True, device="cpu",
        )  # fmt: skip
        plan = {"kind": "resident"} if "feed" in choices else choices
        run = hotlap.fit(job, plan=plan, save_every=0, progress=False)
        assert (run.steps, run.updates) == (12, 10)
        assert bool(parameters_of(run.model).isfinite().all())

    def test_a_whole_epoch_of_them_ends_the_training_and_names_the_layer(self):
        model = Layers()
        model[1] = Late()
        found = words_of(model=model, batch_size=4, skip_nonfinite=True)
        assert "15 updates in a row have gradients that are not finite" in found
        assert "the output of 1 (Late) is not finite" in found

    @pytest.mark.parametrize(("save_every", "updates"), [(15, 75), (0, 59)])
    def test_in_16_bits_a_few_of_them_in_a_row_lead_to_fp32(self, save_every, updates):
        model = Layers()
        model[1] = In16()
        job = hotlap.Job(
            model=model, data=floats(), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, batch_size=4, epochs=5,
            skip_nonfinite=True, device="cpu",
        )  # fmt: skip
        run = hotlap.fit(job, plan={"precision": "bf16"}, save_every=save_every, progress=False)
        assert run.plan.numerics.precision == "fp32"
        assert (run.steps, run.updates) == (75, updates)
        where = "gone back to step 15" if save_every else "on from here"
        assert any(where in problem and "bf16 → fp32" in problem for problem in run.problems)


class In16(Late):
    """Gives NaN in 16 bits from its sixteenth training call on."""

    def forward(self, x):
        return super().forward(x) if x.dtype == torch.bfloat16 else nn.functional.tanh(x)


def test_a_signal_saves_no_weights_that_are_not_finite(tmp_path):
    class Stopping(Late):
        def forward(self, x):
            if self.calls == 17 and self.training:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().forward(x)

    model = Layers()
    model[1] = Stopping()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit):
            trained(model=model, save_every=14)
    finally:
        signal.signal(signal.SIGTERM, before)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000000000", "step-000000014"]
