"""Which modules of a model are repeated."""

import pytest
from torch import nn

from hotlap.engine.blocks import checkpointed_blocks, repeated_blocks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.second(self.first(x))


def test_layers_in_a_row_are_blocks_in_their_order():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 8), encoder, nn.Linear(8, 2))) == list(encoder.layers)


def test_what_is_repeated_inside_a_block_is_not_taken_for_the_blocks():
    blocks = [Block(4) for _ in range(3)]
    assert repeated_blocks(nn.Sequential(*blocks)) == blocks


def test_of_several_rows_the_heaviest_counts():
    small, large = [Block(2) for _ in range(4)], [Block(16) for _ in range(2)]
    assert repeated_blocks(nn.ModuleDict({"a": nn.ModuleList(small), "b": nn.ModuleList(large)})) == large


def test_neighbours_of_other_shapes_do_not_belong_to_a_row():
    row = [Block(8), Block(4), Block(8)]
    assert repeated_blocks(nn.ModuleList(row)) == [row[0], row[2]]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.ReLU())])
def test_a_model_that_repeats_nothing_has_none(model):
    assert repeated_blocks(model) == []


class Stage(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.inside = nn.Sequential(*blocks)

    def forward(self, x):
        return self.inside(x)


def test_blocks_of_one_class_are_checkpointed_whatever_their_sizes_and_wherever_they_stand():
    stages = [nn.Sequential(Block(width), Block(width)) for width in (4, 8, 16)]
    blocks = [block for stage in stages for block in stage]
    assert repeated_blocks(nn.Sequential(*stages)) == blocks[4:]
    assert checkpointed_blocks(nn.Sequential(*stages)) == blocks
    # Not the stages, of which there are fewer, and which hold no more.
    assert checkpointed_blocks(nn.Sequential(*(Stage(stage) for stage in stages))) == blocks


def test_layers_in_a_row_are_what_is_checkpointed_and_nothing_inside_them():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert checkpointed_blocks(nn.Sequential(nn.Linear(4, 8), encoder, nn.Linear(8, 2))) == list(encoder.layers)
    assert checkpointed_blocks(nn.Linear(2, 2)) == []
