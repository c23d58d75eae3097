"""Backward passes in the thread of the script."""

import threading

import pytest
import torch

from hotlap.script.update.updates import BackwardThread


@pytest.mark.parametrize("was", [True, False])
def test_it_is_as_it_was_in_the_end(was):
    torch._C._set_multithreading_enabled(was)
    try:
        backwards = BackwardThread()
        backwards.use(here=False)
        assert torch._C._is_multithreading_enabled() == was
        for _ in range(2):
            backwards.use(here=True)
            assert not torch._C._is_multithreading_enabled()
        for _ in range(2):
            backwards.use(here=False)
            assert torch._C._is_multithreading_enabled() == was
    finally:
        torch._C._set_multithreading_enabled(True)


def test_other_threads_are_left_alone():
    backwards = BackwardThread()
    backwards.use(here=True)
    try:
        found = []
        thread = threading.Thread(target=lambda: found.append(torch._C._is_multithreading_enabled()))
        thread.start()
        thread.join()
        assert found == [True]
    finally:
        backwards.use(here=False)
