"""Rows that say where a kernel would spill are each of a case that is compiled."""

import pytest

from pallas_kernels.spills import Spill, would_spill
from tests.support import fingerprint, spills
from tests.support.cases import long

CASES = spills.cases_of_rows()
QUICK = ("forward.ADDRESSES[0]", "forward.ENDS[0]")
# Of settings that no default has, or beside what no case has.
UNDECIDED = (
    "backward.LATE_WEIGHTS[3]",
    "backward.DQ_BEFORE_ELEMENTS[3]",
    "forward.LISTED[1]",
)


def test_any_row_of_a_table_says_so():
    table = tuple(Spill("any", lambda plan, n=n: plan == n) for n in (1, 2))
    assert [would_spill(table, plan) for plan in range(4)] == [False, True, True, False]


def test_the_case_of_a_row_is_compiled():
    assert {*CASES.values()} <= fingerprint.cases().keys()


def test_without_a_row_a_table_is_shorter():
    whole = spills.tables()
    with spills.without("forward.ENDS[0]", "forward.NUMBERS[1]"):
        fewer = spills.tables()
        assert [table for table in whole if fewer.get(table) != whole[table]] == [
            "forward.NUMBERS",
            "forward.ENDS",
        ]
    assert spills.tables() == whole


@pytest.mark.parametrize(
    "row", [row if row in QUICK else long(row) for row in CASES if row not in UNDECIDED]
)
def test_a_row_decides_its_case(row):
    assert any(row in spills.decided(launch) for launch in spills.launches_of(CASES[row]))


@pytest.mark.compiler
def test_a_case_spills_without_its_row():
    row = "forward.ENDS[0]"
    (fault,) = spills.faults(CASES[row], row)
    assert "spills" in fault
