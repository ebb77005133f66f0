"""Makes compiling kernels faster, to the same PTX.

What compiles a Mosaic kernel begins with a canonicalization from the top down. For every operation
that it erases it visits the loop around it again, with all of its few hundred values: half of the
time that all takes. From the bottom up it is done in a fiftieth, and has left nothing for the other
to do. The PTX is the same, letter by letter (`test_compile.py`).
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from jax.experimental.mosaic.gpu import core
from jaxlib.mlir import passmanager


@contextlib.contextmanager
def canonicalizing_first() -> Iterator[None]:
    """Has kernels that are lowered canonicalized from the bottom up before jax hands them on."""
    serialize = core._run_serde_pass

    def canonicalize_and_serialize(module, **options):
        passes = "builtin.module(canonicalize{top-down=false})"
        passmanager.PassManager.parse(passes, module.context).run(module.operation)
        return serialize(module, **options)

    with mock.patch.object(core, "_run_serde_pass", canonicalize_and_serialize):
        yield
