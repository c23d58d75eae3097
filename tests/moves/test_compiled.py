"""The move to torch's compiler: what it proposes, and what it says that takes."""

import torch
from plain import class_data, small_mlp
from torch import nn

from hotlap import Plan, Rig
from hotlap.core.ledger import Ledger
from hotlap.moves import compiled, every
from hotlap.moves.compiled import MOVE
from hotlap.moves.every import everything
from hotlap.script.find.finder import Loop
from hotlap.script.training import ScriptTraining


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + torch.relu(self.norm(self.layer(x)))


def deep(blocks=6):
    return nn.Sequential(nn.Linear(5, 8), *[Block() for _ in range(blocks)], nn.Linear(8, 3))


def rig_for(model):
    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), device="cpu")
    rig.feed(class_data(50, dtype=torch.float32), batch_size=8, epochs=1)
    return rig


def test_a_model_of_repeated_blocks_is_compiled_by_them_and_any_other_as_a_whole():
    assert MOVE.propose(Plan(), rig_for(deep())) == Plan().but(compile="blocks")
    assert MOVE.propose(Plan(), rig_for(small_mlp(dtype=torch.float32))) == Plan().but(compile="model")
    few = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)], *[nn.Tanh() for _ in range(9)])
    assert MOVE.propose(Plan(), rig_for(few)) == Plan().but(compile="model")
    single = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])
    assert MOVE.propose(Plan(), rig_for(single)) == Plan().but(compile="model")


def test_it_builds_upon_a_captured_plan_and_is_made_once():
    rig = rig_for(deep())
    captured = Plan().but(mode="captured", kind="resident", replay_steps=8)
    proposed = MOVE.propose(captured, rig)
    assert proposed == captured.but(compile="blocks")
    assert MOVE.propose(proposed, rig) == "it is compiled already"


def test_it_is_never_among_the_moves_that_are_tried_together():
    assert MOVE in every.OTHERS
    assert MOVE not in every.MOVES
    assert everything(rig_for(deep())).plan.execution.compile == "no"


def test_what_it_takes_grows_with_what_is_compiled_and_blocks_count_once():
    few, many = rig_for(deep(2)), rig_for(deep(20))
    blocks, model = Plan().but(compile="blocks"), Plan().but(compile="model")
    start, layer = compiled.START_S["cpu"], compiled.LAYER_S["cpu"]
    assert MOVE.setup_s(blocks, few) == MOVE.setup_s(blocks, many) == start + 2 * layer
    assert MOVE.setup_s(model, few) == start + 6 * layer
    assert MOVE.setup_s(model, many) == start + 42 * layer
    assert MOVE.setup_s(blocks, few) > 10


def test_a_script_refuses_it_with_a_reason():
    model = deep()
    loop = Loop(optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], modules=[model], loaders=[])
    script = ScriptTraining(loop, [], Ledger())
    proposed = MOVE.propose(script.plan, script)
    assert proposed == script.plan.but(compile="blocks")
    assert script.supports(proposed) == "the script's own calls are not compiled"
    assert script.supports(script.plan) is None
    nothing = ScriptTraining(Loop(optimizers=loop.optimizers, modules=[], loaders=[]), [], Ledger())
    assert MOVE.propose(nothing.plan, nothing) == "there is no model to compile"
