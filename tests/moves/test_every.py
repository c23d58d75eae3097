"""Moves: each proposes what it is named for, and all together never ask for what the rig cannot obey."""

import pytest
import torch
from plain import class_data, parameters_of, plain_loop, small_mlp, twins
from torch import nn

from hotlap import Job, Plan, Rig, fit
from hotlap.moves.every import MOVES, everything


def rig_for(model=None, data=None, optimizer=None, plan=None):
    rig = Rig(
        model or small_mlp(), optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01)), nn.CrossEntropyLoss(), plan=plan
    )
    rig.feed(data if data is not None else class_data(50), batch_size=8, epochs=1)
    return rig


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_a_move_proposes_a_change_or_says_why_there_is_none(move):
    rig = rig_for()
    proposed = move.propose(rig.plan, rig)
    if isinstance(proposed, str):
        assert proposed
    else:
        assert rig.plan.changes(proposed)
        again = move.propose(proposed, rig)
        assert isinstance(again, str), "made once, there is nothing left to change"


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_a_move_leaves_alone_what_is_not_its_own(move):
    rig = rig_for()
    proposed = move.propose(Plan().but(micro_batch=4), rig)
    if not isinstance(proposed, str):
        assert proposed.memory.micro_batch == 4


def test_names_are_their_own_and_kinds_are_known():
    assert len({move.name for move in MOVES}) == len(MOVES)
    assert {move.kind for move in MOVES} <= {"A", "B"}


def test_everything_is_a_plan_that_can_be_obeyed_and_the_rest_has_reasons():
    rig = rig_for()
    found = everything(rig)
    assert rig.supports(found.plan) is None
    assert found.plan.feed.kind == "resident"
    assert found.plan.numerics.optimizer == "fused"
    assert found.plan.execution.mode == "eager"  # there is no GPU in this test
    assert len(found.made) + len(found.not_made) == len(MOVES)
    assert all(reason for _, reason in found.not_made)


def test_an_optimizer_and_data_that_cannot_are_left_as_they_are():
    class Drawing(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return torch.rand(5, dtype=torch.float64), index % 3

    rig = rig_for(data=Drawing(), optimizer=lambda p: torch.optim.RMSprop(p, lr=0.01))
    found = everything(rig)
    assert found.plan.feed.kind == "loader"
    assert found.plan.numerics.optimizer == "plain"
    reasons = {move.name: reason for move, reason in found.not_made}
    assert "no fused kernel" in reasons["fused optimizer"]
    assert "draws" in reasons["data held on the device"]


def test_fit_with_everything_on_trains_and_writes_down_what_could_not_be(tmp_path):
    mine, theirs = twins(small_mlp())
    data = class_data(50)
    job = Job(
        model=mine,
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(mine.parameters(), lr=0.1),
        batch_size=8,
        epochs=2,
        device="cpu",
    )
    run = fit(job, plan="max", out=tmp_path / "run", progress=False)
    assert run.plan.feed.kind == "resident"
    entries = [entry for entry in run.ledger if entry.outcome == "not tried"]
    assert any("captured" in entry.what and "GPU" in entry.why for entry in entries)
    plain_loop(
        theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), nn.CrossEntropyLoss(), data, batch=8, epochs=2,
        precision=run.plan.numerics.precision,
    )  # fmt: skip
    torch.testing.assert_close(parameters_of(mine), parameters_of(theirs), rtol=1e-2, atol=1e-3)


def test_fit_with_everything_off_is_as_the_job_describes_it(tmp_path):
    def job():
        model = small_mlp()
        return Job(
            model=model,
            data=class_data(20),
            loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            batch_size=8,
            epochs=1,
            device="cpu",
        )

    off = fit(job(), plan="off", out=tmp_path / "off", progress=False)
    none = fit(job(), out=tmp_path / "none", progress=False)
    assert off.plan == none.plan
    assert [entry.what for entry in off.ledger] == [entry.what for entry in none.ledger]
    assert torch.equal(parameters_of(off.model), parameters_of(none.model))
