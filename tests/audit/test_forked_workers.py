"""What a script forks has nothing of hotlap in its way: its workers cost what they cost without it."""

import linecache
import multiprocessing
import os
import traceback

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hotlap.script import running
from hotlap.script.patches import Patches
from hotlap.script.session import CALLS, Session, Settings

OWN_CALL, OWN_ITEM = nn.Module.__call__, torch.Tensor.item
EPOCHS = 3


class Looking(Dataset):
    """Tells of the process that it is asked in: whether torch's functions are its own, and how deep the stack is."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        is_own = nn.Module.__call__ is OWN_CALL and torch.Tensor.item is OWN_ITEM
        shown = traceback.format_stack()
        ours = [one for one in shown if f'"{running.HOTLAP}' in one]
        return index, is_own, len(shown), sum(len(one.splitlines()) > 1 for one in ours)


def trained(workers, at_begin=lambda: None):
    """All batches of a small training, and how many workers there are at the beginning and the end of each epoch."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Looking(), batch_size=1, num_workers=workers)
    batches, alive = [], []
    for _ in range(EPOCHS):
        alive.append(len(multiprocessing.active_children()))
        for batch in loader:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            at_begin()
            batches.append([int(part) for part in batch])
        alive.append(len(multiprocessing.active_children()))
    return batches, alive


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    return Session(Settings(name="test", out=tmp_path / "run"))


def test_a_process_that_is_forked_has_none_of_the_patches_and_its_parent_has_all():
    patches, others, kept = Patches(), Patches(), Patches(in_forks=True)
    kept.put(torch, "save", lambda own: lambda *args: own(*args))
    saves = torch.save
    patches.put(torch.Tensor, "item", lambda own: lambda self: 1)
    others.put(torch.Tensor, "item", lambda own: lambda self: 1 + own(self))
    others.put(nn.Module, "__call__", lambda own: lambda self, *args: own(self, *args))
    child = os.fork()
    if not child:
        is_own = torch.Tensor.item is OWN_ITEM and nn.Module.__call__ is OWN_CALL and "item" not in vars(torch.Tensor)
        is_kept = torch.save is saves
        for one in (patches, others):
            one.take_out_all()  # which are out already
        os._exit(not (is_own and is_kept and torch.Tensor.item is OWN_ITEM))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.zeros(()).item() == 2
    for one in (patches, others, kept):
        one.take_out_all()
    assert torch.Tensor.item is OWN_ITEM


def test_workers_call_torchs_own_functions_while_the_training_is_watched(session):
    watched = []
    with session:
        batches, _ = trained(1, lambda: watched.append(session._patches.has(CALLS)))
    assert any(watched)
    assert all(is_own for _, is_own, _, _ in batches)


def test_the_stack_of_a_worker_has_one_more_frame_and_it_does_not_show_its_source(session):
    deep = {depth for _, _, depth, _ in trained(1)[0]}
    with session:
        batches, _ = trained(1)
    assert {depth - 1 for _, _, depth, _ in batches} == deep
    assert not any(shown for _, _, _, shown in batches)


def test_workers_are_gone_at_the_end_of_an_epoch_as_without_hotlap(session):
    _, alone = trained(2)
    with session:
        _, watched = trained(2)
    assert watched == alone == [0] * 2 * EPOCHS


def test_source_that_is_not_shown_for_a_while_is_shown_afterwards():
    undo = running.without_text({__file__})
    assert "".join(traceback.format_stack(limit=1)).count("\n") == 1
    undo()
    assert "format_stack" in "".join(traceback.format_stack(limit=1))
    kept = linecache.cache[__file__]
    undo = running.without_text({__file__})
    undo()
    assert linecache.cache[__file__] is kept


def test_what_a_loader_raises_as_it_begins_is_raised_once_and_is_no_fault_of_hotlap(session, capsys):
    tries = []

    class Broken(DataLoader):
        def _get_iterator(self):
            tries.append(None)
            raise ValueError("no such folder")

    with session, pytest.raises(ValueError, match="no such folder"):
        iter(Broken(Looking()))
    assert len(tries) == 1
    assert "no such folder" not in capsys.readouterr().err
