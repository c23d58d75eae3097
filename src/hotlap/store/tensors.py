"""Tensors as safetensors files: written in pieces, and read only if the whole file is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hotlap.core.errors import StoreError, first_line
from hotlap.store.disk import Piece

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
MOST_HEADER_BYTES = 100_000_000
"""The safetensors format allows no longer header."""
AT_ONCE_BYTES = 16 * 1024 * 1024
"""Bytes of small device tensors that one copy brings to the host."""
TOGETHER = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
"""Dtypes that are copied together: not every device can concatenate the others."""


def tensor_pieces(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> Iterator[Piece]:
    """The bytes of a safetensors file, tensor by tensor, without a second copy of all tensors.

    The library can write a file or one block of bytes; hotlap needs pieces, to hash them while it writes.
    """
    header: dict[str, object] = {"__metadata__": dict(about)} if about else {}
    # Wide elements first, as the library does, so that every tensor is aligned for mapping.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    start = 0
    for name, tensor in ordered:
        why = why_not_stored(tensor)
        if name == "__metadata__":
            why = "a name that safetensors reserves"
        if why:
            raise StoreError(f"{name} has {why}")
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:
        raise StoreError(f"{len(ordered):,} tensors are too many for one safetensors file")
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield flat.numpy().data


def copied_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies in host memory; small tensors share a copy, since each copy waits for the device."""
    found: dict[str, Tensor] = {}
    for names in _copy_groups(tensors):
        if len(names) == 1:
            copied = tensors[names[0]].detach().to("cpu", copy=True)
            found[names[0]] = copied.contiguous() if copied.layout is torch.strided else copied
            continue
        parts = [tensors[name].detach() for name in names]
        flat = torch.cat([part.reshape(-1) for part in parts]).cpu()
        for name, part, values in zip(names, parts, torch.split(flat, [p.numel() for p in parts]), strict=True):
            found[name] = values.view(part.shape)
    return {name: found[name] for name in tensors}


def _copy_groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Groups of tensor names for one copy each: same device and dtype, and at most `AT_ONCE_BYTES`."""
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        is_there = tensor.device.type != "cpu" and tensor.layout is torch.strided
        if not is_there or tensor.dtype not in TOGETHER or size >= AT_ONCE_BYTES:
            yield [name]
            continue
        kind = tensor.device, tensor.dtype
        if sizes.get(kind, 0) + size > AT_ONCE_BYTES:
            yield groups.pop(kind)
            sizes[kind] = 0
        groups.setdefault(kind, []).append(name)
        sizes[kind] = sizes.get(kind, 0) + size
    yield from groups.values()


def why_not_stored(tensor: Tensor) -> str | None:
    """Why safetensors cannot hold a tensor; None if it can."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return f"the layout {'of the meta device' if tensor.is_meta else tensor.layout}, which safetensors cannot hold"
    return None if tensor.dtype in NAMES else f"dtype {tensor.dtype}, which safetensors cannot hold"


def tensors_from(content: bytes, name: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file; StoreError if it is anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise StoreError(f"{name} is {file_kind(content)}: {first_line(error)}") from None


def file_kind(content: bytes) -> str:
    """What kind of file this is instead of safetensors."""
    if content[:2] == b"PK":
        return "a zip, as torch.save writes them, not safetensors; hotlap never opens files that can hold code"
    if content[:1] == b"\x80" or b"\x80\x02" in content[:64] or content[:2] in (b"(d", b"(l", b"c_"):
        return "a pickle, which can run code when opened, not safetensors"
    return "not a valid safetensors file"
