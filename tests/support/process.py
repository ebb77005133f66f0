"""One process of several that attend to one sequence together; tests/test_processes.py starts them.

python -m tests.support.process ADDRESS PROCESSES INDEX
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

DEVICES = 2  # of a process


def main(address: str, processes: int, index: int) -> None:
    """Checks this process's part of outputs and gradients against attention on one device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, index)
    mesh = jax.make_mesh((processes * DEVICES,), ("x",))
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((1, 32, heads, 8), np.float32) for heads in (8, 4, 4, 8)]

    def with_gradients(attention, query, key, value, d_out):
        out, vjp = jax.vjp(attention, query, key, value)
        return out, *vjp(d_out)

    expected = with_gradients(
        functools.partial(jax_flash.attention, is_causal=True, implementation="xla"), *whole
    )
    sequence = NamedSharding(mesh, P(None, "x"))
    parts = [jax.make_array_from_callback(x.shape, sequence, x.__getitem__) for x in whole]
    for method in (
        jax_flash.ring_attention,
        jax_flash.ulysses_attention,
        jax_flash.all_gather_attention,
    ):
        local = functools.partial(method, axis_name="x", is_causal=True, implementation="xla")
        attention = jax.shard_map(local, mesh=mesh, in_specs=sequence.spec, out_specs=sequence.spec)
        results = jax.jit(functools.partial(with_gradients, attention))(*parts)
        for actual, correct in zip(results, expected, strict=True):
            for shard in actual.addressable_shards:
                np.testing.assert_allclose(shard.data, jnp.asarray(correct)[shard.index], atol=1e-5)
        print(f"process {index}: {method.__name__} is right")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
