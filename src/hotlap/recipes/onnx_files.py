"""A trained network as an ONNX file that describes its inputs, compared with the network's own answers."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import MachineError, TrainingError, first_line
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
    example: Tensor | tuple[Tensor, ...],
    path: Path,
    about: Mapping[str, str],
    *,
    names: tuple[str, ...] = ("bars", "probabilities"),
    axes: tuple[str, ...] = ("batch",),
    close: float = CLOSE,
) -> float:
    """Write the model with words about it, for inputs of any size; the largest difference to the model itself.

    `names` are those of what goes in and, as the last, of what comes out; `axes` those of the first axes of all that
    goes in, which may be of any size. Raises TrainingError where there is no such file of this model, or the file's
    answers, to the example and to half of it along each of the axes, are not this `close` to the model's.
    """
    onnx, runtime = libraries()
    model = model.eval().cpu()
    given = example if isinstance(example, tuple) else (example,)
    sizes = {at: torch.export.Dim(name) for at, name in enumerate(axes)}
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                model,
                given,
                input_names=names[:-1],
                output_names=names[-1:],
                dynamic_shapes=tuple(sizes for _ in given),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # of an exporter that fails in many ways, at models of others
            raise TrainingError(
                f"torch {torch.__version__} cannot write this model as an ONNX file: {first_line(error)}; do without "
                f"--onnx: the model itself is in {path.parent}"
            ) from error
    assert program is not None
    file = program.model_proto
    onnx.helper.set_model_props(file, dict(about))
    content = file.SerializeToString()
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    half = tuple(part[tuple(slice((size + 1) // 2) for size in part.shape[: len(axes)])] for part in given)
    gap = max(_gap(model, session, names, parts) for parts in (given, half))
    if not gap <= close:
        raise TrainingError(f"the ONNX file answers otherwise than the model, by up to {gap:.2g}; it is not written")
    write_bytes(path, content)
    return gap


def libraries() -> tuple[Any, Any]:
    """Those that write an ONNX file and try it; MachineError where one of them is missing."""
    _imported("onnxscript")
    return _imported("onnx"), _imported("onnxruntime")


def _gap(model: nn.Module, session: Any, names: Sequence[str], given: Sequence[Tensor]) -> float:
    """The largest difference between the answers of a model and of its file."""
    with torch.no_grad():
        mine = model(*given).numpy()
    (theirs,) = session.run([names[-1]], {name: part.numpy() for name, part in zip(names[:-1], given, strict=True)})
    return float(np.abs(mine - theirs).max())


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
