"""Which device a computation will run on, as far as it can be known before it is compiled."""

import ctypes
import dataclasses
import functools
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
      slow_kernels: why the kernels are slow there, None where they are not.
    """

    platform: str
    kind: str
    compute_capability: tuple[int, int] | None = None
    slow_kernels: str | None = None

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
    described = Device(
        platform=device.platform,
        kind=device.device_kind,
        compute_capability=(int(capability[1]), int(capability[2])) if capability else None,
    )
    slow = described.is_hopper and _slow_kernels(jax.__version_info__)
    return dataclasses.replace(described, slow_kernels=slow) if slow else described


@functools.cache
def _slow_kernels(version: tuple[int, ...]) -> str | None:
    """Why a JAX of that version makes slow code of the kernels here, None if it does not.

    JAX 0.12.0 assembles by libnvJitLink where it finds it, beside CUDA or among what jax[cuda13]
    installs, and no flag says otherwise. That makes relocatable code, in which ptxas ignores
    setmaxnreg: registers of consumers spill and wgmma is serialised (C7504, C7511).
    """
    if version[:3] != (0, 12, 0):
        return None
    for library in ("libnvJitLink.so.13", "libnvJitLink.so.12"):
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return (
            f"jax {'.'.join(map(str, version))} assembles them with {library}, which ignores"
            " setmaxnreg: they take 2 to 6 times as long as with jax 0.11"
        )
    return None
