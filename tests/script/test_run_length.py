"""How long a script goes on is guessed from its loops, settings and schedulers, as people write them."""

import sys
import textwrap
import types
import weakref

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from hotlap.script.run_length import RunLength, locals_of

LENGTH = 10


class Loader(torch.utils.data.DataLoader):
    """Ten batches; the horizon is told by the first one that is drawn, or already where an iterator is made."""

    def __init__(self, world, *, length=LENGTH, lazy=False):
        super().__init__(range(length))
        self._world, self._told, self._lazy = world, length, lazy

    def __iter__(self):
        if self._lazy:
            return self._later()
        self._world.began(self._told, sys._getframe(1))
        return self._batches()

    def _later(self):
        self._world.began(self._told, sys._getframe(1))
        yield from self._batches()

    def _batches(self):
        for batch in range(self._told):
            self._world.batches += 1
            yield batch


class World:
    """What a script finds: a loader and an optimizer, which tell the horizon; and what that guessed at each step."""

    def __init__(self, **loader):
        self.horizon = RunLength()
        self.loader = Loader(self, **loader)
        self.model = torch.nn.Linear(1, 1)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guesses, self.known, self.batches, self.steps = [], [], 0, 0

    def began(self, length, frame):
        self.batches = 0
        self.horizon.began_epoch(length, frame)

    def step(self):
        self.steps += 1
        self.sgd.step()
        self.horizon.stepped(self.steps, self.batches)
        self.guesses.append(self.horizon.updates())
        self.known.append(self.horizon.known)

    def run(self, path, text):
        path.write_text(textwrap.dedent(text))
        names = {"__name__": "__main__", "loader": self.loader, "optimizer": self, "sgd": self.sgd, "torch": torch}
        exec(compile(path.read_text(), str(path), "exec"), names)
        return self


@pytest.fixture(params=[False, True], ids=["told when iterated", "told when drawn"])
def run(tmp_path, request):
    return lambda text, **loader: World(lazy=request.param, **loader).run(tmp_path / "train.py", text)


LOOPS = {
    "a literal": """
        for epoch in range(5):
            for batch in loader:
                optimizer.step()
        """,
    "a constant": """
        EPOCHS = 5
        for epoch in range(1, EPOCHS + 1):
            for i, batch in enumerate(loader):
                optimizer.step()
        """,
    "argparse": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int, default=5)
        args = parser.parse_args([])
        def train(args, epoch):
            for batch in loader:
                optimizer.step()
        def main():
            for epoch in range(args.epochs):
                train(args, epoch)
        main()
        """,
    "a class with a dataclass": """
        from dataclasses import dataclass
        @dataclass
        class Config:
            how_often: int = 5
        class Trainer:
            def __init__(self, config):
                self.config = config
            def one(self):
                for batch in loader:
                    optimizer.step()
            def fit(self):
                for epoch in range(1, self.config.how_often + 1):
                    self.one()
        Trainer(Config()).fit()
        """,
    "a class as settings": """
        class CFG:
            n = 5
        for epoch in range(CFG.n):
            for batch in loader:
                optimizer.step()
        """,
    "a dict": """
        config = {"train": {"runs": 5}}
        for epoch in range(config["train"]["runs"]):
            for batch in loader:
                optimizer.step()
        """,
    "a range that was made before": """
        rounds = range(5)
        for epoch in rounds:
            for batch in loader:
                optimizer.step()
        """,
    "a progress bar": """
        class tqdm:
            def __init__(self, iterable):
                self.iterable = iterable
            def __iter__(self):
                yield from self.iterable
        for epoch in tqdm(range(5)):
            for batch in tqdm(loader.__iter__()):
                optimizer.step()
        """,
    "a progress bar that was made before": """
        class tqdm:
            def __init__(self, iterable):
                self.iterable = iterable
            def __iter__(self):
                yield from self.iterable
        bar = tqdm(range(5))
        for epoch in bar:
            for batch in loader:
                optimizer.step()
        """,
    "resumed": """
        start_epoch, epochs = 15, 20
        for epoch in range(start_epoch, epochs):
            for batch in loader:
                optimizer.step()
        """,
    "a generator in between": """
        def moved(loader):
            for batch in loader:
                yield batch
        for epoch in range(5):
            for batch in moved(loader):
                optimizer.step()
        """,
    "a generator of all epochs": """
        def batches():
            for epoch in range(5):
                for batch in loader:
                    yield batch
        for batch in batches():
            optimizer.step()
        """,
    "an iterator for each epoch": """
        for epoch in range(5):
            batches = iter(loader)
            for i in range(len(loader)):
                batch = next(batches)
                optimizer.step()
        """,
    "folds": """
        def fit():
            for epoch in range(5):
                for batch in loader:
                    optimizer.step()
        for fold in range(2):
            fit()
        """,
    "phases in a list": """
        for epoch in range(5):
            for phase in ["train", "val"]:
                if phase == "val":
                    continue
                for batch in loader:
                    optimizer.step()
        """,
    "a closure": """
        for attempt in range(2):
            def train():
                for batch in loader:
                    optimizer.step()
        for epoch in range(5):
            train()
        """,
    "a comprehension": """
        for epoch in range(5):
            losses = [optimizer.step() for batch in loader]
        """,
    "an epoch that is cut off": """
        for epoch in range(5):
            for i, batch in enumerate(loader):
                optimizer.step()
                if i == 5:
                    break
        """,
    "batches drawn for ever": """
        batches = iter(loader)
        for step in range(47):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            optimizer.step()
        """,
    "an endless generator": """
        def cycle(loader):
            while True:
                for batch in loader:
                    yield batch
        batches = cycle(loader)
        for step in range(47):
            batch = next(batches)
            optimizer.step()
        """,
    "named epochs in a while loop": """
        num_epochs, epoch = 5, 0
        while epoch < num_epochs:
            for batch in loader:
                optimizer.step()
            epoch += 1
        """,
    "steps in a while loop": """
        max_steps, step = 47, 0
        while step < max_steps:
            for batch in loader:
                optimizer.step()
                step += 1
                if step == max_steps:
                    break
        """,
    "steps that end an epoch": """
        import argparse
        def main(args):
            step = 0
            for epoch in range(1000):
                for batch in loader:
                    optimizer.step()
                    step += 1
                    if step == args.max_train_steps:
                        return
        main(argparse.Namespace(max_train_steps=47))
        """,
    "a loop without an end": """
        import itertools
        from types import SimpleNamespace
        hparams = SimpleNamespace(N_EPOCHS=5)
        for epoch in itertools.count():
            if epoch == hparams.N_EPOCHS:
                break
            for batch in loader:
                optimizer.step()
        """,
    "one cycle": """
        scheduler = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=50)
        done = False
        while not done:
            for batch in loader:
                optimizer.step()
                scheduler.step()
            done = scheduler.last_epoch == 50
        """,
    "cosine in epochs": """
        class Trainer:
            def __init__(self):
                self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=5)
            def fit(self):
                while self.scheduler.last_epoch < 5:
                    for batch in loader:
                        optimizer.step()
                    self.scheduler.step()
        Trainer().fit()
        """,
    "cosine in steps": """
        def fit(scheduler):
            while scheduler.last_epoch < 50:
                for batch in loader:
                    optimizer.step()
                    scheduler.step()
        fit(torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=50))
        """,
    "warm-up and cosine": """
        warm = torch.optim.lr_scheduler.LinearLR(sgd, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=3)
        scheduler = torch.optim.lr_scheduler.SequentialLR(sgd, [warm, cosine], milestones=[2])
        while scheduler.last_epoch < 5:
            for batch in loader:
                optimizer.step()
            scheduler.step()
        """,
    "warm-up and cosine in steps": """
        warm = torch.optim.lr_scheduler.LinearLR(sgd, total_iters=10)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=40)
        scheduler = torch.optim.lr_scheduler.SequentialLR(sgd, [warm, cosine], milestones=[10])
        while scheduler.last_epoch < 50:
            for batch in loader:
                optimizer.step()
                scheduler.step()
        """,
    "a schedule as transformers makes it": """
        import functools
        def linear(step, *, num_warmup_steps, num_training_steps):
            return 1 - step / num_training_steps
        rule = functools.partial(linear, num_warmup_steps=0, num_training_steps=50)
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, rule)
        while schedule.last_epoch < 50:
            for batch in loader:
                optimizer.step()
                schedule.step()
        """,
}
LATE = {
    "an epoch that is cut off": 7,
    "batches drawn for ever": 11,
    "folds": 1,
    "one cycle": 2,
    "cosine in epochs": 2,
    "cosine in steps": 2,
    "warm-up and cosine": 2,
    "warm-up and cosine in steps": 2,
    "a schedule as transformers makes it": 2,
}
"""Where the first steps do not tell: from which one on the guess has to be right."""


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:The epoch parameter:UserWarning")
def test_the_number_of_updates_is_known_early(run, name):
    world = run(LOOPS[name])
    told = slice(LATE.get(name, 1) - 1, None)
    assert set(world.guesses[told]) == {world.steps}, world.guesses
    assert all(world.known[told])


def test_accumulated_batches_count_as_one_update(run):
    text = """
        for epoch in range(5):
            for i, batch in enumerate(loader):
                if (i + 1) % 4 == 0 or i + 1 == 22:
                    optimizer.step()
        """
    world = run(text, length=22)
    assert world.steps == 30
    assert world.guesses[0] == 110  # one step does not tell how many batches there are for each
    assert set(world.guesses[1:5]) == {30}
    assert set(world.guesses[6:]) == {30}


def test_batches_drawn_one_by_one_and_accumulated(run):
    text = """
        def cycle(loader):
            while True:
                for batch in loader:
                    yield batch
        batches = cycle(loader)
        for step in range(12):
            for micro in range(3):
                batch = next(batches)
            optimizer.step()
        """
    world = run(text, length=30)
    assert set(world.guesses[1:10]) == {world.steps}


def test_two_trainings_one_after_the_other_add_up(run):
    text = """
        def stage(often):
            for epoch in range(often):
                for batch in loader:
                    optimizer.step()
        stage(3)
        stage(4)
        """
    world = run(text)
    assert set(world.guesses[:30]) == {30}
    assert set(world.guesses[30:]) == {70}


def test_two_loops_that_take_turns_add_up(run):
    text = """
        for epoch in range(5):
            for batch in loader:
                optimizer.step()
            for i, batch in enumerate(loader):
                optimizer.step()
                if i == 3:
                    break
        """
    world = run(text)
    assert world.steps == 70
    assert world.guesses[0] == 50
    assert set(world.guesses[14:]) == {70}


def test_an_evaluation_that_is_told_of_adds_nothing(run):
    text = """
        def evaluate():
            for batch in loader:
                pass
        evaluate()
        for epoch in range(5):
            for batch in loader:
                optimizer.step()
            evaluate()
        """
    world = run(text)
    assert set(world.guesses) == {50}


def test_without_any_hint_it_goes_on_to_the_end_of_the_epoch_and_as_long_again(run):
    text = """
        patience = True
        while patience:
            for batch in loader:
                optimizer.step()
            patience = optimizer.steps < 40
        """
    world = run(text)
    assert world.guesses[:10] == [10, 10, 10, 10, 10, 12, 14, 16, 18, 20]
    assert world.guesses[10:20] == [max(20, 2 * step) for step in range(11, 21)]
    assert not any(world.known)


def test_with_nothing_to_go_by_there_is_no_guess():
    horizon = RunLength()
    assert (horizon.updates(), horizon.known) == (None, False)
    horizon.began_epoch(None, None)
    assert (horizon.updates(), horizon.known) == (None, False)
    horizon.stepped(7)
    assert (horizon.updates(), horizon.known) == (14, False)


def test_a_hint_that_was_outrun_is_dropped(run):
    text = """
        num_steps = 20  # of something else
        for epoch in range(5):
            for batch in loader:
                optimizer.step()
        """
    world = run(text)
    assert set(world.guesses[:20]) == {20}
    assert set(world.guesses[20:]) == {50}


def test_of_two_hints_the_smaller_counts(run):
    text = """
        from argparse import Namespace
        args, cfg = Namespace(epochs=5), {"max_epochs": 7}
        epoch = 0
        while epoch < 5:
            for batch in loader:
                optimizer.step()
            epoch += 1
        """
    world = run(text)
    assert set(world.guesses) == {50}


def test_the_length_of_an_epoch_is_no_total(run):
    text = """
        total_steps = len(loader)
        for epoch in range(5):
            for batch in loader:
                optimizer.step()
        """
    world = run(text)
    assert set(world.guesses) == {50}


def test_a_name_that_counts_is_no_hint(run):
    text = """
        n_epochs, iterations = 2, 15
        while n_epochs < 7:
            for batch in loader:
                iterations += 2
                optimizer.step()
            n_epochs += 1
        """
    world = run(text)
    assert not any(world.known[10:])


def test_a_name_that_bounds_a_loop_says_nothing_else(run):
    text = """
        iterations = 5
        for i in range(iterations):
            for batch in loader:
                optimizer.step()
        """
    world = run(text)
    assert set(world.guesses) == {50}


def test_a_loop_that_somebody_breaks_out_of_tells_nothing(run):
    text = """
        for epoch in range(10**9):
            for batch in loader:
                optimizer.step()
            if epoch == 3:
                break
        """
    world = run(text)
    assert not any(world.known)


def test_a_scheduler_may_be_handed_in_and_is_not_kept_alive():
    world = World()
    scheduler = OneCycleLR(world.sgd, 0.1, total_steps=100)
    world.horizon.scheduler_seen(scheduler)
    world.horizon.scheduler_seen(object())
    world.horizon.scheduler_seen(None)
    for _ in range(3):
        world.step()
        scheduler.step()
    assert (world.horizon.updates(), world.horizon.known) == (100, True)
    gone = weakref.ref(scheduler)
    del scheduler
    assert gone() is None
    assert (world.horizon.updates(), world.horizon.known) == (6, False)


# --- libraries -----------------------------------------------------------------------------------


def library(package, text, **names):
    """Code as if that package held it."""
    exec(compile(textwrap.dedent(text), f"/lib/site-packages/{package}/trainer.py", "exec"), names)
    return types.SimpleNamespace(**names)


def test_the_trainer_of_transformers_says_it_itself(tmp_path):
    world = World()
    text = """
        class State:
            max_steps, global_step = None, None
        class Trainer:
            def __init__(self):
                self.state = State()
                self.state.max_steps, self.state.global_step = 47, 0
            def train(self):
                while self.state.global_step < self.state.max_steps:
                    for batch in loader:
                        optimizer.step()
                        self.state.global_step += 1
                        if self.state.global_step == self.state.max_steps:
                            break
        """
    made = library("transformers", text, loader=world.loader, optimizer=world)
    world.trainer = made.Trainer()
    text = """
        max_steps = 9
        for run in range(3):
            optimizer.trainer.train()
        """
    world.run(tmp_path / "train.py", text)
    assert set(world.guesses) == {47}
    assert all(world.known)


@pytest.mark.parametrize(("max_epochs", "max_steps", "want"), [(5, -1, 50), (5, 33, 33), (-1, 33, 33), (1, -1, 10)])
def test_the_trainer_of_lightning_says_it_itself(tmp_path, max_epochs, max_steps, want):
    world = World()
    text = """
        from types import SimpleNamespace
        class Loop:
            def __init__(self, trainer):
                self.trainer = trainer
            def run(self):
                for batch in loader:
                    optimizer.step()
        class Trainer:
            def __init__(self, max_epochs, max_steps):
                self.fit_loop = SimpleNamespace(max_epochs=max_epochs, epoch_loop=SimpleNamespace(max_steps=max_steps))
            def fit(self):
                Loop(self).run()
        """
    made = library("lightning", text, loader=world.loader, optimizer=world)
    world.trainer = made.Trainer(max_epochs, max_steps)
    world.run(tmp_path / "train.py", "optimizer.trainer.fit()")
    assert set(world.guesses) == {want}
    assert all(world.known)


def test_loops_around_a_library_that_is_not_known_tell_nothing(tmp_path):
    world = World()
    text = """
        def fit():
            for epoch in range(3):
                for batch in loader:
                    optimizer.step()
        """
    world.fit = library("fitters", text, loader=world.loader, optimizer=world).fit
    text = """
        for fold in range(2):
            optimizer.fit()
        """
    world.run(tmp_path / "train.py", text)
    assert not any(world.known)


def test_a_librarys_progress_bar_is_looked_through(tmp_path):
    world = World()
    text = """
        def tqdm(iterable):
            for one in iterable:
                yield one
        """
    world.tqdm = library("tqdm", text).tqdm
    text = """
        for epoch in optimizer.tqdm(range(5)):
            for batch in optimizer.tqdm(loader):
                optimizer.step()
        """
    world.run(tmp_path / "train.py", text)
    assert set(world.guesses) == {50}


# --- nothing of the script's is touched ----------------------------------------------------------


def test_nothing_of_the_scripts_is_called_and_nothing_raises(run):
    text = """
        class Touchy:
            def __getattribute__(self, name):
                raise RuntimeError("touched")
            __getattr__ = __eq__ = __len__ = __iter__ = __bool__ = __hash__ = __int__ = __index__ = __getattribute__
        class Config:
            __slots__ = ("epochs",)
            @property
            def num_epochs(self):
                raise RuntimeError("called")
        class Settings(dict):
            def __getitem__(self, name):
                raise RuntimeError("called")
            items = keys = get = __getitem__
        config, args, opt, epochs = Config(), Touchy(), Settings({1: 2, "epochs": 5}), Touchy()
        params = {i: str(i) for i in range(5000)}
        self = config
        done = 0
        while done < 5:
            for batch in loader:
                optimizer.step()
            done += 1
        """
    world = run(text)
    assert set(world.guesses) == {50}


def test_what_a_frame_held_is_let_go():
    class Batch:
        pass

    gone = []

    def train(horizon):
        batch = Batch()
        gone.append(weakref.ref(batch))
        horizon.began_epoch(LENGTH, sys._getframe())
        batch = None
        return gone[0]()

    assert train(RunLength()) is None


def test_locals_that_the_script_keeps_stay_as_they_are():
    def train(rate):
        kept = locals()
        exec("beside = 3")
        locals_of(sys._getframe())
        return kept["rate"], eval("beside"), locals()["rate"]

    def plain(rate):
        exec("beside = 3")
        found = locals_of(sys._getframe())
        return found["rate"], eval("beside"), locals()["rate"]

    assert train(0.1) == plain(0.1) == (0.1, 3, 0.1)


def test_a_script_without_source_is_guessed_by_names():
    world = World()
    text = "epochs = 5\nfor epoch in range(epochs):\n    for batch in loader:\n        optimizer.step()\n"
    exec(compile(text, "/nowhere/train.py", "exec"), {"loader": world.loader, "optimizer": world})
    assert set(world.guesses) == {50}


STEPS_ALONE = {
    "a loop over steps": ("for step in range(40):\n    take()\n", 40),
    "loops in loops": ("for epoch in range(4):\n    for i in range(10):\n        take()\n", 40),
    "in a function": ("def train(n):\n    for i in range(n):\n        take()\ntrain(40)\n", 40),
    "a setting": (
        "max_iters, i = 40, 0\nwhile True:\n    take()\n    i += 1\n    if i >= max_iters:\n        break\n",
        40,
    ),
    "cut from a tensor": (
        "for epoch in range(4):\n    for b, i in enumerate(range(0, x.size(0) - 1, 5)):\n        take()\n",
        40,
    ),
    "cut from an array": ("for epoch in range(4):\n    for i in range(0, a.shape[0], 5):\n        take()\n", 40),
    "cut from rows": ("for i in range(len(rows) // 5):\n    take()\n", 40),
    "a list of batches": ("for epoch in range(4):\n    for row in kept:\n        take()\n", 40),
    "now and then": ("for i in range(40):\n    if i % 2:\n        take()\n", None),
    "until it is good": ("i = 0\nwhile i < 40:\n    take()\n    i += 1\n", None),
}


@pytest.mark.parametrize("name", STEPS_ALONE)
def test_steps_without_a_loader_are_counted_by_the_loops_around_them(tmp_path, name):
    text, want = STEPS_ALONE[name]
    horizon, path, taken = RunLength(), tmp_path / "train.py", [0]

    def take():
        taken[0] += 1
        if taken[0] == 4:
            horizon.stepped(4)
            horizon.began_steps(sys._getframe(1))

    path.write_text(text)
    held = {"x": torch.zeros(50, 2), "a": np.zeros((50, 2)), "rows": [0] * 200, "kept": [0] * 10}
    exec(compile(text, str(path), "exec"), {"__name__": "__main__", "take": take, **held})
    assert horizon.known == (want is not None)
    if want is not None:
        assert horizon.updates() == want
