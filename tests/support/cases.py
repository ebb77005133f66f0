"""Cases of a parametrised test that are left out unless -m asks for them."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case, of one value for each argument: `slow(64, jnp.float16)`.

    Where several arguments are parametrised on their own, all cases of a value; the marker
    `fast_cases` names others.
    """
    return pytest.param(*values, marks=pytest.mark.slow)
