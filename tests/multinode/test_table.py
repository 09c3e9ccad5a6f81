"""The lab's README names a test for each row of its table, and each test is there."""

import re

from tests.multinode.cluster import HERE

TABLE = (HERE / "lab" / "README.md").read_text().split("\n## What clients do")[1]


def test_each_row_names_tests_that_exist() -> None:
    tests = set(
        re.findall(r"^def (test_\w+)", "".join(f.read_text() for f in HERE.glob("*.py")), re.M)
    )
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        last = row.rstrip("| ").rpartition(" | ")[2]
        named = re.findall(r"`(test_\w+)`", last)
        assert named or last.startswith("the same"), row
        assert set(named) <= tests, row
