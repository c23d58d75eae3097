import math

import pytest
import torch
from plain import class_data, gradients_of, parameters_of, small_mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hotlap.core.errors import HotlapError, JobError, PlanError, TrainingError
from hotlap.core.plan import Plan
from hotlap.data.order import HostRandomness
from hotlap.engine.optimizers import why_not_fused
from hotlap.engine.rig import Place, Rig


def make_rig(model=None, optimizer=None, loss=None, **settings):
    return Rig(
        model or small_mlp(),
        optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01)),
        loss or nn.CrossEntropyLoss(),
        device="cpu",
        **settings,
    )


def frozen(value):
    """A value that compares bit by bit."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else value.item(),
        )
    if isinstance(value, dict):
        return {key: frozen(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(part) for part in value]
    return value.tobytes() if hasattr(value, "tobytes") else value


def state_of(rig):
    """Everything a training consists of."""
    randomness, schedule = HostRandomness(), rig.schedule.scheduler
    return frozen(
        {
            "weights and buffers": rig.model.state_dict(),
            "optimizer": rig.optimizer.state_dict(),
            "schedule": schedule.state_dict() if schedule else None,
            "modes": [m.training for m in rig.model.modules()],
            "flags": [p.requires_grad for p in rig.model.parameters()],
            "gradients": [p.grad for p in rig.model.parameters()],
            "randomness": (randomness.python, randomness.torch, randomness.numpy),
            "place": rig.place,
            "counters": (rig.steps, rig.updates, rig.samples),
            "totals": rig.totals.saved(),
        }
    )


# --- plans ---------------------------------------------------------------------------------------


def test_using_the_same_plan_again_changes_and_records_nothing():
    rig = make_rig()
    entries = len(rig.ledger)
    rig.use(Plan())
    assert len(rig.ledger) == entries


def test_the_ledger_knows_the_plan_of_every_step():
    rig = make_rig()
    seen = []
    plans = {4: Plan().but(kind="loader"), 9: Plan().but(micro_batch=2), 10: Plan()}
    for window in rig.feed(class_data(), batch_size=5, epochs=2):
        seen.append(rig.plan)
        rig.step(window)
        if rig.steps in plans:
            rig.use(plans[rig.steps])
    assert [rig.ledger.plan_at(step) for step in range(20)] == seen


def test_a_plan_that_cannot_be_obeyed_is_refused_and_the_old_one_stays():
    class Samples(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return torch.zeros(5, dtype=torch.float64), 0

    rig = make_rig()
    windows = rig.feed(Samples(), batch_size=4, epochs=1)
    rig.step(next(windows))
    assert "one by one" in rig.supports(Plan())
    with pytest.raises(PlanError, match="one by one"):
        rig.use(Plan())
    assert rig.plan.feed.kind == "loader"
    rig.step(next(windows))


def test_a_plan_given_for_data_it_does_not_fit_is_refused_at_the_feed():
    rig = make_rig(plan=Plan())
    with pytest.raises(PlanError, match="one by one"):
        rig.feed([(torch.zeros(5), 0)] * 8, batch_size=4, epochs=1)


def test_a_pretended_gpu_is_allowed_only_what_it_has(monkeypatch):
    monkeypatch.setenv("HOTLAP_PRETEND", "t4")
    assert "bf16" in make_rig().supports(Plan().but(precision="bf16"))
    monkeypatch.setenv("HOTLAP_PRETEND", "a100-40")
    assert make_rig().supports(Plan().but(precision="bf16")) is None


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_is_supported_where_torch_has_the_kernel(name):
    assert why_not_fused(getattr(torch.optim, name)(small_mlp().parameters())) is None


def test_leaving_out_a_trick_of_scripts_is_refused_with_the_reason():
    reason = "execution.without=['early-item'] is for scripts under `hotlap run` alone"
    assert make_rig().supports(Plan().but(without=["early-item"])) == reason


def test_fused_is_refused_with_the_reason_where_torch_has_no_kernel():
    assert "RMSprop has no fused kernel" in make_rig(optimizer=torch.optim.RMSprop).supports(
        Plan().but(optimizer="fused")
    )
    integers = nn.Module()
    integers.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert "cannot fuse torch.complex64" in why_not_fused(torch.optim.Adam(integers.parameters()))


def test_an_optimizer_given_fused_is_fused_in_the_users_own_plan():
    model = small_mlp()
    rig = make_rig(model, torch.optim.AdamW(model.parameters(), fused=True))
    assert rig.plan.numerics.optimizer == "fused"


def test_the_flags_of_an_optimizer_come_back_after_fusing():
    model = small_mlp()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "foreach": True}, {"params": model[2].parameters()}], lr=0.01
    )
    rig = make_rig(model, optimizer)
    rig.step(class_data())
    rig.use(Plan().but(optimizer="fused"))
    assert [(g["fused"], g["foreach"]) for g in optimizer.param_groups] == [(True, False)] * 2
    rig.step(class_data())
    rig.use(Plan())
    assert [(g["fused"], g["foreach"]) for g in optimizer.param_groups] == [(None, True), (None, None)]
    rig.step(class_data())


# --- accumulation --------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 3, 7, 16])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_micro_batches_give_the_gradient_of_the_whole_batch_also_for_the_last_window(micro, clip):
    data = class_data(39)
    grads = {}
    for size in (None, micro):
        model = small_mlp()
        rig = make_rig(model, lambda p: torch.optim.SGD(p, lr=0.0), plan=Plan().but(micro_batch=size), clip=clip)
        grads[size] = []
        for window in rig.feed(data, batch_size=8, accumulate=2, epochs=1):
            rig.step(window)
            grads[size].append(gradients_of(model).clone())
    assert len(grads[None]) == 3  # 16, 16, and a last one of 7
    for whole, pieces in zip(grads[None], grads[micro], strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-10, atol=1e-12)
        if clip:
            assert whole.norm() <= clip * (1 + 1e-6)


# --- schedule, skipping, clipping ----------------------------------------------------------------


def test_the_schedule_moves_once_per_update_however_many_pieces_it_takes():
    rig = make_rig(
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.5**k), plan=Plan().but(micro_batch=2)
    )
    for window in rig.feed(class_data(20), batch_size=5, accumulate=2, epochs=1):
        rig.step(window)
    assert rig.updates == 2
    assert rig.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.25)


def test_a_skipped_update_moves_neither_weights_nor_schedule_nor_optimizer():
    x, y = class_data(20)
    x[7] = math.inf  # in the second batch
    model = small_mlp()
    rig = make_rig(
        model, schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.5**k), skip_nonfinite=True
    )
    rates, weights = [], []
    for window in rig.feed((x, y), batch_size=5, epochs=1, order="as given"):
        rig.step(window)
        rates.append(rig.optimizer.param_groups[0]["lr"])
        weights.append(parameters_of(model).clone())
    assert rates == pytest.approx([0.005, 0.005, 0.0025, 0.00125])
    assert torch.equal(weights[0], weights[1])
    assert (rig.steps, rig.updates, rig.skipped) == (4, 3, 1)
    assert {int(s["step"]) for s in rig.optimizer.state.values()} == {3}
    assert torch.isfinite(parameters_of(model)).all()


def test_without_leave_to_skip_a_nonfinite_update_is_made_as_in_a_plain_loop():
    x, y = class_data(5)
    x[0] = math.inf
    rig = make_rig()
    rig.step((x, y))
    assert rig.updates == 1
    assert not torch.isfinite(parameters_of(rig.model)).all()


def test_an_epoch_schedule_moves_at_the_end_of_each_epoch():
    rig = make_rig(schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.1), schedule_per="epoch")
    rates = []
    for window in rig.feed(class_data(20), batch_size=10, epochs=3):
        rates.append(rig.optimizer.param_groups[0]["lr"])
        rig.step(window)
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001, 0.0001, 0.0001])


def test_a_schedule_that_needs_the_number_of_updates_is_given_it():
    seen = []

    def schedule(optimizer, updates):
        seen.append(updates)
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    make_rig(schedule=schedule, updates=17)
    assert seen == [17]


# --- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"), r"shape \(50,\)"),
        (lambda m, b: 1.5, "float"),
        (lambda m, b: None, "NoneType"),
    ],
)
def test_a_loss_of_the_wrong_kind_is_told_what_it_must_return(loss, seen):
    with pytest.raises(TrainingError, match=f"returned .*{seen}.*scalar mean, or"):
        make_rig(loss=loss).step(class_data())


def test_a_dict_batch_without_forward_says_what_to_give():
    with pytest.raises(Exception, match="forward=f"):
        make_rig().step({"x": class_data()[0]})


def test_forward_says_how_a_dict_batch_goes_through_the_model():
    x, y = class_data()
    model = small_mlp()
    rig = make_rig(model, forward=lambda m, b: (m(b["x"]), b["y"]))
    losses = [rig.step(w).item() for w in rig.feed({"x": x, "y": y}, batch_size=25, epochs=20)]
    assert losses[-1] < losses[0]


def test_a_model_with_several_inputs_gets_all_but_the_last():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(10, 3).double()

        def forward(self, a, b):
            return self.layer(torch.cat([a, b], 1))

    x, y = class_data()
    model = Two()
    expected = nn.functional.cross_entropy(model(x, 2 * x), y).item()
    assert make_rig(model).step((x, 2 * x, y)).item() == pytest.approx(expected)


def test_the_running_loss_is_exact_over_batches_of_unequal_size():
    x, y = class_data(23)
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 1.0]).double())):
        for micro in (None, 3):
            rig = make_rig(
                optimizer=lambda p: torch.optim.SGD(p, lr=0.0), loss=loss, plan=Plan().but(micro_batch=micro)
            )
            for window in rig.feed((x, y), batch_size=10, epochs=1):
                rig.step(window)
            assert rig.totals.mean() == pytest.approx(loss(rig.model(x), y).item(), rel=1e-12)


def test_a_step_never_waits_for_the_device(monkeypatch):
    """Reading a tensor's value on the host is what makes a GPU step wait."""
    rig = make_rig(clip=1.0, schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
    data = class_data()
    rig.step(data)

    def refuse(*_):
        raise AssertionError("a step read a value back")

    for name in ("item", "__float__", "__int__", "__bool__", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    # SGD, since plain AdamW on the CPU reads its own step counts, which live on the host.
    rig = make_rig(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), clip=1.0)
    rig.step(data)
    rig.use(Plan().but(micro_batch=7))
    rig.step(data)


# --- snapshots -----------------------------------------------------------------------------------


class Restless(nn.Module):
    """Dropout, running statistics, a layer held in evaluation mode, and a frozen one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        self.layers[1].eval()
        self.norm = nn.BatchNorm1d(5).double()
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x):
        return self.layers(self.norm(x))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "Adafactor"])
@pytest.mark.parametrize("already", [0, 3])
def test_a_snapshot_restored_leaves_no_trace(name, already):
    model = Restless()
    rig = make_rig(
        model,
        lambda p: getattr(torch.optim, name)([q for q in p if q.requires_grad], lr=0.01),
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50),
    )
    windows = rig.feed(class_data(60), batch_size=6, epochs=5)
    for _ in range(already):
        rig.step(next(windows))
    before, addresses = state_of(rig), [p.data_ptr() for p in model.parameters()]
    snapshot = rig.snapshot()
    for _ in range(15):
        rig.step(next(windows))
    model.eval()
    model.layers[0].bias.requires_grad_(True)
    rig.optimizer.param_groups[0]["lr"] = 7.0
    assert state_of(rig) != before
    rig.restore(snapshot)
    assert state_of(rig) == before
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_training_goes_on_from_a_snapshot_as_if_nothing_had_been():
    def trained(detour):
        torch.manual_seed(5)
        rig = make_rig(Restless(), lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=0.01))
        seen = []
        for window in rig.feed(class_data(60), batch_size=7, epochs=2):
            seen.append(window.pieces[0][1])
            rig.step(window)
            if detour and rig.steps == 4:
                snapshot, place = rig.snapshot(), rig.place
                for other in rig.windows(epochs=3):
                    rig.step(other)
                    if rig.steps == 12:
                        break
                rig.restore(snapshot)
                assert rig.place == place
        return parameters_of(rig.model), torch.cat(seen)

    (weights, order), (detoured, same_order) = trained(False), trained(True)
    assert torch.equal(order, same_order)
    assert torch.equal(weights, detoured)


def test_a_snapshot_taken_under_one_plan_is_restored_under_another():
    rig = make_rig()
    data = class_data()
    rig.step(data)
    before = parameters_of(rig.model).clone()
    snapshot = rig.snapshot()
    rig.use(Plan().but(optimizer="fused"))
    rig.step(data)
    rig.restore(snapshot)
    assert torch.equal(parameters_of(rig.model), before)
    assert all(group["fused"] for group in rig.optimizer.param_groups)
    rig.step(data)


# --- evaluation ----------------------------------------------------------------------------------


def test_evaluation_changes_nothing_in_the_training():
    class Noisy(Restless):
        def forward(self, x):
            return super().forward(x) + 0 * torch.rand(())  # draws in evaluation mode too

    rig = make_rig(Noisy(), lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=0.01))
    windows = rig.feed(class_data(60), batch_size=6, epochs=2)
    for _ in range(3):
        rig.step(next(windows))
    before = state_of(rig)
    rig.evaluate(class_data(33), ["accuracy"])
    assert state_of(rig) == before


def test_training_with_evaluations_in_between_is_bit_equal_to_training_without():
    def trained(evaluate):
        torch.manual_seed(5)
        rig = make_rig(Restless(), lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=0.01))
        for window in rig.feed(class_data(60), batch_size=7, epochs=2):
            rig.step(window)
            if evaluate:
                rig.evaluate(class_data(31), ["accuracy", "macro_f1"])
        return parameters_of(rig.model)

    assert torch.equal(trained(False), trained(True))


def test_evaluation_uses_larger_batches_than_training_and_is_exact_over_the_last_one():
    sizes = []
    model = small_mlp()
    model.register_forward_hook(lambda _m, inputs, _o: sizes.append(len(inputs[0])))
    rig = make_rig(model)
    data = class_data(71)
    rig.step(next(rig.feed(data, batch_size=8, epochs=1)))
    sizes.clear()
    scores = rig.evaluate(data, ["accuracy"])
    assert sizes == [32, 32, 7]
    with torch.no_grad():
        output = model(data[0])
    assert scores["loss"] == pytest.approx(nn.functional.cross_entropy(output, data[1]).item(), rel=1e-12)
    assert scores["accuracy"] == pytest.approx((output.argmax(1) == data[1]).double().mean().item())


def test_an_evaluation_batch_that_does_not_fit_is_halved():
    model = small_mlp()
    sizes = []

    def hook(_m, inputs):
        sizes.append(len(inputs[0]))
        if len(inputs[0]) > 10:
            raise torch.OutOfMemoryError("planted")

    model.register_forward_pre_hook(hook)
    scores = make_rig(model).evaluate(class_data(40), ["accuracy"], batch_size=40)
    assert sizes == [40, 20, 10, 10, 10, 10]
    assert 0 <= scores["accuracy"] <= 1


# --- the loop ------------------------------------------------------------------------------------


def test_the_place_names_the_window_to_come():
    rig = make_rig()
    places = []
    for window in rig.feed(class_data(20), batch_size=10, epochs=2):
        rig.step(window)
        places.append(rig.place)
    assert places == [Place(0, 1, 1), Place(0, 2, 2), Place(1, 1, 3), Place(1, 2, 4)]
    assert rig.place == Place(2, 0, 4)


def test_a_number_of_steps_ends_the_feed_in_the_middle_of_an_epoch():
    rig = make_rig()
    for window in rig.feed(class_data(20), batch_size=5, steps=6):
        rig.step(window)
    assert (rig.steps, rig.place) == (6, Place(1, 2, 6))


def test_mistakes_in_a_feed_are_reported_all_at_once():
    with pytest.raises(JobError) as caught:
        make_rig().feed(class_data(), batchsize=5)
    assert len(caught.value.problems) == 3  # misspelt, so missing too; and no length


def test_an_optimizer_function_that_makes_something_else_is_refused():
    with pytest.raises(JobError, match="not a torch optimizer"):
        make_rig(optimizer=lambda p: list(p))


def order_of(windows):
    return [int(y) for window in windows for _, piece in window.pieces for y in piece]


def test_feeding_one_epoch_at_a_time_sees_the_orders_of_as_many_epochs():
    data = (torch.zeros(20, 5, dtype=torch.float64), torch.arange(20))
    at_once = order_of(make_rig().feed(data, batch_size=5, epochs=3))
    rig = make_rig()
    assert [i for _ in range(3) for i in order_of(rig.feed(data, batch_size=5, epochs=1))] == at_once
    assert at_once[:20] != at_once[20:40]


def test_feeding_so_many_steps_again_gives_so_many_more():
    rig = make_rig()
    counts = [len(list(rig.feed(class_data(), batch_size=8, steps=7))) for _ in range(1)]
    data = class_data()
    counts += [len(list(rig.feed(data, batch_size=8, steps=5))) for _ in range(3)]
    assert counts == [7, 5, 5, 5]


def test_an_epoch_that_was_left_is_followed_by_the_next():
    data = (torch.zeros(20, 5, dtype=torch.float64), torch.arange(20))
    rig, whole = make_rig(), make_rig()
    expected = order_of(whole.feed(data, batch_size=5, epochs=2))[20:]
    next(rig.feed(data, batch_size=5, epochs=1))
    assert order_of(rig.feed(data, batch_size=5, epochs=1)) == expected


def test_a_second_feed_ends_the_first_with_an_error():
    rig = make_rig()
    first = rig.feed(class_data(), batch_size=5, epochs=1)
    next(first)
    next(rig.feed(class_data(), batch_size=5, epochs=1))
    with pytest.raises(TrainingError, match="another feed was opened"):
        next(first)


@pytest.mark.parametrize("setting", ["clip", "schedule", "forward", "skip_nonfinite", "valid", "patience", "device"])
def test_a_setting_that_a_feed_would_ignore_is_refused(setting):
    with pytest.raises(JobError, match=f"{setting} is not a setting of feed"):
        make_rig().feed(class_data(), batch_size=5, epochs=1, **{setting: 1})


def test_workers_end_when_a_loop_is_left():
    import multiprocessing

    rig = make_rig(plan=Plan().but(kind="loader", workers=1))
    for _ in rig.feed(class_data(), batch_size=5, epochs=1):
        break
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"clip": -1.0}, "clip=-1.0"),
        ({"schedule_per": "epochs"}, "did you mean 'epoch'"),
        ({"loss": nn.functional.cross_entropy}, "torch.nn.functional"),
        ({"optimizer": torch.optim.LBFGS}, "closure"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "made for another one"),
        ({"schedule": torch.optim.lr_scheduler.ExponentialLR}, "the class ExponentialLR"),
        ({"schedule": lambda optimizer, updates: None}, "the number of updates"),
    ],
)
def test_a_rig_checks_what_a_job_checks(settings, problem):
    with pytest.raises(JobError, match=problem):
        make_rig(**settings)
    with pytest.raises(PlanError, match="load_plan"):
        make_rig(plan="plan.toml")


def test_a_model_handed_over_in_evaluation_mode_is_trained_in_training_mode():
    assert make_rig(Restless().eval()).model.norm.training
    frozen = Restless()
    make_rig(frozen, lambda p: torch.optim.SGD([q for q in p if q.requires_grad]))
    assert not frozen.layers[1].training


def test_each_evaluation_scores_the_data_it_is_given():
    rig = make_rig()
    x, y = class_data(100)
    scores = [rig.evaluate((x[part], y[part]))["loss"] for part in (slice(50), slice(50, None))]
    with torch.no_grad():
        expected = [nn.functional.cross_entropy(rig.model(x[p]), y[p]).item() for p in (slice(50), slice(50, None))]
    assert scores == pytest.approx(expected)
    samples = list(zip(x[:10], y[:10].tolist(), strict=True))
    first = rig.evaluate(samples)["loss"]
    samples += list(zip(x[10:90], y[10:90].tolist(), strict=True))
    assert rig.evaluate(samples)["loss"] != first


@pytest.mark.parametrize(
    ("data", "metrics", "problem"),
    [
        (class_data(), ["acuracy"], "did you mean 'accuracy'"),
        (class_data(), "accuracy", "list of names"),
        ((torch.zeros(5, 5), torch.zeros(6)), [], "differ in length"),
        ([torch.zeros(5, 5), torch.zeros(5)], [], "as a tuple"),
    ],
)
def test_an_evaluation_that_makes_no_sense_is_refused_in_a_line(data, metrics, problem):
    with pytest.raises(JobError, match=problem):
        make_rig().evaluate(data, metrics)


def test_an_evaluation_batch_whose_targets_are_all_ignored_leaves_the_loss_a_number():
    x, _ = class_data(16)
    y = torch.tensor([-100] * 8 + [0, 1] * 4)
    rig = make_rig()
    assert rig.evaluate((x, y), batch_size=8)["loss"] == pytest.approx(rig.evaluate((x, y), batch_size=16)["loss"])


class Scaling(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.scale, target)


def test_a_losss_own_weights_are_trained_by_an_optimizer_made_from_a_function():
    loss = Scaling()
    make_rig(loss=loss).step(class_data())
    assert loss.scale.item() != 1.0


def test_clipping_covers_what_the_optimizer_does_not_hold_and_gradients_do_not_pile_up():
    model = small_mlp()
    rig = make_rig(model, torch.optim.SGD(model[2].parameters(), lr=0.0), clip=0.01)
    for _ in range(3):
        rig.step(class_data())
        assert gradients_of(model).norm() <= 0.01 * (1 + 1e-6)


@pytest.mark.parametrize("micro", [None, 3])
def test_gradients_of_what_the_optimizer_does_not_hold_are_those_of_the_last_update_alone(micro):
    """Of a model whose head alone is trained, and of a loss's own weights."""
    model, loss, batch = small_mlp(), Scaling(), class_data()
    rig = make_rig(model, torch.optim.SGD(model[2].parameters(), lr=0.0), loss=loss, plan=Plan().but(micro_batch=micro))
    every = [*model.parameters(), *loss.parameters()]
    rig.step(batch)
    first = [parameter.grad.clone() for parameter in every]
    for _ in range(2):
        rig.step(batch)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(every, first, strict=True))
    assert all(grad.any() for grad in first)


def test_a_skipped_window_does_not_count_in_the_running_loss():
    x, y = class_data(20)
    x[7] = math.inf
    rig = make_rig(skip_nonfinite=True)
    for window in rig.feed((x, y), batch_size=5, epochs=1, order="as given"):
        rig.step(window)
    assert math.isfinite(rig.totals.mean())


def test_a_pair_that_is_no_sum_and_count_is_refused():
    def with_accuracy(model, batch):
        output = model(batch[0])
        return nn.functional.cross_entropy(output, batch[1]), (output.argmax(1) == batch[1]).float().mean()

    with pytest.raises(TrainingError, match="not a whole number"):
        make_rig(loss=with_accuracy).step(class_data())


def test_what_a_plan_changes_beyond_rounding_is_told_and_kept_in_the_ledger():
    class Wrapped(nn.Module):
        def forward(self, output, target):
            return nn.functional.cross_entropy(output, target, ignore_index=1)

    rig = make_rig(Restless(), lambda p: torch.optim.SGD([q for q in p if q.requires_grad]), loss=Wrapped())
    cautions = rig.cautions(Plan().but(micro_batch=2))
    assert any("batch norms" in line for line in cautions)
    assert any("Wrapped is taken as a mean over samples" in line for line in cautions)
    rig.use(Plan().but(micro_batch=2))
    assert "batch norms" in list(rig.ledger)[-1].why
    assert make_rig().cautions(Plan().but(micro_batch=2)) == []


def test_a_subclass_of_cross_entropy_is_weighed_as_cross_entropy_is():
    class Mine(nn.CrossEntropyLoss):
        pass

    data = class_data(30)
    grads = []
    for micro in (None, 2):
        model = small_mlp()
        make_rig(model, loss=Mine(ignore_index=1), plan=Plan().but(micro_batch=micro)).step(data)
        grads.append(gradients_of(model))
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "batch", "told"),
    [
        (
            nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)),
            (torch.zeros(1, 5), torch.zeros(1).long()),
            "drop_last=True",
        ),
        (
            nn.Linear(5, 3),
            (torch.zeros(4, 5, dtype=torch.float64), torch.zeros(4).long()),
            r"float64 \(4, 5\), int64 \(4,\) and the model",
        ),
        (nn.LSTM(5, 3), (torch.zeros(4, 2, 5), torch.zeros(4).long()), "returned a tuple.*forward="),
        (nn.Linear(5, 3), (torch.zeros(4, 5),), "a tuple of 1.*forward="),
    ],
)
def test_a_mistake_that_shows_in_the_first_step_says_what_to_do(model, batch, told):
    with pytest.raises(HotlapError, match=told):
        make_rig(model).step(batch)


def test_a_schedule_that_is_used_up_says_what_to_do():
    rig = make_rig(schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=3))
    with pytest.raises(TrainingError, match="OneCycleLR cannot go on"):
        for _ in range(5):
            rig.step(class_data())


def test_a_layer_replaced_in_model_and_optimizer_is_clipped_and_the_old_one_is_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), clip=1e-3)
    batch = class_data(16, dtype=torch.float32)
    rig.step(batch)
    model[2] = nn.Linear(8, 3)
    rig.optimizer.param_groups[0]["params"] = list(model.parameters())
    rig.step(batch)
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm() <= 1.001e-3


def test_a_function_that_prepares_in_place_is_called_once_a_batch_in_evaluation():
    def prepare(batch):
        return batch[0].mul_(2), batch[1]

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model = small_mlp()
    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), loss, prepare=prepare)
    x, y = class_data(24)
    expected = nn.functional.cross_entropy(model(x * 2), y).item()
    scores = rig.evaluate((x.clone(), y), {"loss too": nn.functional.cross_entropy}, batch_size=8)
    assert scores["loss"] == pytest.approx(expected)
    assert scores["loss too"] == pytest.approx(expected)


class Counting(nn.Module):
    """Counts its calls, and draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls, self.own = small_mlp(), 0, torch.Generator().manual_seed(3)

    def forward(self, x):
        self.calls += 1
        return self.inner(x + 0.1 * torch.rand(x.shape, generator=self.own))


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("steps", [1, 5])
def test_windows_drawn_aside_change_nothing_of_those_to_come(persistent, steps):
    """Persistent workers serve one iterator at a time: whoever was in the middle of another begins anew."""

    def losses(looks):
        torch.manual_seed(0)
        rig = make_rig(Counting())
        loader = DataLoader(
            TensorDataset(*class_data(64)), batch_size=4, shuffle=True, num_workers=1, persistent_workers=persistent
        )
        windows = rig.feed(loader, epochs=2)
        found = [float(rig.advance(next(windows))) for _ in range(3)]
        if looks:
            with rig.aside():
                other = rig.windows(room=lambda: 1)
                for _ in range(steps):
                    rig.advance(next(other))
        found += [float(rig.advance(window)) for window in windows]
        rig.close()
        return found, rig.model.calls

    assert losses(looks=True) == losses(looks=False)
