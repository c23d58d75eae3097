"""On a machine with a GPU, a skipped test here is a failure: what touches CUDA is proven here and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*"))
_skipped: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU that torch can use"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and "tests/gpu" in report.nodeid:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if HAS_GPU and _skipped:
        print(f"\n{len(_skipped)} GPU tests were skipped on a machine with a GPU:", *_skipped, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
