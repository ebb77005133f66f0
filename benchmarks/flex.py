"""FlexAttention of PyTorch as a candidate of benchmarks.attention, where torch is installed.

Arrays go over by DLPack, in the order of axes that it takes: `[B, N, T, H]`. `create_block_mask` is
called beforehand. One compilation serves both passes, so that forward keeps the LSE too. Times are
those between CUDA events around each call: its kernels, and gaps of a few microseconds.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rows import Row

# What a turn may take: where all pairs add to few numbers, one call of a gradient takes seconds.
_TURN_MS = 1000.0
_SLEEP_CYCLES = 20_000_000  # some 10 ms, in which the host gets ahead of the GPU
_SAID = 300  # characters of an error
_PROGRAMS = 1000  # that torch.compile keeps of one function; by default it gives up after 8


@functools.cache
def _torch() -> Any:
    """PyTorch, with its limits on what it keeps raised, which are named otherwise in torch 2.5."""
    import torch
    import torch._dynamo

    config = torch._dynamo.config
    for new, old in (
        ("recompile_limit", "cache_size_limit"),
        ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
    ):
        setattr(config, new if hasattr(config, new) else old, _PROGRAMS)
    return torch


def _heads_second(x: Any) -> Any:
    """Of `[B, T, N, H]`, `[B, N, T, H]` and back."""
    return x.transpose(1, 2).contiguous()


@dataclasses.dataclass(frozen=True)
class Program:
    """A pass with its inputs, which gives what a program of JAX gives, and times itself.

    Attributes:
      attend: of query, key and value, the output.
      leaves: query, key, value, and captured tensors whose gradients are taken.
      dout: the cotangent of the output; None for the forward pass.
    """

    attend: Callable
    leaves: tuple
    dout: Any

    def _run(self) -> tuple:
        out = self.attend(*self.leaves[:3])
        if self.dout is None:
            return (out,)
        return out, *_torch().autograd.grad(out, self.leaves, self.dout)

    def __call__(self) -> tuple[jax.Array, ...]:
        results = self._run()
        tensors = [*map(_heads_second, results[:4]), *results[4:]]
        if self.leaves[0].is_cuda:
            _torch().cuda.synchronize()
        return tuple(jnp.from_dlpack(x.detach().contiguous()) for x in tensors)

    def milliseconds(self, iterations: int) -> list[float]:
        """Of each of some calls, after one to warm up; fewer if they take long."""
        cuda = _torch().cuda
        start = time.perf_counter()
        self._run()
        cuda.synchronize()
        first = 1e3 * (time.perf_counter() - start)
        iterations = max(1, min(iterations, int(_TURN_MS / first)))
        calls = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
        cuda._sleep(_SLEEP_CYCLES)
        for before, after in calls:
            before.record()
            self._run()
            after.record()
        cuda.synchronize()
        return [before.elapsed_time(after) for before, after in calls]


@dataclasses.dataclass(frozen=True)
class FlexAttention:
    """A candidate.

    Attributes:
      functions: of a row, `torch` and the tensors that the row's functions capture, by name: its
        mask_mod and score_mod, where it has them.
      mode: of `torch.compile`.
      compiles: False to run it by PyTorch's operations, as on a CPU.
    """

    functions: Callable[[Row, Any, dict[str, Any]], dict[str, Callable]]
    mode: str | None = None
    compiles: bool = True

    def build(self, row: Row, passes: str) -> Program:
        """Compiles and runs a pass, in one thread at a time.

        Raises:
          RuntimeError: what PyTorch says of a failure, of which the first line says little.
        """
        if passes == "backward":
            raise NotImplementedError("its backward is timed with its forward alone")
        try:
            attend, leaves, dout = self._compiled(row)
            program = Program(attend, leaves, dout if passes == "both" else None)
            program()
            if leaves[0].is_cuda:
                program.milliseconds(1)  # here a failure does not end the benchmark
        except Exception as e:
            said = " ".join(f"{type(e).__name__}: {e}".split())
            raise RuntimeError(said[:_SAID]) from e
        return program

    @functools.lru_cache(64)  # noqa: B019, candidates live as long as the process
    def _compiled(self, row: Row) -> tuple[Callable, tuple, Any]:
        """What both passes share: attention, the tensors that have gradients, and the cotangent."""
        torch = _torch()
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        query, key, value, dout, captured = _tensors(row)
        functions = self.functions(row, torch, captured)
        block_mask = None
        if "mask_mod" in functions:
            sizes = query.shape[0], None, query.shape[2], key.shape[2]
            block_mask = create_block_mask(functions["mask_mod"], *sizes, device=query.device)
        attention = flex_attention
        if self.compiles:
            attention = torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=self.mode)
        attend = functools.partial(
            attention, score_mod=functions.get("score_mod"), block_mask=block_mask
        )
        wanted = [captured[name] for name in row.gradients]
        leaves = (query, key, value, *wanted)
        for x in leaves:
            x.requires_grad_()
        return attend, leaves, dout


def _tensors(row: Row) -> tuple:
    """Query, key, value and the cotangent of the output, and the row's other inputs by name."""
    torch = _torch()
    inputs = [torch.from_dlpack(x) for x in jax.block_until_ready(row.inputs())]
    more = {name: torch.clone(x) for name, x in row.named(inputs[4:]).items()}
    return *map(_heads_second, inputs[:4]), more
