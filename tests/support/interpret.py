"""Pallas Mosaic GPU interpret mode, completed so that attention kernels run on CPU.

    with interpret_mode():
        out = kernel(...)

runs kernels on CPU, moves data as TMA and wgmma would, and raises `RaceError` if two threads
touched the same memory without a barrier between them. Stock interpret mode (jax 0.11.2 and
0.12.0.1) lacks what every FlashAttention-3-style kernel uses; this adds

  * `pl.run_state` over wgmma accumulators (`plgpu.ACC.init(...)`), and stores to them;
  * wgmma whose A operand is in registers, and race checks on operands in shared memory;
  * `copy_smem_to_gmem(..., reduction_op=...)` and `plgpu.atomic_*`;
  * `plgpu.RefUnion` of views of the same rows, where one has tiles and the other has none;
  * kernels that end without observing the last phase of a barrier, which the hardware allows.

Not seen by it: a missing `wgmma_wait` (wgmma runs at once), a deadlock (it hangs: run tests with a
timeout), layouts, TMA alignment, the size of shared memory. Compiling (compile.py) shows the rest.

All of this reaches into private modules of JAX; tests/test_interpret_support.py tells whether a
new version of JAX broke it.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import defaults

REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


MOST_WARPGROUPS = 8  # each is an XLA program that waits for the others on a thread of its own


class RaceError(AssertionError):
    """Two threads of a kernel touched the same memory without a barrier between them."""


_logger = logging.getLogger(__name__)
_race_states: list = []  # one for each kernel interpreted since the context was entered
_read_modify_write = threading.RLock()
_this_thread = threading.local()


@contextlib.contextmanager
def interpret_mode(detect_races: bool = True, alone: int = 2) -> Iterator[None]:
    """Runs every Mosaic GPU kernel traced inside on CPU.

    Args:
      detect_races: look for races too, which costs about half as much time again.
      alone: so many tiles of the forward have one consumer each, and not as many as there are SMs,
        so that most tests have the settings of problems that are larger than they can be.

    Raises:
      RuntimeError: XLA has too few threads for the warpgroups of a kernel.
      RaceError: on leaving, if any kernel run inside raced. Where is in the captured output, after
        "RACE DETECTED".
    """
    threads = int(os.environ.get("NPROC", os.cpu_count() or 1))
    if threads < MOST_WARPGROUPS:
        raise RuntimeError(
            f"XLA has {threads} threads, too few for kernels of {MOST_WARPGROUPS} warpgroups, which"
            " would hang: set NPROC=16 in the environment before jax starts, as conftest.py does"
        )
    _install()
    options = {}
    if any(f.name == "on_race" for f in dataclasses.fields(plgpu.InterpretGPUParams)):
        options["on_race"] = "warn"  # jax 0.12 would raise inside the kernel, 0.11 never does
    params = plgpu.InterpretGPUParams(detect_races=detect_races, **options)
    _race_states.clear()
    try:
        few_alone = mock.patch.object(defaults, "_TILES_ALONE", alone)
        with few_alone, plgpu.force_gpu_interpret_mode(params):
            yield
        jax.effects_barrier()  # dispatch is asynchronous: a kernel may still be running
        if any(state.races_found for state in _race_states):
            raise RaceError('a kernel raced: see "RACE DETECTED" in the captured output')
    finally:
        _race_states.clear()
        gpu_callbacks.reset_gpu_interpret_mode_state()  # a failed kernel leaves its memory behind


def _record_race_state(original):
    @functools.wraps(original, updated=())
    def make(*args, **kwargs):
        state = original(*args, **kwargs)
        _race_states.append(state)
        return state

    return make


def _where(interpreter) -> dict:
    return {"mesh_location": interpreter.mesh_location, "thread": interpreter.thread}


def _is_ref(value) -> bool:
    """The interpreter passes a ref as its allocation key; anything else is a value."""
    key = gpu_callbacks.HostAllocationKey.shape_and_dtype()
    return value.shape == key.shape and value.dtype == key.dtype


def _locate(shared, key_array, transforms):
    key = gpu_callbacks.HostAllocationKey.from_array(key_array)
    transforms = gpu_callbacks._remove_noop_transforms(transforms)
    return key, shared.access(key, jax.tree.map(int, transforms))


# Primitives that stock interpret mode does not know.


def _run_state(interpreter, eqn, token, invals):
    """Values become register buffers for the body's lifetime; refs pass through."""
    where = _where(interpreter)
    is_ref = [isinstance(v.aval, state_types.AbstractRef) for v in eqn.invars]
    refs = []
    for value, passes in zip(invals, is_ref, strict=True):
        if not passes:
            token, request = gpu_callbacks.call_make_allocation_request_array(
                token=token,
                compute_unit=interpreter.thread,
                memory_space_id=memory.get_memory_space_idx(gpu_core.MemorySpace.REGS),
                initial_ref_count=1,
            )
            token, value = gpu_callbacks.call_allocate_buffer(
                token=token,
                allocation_request_as_array=request,
                value=value,
                source_info=eqn.source_info,
                **where,
            )
        refs.append(value)
    token, _ = interpreter.interpret(eqn.params["jaxpr"], token, *refs)
    outs = []
    for ref, passes, var in zip(refs, is_ref, eqn.invars, strict=True):
        out = ref
        if not passes:
            buffer = {"allocation_key_as_array": ref, "source_info": eqn.source_info, **where}
            token, out = gpu_callbacks.call_get(
                token=token, result_shape_and_dtype=var.aval, transforms=(), **buffer
            )
            token = gpu_callbacks.call_deallocate_buffer(token=token, **buffer)
        outs.append(out)
    return token, outs


def _accumulator_store(interpreter, eqn, token, invals):
    """Registers belong to one warpgroup: nothing to check for races, as in every other access."""

    @gpu_callbacks.fail_on_exception
    def apply(token, thread, accumulator, value):
        shared = gpu_callbacks._get_shared_memory()
        key, where = _locate(shared, accumulator, ())
        old, _, _ = shared.get_buffer_content(key, where, thread)
        shared.store_buffer_content(key, where, np.asarray(value), thread)
        return token, old

    result = (gpu_callbacks.TOKEN_SHAPE_DTYPE, eqn.outvars[0].aval)
    token, old = callback.io_callback(apply, result, token, interpreter.thread, *invals)
    return token, [old]


def _atomic_store(interpreter, eqn, token, invals):
    ref, transforms, value = eqn.params["args_tree"].unflatten(invals)
    ref, transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, ref, transforms or ())
    combine = REDUCTIONS[eqn.params["atomic_type"].value]

    @gpu_callbacks.fail_on_exception
    def apply(token, thread, ref, transforms, value):
        shared = gpu_callbacks._get_shared_memory()
        key, where = _locate(shared, ref, transforms)
        with _read_modify_write:
            old, _, _ = shared.get_buffer_content(key, where, thread)
            shared.store_buffer_content(key, where, combine(old, np.asarray(value)), thread)
        return token

    token = callback.io_callback(
        apply, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, interpreter.thread, ref, transforms, value
    )
    return token, []


ADDED = {
    discharge.run_state_p: _run_state,
    gpu_primitives.wgmma_accumulator_store_p: _accumulator_store,
    gpu_primitives.atomic_store_p: _atomic_store,
}


def _interpret(original):
    """Shows added primitives as run_scoped, whose case takes any results and passes the token."""

    def disguise(eqn):
        if eqn.primitive not in ADDED:
            return eqn
        return eqn.replace(
            primitive=pallas_primitives.run_scoped_p, params={**eqn.params, "is": eqn.primitive}
        )

    @functools.wraps(original)
    def interpret(self, jaxpr, token, *args):
        if any(eqn.primitive in ADDED for eqn in jaxpr.eqns):
            jaxpr = jaxpr.replace(eqns=[disguise(eqn) for eqn in jaxpr.eqns])
        return original(self, jaxpr, token, *args)

    return interpret


def _run_scoped(original):
    @functools.wraps(original)
    def run_scoped(self, eqn, token, get_invals):
        if "is" not in eqn.params:
            return original(self, eqn, token, get_invals)
        return ADDED[eqn.params["is"]](self, eqn, token, get_invals())

    return run_scoped


# Primitives that stock interpret mode knows in part.


def _wgmma(original):
    """Takes A from registers too, and checks operands in shared memory for races."""

    @functools.wraps(original)
    def wgmma(**kw):
        shared = gpu_callbacks._get_shared_memory()
        thread, source_info = kw["thread"], kw.get("source_info")

        def operand(name):
            return _locate(shared, kw[f"{name}_allocation_key_as_array"], kw[f"{name}_transforms"])

        a = np.asarray(kw["a_allocation_key_as_array"])
        if shared.detect_races:
            # wgmma reads shared memory through the async proxy: a thread of its own, as the
            # interpreter does for TMA, which the issuer sees finish at once.
            clock = shared.incr_clock(thread)
            clock.inc(shared.get_next_tma_thread_id())
            for name in ("a", "b") if _is_ref(a) else ("b",):
                key, where = operand(name)
                gpu_callbacks.get_races().check_read(
                    thread, clock.async_smem_clock.copy(), key, where, source_info=source_info
                )
            with shared.lock:
                shared.clocks[thread].update(clock)
        if _is_ref(a):
            with np.errstate(over="ignore", invalid="ignore"):  # a warning would stop a warpgroup
                return original(**kw)

        info = memory.GPULoggingInfo(kw["mesh_location"], thread, source_info)
        b, _, _ = shared.get_buffer_content(*operand("b"), thread, logging_info=info)
        accumulator, where = operand("acc")
        old, _, _ = shared.get_buffer_content(accumulator, where, thread, logging_info=info)
        with np.errstate(over="ignore", invalid="ignore"):
            new = old + np.matmul(a, b, dtype=old.dtype)
        shared.store_buffer_content(accumulator, where, new, thread, logging_info=info)
        return kw["token"]

    return wgmma


def _copy_smem_to_gmem(original):
    """A reducing store: adds the destination to the tile, stores it, then restores the tile."""

    @functools.wraps(original)
    def copy(*, reduction_op, **kw):
        if reduction_op is None:
            return original(reduction_op=None, **kw)
        shared = gpu_callbacks._get_shared_memory()
        thread = kw["thread"]
        src, src_where = _locate(shared, kw["src_allocation_key_as_array"], kw["src_transforms"])
        dst, dst_where = _locate(shared, kw["dst_allocation_key_as_array"], kw["dst_transforms"])
        with _read_modify_write:
            tile, _, _ = shared.get_buffer_content(src, src_where, thread)
            old, _, _ = shared.get_buffer_content(dst, dst_where, thread)
            tile = tile.copy()
            combined = tile.copy()
            if old is not None:  # what lies outside the destination is clipped by the store
                inside = tuple(slice(n) for n in old.shape)
                combined[inside] = REDUCTIONS[reduction_op](old, tile[inside])
            shared.store_buffer_content(src, src_where, combined, thread)
            _this_thread.reducing = True
            try:
                return original(reduction_op=None, **kw)
            finally:
                _this_thread.reducing = False
                shared.store_buffer_content(src, src_where, tile, thread)

    return copy


def _resolve_ref(original):
    """Views of the same rows are one buffer, where stock interpret mode has a buffer for each."""

    @functools.wraps(original)
    def resolve_ref(aval, key, transforms):
        if isinstance(aval, gpu_core.AbstractRefUnion) and _are_views_of_the_same_rows(aval):
            _, transforms = original(aval, key, transforms)
            return key[0], transforms
        return original(aval, key, transforms)

    return resolve_ref


def _are_views_of_the_same_rows(union) -> bool:
    """Whether all refs have one shape of rows as wide as the swizzle, in tiles of 8 or in none.

    Such tiles stand one after the other as their rows would, and the swizzle is one of 8 rows.
    """

    def view(member):
        aval = jaxpr_interpret._member_inner_aval(member)
        of_kind = lambda kind: [t for t in member.transforms if isinstance(t, kind)]
        is_whole = all(t.tiling == (8, aval.shape[-1]) for t in of_kind(gpu_core.UntilingTransform))
        swizzles = [t.swizzle for t in of_kind(gpu_core.UnswizzleRef)]
        return (aval.shape, aval.dtype, *swizzles) if is_whole and swizzles else None

    views = {view(member) for member in jaxpr_interpret.union_members(union)}
    return len(views) == 1 and None not in views


def _post_read(original):
    """Two reductions into one place do not race, so a reducing store leaves no write behind."""

    @functools.wraps(original)
    def post_read(self, tma_thread_id, shared_memory):
        if not (shared_memory.detect_races and getattr(_this_thread, "reducing", False)):
            return original(self, tma_thread_id, shared_memory)
        self.clock.inc(tma_thread_id)
        self.write_clock = self.clock.copy()
        return None

    return post_read


def _deallocate(original):
    """Forgets who observed which phase before JAX checks that all saw the last one."""

    @functools.wraps(original)
    def deallocate(self):
        with self.cv:
            if self.ref_count == 1:
                self.last_observed_phase_by_thread.clear()
        return original(self)

    return deallocate


def _io_callback_impl(original):
    """Callbacks get copies in NumPy: operands put on a device take half of the time."""

    @functools.wraps(original)
    def run(*args, callback, **_):
        try:
            return [np.asarray(x) for x in callback(*map(np.array, args))]
        except BaseException:
            _logger.exception("a callback of interpret mode failed")
            raise

    return run


def _shape_and_dtype(original):
    """Of a class, which has one: it is asked for at every access."""
    return classmethod(functools.cache(original.__func__))


def _to_int(original):
    """Knows NumPy's scalars."""

    @functools.wraps(original)
    def to_int(x):
        return x.item() if isinstance(x, np.ndarray) else original(x)

    return to_int


def _on_the_last_device(original):
    """JAX lets 32 programs of a device wait, where a kernel's own would wait behind its users."""

    @functools.wraps(original)
    def run(*args, **kwargs):
        with jax.default_device(jax.local_devices(backend="cpu")[-1]):
            return original(*args, **kwargs)

    return run


@functools.cache
def _install() -> None:
    """Patches the interpreter, once and for this process."""

    def patch(owner, name, wrap):
        setattr(owner, name, wrap(getattr(owner, name)))

    patch(callback, "io_callback_impl", _io_callback_impl)
    patch(memory.HostAllocationRequest, "shape_and_dtype", _shape_and_dtype)
    patch(memory, "_to_int", _to_int)
    patch(thread_map, "_thread_map_callback", _on_the_last_device)
    patch(thread_map, "_run_jaxpr", _on_the_last_device)  # on threads of the callback's
    patch(jaxpr_interpret, "resolve_ref", _resolve_ref)
    patch(jaxpr_interpret.JaxprInterpreter, "interpret", _interpret)
    patch(jaxpr_interpret.JaxprInterpreter, "_interpret_run_scoped_p", _run_scoped)
    patch(gpu_callbacks, "wgmma", _wgmma)
    patch(gpu_callbacks, "copy_smem_to_gmem", _copy_smem_to_gmem)
    patch(gpu_callbacks, "GPURaceDetectionState", _record_race_state)
    patch(gpu_callbacks.AsyncCopySmemToGmemTask, "post_read", _post_read)
    patch(memory.Barrier, "deallocate", _deallocate)
