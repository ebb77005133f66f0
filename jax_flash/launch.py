"""Kernels as one operation of JAX, which is lowered once for each that differs.

To trace and lower kernels takes Python a second or more, and compiling them as long again. So what
is traced into a user's program is one operation, `launch`, that stands for all kernels of a forward
or a backward pass and the plain JAX between them. Only where that program is lowered for CUDA are
they traced, into a module of StableHLO of their own. It becomes a function of the program, and is
kept:

    in memory   for other programs of this process
    on disk     for other processes, in the directory `jax_flash` of JAX's compilation cache, where
                there is one (`jax.config.jax_compilation_cache_dir`); what is in it depends on the
                sources of this library and on the versions of jax and jaxlib

A program lowered in another process is then the same to the byte, so that JAX's cache knows it. New
kernels begin to compile at once, each in a program and a thread of its own, while others are still
being lowered: the plugin of CUDA compiles a kernel once in a process, and who needs one that is
being compiled waits.
"""

import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from jaxlib.mlir.dialects import stablehlo as hlo

from jax_flash import device
from jax_flash.sharding import vary_alike
from pallas_kernels.canonicalize import lowering_faster
from pallas_kernels.interpret import interpreting

# Of operands and results of kernels.
_DTYPES = (
    *(np.bool_, np.int8, np.uint8, np.int32, np.uint32, np.float32, np.float16),
    *(jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2),
)
_KEPT = 256  # modules in memory, of up to a few megabytes
_REMEMBERED = 64  # launches that are traced and not lowered yet

_logger = logging.getLogger("jax_flash")


def launch(function: Callable, static: tuple, out_types: tuple, *args: Any) -> tuple:
    """`function(*static, *args)`, for CUDA; lowered for anything else it says that it cannot.

    Args:
      function: runs kernels and gives a tuple of arrays. It is at the top of a module, and knows
        nothing but its arguments.
      static: what can be hashed, and whose repr says all that it is.
      out_types: shape and dtype of each result.
      *args: arrays of 32 bits or fewer, or trees of them, of one device.
    """
    if interpreting():
        return vary_alike(function(*static, *args), args)
    arrays, tree = jax.tree.flatten(args)
    this = _Launch(function, static, tree, tuple(map(_type, arrays)), tuple(map(_type, out_types)))
    _remember(this)
    # To XLA no result is known to be a kernel's. Where a scan stacks one that has another use too,
    # it would run the kernel twice: once into the stack ("dynamic slice fusion" of custom calls),
    # and once for the other use. Each alone, as an LSE of no use costs a launch.
    results = tuple(map(lax.optimization_barrier, _launch_p.bind(*arrays, launch=this)))
    return vary_alike(results, args)


def _type(x) -> tuple[tuple[int, ...], str]:
    return tuple(x.shape), np.dtype(x.dtype).name


@dataclasses.dataclass(frozen=True)
class _Launch:
    """Everything that a module depends on, but for the GPU and the versions of what makes it."""

    function: Callable
    static: tuple
    tree: Any
    types: tuple
    out_types: tuple

    def __call__(self, *arrays) -> tuple:
        return tuple(self.function(*self.static, *jax.tree.unflatten(self.tree, arrays)))

    @property
    def name(self) -> str:
        return f"jax_flash_{self.function.__name__.strip('_')}"

    def key(self, capability: tuple[int, int]) -> str:
        """Of a module on disk."""
        parts = self.function.__qualname__, self.static, str(self.tree), self.types, self.out_types
        return hashlib.sha256(f"{_VERSIONS} {capability} {parts!r}".encode()).hexdigest()


def _versions() -> str | None:
    """Of what makes modules, None where its sources are not there to tell."""
    here = pathlib.Path(__file__).parent
    sources = sorted([*here.glob("*.py"), *(here.parent / "pallas_kernels").rglob("*.py")])
    if pathlib.Path(__file__) not in sources:
        return None
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return f"{code} {jax.__version__} {jaxlib.__version__}"


_VERSIONS = _versions()  # of what this process runs, whatever becomes of the files


_launch_p = Primitive("jax_flash_launch")
_launch_p.multiple_results = True
_launch_p.def_abstract_eval(
    lambda *_, launch: [jax.core.ShapedArray(shape, np.dtype(d)) for shape, d in launch.out_types]
)


@functools.partial(jax.jit, static_argnums=0)
def _alone(this: _Launch, *arrays):
    return _launch_p.bind(*arrays, launch=this)


@_launch_p.def_impl
def _(*arrays, launch):
    with jax.disable_jit(False):
        return _alone(launch, *arrays)


def _lower_for_cuda(ctx, *operands, launch):
    if ctx.is_forward_compat():  # jax.export: kernels in a form that an older jaxlib knows
        with lowering_faster():
            return mlir.lower_fun(launch, multiple_results=True)(ctx, *operands)
    # It says in the environment where compiling finds what it links to.
    importlib.import_module("jax.experimental.mosaic.gpu")
    capability = device.default_device().compute_capability or (9, 0)
    text = [_module(each, capability) for each in _recall(launch)][-1]
    module = ir.Module.parse(text, context=ctx.module_context.context)
    name = mlir.merge_mlir_modules(
        ctx.module_context.module, launch.name, module, dst_symtab=ctx.module_context.symbol_table
    )
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    return func.CallOp(types, ir.FlatSymbolRefAttr.get(name), operands).results


def _refuse(ctx, *_, launch):
    del launch
    platforms = ctx.platforms or ctx.module_context.platforms
    raise NotImplementedError(
        "jax_flash: implementation='mosaic_gpu' runs on Hopper GPUs (H100, H200) alone, and this"
        f" computation is lowered for {', '.join(platforms)}. Lower it for CUDA"
        " (lowering_platforms=('cuda',), jax.export), or leave implementation=None."
    )


mlir.register_lowering(_launch_p, _refuse)
mlir.register_lowering(_launch_p, _lower_for_cuda, platform="cuda")


_traced: collections.OrderedDict[_Launch, None] = collections.OrderedDict()
_lock = threading.Lock()  # of those


def _remember(this: _Launch) -> None:
    with _lock:
        _traced[this] = None
        if len(_traced) > _REMEMBERED:
            _traced.popitem(last=False)


def _recall(this: _Launch) -> list[_Launch]:
    """What to lower now: this, and before it the backward pass of this forward pass, if traced.

    The backward's kernels take longest to compile, so they are to begin first. What is static of
    them begins with what is static of the forward pass.
    """
    mine = this.static, this.types[:3]

    def is_mine(other: _Launch) -> bool:
        return (other.static[: len(this.static)], other.types[:3]) == mine

    with _lock:
        _traced.pop(this, None)
        others = list(filter(is_mine, _traced))
        for other in others:
            del _traced[other]
    return [*others, this]


# --- modules --------------------------------------------------------------------------------------


@functools.lru_cache(_KEPT)
def _module(this: _Launch, capability: tuple[int, int]) -> bytes:
    """StableHLO of a launch, whose `main` takes and gives flat arrays.

    Args:
      this: the launch.
      capability: that of the GPU which it is lowered for.
    """
    path = _path(this, capability)
    if path is not None and (found := _read(path)) is not None:
        return found
    # In a thread of its own, where no mesh and no setting of the user's program is in force.
    lowered = _in_a_thread(_lowered, this, jax.config.jax_default_device)
    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    if path is not None and _versions() == _VERSIONS:  # else sources have changed meanwhile
        _write(path, module)
    if device.default_device().is_hopper:
        _begin_to_compile(lowered)
    return module


def _lowered(this: _Launch, default_device: Any) -> jax.stages.Lowered:
    types = [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in this.types]
    with (
        jax.default_device(default_device),
        jax.enable_x64(False),
        jax.disable_jit(False),
        lowering_faster(),
        _keeping_garbage(),
    ):
        # A function of this call alone, with which JAX forgets what was traced.
        traced = jax.jit(lambda *arrays: this(*arrays), keep_unused=True).trace(*types)
        return traced.lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Python looks for garbage among all that is traced, for 5% of the time, and finds little."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()


def _in_a_thread(run: Callable, *args) -> Any:
    try:
        thread = ThreadPoolExecutor(1, "jax_flash-lowering")
        future = thread.submit(run, *args)
    except RuntimeError:  # Python is ending, and starts no more threads
        return run(*args)
    with thread:
        return future.result()


def _begin_to_compile(lowered: jax.stages.Lowered) -> None:
    """Each kernel of a module in a program of its own, as one program's come one after the other.

    The longest first. What that raises, the program that needs the kernel will raise too.
    """
    programs: list[Callable[[], Any]] = [lowered.compile]
    try:
        kernels = _kernels(lowered.compiler_ir("stablehlo"))
        kernels.sort(key=lambda kernel: len(kernel.attributes["module"]), reverse=True)
        programs = [kernel.compile for kernel in kernels]
    except TypeError as error:
        _logger.info("the kernels of a module are compiled one after the other: %s", error)
    with contextlib.suppress(RuntimeError):  # Python is ending, and starts no more threads
        for program in programs:
            _compiling().submit(program)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """A custom call of Mosaic GPU.

    Attributes:
      target: its name.
      attributes: the kernel, and what else Mosaic wants to know.
      operands, results: shapes and dtypes.
      aliases: results that are in the place of operands, by the number of these.
    """

    target: str
    attributes: dict[str, Any] = dataclasses.field(repr=False)  # megabytes
    operands: list[jax.ShapeDtypeStruct]
    results: list[jax.ShapeDtypeStruct]
    aliases: dict[int, int]

    @classmethod
    def of(cls, call: hlo.CustomCallOp) -> "_Kernel":
        attributes = ir.DictAttr(call.attributes["mhlo.backend_config"])
        aliases = map(hlo.OutputOperandAlias, call.output_operand_aliases or ())
        return cls(
            ir.StringAttr(call.call_target_name).value,
            {each.name: _python_value(each.attr) for each in attributes},
            [_python_type(x.type) for x in call.operands],
            [_python_type(x.type) for x in call.results],
            # A single result is no tuple, and has no index there.
            {x.operand_index: next(iter(x.output_tuple_indices), 0) for x in aliases},
        )

    def __call__(self, *operands: jax.Array) -> Sequence[jax.Array]:
        call = jax.ffi.ffi_call(self.target, self.results, input_output_aliases=self.aliases)
        return call(*operands, **self.attributes)

    def compile(self) -> None:
        """For the plugin to keep, which knows a kernel again in any program."""

        def jax_flash_kernel(*operands):
            return self(*operands)

        with jax.disable_jit(False):
            jax.jit(jax_flash_kernel).lower(*self.operands).compile()


def _kernels(module: ir.Module) -> list[_Kernel]:
    calls = []

    def look(operation) -> ir.WalkResult:
        call = operation.opview
        if isinstance(call, hlo.CustomCallOp) and "mosaic_gpu" in str(call.call_target_name):
            calls.append(call)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(look)
        return list(map(_Kernel.of, calls))


def _python_value(attribute: ir.Attribute) -> Any:
    """What `jax.ffi.ffi_call` takes for it."""
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes
    if isinstance(attribute, ir.BoolAttr):
        return attribute.value
    raise TypeError(f"an attribute that is not known: {attribute}")


def _python_type(of: ir.Type) -> jax.ShapeDtypeStruct:
    of = ir.RankedTensorType(of)
    for dtype in _DTYPES:
        if mlir.dtype_to_ir_type(np.dtype(dtype)) == of.element_type:
            return jax.ShapeDtypeStruct(tuple(of.shape), dtype)
    raise TypeError(f"operands or results that are not known: {of.element_type}")


@functools.cache
def _compiling() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "jax_flash-compiling")


def _path(this: _Launch, capability: tuple[int, int]) -> pathlib.Path | None:
    """Where a module is on disk, None where JAX has no cache on a disk."""
    directory = jax.config.jax_compilation_cache_dir
    if not directory or not jax.config.jax_enable_compilation_cache or "://" in directory:
        return None
    if _VERSIONS is None:
        return None
    return pathlib.Path(directory, "jax_flash", this.key(capability))


def _read(path: pathlib.Path) -> bytes | None:
    """A module, None if there is none or it was not written to its end."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _logger.warning("lowered kernels cannot be read from disk: %s", error)
        return None
    digest, module = found[:32], found[32:]
    if hashlib.sha256(module).digest() != digest:
        _logger.warning("%s is damaged and will be replaced", path)
        return None
    return module


def _write(path: pathlib.Path, module: bytes) -> None:
    own = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(hashlib.sha256(module).digest() + module)
        own.replace(path)  # others see all of it or nothing
    except OSError as error:
        _logger.warning("lowered kernels cannot be kept on disk: %s", error)
        with contextlib.suppress(OSError):
            own.unlink()
