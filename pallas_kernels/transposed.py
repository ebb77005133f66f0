"""One value for each query of a transposed tile, whose rows are keys."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

QUERIES = plgpu.Layout.WGMMA.reduce(0)  # one value a column of a transposed tile


def load_per_query(row, keys: int) -> jax.Array:
    """A row of statistics in shared memory over a transposed tile."""
    return per_query(plgpu.load(row, layout=QUERIES), keys)


def load_words(row) -> jax.Array:
    """Words of dropout of queries that stand in a row of statistics."""
    return lax.bitcast_convert_type(plgpu.load(row, layout=QUERIES), jnp.int32)


def per_query(values: jax.Array, keys: int) -> jax.Array:
    """Broadcasts one value a query over a transposed tile."""
    return lax.broadcast_in_dim(values, (keys, values.shape[0]), [1])
