"""What stands in for functions of torch's comes out in any order, and leaves no trace."""

from itertools import permutations

import pytest
import torch

from hotlap.script.calls.early_loss import EarlyLoss
from hotlap.script.feed.device_copies import DeviceCopies
from hotlap.script.patches import Patches


class Base:
    def words(self):
        return ["own"]


class Child(Base):
    pass


def adds(word):
    return lambda own: lambda self: [*own(self), word]


@pytest.mark.parametrize("owner", [Base, Child])
@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_patches_of_one_attribute_come_out_in_any_order(owner, order):
    before = vars(owner).get("words")
    patches = [Patches() for _ in order]
    for number, one in enumerate(patches):
        one.put(owner, "words", adds(number))
    left = sorted(order)
    for number in order:
        patches[number].take_out_all()
        left.remove(number)
        assert owner().words() == ["own", *left]
    assert vars(owner).get("words") is before


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_patches_can_be_put_again_in_between(order):
    own = Base.words
    patches = [Patches() for _ in order]
    for number, one in enumerate(patches):
        one.put(Base, "words", adds(number))
    first, *rest = order
    patches[first].take_out_all()
    patches[first].put(Base, "words", adds(first))
    assert Base().words() == ["own", *sorted(rest), first]
    for number in order:
        patches[number].take_out_all()
    assert Base.words is own


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_what_somebody_else_has_put_in_between_stays(order):
    own = Base.words
    patches = [Patches(), Patches()]
    patches[0].put(Base, "words", adds(0))
    theirs = adds("theirs")(Base.words)
    Base.words = theirs
    try:
        patches[1].put(Base, "words", adds(1))
        for number in order:
            patches[number].take_out_all()
        assert Base.words is theirs
    finally:
        Base.words = own


@pytest.mark.parametrize("is_sending_first", [True, False])
@pytest.mark.parametrize("goes_in_first", [True, False])
def test_copies_and_readings_leave_torch_as_it_was_in_either_order(is_sending_first, goes_in_first):
    own = {name: vars(torch.Tensor).get(name) for name in ("to", "cuda", "item", "copy_", "__float__")}
    device_copies, early_loss = DeviceCopies(torch.device("cpu")), EarlyLoss(torch.device("cpu"))
    begin = [device_copies.install, lambda: early_loss.use(early=True)]
    end = [device_copies.remove, early_loss.close]
    for work in begin[:: 1 if goes_in_first else -1] + end[:: 1 if is_sending_first else -1]:
        work()
    assert {name: vars(torch.Tensor).get(name) for name in own} == own
    assert torch.ones(2).to(torch.float64).dtype is torch.float64
