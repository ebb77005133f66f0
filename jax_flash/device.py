"""Which device a computation will run on, as far as it can be known before it is compiled."""

import dataclasses
import re
from typing import Any

import jax
import jax.core


@dataclasses.dataclass(frozen=True)
class Device:
    """What dispatch needs to know of a device.

    Attributes:
      platform: "cpu", "gpu", "tpu", ...
      kind: the vendor's name for it, such as "NVIDIA H100 80GB HBM3".
      compute_capability: (major, minor) of an NVIDIA GPU, None for anything else.
    """

    platform: str
    kind: str
    compute_capability: tuple[int, int] | None = None

    @property
    def is_hopper(self) -> bool:
        return self.compute_capability is not None and self.compute_capability[0] == 9

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.platform if self.kind == self.platform else f"{self.platform} ({self.kind})"
        major, minor = self.compute_capability
        return f"{self.kind} (compute capability {major}.{minor})"


def device_of(array: jax.Array) -> Device:
    """The device of a concrete array, or JAX's default device where `array` is being traced.

    A traced array does not say which device it will be on, so a program that is compiled for
    another device than the default one should name its implementation.
    """
    if not isinstance(array, jax.core.Tracer):
        return _describe(next(iter(array.devices())))
    return default_device()


def default_device() -> Device:
    """The device that JAX puts arrays on."""
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        return _describe(jax.local_devices(backend=default)[0])
    return _describe(default)


def _describe(device: Any) -> Device:
    # An AMD GPU is a "gpu" too, but its capability reads "gfx942", not "9.0".
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return Device(
        platform=device.platform,
        kind=device.device_kind,
        compute_capability=(int(capability[1]), int(capability[2])) if capability else None,
    )
