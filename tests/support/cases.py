"""Cases of a parametrised test that the README's command leaves out.

    @pytest.mark.parametrize(("width", "dtype"), [(64, jnp.float16), slow(64, jnp.bfloat16)])

Where a test is parametrised more than once, all cases of a value are left out. The marker
`fast_cases` names those that are not slow instead.
"""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that runs where `-m` asks for it alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """A case that CI runs."""
    return pytest.param(*values, marks=pytest.mark.long)
