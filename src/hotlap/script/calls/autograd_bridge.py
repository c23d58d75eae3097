"""Connects calls to autograd by one node, whose forward and backward pass hotlap makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.torch_private import keeps_graph, unwrap_if_dead
from hotlap.data.batches import map_tensors
from hotlap.data.sources import tensors_in
from hotlap.engine.differentiating import gradients
from hotlap.engine.precision import Switches
from hotlap.engine.scaling import FLOOR, LossScale
from hotlap.engine.snapshot import generator_of
from hotlap.script.calls.module_state import GeneratorState, ModuleState
from hotlap.script.calls.trees import leaves, with_leaves

AGAIN = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Specify retain_graph=True if you need to backward through the graph a second time."
)
"""torch's own message for a released autograd graph."""
Compute = Callable[[Any, Any], Any]
"""Returns the outputs of a call for arguments and keyword arguments."""


@dataclass(frozen=True)
class EagerForward:
    """How a call runs operation by operation."""

    compute: Compute
    module: nn.Module
    device: torch.device
    switches: Switches
    autocast: tuple[bool, torch.dtype]
    """The script's own autocast: whether it is on, and its dtype."""
    generator: torch.Generator
    """The generator that the call draws from."""

    def recompute(self, given: tuple[Any, Any], drawn: GeneratorState, aliases: ParameterAliases) -> list[Tensor]:
        """The outputs of an earlier call again, with the same random state, so that autograd sees every operation."""
        enabled, dtype = self.autocast
        with ModuleState(self.module, self.device), aliases, self.switches, torch.enable_grad():
            drawn.put_back()
            with torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
                return leaves(self.compute(*given))


class BridgedCall:
    """One call: its outputs, and the gradients of its inputs (`sources`).

    A script may do what a kind of call does not support: differentiate outputs twice, or differentiate their gradients.
    Then the call is recomputed operation by operation, with the same random state.
    """

    done = False
    """Whether nothing of it is needed any more."""
    tree: Any = None
    """The outputs in their containers, after `forward`."""
    outputs: Sequence[Tensor] = ()
    """The tensors in `tree`."""
    differentiable: Sequence[bool] = ()
    """Which of them require gradients."""
    _is_recomputed = False

    def __init__(
        self, work: EagerForward, sources: Sequence[Tensor], on_recompute: Callable[[], None] | None = None
    ) -> None:
        """`on_recompute` is called if the call has to be recomputed."""
        self._work, self.sources, self._on_recompute = work, sources, on_recompute
        self._drawn = GeneratorState(work.generator)

    def forward(self) -> list[Tensor]:
        """Compute the outputs, in memory that the script may keep."""
        raise NotImplementedError

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all sources, from those of the outputs."""
        raise NotImplementedError

    def expects(self, grads: Sequence[Tensor | None], *, kept: bool) -> bool:
        """Whether `gradients` supports these; `kept`: autograd may ask for them again."""
        raise NotImplementedError

    def given(self) -> tuple[Any, Any]:
        """The arguments, with the script's own tensors where they get gradients."""
        raise NotImplementedError

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients for autograd; called once or several times."""
        if self.done:
            raise RuntimeError(AGAIN)
        if all(grad is None for grad in grads):
            return [None] * len(self.sources)
        kept = keeps_graph()
        if not self._is_recomputed and self.expects(grads, kept=kept):
            found = self.gradients(grads)
        else:
            found = self._differentiated(grads)
        if not kept:
            self.done = True
            self.let_go()
        return found

    def let_go(self) -> None:
        """Release what is not needed once the call is done: the script may keep its outputs for long."""
        self.tree, self.outputs, self._on_recompute = None, (), None

    def _differentiated(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not self._is_recomputed and self._on_recompute is not None:
            self._on_recompute()
        self._is_recomputed = True
        # The arguments may depend on the same parameters, as when one call's outputs are the next call's arguments.
        # That call has a node of its own, so only operations of this call may be between what is differentiated here.
        is_twice = torch.is_grad_enabled()
        given = map_tensors(self.given(), _viewed if is_twice else _detached)
        aliases = ParameterAliases(self._work.module, _viewed if is_twice else None)
        arguments = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        # Recomputed for each pass: a pass must not miss what autograd released in the one before.
        outputs = self._work.recompute(given, self._drawn, aliases)
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        with self._work.switches:
            found = gradients(
                [out for out, _ in pairs],
                [*arguments, *map(aliases.of, self.sources[len(arguments) :])],
                [grad for _, grad in pairs],
                create_graph=is_twice,
            )
        return list(found)


def bridged_outputs(call: BridgedCall) -> Any:
    """The outputs of a call, as the script gets them. No transform of torch may be active."""
    outputs = _apply(call, *call.sources)
    return outputs[0] if isinstance(call.tree, Tensor) else with_leaves(call.tree, call.outputs, outputs)


def needing_grad(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that get gradients, in the form that `bridged_outputs` needs."""
    return [unwrap_if_dead(tensor) for tensor in tensors if tensor.requires_grad]


class _AutogradBridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: BridgedCall, *_: Tensor) -> tuple[Tensor, ...]:
        outputs = call.forward()
        ctx.call = call
        ctx.set_materialize_grads(False)
        if not all(call.differentiable):
            ctx.mark_non_differentiable(
                *(out for out, requires in zip(outputs, call.differentiable, strict=True) if not requires)
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises torch's own error if the graph was released
        return None, *ctx.call.backward(grads)


_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _AutogradBridge).apply
"""`_AutogradBridge.apply` without support for transforms, and without checks of every parameter."""


class ParameterAliases:
    """Aliases of a module's parameters that share their memory; inside, the module computes with the aliases.

    This gives the computation an autograd graph of its own. The parameters' own nodes belong to the script: they run
    its hooks on its stream, which a recording on another stream cannot include.
    """

    def __init__(self, module: nn.Module, make: Callable[[Any], Tensor] | None = None) -> None:
        """`make` creates an alias; by default a new parameter."""
        layers = list(module.modules())
        self._held = [(layer, name, p) for layer in layers for name, p in layer._parameters.items() if p is not None]
        self._made = {id(p): (make or _stand_in)(p) for _, _, p in self._held}
        self.parameters = list({id(p): p for _, _, p in self._held if p.requires_grad}.values())
        """The parameters that require gradients, each once."""
        self.alias_tensors = [self._made[id(p)] for p in self.parameters]
        """Their aliases."""
        self._rnns = [
            (layer, layer.__dict__["_flat_weights"], layer.__dict__["_flat_weight_refs"])
            for layer in layers
            if isinstance(layer, nn.RNNBase)
        ]

    def of(self, parameter: Tensor) -> Tensor:
        return self._made.get(id(parameter), parameter)

    @property
    def have_moved(self) -> bool:
        """Whether a parameter has moved to other memory, as recurrent layers may do."""
        return any(p.data_ptr() != self._made[id(p)].data_ptr() for _, _, p in self._held)

    @property
    def are_in_place(self) -> bool:
        """Whether the module still has the same parameters."""
        return all(layer._parameters.get(name) is p for layer, name, p in self._held)

    def __enter__(self) -> None:
        for layer, name, p in self._held:
            layer._parameters[name] = self._made[id(p)]  # type: ignore[assignment]
        for layer, weights, _ in self._rnns:
            alias_tensors = [self._made.get(id(weight), weight) for weight in weights]
            # With references to the aliases; otherwise the layer would lay out its weights again.
            refs = [None if weight is None else weakref.ref(weight) for weight in alias_tensors]
            layer.__dict__.update(_flat_weights=alias_tensors, _flat_weight_refs=refs)

    def __exit__(self, *_: object) -> None:
        for layer, name, p in self._held:
            layer._parameters[name] = p
        for layer, weights, refs in self._rnns:
            layer.__dict__.update(_flat_weights=weights, _flat_weight_refs=refs)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach(), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


class ScaledCall(BridgedCall):
    """A call in fp16: incoming gradients are scaled, and outgoing ones are true gradients."""

    def __init__(
        self,
        compute: Compute,
        module: nn.Module,
        device: torch.device,
        switches: Switches,
        given: tuple[Any, Any],
        scale: LossScale,
    ) -> None:
        self._aliases, self._given, self._scale = ParameterAliases(module), given, scale
        work = EagerForward(compute, module, device, switches, autocast_of(device), generator_of(device))
        super().__init__(work, [*needing_grad(tensors_in(given)), *self._aliases.parameters])

    def forward(self) -> list[Tensor]:
        inner = map_tensors(self._given, _detached)
        self._leaves = [*(t for t in tensors_in(inner) if t.requires_grad), *self._aliases.alias_tensors]
        with self._aliases, self._work.switches, torch.enable_grad():
            self.tree = self._work.compute(*inner)
        self.outputs = leaves(self.tree)
        self.differentiable = [out.requires_grad for out in self.outputs]
        return [out.detach().clone() for out in self.outputs]

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = [(out, grad) for out, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        found: list[Tensor | None] = []

        def differentiate() -> None:
            with self._work.switches:
                found[:] = gradients(
                    [out for out, _ in pairs],
                    self._leaves,
                    [self._scale.scaled(grad) for _, grad in pairs],
                    retain_graph=True,
                )
            self._scale.unscale_([grad for grad in found if grad is not None])

        true_gradients(self._scale, differentiate, [grad for _, grad in pairs])
        return found

    def expects(self, grads: Sequence[Tensor | None], *, kept: bool) -> bool:
        return not torch.is_grad_enabled()

    def given(self) -> tuple[Any, Any]:
        return self._given


def true_gradients(scale: LossScale, differentiate: Callable[[], None], incoming: Sequence[Tensor]) -> None:
    """Differentiate with smaller and smaller scales until nothing overflows; the host waits for the result.

    hotlap cannot make a script skip its update, as a GradScaler of its own would.
    """
    while True:
        differentiate()
        overflowed, was_least = scale.overflowed(), float(scale.scale) <= FLOOR
        scale.update()
        if not overflowed or was_least or not all(bool(grad.isfinite().all()) for grad in incoming):
            return


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _viewed(tensor: Tensor) -> Tensor:
    """A view of the tensor that passes gradients on to it."""
    return unwrap_if_dead(tensor).view_as(tensor) if tensor.requires_grad else tensor


def autocast_of(device: torch.device) -> tuple[bool, torch.dtype]:
    """The script's own autocast on a device: whether it is on, and its dtype."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the script's own autocast on a device; None if it is off."""
    enabled, dtype = autocast_of(device)
    return dtype if enabled else None
