"""Every private name of torch's modules that hotlap uses, looked up here and nowhere else.

torch promises nothing about these names. Where one is missing, hotlap imports all the same. Only using it raises
MachineError, in one line: which torch, which name, what needs it, and what to do.

Names in torch's compiler are looked up at each use, since importing it takes seconds: import them inside functions.
Attributes of torch's objects, such as `tensor._version`, are used where they are needed.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from hotlap.core.errors import TESTED_TORCH, MachineError, first_line

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Probe:
    """One private name of torch."""

    path: str
    """The module, a colon, and the name in it."""
    needed_by: str
    cuda: bool = False
    """Whether torch has it only if built with CUDA."""
    optional: bool = False
    """Whether hotlap does without where it is missing."""

    @property
    def name(self) -> str:
        """The name as code writes it."""
        return self.path.replace(":", ".")

    @property
    def lacks_cuda(self) -> bool:
        """Whether no build of torch without CUDA, as this one is, has it."""
        return self.cuda and not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]

    def found(self) -> Any:
        """What torch has by this name; if nothing, a class that raises MachineError where it is used."""
        try:
            return pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError) as error:
            return _Missing(self.name, (), {"problem": self._problem(error)})

    def _problem(self, error: Exception) -> str:
        version, why = torch.__version__, ""
        if self.lacks_cuda:
            return f"torch {version} has no CUDA, which {self.needed_by} need: install a build with CUDA"
        if isinstance(error, ImportError):
            why = f" ({first_line(error)})"
        cure = f"pip install 'torch=={TESTED_TORCH[-1]}.*', or use --plan off"
        return f"torch {version} has no {self.name}{why}, which {self.needed_by} need: {cure}"


class _Missing(type):
    """The kind of what stands for a missing name. It can be inherited from and compared, and else raises."""

    problem: str

    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        raise MachineError(cls.problem)

    __call__ = __bool__ = __iter__ = __len__ = __getitem__ = __contains__ = _refuse
    __instancecheck__ = __subclasscheck__ = _refuse

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself asks for these
            raise AttributeError(cls.problem)
        raise MachineError(cls.problem)


PROBES: list[Probe] = []
"""The names looked up when this module is imported."""


def or_none(value: _Found) -> _Found | None:
    """A private part of torch, or None where it is missing."""
    return None if type(value) is _Missing else value


def missing(probes: Sequence[Probe] = PROBES) -> list[Probe]:
    """What hotlap needs and this torch lacks; without CUDA, what needs it is not counted."""
    wanted = [probe for probe in probes if not (probe.optional or probe.lacks_cuda)]
    return [probe for probe in wanted if or_none(probe.found()) is None]


def _find(path: str, needed_by: str, *, cuda: bool = False, optional: bool = False) -> Any:
    PROBES.append(Probe(path, needed_by, cuda, optional))
    return PROBES[-1].found()


def _reader(path: str, needed_by: str) -> Any:
    """A function that reads a name that torch binds anew."""
    value = _find(path, needed_by)
    module, name = path.split(":")
    return value if type(value) is _Missing else partial(getattr, pkgutil.resolve_name(module), name)


_ALL, _LAYERS, _FEEDS = "all trainings", "changes of layers", "changes of loaders"
_CAPTURE, _CALLS, _UPDATES = "captured steps", "captured calls", "captured updates"
_MASKS, _MEASURE, _COMPILING = "choices of attention kernels", "measurements", "compiled plans"

# --- classes -------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch._C import DisableTorchFunction as DisableTorchFunction
    from torch._utils import ExceptionWrapper as ExceptionWrapper
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.conv import _ConvNd
    from torch.nn.modules.dropout import _DropoutNd
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    BatchNormBase = _BatchNorm
    ConvBase = _ConvNd
    DropoutBase = _DropoutNd
    LoaderIterator = _BaseDataLoaderIter
else:
    BatchNormBase = _find("torch.nn.modules.batchnorm:_BatchNorm", _ALL)
    ConvBase = _find("torch.nn.modules.conv:_ConvNd", "choices of precision")
    DropoutBase = _find("torch.nn.modules.dropout:_DropoutNd", "models with dropout")
    LoaderIterator = _find("torch.utils.data.dataloader:_BaseDataLoaderIter", _FEEDS)
    ExceptionWrapper = _find("torch._utils:ExceptionWrapper", "errors of a dataset")
    DeviceContext = _find("torch.utils._device:DeviceContext", "captured evaluations")
    DisableTorchFunction = _find("torch._C:DisableTorchFunction", _MEASURE)
    TorchDispatchMode = _find("torch.utils._python_dispatch:TorchDispatchMode", _MEASURE)

# --- tensors, all at once ------------------------------------------------------------------------------

_Tensors = Sequence[torch.Tensor]
foreach_copy_: Callable[..., None] = _find("torch:_foreach_copy_", _ALL)
foreach_add_: Callable[..., None] = _find("torch:_foreach_add_", "batch norms")
foreach_div_: Callable[..., None] = _find("torch:_foreach_div_", "micro-batches")
foreach_mul: Callable[[_Tensors, float], Sequence[torch.Tensor]] = _find("torch:_foreach_mul", _CALLS)
foreach_norm: Callable[[_Tensors], Sequence[torch.Tensor]] = _find("torch:_foreach_norm", "comparisons of plans")
foreach_sub: Callable[[_Tensors, _Tensors], _Tensors] = _find("torch:_foreach_sub", "comparisons of plans")
foreach_unscale_: Callable[..., None] = _find("torch:_amp_foreach_non_finite_check_and_unscale_", "plans in fp16")
update_scale_: Callable[..., Any] = _find("torch:_amp_update_scale_", "plans in fp16")
tree_leaves: Callable[..., list[Any]] = _find("torch.utils._pytree:tree_leaves", _MEASURE)
storage_use_count: Callable[[int], int] = _find("torch._C:_storage_Use_Count", _CALLS)
loader_signals: Any = _find("torch.utils.data._utils:signal_handling", "workers that die")
pin_memory: Callable[[Any], Any] = _find("torch.utils.data._utils.pin_memory:pin_memory", _FEEDS)

# --- operators -----------------------------------------------------------------------------------------

aten_unsafe_view: Any = _find("torch:ops.aten._unsafe_view", "overlapped gradients")
aten_local_scalar_dense: Any = _find("torch:ops.aten._local_scalar_dense", _CAPTURE)
aten_to_copy: Any = _find("torch:ops.aten._to_copy", _CAPTURE)
aten_flash_attention: Any = _find("torch:ops.aten._scaled_dot_product_flash_attention", _MEASURE)
aten_flash_attention_backward: Any = _find("torch:ops.aten._scaled_dot_product_flash_attention_backward", _MEASURE)

# --- autograd ------------------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = _find("torch._C:_current_graph_task_id", _CALLS)
keeps_graph: Callable[[], bool] = _find("torch._C:_autograd._get_current_graph_task_keep_graph", _CALLS)
top_saved_tensors_hooks: Callable[[bool], Any] = _find("torch._C:_autograd._top_saved_tensors_default_hooks", _CAPTURE)
queue_callback: Callable[[Callable[[], None]], None] = _find(
    "torch.autograd:Variable._execution_engine.queue_callback", _CALLS
)
run_backward: Callable[..., tuple[torch.Tensor | None, ...]] = _find(
    "torch.autograd.graph:_engine_run_backward", "comparisons of plans", optional=True
)
preserve_version_counter: Callable[[tuple[torch.Tensor, ...]], AbstractContextManager[None]] = _find(
    "torch.autograd.grad_mode:_unsafe_preserve_version_counter", "comparisons of plans"
)
set_version_counter: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = _find(
    "torch._C:_autograd._unsafe_set_version_counter", _FEEDS, optional=True
)
forward_ad_level: Callable[[], int] = _reader("torch.autograd.forward_ad:_current_level", "captured evaluations")
set_grad_enabled: Callable[[bool], None] = _find("torch._C:_set_grad_enabled", _UPDATES)
is_multithreading_enabled: Callable[[], bool] = _find("torch._C:_is_multithreading_enabled", _CALLS)
set_multithreading_enabled: Callable[[bool], None] = _find("torch._C:_set_multithreading_enabled", _CALLS)

# --- transforms and modes ------------------------------------------------------------------------------

peek_interpreter_stack: Callable[[], Any] = _find("torch._C:_functorch.peek_interpreter_stack", _LAYERS)
unwrap_if_dead: Callable[[torch.Tensor], torch.Tensor] = _find("torch._C:_functorch.unwrap_if_dead", _CALLS)
dispatch_mode_count: Callable[[], int] = _find("torch._C:_len_torch_dispatch_stack", _LAYERS)
function_mode_count: Callable[[], int] = _find("torch._C:_len_torch_function_stack", _LAYERS)
function_modes: Callable[[], list[Any]] = _find(
    "torch.overrides:_get_current_function_mode_stack", "captured evaluations"
)

# --- modules and optimizers ----------------------------------------------------------------------------

_HOOKS = "checks of hooks"
forward_hooks_of_all: dict[int, Any] = _find("torch.nn.modules.module:_global_forward_hooks", _HOOKS)
forward_pre_hooks_of_all: dict[int, Any] = _find("torch.nn.modules.module:_global_forward_pre_hooks", _HOOKS)
backward_hooks_of_all: dict[int, Any] = _find("torch.nn.modules.module:_global_backward_hooks", _HOOKS)
backward_pre_hooks_of_all: dict[int, Any] = _find("torch.nn.modules.module:_global_backward_pre_hooks", _HOOKS)
HOOKS_OF_ALL = (forward_hooks_of_all, forward_pre_hooks_of_all, backward_hooks_of_all, backward_pre_hooks_of_all)
step_pre_hooks_of_all: dict[int, Any] = _find("torch.optim.optimizer:_global_optimizer_pre_hooks", _HOOKS)
step_post_hooks_of_all: dict[int, Any] = _find("torch.optim.optimizer:_global_optimizer_post_hooks", _HOOKS)
parametrize_cached: Callable[[], int] = _reader("torch.nn.utils.parametrize:_cache_enabled", _CALLS)
CLIP_NORM, CLIP_SCALE = "_get_total_norm", "_clip_grads_with_norm_"
"""The parts of `clip_grad_norm_`, by the names that it looks up in its module."""
CAUSAL_MASK_CHECK = "_detect_is_causal_mask"
"""What encoders call to see whether a mask is causal."""
_find(f"torch.nn.utils.clip_grad:{CLIP_NORM}", "captured clippings", optional=True)
_find(f"torch.nn.utils.clip_grad:{CLIP_SCALE}", "captured clippings", optional=True)
_find(f"torch.nn.modules.transformer:{CAUSAL_MASK_CHECK}", "captured encoders", optional=True)

# --- settings ------------------------------------------------------------------------------------------

get_mkldnn_enabled: Callable[[], bool] = _find("torch._C:_get_mkldnn_enabled", "plans without oneDNN")
set_mkldnn_enabled: Callable[[bool], None] = _find("torch._C:_set_mkldnn_enabled", "plans without oneDNN")
torchs_attention: Any = _find("torch._C:_nn.scaled_dot_product_attention", _MASKS)
attention_choice: Callable[..., int] = _find("torch:_fused_sdp_choice", _MASKS)
attention_order: Callable[[], list[int]] = _find("torch._C:_get_sdp_priority_order", _MASKS)
get_cudnn_attention: Callable[[], bool] = _find("torch._C:_get_cudnn_sdp_enabled", _MASKS)
set_cudnn_attention: Callable[[bool], None] = _find("torch._C:_set_sdp_use_cudnn", _MASKS)
get_fp32_precision: Callable[[str, str], str] = _find(
    "torch._C:_get_fp32_precision_getter", "captured evaluations", optional=True
)
KERNEL_SETTINGS: tuple[Callable[[], Any], ...] = tuple(
    _find(f"torch._C:{name}", "captured evaluations")
    for name in (
        "_get_cudnn_enabled",
        "_get_cudnn_benchmark",
        "_get_cudnn_deterministic",
        "_get_deterministic_algorithms",
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_math_sdp_enabled",
    )
)
"""Functions that read the process's settings for choosing kernels."""
TF32_SETTINGS: tuple[Callable[[], bool], ...] = tuple(
    _find(f"torch._C:{name}", "captured evaluations", optional=True)
    for name in ("_get_cublas_allow_tf32", "_get_cudnn_allow_tf32")
)
"""The same for TF32, where torch has no `get_fp32_precision`."""

# --- CUDA ----------------------------------------------------------------------------------------------

current_raw_stream: Callable[[int], int] = _find("torch._C:_cuda_getCurrentRawStream", _CALLS, cuda=True)
is_stream_capturing: Callable[[], bool] = _find("torch._C:_cuda_isCurrentStreamCapturing", _CALLS, cuda=True)
end_allocate_to_pool: Callable[[int, Any], None] = _find("torch._C:_cuda_endAllocateToPool", _CAPTURE, cuda=True)
clear_cublas_workspaces: Callable[[], None] = _find("torch._C:_cuda_clearCublasWorkspaces", _MEASURE, cuda=True)
cuda_sleep: Callable[[int], None] = _find("torch.cuda:_sleep", _MEASURE, cuda=True)

# --- compilers -----------------------------------------------------------------------------------------

set_code_exec_strategy: Any = _find("torch._C:_dynamo.eval_frame.set_code_exec_strategy", _COMPILING, optional=True)
FrameAction: Any = _find("torch._C:_dynamo.eval_frame._FrameAction", _COMPILING, optional=True)
FrameExecStrategy: Any = _find("torch._C:_dynamo.eval_frame._FrameExecStrategy", _COMPILING, optional=True)
scripted_builtins: Callable[[], dict[int, str]] = _find("torch.jit._builtins:_get_builtin_table", _CALLS, optional=True)
frame_callback: Callable[[], Any] = _find(
    "torch._C:_dynamo.eval_frame.get_eval_frame_callback", _COMPILING, optional=True
)

DYNAMO = "torch._dynamo"
"""The compiler's module. Creating the first optimizer imports it, and so does `torch.compile`."""
COMPILE_WORKERS = "torch._inductor.async_compile"
"""The module that starts processes in which torch compiles."""
COMPILED_MODULE = ("torch._dynamo.eval_frame", "OptimizedModule")
"""The module and the name of the class of a compiled module."""
LATE = {
    "OptimizedModule": Probe(":".join(COMPILED_MODULE), _COMPILING),
    "CompilationHandler": Probe("torch._dynamo.callback:CompilationCallbackHandler", _COMPILING, optional=True),
    "OptimizerVariable": Probe("torch._dynamo.variables.optimizer:OptimizerVariable", _COMPILING, optional=True),
    "TorchDynamoException": Probe("torch._dynamo.exc:TorchDynamoException", _COMPILING),
    "compile_counters": Probe("torch._dynamo.utils:counters", _COMPILING),
    "compile_pools": Probe(f"{COMPILE_WORKERS}:_pool_set", _COMPILING, optional=True),
    "shut_down_compile_workers": Probe(f"{COMPILE_WORKERS}:shutdown_compile_workers", _COMPILING, optional=True),
    "compile_handler": Probe("torch._dynamo.callback:callback_handler", _COMPILING),
    "cuda_load_module": Probe("torch.cuda._utils:_cuda_load_module", "depthwise convolutions", cuda=True),
    "dynamo_config": Probe("torch._dynamo:config", _COMPILING),
    "functorch_config": Probe("torch._functorch:config", _COMPILING),
    "lookup_backend": Probe("torch._dynamo:lookup_backend", _COMPILING),
    "nvrtc_library": Probe("torch.cuda._utils:_get_nvrtc_library", "depthwise convolutions", cuda=True),
}
"""What is looked up at each use."""

CompilationHandler: type[Any]
OptimizerVariable: type[Any]
TorchDynamoException: type[Exception]
compile_counters: dict[str, dict[str, int]]
compile_handler: Any
compile_pools: Iterable[Any]
shut_down_compile_workers: Callable[[], None]
cuda_load_module: Callable[[bytes], Any]
dynamo_config: Any
functorch_config: Any
lookup_backend: Callable[[str], Callable[..., Any]]
nvrtc_library: Callable[[], Any]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in LATE:
            return LATE[name].found()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
