"""``python -m tests.peers.families``: every architecture of transformers, made tiny, cut and judged."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.peers.families.judge import Found
    from tests.peers.families.tiny import Architecture


def quiet() -> None:
    """No network, one thread, no progress bars."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def scratch() -> Path:
    shared = Path("/dev/shm")  # noqa: S108 - memory, where there is such a place
    return Path(tempfile.mkdtemp(prefix="families-", dir=shared if os.access(shared, os.W_OK) else None))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers.families", description=__doc__)
    parser.add_argument("--only", default="", metavar="MODEL_TYPE[,...]", help="also GROUP, MODEL_TYPE:GROUP, CLASS")
    parser.add_argument("--family", default="", metavar="NAME|FILE", help="instead of what config.json names")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the tiny config")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the files here")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--covered", action="store_true", help="leave out what no family names")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table of docs/ here")
    parser.add_argument("--variations", action="store_true", help="also with biases and ties turned round")
    parser.add_argument("--names", type=Path, metavar="FILE", help="write the names of all stored tensors here")
    said = parser.parse_args()
    quiet()
    from tests.peers.families.tiny import architectures, find

    wanted = [w for w in said.only.split(",") if w]
    groups = {a.group for a in architectures()}
    chosen: list[Architecture] = []
    for word in wanted or sorted(groups):
        got = [a for a in architectures() if a.group == word] if word in groups else find(word)
        if not got:
            print(f"no architecture `{word}`", file=sys.stderr)  # noqa: T201 - for the person who runs it
            return 2
        chosen += [a for a in got if a not in chosen]
    root = said.keep or scratch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the files would stay
    try:
        return run(chosen, root, said)
    finally:
        if said.keep is None:
            shutil.rmtree(root, ignore_errors=True)


def run(chosen: list[Architecture], root: Path, said: argparse.Namespace) -> int:
    found = list(all_found(chosen, root, said))
    failures = [f for f in found if f.wrong or f.varied_wrong]
    refused = [f for f in found if f.refused and (f.params or not said.covered)]
    print(  # noqa: T201 - for the person who runs it
        f"{sum(f.passed for f in found)} of {len(found)} pass, {len(failures)} fail, {len(refused)} are refused, "
        f"{sum(bool(f.not_made) for f in found)} are not made tiny"
    )
    if said.page is not None:
        import transformers

        from tests.peers.families import table

        table.write(said.page, found, transformers.__version__)
    if said.names is not None:
        from tests.helpers.stored_names import write

        write([f.stored for f in found if f.passed and f.stored is not None], said.names, anew=not said.only)
    return 1 if failures else 0


def one_found(job: tuple[Architecture, Path, argparse.Namespace]) -> Found:
    """One architecture; its files are gone afterwards unless they are to be kept."""
    from tests.peers.families.judge import judge, variations

    one, root, said = job
    changes = {name: json.loads(value) for name, _, value in (text.partition("=") for text in said.set)}
    folder = root / f"{one.model_type}_{one.group}_{one.cls}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        found = judge(one, folder, said.family, changes, covered_only=said.covered)
        if said.variations and found.params and not found.refused:
            for switched, other in variations(one, folder / "variations"):
                found.varied.append(switched)
                found.varied_wrong += [f"with {switched}: {w}" for w in (other.wrong or [other.refused]) if w]
        return found
    finally:
        if said.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def all_found(chosen: list[Architecture], root: Path, said: argparse.Namespace) -> Iterator[Found]:
    """What comes out for each, shown as it comes."""
    jobs = [(one, root, said) for one in chosen]
    with contextlib.ExitStack() as stack:
        results: Iterable[Found] = map(one_found, jobs)
        if said.jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("fork").Pool(said.jobs))
            results = pool.imap(one_found, jobs)
        for found in results:
            if not (said.covered and found.refused and not found.params):
                print(describe(found, long=len(chosen) <= 20), flush=True)  # noqa: T201 - for the person who runs it
            yield found


def describe(found: Found, *, long: bool = True) -> str:
    head = f"{found.architecture.name} {found.architecture.cls}"
    if found.not_made:
        return f"NOT MADE {head}: {found.not_made}"
    if found.refused:
        return f"REFUSED {head} ({found.params:,} parameters, family {found.family}): {found.refused}"
    lines = [f"{'FAILED' if found.wrong else 'ok'} {head} ({found.params:,} parameters), family {found.family}"]
    if found.wrong or long:
        lines += [f"{k}: {v}" for k, v in found.back.items()]
        lines += [
            f"exchanged at {k}: " + ("nothing is cut but the vocabulary" if v < 0 else f"logits differ by {v:.1e}")
            for k, v in found.swapped.items()
        ]
        lines += [f"as transformers' plan: {found.plan}"] if found.plan else []
        lines += [f"to {k}: {v}" for k, v in found.targets.items()]
        lines.append(f"tensors: {found.declared}")
        lines.append(f"cut: {' '.join(found.cut)}")
        lines.append(f"whole: {' '.join(found.whole)}")
    if found.not_run:
        lines.append(f"logits not compared: {found.not_run}")
    if found.varied:
        lines.append(f"also with {', '.join(found.varied)}")
    if found.by_number:
        lines.append(f"exchanged besides: {found.by_number}")
    if found.unseen:
        lines.append(f"logits do not show: {' '.join(found.unseen)}")
    lines += [f"WRONG {w}" for w in (*found.wrong, *found.varied_wrong)]
    return "\n    ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
