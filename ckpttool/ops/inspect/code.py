"""Files beside the weights that can run code when somebody loads the checkpoint.

Python that a config names runs with ``trust_remote_code``; a pickle runs whatever functions it imports. Both are found
by reading names; nothing is imported, run or unpickled here. Chat templates run in a sandbox and are not code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckpttool.answers.findings import Finding
from ckpttool.core.files import Place
from ckpttool.core.words import count, some
from ckpttool.errors import CkptError
from ckpttool.storage.listing import PICKLES, Listing

CONFIGS = (
    "config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)
PICKLE_SUFFIXES = (*PICKLES, ".pkl", ".pickle", ".joblib", ".metadata")
GENERATE = "custom_generate/generate.py"
"""What ``generate()`` runs in place of its own decoding."""


def code_findings(listing: Listing, proven: Collection[Place] = ()) -> Iterator[Finding]:
    """Python files and pickles that can run code. ``proven`` are pickles that were read in full: they hold none."""
    if listing.single:
        return
    yield from _python(listing)
    from ckpttool.containers.pickle_imports import imports, is_dangerous

    for name in listing.names:
        path = listing.path(name)
        if not name.endswith(PICKLE_SUFFIXES) or path in proven:
            continue
        try:
            found = imports(path)
        except OSError:
            continue
        bad = [n for n in found if is_dangerous(n)]
        if bad and not is_paddles(path):
            text = f"{name} calls {_named(bad)} when it is loaded"
            yield Finding("pickle-code", text, str(path), "do not load it; torch.load(weights_only=True) refuses it")
        elif found and not bad:
            text = f"{name} imports {_named(found)} when it is loaded"
            yield Finding(
                "pickle-imports", text, str(path), "weights do not need it: load it only if you trust its source"
            )


def code_note(listing: Listing, proven: Collection[Place] = ()) -> str:
    """One line that names the files that can run code; "" for none."""
    found = [f.text for f in code_findings(listing, proven) if f.id != "pickle-imports"]
    return "this checkpoint can run code: " + "; ".join(found) if found else ""


def _named(names: Collection[str]) -> str:
    from ckpttool.containers.pickle_imports import UNKNOWN

    return some(["a function whose name it works out" if n == UNKNOWN else f"`{n}`" for n in names], 2)


def is_paddles(path: Place) -> bool:
    """Whether it is a pickle of Paddle's, which spell an array with ``eval``: our reader takes that form only."""
    from ckpttool.containers.paddle_pickle import read_pickle

    try:
        read_pickle(path)
    except CkptError:
        return False
    return True


def _python(listing: Listing) -> Iterator[Finding]:
    """Python files that a config names, and what may be imported by them."""
    own = [n for n in listing.names if n.endswith(".py")]
    if (listing.root / GENERATE).is_file():
        own.append(GENERATE)
    named: dict[str, str] = {}
    for config in CONFIGS:
        try:
            data = listing.json(config)
        except CkptError:
            continue
        for reference in _references(data):
            repository, away, dotted = reference.rpartition("--")
            file = dotted.split(".")[0] + ".py"
            if away:
                named.setdefault(f"code of the repository `{repository}`", config)
            elif file in own:
                named.setdefault(file, config)
        if data.get("trust_remote_code") is True and own:
            named.setdefault(own[0], config)
    if GENERATE in own:
        named.setdefault(GENERATE, "generate()")
    if named:
        first, config = next(iter(named.items()))
        others = len(set(own) | set(named)) - 1
        more = f" and {count(others, 'more file')}" if others else ""
        text = f"{first}{more} can run when the model is loaded with trust_remote_code ({config} names it)"
        yield Finding("remote-code", text, str(listing.root), "read the code before you trust it")


def _references(config: Mapping[str, Any]) -> Iterator[str]:
    """``module.Class`` of every entry of auto_map and custom_pipelines."""
    auto = config.get("auto_map")
    for value in auto.values() if isinstance(auto, dict) else ():
        yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str))
    pipelines = config.get("custom_pipelines")
    for value in pipelines.values() if isinstance(pipelines, dict) else ():
        if isinstance(value, dict) and isinstance(value.get("impl"), str):
            yield value["impl"]
