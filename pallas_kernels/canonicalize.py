"""Lowers kernels in less time, to the same PTX: with `joined.py`, what changes something of JAX's.

What compiles a Mosaic kernel begins with a canonicalization from the top down. For every operation
that it erases it visits the loop around it again, with all of its few hundred values: half of the
time that all takes. From the bottom up it is done in a fiftieth, and has left nothing for the other
to do.

Mosaic numbers its modules, in jax 0.11.2 in what it hashes too, so that equal kernels would compile
again and JAX's cache of programs would not know them. Without the number they are one.

And for every cast from or to 8 bits or fewer, such as bools, it runs ptxas to ask for a version,
which does not change.

Where a JAX has none of these functions, kernels are lowered as it does.
"""

import contextlib
import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxlib.mlir import ir, passmanager

_SERIALIZE = "_run_serde_pass"  # of jax.experimental.mosaic.gpu.core
_VERSION = "_get_ptxas_isa_version"  # of jax.experimental.mosaic.gpu.fragmented_array.mgpu_lib
_NAME = "mosaic_gpu.dump_basename"  # attribute of a module

_logger = logging.getLogger("jax_flash")
_lock = threading.Lock()
_users = 0
_changes = contextlib.ExitStack()


@contextlib.contextmanager
def lowering_faster() -> Iterator[None]:
    """Has kernels that are lowered meanwhile, in any thread, lowered in less time."""
    global _users
    with _lock:
        if not _users:
            _change()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _changes.close()


def _change() -> None:
    from jax.experimental.mosaic.gpu import core, fragmented_array  # a third of a second

    serialize = getattr(core, _SERIALIZE, None)
    library = getattr(getattr(fragmented_array, "mgpu_lib", None), "_mosaic_gpu_ext", None)
    version = getattr(library, _VERSION, None)

    def prepare_and_serialize(module, *args, **options):
        _canonicalize(module)
        _take_number_off(module)
        assert serialize is not None
        return serialize(module, *args, **options)

    if serialize is not None:
        _replace(core, _SERIALIZE, prepare_and_serialize)
    if version is not None:
        _replace(library, _VERSION, lambda: _answer(version))


def _replace(owner: Any, name: str, new: Callable) -> None:
    """Until `_changes` are undone."""
    _changes.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)


@functools.cache
def _answer(ask: Callable) -> Any:
    return ask()


def _canonicalize(module: ir.Module) -> None:
    passes = "builtin.module(canonicalize{top-down=false})"
    try:
        manager = passmanager.PassManager.parse(passes, module.context)
    except ValueError as error:
        _logger.info("kernels take longer to compile with this jaxlib: %s", error)
        return
    manager.run(module.operation)


def _take_number_off(module: ir.Module) -> None:
    attributes = module.operation.attributes
    if _NAME in attributes and isinstance(attributes[_NAME], ir.StringAttr):
        name = re.sub(r"_\d+$", "", ir.StringAttr(attributes[_NAME]).value)
        attributes[_NAME] = ir.StringAttr.get(name, module.context)
