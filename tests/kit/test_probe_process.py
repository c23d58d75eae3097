"""A script under a plan for the length of a look: its own with one change, and whether it was obeyed."""

import pytest
import torch

from hotlap.core.plan import Feed, Numerics, Plan
from hotlap.kit import probe_process as kit
from hotlap.kit.probe import ProbeRequest
from hotlap.store.files import load_plan

OWN = Plan(feed=Feed(kind="loader", workers=2), numerics=Numerics(optimizer="fused"))


class Serving:
    def __init__(self):
        self.feed, self.waiting, self.other = OWN.feed, False, None

    def why_other(self, feed):
        return self.other


class Training:
    """A training that was found in a script, and refuses what it is told to."""

    def __init__(self, device="cpu"):
        self.own, self.device, self.given_up = OWN, torch.device(device), None
        self.proxies, self.modules, self.refusals = [Serving()], [], {}

    def supports(self, plan):
        return self.refusals.get(plan.feed.kind) or self.refusals.get(plan.numerics.precision)


class Session:
    is_tuning = True

    def so_far(self):
        return ["", "hotlap failed: it fell"]


@pytest.fixture
def under(tmp_path):
    """A script that obeys a asked, once its training is found."""

    def make(training=None, **asked):
        one = kit.PlanProbe("mine", ProbeRequest(**asked), tmp_path)
        one._session = Session()
        if training is not None:
            load_plan(one._named(training))
            training.proxies[0].feed = one._plan.feed
        return one

    return make


def steps(one, count):
    for _ in range(count):
        one.stepped()


@pytest.mark.parametrize(
    ("asked", "plan"),
    [({"feed": "gather"}, OWN.with_feed(Feed(kind="gather"))), ({"precision": "bf16"}, OWN.but(precision="bf16"))],
)
def test_the_plan_is_the_scripts_own_but_for_what_is_wished(under, tmp_path, asked, plan):
    under(Training(), **asked)
    assert load_plan(tmp_path / "plan.toml") == plan


def test_what_is_refused_is_told_for_every_feed_and_the_script_keeps_its_own_plan(under, tmp_path):
    training = Training()
    training.refusals = {"gather": "no rows", "resident": "no room"}
    one = under(training, feed="gather")
    assert one.refused == {"gather": "no rows", "resident": "no room"}
    assert one.why_given_up() == one.why_not_probed() == "no rows"
    assert load_plan(tmp_path / "plan.toml") == OWN


@pytest.mark.parametrize(("device", "settles"), [("cpu", kit.SETTLES), ("cuda", kit.SETTLES + kit.WATCHED_STEPS)])
def test_laps_begin_once_the_feed_is_in_force_and_nothing_else_takes_time(under, device, settles):
    training = Training(device)
    one = under(training, feed="gather")
    training.proxies[0].waiting = True
    steps(one, 1 + settles)
    one.gave(100.0)  # by the loader before
    assert not one.has_settled
    assert one.start_s is None
    training.proxies[0].waiting = False
    one.gave(2.0)
    one.gave(100.0)
    assert 2.0 < one.start_s < 100.0
    steps(one, settles - 1)
    assert not one.has_settled
    steps(one, 1)
    assert one.has_settled
    assert one.why_not_probed() is None


def settled(under, training, **asked):
    one = under(training, **asked)
    steps(one, 1 + kit.SETTLES)
    return one


def test_it_is_read_back_whether_the_plan_was_obeyed(under):
    training = Training()
    one = settled(under, training, feed="gather")
    training.proxies[0].other = "a batch has other values"
    assert one.why_not_probed() == "a batch has other values"
    training.proxies[0].feed = OWN.feed
    assert one.why_not_probed() == "its batches still come by its own loader"
    one._session.is_tuning = False
    assert one.why_given_up() == one.why_not_probed() == "hotlap failed: it fell"


def test_a_precision_that_only_calls_show_to_be_the_scripts_own_is_told(under):
    training = Training()
    one = settled(under, training, precision="bf16")
    assert one.why_not_probed() is None
    training.given_up = "it fell back"
    assert one.why_not_probed() == "it fell back"
    training.refusals["bf16"] = "the script uses autocast itself"
    assert one.why_given_up() is None
    assert one.why_not_probed() == "the script uses autocast itself"


def test_a_loop_that_is_not_found_is_not_waited_for(under):
    one = under(feed="gather")
    one._session.is_tuning = False
    steps(one, kit.MOST_UNFOUND - 1)
    assert one.why_given_up() is None
    assert one.why_not_probed() == "the script ended before it ran under the plan"
    steps(one, 1)
    assert one.why_given_up() == "hotlap does not find its training loop"


def test_modules_are_cast_here_while_operations_are_looked_at(under):
    training, layer = Training(), torch.nn.Linear(2, 2)
    seen = []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    inner = torch.nn.Sequential(layer)
    training.modules = [inner]
    under(training, precision="bf16").cast_here()
    assert inner(torch.ones(1, 2)).dtype is torch.float32
    assert seen == [torch.bfloat16]
