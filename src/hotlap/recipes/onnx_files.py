"""A trained network as an ONNX file with all that it takes to use it, held against the network itself."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import MachineError, TrainingError
from hotlap.store.files import write_bytes

CLOSE = 1e-4
"""How far a probability of the file may be from the network's."""


class Served(nn.Module):
    """Windows of plain features in, probabilities out: standardised as in training, and after a softmax."""

    mean: Tensor
    spread: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)

    def forward(self, bars: Tensor) -> Tensor:
        """The probability of each class."""
        scores: Tensor = self.network((bars - self.mean) / self.spread)
        return scores.softmax(1)


def write_onnx(
    model: nn.Module,
    example: Tensor,
    path: Path,
    about: Mapping[str, str],
    *,
    names: tuple[str, str] = ("bars", "probabilities"),
    close: float = CLOSE,
) -> float:
    """Write the model with words about it, for batches of any size; the largest difference to the model itself.

    `names` are those of what goes in and of what comes out. Raises TrainingError where the file's answers are not this
    `close` to the model's.
    """
    onnx, runtime = _imported("onnx"), _imported("onnxruntime")
    _imported("onnxscript")
    model = model.eval().cpu()
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (example,),
            input_names=names[:1],
            output_names=names[1:],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    file = program.model_proto
    onnx.helper.set_model_props(file, dict(about))
    content = file.SerializeToString()
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        mine = model(example).numpy()
    (theirs,) = session.run([names[1]], {names[0]: example.numpy()})
    gap = float(np.abs(mine - theirs).max())
    if not gap <= close:
        raise TrainingError(f"the ONNX file answers otherwise than the model, by up to {gap:.2g}; it is not written")
    write_bytes(path, content)
    return gap


@contextlib.contextmanager
def _quiet() -> Any:
    """Inside, the exporter's own words are kept back."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MachineError(f"an ONNX file needs {name}: pip install hotlap[onnx]") from None
