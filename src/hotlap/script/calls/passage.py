"""Calls behind one node of autograd, which makes their forward and backward passes in a way of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import unwrap_if_dead

from hotlap.data.batches import map_tensors
from hotlap.data.sources import tensors_in
from hotlap.engine.differentiating import gradients
from hotlap.engine.precision import Switches
from hotlap.engine.scaling import FLOOR, LossScale
from hotlap.script.calls.traces import Drawn, Untouched, draws_on, generator_of
from hotlap.script.calls.trees import leaves, with_leaves

AGAIN = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Specify retain_graph=True if you need to backward through the graph a second time."
)
"""What torch says where a graph of autograd is let go of."""
Compute = Callable[[Any, Any], Any]
"""Outputs of a call with these arguments and keyword arguments."""


@dataclass(frozen=True)
class Work:
    """How calls are made operation by operation."""

    compute: Compute
    module: nn.Module
    device: torch.device
    switches: Switches
    autocast: tuple[bool, torch.dtype]
    """The script's own: whether it is on, and to what."""
    generator: torch.Generator
    """What they draw from."""

    def again(self, given: tuple[Any, Any], drawn: Drawn, standing: StandIns) -> list[Tensor]:
        """The outputs of a call that was made before, with the same randomness, for autograd to see all of it."""
        enabled, dtype = self.autocast
        with Untouched(self.module, self.device), standing, self.switches, torch.enable_grad():
            if not draws_on(self.device):
                drawn.put_back()
            with torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
                return leaves(self.compute(*given))


class Turn:
    """One call: its outputs, and the gradients of what it was made from (`sources`).

    A script may do with outputs what a kind of turn is not made for: differentiate them twice, or differentiate their
    gradients. Then the call is made again, operation by operation and with the same randomness.
    """

    done = False
    """Whether nothing of it is needed any more."""
    tree: Any = None
    """The outputs in their containers, once they were made."""
    outputs: Sequence[Tensor] = ()
    """The tensors in `tree`."""
    differentiable: Sequence[bool] = ()
    """Which of them require gradients."""
    _was_surprised = False

    def __init__(self, work: Work, sources: Sequence[Tensor], surprised: Callable[[], None] | None = None) -> None:
        """`surprised` is told where the call has to be made again."""
        self._work, self.sources, self._surprised = work, sources, surprised
        self._drawn = Drawn(work.generator)

    def forward(self) -> list[Tensor]:
        """Make the outputs, in memory that stays the script's."""
        raise NotImplementedError

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all sources from those of the outputs."""
        raise NotImplementedError

    def expects(self, grads: Sequence[Tensor | None], *, kept: bool) -> bool:
        """Whether `gradients` can be asked for these; `kept` where they may be asked for again."""
        raise NotImplementedError

    def given(self) -> tuple[Any, Any]:
        """The arguments, with the script's own tensors where gradients go to them."""
        raise NotImplementedError

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What autograd asks for, once or several times."""
        if self.done:
            raise RuntimeError(AGAIN)
        if all(grad is None for grad in grads):
            return [None] * len(self.sources)
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if not self._was_surprised and self.expects(grads, kept=kept):
            made = self.gradients(grads)
        else:
            made = self._differentiated(grads)
        if not kept:
            self.done = True
            self.let_go()
        return made

    def let_go(self) -> None:
        """Hold on to nothing that is not needed once the call is done: the script may keep its outputs for long."""
        self.tree, self.outputs, self._surprised = None, (), None

    def _differentiated(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not self._was_surprised and self._surprised is not None:
            self._surprised()
        self._was_surprised = True
        # What the arguments come from may lead to the same parameters, as where the outputs of one call are arguments
        # of the next: it has a turn of its own, so nothing but this call may lie between what is differentiated.
        is_twice = torch.is_grad_enabled()
        given = map_tensors(self.given(), _viewed if is_twice else _detached)
        standing = StandIns(self._work.module, _viewed if is_twice else None)
        arguments = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        # For each pass anew: what autograd lets go of in one must not be missing in the next.
        made = self._work.again(given, self._drawn, standing)
        pairs = [(out, grad) for out, grad in zip(made, grads, strict=True) if grad is not None]
        with self._work.switches:
            found = gradients(
                [out for out, _ in pairs],
                [*arguments, *map(standing.of, self.sources[len(arguments) :])],
                [grad for _, grad in pairs],
                create_graph=is_twice,
            )
        return list(found)


def passed(turn: Turn) -> Any:
    """The outputs of a turn, as the script gets them. No transform of torch's may be at work."""
    outputs = _apply(turn, *turn.sources)
    return outputs[0] if isinstance(turn.tree, Tensor) else with_leaves(turn.tree, turn.outputs, outputs)


def wanting(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that gradients go to, as `passed` can take them."""
    return [unwrap_if_dead(tensor) for tensor in tensors if tensor.requires_grad]


class _Passage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, turn: Turn, *_: Tensor) -> tuple[Tensor, ...]:
        outputs = turn.forward()
        ctx.turn = turn
        ctx.set_materialize_grads(False)
        if not all(turn.differentiable):
            ctx.mark_non_differentiable(
                *(out for out, requires in zip(outputs, turn.differentiable, strict=True) if not requires)
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises what torch's own nodes do where the graph was let go of
        return None, *ctx.turn.backward(grads)


_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Passage).apply
"""What `_Passage.apply` comes to without transforms, less its look at every parameter."""


class StandIns:
    """Stand-ins for a module's parameters, in the same memory; inside, the module computes with them.

    What is computed so has a graph of autograd to itself. The parameters' own nodes belong to the script: they run
    its hooks, and on its stream, which no recording on another one can have a part in.
    """

    def __init__(self, module: nn.Module, make: Callable[[Any], Tensor] | None = None) -> None:
        """`make` makes them; parameters of their own, where none is given."""
        layers = list(module.modules())
        self._held = [(layer, name, p) for layer in layers for name, p in layer._parameters.items() if p is not None]
        self._made = {id(p): (make or _stand_in)(p) for _, _, p in self._held}
        self.parameters = list({id(p): p for _, _, p in self._held if p.requires_grad}.values())
        """Those that require gradients, each once."""
        self.stand_ins = [self._made[id(p)] for p in self.parameters]
        """The stand-ins of these."""
        self._rnns = [
            (layer, layer.__dict__["_flat_weights"], layer.__dict__["_flat_weight_refs"])
            for layer in layers
            if isinstance(layer, nn.RNNBase)
        ]

    def of(self, parameter: Tensor) -> Tensor:
        """What stands in for one of the parameters."""
        return self._made.get(id(parameter), parameter)

    @property
    def are_apart(self) -> bool:
        """Whether one has been moved to other memory, as recurrent layers may do."""
        return any(p.data_ptr() != self._made[id(p)].data_ptr() for _, _, p in self._held)

    @property
    def are_in_place(self) -> bool:
        """Whether the module still has the parameters that it had."""
        return all(layer._parameters.get(name) is p for layer, name, p in self._held)

    def __enter__(self) -> None:
        for layer, name, p in self._held:
            layer._parameters[name] = self._made[id(p)]  # type: ignore[assignment]
        for layer, weights, _ in self._rnns:
            stand_ins = [self._made.get(id(weight), weight) for weight in weights]
            # With references of their own, lest the layer think that it has to lay them out anew.
            refs = [None if weight is None else weakref.ref(weight) for weight in stand_ins]
            layer.__dict__.update(_flat_weights=stand_ins, _flat_weight_refs=refs)

    def __exit__(self, *_: object) -> None:
        for layer, name, p in self._held:
            layer._parameters[name] = p
        for layer, weights, refs in self._rnns:
            layer.__dict__.update(_flat_weights=weights, _flat_weight_refs=refs)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach(), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


class ScaledTurn(Turn):
    """A call in fp16: gradients are scaled where they come in, and are true ones where they leave."""

    def __init__(
        self,
        compute: Compute,
        module: nn.Module,
        device: torch.device,
        switches: Switches,
        given: tuple[Any, Any],
        scale: LossScale,
    ) -> None:
        self._standing, self._given, self._scale = StandIns(module), given, scale
        work = Work(compute, module, device, switches, autocast_of(device), generator_of(device))
        super().__init__(work, [*wanting(tensors_in(given)), *self._standing.parameters])

    def forward(self) -> list[Tensor]:
        inner = map_tensors(self._given, _detached)
        self._leaves = [*(t for t in tensors_in(inner) if t.requires_grad), *self._standing.stand_ins]
        with self._standing, self._work.switches, torch.enable_grad():
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
    """Differentiate with ever smaller scales until nothing overflows; the host waits to hear of it.

    A script cannot be told to leave its update out, as a scaler of its own would.
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
    """The tensor once more, such that gradients go to it through this."""
    return unwrap_if_dead(tensor).view_as(tensor) if tensor.requires_grad else tensor


def autocast_of(device: torch.device) -> tuple[bool, torch.dtype]:
    """The script's own autocast on a device: whether it is on, and to what."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
