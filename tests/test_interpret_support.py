"""Interpret mode as the tests use it: right where stock JAX stops, and able to fail."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support.interpret import RaceError, interpret_mode

SWIZZLE_128B = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def copy_through_smem(x, wait: bool):
    """TMA in, TMA out; without the wait the store reads what the load may still be writing."""

    def body(x_gmem, out_gmem, smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, smem, barrier)
        if wait:
            plgpu.barrier_wait(barrier)
        smem[...] = smem[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=(plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()),
    )(x)


def add_blocks(x, num_blocks: int):
    """Every block adds all of x into one destination."""

    def body(x_gmem, total_gmem, smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, total_gmem, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)

    total = jax.new_ref(jnp.ones(x.shape, x.dtype))
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=(plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()),
        grid=(num_blocks,),
        grid_names=("block",),
    )(x, total)
    return total[...]


def matmul_from_registers(a, b, start):
    """start + a @ b, with a in registers and the accumulator living across a loop."""
    steps = 2

    def body(a_gmem, b_gmem, start_gmem, out_gmem, a_smem, b_smem, start_smem, barrier):
        for source, destination in ((a_gmem, a_smem), (b_gmem, b_smem), (start_gmem, start_smem)):
            plgpu.copy_gmem_to_smem(source, destination, barrier)
        plgpu.barrier_wait(barrier)
        a_registers = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA)

        def accumulate(accumulator):
            @pl.loop(0, steps)
            def _(_):
                plgpu.wgmma(accumulator, a_registers, b_smem)
                plgpu.wgmma_wait(0)

        initial = plgpu.load(start_smem, layout=plgpu.Layout.WGMMA)
        total = pl.run_state(accumulate)(plgpu.ACC.init(initial))
        start_smem[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(start_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(start.shape, jnp.float32),
        scratch_types=(
            plgpu.SMEM(a.shape, a.dtype, transforms=SWIZZLE_128B),
            plgpu.SMEM(b.shape, b.dtype, transforms=SWIZZLE_128B),
            plgpu.SMEM(start.shape, jnp.float32),
            plgpu.Barrier(num_arrivals=3),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(a, b, start)
    return out, start + steps * (np.asarray(a, np.float32) @ np.asarray(b, np.float32))


def rows_doubled_through_two_views(x, tiling):
    """x `[2, n, 64]`, the rows of x[0] copied to shared memory without tiles, and read in tiles."""

    def body(x_gmem, out_gmem, smem, barrier):
        for_copies, in_tiles = smem
        first = jax.lax.axis_index("block") * 64  # traced, as beyond the end is refused else
        plgpu.copy_gmem_to_smem(x_gmem.at[0, pl.ds(first, 64)], for_copies, barrier)
        plgpu.barrier_wait(barrier)
        out_gmem[...] = in_tiles[...] * 2

    swizzle = plgpu.SwizzleTransform(128)
    views = [
        plgpu.SMEM((64, 64), x.dtype, transforms=transforms)
        for transforms in ((swizzle,), (plgpu.TilingTransform(tiling), swizzle))
    ]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), x.dtype),
        scratch_types=(plgpu.RefUnion(*views), plgpu.Barrier()),
        grid=(1,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(x)


def test_views_of_the_same_rows_are_one_memory():
    x = jnp.arange(2 * 19 * 64, dtype=jnp.bfloat16).reshape(2, 19, 64)
    with interpret_mode():
        out = rows_doubled_through_two_views(x, tiling=(8, 64))
    np.testing.assert_array_equal(out, np.pad(2 * x[0], ((0, 45), (0, 0))))


def test_views_of_other_tiles_are_not_one_memory():
    x = jnp.ones((2, 19, 64), jnp.bfloat16)
    with pytest.raises(Exception, match="disjoint lifetimes"), interpret_mode():
        jax.block_until_ready(rows_doubled_through_two_views(x, tiling=(16, 64)))


def test_waiting_kernel_is_right_and_does_not_race():
    x = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64)
    with interpret_mode():
        out = copy_through_smem(x, wait=True)
    np.testing.assert_array_equal(out, 2 * x)


def test_missing_barrier_wait_is_reported():
    with pytest.raises(RaceError), interpret_mode():
        copy_through_smem(jnp.ones((64, 64)), wait=False)


def test_race_in_an_earlier_kernel_is_reported():
    with pytest.raises(RaceError), interpret_mode():
        copy_through_smem(jnp.ones((64, 64)), wait=False)
        copy_through_smem(jnp.ones((64, 64)), wait=True)


def test_races_are_ignored_when_not_asked_for():
    with interpret_mode(detect_races=False):
        copy_through_smem(jnp.ones((64, 64)), wait=False)


def test_race_does_not_outlive_its_context():
    with pytest.raises(RaceError), interpret_mode():
        copy_through_smem(jnp.ones((64, 64)), wait=False)
    with interpret_mode():
        copy_through_smem(jnp.ones((64, 64)), wait=True)


def test_failing_kernel_leaves_interpret_mode_usable():
    def body(start_gmem, out_gmem, smem):
        out_gmem[...] = smem[pl.ds(start_gmem[0], 8)]

    read = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((8,), jnp.float32),
        scratch_types=(plgpu.SMEM((64,), jnp.float32),),
    )
    past_the_end = jnp.array([60])
    with pytest.raises(Exception, match=r"[Oo]ut-of-bounds"), interpret_mode():
        jax.block_until_ready(read(past_the_end))
    with interpret_mode():
        np.testing.assert_array_equal(copy_through_smem(jnp.ones((64, 64)), wait=True), 2)


def test_reducing_stores_add_up():
    x = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64)
    with interpret_mode():
        total = add_blocks(x, num_blocks=3)
    np.testing.assert_array_equal(total, 1 + 3 * x)


def test_wgmma_takes_a_from_registers():
    keys = jax.random.split(jax.random.key(0), 3)
    a = jax.random.normal(keys[0], (64, 64), jnp.bfloat16)
    b = jax.random.normal(keys[1], (64, 64), jnp.bfloat16)
    start = jax.random.normal(keys[2], (64, 64))
    with interpret_mode():
        out, expected = matmul_from_registers(a, b, start)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


def test_too_few_threads_are_refused(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    with pytest.raises(RuntimeError, match="NPROC=16"), interpret_mode():
        pass


A_TEST_THAT_HANGS = """
import jax.numpy as jnp
from tests.support.interpret import interpret_mode
from tests.test_interpret_support import wait_for_nothing


def test_hang():
    with interpret_mode():
        print(wait_for_nothing(jnp.ones((64,))))
"""


def wait_for_nothing(x):
    def body(x_gmem, out_gmem, barrier):
        plgpu.barrier_wait(barrier)
        out_gmem[...] = x_gmem[...]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=(plgpu.Barrier(),),
        num_threads=2,  # of one, the main thread would wait in Python
        thread_name="warpgroup",
    )(x)


@pytest.mark.long
def test_a_kernel_that_hangs_is_ended(tmp_path):
    """By the timeout that pyproject.toml chooses, while the main thread waits in C++."""
    root = pathlib.Path(__file__).parents[1]
    test = tmp_path / "test_hang.py"
    test.write_text(A_TEST_THAT_HANGS)
    options = ["-c", str(root / "pyproject.toml"), "-o", "timeout=3", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(test)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 1
    assert "Timeout" in run.stdout + run.stderr
