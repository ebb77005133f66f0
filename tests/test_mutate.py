"""The mistakes of `tests.support.mutate` are there to be made."""

import ast

import pytest

from tests.support.mutate import GPU_MISTAKES, MISTAKES, ROOT


@pytest.mark.parametrize("mistake", MISTAKES + GPU_MISTAKES, ids=lambda mistake: mistake.name)
def test_mistakes_are_of_the_code_of_today(mistake):
    assert ast.dump(ast.parse(mistake.applied())) != ast.dump(
        ast.parse((ROOT / mistake.path).read_text())
    )
    for name in mistake.tests.split():
        assert (ROOT / "tests" / f"test_{name}.py").exists()
