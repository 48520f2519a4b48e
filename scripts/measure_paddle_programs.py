"""Give broken programs to Paddle and write down what it does: python scripts/measure_paddle_programs.py

Writes fixtures/paddle_programs/accepted.json. Run it after a change to the tables of broken programs in
tests/convert_json; tests/convert_json/test_accepted.py says when. Needs the .venv-paddle of `make test-peers`, and two
minutes: everything is measured twice, since a program that reads bytes nobody wrote may do otherwise the next time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.convert_json.accepted import CASES, FIXTURE
from tests.peers.programs_side import measure


def main() -> None:
    """Measure all, compare, write."""
    names = [(table, name) for table, cases in CASES.items() for name in cases]
    with tempfile.TemporaryDirectory() as folder:
        one, other = (measure(names, Path(folder) / str(i)) for i in range(2))
    differ = [f"{t}, {n}: {one[t][n]}, {other[t][n]}" for t, n in names if one[t][n] != other[t][n]]
    if differ:
        sys.exit("error: measured twice, and not the same\n" + "\n".join(differ))
    FIXTURE.write_text(json.dumps(one, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{FIXTURE}: {len(names)} cases, paddle {one['paddle']}")


if __name__ == "__main__":
    main()
