"""The documentation names every anomaly, and each one is produced by a test."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_anomaly_is_documented_and_tested() -> None:
    spec = importlib.util.spec_from_file_location("parser_tests", Path(__file__).with_name("test_parser.py"))
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    tested = {name for case in tests.DAMAGED.values() for name in case.anomalies}
    tested |= {name for row in tests.DECLARED for name in row[-1]}
    tested |= {"invalid_id", "unexpected_control"}  # have tests of their own
    table = (ROOT / "docs" / "harmony.md").read_text().split("| anomaly |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == tested
