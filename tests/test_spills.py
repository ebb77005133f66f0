"""Rows that say where a kernel would spill are each of a case that is compiled."""

import pytest

from pallas_kernels.spills import Spill, would_spill
from tests.support import fingerprint, spills
from tests.support.cases import long, slow

ROWS = spills.rows()
QUICK = ("forward.ADDRESSES[0]", "forward.ENDS[0]")
COMPILED = "forward.ADDRESSES[0]"


def test_any_row_of_a_table_says_so():
    table = tuple(Spill("any", lambda plan, n=n: plan == n) for n in (1, 2))
    assert [would_spill(table, plan) for plan in range(4)] == [False, True, True, False]


def test_the_case_of_a_row_is_compiled():
    assert {row.case for row in ROWS.values()} <= fingerprint.cases().keys()


def test_a_table_may_be_without_a_row():
    whole = spills.tables()
    with spills.without("forward.ENDS[0]", "forward.NUMBERS[1]"):
        fewer = spills.tables()
    left = {"forward.NUMBERS": whole["forward.NUMBERS"][:1]}
    assert fewer == {name: x for name, x in whole.items() if name != "forward.ENDS"} | left
    assert spills.tables() == whole


@pytest.mark.parametrize("row", [row if row in QUICK else long(row) for row in ROWS])
def test_a_row_decides_its_case(row):
    launches = spills.launches_of(ROWS[row].case)
    assert any(row in spills.decided(launch) for launch in launches)


@pytest.mark.compiler
@pytest.mark.parametrize("row", [row if row == COMPILED else slow(row) for row in ROWS])
def test_a_case_spills_without_its_row_if_that_is_needed(row):
    faults = spills.faults(ROWS[row].case, row)
    assert faults is not None
    assert bool(faults) == ROWS[row].is_needed
