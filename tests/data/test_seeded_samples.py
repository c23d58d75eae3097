"""Samples that are drawn with torch's generator, seeded by their number, as torchvision's FakeData does it."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hotlap.data.dataset import as_source
from hotlap.data.pure import proof
from hotlap.data.pure.proof import prove, why_not_fixed


class Drawn(Dataset):
    """As FakeData: the generator is kept, seeded, drawn from and put back."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        state = torch.get_rng_state()
        torch.manual_seed(index + 3)
        picture, label = self.picture(), torch.randint(0, 10, size=(1,))[0]
        torch.set_rng_state(state)
        return picture, label.item()

    def picture(self):
        return torch.randn(3, 4)


class PutBackInTheEnd(Drawn):
    def __getitem__(self, index):
        state = torch.get_rng_state()
        torch.manual_seed(index)
        try:
            sample = self.picture()
        finally:
            torch.set_rng_state(state)
        return sample


class NotPutBack(Drawn):
    def __getitem__(self, index):
        torch.manual_seed(index)
        return self.picture()


class NotAlwaysPutBack(Drawn):
    def __getitem__(self, index):
        state = torch.get_rng_state()
        torch.manual_seed(index)
        if index > 10:
            return self.picture()
        sample = self.picture()
        torch.set_rng_state(state)
        return sample


class NotAlwaysSeeded(Drawn):
    def __getitem__(self, index):
        state = torch.get_rng_state()
        if index > 10:
            torch.manual_seed(index)
        sample = self.picture()
        torch.set_rng_state(state)
        return sample


class SeededInPassing(Drawn):
    def __getitem__(self, index):
        state = torch.get_rng_state()
        index > 10 and torch.manual_seed(index)
        sample = self.picture()
        torch.set_rng_state(state)
        return sample


class SeededByMap(Drawn):
    def __getitem__(self, index):
        state = torch.get_rng_state()
        list(map(torch.manual_seed, range(index)))
        sample = self.picture()
        torch.set_rng_state(state)
        return sample


class SeededInALoop(Drawn):
    def __getitem__(self, index):
        state = torch.get_rng_state()
        for number in range(index):
            torch.manual_seed(number)
        sample = self.picture()
        torch.set_rng_state(state)
        return sample


class DrawnBehindIt(Drawn):
    def __getitem__(self, index):
        state = torch.get_rng_state()
        torch.manual_seed(index)
        sample = self.picture()
        torch.set_rng_state(state)
        return sample + self.picture()


class SeededBySystem(Drawn):
    def __getitem__(self, index):
        state = torch.get_rng_state()
        torch.manual_seed(index)
        torch.seed()
        sample = self.picture()
        torch.set_rng_state(state)
        return sample


class SeededWhereErrorsAreCaught(Drawn):
    def __getitem__(self, index):
        state = torch.get_rng_state()
        try:
            torch.manual_seed(index)
            sample = self.picture()
            torch.set_rng_state(state)
        except ValueError:
            sample = torch.zeros(3, 4)
        return sample


class SetToSomethingElse(Drawn):
    def __init__(self):
        self.state = torch.get_rng_state()

    def __getitem__(self, index):
        torch.manual_seed(index)
        sample = self.picture()
        torch.set_rng_state(self.state)
        return sample


@pytest.mark.parametrize("kind", [Drawn, PutBackInTheEnd])
def test_samples_that_are_seeded_by_their_number_are_shown_to_stay(kind):
    proof = prove(kind())
    assert proof.why_not_fixed is None
    assert proof.seeds


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (NotPutBack, "does not always put it back"),
        (NotAlwaysPutBack, "does not always put it back"),
        (NotAlwaysSeeded, "does not always put it back"),
        (SeededInPassing, "does not always put it back"),
        (SeededByMap, "does not always put it back"),
        (SeededInALoop, "does not always put it back"),
        (DrawnBehindIt, "draws from torch's generator"),
        (SeededBySystem, "the system's randomness"),
        (SeededWhereErrorsAreCaught, "an error may be caught"),
        (SetToSomethingElse, "sets torch's generator"),
    ],
)
def test_samples_that_may_hang_on_other_draws_or_move_the_generator_are_not(kind, words):
    assert words in prove(kind()).why_traces


@pytest.mark.parametrize("in_workers", [True, False])
def test_with_a_device_they_are_held_only_where_workers_fetch_them(monkeypatch, in_workers):
    """In the training's own process `torch.manual_seed` seeds the devices too, which the script may hang on."""
    source = as_source(Drawn())
    source.in_workers = in_workers
    assert why_not_fixed(source) is None
    monkeypatch.setattr(proof.torch.accelerator, "is_available", lambda: True)
    assert (why_not_fixed(source) is None) == in_workers


def test_a_look_at_them_seeds_no_device(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    data = Drawn()
    truth = data[4]
    assert seeded == [7]
    before = torch.get_rng_state()
    picture, label = as_source(data).for_probing().read([4])[0]
    assert seeded == [7]
    assert torch.equal(picture, truth[0])
    assert label == truth[1]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.cuda.manual_seed_all == seeded.append


def test_workers_bring_the_samples_that_are_held():
    loader = DataLoader(Drawn(), batch_size=20, num_workers=1)
    brought = next(iter(loader))
    held = [as_source(Drawn()).for_probing().read(range(20))]
    assert torch.equal(brought[0], torch.stack([picture for picture, _ in held[0]]))
