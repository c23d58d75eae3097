"""TF32 switched for the whole process and put back, whichever of torch's two sets of switches the user has used.

Since 2.9 torch has `fp32_precision` (a tree of switches that inherit) beside `allow_tf32` (one flag each for
cuBLAS and cuDNN), and raises where a flag is read that contradicts the tree. So the tree is what is set here, and
a flag that would contradict it follows, for code that reads it inside.
"""

from __future__ import annotations

from typing import Any

Undo = tuple[Any, str, Any]
"""An object, its attribute, and the value to put back."""


class Tf32:
    """TF32 forced on, or off, in matrix products, and by default in convolutions and RNNs.

    A context manager that can be entered again, also inside itself. What is as wanted already is not touched.
    """

    def __init__(self, on: bool = True, *, convolutions: bool = True) -> None:
        from torch import backends

        self._on, self._convolutions = on, convolutions
        # Looking these up costs more than reading them.
        self._matmul: Any = backends.cuda.matmul
        self._cudnn: Any = backends.cudnn
        self._has_tree = hasattr(self._matmul, "fp32_precision")
        self._above: tuple[Any, ...] = (backends.cudnn, backends) if self._has_tree else ()
        self._branches: tuple[Any, ...] = (self._cudnn.conv, self._cudnn.rnn) if self._has_tree else ()
        self._undo: list[list[Undo]] = []

    def __enter__(self) -> None:
        undo: list[Undo] = []
        self._undo.append(undo)
        switch = self._set_branches if self._has_tree else self._set_flag
        switch(undo, self._matmul, self._matmul)
        if self._convolutions:
            switch(undo, self._cudnn, *self._branches)

    def __exit__(self, *_: object) -> None:
        for holder, name, value in reversed(self._undo.pop()):
            setattr(holder, name, value)

    def _set_flag(self, undo: list[Undo], flagged: Any, *_: Any) -> None:
        undo.append((flagged, "allow_tf32", flagged.allow_tf32))
        flagged.allow_tf32 = self._on

    def _set_branches(self, undo: list[Undo], flagged: Any, *branches: Any) -> None:
        wanted = "tf32" if self._on else "ieee"
        seen = [branch.fp32_precision for branch in branches]
        if seen.count(wanted) == len(seen):
            return
        flag = _flag(flagged) if self._on else None
        for branch, value in zip(branches, seen, strict=True):
            undo.append((branch, "fp32_precision", _own(branch, value, self._above)))
            branch.fp32_precision = wanted
        if self._on and (flag is False or _flag(flagged) is None):
            # Put back before its branches, since it takes them along.
            undo.append((flagged, "allow_tf32", False))
            flagged.allow_tf32 = True


def tf32_in_force() -> tuple[bool, bool]:
    """Whether torch computes matrix products of fp32 numbers in TF32 on a GPU that has it, and whether convolutions."""
    from torch import backends

    matmul: Any = backends.cuda.matmul
    cudnn: Any = backends.cudnn
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"
    return bool(matmul.allow_tf32), bool(cudnn.allow_tf32)


def _flag(flagged: Any) -> bool | None:
    """The flag; None if it contradicts the tree, which costs 12 µs."""
    try:
        return bool(flagged.allow_tf32)
    except RuntimeError:
        return None


def _own(switch: Any, seen: str, above: tuple[Any, ...]) -> str:
    """The switch's own value: `none` if it repeats the one above it, so that it still follows that one."""
    if seen == "none" or not above:
        return seen
    parent, *higher = above
    own_of_parent = _own(parent, parent.fp32_precision, tuple(higher))
    parent.fp32_precision = "ieee" if seen == "tf32" else "tf32"
    follows = switch.fp32_precision != seen
    parent.fp32_precision = own_of_parent
    # An unset convolution is in TF32, and no value that can be set means the same.
    return "none" if follows and parent.fp32_precision == seen else seen
