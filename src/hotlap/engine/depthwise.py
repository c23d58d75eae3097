"""Depthwise convolutions by kernels that are ready at once, where cuDNN would first have to compile its own.

With channels last, torch leaves these layers to cuDNN. cuDNN compiles kernels for each kind of layer and each batch
size at first use: half a second each on an H200, 12.5 s for a MobileNetV3.

hotlap's kernels are compiled by NVRTC: a tenth of a second for all layers of one size and stride, half a second for all
layers of a network. On an H200, all such layers of an EfficientNet-B0 take 2.8 ms a step with cuDNN or hotlap, and 11
ms with torch's own kernels. Sums are in fp32, always in the same order.

Where hotlap's kernels do not fit, torch's own need no compiling but take longer for a step. They need channels first,
so images are converted before and after.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotlap.core.terminal import logger
from hotlap.core.torch_private import peek_interpreter_stack


def depthwise_kinds(modules: Iterable[nn.Module]) -> int:
    """Number of kinds of depthwise convolutions over images in the modules."""
    layers = (layer for module in modules for layer in module.modules() if isinstance(layer, nn.Conv2d))
    return len(
        {
            (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.dilation)
            for layer in layers
            if layer.groups == layer.in_channels > 1
        }
    )


@contextmanager
def depthwise_directly() -> Iterator[None]:
    """Inside, `torch.nn.functional.conv2d` computes depthwise convolutions without cuDNN."""
    there = vars(F)["conv2d"]

    def conv2d(
        input: Tensor,  # noqa: A002 -- torch's name
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        is_depthwise = groups > 1 and input.dim() == 4 and groups == input.shape[1]
        is_traced = torch.compiler.is_compiling() or peek_interpreter_stack() is not None
        if not is_depthwise or is_traced:
            made: Tensor = there(input, weight, bias, stride, padding, dilation, groups)
            return made
        is_last = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
        if is_last and input.is_cuda:
            ours = convolved(input, weight, bias, stride, padding, dilation)
            if ours is not None:
                return ours
        made = there(_first(input), _first(weight), bias, stride, padding, dilation, groups)
        return _Turned.apply(made, torch.channels_last) if is_last else made  # type: ignore[no-untyped-call]

    F.conv2d = conv2d  # type: ignore[assignment]
    try:
        yield
    finally:
        F.conv2d = there


def _first(tensor: Tensor) -> Tensor:
    """The tensor with channels first, by its strides too if a dimension of 1 leaves them open.

    torch chooses between cuDNN and its own kernels by the strides of images and weights.
    """
    turned: Tensor = _Turned.apply(tensor, torch.contiguous_format)  # type: ignore[no-untyped-call]
    return turned.view(-1).view(tensor.shape)


class _Turned(torch.autograd.Function):
    """A tensor in a memory format. Its gradient gets the format in which the tensor came."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
        is_last = tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        ctx.before = torch.channels_last if is_last else torch.contiguous_format
        made = tensor.contiguous(memory_format=memory_format)
        # Autograd does not let activations change a view of a tensor that was made in here.
        return made.view_as(tensor) if made is tensor else made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.contiguous(memory_format=ctx.before), None


# --- hotlap's kernels ----------------------------------------------------------------------------------


log = logger(__name__)

NAMES = ("depthwise_forward", "depthwise_input_gradient", "depthwise_weight_gradient")
SOURCE = files("hotlap.engine").joinpath("depthwise.cu")
BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 15}
"""Number formats, as the kernels' macro `BITS` has them."""
SIZES = range(2, 8)
STRIDES = (1, 2)
THREADS = 128
"""Threads of a block."""
MOST_THREADS, MOST_PARTS = 2**18, 2**22
"""Limits for the gradient of a weight: useful threads, and numbers to add up afterwards."""


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> Tensor | None:
    """The depthwise convolution of images in channels last; None if there is no kernel for it."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    step, pad, apart = _same(stride), _same(padding), _same(dilation)
    size = weight.shape[-1]
    fits = (
        weight.shape == (x.shape[1], 1, size, size)
        and (size in SIZES and step in STRIDES and apart == 1 and pad is not None and pad < size)
        and x.dtype == weight.dtype in BITS
        and x.shape[1] % _lanes(x) == 0
        and 0 < x.numel() < 2**31
        and min(_out(x.shape[2], size, step, pad), _out(x.shape[3], size, step, pad)) > 0
    )
    if not fits or _kernels(x.device, x.dtype, size, step) is None:
        return None
    made: Tensor = _Convolved.apply(x, weight, bias, step, pad)  # type: ignore[no-untyped-call]
    return made


def compile_kernels(modules: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels that these modules need in parallel: one after the other would take several times as long."""
    layers = {layer for module in modules for layer in module.modules() if isinstance(layer, nn.Conv2d)}
    depthwise = [layer for layer in layers if layer.groups == layer.in_channels == layer.out_channels > 1]
    kinds = {(layer.kernel_size[0], layer.stride[0]) for layer in depthwise}
    known = sorted(kind for kind in kinds if kind[0] in SIZES and kind[1] in STRIDES)
    if known:
        capability = torch.cuda.get_device_capability(device)
        with (
            suppress(Exception),
            ThreadPoolExecutor(len(known)) as threads,
        ):  # failures are reported later
            list(threads.map(lambda kind: _compiled(capability, BITS[dtype], *kind), known))


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.pad, ctx.bias_dtype = stride, pad, None if bias is None else bias.dtype
        return _forward(x, _by_tap(weight), bias, stride, pad, weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, pad, size = ctx.stride, ctx.pad, weight.shape[-1]
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a second backward pass may go through this one
            steps, pads, mask = [stride] * 2, [pad] * 2, [needs[0], needs[1], False]
            made = torch.ops.aten.convolution_backward(
                grad, x, weight, None, steps, pads, [1, 1], False, [0, 0], x.shape[1], mask
            )
            grad_x, grad_weight = made[:2]
        else:
            grad = grad.contiguous(memory_format=torch.channels_last)
            grad_x = _input_gradient(grad, x, weight, stride, pad) if needs[0] else None
            grad_weight = _weight_gradient(grad, x, stride, pad, size).to(weight.dtype) if needs[1] else None
        grad_bias = grad.sum((0, 2, 3), dtype=torch.float32).to(ctx.bias_dtype) if needs[2] else None
        return grad_x, grad_weight, grad_bias, None, None


def _forward(x: Tensor, taps: Tensor, bias: Tensor | None, stride: int, pad: int, size: int) -> Tensor:
    n, channels, height, width = x.shape
    out_height, out_width = _out(height, size, stride, pad), _out(width, size, stride, pad)
    out = _images(x, (n, channels, out_height, out_width))
    start = torch.zeros(channels, device=x.device) if bias is None else bias.float()
    count = n * out_height * -(-out_width // 4) * (channels // _lanes(x))
    given = [_aligned(x), taps, start, out, count, height, width, channels, out_height, out_width, pad]
    _launch("depthwise_forward", x, size, stride, count, given)
    return out


def _input_gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
    taps, size = _by_tap(weight), weight.shape[-1]
    if stride == 1:  # this is a convolution with flipped weights
        return _forward(grad, taps.flip(0), None, 1, size - 1 - pad, size)
    n, channels, height, width = x.shape
    out = _images(x, x.shape)
    count = n * height * width * (channels // _lanes(x))
    given = [_aligned(grad), taps, out, count, height, width, channels, *grad.shape[2:], pad]
    _launch("depthwise_input_gradient", x, size, stride, count, given)
    return out


def _weight_gradient(grad: Tensor, x: Tensor, stride: int, pad: int, size: int) -> Tensor:
    n, channels, height, width = x.shape
    lines, each = n * grad.shape[2], channels // _lanes(x) * size
    parts = max(1, min(lines, MOST_THREADS // each, MOST_PARTS // (size * size * channels)))
    made = torch.empty(parts, size * size, channels, device=x.device)
    given = [_aligned(x), _aligned(grad), made, parts, lines, height, width, channels, *grad.shape[2:], pad]
    _launch("depthwise_weight_gradient", x, size, stride, each * parts, given)
    return made.sum(0).t().reshape(channels, 1, size, size)


def _launch(name: str, x: Tensor, size: int, stride: int, count: int, given: list[Any]) -> None:
    kernels = _kernels(x.device, x.dtype, size, stride)
    assert kernels is not None  # otherwise `convolved` would have returned None
    with torch.cuda.device(x.device):
        kernels[name](grid=(-(-count // THREADS), 1, 1), block=(THREADS, 1, 1), args=given)


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype, size: int, stride: int) -> dict[str, Any] | None:
    """The three kernels; None if they cannot be loaded, for example since this torch has no NVRTC."""
    try:
        from hotlap.core.torch_private import cuda_load_module

        with torch.cuda.device(device):
            compiled = _compiled(torch.cuda.get_device_capability(device), BITS[dtype], size, stride)
            module = cuda_load_module(compiled)
            return {name: getattr(module, name) for name in NAMES}
    except Exception as error:  # drivers and other versions of torch raise anything
        log.info("no kernels for depthwise convolutions: %s", error)
        return None


@functools.cache
def _compiled(capability: tuple[int, int], bits: int, size: int, stride: int) -> bytes:
    """The compiled kernels for a device. torch's helper imports setuptools first, which takes longer than compiling."""
    from hotlap.core.torch_private import nvrtc_library

    nvrtc, program, length = nvrtc_library(), ctypes.c_void_p(), ctypes.c_size_t()

    def ask(name: str, *given: Any) -> None:
        if getattr(nvrtc, name)(*given) != 0:
            raise RuntimeError(f"{name} failed")

    source = f"#define BITS {bits}\n#define K {size}\n#define STRIDE {stride}\n{SOURCE.read_text()}"
    ask("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"depthwise.cu", 0, None, None)
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode())
        ask("nvrtcCompileProgram", program, 1, options)
        ask("nvrtcGetCUBINSize", program, ctypes.byref(length))
        made = ctypes.create_string_buffer(length.value)
        ask("nvrtcGetCUBIN", program, made)
        return made.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _by_tap(weight: Tensor) -> Tensor:
    """Weights as the kernels read them, in fp32: the channels of one position side by side."""
    return weight.flatten(1).t().float().contiguous()


def _images(like: Tensor, shape: Any) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=like.dtype, memory_format=torch.channels_last)


def _aligned(images: Tensor) -> Tensor:
    """The images at an address where 16 bytes can be read at once."""
    return images if images.data_ptr() % 16 == 0 else images.clone(memory_format=torch.channels_last)


def _lanes(x: Tensor) -> int:
    return 16 // x.element_size()


def _out(length: int, size: int, stride: int, pad: int) -> int:
    return (length + 2 * pad - size) // stride + 1


def _same(value: Any) -> int | None:
    """The one number for height and width; None if there are two, or a name."""
    if isinstance(value, int):
        return value
    return value[0] if isinstance(value, (tuple, list)) and len(set(value)) == 1 and isinstance(value[0], int) else None
