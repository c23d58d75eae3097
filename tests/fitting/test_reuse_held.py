"""A training whose functions or modules hold other values is another one, for the cache and for a resume."""

import pytest
import torch
from plain import class_data, parameters_of, small_mlp
from torch import nn

from hotlap import Job, StoreError, fit


class Net(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.inner, self.k = small_mlp(), k

    def forward(self, x):
        return self.inner(x) * self.k


def job(k, kind):
    model = Net(k if kind == "model" else 1.0)
    rate = k if kind == "closure" else 1.0
    return Job(
        model=model,
        data=class_data(),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        prepare=lambda b: (b[0] * rate, b[1]),
        batch_size=8,
        epochs=1,
        device="cpu",
    )


@pytest.mark.parametrize("kind", ["closure", "model"])
def test_a_model_trained_with_another_value_is_not_handed_back(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))

    def trained(k, out):
        return fit(job(k, kind), out=tmp_path / out, reuse=True, progress=False)

    first, other, again = trained(1.0, "a"), trained(3.0, "b"), trained(1.0, "c")
    assert "trained before" not in other.stopped
    assert not torch.equal(parameters_of(first.model), parameters_of(other.model))
    assert "trained before" in again.stopped
    assert torch.equal(parameters_of(first.model), parameters_of(again.model))


def test_a_resume_with_another_value_is_refused_with_the_line(tmp_path):
    fit(job(1.0, "closure"), out=tmp_path / "run", progress=False)
    with pytest.raises(StoreError, match=r"prepare: what it holds differs \(rate was 1\.0, is 3\.0\)"):
        fit(job(3.0, "closure"), resume=tmp_path / "run", progress=False)
    assert fit(job(1.0, "closure"), resume=tmp_path / "run", progress=False).updates
