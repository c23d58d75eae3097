"""Moves: each proposes what it is named for, and all together never ask for what the rig cannot obey."""

from types import SimpleNamespace

import pytest
import torch
from plain import class_data, parameters_of, plain_loop, small_mlp, twins
from torch import nn

from hotlap import Job, Plan, Rig, fit, moves
from hotlap.core.errors import PlanError
from hotlap.core.ledger import Ledger
from hotlap.core.tricks import MOVE_WORDS
from hotlap.machine import DtypeFact, Support
from hotlap.monitor.bound import BOUNDS
from hotlap.moves import COMPILED, DEPTHWISE, LAYOUT, LEFT_OUT, MOVES, OTHERS, PRECISION, everything
from hotlap.script.loop_finder import Loop
from hotlap.script.training import ScriptTraining


def rig_for(model=None, data=None, optimizer=None, plan=None):
    rig = Rig(
        model or small_mlp(), optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01)), nn.CrossEntropyLoss(), plan=plan
    )
    rig.feed(data if data is not None else class_data(50), batch_size=8, epochs=1)
    return rig


@pytest.mark.parametrize("move", [*MOVES, *OTHERS], ids=lambda move: move.name)
def test_a_move_proposes_a_change_or_says_why_there_is_none(move):
    rig = rig_for()
    proposed = move.propose(rig.plan, rig)
    if isinstance(proposed, str):
        assert proposed
    else:
        assert rig.plan.changes(proposed)
        again = move.propose(proposed, rig)
        assert isinstance(again, str), "made once, there is nothing left to change"


@pytest.mark.parametrize("move", [*MOVES, *OTHERS], ids=lambda move: move.name)
def test_a_move_leaves_alone_what_is_not_its_own(move):
    rig = rig_for()
    proposed = move.propose(Plan().but(micro_batch=4), rig)
    if not isinstance(proposed, str):
        assert proposed.memory.micro_batch == 4


def test_names_are_their_own_and_kinds_are_known():
    known = (*MOVES, *OTHERS)
    assert len({move.name for move in known}) == len(known)
    assert {move.kind for move in known} <= {"A", "B"}
    assert {move.feeds for move in known} <= {"", "held", "fetched"}
    assert {move.at_a_glance for move in known} <= {"", "needed", "stays"}
    assert set().union(*(move.helps for move in known)) <= set(BOUNDS)


@pytest.mark.parametrize("move", [*MOVES, *OTHERS], ids=lambda move: move.name)
def test_a_move_that_brings_batches_says_so_and_changes_the_feed_alone(move):
    rig = rig_for()
    proposed = move.propose(rig.plan, rig)
    if not isinstance(proposed, str):
        assert (proposed.feed != rig.plan.feed) == bool(move.feeds)


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


# --- torch.compile ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + torch.relu(self.norm(self.layer(x)))


def deep(blocks=6):
    return nn.Sequential(nn.Linear(5, 8), *[Block() for _ in range(blocks)], nn.Linear(8, 3))


def rig_of(model):
    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), device="cpu")
    rig.feed(class_data(50, dtype=torch.float32), batch_size=8, epochs=1)
    return rig


def test_a_model_of_repeated_blocks_is_compiled_by_them_and_any_other_as_a_whole():
    assert COMPILED.propose(Plan(), rig_of(deep())) == Plan().but(compile="blocks")
    assert COMPILED.propose(Plan(), rig_of(small_mlp(dtype=torch.float32))) == Plan().but(compile="model")
    few = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)], *[nn.Tanh() for _ in range(9)])
    assert COMPILED.propose(Plan(), rig_of(few)) == Plan().but(compile="model")
    single = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])
    assert COMPILED.propose(Plan(), rig_of(single)) == Plan().but(compile="model")


def test_it_builds_upon_a_captured_plan_and_is_made_once():
    rig = rig_of(deep())
    captured = Plan().but(mode="captured", kind="resident", replay_steps=8)
    proposed = COMPILED.propose(captured, rig)
    assert proposed == captured.but(compile="blocks")
    assert COMPILED.propose(proposed, rig) == "the model is compiled already"


def test_it_is_never_among_the_moves_that_are_tried_together():
    assert COMPILED in OTHERS
    assert COMPILED not in MOVES
    assert everything(rig_of(deep())).plan.execution.compile == "no"


def test_what_it_takes_grows_with_what_is_compiled_and_blocks_count_once():
    few, many = rig_of(deep(2)), rig_of(deep(20))
    blocks, model = Plan().but(compile="blocks"), Plan().but(compile="model")
    start, layer = moves.COMPILER_S["cpu"], moves.LAYER_S["cpu"]
    assert COMPILED.setup_s(blocks, few) == COMPILED.setup_s(blocks, many) == start + 2 * layer
    assert COMPILED.setup_s(model, few) == start + 6 * layer
    assert COMPILED.setup_s(model, many) == start + 42 * layer
    assert COMPILED.setup_s(blocks, few) > 10


def test_a_script_refuses_it_with_a_reason():
    model = deep()
    loop = Loop(optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], modules=[model], loaders=[])
    script = ScriptTraining(loop, [], Ledger())
    proposed = COMPILED.propose(script.plan, script)
    assert proposed == script.plan.but(compile="blocks")
    assert script.supports(proposed) == "hotlap does not compile the calls of a script"
    assert script.supports(script.plan) is None
    nothing = ScriptTraining(Loop(optimizers=loop.optimizers, modules=[], loaders=[]), [], Ledger())
    assert COMPILED.propose(nothing.plan, nothing) == "there is no model to compile"


# --- depthwise convolutions ------------------------------------------------------------------------


def separable(*kernels):
    """Layers as MobileNet has them: each channel by itself, then all of them together."""
    layers = [(nn.Conv2d(8, 8, kernel, groups=8, padding=1), nn.Conv2d(8, 8, 1)) for kernel in kernels]
    return nn.Sequential(*(one for pair in layers for one in pair))


def training(model, device="cuda"):
    return SimpleNamespace(device=torch.device(device), modules=[model])


@pytest.fixture
def has_bf16(monkeypatch):
    fact = DtypeFact(support=Support.HARDWARE, reason="", kernel="ran")
    monkeypatch.setattr("hotlap.machine.dtype_fact", lambda device, name: fact)


@pytest.mark.parametrize("move", [PRECISION, LAYOUT], ids=["16 bits", "channels last"])
def test_nothing_waits_for_cudnn_to_compile_them(move, has_bf16):
    found = move.propose(Plan(), training(separable(3, 5)))
    assert found.numerics.depthwise == "direct"
    assert move.setup_s(found, training(separable(3, 5))) == move.setup_s(found, training(nn.Conv2d(3, 8, 3)))


@pytest.mark.parametrize("move", [PRECISION, LAYOUT], ids=["16 bits", "channels last"])
def test_other_networks_and_devices_are_left_to_torchs_choice(move, has_bf16):
    assert move.propose(Plan(), training(nn.Conv2d(3, 8, 3))).numerics.depthwise == "library"
    assert move.propose(Plan(), training(separable(3), "cpu")).numerics.depthwise == "library"


def test_cudnn_comes_later_and_says_what_compiling_takes():
    plan = Plan().but(layout="channels_last", depthwise="direct")
    found = DEPTHWISE.propose(plan, training(separable(3, 3, 5)))
    assert found == plan.but(depthwise="library")
    assert DEPTHWISE.setup_s(found, training(separable(3, 3, 5))) == 2 * moves.DEPTHWISE_S
    assert isinstance(DEPTHWISE.propose(Plan(), training(separable(3))), str)


def test_everything_at_once_takes_cudnn_whatever_compiling_takes(has_bf16):
    rig = training(separable(3))
    rig.supports, rig.plan = lambda plan: None, Plan()
    known = [PRECISION, LAYOUT]
    assert everything(rig, Plan(), known).plan.numerics.depthwise == "direct"
    assert everything(rig, Plan(), [*known, DEPTHWISE]).plan.numerics.depthwise == "library"


def test_each_move_has_a_short_name_of_its_own():
    assert sorted(move.word for move in (*MOVES, *OTHERS)) == sorted(MOVE_WORDS)


@pytest.mark.parametrize("move", [*MOVES, *OTHERS], ids=lambda move: move.word)
def test_a_move_is_left_out_where_the_plan_names_it(move):
    rig = rig_of(small_mlp(dtype=torch.float32))
    others = [one.word for one in (*MOVES, *OTHERS) if one is not move]
    assert move.proposed(Plan().but(without=[move.word]), rig) == LEFT_OUT
    assert move.proposed(Plan().but(without=others), rig) != LEFT_OUT
    everything_else = everything(rig, Plan().but(without=[move.word]), [move])
    assert everything_else.made == ()
    assert everything_else.not_made == ((move, LEFT_OUT),)


def test_fit_leaves_moves_out_whatever_chooses_the_plan(tmp_path):
    def plans(**settings):
        torch.manual_seed(1)
        model = small_mlp()
        job = Job(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
            loss=nn.CrossEntropyLoss(),
            data=class_data(64),
            batch_size=8,
            epochs=2,
        )
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return fit(job, out=out, progress=False, **settings)

    assert plans(plan="max").plan.numerics.optimizer == "fused"
    for plan in ("max", "auto", "off", {"precision": "fp32"}):
        run = plans(plan=plan, without=["fused"])
        assert run.plan.execution.without == ("fused",)
        assert run.plan.numerics.optimizer == "plain"
    run = plans(plan="max", without=["fused"])
    assert next(entry.why for entry in run.ledger if entry.what == "fused optimizer") == LEFT_OUT
    for wrong in ("fused", ["fuse"]):
        with pytest.raises(PlanError, match=r"execution\.without"):
            plans(without=wrong)
