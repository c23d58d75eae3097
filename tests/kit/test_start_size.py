"""The catalogue's figures are those that its command counts, and each of its examples can be made."""

import dataclasses

import pytest
from benchmarks.kit.examples import EXAMPLES, bytes_a_sample

from hotlap.kit import start_size as catalogue

SMALL = [one for one in catalogue.EXAMPLES if one.parameters < 6e5]


def test_every_example_is_made_by_the_command_and_every_kind_has_some():
    assert [one.name for one in catalogue.EXAMPLES] == list(EXAMPLES)
    assert {one.kind for one in catalogue.EXAMPLES} == set(catalogue.UNITS)


@pytest.mark.parametrize("example", SMALL, ids=lambda one: one.name)
def test_what_a_sample_takes_is_counted_anew(example):
    make, few = EXAMPLES[example.name]
    model = make()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(example.parameters, rel=0.01)
    assert bytes_a_sample(model, example, few) == pytest.approx(example.bytes_a_sample, rel=0.02)


def test_a_sequence_takes_as_much_as_it_is_long():
    make, few = EXAMPLES["LSTM 2×128, both ways"]
    example = next(one for one in SMALL if one.kind == catalogue.RECURRENT)
    longer = dataclasses.replace(example, size=80)
    assert bytes_a_sample(make(), longer, few) == pytest.approx(example.bytes_at(80), rel=0.05)
