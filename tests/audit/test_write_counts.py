"""Batches count as many writes as those of the script's own loader, whoever makes them."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from hotlap.core.plan import Feed
from hotlap.data.sources import tensors_in
from hotlap.script.feed.loader_proxy import LoaderProxy

ORIGINAL = DataLoader.__iter__


def stacks(rows):
    return tuple(map(torch.stack, zip(*rows, strict=True)))


def writes(rows):
    x, y = stacks(rows)
    return {"x": x.mul_(2).add_(1), "more": [y]}


def as_lists(rows):
    return [x.tolist() for x, _ in rows]


def counts(batches):
    return [[tensor._version for tensor in tensors_in(batch)] for batch in batches]


def served_and_own(collate):
    """The batches of a worker of hotlap's, and those of the script's own loader, which has none."""
    data = TensorDataset(torch.randn(12, 3), torch.arange(12))
    loader = DataLoader(data, batch_size=4, collate_fn=collate)
    wanted = list(ORIGINAL(loader))
    proxy = LoaderProxy(loader, device=torch.device("cpu"), original_iter=ORIGINAL)
    proxy.on_fault = pytest.fail
    proxy.use(Feed(kind="loader", workers=1))
    seen = list(proxy.iterate())
    proxy.close()
    return seen, wanted


@pytest.mark.parametrize("collate", [stacks, writes, default_collate])
def test_a_collate_function_in_a_worker_counts_the_writes_that_it_counts_in_the_script(collate):
    seen, wanted = served_and_own(collate)
    assert counts(seen) == counts(wanted)
    assert [type(one) for one in seen] == [type(one) for one in wanted]
    for one, other in zip(seen, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors_in(one), tensors_in(other), strict=True))


def test_batches_without_tensors_come_from_a_worker_as_they_are():
    seen, wanted = served_and_own(as_lists)
    assert seen == wanted
