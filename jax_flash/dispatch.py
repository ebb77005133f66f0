"""Which implementation runs a call, and why.

Every implementation says what it cannot compute (`unsupported`); this module adds what the device
cannot run, tries them fastest first, and says in the log "jax_flash" when a faster one was passed
over: a silent fall back to a slower one is how programs come to run out of memory.
"""

import dataclasses
import functools
import importlib
import logging
import types

import jax

from jax_flash import device, xla
from jax_flash.call import Call, by_device, without_derivative
from jax_flash.sharding import unsplit

# Modules of this package, fastest first, imported where they are asked.
IMPLEMENTATIONS = {"mosaic_gpu": "autodiff", "cudnn": "cudnn", "xla": "xla"}
_WHERE_KERNELS_ARE_SLOW = ("cudnn", "mosaic_gpu", "xla")

_logger = logging.getLogger("jax_flash")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation runs a call, and why not a faster one.

    Attributes:
      implementation: "mosaic_gpu", "cudnn" or "xla".
      reasons: for each faster implementation, fastest first, why it was passed over; empty where
        the caller named the implementation.
    """

    implementation: str
    reasons: dict[str, str]

    @property
    def passed_over(self) -> list[str]:
        """The reasons as text."""
        return [f"{name} passed over: {reason}" for name, reason in self.reasons.items()]

    def __str__(self) -> str:
        return "\n  ".join([self.implementation, *self.passed_over])


def choose(call: Call, implementation: str | None) -> Explanation:
    """Chooses the implementation that runs `call`.

    Args:
      call: the checked arguments.
      implementation: a name from `IMPLEMENTATIONS`, or None for the fastest that can do the call.

    Raises:
      NotImplementedError: `implementation` cannot do the call or run on this device.
    """
    here = device.device_of(call.query)
    if here.slow_kernels:
        _log_once(logging.WARNING, f"the kernels are slow here: {here.slow_kernels}")
    if implementation is not None:
        return _named(implementation, here, _unsupported(implementation, call))
    reasons: dict[str, str] = {}
    for name in _WHERE_KERNELS_ARE_SLOW if here.slow_kernels else IMPLEMENTATIONS:
        reason = _device_reason(name, here) or _unsupported(name, call)
        if reason is None:
            explanation = Explanation(name, reasons)
            if reasons:
                log_choice(logging.WARNING if here.is_hopper else logging.INFO, explanation)
            return explanation
        reasons[name] = reason
    raise NotImplementedError(f"No implementation can do this call: {reasons}")


def attention(call: Call, implementation: str | None) -> tuple[jax.Array, jax.Array | None]:
    """Runs `call` on the implementation that `choose` names."""
    chosen = choose(call, implementation).implementation
    run = _run if call.scales is None else _run_without_derivative
    return run(chosen, call)


def _run(implementation: str, call: Call) -> tuple[jax.Array, jax.Array | None]:
    if call.is_empty:
        return xla.nothing_visible(call.query, call.value.shape[-1], call.out_dtype, call.arrays)
    module = _module(implementation, call)
    return by_device(module.attention, call, plain=implementation == "xla")


_run_without_derivative = without_derivative(
    "attention of Quantized arrays has no derivative:"
    " jax_flash.attention_fp8 is FP8 with gradients.",
    static_argnums=(0,),
)(_run)


def _unsupported(implementation: str, call: Call) -> str | None:
    """Why it cannot do the call, None if it can."""
    reason = _module(implementation, call).unsupported(call)
    return reason or (None if implementation == "xla" else unsplit(call.arrays))


def _module(implementation: str, call: Call) -> types.ModuleType:
    name = IMPLEMENTATIONS[implementation]
    if name == "autodiff" and call.scales is not None:
        name = "kernel_fp8"
    return importlib.import_module(f"jax_flash.{name}")


def _named(implementation: str, here: device.Device, unsupported: str | None) -> Explanation:
    """The implementation that the caller named.

    Args:
      unsupported: why it cannot do the call, None if it can.

    Raises:
      NotImplementedError: it cannot, or cannot run on this device.
    """
    reason = _device_reason(implementation, here)
    if implementation == "mosaic_gpu" and here.platform != "gpu":
        reason = None  # a machine without a GPU may lower for one elsewhere
    reason = reason or unsupported
    if reason is not None:
        raise NotImplementedError(f"implementation={implementation!r}: {reason}")
    return Explanation(implementation, {})


def _device_reason(implementation: str, here: device.Device) -> str | None:
    """Why `implementation` cannot run on the device, None if it can."""
    if implementation == "mosaic_gpu" and not here.is_hopper:
        return f"it needs a Hopper GPU (compute capability 9.x); this is {here}"
    if implementation == "cudnn" and here.compute_capability is None:
        return f"it needs an NVIDIA GPU; this is {here}"
    return None


def log_choice(level: int, explanation: Explanation) -> None:
    """Says what runs and what was passed over, once."""
    why = "; ".join(explanation.passed_over)
    _log_once(level, f"attention runs on {explanation.implementation} ({why})")


@functools.cache
def _log_once(level: int, message: str) -> None:
    _logger.log(level, "%s", message)
