"""Whether a script's own attention drops by a kernel whose masks are poor: nobody but its author can change that."""

from __future__ import annotations

from typing import Any

import torch

from hotlap.data.columns import tensors_in
from hotlap.engine import attention_kernels
from hotlap.engine.attention_kernels import POOR_MASKS, Call
from hotlap.engine.attention_masks import masks_of

NODE = "ScaledDotProductCudnnAttentionBackward"
"""What such a call leaves in the graph of its output."""
MOST_NODES = 20_000


class Attending:
    """Looks at the graph of what a script's model gives, once: nothing has to be put into torch for that."""

    def __init__(self) -> None:
        self._has_looked = False
        self._call: Call | None = None
        """A call by that kernel, without its numbers."""

    def see(self, outputs: Any) -> None:
        """Told what a model gave while it is trained. It never raises."""
        if self._has_looked:
            return
        try:
            tensors = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
            if tensors:
                self._has_looked = True
                self._call = dropping_call([tensor.grad_fn for tensor in tensors])
        except Exception:  # outputs may be whatever the script likes
            self._has_looked = True

    def advice(self) -> list[str]:
        """A line for the script's author, where there is something to say. It leaves no trace."""
        call = self._call
        if call is None:
            return []
        try:
            with attention_kernels.without_a_trace(call.query.device):
                found = masks_of(call, POOR_MASKS)
        except RuntimeError:  # no memory is left for it
            return []
        if found.are_good:
            return []
        return [
            f"attention drops by cuDNN's kernel, whose masks are not drawn for place by place here ({found}): training "
            "ends worse by it than by others; torch.backends.cuda.enable_cudnn_sdp(False) leaves it out"
        ]


def dropping_call(nodes: list[Any]) -> Call | None:
    """A call by that kernel that drops, of those which nodes of a graph come from."""
    seen, ahead = set(nodes), list(nodes)
    while ahead and len(seen) < MOST_NODES:
        node = ahead.pop()
        if node.name().startswith(NODE) and node._saved_dropout_p > 0:
            return _call_of(node)
        before = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= before
        ahead += before
    return None


def _call_of(node: Any) -> Call:
    """The call that left a node, by the shapes on its edges: to ask for what it saved would run the user's hooks."""
    answer = node._input_metadata[0]
    shapes = [one._input_metadata[number].shape if one is not None else None for one, number in node.next_functions]
    query = shapes[0] or answer.shape
    key = shapes[1] or query
    # Each is a number that lies everywhere, and takes up no memory.
    number = torch.zeros((), dtype=answer.dtype, device=answer.device)
    q, k, v = (number.expand(tuple(shape)) for shape in (query, key, (*key[:-1], answer.shape[-1])))
    return Call(q, k, v, None, node._saved_dropout_p, False, None, False)
