"""Weights as safetensors files: plain PyTorch can load them, and hotlap reads untrusted ones safely."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode

from hotlap.core.errors import HotlapError, StoreError, shown
from hotlap.core.terminal import logger
from hotlap.core.units import MIB, show_bytes
from hotlap.store.files import read_text, write_atomically
from hotlap.store.tensors import copied_to_host, tensor_pieces, tensors_from

log = logger(__name__)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside of data-parallel and torch.compile wrappers."""
    while True:
        # By class, not by name: a model may have a part called `module`.
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state without wrappers: a separate CPU tensor for each name."""
    state: dict[str, Any] = unwrapped(model).state_dict()
    left_out = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if left_out:
        log.warning("hotlap saves tensors only and left out: %s; load with strict=False", ", ".join(left_out))
    # Tied weights are one tensor with two names; separate copies load into either form.
    return copied_to_host({name: value for name, value in state.items() if isinstance(value, Tensor)})


def save_weights(model: nn.Module, path: Path, about: dict[str, str] | None = None) -> None:
    """Write the model's state; `load_state_dict(safetensors.torch.load_file(path))` reads it back."""
    save_state(plain_state(model), path, about)


def save_state(state: Mapping[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    """Write a model's state from the CPU: a separate tensor for each name."""

    # Not by the library: the order of its metadata changes from time to time.
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(tensor_pieces(state, about))

    write_atomically(path, write)


def load_weights_into(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Copy stored weights into a model; StoreError lists what does not fit."""
    mine = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    wrong = [f"{name} is missing in the file" for name in mine if name not in stored]
    wrong += [f"{name if len(name) <= 60 else shown(name)} is not in the model" for name in stored if name not in mine]
    wrong += [
        f"{name} is {tuple(stored[name].shape)} in the file and {tuple(value.shape)} in the model"
        for name, value in mine.items()
        if name in stored and stored[name].shape != value.shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise StoreError(f"the weights do not fit the model: {'; '.join(wrong[:4])}{more}")
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(stored[name])


MODEL = "model.safetensors"
INDEX = f"{MODEL}.index.json"
MOST_BEYOND = 4
"""A model may be so many times larger than its stored weights, since tied weights count several times."""
MOST_HEADER_BYTES = 100_000_000
"""The limit of the format; a header holds names and shapes only."""

_CONVERT = (
    "if you trust where it comes from, turn it into safetensors yourself: "
    "torch.load(path, weights_only=True), then safetensors.torch.save_file"
)
_PICKLES = "a pickle, which can run code when it is opened"
_KINDS: tuple[tuple[bytes, str], ...] = (
    (b"PK", "a zip, as torch.save, Keras and numpy write them, which can hold a pickle"),
    (b"\x80", _PICKLES),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes them, which can hold code"),
    (b"\x93NUMPY", "a numpy file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ\x00", "an xz file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a rar archive"),
    (b"GGUF", "a GGUF file, as llama.cpp has them"),
    (b"\x7fELF", "a program"),
    (b"#!", "a script"),
    (b"version https://git-lfs", "a Git LFS pointer, which stands for the weights; fetch them with: git lfs pull"),
    (b"<", "a web page or XML; a download may have gone wrong"),
)
_DRAWS = {"normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_"}
"""Functions that fill a tensor with random numbers; torch's other ones call these. By name, since libraries replace
torch's functions by theirs."""
_OLD_PICKLES = b"(]}cilpSVFILN"
"""First bytes of pickles in the oldest protocols, which are plain text."""


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a folder such as a run or a model of transformers, on the CPU.

    In a folder hotlap reads `model.safetensors`, or the files that `model.safetensors.index.json` lists. It opens
    nothing else: no pickle, no zip, no link. Raises StoreError that names the kind of file and what to do.
    """
    wanted = Path(path)
    if os.path.isdir(wanted):  # noqa: PTH112 - a parent folder without access is reported below
        return {name: value for file in _in_folder(wanted) for name, value in _tensors_in(file).items()}
    return _tensors_in(wanted)


def _tensors_in(wanted: Path) -> dict[str, Tensor]:
    if wanted.name == ".metadata" or wanted.suffix == ".distcp":
        raise StoreError(f"{wanted} is part of a distributed checkpoint, whose metadata is a pickle: {_dcp()}")
    try:
        # Non-blocking: opening a pipe would wait forever for its other end.
        handle = os.open(wanted, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if os.path.islink(wanted):  # noqa: PTH114
            reason = "it is a link; name the file itself"
        raise StoreError(f"cannot read the weights {wanted}: {reason}") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"cannot read the weights {wanted}: it is not a regular file")
        _check_head(file, status.st_size, wanted)
        try:
            file.seek(0)
            return tensors_from(file.read(), str(wanted))
        except MemoryError:
            size = show_bytes(status.st_size)
            raise StoreError(f"{wanted} has {size}, which do not fit in memory") from None
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read the weights {wanted}: {error.strerror or error}") from None


def build_with_weights(make: Callable[[], nn.Module], path: str | Path) -> nn.Module:
    """The model from `make` with the weights of a file; hotlap skips the random initialisation, which takes seconds.

    Raises StoreError, before it allocates memory, if the model is many times larger than its weights.
    """
    weights = load_weights(path)
    size, held = bytes_of(make), sum(weight.numel() * weight.element_size() for weight in weights.values())
    if size > MOST_BEYOND * held + MIB:
        raise StoreError(f"{path} has {show_bytes(held)} of weights, but its model would need {show_bytes(size)}")
    with _SkipRandomInit():
        model = make()
    load_weights_into(unwrapped(model), weights)
    return model


def bytes_of(make: Callable[[], nn.Module]) -> int:
    """Size in bytes of the model from `make`, without allocating its tensors; 0 if that is not possible."""
    try:
        with torch.device("meta"):
            model = make()
    except HotlapError:
        raise
    except Exception:  # a model whose constructor looks at values
        return 0
    return sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))


class _SkipRandomInit(TorchFunctionMode):
    """Inside, functions that fill parameters with random numbers do nothing."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        if getattr(function, "__name__", None) in _DRAWS and isinstance(filled, nn.Parameter):
            return filled
        return function(*args, **kwargs)


def describe_file(head: bytes) -> str:
    """The kind of a file by its first 512 bytes, and what to do about it."""
    if head[257:262] == b"ustar":
        return f"a tar archive, which can hold a pickle; {_CONVERT}"
    for magic, kind in _KINDS:
        if head.startswith(magic):
            if magic == b"\x93NUMPY" and b"O'" in head[:128]:
                return f"a numpy file of Python objects, which is {_PICKLES}"
            return f"{kind}; {_CONVERT}" if "pickle" in kind else kind
    if head[:1] and head[0] in _OLD_PICKLES and b"\n" in head:
        return f"it looks like {_PICKLES}; {_CONVERT}"
    return "it does not begin like a safetensors file"


def _check_head(file: BinaryIO, size: int, path: Path) -> None:
    """Check the first bytes before anything is parsed."""
    head = file.read(512)
    length = int.from_bytes(head[:8], "little")
    if size >= 10 and 2 <= length <= size - 8 and head[8:9] == b"{":
        if length > MOST_HEADER_BYTES:
            raise StoreError(f"{path} has a header of {length:,} bytes; hotlap reads at most {MOST_HEADER_BYTES:,}")
        return
    if not size:
        raise StoreError(f"{path} is not safetensors: it is empty")
    if head[8:9] == b"{":
        raise StoreError(f"{path} is not a complete safetensors file: header of {length:,} bytes, file of {size:,}")
    raise StoreError(f"{path} is not safetensors: {describe_file(head)}")


def _in_folder(folder: Path) -> list[Path]:
    if (folder / MODEL).is_file() or (folder / MODEL).is_symlink():
        return [folder / MODEL]
    if (folder / INDEX).is_file():
        return _listed(folder / INDEX)
    try:
        here = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror or error}") from None
    if ".metadata" in here or any(name.endswith(".distcp") for name in here):
        raise StoreError(f"{folder} is a distributed checkpoint, whose metadata is a pickle: {_dcp()}")
    if "plan.toml" in here or "checkpoints" in here:
        raise StoreError(f"{folder} has no {MODEL}: its training has not ended; go on with: hotlap resume {folder}")
    raise StoreError(f"{folder} has no {MODEL}")


def _listed(index: Path) -> list[Path]:
    """The files that an index lists; only safetensors files beside it are allowed."""
    try:
        names = dict.fromkeys(json.loads(read_text(index))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StoreError(f"{index} is not an index of safetensors files; save the model again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise StoreError(f"{index} lists {shown(name)}; it may only list .safetensors files beside it")
    if not names:
        raise StoreError(f"{index} lists no files; save the model again")
    return [index.parent / name for name in names]


def _dcp() -> str:
    return "turn it into a plain file with torch.distributed.checkpoint.format_utils, if you trust it, then safetensors"
