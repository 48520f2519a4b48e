"""The tokenizer files of a merged model: the donor's, changed as little as the new vocabulary asks for.

Tokens that the donor lacks become added tokens, as mergekit does it: they are found in text before it is cut up, and
the donor's merges or scores stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from ckpttool.errors import CorruptError, UnsupportedError
from ckpttool.vocabulary.merge import MergedVocabulary
from ckpttool.vocabulary.read import Added, read_bytes, read_json

TEMPLATE = "chat_template.jinja"
"""File to which transformers 5 writes the chat template; it wins over one in tokenizer_config.json."""


_WITH_TOKENS = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
"""Files that list tokens one by one."""


def tokenizer_files(merged: MergedVocabulary, template: str | None = None) -> dict[str, bytes]:
    """The files to write, by name; of TOKENIZER_FILES the output must have no others.

    Files that need no change have the donor's bytes. ``template`` is the text of a chat template that replaces the
    donor's. Raises CorruptError, and UnsupportedError when the donor has more tokens than rows in files that cannot be
    shortened.
    """
    donor = merged.donor
    full = merged.inputs[merged.donor_at].vocabulary
    dropped = full.tokens.keys() - donor.tokens.keys()
    files = {n: read_bytes(donor.directory / n) for n in donor.names}
    before = {n: read_json(donor.directory / n) if n in files else {} for n in _WITH_TOKENS}
    after = dict(before)
    if merged.new or dropped:
        own = dropped & full.own
        added = _added(merged)
        whole = "tokenizer.json" in files
        if own and not whole:
            raise UnsupportedError(
                f"{len(own)} tokens have no row in the embedding, and only a tokenizer.json can be shortened",
                where=str(donor.directory),
                hint="save the tokenizer as tokenizer.json",
            )
        if whole:
            after["tokenizer.json"] = _tokenizer(merged, before["tokenizer.json"], own, str(donor.directory))
        if not whole or "added_tokens_decoder" in before["tokenizer_config.json"]:
            decoder = {str(merged.tokens[t]): a._asdict() for t, a in added.items()}
            after["tokenizer_config.json"] = before["tokenizer_config.json"] | {"added_tokens_decoder": decoder}
        if not whole or "added_tokens.json" in files:
            after["added_tokens.json"] = {t: merged.tokens[t] for t in added}
        if own:  # the algorithm's other forms still hold what tokenizer.json has lost
            for name in ("vocab.json", "merges.txt", "tokenizer.model"):
                files.pop(name, None)
    if template is not None:
        config = after["tokenizer_config.json"]
        after["tokenizer_config.json"] = {k: v for k, v in config.items() if k != "chat_template"}
        files.pop("chat_template.json", None)
        files[TEMPLATE] = template.encode(errors="replace")
    for name, data in after.items():
        if data != before[name]:
            # A lone surrogate came as an escape, and leaves as one.
            text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
            files[name] = text.encode(errors="backslashreplace")
    return files


def _added(merged: MergedVocabulary) -> dict[str, Added]:
    """All added tokens of the output, by rising id."""
    return dict(sorted((merged.donor.added | merged.new).items(), key=lambda pair: merged.tokens[pair[0]]))


def _tokenizer(merged: MergedVocabulary, data: Mapping[str, Any], own: AbstractSet[str], where: str) -> dict[str, Any]:
    """tokenizer.json with the added tokens of the output, and without the tokens ``own`` of the algorithm."""
    listed = {e["content"]: e for e in data.get("added_tokens") or []}
    entries = [listed.get(t, {"id": merged.tokens[t]} | a._asdict()) for t, a in _added(merged).items()]
    model = _shortened(data["model"], own, where) if own else data["model"]
    return {**data, "added_tokens": entries, "model": model}


def _shortened(model: Mapping[str, Any], lost: AbstractSet[str], where: str) -> dict[str, Any]:
    """The algorithm without some tokens, and BPE without the merges that need or make them."""
    if isinstance(model["vocab"], list):
        return {**model, "vocab": [e for e in model["vocab"] if e[0] not in lost]}
    out = {**model, "vocab": {t: i for t, i in model["vocab"].items() if t not in lost}}
    if "merges" in model:
        out["merges"] = []
        for entry in model["merges"] or []:
            pair = entry.split(" ") if isinstance(entry, str) else entry
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
                raise CorruptError(f"tokenizer.json: a merge is {entry!r:.60}", where=where)
            if not lost & {*pair, "".join(pair)}:
                out["merges"].append(entry)
    return out
