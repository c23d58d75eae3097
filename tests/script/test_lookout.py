"""What hotlap looks at beside a script that trains."""

import torch

from hotlap.monitor.memory_watch import MIB, Trend
from hotlap.script.lookout import Lookout


def test_memory_that_grew_while_plans_were_tried_is_named_soon_after_and_not_before():
    lines, used = [], 0
    lookout = Lookout(lines.append)
    lookout.begin(torch.device("cpu"))
    lookout._memory.trends = [Trend("RAM", lambda: used, lambda: 2**33)]
    for step in range(60):
        used += 32 * MIB
        line = lookout.memory_line(step, filled_at=None, is_steady=step >= 30, may_watch=False)
        if line is not None:
            break
    lookout.end()
    assert 30 < step < 50
    assert lines == [line]
    assert line.startswith("RAM grows by 32.0 MiB a step")
