"""Attention of operands that are sharded over batch and heads: each device works on what it holds.

Batch entries and heads are independent. With mesh axes of type Explicit the sharding is part of an
array's type, and `by_device` runs a whole function, be it of kernels or of plain JAX, under
`jax.shard_map`. With axes of type Auto XLA decides, and plain JAX is its own business; but a kernel
is one opaque call, which it would run on whole operands after it gathered them, so `over_devices`
tells it what is independent. How grouped heads go with their keys is the same for both:

    letters of an axis   b    batch, split as that of the query is
                         n    query heads, split as those of the query are
                         k    key heads, split by as many of the same mesh axes as divide them
                         .    whole on every device
                         *    likewise, and gathered where it is sharded

Where there are fewer key heads than parts of the query heads, devices hold the same key heads, take
of them what their query heads read, and add up the gradients.
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels.interpret import interpreting

_logger = logging.getLogger("jax_flash")


def over_devices(function: Callable, operands: Any, results: Any, leading: int = 0) -> Callable:
    """`function`, run by each device on its own batch entries and heads.

    Args:
      function: of arrays, or trees of them; it takes batch and heads from their shapes, and gives
        the same for parts of these as for the whole. The first operand with batch and query heads
        says how both are split.
      operands: letters of the axes of each array (see the module), such as "b.n.": a tuple, or any
        tree that the arguments' begins with. An axis of size 1 is whole on every device.
      results: likewise of what it gives. A result that lacks a split axis is a sum over it.
      leading: axes before those, of all operands and results, whose first axis is the batch. They
        are split like the query's, and each device makes them part of its batch.

    Returns:
      A function of the same arguments. Under `jax.shard_map` it is the same function.

    Raises:
      NotImplementedError: under a `jax.shard_map` over some mesh axes, where others are left.
    """
    prefix = "".join(map(str, range(leading)))

    def run(*args):
        arrays, letters, tree = _flat(args, operands)
        letters = [prefix + axes for axes in letters]
        result_letters = [prefix + axes for axes in jax.tree.leaves(results)]
        sizes = _Sizes.of(arrays, letters)

        def flat(*arrays):
            lead = arrays[sizes.query].shape[:leading]
            folded = [x.reshape(-1, *x.shape[leading + 1 :]) for x in arrays]
            out = jax.tree.leaves(function(*jax.tree.unflatten(tree, folded)))
            return tuple(x.reshape(*lead, -1, *x.shape[1:]) for x in out)

        if interpreting() or _is_on_one_device():
            out = flat(*arrays)
        else:
            out = _automatic(flat, sizes, letters, result_letters)(*arrays)
        return jax.tree.unflatten(jax.tree.structure(results), out)

    return run


def _is_on_one_device() -> bool:
    """Whether what is traced is for one device, under a `jax.shard_map` over all mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    others = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if not mesh.manual_axes or all(mesh.shape[name] == 1 for name in others):
        return bool(mesh.manual_axes)
    raise NotImplementedError(
        f"implementation='mosaic_gpu': inside a jax.shard_map over {', '.join(mesh.manual_axes)}"
        f" alone, {_CANNOT_SPLIT} {', '.join(others)}. Name all mesh axes in it (with Explicit"
        " axes, jax.vmap maps no axis that is sharded), or use implementation='xla'."
    )


_CANNOT_SPLIT = "XLA cannot split kernels over"


def _flat(args, operands):
    """Leaves of args, the letters of each, and the tree."""
    arrays, tree = jax.tree.flatten(args)
    return arrays, jax.tree.leaves(jax.tree.broadcast(operands, args)), tree


_WHOLE = (".", "*")  # letters of axes that are never split


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Whole sizes of what may be split.

    Attributes:
      query: which operand says how all are split: the first with query heads.
      whole: size of the axes of each letter but "." and "*". Where no operand has key heads, they
        are the query's.
    """

    query: int
    whole: dict[str, int]

    @staticmethod
    def of(arrays, letters) -> "_Sizes":
        query = next(i for i, axes in enumerate(letters) if "n" in axes and "." in axes)
        keys = next((i for i, axes in enumerate(letters) if "k" in axes), query)
        whole = {
            axis: size
            for i in (keys, query)
            for axis, size in zip(letters[i], arrays[i].shape, strict=True)
            if axis not in _WHOLE
        }
        return _Sizes(query, {"k": whole["n"]} | whole)

    @property
    def kv_heads(self) -> int:
        return self.whole["k"]

    @property
    def group(self) -> int:
        return self.whole["n"] // self.whole["k"]

    def is_split(self, axis: str, size: int) -> bool:
        """Whether an axis of this letter and size is one of those that can be split."""
        return axis not in _WHOLE and size == self.whole[axis]


@dataclasses.dataclass(frozen=True)
class _Split:
    """Mesh axes that split the axes of each letter.

    Attributes:
      sizes: of the whole.
      mesh: size of each mesh axis.
      names: mesh axes of each letter; those of "k" are those of "n", from the first on.
    """

    sizes: _Sizes
    mesh: Mapping[str, int]
    names: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(sizes: _Sizes, mesh: Mapping[str, int], specs, letters) -> "_Split":
        """All as the query's are: by the first of its mesh axes, as many as divide the size."""
        names = {
            axis: _dividing(_names(entry), mesh, sizes.whole[axis])
            for axis, entry in zip(letters[sizes.query], specs[sizes.query], strict=True)
            if axis not in _WHOLE
        }
        return _Split(sizes, mesh, names | {"k": _dividing(names["n"], mesh, sizes.kv_heads)})

    @property
    def sharing(self) -> tuple[str, ...]:
        """Axes along which devices hold the same key heads for other query heads."""
        return self.names["n"][len(self.names["k"]) :]

    def specs(self, letters, arrays) -> list[PartitionSpec]:
        """How arrays, of which `letters` has one string each, are split."""
        return [
            PartitionSpec(
                *(
                    (self.names[axis] or None) if self.sizes.is_split(axis, size) else None
                    for axis, size in zip(axes, x.shape, strict=True)
                )
            )
            for axes, x in zip(letters, arrays, strict=True)
        ]

    def origin(self) -> tuple[int | jax.Array, int | jax.Array]:
        """Which batch entry and which query head are a device's first."""
        return self._first("b"), self._first("n")

    def _first(self, axis: str) -> int | jax.Array:
        names = self.names.get(axis)
        if not names:
            return 0
        return lax.axis_index(names) * (self.sizes.whole[axis] // self._count(axis))

    def local(self, function: Callable, letters, result_letters, result_specs) -> Callable:
        """`function` of what one device holds, with collectives where results are sums."""

        def run(*arrays):
            out = function(*(map(self.own_heads, arrays, letters)))
            return tuple(map(self._summed, out, result_letters, result_specs))

        return run

    def _heads_read(self) -> jax.Array:
        """Which of a device's key heads its query heads read: one, or one for each."""
        heads = self.sizes.whole["n"] // self._count("n")
        group = self.sizes.group
        first = lax.axis_index(self.sharing) * heads
        count = 1 if group % heads == 0 else heads
        return (first + jnp.arange(count)) // group

    def own_heads(self, x, letters: str):
        """Of key heads those that a device's query heads read, where it holds more."""
        if "k" not in letters or not self.sharing or self._count("k") == self.sizes.kv_heads:
            return x
        return jnp.take(x, self._heads_read(), axis=letters.index("k"), mode="clip")

    def _summed(self, x, letters: str, spec: PartitionSpec):
        """A result in its place, added up over the devices that have parts of it."""
        used = {name for entry in spec for name in _names(entry)}
        missing = {name for names in self.names.values() for name in names} - used
        if not missing:
            return x
        total = x.astype(jnp.float32)
        if "k" in letters:
            axis = letters.index("k")
            shape = list(x.shape)
            shape[axis] = self.sizes.kv_heads // self._count("k")
            where = (slice(None),) * axis + (self._heads_read(),)
            total = jnp.zeros(shape, jnp.float32).at[where].add(total)
        return lax.psum(total, tuple(sorted(missing))).astype(x.dtype)

    def _count(self, axis: str) -> int:
        return math.prod(self.mesh[name] for name in self.names[axis])


def _names(entry) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _dividing(names: tuple[str, ...], mesh: Mapping[str, int], size: int) -> tuple[str, ...]:
    """The first of these mesh axes, as many as together divide size."""
    count = len(names)
    while size % math.prod(mesh[name] for name in names[:count]):
        count -= 1
    return names[:count]


# --- axes of type Auto: XLA decides on the sharding ----------------------------------------------


def _automatic(function, sizes: _Sizes, letters, result_letters) -> Callable:
    """`function` with a rule for XLA's partitioner."""

    def partition(mesh, arg_shapes, result_shapes):
        arrays, consts = arg_shapes
        had = [_spec_over(mesh, x) for x in arrays]
        split = _Split.of(sizes, mesh.shape, had, letters)
        wanted = split.specs(letters, arrays)
        for x, axes, before, after in zip(arrays, letters, had, wanted, strict=True):
            if "*" not in axes:
                _warn_of_gather(x.shape, before, after)
        out = split.specs(result_letters, result_shapes)
        # There `run` is inlined; it hides the effects of references, which JAX refuses here.
        local = split.local(run, letters, result_letters, out)
        place = lambda spec: NamedSharding(mesh, spec)
        return (
            mesh,
            lambda arrays, consts: local(*arrays),
            [place(spec) for spec in out],
            (tuple(map(place, wanted)), [place(PartitionSpec()) for _ in consts]),
        )

    def run(*arrays):
        # custom_partitioning takes no constants, such as the kernels' tables: they become operands,
        # of which each device then makes its own.
        whole = jax.make_jaxpr(function)(*arrays)
        partitioned = custom_partitioning(
            lambda arrays, consts: jax.core.eval_jaxpr(whole.jaxpr, consts, *arrays)
        )
        partitioned.def_partition(
            partition,
            decode_shardings=False,  # as JAX fails where a part of a mesh axis splits an axis
            sharding_rule=lambda mesh, operands, results: _rule(
                sizes, mesh, operands, letters, results, result_letters
            ),
        )
        return partitioned(arrays, whole.consts)

    return run


def _rule(sizes: _Sizes, mesh, operands, letters, results, result_letters) -> SdyShardingRule:
    """Which axes of operands and results are split alike; operands without letters are whole."""
    factors: dict[str, Any] = {axis: f"all_{axis}" for axis in sizes.whole} | {"k": "k"}
    compound: dict[str, Any] = {}
    if 1 in (sizes.group, sizes.kv_heads):
        factors["n"] = "k" if sizes.group == 1 else "g"
    elif all(
        sizes.kv_heads % size == 0 or math.gcd(sizes.kv_heads, size) == 1
        for size in mesh.shape.values()
    ):
        factors["n"], compound = CompoundFactor("k", "g"), {"g": sizes.group}
    else:  # XLA would split the key heads by a part of a mesh axis
        factors["n"] = "n"
    own = (f"own{index}" for index in itertools.count())

    def mapping(x, axes: str):
        return ArrayMapping(
            *(
                factors[axis] if sizes.is_split(axis, size) else next(own)
                for axis, size in zip(axes, x.shape, strict=True)
            )
        )

    consts = ["." * len(x.shape) for x in operands[len(letters) :]]
    return SdyShardingRule(
        tuple(map(mapping, operands, [*letters, *consts])),
        tuple(map(mapping, results, result_letters)),
        **compound,
    )


def _spec_over(mesh, x) -> PartitionSpec:
    """Which mesh axes split each axis of an array that has a sharding, in part or whole."""
    indices = x.sharding.devices_indices_map(tuple(x.shape))
    entries = []
    for axis in range(len(x.shape)):
        starts = np.array([indices[device][axis].start or 0 for device in mesh.devices.flat])
        steps = [
            np.abs(np.diff(starts.reshape(mesh.devices.shape), axis=i)).max(initial=0)
            for i in range(mesh.devices.ndim)
        ]
        order = sorted(range(len(steps)), key=lambda i: -steps[i])
        entries.append(tuple(mesh.axis_names[i] for i in order if steps[i] > 0))
    return PartitionSpec(*entries)


@functools.cache
def _warn_of_gather(shape, had: PartitionSpec, wanted: PartitionSpec) -> None:
    if gathered := _gathered(shape, had, wanted):
        _logger.warning("attention gathers %s %s", gathered, _ADVICE)


def _gathered(shape, had: PartitionSpec, wanted: PartitionSpec) -> str | None:
    """What of an array is sharded that `wanted` has whole, None if nothing."""
    for size, before, after in zip(shape, had, wanted, strict=True):
        if extra := set(_names(before)) - set(_names(after)):
            names = ", ".join(sorted(extra))
            return f"an operand of shape {shape}, whose axis of {size} is sharded over {names}."
    return None


_ADVICE = (
    "Only batch and heads are split, like the query's, by mesh axes that divide them. For a"
    " sharded sequence there is jax_flash.ring_attention."
)


# --- axes of type Explicit: the sharding is part of the type --------------------------------------


def by_device(
    function: Callable,
    static: Any,
    arrays: Any,
    letters: Any,
    results: tuple[str, ...],
    plain: bool,
    check_vma: bool = True,
) -> Any:
    """`function(static, arrays, origin)`, run by each device on its own batch entries and heads.

    That is so where arrays are on mesh axes of type Explicit, inside or outside `jax.set_mesh`; it
    has all the derivatives that function has. Else function is called as it is.

    Args:
      function: one that takes every size from the arrays, and gives the same for parts of the batch
        and of the heads as for the whole. The origin is None, or of a part which batch entry and
        which query head are its first. It and static can be hashed, as calls outside of jit compile
        once for each.
      static: what it takes that is no array.
      arrays: a tree. The first array with an axis of query heads, and one that is whole, says how
        all are split.
      letters: of the axes of each array (see the module): a tree that arrays' begins with, in which
        those of None do not count.
      results: letters of what it gives, a tuple, of which trailing entries may be None.
      plain: whether function is plain JAX, which XLA splits over axes of type Auto beside these;
        and where arrays are sharded in another way, it is called as it is, by JAX's own rules.
      check_vma: False where function runs what was traced outside, and does not know over which
        axes arrays vary here.

    Raises:
      ValueError: of kernels, arrays are sharded in a way that no device could work on alone.
      NotImplementedError: of kernels, there are axes of type Auto beside the Explicit ones.
    """
    leaves = jax.tree.leaves(arrays)
    mesh = _mesh_of(leaves)
    if mesh is None:
        return function(static, arrays, None)
    letters = jax.tree.leaves(jax.tree.broadcast(letters, arrays))
    split, had = _explicit_split(mesh, leaves, letters)
    wanted = split.specs(letters, leaves)
    for x, axes, before, after in zip(leaves, letters, had, wanted, strict=True):
        gathered = None if "*" in axes else _gathered(x.shape, before, after)
        if gathered and plain:
            try:
                return function(static, arrays, None)
            except jax.errors.JaxRuntimeError:  # as of memory: the rules allow it
                raise
            except Exception as error:  # of those rules, of a type of their own
                raise ValueError(f"attention: got {gathered} {_ADVICE}") from error
        if gathered:
            raise ValueError(f"attention: got {gathered} {_ADVICE}")
    if not plain and (reason := unsplit(leaves)):
        raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
    return _by_device(function, static, tuple(letters), results, mesh, check_vma, arrays)


def unsplit(arrays: Any) -> str | None:
    """Why devices cannot run kernels, each on its part of such arrays, None if they can."""
    mesh = _mesh_of(jax.tree.leaves(arrays))
    sizes = {} if mesh is None else {name: mesh.shape[name] for name in _axes(mesh, AxisType.Auto)}
    others = [name for name, size in sizes.items() if size > 1]
    if not others:
        return None
    return (
        f"beside the Explicit mesh axes, {_CANNOT_SPLIT} the Auto ones, {', '.join(others)}. Use"
        " axes of one type, or implementation='xla'."
    )


@functools.partial(jax.jit, static_argnums=range(6))
def _by_device(function, static, letters, results, mesh, check_vma, arrays):
    leaves, tree = jax.tree.flatten(arrays)
    # No names stand for all, but for those that split an axis which vmap maps.
    explicit = set(_axes(mesh, AxisType.Explicit))
    split, _ = _explicit_split(mesh, leaves, letters)
    specs = split.specs(letters, leaves)

    def run(*leaves):
        own = map(split.own_heads, leaves, letters)
        return function(static, jax.tree.unflatten(tree, own), split.origin())

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=tuple(
            PartitionSpec(*(split.names.get(axis) or None for axis in axes)) for axes in results
        ),
        axis_names=explicit if explicit < set(mesh.axis_names) else set(),
        check_vma=check_vma,
    )(*(jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, specs, strict=True)))


def _axes(mesh: AbstractMesh, kind: AxisType) -> list[str]:
    """Names of the axes of one type."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, axis_type in types if axis_type == kind]


def _mesh_of(leaves: list[Any]) -> AbstractMesh | None:
    """That of the first array on mesh axes of type Explicit, None without."""
    return next((mesh for mesh in map(_explicit_mesh, leaves) if mesh is not None), None)


def _explicit_mesh(x) -> AbstractMesh | None:
    """That of an array on mesh axes of type Explicit, None for others."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def _explicit_split(mesh, arrays, letters) -> tuple[_Split, list[PartitionSpec]]:
    """How arrays are to be split, and how they are now."""
    types = [jax.typeof(x) for x in arrays]
    had = [
        PartitionSpec(*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))) for x in types
    ]
    return _Split.of(_Sizes.of(types, letters), mesh.shape, had, letters), had


# --- inside jax.shard_map -------------------------------------------------------------------------


def vary_alike(arrays: Any, others: Any = ()) -> Any:
    """The same arrays, said to vary over every mesh axis that one of them or `others` varies over.

    Inside `jax.shard_map` the type of an array says over which mesh axes it varies. Results of
    Pallas kernels are said to vary over none. A gradient of what is made to vary here is summed
    over the axes.
    """
    return vary_over(varied_over((arrays, others)), arrays)


def varied_over(arrays: Any) -> frozenset[str]:
    """Mesh axes that one of the arrays varies over."""
    return frozenset().union(*map(_varying, jax.tree.leaves(arrays)))


def vary_over(axes: frozenset[str], arrays: Any) -> Any:
    """The same arrays, said to vary over these mesh axes too."""
    cast = lambda x: lax.pcast(x, tuple(sorted(axes - _varying(x))), to="varying")
    return jax.tree.map(cast, arrays)


def _varying(x) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


# --- under vmap -----------------------------------------------------------------------------------


def mapped_zero_times(run, in_batched, args):
    """The results of `run(*args)` with a leading axis of 0, like the arguments that are mapped."""
    one = lambda x, is_mapped: jax.ShapeDtypeStruct(x.shape[is_mapped:], x.dtype)
    types = jax.eval_shape(run, *jax.tree.map(one, tuple(args), tuple(in_batched)))
    return vary_alike(jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), types), args)
