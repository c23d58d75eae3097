"""A job is right as a whole, or says everything that is wrong with it at once."""

import copy
import dataclasses
import functools
import inspect
import pickle
import sys
import types
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from hotlap.core.errors import JobError
from hotlap.core.job import METRICS, Job, is_columns, named_columns
from hotlap.core.job_checks import RECORDED

X, Y = torch.randn(12, 3), torch.randint(2, (12,))
DATA = (X, Y)
Pair = namedtuple("Pair", "x y")


class Samples(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return X[index], Y[index]


class WithoutLength(Dataset):
    def __getitem__(self, index):
        return X[index]


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(())


def settings(**changes):
    """What a job needs, with some of it changed; a value of `...` is left out."""
    model = changes.get("model", nn.Linear(3, 2))
    given = {"model": model, "data": DATA, "loss": nn.CrossEntropyLoss(), "batch_size": 4, "epochs": 1, **changes}
    if "optimizer" not in changes:
        given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1) if isinstance(model, nn.Module) else None
        given["optimizer"] = given["optimizer"] or torch.optim.SGD
    return {name: value for name, value in given.items() if value is not ...}


def problems_of(**changes):
    with pytest.raises(JobError) as caught:
        Job(**settings(**changes))
    found = caught.value.problems
    assert all(problem.isprintable() and len(problem) < 250 for problem in found), "one readable line each"
    return list(found)


def only_problem_of(**changes):
    (problem,) = problems_of(**changes)
    return problem


# --- good jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        DATA,
        (X, X, Y),
        Pair(X, Y),
        {"x": X, "y": Y},
        OrderedDict(x=X, y=Y),
        {0: X, 1: Y},
        (X.numpy(), Y.numpy()),
        (X, Y.numpy()),
        X,
        X.numpy(),
        (X.half(), Y),
        (X.numpy().astype(">f4"), Y),
        (X.numpy()[::-1], Y),
        (X > 0, Y),
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), [1, 2, 3]),
        Samples(),
        [(x, y) for x, y in zip(X, Y, strict=True)],
        [1, 2, 3],
        range(12),
    ],
    ids=lambda data: type(data).__name__,
)
def test_data_in_every_form_is_accepted(data):
    job = Job(**settings(data=data, valid=data))
    assert job.data is data
    assert job.valid is data
    assert job.effective_batch == 4


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True),
        DataLoader(Samples(), batch_size=3, drop_last=True, collate_fn=list),
        DataLoader(list(X), batch_size=3),
        DataLoader(Samples(), batch_sampler=BatchSampler(SequentialSampler(X), 3, False)),
    ],
)
def test_a_dataloader_brings_its_own_batch_size(loader):
    job = Job(**settings(data=loader, valid=loader, batch_size=..., accumulate=2))
    assert job.effective_batch == (6 if loader.batch_size else None)


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": None, "steps": 3},
        {"loss": lambda model, batch: model(batch[0]).sum()},
        {"loss": nn.MSELoss(reduction="sum")},
        {"optimizer": torch.optim.AdamW},
        {"optimizer": lambda params: torch.optim.SGD(params, lr=1)},
        {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)},
        {"schedule": lambda optimizer: StepLR(optimizer, 1)},
        {"schedule": lambda optimizer, updates: StepLR(optimizer, updates)},
        {"schedule": lambda o: ReduceLROnPlateau(o), "valid": DATA},
        {"order": "shuffled"},
        {"order": "as given"},
        {"order": RandomSampler(X)},
        {"order": [3, 2, 1]},
        {"order": torch.arange(3)},
        {"drop_last": True},
        {"collate": lambda samples: samples},
        {"forward": lambda model, batch: (model(batch[0]), batch[1])},
        {"clip": 1},
        {"clip": 0.5, "skip_nonfinite": True, "accumulate": 4},
        {"valid": DATA, "metrics": list(METRICS), "monitor": "mae", "patience": 2, "eval_every": 5, "eval_batch": 9},
        {"valid": DATA, "metrics": ("accuracy",)},
        {"valid": DATA, "metrics": {"mine": lambda output, target: 0.0}, "monitor": "mine", "better": "lower"},
        {"seed": 2**63 - 1},
        {"device": "cuda:3"},
        {"data": (X.double(), Y), "model": nn.Linear(3, 2).double()},
        {"data": (X.double(), Y), "forward": lambda model, batch: (model(batch[0].float()), batch[1])},
        {"data": (X.double(), Y), "collate": lambda samples: samples},
        {"data": (X.double(), Y), "loss": lambda model, batch: model(batch[0].float()).sum()},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_setting_in_its_right_form_is_accepted(changes):
    job = Job(**settings(**changes))
    assert all(getattr(job, name) is value for name, value in changes.items() if name != "model")


def test_a_loader_that_makes_its_own_batches_may_hold_doubles():
    loader = DataLoader(TensorDataset(X.double(), Y), batch_size=2, collate_fn=list)
    assert Job(**settings(data=loader, batch_size=...)).data is loader


def test_a_loss_of_the_users_own_may_call_its_inner_reduction_none():
    class Focal(nn.CrossEntropyLoss):
        def forward(self, output, target):
            return super().forward(output, target).mean()

    assert Job(**settings(loss=Focal(reduction="none"))).loss.reduction == "none"


@pytest.mark.parametrize(
    ("changes", "higher"),
    [
        ({}, False),
        ({"metrics": ["accuracy"], "monitor": "accuracy"}, True),
        ({"metrics": ["mae"], "monitor": "mae"}, False),
        ({"metrics": {"mine": max}, "monitor": "mine", "better": "higher"}, True),
        ({"metrics": ["accuracy"], "monitor": "accuracy", "better": "lower"}, False),
    ],
)
def test_what_is_better_is_known_for_named_metrics_and_otherwise_said(changes, higher):
    assert Job(**settings(valid=DATA, **changes)).higher_is_better is higher


def test_metric_names_are_those_of_a_list_or_a_dict():
    assert Job(**settings(valid=DATA, metrics=["mae", "rmse"])).metric_names == ("mae", "rmse")
    assert Job(**settings(valid=DATA, metrics={"a": max, "b": min})).metric_names == ("a", "b")


# --- a value -----------------------------------------------------------------------------------------


def test_a_job_can_be_copied_replaced_and_pickled_but_not_changed():
    job = Job(**settings())
    assert vars(copy.copy(job)) == vars(job)
    longer = dataclasses.replace(job, epochs=9)
    assert (longer.epochs, longer.model, job.epochs) == (9, job.model, 1)
    assert pickle.loads(pickle.dumps(job)).batch_size == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.epochs = 2


def test_a_replacement_is_checked_like_a_new_job():
    with pytest.raises(JobError, match=r"epochs=0 .* at least 1"):
        dataclasses.replace(Job(**settings()), epochs=0)
    with pytest.raises(JobError, match="did you mean 'epochs'"):
        dataclasses.replace(Job(**settings()), epoch=3)


def test_jobs_are_compared_by_identity_since_tensors_cannot_be():
    model = nn.Linear(3, 2)
    same = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "loss": nn.CrossEntropyLoss()}
    job, other = Job(**settings(**same)), Job(**settings(**same, data=(X.numpy(), Y.clone())))
    assert job != other
    assert job in [other, job]
    assert len({job, other}) == 2


def test_a_job_leaves_what_it_is_given_as_it_was():
    model = nn.Linear(3, 2).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 0.5)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    metrics, valid = ["accuracy"], {"x": X, "y": Y}
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict(), list(vars(schedule))))
    random = torch.get_rng_state()
    Job(
        model=model,
        data=loader,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        schedule=schedule,
        valid=valid,
        metrics=metrics,
        epochs=2,
    )
    state, of_optimizer, of_schedule, names = before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert optimizer.state_dict() == of_optimizer
    assert schedule.state_dict() == of_schedule
    assert list(vars(schedule)) == names
    assert not model.training
    assert torch.equal(random, torch.get_rng_state())
    assert metrics == ["accuracy"]
    assert valid["x"] is X
    assert list(valid) == ["x", "y"]


def test_the_signature_shows_every_field():
    assert list(inspect.signature(Job).parameters) == [f.name for f in dataclasses.fields(Job)]


# --- missing and misspelt ----------------------------------------------------------------------------


def test_an_empty_job_says_all_that_is_missing():
    with pytest.raises(JobError) as caught:
        Job()
    assert list(caught.value.problems) == [
        "model is missing",
        "data is missing",
        "loss is missing",
        "optimizer is missing",
        "neither epochs nor steps is given; say how long to train, e.g. epochs=10",
    ]


@pytest.mark.parametrize("name", ["model", "data", "loss", "optimizer", "batch_size"])
def test_a_missing_field_is_named(name):
    assert only_problem_of(**{name: ...}) == f"{name} is missing"


def test_a_misspelt_field_is_reported_beside_all_other_mistakes():
    assert problems_of(epoch=3, epochs=..., btach_size=4, batch_size=..., clip=-1) == [
        "Job has no field 'epoch'; did you mean 'epochs'?",
        "Job has no field 'btach_size'; did you mean 'batch_size'?",
        "clip=-1 must be a number above 0",
        "neither epochs nor steps is given; say how long to train, e.g. epochs=10",
        "batch_size is missing",
    ]


def test_a_field_like_no_other_is_answered_with_all_there_are():
    with pytest.raises(JobError) as caught:
        Job(**settings(zebra=1))
    names = ", ".join(sorted(f.name for f in dataclasses.fields(Job)))
    assert str(caught.value) == f"Job has no field 'zebra'; known: {names}"


def test_arguments_without_a_name_are_reported_beside_all_other_mistakes():
    with pytest.raises(JobError) as caught:
        Job(nn.Linear(3, 2), DATA, batchsize=4)
    assert list(caught.value.problems)[:4] == [
        "Job has no field 'batchsize'; did you mean 'batch_size'?",
        "Job takes fields by name only, e.g. Job(model=…); 2 came without a name",
        "model is missing",
        "data is missing",
    ]


def test_many_mistakes_are_all_reported_at_once():
    found = problems_of(
        model=nn.Linear,
        loss=nn.CrossEntropyLoss,
        optimizer="adam",
        data=(X, Y[:5]),
        valid=[],
        batch_size=0,
        epochs=1,
        steps=1,
        order="shufled",
        monitor="accuracy",
        device="gpu",
        seed=-1,
    )
    assert [problem.split()[0].split("=")[0] for problem in found] == [
        "batch_size",
        "seed",
        "both",
        "device",
        "model",
        "loss",
        "optimizer",
        "the",
        "valid",
        "order",
        "monitor",
    ]


# --- numbers and words -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3", [3], torch.arange(100), float("nan")])
@pytest.mark.parametrize("name", ["batch_size", "epochs", "accumulate", "eval_batch", "eval_every", "patience"])
def test_a_count_is_a_whole_number_of_at_least_one(name, value):
    assert only_problem_of(valid=DATA, **{name: value}).startswith(f"{name}=")


def test_accumulate_cannot_be_left_open():
    assert only_problem_of(accumulate=None) == "accumulate=None must be a whole number of at least 1"


@pytest.mark.parametrize("value", [0, -0.5, True, "1", float("nan"), float("inf"), torch.ones(3)])
def test_clip_is_a_number_above_zero(value):
    assert only_problem_of(clip=value).startswith("clip=")


@pytest.mark.parametrize("value", [-1, 2**63, True, None, 1.0])
def test_the_seed_is_a_whole_number_that_torch_takes(value):
    assert only_problem_of(seed=value).endswith("must be a whole number from 0 to 2**63 - 1")


def test_how_long_is_said_once():
    assert only_problem_of(epochs=...).startswith("neither epochs nor steps is given")
    assert only_problem_of(epochs=2, steps=5) == "both epochs=2 and steps=5 are given; give one"


@pytest.mark.parametrize("value", ["gpu", "cuda:", "cuda:x", "CPU", "", None, 0, torch.device("cpu")])
def test_the_device_is_one_of_the_known_words(value):
    assert "is none of 'auto', 'cpu', 'cuda', 'cuda:N'" in only_problem_of(device=value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schedule_per": "epochs"}, "schedule_per='epochs' is not known; did you mean 'epoch'?"),
        ({"schedule_per": None}, "schedule_per=None is not known; known: epoch, update"),
        ({"schedule_per": np.ones(2)}, "schedule_per=array([1., 1.]) is not known; known: epoch, update"),
        ({"better": "high"}, "better='high' is not known; did you mean 'higher'?"),
        ({"better": np.ones(2)}, "better=array([1., 1.]) is not known; known: higher, lower"),
        ({"order": "shufled"}, "order='shufled' is not known; did you mean 'shuffled'?"),
        ({"order": 3}, "order must be 'shuffled', 'as given' or a sampler with a length, not int 3"),
        ({"order": iter([1])}, "order must be 'shuffled', 'as given' or a sampler with a length, not list_iterator <"),
        ({"order": RandomSampler}, "or a sampler with a length, not the class RandomSampler"),
        ({"drop_last": 1}, "drop_last=1 must be True or False"),
        ({"drop_last": np.ones(2)}, "drop_last=array([1., 1.]) must be True or False"),
        ({"skip_nonfinite": None}, "skip_nonfinite=None must be True or False"),
        ({"skip_nonfinite": "no"}, "skip_nonfinite='no' must be True or False"),
        ({"skip_bad_samples": -1}, "skip_bad_samples=-1 must be the number of samples that may be left out"),
        ({"skip_bad_samples": True}, "skip_bad_samples=True must be the number of samples that may be left out"),
        ({"skip_bad_samples": None}, "skip_bad_samples=None must be the number of samples that may be left out"),
        ({"collate": 3}, "collate must be a function, not int 3"),
        ({"collate": lambda: 1}, "collate must be a function of (samples)"),
        ({"forward": "model"}, "forward must be a function, not str 'model'"),
        ({"forward": lambda batch: 1}, "forward must be a function of (model, batch)"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_told_in_one_line(changes, problem):
    assert problem in only_problem_of(**changes)


# --- model, loss, optimizer, schedule ----------------------------------------------------------------


def frozen():
    model = nn.Linear(3, 2)
    return model.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: nn.Linear, "model must be a torch.nn.Module, not the class Linear; create it first: model()"),
        (lambda: torch.randn(3, 3), "model must be a torch.nn.Module, not Tensor tensor([["),
        (lambda: None, "model must be a torch.nn.Module, not NoneType None"),
        (lambda: nn.LazyLinear(2), "model has lazy layers without shapes yet; run one batch through it first"),
        (frozen, "model has no parameter that requires a gradient: there is nothing to train"),
        (nn.ReLU, "model has no parameter that requires a gradient: there is nothing to train"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(make, problem):
    assert problem in only_problem_of(model=make(), optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (nn.CrossEntropyLoss, "loss is the class CrossEntropyLoss; did you mean CrossEntropyLoss()?"),
        ("mse", "loss must be a loss module or f(model, batch), not str 'mse'"),
        (F.cross_entropy, "loss is torch.nn.functional.cross_entropy, a function of (output, target); did you mean"),
        (functools.partial(F.mse_loss, reduction="sum"), "loss is torch.nn.functional.mse_loss, a function of"),
        (nn.MSELoss(reduction="none"), "loss has reduction='none', which gives no single number; use 'mean' or 'sum'"),
        (lambda output: 0, "loss must take (model, batch), or be a loss module of (output, target)"),
        (lambda a, b, c: 0, "loss must take (model, batch), or be a loss module of (output, target)"),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused(loss, problem):
    assert problem in only_problem_of(loss=loss)


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        ("adam", "optimizer='adam' is a word; give e.g. torch.optim.AdamW(model.parameters(), lr=1e-3)"),
        (0.1, "optimizer must be a torch optimizer or a function of the parameters, not float 0.1"),
        (torch.optim.SGD([nn.Parameter(X)]), "optimizer holds no parameter of this model; it was made for another one"),
        (lambda: 1, "optimizer is a function that cannot be called with the parameters alone"),
        (torch.optim.LBFGS, "optimizer is LBFGS, which evaluates the loss several times an update"),
        (functools.partial(torch.optim.LBFGS, lr=1), "optimizer is LBFGS"),
    ],
)
def test_an_optimizer_that_will_not_do_is_refused(optimizer, problem):
    assert problem in only_problem_of(optimizer=optimizer)


def test_lbfgs_is_refused_since_it_needs_a_closure():
    model = nn.Linear(3, 2)
    problem = only_problem_of(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    assert "(a closure); use one that steps once, e.g. torch.optim.AdamW" in problem


def test_an_optimizer_of_some_of_the_parameters_and_of_others_besides_is_accepted():
    model, extra = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([model.bias, extra])
    assert Job(**settings(model=model, optimizer=optimizer)).optimizer is optimizer


def test_a_schedule_of_another_optimizer_is_refused():
    model = nn.Linear(3, 2)
    mine, other = (torch.optim.SGD(model.parameters()) for _ in range(2))
    problem = only_problem_of(model=model, optimizer=mine, schedule=StepLR(other, 1))
    assert problem == "schedule belongs to another optimizer than the job's"
    assert Job(**settings(model=model, optimizer=mine, schedule=StepLR(mine, 1)))


def test_a_schedule_made_already_needs_an_optimizer_made_already():
    schedule = StepLR(torch.optim.SGD(nn.Linear(3, 2).parameters()), 1)
    assert only_problem_of(optimizer=torch.optim.SGD, schedule=schedule) == (
        "schedule is made already while optimizer is a function; give both made, or both as functions"
    )
    assert only_problem_of(optimizer=..., schedule=schedule) == "optimizer is missing"


def test_a_plateau_schedule_needs_validation_data():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    told = "schedule is ReduceLROnPlateau, which needs validation data: give valid="
    assert only_problem_of(model=model, optimizer=optimizer, schedule=ReduceLROnPlateau(optimizer)) == told


def test_a_plateau_schedule_waits_the_way_the_watched_score_moves():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    watched = {"model": model, "optimizer": optimizer, "valid": DATA, "metrics": ["accuracy"], "monitor": "accuracy"}
    assert "give mode='max'" in only_problem_of(schedule=ReduceLROnPlateau(optimizer), **watched)
    Job(**settings(**watched, schedule=ReduceLROnPlateau(optimizer, mode="max")))


def test_a_schedule_given_as_a_class_is_refused():
    assert "schedule is the class StepLR; give a function" in only_problem_of(schedule=StepLR)


@pytest.mark.parametrize("schedule", ["cosine", 0.1, lambda: 1, lambda a, b, c: 1])
def test_a_schedule_that_is_none_is_refused(schedule):
    assert only_problem_of(schedule=schedule).startswith("schedule ")


# --- data --------------------------------------------------------------------------------------------


def frame_class(module, name="DataFrame"):
    """A class as the named library has it, without the library."""
    home = types.ModuleType(module)
    frame = types.new_class(name, exec_body=lambda body: body.update(__module__=f"{module}.core.frame"))
    frame.__len__, frame.__getitem__ = lambda self: 3, lambda self, key: key
    frame.__repr__ = lambda self: "   a  b\n0  1  2\n1  3  4"
    setattr(home, name, frame)
    return getattr(home, name)


@pytest.mark.parametrize("module", ["pandas", "polars"])
def test_a_data_frame_is_answered_with_how_to_give_arrays(module):
    assert module not in sys.modules
    frame = frame_class(module)()
    assert only_problem_of(data=frame).startswith("data is a data frame; give arrays: (df[inputs].to_numpy('float32')")
    assert problems_of(data=(frame, frame)) == [
        f"data[{i}] belongs to a data frame; give it .to_numpy()" for i in (0, 1)
    ]
    assert "data frame" in only_problem_of(data=DataLoader(frame, batch_size=2), batch_size=...)


@pytest.mark.parametrize("name", ["data", "valid"])
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([X, Y], " is a list of tensors; give columns as a tuple (x, y), or samples as a Dataset"),
        ([X.numpy(), Y.numpy()], " is a list of tensors; give columns as a tuple (x, y), or samples as a Dataset"),
        ({"x": X, "y": [1, 2]}, "['y'] is list [1, 2]; give a tensor or an array"),
        ((X, list(range(10**6))), "[1] is list [0, 1, 2, 3, 4, 5, ...]; give a tensor or an array"),
        ((X, None), "[1] is NoneType None; give a tensor or an array"),
        (torch.tensor(3.0), " is a single number; data needs a first dimension of samples"),
        (np.array(3), " is a single number; data needs a first dimension of samples"),
        ((X, torch.tensor(1)), "[1] is a single number; data needs a first dimension of samples"),
        ((X, np.array(["a"] * 12)), "[1] has dtype <U1, which torch cannot hold; turn it into numbers first"),
        ((X, np.array([None] * 12)), "[1] has dtype object, which torch cannot hold; turn it into numbers first"),
        ((X, np.zeros(12, "M8[s]")), "[1] has dtype datetime64[s], which torch cannot hold"),
        ((np.zeros((12, 3), np.longdouble), Y), ", which torch cannot hold; turn it into numbers first"),
        ((np.zeros((12, 3), np.uint16), Y), "[0] has dtype uint16, which torch cannot index; make it a signed integer"),
        ((), " is empty"),
        ({}, " is empty"),
        ([], " is empty"),
        ((X[:0], Y[:0]), " is empty"),
        (TensorDataset(X[:0], Y[:0]), " is empty"),
        (TensorDataset(), " is empty"),
        (Subset(Samples(), []), " is empty"),
        ((X.double(), Y), "[0] is float64 while the model is float32; give it .to(torch.float32)"),
        ((X.double().numpy(), Y), "[0] is float64 while the model is float32; give it .astype('float32')"),
        ({"x": X.numpy().astype(">f8")}, "['x'] is float64 while the model is float32; give it .astype('float32')"),
        (TensorDataset(X.double(), Y), "[0] is float64 while the model is float32; give it .to(torch.float32)"),
        (X.double(), " is float64 while the model is float32; give it .to(torch.float32)"),
        (Streamed(), " is an IterableDataset, which has no order to keep; give it an index (a map-style Dataset)"),
        (WithoutLength(), " is WithoutLength, which has no length; give it __len__"),
        (Samples, " is the class Samples; did you mean Samples(…)?"),
        ("train.csv", " is the text 'train.csv'; read the file, and give tensors, arrays or a Dataset"),
        (7, " must be tensors, arrays, a Dataset, a DataLoader or indexable, not int 7"),
        ({1, 2}, " must be tensors, arrays, a Dataset, a DataLoader or indexable, not set {1, 2}"),
        (iter(X), " must be tensors, arrays, a Dataset, a DataLoader or indexable, not "),
    ],
)
def test_data_that_batches_cannot_be_made_of_is_refused(name, data, problem):
    told = only_problem_of(**{name: data})
    assert told.startswith(name)
    assert problem in told


def test_unequal_lengths_are_told_with_the_lengths():
    assert only_problem_of(data=(X, Y[:5])) == "the parts of data differ in length: data[0] has 12, data[1] has 5"
    assert only_problem_of(valid={"x": X, "y": Y[:5]}) == (
        "the parts of valid differ in length: valid['x'] has 12, valid['y'] has 5"
    )


def test_every_wrong_column_is_told():
    assert problems_of(data={"x": [1], "ok": X, "y": "abc"}) == [
        "data['x'] is list [1]; give a tensor or an array",
        "data['y'] is str 'abc'; give a tensor or an array",
    ]
    assert len(problems_of(data=(X.double(), X.double(), Y[:3]))) == 3


def test_the_cure_for_doubles_names_the_models_own_dtype():
    model = nn.Linear(3, 2).bfloat16()
    assert only_problem_of(model=model, data=(X.double(), Y)).endswith(
        "data[0] is float64 while the model is bfloat16; give it .to(torch.bfloat16)"
    )
    assert only_problem_of(model=model, data=(X.double().numpy(), Y)).endswith(
        "give it as a tensor .to(torch.bfloat16)"
    )


@pytest.mark.parametrize("name", ["data", "valid"])
def test_what_is_wrong_inside_a_dataloader_is_found(name):
    changes = {"batch_size": ...} if name == "data" else {}
    assert only_problem_of(**{name: DataLoader(Streamed(), batch_size=2)}, **changes).startswith(f"{name} is an Iter")
    assert only_problem_of(**{name: DataLoader(TensorDataset(X.double()), batch_size=2)}, **changes).startswith(
        f"{name}[0] is float64"
    )
    assert only_problem_of(**{name: DataLoader(Samples(), batch_size=None)}, **changes) == (
        f"{name} is a DataLoader without batches (batch_size=None); give it a batch size"
    )


def test_what_both_the_job_and_the_dataloader_say_is_told_with_both_values():
    loader = DataLoader(Samples(), batch_size=3, drop_last=True)
    found = problems_of(data=loader, batch_size=4, order="as given", drop_last=False, collate=list)
    assert found == [
        "batch_size is given both by the job (4) and by the DataLoader in data (3); leave it to one",
        "order is given both by the job ('as given') and by the DataLoader in data; leave it to one",
        "drop_last is given both by the job (False) and by the DataLoader in data (True); leave it to one",
        "collate is given both by the job (<class 'list'>) and by the DataLoader in data; leave it to one",
    ]


def test_columns_are_known_by_their_keys():
    assert named_columns((X, Y)) == {0: X, 1: Y}
    assert named_columns({"a": X}) == {"a": X}
    assert named_columns(X) == {"": X}
    assert is_columns(X)
    assert not is_columns([X, Y])
    assert not is_columns((X, [1]))


# --- judging -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ("accuracy", "metrics must be a list of names or a dict of functions, not str 'accuracy'"),
        (None, "metrics must be a list of names or a dict of functions, not NoneType None"),
        ({"accuracy"}, "metrics must be a list of names or a dict of functions, not set {'accuracy'}"),
        (["acuracy"], "metrics holds 'acuracy', which is not known; did you mean 'accuracy'?"),
        ([["mae"]], "metrics holds ['mae'], which is not known; known: accuracy, macro_f1, mae, rmse"),
        ([max], "metrics holds builtin_function_or_method <built-in function max>; give functions by name"),
        ({"mine": "mae"}, "metrics['mine'] must be a function of (output, target), not str 'mae'"),
        ({"mine": nn.L1Loss}, "metrics['mine'] must be a function of (output, target), not the class L1Loss"),
        ({1: max}, "metrics[1] has a name that is no text"),
    ],
)
def test_metrics_that_cannot_be_measured_are_refused(metrics, problem):
    assert problem in only_problem_of(valid=DATA, metrics=metrics)


@pytest.mark.parametrize("name", RECORDED)
def test_a_metric_cannot_hide_what_a_run_records(name):
    assert only_problem_of(valid=DATA, metrics={name: max}) == (
        f"metrics['{name}'] hides the {name} that a run records; give the metric another name"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"monitor": "acuracy", "metrics": ["accuracy"]}, "neither the loss nor a metric; did you mean 'accuracy'?"),
        ({"monitor": "accuracy"}, "monitor='accuracy' is neither the loss nor a metric; known: loss"),
        ({"monitor": ["loss"]}, "monitor=['loss'] is neither the loss nor a metric; known: loss"),
        ({"monitor": None}, "monitor=None is neither the loss nor a metric; known: loss"),
        ({"monitor": "mine", "metrics": {"mine": max}}, "a metric of your own: say better='higher' or better='lower'"),
    ],
)
def test_monitor_names_the_loss_or_a_metric(changes, problem):
    assert problem in only_problem_of(valid=DATA, **changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"patience": 3}, "patience=3 needs validation data: give valid="),
        ({"eval_every": 3}, "eval_every=3 needs validation data: give valid="),
        ({"metrics": ["mae"]}, "metrics are measured on validation data: give valid="),
    ],
)
def test_what_needs_validation_data_says_so(changes, problem):
    assert only_problem_of(**changes) == problem
