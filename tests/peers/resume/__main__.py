"""``make test-resume``: moves training runs from each framework to each other one, and checks docs/resume.md.

``--write`` writes its tables and plots. Exit code 1 where a run arrives otherwise than it left, goes on otherwise
than its framework's arithmetic explains, or where the page says something else.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from pathlib import Path

from tests.peers import megatron_cpu

MEMORY = Path("/dev/shm")  # noqa: S108  # many small files


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers.resume")
    parser.add_argument("--write", action="store_true", help="write the tables and plots of docs/resume.md")
    parser.add_argument("--only", default="", help="pairs whose line matches this regular expression; checks no page")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        megatron_cpu.install(Path(scratch) / "megatron_cpu")
        from transformers.utils import logging

        from tests.peers.resume import page, pairs

        logging.disable_progress_bar()
        moves = []
        with pairs.lab(Path(scratch) / "lab") as lab:
            for model, bf16 in page.KINDS:
                for sender, receiver in pairs.possible(model):
                    if re.search(asked.only, f"{model} {'bf16' if bf16 else 'f32'}, {sender.name} to {receiver.name}"):
                        moves.append(lab.move(sender, receiver, model, bf16=bf16))
                        print(moves[-1], flush=True)  # noqa: T201
    wrong = [m for m in moves if not m.right]
    print(f"{len(moves)} moves, {len(wrong)} of them wrong")  # noqa: T201
    if asked.only:
        return bool(wrong)
    text = page.with_tables(old := page.PAGE.read_text(encoding="utf-8"), moves)
    if asked.write:
        page.PLOTS.mkdir(exist_ok=True)
        page.PAGE.write_text(text, encoding="utf-8")
        for kind in page.KINDS:
            mine = [m for m in moves if (m.model, m.bf16) == kind]
            page.plot_of(kind).write_text(page.plot(mine, kind), encoding="utf-8")
    elif page.without_figures(text) != page.without_figures(old):
        print("docs/resume.md says something else: make test-resume ARGS=--write")  # noqa: T201
        return 1
    return bool(wrong)


if __name__ == "__main__":
    from tests.peers.resume.__main__ import main as named  # the ranks look for their jobs by the names of modules

    sys.exit(named())
