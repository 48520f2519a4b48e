"""The tokenizer files of a merged model: the donor's, changed as little as the new vocabulary asks for.

Tokens that the donor lacks become added tokens, as mergekit does it: they are found in text before it is cut up, and
the donor's merges or scores stay what they are.
"""

from __future__ import annotations

import json
from typing import Any

from ckpttool.errors import CorruptError, UnsupportedError
from ckpttool.vocabulary.merge import MergedVocabulary
from ckpttool.vocabulary.read import Added, read_bytes, read_json

TEMPLATE = "chat_template.jinja"
"""Where transformers 5 writes the chat template; it wins over one in tokenizer_config.json."""


def tokenizer_files(merged: MergedVocabulary, template: str | None = None) -> dict[str, bytes]:
    """The files to write, by name; of TOKENIZER_FILES the output must have no others.

    Files that need no change have the donor's bytes. ``template`` is the text of a chat template that replaces the
    donor's. Raises CorruptError, and UnsupportedError when the donor has more tokens than rows in files that cannot be
    shortened.
    """
    donor = merged.donor
    full = merged.inputs[merged.donor_at].vocabulary
    dropped = full.tokens.keys() - donor.tokens.keys()
    own = dropped & full.own
    files = {n: read_bytes(donor.directory / n) for n in donor.names}
    changed: dict[str, dict[str, Any]] = {}

    def opened(name: str) -> dict[str, Any]:
        if name not in changed:
            changed[name] = read_json(donor.directory / name) if name in files else {}
        return changed[name]

    if merged.new or dropped:
        added = {t: a for t, a in full.added.items() if t not in dropped} | merged.new
        whole = "tokenizer.json" in files
        if whole:
            data = opened("tokenizer.json")
            if own:
                _shorten(data["model"], own, merged.donor.directory.name)
            kept = [e for e in data.get("added_tokens") or [] if e["content"] not in dropped]
            listed = {e["content"] for e in kept}
            kept += [{"id": merged.tokens[t]} | a._asdict() for t, a in added.items() if t not in listed]
            data["added_tokens"] = sorted(kept, key=lambda e: int(e["id"]))
        elif own:
            raise UnsupportedError(
                f"{len(own)} tokens have no row in the embedding, and only a tokenizer.json can be shortened",
                where=str(donor.directory),
                hint="save the tokenizer as tokenizer.json, or merge with more rows",
            )
        if not whole or "added_tokens_decoder" in opened("tokenizer_config.json"):
            opened("tokenizer_config.json")["added_tokens_decoder"] = _decoder(merged, added)
        if not whole or "added_tokens.json" in files:
            changed["added_tokens.json"] = {t: merged.tokens[t] for t in added}
        if own:  # the algorithm's other forms would still hold what tokenizer.json has lost
            for name in ("vocab.json", "merges.txt", "tokenizer.model"):
                files.pop(name, None)
    if template is not None:
        if "chat_template" in opened("tokenizer_config.json"):
            del opened("tokenizer_config.json")["chat_template"]
        files.pop("chat_template.json", None)
        files[TEMPLATE] = template.encode(errors="replace")
    for name, data in changed.items():
        if name not in files or data != read_json(donor.directory / name):
            # A lone surrogate came as an escape, and leaves as one.
            text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
            files[name] = text.encode(errors="backslashreplace")
    return files


def _decoder(merged: MergedVocabulary, added: dict[str, Added]) -> dict[str, dict[str, Any]]:
    """``added_tokens_decoder`` of tokenizer_config.json."""
    by_id = sorted((merged.tokens[t], a) for t, a in added.items())
    return {str(i): a._asdict() for i, a in by_id}


def _shorten(model: dict[str, Any], lost: set[str], where: str) -> None:
    """Take tokens out of the algorithm's vocabulary, and the merges that need them out of BPE."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [e for e in vocabulary if e[0] not in lost]
        return
    model["vocab"] = {t: i for t, i in vocabulary.items() if t not in lost}
    merges = []
    for entry in model.get("merges") or []:
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
            raise CorruptError(f"tokenizer.json: a merge is {entry!r:.60}", where=where)
        if not lost & {*pair, "".join(pair)}:
            merges.append(entry)
    if "merges" in model:
        model["merges"] = merges
