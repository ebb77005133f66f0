"""A tanh for tiles in registers: quicker than Mosaic GPU's, and more exact than the hardware's."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.ptx.arithmetic import rsqrt

# Of x, x^3, ... x^9 in sinh(x): by least squares, weighted until all maxima of the error of tanh
# are the same.
_SINH = (
    1.000000834184593,
    0.16665571619557273,
    0.008349997864132637,
    0.00019178718082572813,
    3.569496009475779e-06,
)
# Of x^2, in what x is multiplied with: from there on tanh is 1 in float32. Without it the square of
# sinh would be infinite from x = 550 on, and tanh 0.
_FAR = 64.0
# From there on tanh is 1, for logits whose bias may be infinite: `tanh_by_sinh` takes none.
TANH_IS_ONE = 16.0


def tanh_by_sinh(x: jax.Array) -> jax.Array:
    """tanh of a float32 tile, to 8e-7 of its value and float32's rounding, for abs(x) < 1e17."""
    sinh = x * polynomial(jnp.minimum(x * x, _FAR), _SINH)
    return sinh * rsqrt(sinh * sinh + 1.0)


def polynomial(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """The sum of coefficients[n] * x^n."""
    highest, second, *others = reversed(coefficients)
    value = x * highest + second
    for coefficient in others:
        value = value * x + coefficient
    return value
