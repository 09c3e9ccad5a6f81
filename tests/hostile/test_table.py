import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_row_of_the_attack_table_names_tests_that_exist() -> None:
    rows = [line for line in (HERE / "README.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| attack", "|---"))]
    assert len(rows) > 20
    defined = set()
    for file in HERE.parent.rglob("test_*.py"):
        defined |= set(re.findall(r"def (test_\w+)\(", file.read_text()))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1])
        assert named, row
        assert set(named) <= defined, set(named) - defined
