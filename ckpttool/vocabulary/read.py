"""A model's tokens and their ids, from the tokenizer files beside it.

Read are ``tokenizer.json`` (BPE, Unigram, WordPiece, WordLevel), ``vocab.json`` and a sentencepiece
``tokenizer.model``, each with the added tokens of ``tokenizer_config.json`` and, where there is no
``tokenizer.json``, of ``added_tokens.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpttool.containers.protobuf import message_classes, parsed
from ckpttool.core.files import AnyPlace, DataFile, Place
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.storage.json_file import MAX_BYTES, TooLargeError, parse_json
from ckpttool.storage.listing import leads_away, refuse_away
from ckpttool.storage.place import parse_place, read_all

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that make up a tokenizer; whoever writes another tokenizer replaces or leaves out all of them."""

_OTHERS = (
    "tekken.json",
    "tiktoken.model",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "qwen.tiktoken",
    "tokenizer.model.v3",
)
"""Vocabularies in forms that are not read: ids follow from code, not from the file alone."""


class Added(NamedTuple):
    """A token that is looked for before text is cut up; fields and defaults as ``tokenizers.AddedToken`` has them."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one model."""

    directory: Place
    names: tuple[str, ...]
    """Present files of TOKENIZER_FILES."""
    tokens: dict[str, int]
    """All tokens, by rising id; no two share one."""
    own: frozenset[str]
    """The tokens of the algorithm itself (BPE, Unigram); the others are only ``added``."""
    added: dict[str, Added]

    @property
    def follow(self) -> int:
        """The id that tokenizer libraries give to a token that is added (``AddedVocabulary.add_tokens``)."""
        return max([len(self.own), *(self.tokens[t] + 1 for t in self.added)])

    def within(self, rows: int) -> Vocabulary:
        """The vocabulary without the tokens that have no row in a matrix of ``rows``."""
        kept = {t: i for t, i in self.tokens.items() if i < rows}
        if len(kept) == len(self.tokens):
            return self
        added = {t: a for t, a in self.added.items() if t in kept}
        return Vocabulary(self.directory, self.names, kept, self.own & kept.keys(), added)


def read_vocabulary(directory: AnyPlace) -> Vocabulary:
    """Read the tokenizer files of a model.

    Raises IncompleteError (there are none), UnsupportedError (a form that is not read), CorruptError (a file breaks
    its format) and ConflictError (a token's stated id is not the one that libraries would give it).
    """
    root = parse_place(directory)
    names = tuple([n for n in TOKENIZER_FILES if (root / n).is_file()])
    config = read_json(root / "tokenizer_config.json") if "tokenizer_config.json" in names else {}
    described = dict(_described(config.get("added_tokens_decoder") or {}, root / "tokenizer_config.json"))
    if "tokenizer.json" in names:
        path = root / "tokenizer.json"
        data = read_json(path)
        own = _own(data.get("model"), path)
        stated = list(_listed(data.get("added_tokens") or [], path))
        listed = {a.content for a, _ in stated}
        stated += [pair for t, pair in described.items() if t not in listed]
        ids = dict(own)
        follow = len(own)
        for token, number in stated:
            given = ids.setdefault(token.content, follow)
            if given != number:
                raise ConflictError(
                    f"added token {token.content!r} has id {number}, and tokenizer libraries give it {given}",
                    where=str(path),
                    hint="added tokens come after the vocabulary, in their order; put a placeholder in each hole",
                )
            follow = max(follow, given + 1)
    elif "vocab.json" in names or "tokenizer.model" in names:
        path = root / ("vocab.json" if "vocab.json" in names else "tokenizer.model")
        own = _mapped(read_json(path), path) if path.suffix == ".json" else _pieces(path)
        extra = root / "added_tokens.json"
        numbers = _mapped(read_json(extra), extra) if "added_tokens.json" in names else {}
        stated = [(Added(t, normalized=False), i) for t, i in numbers.items() if t not in described]
        stated += described.values()
        ids = own | {a.content: i for a, i in stated}
    else:
        raise _missing(root)
    added = {a.content: described.get(a.content, (a, 0))[0] for a, _ in stated}
    tokens = dict(sorted(ids.items(), key=lambda pair: pair[1]))
    _distinct(tokens, path)
    return Vocabulary(root, names, tokens, frozenset(own), added)


def read_json(path: Place) -> dict[str, Any]:
    """A JSON object. Raises CorruptError when the file holds something else."""
    try:
        data = parse_json(read_bytes(path))
    except ValueError as e:
        raise _wrong(path, f"{'too large' if isinstance(e, TooLargeError) else 'no JSON'}: {e}") from None
    if not isinstance(data, dict):
        raise _wrong(path, "no JSON object")
    return data


def read_bytes(path: Place) -> bytes:
    """A tokenizer file. Raises IncompleteError, or CorruptError when it is too large to be one."""
    try:
        if target := leads_away(path):
            refuse_away(path, target)
        if DataFile.at(path).size > MAX_BYTES:
            raise _wrong(path, f"larger than any tokenizer ({MAX_BYTES:,} bytes)")
        return read_all(path)
    except OSError as e:
        raise IncompleteError(f"cannot read {path.name}: {e.strerror}", where=str(path)) from None


def _missing(root: Place) -> IncompleteError | UnsupportedError:
    other = next((n for n in _OTHERS if (root / n).is_file()), None)
    if other is not None:
        return UnsupportedError(
            f"a vocabulary is not read from {other}",
            where=str(root),
            hint="save the tokenizer as tokenizer.json: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return IncompleteError(
        "the model has no tokenizer files", where=str(root), hint="copy its tokenizer.json beside the weights"
    )


def _wrong(path: Place, what: str) -> CorruptError:
    return CorruptError(f"{path.name}: {what}", where=str(path))


def _number(value: object, token: object, path: Place) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise _wrong(path, f"the id of token {token!r} is {value!r:.40}")
    return value


def _mapped(table: object, path: Place) -> dict[str, int]:
    """{token: id}."""
    if not isinstance(table, dict):
        raise _wrong(path, "the vocabulary is not a table of tokens")
    return {t: _number(i, t, path) for t, i in table.items()}


def _own(model: object, path: Place) -> dict[str, int]:
    """The vocabulary of the algorithm: a table, or for Unigram a list of [token, score]."""
    if not isinstance(model, dict):
        raise _wrong(path, "there is no `model`")
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, list):
        return _mapped(vocabulary, path)
    tokens = {}
    for i, entry in enumerate(vocabulary):
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
            raise _wrong(path, f"entry {i} of the vocabulary is not [token, score]")
        tokens[entry[0]] = i
    return tokens


def _token(entry: object, path: Place) -> Added:
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise _wrong(path, f"an added token is {entry!r:.60}")
    fields = {f: entry[f] for f in Added._fields[1:] if f in entry}
    if not all(isinstance(v, bool) for v in fields.values()):
        raise _wrong(path, f"the settings of added token {entry['content']!r} are not true or false")
    return Added(entry["content"], **fields)


def _listed(entries: object, path: Place) -> Iterator[tuple[Added, int]]:
    """``added_tokens`` of tokenizer.json, in order; libraries pass over the empty one."""
    if not isinstance(entries, list):
        raise _wrong(path, "`added_tokens` is not a list")
    for entry in entries:
        token = _token(entry, path)
        if token.content:
            yield token, _number(entry.get("id"), token.content, path)


def _described(entries: object, path: Place) -> Iterator[tuple[str, tuple[Added, int]]]:
    """``added_tokens_decoder`` of tokenizer_config.json, by rising id."""
    if not isinstance(entries, Mapping):
        raise _wrong(path, "`added_tokens_decoder` is not a table")
    found = []
    for key, entry in entries.items():
        token = _token(entry, path)
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise _wrong(path, f"the id of token {token.content!r} is {key!r:.40}")
        found.append((_number(int(key), token.content, path), token))
    for number, token in sorted(found):
        if token.content:
            yield token.content, (token, number)


def _distinct(tokens: Mapping[str, int], path: Place) -> None:
    """Raises CorruptError when two tokens have one id; ``tokens`` are sorted by id."""
    before = None
    for token, number in tokens.items():
        if before is not None and before[1] == number:
            raise _wrong(path, f"tokens {before[0]!r} and {token!r} have the same id {number}")
        before = token, number


# -- sentencepiece: ids count the pieces


def _pieces(path: Place) -> dict[str, int]:
    """Tokens of a sentencepiece model (``sentencepiece_model.proto``). Raises UnsupportedError when it is none."""
    classes = message_classes({"Piece": "1:piece:bytes", "Model": "1:pieces:Piece*"})
    tokens: dict[str, int] = {}
    with suppress(ValueError):
        pieces = parsed(classes["Model"], read_bytes(path)).pieces
        if all(p.HasField("piece") for p in pieces):
            tokens = {p.piece.decode(): i for i, p in enumerate(pieces)}
    if not tokens:
        raise UnsupportedError(
            f"{path.name} is not a sentencepiece model, and the only file with a vocabulary",
            where=str(path),
            hint="save the tokenizer as tokenizer.json",
        )
    return tokens
