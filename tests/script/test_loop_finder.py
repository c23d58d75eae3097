"""The loop of a script is found from what it does."""

import torch
from torch import nn

from hotlap.script.loop_finder import SEEN, LoopFinder
from hotlap.script.patches import Patches


def optimizer_of(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def test_model_loader_and_optimizer_of_a_plain_loop():
    model, loss, finder = nn.Sequential(nn.Linear(2, 2)), nn.MSELoss(), LoopFinder()
    optimizer, loop = optimizer_of(model), None
    for step in range(SEEN):
        assert loop is None
        finder.batch_given("train")
        finder.module_called(model)
        finder.module_called(loss)
        loop = finder.stepped(optimizer)
        assert (loop is not None) == (step == SEEN - 1)
    assert loop.optimizers == [optimizer]
    assert loop.modules == [model]
    assert loop.loaders == ["train"]


def test_what_comes_before_the_first_step_is_no_part_of_the_loop():
    model, finder = nn.Linear(2, 2), LoopFinder()
    optimizer = optimizer_of(model)
    for _ in range(10):
        finder.batch_given("valid")
        finder.module_called(model)
    for _ in range(SEEN):
        finder.batch_given("train")
        finder.module_called(model)
        loop = finder.stepped(optimizer)
    assert loop.loaders == ["train"]


def test_two_networks_with_an_optimizer_each_and_calls_of_parts_of_them():
    generator, critic, frozen = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1), nn.Linear(2, 2)
    finder, ours = LoopFinder(), [optimizer_of(generator), optimizer_of(critic)]
    for _ in range(SEEN):
        for module in (generator, critic, frozen, generator[0]):
            finder.module_called(module)
        loop = finder.stepped(ours[1])
        if loop is not None:
            break
        finder.module_called(generator)
        finder.stepped(ours[0])
    assert loop.optimizers == [ours[1], ours[0]]
    assert loop.modules == [generator, critic]


def test_what_spreads_a_model_over_one_device_passes_its_calls_on():
    inner, finder = nn.Linear(2, 2), LoopFinder()
    model = nn.DataParallel(nn.DataParallel(inner))  # on a machine without a GPU, it passes everything on
    model.device_ids = model.module.device_ids = [0]
    optimizer = optimizer_of(model)
    for _ in range(SEEN):
        finder.module_called(model)
        loop = finder.stepped(optimizer)
    assert loop.modules == [inner]
    finder, other = LoopFinder(), nn.DataParallel(inner)
    for _ in range(SEEN):
        finder.module_called(model)
        finder.module_called(other)
        loop = finder.stepped(optimizer)
    assert loop.modules == [inner]
    model.device_ids = [0, 1]
    finder = LoopFinder()
    for _ in range(SEEN):
        finder.module_called(model)
        loop = finder.stepped(optimizer)
    assert loop.modules == [model]


def test_patches_come_off_exactly():
    class Base:
        def said(self):
            return "base"

    class Child(Base):
        pass

    patches = Patches()
    patches.put(Child, "said", lambda own: lambda self: "ours")
    patches.put(Base, "said", lambda own: lambda self: "ours too")
    assert (Child().said(), Base().said()) == ("ours", "ours too")
    patches.take_out_all()
    assert (Child().said(), Base().said()) == ("base", "base")
    assert "said" not in vars(Child)


def test_a_patch_that_somebody_else_has_covered_stays_theirs():
    class Base:
        def said(self):
            return "base"

    patches = Patches()
    patches.put(Base, "said", lambda own: lambda self: "ours")
    Base.said = lambda self: "theirs"
    patches.take_out_all()
    assert Base().said() == "theirs"
