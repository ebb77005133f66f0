"""Rows that say where a kernel would spill are each of a case that is compiled."""

import pytest

from pallas_kernels.spills import Spill, would_spill
from tests.support import fingerprint, spills
from tests.support.cases import long

ROWS = spills.rows()
QUICK = ("forward.ADDRESSES[0]", "forward.ENDS[0]")


def test_any_row_of_a_table_says_so():
    table = tuple(Spill("any", lambda plan, n=n: plan == n) for n in (1, 2))
    assert [would_spill(table, plan) for plan in range(4)] == [False, True, True, False]


def test_the_case_of_a_row_is_compiled():
    assert {case for *_, case in ROWS.values()} <= fingerprint.cases().keys()


@pytest.mark.parametrize("row", [row if row in QUICK else long(row) for row in ROWS])
def test_a_row_decides_its_case(row):
    *_, case = ROWS[row]
    assert any(row in spills.decided(launch) for launch in spills.launches_of(case))


@pytest.mark.compiler
def test_a_case_spills_without_its_row():
    row = "forward.ENDS[0]"
    *_, case = ROWS[row]
    (fault,) = spills.faults(case, row)
    assert "spills" in fault
