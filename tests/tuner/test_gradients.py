"""How far outcomes are apart: the same wherever it is computed."""

import pytest
import torch

from hotlap.tuner import agreement
from hotlap.tuner.agreement import brought_near, gaps_between, whole


def parts(seed, **more):
    torch.manual_seed(seed)
    return {"first": torch.randn(30, 20), "second": torch.randn(7).double(), "third": torch.randn(5).bfloat16(), **more}


def test_gaps_are_those_of_plain_vectors():
    truth, made = parts(0), parts(1)
    gaps = gaps_between(truth, made)
    for name, gap in gaps.items():
        mine, theirs = truth[name].double(), made[name].double()
        assert gap.size == pytest.approx(float(mine.norm()), rel=1e-5)
        assert gap.other == pytest.approx(float(theirs.norm()), rel=1e-5)
        assert gap.error == pytest.approx(float((mine - theirs).norm()), rel=1e-5)
        assert gap.count == mine.numel()
    assert list(gaps) == list(truth)
    assert whole(gaps).size == pytest.approx(sum(float(t.double().norm()) ** 2 for t in truth.values()) ** 0.5)


def test_what_is_missing_is_nothing():
    gaps = gaps_between(parts(0), parts(1, fourth=torch.ones(4)))
    assert (gaps["fourth"].size, gaps["fourth"].other) == (0.0, 2.0)
    assert gaps_between({}, {}) == {}


def test_little_and_large_tensors_come_to_the_same(monkeypatch):
    truth, made = parts(0), parts(1)
    found = gaps_between(truth, made)
    monkeypatch.setattr(agreement, "LITTLE", 0)
    assert gaps_between(truth, made) == found


def test_what_is_little_is_copied_to_the_host_and_what_is_not_stays():
    little = {"weight": torch.ones(3, requires_grad=True)}
    ((weight,),) = (parts.values() for parts in brought_near(little))
    assert not weight.requires_grad
    half = torch.empty(agreement.LITTLE // 2 + 1, dtype=torch.uint8, device="meta")
    for several in ([{"one": half, "two": half}], [{"one": half}, {"one": half}]):  # large together
        assert all(tensor.device.type == "meta" for parts in brought_near(*several) for tensor in parts.values())
