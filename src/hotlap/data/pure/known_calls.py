"""Calls in Python, torch, numpy, Pillow and torchvision that compute a value and do nothing else."""

from __future__ import annotations

import bisect
import builtins
import functools
import math
import operator
import os
import random
import sys
import time
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Types of random generators."""

OWN_GENERATOR = "a generator of its own"
TORCHS = "torch's generator"


@dataclass(frozen=True)
class Known:
    """A call that only computes."""

    name: str
    makes_new: bool = False
    """Whether its result always has new memory."""
    reads_files: bool = False


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- functions ---------------------------------------------------------------------------------------

_BUILTINS = _words("abs bin bool bytes chr complex divmod float format hex int oct ord pow repr round str")
_TORCH_NEW = _words("""
    tensor zeros ones full zeros_like ones_like full_like eye arange linspace logspace stack cat concat hstack vstack
    dstack column_stack add sub mul div true_divide floor_divide remainder fmod pow sqrt rsqrt square exp exp2 log log2
    log10 log1p expm1 sin cos tan asin acos atan atan2 sinh cosh tanh sigmoid abs neg sign floor ceil round trunc frac
    clamp clip maximum minimum where sum mean std var prod max min amax amin argmax argmin norm cumsum cumprod matmul mm
    bmm mv dot outer eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_xor all any sort argsort topk unique bincount histc flip roll rot90 tril triu
    cross gather index_select masked_select take nonzero searchsorted bucketize nan_to_num
    block_diag combinations cdist lerp median mode repeat_interleave tile fft complex angle tril_indices triu_indices
""")
_TORCH_SAME = _words("""
    as_tensor from_numpy asarray einsum meshgrid squeeze unsqueeze reshape flatten ravel permute transpose t movedim
    swapaxes broadcast_to split chunk unbind narrow select view_as_real view_as_complex is_tensor is_floating_point
    is_complex numel get_default_dtype is_storage
""")
_FUNCTIONAL = _words("""
    one_hot pad interpolate normalize relu gelu silu sigmoid tanh softmax log_softmax softplus elu leaky_relu embedding
    linear conv1d conv2d conv3d avg_pool1d avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d
    grid_sample affine_grid unfold fold layer_norm group_norm cosine_similarity
""")
_NUMPY_NEW = _words("""
    array zeros ones full zeros_like ones_like full_like eye identity arange linspace logspace geomspace stack
    concatenate hstack vstack dstack column_stack append insert delete repeat tile pad roll mean std var sum prod
    min max amin amax ptp median percentile quantile argmax argmin argsort sort cumsum cumprod clip where
    nonzero unique bincount histogram digitize searchsorted interp dot matmul inner outer tensordot cross
    nan_to_num round around take copy all any isin allclose array_equal count_nonzero nanmean nanstd nanmin nanmax
    convolve correlate tril triu meshgrid indices average gradient trapezoid
""")
_NUMPY_SAME = _words("""
    asarray ascontiguousarray squeeze expand_dims reshape ravel transpose moveaxis swapaxes flip fliplr flipud rot90
    einsum diff broadcast_to atleast_1d atleast_2d atleast_3d split array_split hsplit vsplit shape ndim size isscalar
    dtype result_type frombuffer
""")
_PATHS = _words("join basename dirname split splitext normpath abspath relpath expanduser fspath")
_PATHS_READ = _words("exists isfile isdir getsize")


@functools.cache
def _table(loaded: frozenset[str]) -> dict[int, Known]:
    """The calls by the id of their functions; `loaded` are the optional packages that are imported."""
    found: dict[int, Known] = {}

    def put(home: Any, names: Iterable[str], prefix: str, **facts: bool) -> None:
        for name in names:
            part = getattr(home, name, None)
            if callable(part):
                found[id(part)] = Known(f"{prefix}{name}", **facts)

    put(builtins, _BUILTINS, "", makes_new=True)
    put(builtins, ("max", "min", "sum"), "")
    put(torch, _TORCH_NEW, "torch.", makes_new=True)
    put(torch, _TORCH_SAME, "torch.")
    put(functional, _FUNCTIONAL, "torch.nn.functional.")
    put(np, _NUMPY_NEW, "numpy.", makes_new=True)
    put(np, _NUMPY_SAME, "numpy.")
    put(np.linalg, ("norm", "inv", "det"), "numpy.linalg.", makes_new=True)
    put(math, [name for name in vars(math) if not name.startswith("_")], "math.", makes_new=True)
    put(bisect, ("bisect", "bisect_left", "bisect_right"), "bisect.", makes_new=True)
    put(operator, ("index", "add", "sub", "mul", "truediv", "neg"), "operator.", makes_new=True)
    put(os.path, _PATHS, "os.path.", makes_new=True)
    put(os.path, _PATHS_READ, "os.path.", makes_new=True, reads_files=True)
    put(time, ("sleep",), "time.", makes_new=True)  # takes time only
    put(np, ("load", "loadtxt", "genfromtxt"), "numpy.", makes_new=True, reads_files=True)
    put(builtins, ("open",), "", makes_new=True, reads_files=True)
    if "PIL.Image" in loaded:
        image = sys.modules["PIL.Image"]
        put(image, ("fromarray", "new", "merge", "blend", "composite"), "PIL.Image.")
        put(image, ("open",), "PIL.Image.", makes_new=True, reads_files=True)
    for name in loaded - {"PIL.Image"}:
        module = sys.modules[name]
        if name == "cv2":
            put(module, ("cvtColor", "resize", "flip", "imdecode", "warpAffine", "GaussianBlur"), "cv2.")
            put(module, ("imread",), "cv2.", makes_new=True, reads_files=True)
        elif name.startswith("torchvision.io"):
            put(module, ("read_image", "decode_image", "decode_jpeg", "decode_png", "read_file"), f"{name}.",
                makes_new=True, reads_files=True)  # fmt: skip
        else:  # every function of these modules computes; random transforms are classes
            put(module, [n for n, f in vars(module).items() if isinstance(f, types.FunctionType)], f"{name}.")
    return found


_OPTIONAL = (
    "PIL.Image",
    "PIL.ImageOps",
    "cv2",
    "torchvision.io",
    "torchvision.io.image",
    "torchvision.transforms.functional",
    "torchvision.transforms._functional_pil",
    "torchvision.transforms._functional_tensor",
    "torchvision.transforms.v2.functional",
)


def known_call(function: Any) -> Known | None:
    """The entry for a library function; None if it is not known."""
    loaded = frozenset(name for name in _OPTIONAL if name in sys.modules)
    if isinstance(function, np.ufunc):
        return Known(f"numpy.{function.__name__}", makes_new=True)
    return _table(loaded).get(id(function))


_DETERMINISTIC = _words("""
    ToTensor ToImage ToPILImage ToPureTensor PILToTensor ToDtype ConvertImageDtype Normalize Resize CenterCrop Pad
    Grayscale RGB Identity
""")


def is_deterministic(transform: Any) -> bool:
    """Whether an object is a torchvision transform that only computes a picture from a picture and its settings."""
    return computes_pictures(type(transform)) and not getattr(transform, "inplace", False)


def computes_pictures(kind: type) -> bool:
    """Whether objects of a class are such transforms, unless they work in place."""
    return kind.__module__.startswith("torchvision.transforms.") and kind.__name__ in _DETERMINISTIC


# --- methods -----------------------------------------------------------------------------------------

METHODS_NEW = _words("""
    abs add all any amax amin argmax argmin argsort astype bincount ceil clamp clip clone copy cos cumprod
    cumsum diff div dot eq exp flip floor gather index_select isalpha isdigit isnan isnumeric log log10 log1p log2
    lower lstrip matmul max mean median min mm mul ne neg nonzero norm pow prod ptp repeat repeat_interleave replace
    roll round rstrip sigmoid sign sin sqrt square std strip sub sum tanh tile title tolist upper var zfill item
    encode decode join format startswith endswith find rfind index count splitlines casefold
    capitalize bit_length hex tobytes convert rotate filter point quantize getpixel
    getextrema histogram getbands getbbox entropy new_zeros new_ones new_full new_tensor masked_select masked_fill
    logical_and logical_or logical_not bitwise_and bitwise_or remainder fmod trunc frac tril triu
    unique topk cross outer lerp where heaviside nan_to_num is_integer as_integer_ratio
    removeprefix removesuffix center ljust rjust expandtabs translate isspace isupper islower istitle isalnum
    isidentifier ge gt le lt match fullmatch search findall group groups groupdict start end span
    isoformat strftime timestamp weekday total_seconds with_suffix with_name as_posix is_absolute
    """)
"""Methods of numbers, texts, tensors, arrays and pictures whose result has new memory."""

METHODS_SAME = _words("""
    bfloat16 bool byte char chunk conjugate contiguous cpu crop dim diagonal detach double element_size expand expand_as
    flatten float get get_device getchannel half int is_contiguous is_cuda is_floating_point items keys long movedim
    narrow ndimension numel numpy permute ravel real reduce requires_grad reshape reshape_as resize resolve_conj
    resolve_neg select short size split squeeze stride swapaxes swapdims t take to transpose type type_as unbind
    unflatten unfold unsqueeze values view view_as to_dense getdata load close read readline readlines seek tell
    exists is_file __len__ __getitem__ __contains__
    """)
"""Methods whose result may be a view of their object."""

FILE_METHODS = _words("exists is_file is_dir stat read_text read_bytes open iterdir glob")
"""Methods of paths that access files."""

MUTATORS = _words("append extend insert remove pop clear update setdefault add discard sort reverse fill")
"""Methods that write to their object."""

MAY_GIVE_NONE = _words("match fullmatch search group get getbbox")
"""Methods of patterns, matches and pictures that return None if they find nothing."""

_RANDOM_METHODS = _words("""
    random_ normal_ uniform_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ bernoulli multinomial
    """)
DRAWING = _words("""
    random rand randn randint random_sample integers normal standard_normal uniform choice choices sample permutation
    permuted gauss randrange getrandbits betavariate binomial poisson exponential beta gamma bytes triangular
    """)
"""Methods of generators that only draw."""

LEAVES = (
    int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range, np.generic, np.dtype, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""Types of immutable values."""


_LOOKUPS = {("tokenizers", "Tokenizer"): _words("token_to_id id_to_token get_vocab_size")}
"""Methods of classes written in other languages that look a value up, by package and class."""


def is_lookup(owner: Any, name: str) -> bool:
    """Whether a method only looks a value up, so that a proof may call it."""
    kind = type(owner)
    return name in _LOOKUPS.get((str(kind.__module__).partition(".")[0], kind.__name__), ())


_SHOWN = {("tokenizers", "AddedToken")}


def is_shown_whole(value: Any) -> bool:
    """Whether a value of a class written in another language is all that its `repr` shows."""
    kind = type(value)
    return (str(kind.__module__).partition(".")[0], kind.__name__) in _SHOWN


def is_drawn(name: str) -> bool:
    """Whether a method of a tensor draws from torch's generator."""
    return name in _RANDOM_METHODS


_TORCH_RANDOM = _words("""
    rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial
    dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rrelu gumbel_softmax seed manual_seed
    """)


def drawn_from(function: Any) -> str | None:
    """The generator that a function draws from or seeds; None if it is not known to."""
    owner = getattr(function, "__self__", None)
    if owner is torch.default_generator:
        return TORCHS
    if isinstance(owner, GENERATORS):
        if owner is getattr(random, "_inst", None):
            return "Python's random"
        return "numpy.random" if owner is np.random.mtrand._rand else OWN_GENERATOR
    name = getattr(function, "__name__", "")
    home = str(getattr(function, "__module__", "") or "")
    if name in _TORCH_RANDOM and any(function is getattr(home, name, None) for home in (torch, functional)):
        return TORCHS
    if home.startswith("numpy.random"):
        return "numpy.random"
    if home == "random":
        return "Python's random"
    return None


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a plain tensor, not of a subclass."""
    return type(value) in (Tensor, torch.nn.Parameter)


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether a module is Python's own or an installed one: those do not change while a script runs."""
    root = (module or "builtins").partition(".")[0]
    if root == "__main__":
        return False
    if root in sys.stdlib_module_names:
        return True
    file = str(getattr(sys.modules.get(root), "__file__", "") or "")
    return "site-packages" in file or "dist-packages" in file
