"""hotlap's kernels for depthwise convolutions, compiled for the processor, where one thread runs after the other."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotlap.engine import depthwise as depthwise_kernels
from hotlap.engine.depthwise import BITS, NAMES, THREADS, compile_kernels, convolved

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")

CUDA = """
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static struct { int x; } blockIdx, blockDim, threadIdx;
"""
"""What the kernels need of CUDA."""
LAUNCH = """
extern "C" void at(int block, int threads, int thread) {
  blockIdx.x = block; blockDim.x = threads; threadIdx.x = thread;
}
"""


class OneAfterTheOther:
    """A kernel whose threads run after each other."""

    def __init__(self, library, name):
        self.kernel, self.at = getattr(library, name), library.at

    def __call__(self, grid, block, args):
        given = [ctypes.c_void_p(one.data_ptr()) if torch.is_tensor(one) else ctypes.c_int(one) for one in args]
        for number in range(grid[0]):
            for thread in range(block[0]):
                self.at(number, block[0], thread)
                self.kernel(*given)


@pytest.fixture
def on_the_processor(monkeypatch, tmp_path):
    """The kernels come from g++, and are noted by their names as they are launched."""
    launched = []

    def kernels(device, dtype, size, stride):
        source, library = tmp_path / "kernels.cpp", tmp_path / f"{BITS[dtype]}-{size}-{stride}.so"
        defined = f"#define BITS {BITS[dtype]}\n#define K {size}\n#define STRIDE {stride}\n"
        cuda = Path(depthwise_kernels.__file__).with_name("depthwise.cu").read_text()
        source.write_text(defined + CUDA + cuda + LAUNCH)
        if not library.exists():
            subprocess.run(
                [COMPILER, "-fno-strict-aliasing", "-shared", "-fPIC", "-w", "-o", library, source], check=True
            )
        found = {name: OneAfterTheOther(ctypes.CDLL(str(library)), name) for name in NAMES}
        return {name: lambda name=name, **given: (launched.append(name), found[name](**given)) for name in NAMES}

    class Anywhere:
        def __init__(self, device):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *raised):
            pass

    monkeypatch.setattr(depthwise_kernels, "_kernels", kernels)
    monkeypatch.setattr(torch.cuda, "device", Anywhere)
    monkeypatch.setattr(depthwise_kernels, "MOST_THREADS", 4 * THREADS)  # some lines for each thread
    return launched


def made_and_gradients(given, ways, convolve):
    made = convolve(*given)
    return made, *torch.autograd.grad(made, given, ways.to(made.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("size", "stride", "pad"), [(3, 1, 1), (3, 2, 1), (5, 2, 2), (7, 1, 3), (4, 1, 0), (2, 2, 0)])
def test_outputs_and_gradients_are_those_of_torch(on_the_processor, dtype, size, stride, pad):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 9, 7).to(memory_format=torch.channels_last)
    shapes = ((16, 1, size, size), (16,))
    given = [one.to(dtype).requires_grad_() for one in (x, *(torch.randn(shape) for shape in shapes))]
    exact = [one.detach().double().requires_grad_() for one in given]
    ways = torch.randn(F.conv2d(*exact, stride, pad, 1, 16).shape)
    found = made_and_gradients(given, ways, lambda x, w, b: convolved(x, w, b, (stride, stride), [pad, pad], (1, 1)))
    truth = made_and_gradients(exact, ways, lambda x, w, b: F.conv2d(x, w, b, stride, pad, 1, 16))
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == dtype
        assert (
            float((one - other).detach().abs().max() / other.detach().abs().max()) < {32: 1e-6, 16: 6e-3}[BITS[dtype]]
        )
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert len(set(on_the_processor)) == (2 if stride == 1 else 3), "with a stride of 1 a gradient is a convolution too"


def test_under_autocast_and_without_a_bias_it_is_what_torch_makes(on_the_processor):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last),
        torch.randn(8, 1, 3, 3, requires_grad=True),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made, truth = convolved(x, weight, None, 1, 1, 1), F.conv2d(x, weight, None, 1, 1, 1, 8)
    assert made.dtype == truth.dtype == torch.bfloat16
    torch.testing.assert_close(made, truth, rtol=2e-2, atol=2e-2)
    (grad,) = torch.autograd.grad(made.float().sum(), weight)
    assert grad.dtype == weight.dtype


def test_gradients_of_gradients_are_those_of_torch(on_the_processor):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(8, 1, 3, 3, requires_grad=True)

    def penalty(made):
        (grad,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, weight])

    truth = penalty(F.conv2d(x, weight, None, 1, 1, 1, 8))
    torch.testing.assert_close(penalty(convolved(x, weight, None, 1, 1, 1)), truth, rtol=1e-3, atol=1e-3)


def test_all_kinds_of_layers_are_compiled_once_and_what_has_no_kernel_is_not(monkeypatch):
    asked = []
    monkeypatch.setattr(depthwise_kernels, "_compiled", lambda *kind: asked.append(kind))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    sizes = [(3, 1), (3, 1), (5, 2), (9, 1), (3, 3)]
    layers = [nn.Conv2d(8, 8, size, stride, groups=8) for size, stride in sizes]
    others = [nn.Conv2d(8, 8, 3), nn.Conv2d(8, 16, 3, groups=8), nn.Linear(8, 8)]
    compile_kernels([nn.Sequential(*layers), nn.Sequential(*others)], torch.device("cuda"), torch.bfloat16)
    assert sorted(asked) == [((9, 0), 16, 3, 1), ((9, 0), 16, 5, 2)]


REFUSED = {
    "channels that are no multiple of what a thread has": {"channels": 6},
    "a wide stride": {"stride": 3},
    "two strides": {"stride": (1, 2)},
    "padding by name": {"padding": "same"},
    "more padding than kernel": {"padding": 3},
    "apart": {"dilation": 2},
    "several outputs a channel": {"outputs": 2},
    "a large kernel": {"size": (9, 9)},
    "two sizes": {"size": (3, 5)},
    "other numbers": {"dtype": torch.float64},
    "no room": {"size": (7, 7), "padding": 0},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_there_is_no_kernel_for_is_left_to_torch(on_the_processor, case):
    given = {
        "channels": 8,
        "stride": 1,
        "padding": 1,
        "dilation": 1,
        "outputs": 1,
        "size": (3, 3),
        "dtype": torch.float32,
    }
    given |= REFUSED[case]
    x = torch.randn(2, given["channels"], 6, 6, dtype=given["dtype"]).to(memory_format=torch.channels_last)
    weight = torch.randn(given["channels"] * given["outputs"], 1, *given["size"], dtype=given["dtype"])
    assert convolved(x, weight, None, given["stride"], given["padding"], given["dilation"]) is None
    assert on_the_processor == []
