"""Whether kernels run in Pallas's GPU interpret mode, without importing Pallas."""

from jax._src.config import pallas_tpu_interpret_mode_context_manager as _interpret_mode


def interpreting() -> bool:
    """Whether kernels traced now run in Pallas's GPU interpret mode."""
    return _interpret_mode.value is not None
