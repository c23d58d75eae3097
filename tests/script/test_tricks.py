"""Tricks of `hotlap run`: each is in use under a captured plan, and only the one that is left out is not."""

import functools
import io
from pathlib import Path
from types import SimpleNamespace

import calling
import numpy as np
import optimizing
import pytest
import torch
from evaluations import Recorder, Replays
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.plan import Feed, Plan
from hotlap.core.tricks import (
    COUNTED_NORMS,
    DECODED_ONCE,
    EARLY_ITEM,
    EVALUATION_FEED,
    FORWARD_PIECES,
    GRADIENTS_IN_PLACE,
    LOSS_WITHOUT_WAITING,
    ONE_THREAD_BACKWARD,
    REPLAYED_CLIPPING,
    REPLAYED_EVALUATION,
    REPLAYED_LOSS,
    REWIRED_LAYERS,
    RUN_TRICKS,
    SHORT_STEP,
    STEP_TRICKS,
    TRICKS,
)
from hotlap.engine.assists import rewiring
from hotlap.script import training as script_training
from hotlap.script.calls.call import ModuleCall
from hotlap.script.calls.capture import CapturedCall
from hotlap.script.calls.early_loss import EarlyLoss
from hotlap.script.calls.loss_replay import LossReplay
from hotlap.script.feed import evaluation_feed
from hotlap.script.feed.loader_proxy import LoaderProxy
from hotlap.script.session import Session, Settings
from hotlap.script.update.capture import UpdateGraph
from hotlap.script.update.updates import Updates
from hotlap.store.files import load_plan, save_plan
from hotlap.store.run_folder import RunFolder

EPOCHS = 6
NEEDED_BY = {GRADIENTS_IN_PLACE: [REPLAYED_LOSS]}
"""Tricks that cannot be had without another."""


class Copied:
    """A place for one number that needs no page-locked memory."""

    def take(self, number):
        self._number = number.detach().clone()

    def value(self):
        return self._number.tolist()


def picture():
    """A file of a picture."""
    file = io.BytesIO()
    Image.effect_noise((80, 80), 50).save(file, "PNG")
    return file.getvalue()


PICTURE = picture()


def train(seen=None):
    """A loop in which each trick has its chance: the losses, and how many evaluations were right."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader, valid = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16)
    criterion, losses, right = nn.CrossEntropyLoss(), [], []
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            if seen is not None:
                seen(model)
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        right.append(Image.open(io.BytesIO(PICTURE)).convert("RGB").getpixel((0, 0)))
        with torch.no_grad():
            right.append(sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in valid))
        model.train()
    return losses, right


@pytest.fixture
def used(tmp_path, monkeypatch):
    """Trains under a plan that is captured, where recordings are pretended; the tricks that were in use."""
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    # Nothing of what an evaluation's feed is worth hangs on a clock.
    monkeypatch.setattr(LoaderProxy, "holding_s", lambda self, feed=None: 0.0)
    monkeypatch.setattr(evaluation_feed, "PROBED", 0)
    monkeypatch.setattr(evaluation_feed, "LEAST_S", 0.0)
    monkeypatch.setattr(evaluation_feed._Epochs, "batch_s", property(lambda self: 1.0))
    monkeypatch.setattr("hotlap.engine.capture.recording.HostRandomness", calling.OfPythonAndNumpy)
    recorders = []

    def recorder_of(kind, device):
        recorders.append(kind(device))
        return recorders[-1]

    of_calls = functools.partial(recorder_of, Recorder)
    of_updates = functools.partial(recorder_of, optimizing.FakeRecorder)
    monkeypatch.setattr(script_training, "ModuleCall", functools.partial(ModuleCall, make_recorder=of_calls))
    monkeypatch.setattr(script_training, "Updates", functools.partial(Updates, make_recorder=of_updates))
    monkeypatch.setattr(script_training, "EarlyLoss", functools.partial(EarlyLoss, make_place=Copied))
    monkeypatch.setattr(EarlyLoss, "_note_sent", lambda *_: None)  # or each copy on the CPU were one to the host

    def run(*without, in_file=(), as_in=None):
        plan = Plan(feed=Feed(kind="gather")).but(mode="captured", without=in_file)
        save_plan(plan, tmp_path / "plan.toml")
        asked = str(as_in or tmp_path / "plan.toml")
        found, seen = [], SimpleNamespace(shared=0, here=0, shortcuts=0, watched=False)
        own = train()
        settings = Settings(
            name="test",
            out=tmp_path / f"run-{len(list(tmp_path.iterdir()))}",
            plan=lambda training: found.append(training) or asked,
            without=without,
        )
        with Session(settings) as session:
            replayed = session._shortcuts._replayed

            def counted(optimizer):
                seen.shortcuts += 1
                return replayed(optimizer)

            def after_backward(model):
                seen.here += not torch._C._is_multithreading_enabled()
                seen.watched = session._rescue.watches
                held = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
                seen.shared += len(held) == 1  # rooms for gradients lie side by side

            session._shortcuts._replayed = counted
            made = train(after_backward)
        np.testing.assert_allclose(made[0], own[0], rtol=1e-4, atol=1e-6)
        assert made[1] == own[1]
        training, graphs = found[0], [graph for recorder in recorders for graph in recorder.graphs]
        recorders.clear()
        assert any(isinstance(getattr(graph, "of", None), UpdateGraph) and graph.replays for graph in graphs)
        entries = RunFolder.open(settings.out).read_ledger()
        in_use = {
            REPLAYED_LOSS: training.loss_replay.made,
            EARLY_ITEM: training.early_loss.answered,
            REPLAYED_CLIPPING: sum(g.replays for g in graphs if type(getattr(g, "of", g)) is type(None)),
            SHORT_STEP: seen.shortcuts,
            ONE_THREAD_BACKWARD: seen.here,
            GRADIENTS_IN_PLACE: seen.shared,
            REPLAYED_EVALUATION: sum(g.replays for g in graphs if isinstance(g, Replays)),
            EVALUATION_FEED: sum(entry.what == evaluation_feed.WHAT for entry in entries),
            FORWARD_PIECES: seen.watched,
            DECODED_ONCE: session._decoded is not None and session._decoded.memory.recalled_here,
        }
        assert {*in_use} == {*RUN_TRICKS}
        return {name for name, times in in_use.items() if times}, settings.out

    return run


def test_all_of_them_are_in_use(used, capsys):
    assert used()[0] == {*RUN_TRICKS}
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("trick", RUN_TRICKS)
def test_one_that_is_left_out_is_not_used_and_all_others_are(used, capsys, trick):
    others = {*RUN_TRICKS} - {trick, *NEEDED_BY.get(trick, ())}
    in_use, folder = used(trick)
    assert in_use == others
    assert f"left out: {trick}\n" in capsys.readouterr().err
    assert load_plan(folder / "plan.toml").execution.without == (trick,)


def test_those_of_a_plan_file_and_of_the_command_line_are_both_left_out(used):
    in_use, folder = used(REPLAYED_LOSS, SHORT_STEP, in_file=[EARLY_ITEM])
    assert in_use == {*RUN_TRICKS} - {REPLAYED_LOSS, SHORT_STEP, EARLY_ITEM}
    assert load_plan(folder / "plan.toml").execution.without == (EARLY_ITEM, REPLAYED_LOSS, SHORT_STEP)


def test_a_run_that_is_replayed_leaves_out_what_it_left_out_and_more(used):
    _, folder = used(SHORT_STEP)
    assert used(as_in=folder)[0] == {*RUN_TRICKS} - {SHORT_STEP}
    assert used(EARLY_ITEM, as_in=folder)[0] == {*RUN_TRICKS} - {SHORT_STEP, EARLY_ITEM}


@pytest.mark.parametrize(("page", "tricks"), [("script", RUN_TRICKS), ("plan", STEP_TRICKS)])
def test_the_docs_have_a_line_for_each(page, tricks):
    text = (Path(__file__).parents[2] / f"docs/{page}.md").read_text()
    assert [name for name, what in tricks.items() if f"| `{name}` | {what} |\n" not in text] == []


def test_all_of_them_can_be_left_out(used):
    assert used(*TRICKS)[0] == set()


def test_those_of_steps_leave_the_others_as_they_are(used):
    assert used(*STEP_TRICKS)[0] == {*RUN_TRICKS}


@pytest.mark.parametrize("without", [[], [REWIRED_LAYERS], [COUNTED_NORMS]], ids=["none", "layers", "norms"])
def test_calls_obey_the_names_of_steps_too(without):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    call = CapturedCall(None, encoder, torch.device("cpu"), SimpleNamespace(make_recorder=None), without=without)
    assert (call._rewiring is None) == (REWIRED_LAYERS in without)
    assert call._counts_norms == (COUNTED_NORMS not in without)


@pytest.mark.parametrize("waits", [False, True])
def test_a_loss_waits_only_where_that_trick_is_left_out(used, monkeypatch, waits):
    found, put = [], LossReplay.put
    monkeypatch.setattr(
        LossReplay, "put", lambda self, **how: put(self, **how) or found.append(F.cross_entropy.__wrapped__)
    )
    own = F.cross_entropy
    used(*([LOSS_WITHOUT_WAITING] if waits else []))
    assert (own in found) == waits
    assert (rewiring.cross_entropy in found) != waits
