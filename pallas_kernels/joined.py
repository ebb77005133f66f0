"""Boxes that stand one after the other in shared memory, as one operand of wgmma.

TMA brings rows that end anywhere in boxes as wide as it swizzles (`columns.py`). To wgmma it is all
the same how far boxes stand apart, if they do so evenly, and Mosaic GPU makes its descriptors of
memory with any strides. Only Pallas has no transform that says so. Here is one, `joined`, which
`plgpu.wgmma` alone takes: its rule of lowering gets memory with strides in the place of it.

That rule is private to JAX. Where it is not what this was written for, `IS_KNOWN` is false, and
columns have a product for each box: right, but slower.
"""

import dataclasses
import itertools
from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils as mgpu_utils

_Transform: Any = object
try:
    from jax._src.pallas.mosaic_gpu import core, lowering, primitives
    from jax._src.state.types import AbstractRef, Transform

    _RULES = lowering.mosaic_lowering_rules[core.LANExWG_SEMANTICS]
    _LOWER, _HANDLE = _RULES[primitives.wgmma_p], lowering._handle_transforms
    _Transform, IS_KNOWN = Transform, True
except (ImportError, AttributeError, KeyError):
    IS_KNOWN = False

_NAMES = ("acc", "a", "b")  # of the operands of wgmma


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Joined(_Transform):
    """From `(boxes, rows, columns)` to `(rows, boxes * columns)`."""

    def transform_type(self, x: Any) -> Any:
        if isinstance(x, AbstractRef):
            return x.update(inner_aval=self.transform_type(x.inner_aval))
        boxes, rows, columns = x.shape
        return x.update(shape=(rows, boxes * columns))


def joined(boxes: Any) -> Any:
    """Boxes `(boxes, rows, columns)` of `operand_form`, as an operand `(rows, boxes * columns)`."""
    return dataclasses.replace(boxes, transforms=(*boxes.transforms, _Joined()))


@dataclasses.dataclass(frozen=True)
class _Operand:
    """Of the rule for wgmma: a value, and what of it is taken.

    Attributes:
      value, aval: an array or a ref.
      leaves, avals: of its transforms.
      tree: of these; None without any.
    """

    value: Any
    aval: Any
    leaves: tuple
    avals: tuple
    tree: Any

    def with_strides(self, ctx: Any) -> "_Operand":
        """The same where it is joined: memory whose boxes are side by side by its strides."""
        if self.tree is None:
            return self
        transforms, avals = self.tree.unflatten(self.leaves), self.tree.unflatten(self.avals)
        if _Joined() not in transforms:
            return self
        at = transforms.index(_Joined())
        ref, _, form = _HANDLE(ctx, self.aval, self.value, avals[:at], transforms[:at])
        # (boxes, rows / 8, 1, 8, columns) to (rows / 8, boxes, 8, columns)
        ref = mgpu_utils.memref_slice(ref, (slice(None), slice(None), 0))
        ref = mgpu_utils.memref_transpose(ref, (1, 0, 2, 3))
        array = self.aval.inner_aval.update(shape=tuple(ref.type.shape))
        form_and_more = lambda more: (*form, *more[at + 1 :])
        leaves, tree = jax.tree.flatten(form_and_more(transforms))
        leaf_avals = jax.tree.leaves(form_and_more(avals))
        aval = self.aval.update(inner_aval=array)
        return _Operand(ref, aval, tuple(leaves), tuple(leaf_avals), tree)


def _lower_wgmma(ctx: Any, *values: Any, **trees: Any) -> Any:
    """As JAX's own rule does, of operands with strides where they are joined."""
    operands, first = [], 3
    for n, name in enumerate(_NAMES):
        tree = trees[f"{name}_transforms_tree"]
        own = slice(first, first + (0 if tree is None else tree.num_leaves))
        leaf_avals = tuple(ctx.avals_in[own])
        operands.append(_Operand(values[n], ctx.avals_in[n], values[own], leaf_avals, tree))
        first = own.stop
    operands = [operand.with_strides(ctx) for operand in operands]
    trees = {f"{name}_transforms_tree": x.tree for name, x in zip(_NAMES, operands, strict=True)}
    leaves = itertools.chain.from_iterable(x.leaves for x in operands)
    avals = [*(x.aval for x in operands), *(aval for x in operands for aval in x.avals)]
    return _LOWER(ctx.replace(avals_in=avals), *(x.value for x in operands), *leaves, **trees)


if IS_KNOWN:
    _RULES[primitives.wgmma_p] = _lower_wgmma
