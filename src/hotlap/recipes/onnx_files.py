"""A trained network as an ONNX file that describes its inputs, compared with the network's own answers."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import MachineError, TrainingError, first_line, install
from hotlap.store.files import write_bytes

NAME = "model.onnx"
CLOSE = 1e-4
"""How far a probability of the file may be from the network's."""


@dataclass(frozen=True, kw_only=True)
class OnnxExport:
    """A network to write as an ONNX file, with what describes it."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    """Some inputs, on which hotlap compares the file with the model."""
    about: Mapping[str, str]
    """Words about the file, which it holds."""
    names: tuple[str, ...]
    """The names of the inputs and, as the last, of the output."""
    axes: tuple[str, ...] = ("batch",)
    """The names of the first axes of all inputs, which may be of any size."""
    close: float = CLOSE
    """How far an answer of the file may be from the model's."""


def write_onnx(export: OnnxExport, path: Path) -> float:
    """Write a network as an ONNX file, and give the largest difference between its answers and the network's.

    Raises TrainingError where torch cannot write this network, or where the answers of the file differ too much, to
    the example inputs or to half of them along each of the axes.
    """
    onnx, runtime = libraries()
    model, inputs, names = export.model.eval().cpu(), export.inputs, export.names
    sizes = {at: torch.export.Dim(name) for at, name in enumerate(export.axes)}
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                model,
                inputs,
                input_names=names[:-1],
                output_names=names[-1:],
                dynamic_shapes=tuple(sizes for _ in inputs),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # the exporter fails in many ways, at models of others
            raise TrainingError(
                f"torch {torch.__version__} cannot write this model as an ONNX file: {first_line(error)}; do without "
                f"--onnx: the model itself is in {path.parent}"
            ) from error
    assert program is not None
    file = program.model_proto
    onnx.helper.set_model_props(file, dict(export.about))
    content = file.SerializeToString()
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    half = tuple(part[tuple(slice((size + 1) // 2) for size in part.shape[: len(sizes)])] for part in inputs)
    gap = max(_gap(model, session, names, parts) for parts in (inputs, half))
    if not gap <= export.close:
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
        raise MachineError(f"an ONNX file needs {name}: {install('[onnx]')}") from None
