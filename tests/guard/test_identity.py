"""Knowing a training again: what differs is named, what may differ is let through."""

import functools
import importlib
import sys

import pytest
import torch
from plain import class_data, small_mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hotlap import Job
from hotlap.data.dataset import training_dataset
from hotlap.guard.identity import code_of, differences, identity, settings_of

BASE = {
    "data": class_data(),
    "loss": nn.CrossEntropyLoss(),
    "batch_size": 8,
    "epochs": 3,
    "device": "cpu",
}


def job(**changes):
    settings = {**BASE, **changes}
    settings.setdefault("model", small_mlp())
    settings.setdefault("optimizer", torch.optim.AdamW(settings["model"].parameters(), lr=0.01))
    return Job(**settings)


def known(**changes):
    made = job(**changes)
    return identity(made, training_dataset(made))


def test_the_same_training_again_has_no_difference():
    assert differences(known(), known()) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch_size": 4}, "settings: batch_size was 8, is 4"),
        ({"seed": 1}, "settings: seed was 0, is 1"),
        ({"clip": 0.5}, "settings: clip was None, is 0.5"),
        ({"accumulate": 2}, "settings: accumulate was 1, is 2"),
        ({"order": "as given"}, "settings: order was None, is 'as given'"),
        ({"skip_nonfinite": True}, "settings: skip_nonfinite was False, is True"),
    ],
)
def test_each_setting_that_differs_is_named_with_both_values(changes, told):
    assert differences(known(), known(**changes)) == [told]


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 9}, {"epochs": None, "steps": 5}, {"device": "auto"},
        {"valid": class_data(10), "eval_every": 3, "patience": 2},
    ],
    ids=str,
)  # fmt: skip
def test_how_long_and_where_may_differ(changes):
    base = {"valid": class_data(10)} if "valid" in changes else {}
    assert differences(known(**base), known(**changes)) == []


def test_all_differences_are_named_one_by_one():
    found = differences(known(), known(batch_size=4, seed=1, clip=1.0))
    assert [line.split(" was ")[0] for line in found] == ["settings: batch_size", "settings: clip", "settings: seed"]


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **settings})


def test_an_optimizers_settings_are_part_and_the_one_that_differs_is_shown():
    model = small_mlp()
    (line,) = differences(known(model=model), known(model=model, optimizer=adamw(model, weight_decay=0.5)))
    assert "weight_decay=0.01" in line
    assert "weight_decay=0.5" in line
    assert "settings: optimizer" in line


def test_settings_of_single_groups_are_part():
    def grouped(decay):
        model = small_mlp()
        first, *rest = model.parameters()
        groups = [{"params": [first], "weight_decay": decay}, {"params": rest}]
        return known(model=model, optimizer=torch.optim.AdamW(groups, lr=0.01))

    assert differences(grouped(0.0), grouped(0.0)) == []
    (line,) = differences(grouped(0.0), grouped(0.3))
    assert "weight_decay=0.3" in line


def test_an_optimizer_made_by_a_function_is_known_by_what_it_made():
    def given(rate):
        return job(optimizer=lambda p: torch.optim.AdamW(p, lr=rate))

    def made(rate):
        one = given(rate)
        return {"settings": settings_of(one, one.optimizer(one.model.parameters()))}

    assert differences(made(0.01), made(0.01)) == []
    (line,) = differences(made(0.01), made(0.02))
    assert "lr=0.01" in line
    assert "lr=0.02" in line


def test_a_function_with_settings_is_known_by_them():
    before = known(optimizer=functools.partial(torch.optim.AdamW, lr=0.01))
    (line,) = differences(before, known(optimizer=functools.partial(torch.optim.AdamW, lr=0.02)))
    assert line == "settings: optimizer was 'AdamW(lr=0.01)', is 'AdamW(lr=0.02)'"


def test_a_losss_settings_are_part():
    (line,) = differences(known(), known(loss=nn.CrossEntropyLoss(label_smoothing=0.1)))
    assert "label_smoothing=0.0" in line
    assert "label_smoothing=0.1" in line


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"batch_size": 5}, "batch_size"), ({"shuffle": False}, "order"), ({"drop_last": True}, "drop_last")],
)
def test_a_loaders_settings_are_part_and_its_workers_are_not(changes, name):
    def loaded(**settings):
        loader = DataLoader(TensorDataset(*class_data()), **{"batch_size": 8, "shuffle": True, **settings})
        return known(data=loader, batch_size=None)

    assert differences(loaded(), loaded(num_workers=2, prefetch_factor=4)) == []
    (line,) = differences(loaded(), loaded(**changes))
    assert line.startswith(f"settings: {name} was ")


# --- data ----------------------------------------------------------------------------------------


def changed(data, part, index=-1):
    data = tuple(t.clone() for t in data)
    data[part].view(-1)[index] += 1
    return data


@pytest.mark.parametrize("part", [0, 1], ids=["input", "target"])
def test_data_that_differs_by_one_value_is_told(part):
    (line,) = differences(known(), known(data=changed(class_data(), part)))
    assert line.startswith("data: sha256 was ")


def test_a_dict_of_tensors_is_the_same_data_in_any_order():
    x, y = class_data()

    class Held(TensorDataset):
        def __init__(self, **parts):
            super().__init__(x, y)
            self.parts = parts

    one, other = Held(first=x, second=x + 1), Held(second=x + 1, first=x)
    assert differences(known(data=one), known(data=other)) == []
    assert differences(known(data=one), known(data=Held(first=x + 1, second=x)))


def test_fewer_samples_are_told():
    found = differences(known(), known(data=class_data(40)))
    assert "data: samples was 50, is 40" in found


def test_validation_data_is_part_too():
    before = known(valid=class_data(10))
    assert differences(before, known(valid=class_data(10))) == []
    (line,) = differences(before, known(valid=changed(class_data(10), 0)))
    assert line.startswith("data: validation sha256 was ")


class Held(Dataset):
    def __init__(self, value):
        self.rows = [(torch.full((5,), float(n), dtype=torch.float64), n % 3) for n in range(20)]
        self.rows[7][0][2] = value

    def __len__(self):
        return 20

    def __getitem__(self, index):
        raise AssertionError("no sample is asked for")


def test_a_dataset_is_known_by_what_it_holds_and_no_sample_is_asked_for():
    assert differences(known(data=Held(1)), known(data=Held(1))) == []
    (line,) = differences(known(data=Held(1)), known(data=Held(2)))
    assert line.startswith("data: sha256")


# --- models --------------------------------------------------------------------------------------


def test_shapes_and_settings_of_layers_are_part():
    found = differences(known(), known(model=small_mlp(hidden=9)))
    assert "model: 0.weight was [8, 5], is [9, 5]" in found
    dropping = [known(model=nn.Sequential(small_mlp(), nn.Dropout(rate))) for rate in (0.1, 0.2)]
    (line,) = differences(*dropping)
    assert line == "model: (1) was 'p=0.1, inplace=False', is 'p=0.2, inplace=False'"


# --- code ----------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Modules of the user's own."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(name, text):
        file = tmp_path / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()
        made.append(name)
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)
        sys.modules.pop(name.partition(".")[0], None)


MODEL = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3).double()
    def forward(self, x):
        return self.inner(x) {more}
def make(p):
    import torch
    return torch.optim.SGD(p, lr=0.1)
class Maker:
    def make(self, p):
        return make(p)
"""


def test_a_changed_file_is_named(package):
    before = known(model=package("mynet", MODEL.format(more="")).Net())
    assert list(before["code"]) == ["mynet.py"]
    after = known(model=package("mynet", MODEL.format(more="+ 1")).Net())
    assert differences(before, after) == ["the code of mynet.py differs"]


def test_the_file_of_a_class_that_the_model_builds_upon_is_part(package):
    package("mybase", MODEL.format(more=""))
    sub = package("mysub", "from mybase import Net\nclass Sub(Net):\n    pass\n")
    assert set(code_of(job(model=sub.Sub()))) == {"mybase.py", "mysub.py"}


def test_two_files_of_one_name_are_both_seen(package):
    one = package("left.net", MODEL.format(more=""))
    two = package("right.net", MODEL.format(more=""))
    before = code_of(job(model=nn.Sequential(one.Net(), two.Net())))
    two = package("right.net", MODEL.format(more="+ 1"))
    after = code_of(job(model=nn.Sequential(one.Net(), two.Net())))
    assert differences({"code": before}, {"code": after}) == ["the code of net.py differs"]


@pytest.mark.parametrize("how", ["function", "method", "partial"])
def test_functions_of_all_kinds_count_as_code(package, how):
    module = package("mymake", MODEL.format(more=""))
    maker = {"function": module.make, "method": module.Maker().make, "partial": functools.partial(module.make)}[how]
    assert "mymake.py" in code_of(job(optimizer=maker))


def test_a_file_that_is_new_or_gone_is_told(package):
    package("mynet", MODEL.format(more=""))
    module = sys.modules["mynet"]
    assert differences(known(), known(model=module.Net()))[-1] != ""
    found = differences({"code": {}}, {"code": code_of(job(model=module.Net()))})
    assert found == ["the code of mynet.py is new or missing"]


def test_library_code_is_not_part():
    import hotlap.demo

    assert code_of(job(model=nn.Sequential(nn.Linear(5, 3).double()))) == {}
    assert code_of(hotlap.demo.digits_job(device="cpu")) == {}


# --- from anyone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [{}, {"settings": 3}, {"settings": None, "code": []}, [], None, "x"], ids=str)
def test_an_identity_out_of_its_form_differs_and_nothing_breaks(before):
    assert differences(before, known())
