"""AOA text and its JSON forms become statements.

    statement  = names "->" names { "," attribute }
    names      = name { "," name }
    name       = IDENT [ "[" NUMBER ":" NUMBER "]" ]        IDENT may end in ^T (left side only)
    attribute  = "fused_qkv" | "fused_qkv_old" | "fused_ffn" | IDENT "=" ( NUMBER | STRING )

The characters of IDENT, NUMBER and STRING are Paddle's, so that what is read here is also read there. A file has one
statement a line, with blank lines and ``#`` comments, or is JSON: a list of statements, or Paddle's dict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Never

from ckpttool.aoa.invert import invert
from ckpttool.aoa.statement import DTYPES, MACROS, NOTHING, PLACEHOLDER, Cast, Statement, StatementPlace, Var
from ckpttool.core.files import Place as File
from ckpttool.errors import CkptError, UnsupportedError, UsageError

_TOKEN = re.compile(
    r"""(?P<arrow>->) | (?P<mark>[=:\[\],]) | (?P<number>\d+) | (?P<string>"[^"]*"|'[^']*')
    | (?P<ident>[A-Za-z_][A-Za-z.$_*\d^]*) | (?P<space>[ \t]+)""",
    re.VERBOSE,
)
_NUMBERS = ("axis", "num_heads", "num_key_value_groups")
_STRINGS = ("permute", "dtype", "src_dtype", "dst_dtype")
_KEYS = frozenset({"aoa_statements", "aoa_config_reverse", "enable_traceback"})
_TRANSPOSE = "^T"
_LARGEST = 64 << 20
"""Bytes of text; the rules of the largest models are some MB when they are written out per expert."""


class _Token(NamedTuple):
    kind: str
    text: str
    column: int
    """Column where it starts, from 1."""


_Attributes = Mapping[str, tuple[_Token, str | int]]


class _TokenReader:
    """The tokens of one statement and the place to blame."""

    def __init__(self, text: str, place: StatementPlace) -> None:
        self.text, self.place = text, place
        self.tokens = self._tokens()
        self.next = 0

    def wrong(
        self, what: str, column: int, *, length: int = 1, hint: str | None = None, error: type[CkptError] = UsageError
    ) -> Never:
        """Raise with the place, the statement and a mark below the offending token."""
        shown = self.text
        at = column - 1
        if len(shown) > 160:
            # The neighbourhood of the token is enough, and keeps the mark in the same screen line.
            cut = max(0, at - 60)
            shown, at = ("..." if cut else "") + shown[cut : cut + 140] + "...", at - cut + (3 if cut else 0)
        raise error(what, where=[self.place.at(column), shown, " " * at + "^" * max(1, length)], hint=hint)

    def blame(
        self, what: str, token: _Token | Var, hint: str | None = None, error: type[CkptError] = UsageError
    ) -> Never:
        text = token.text if isinstance(token, _Token) else token.name
        self.wrong(what, token.column, length=len(text), hint=hint, error=error)

    def _tokens(self) -> list[_Token]:
        out: list[_Token] = []
        at = 0
        while at < len(self.text):
            m = _TOKEN.match(self.text, at)
            if m is None:
                self._bad_character(at, out)
            if m.lastgroup != "space":
                out.append(_Token(str(m.lastgroup), m.group(), at + 1))
            at = m.end()
        return out

    def _bad_character(self, at: int, before: list[_Token]) -> Never:
        c = self.text[at]
        if c == "-" and before and before[-1].text == "=":
            self.wrong("a number of AOA text cannot be negative", at + 1, hint="axes count from 0")
        if c in "\"'":
            self.wrong(f"the string that starts with {c} has no end", at + 1)
        if c == "<" and self.text[at : at + 2] == "<-":
            self.wrong("`<-` is not AOA", at + 1, length=2, hint="sources stand on the left: `source -> target`")
        hint = "names of AOA text start with a letter or _ and have letters, digits, . and _"
        self.wrong(f"`{c}` cannot stand here", at + 1, hint=f"{hint}; for other names use --rename")

    def peek(self, ahead: int = 0) -> _Token | None:
        i = self.next + ahead
        return self.tokens[i] if i < len(self.tokens) else None

    def take(self, what: str) -> _Token:
        """The next token, whatever it is; ``what`` says what should stand there."""
        token = self.peek()
        if token is None:
            self.wrong(f"the statement ends where {what} should stand", len(self.text) + 1)
        self.next += 1
        return token

    def expect(self, text: str) -> _Token:
        token = self.take(f"`{text}`")
        if token.text != text:
            self.blame(f"`{token.text}` stands where `{text}` should stand", token)
        return token


def read_aoa(path: File) -> list[Statement]:
    """The statements of a file, turned round when it says ``aoa_config_reverse``.

    Raises UsageError for a file that cannot be read or is not AOA, UnsupportedError for what only Paddle can do or
    cannot be turned round; both name file, statement and column.
    """
    try:
        with path.open("rb") as f:
            raw = f.read(_LARGEST + 1)
    except OSError as e:
        raise UsageError(f"the AOA file cannot be read: {e.strerror or e}", where=str(path)) from None
    if len(raw) > _LARGEST:
        raise UsageError(f"more than {_LARGEST:,} bytes are not AOA text", where=str(path))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UsageError(f"the AOA file is not UTF-8 (byte {e.start})", where=str(path)) from None
    return parse_aoa(text, str(path))


def parse_aoa(text: str, file: str = "<text>") -> list[Statement]:
    """Like ``read_aoa``, for a text; ``file`` is its name in messages."""
    if text.lstrip()[:1] in ("{", "["):
        return _from_json(text, file)
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        code = _without_comment(line)
        if code.strip():
            lead = len(code) - len(code.lstrip())
            out.append(parse_statement(code.strip(), StatementPlace(file, line=number, shift=lead)))
    if not out:
        raise UsageError("the AOA file has no statement", where=file)
    return out


def _without_comment(line: str) -> str:
    """The line up to ``#``; a # within quotes stays, to be blamed with the rest of its string."""
    quote = ""
    for i, c in enumerate(line):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c == "#":
            return line[:i]
    return line


def _from_json(text: str, file: str) -> list[Statement]:
    try:
        document: Any = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as e:
        raise UsageError(f"this is not JSON: {e.msg}", where=f"{file}:{e.lineno}:{e.colno}") from None
    except (RecursionError, ValueError) as e:
        raise UsageError(f"this is not JSON for AOA: {e}", where=file) from None
    if isinstance(document, dict) and set(document) == {"aoa_config"}:
        document = document["aoa_config"]
    reverse = False
    if isinstance(document, dict):
        unknown = sorted(set(document) - _KEYS)
        if unknown:
            raise UsageError(
                f"`{unknown[0]}` is not a key of an AOA config", where=file, hint=f"known: {', '.join(sorted(_KEYS))}"
            )
        reverse = document.get("aoa_config_reverse", False)
        if not isinstance(reverse, bool):
            raise UsageError("`aoa_config_reverse` must be true or false", where=file)
        if "aoa_statements" not in document:
            raise UsageError("the AOA config has no `aoa_statements`", where=file)
        document = document["aoa_statements"]
    if not isinstance(document, list):
        raise UsageError("`aoa_statements` must be a list of strings", where=file)
    out = []
    for number, entry in enumerate(document, 1):
        place = StatementPlace(file, number=number)
        if not isinstance(entry, str):
            raise UsageError("a statement must be a string", where=place.at())
        if not entry.strip():
            raise UsageError("an empty string is not a statement", where=place.at())
        # Paddle lets a string hold several lines: each is a statement.
        out += [parse_statement(line.strip(), place) for line in entry.splitlines() if line.strip()]
    if not out:
        raise UsageError("the AOA file has no statement", where=file)
    return invert(out) if reverse else out


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key given twice would lose its first value."""
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key is given twice")
    return out


def parse_statement(text: str, place: StatementPlace = StatementPlace("<text>", number=1)) -> Statement:  # noqa: B008  # a constant
    """One statement. Raises UsageError or UnsupportedError with file, statement, column and the offending token."""
    reader = _TokenReader(text, place)
    arrows = [t for t in reader.tokens if t.kind == "arrow"]
    if not arrows:
        reader.wrong("a statement needs `->`", len(text) + 1, hint="`source -> target`")
    if len(arrows) > 1:
        hint = "give each its own line; in a Python list a comma is missing between two strings"
        reader.blame("a second `->`: two statements are glued together", arrows[1], hint)
    left = _names(reader)
    reader.expect("->")
    right, attributes = _right_side(reader)
    return _statement(reader, left, right, attributes)


def _names(reader: _TokenReader) -> list[Var]:
    out: list[Var] = []
    while True:
        out += _name(reader)
        token = reader.peek()
        if token is None or token.text != ",":
            return out
        reader.next += 1


def _name(reader: _TokenReader) -> list[Var]:
    """A name, or all that ``name[a:b]`` stands for."""
    token = reader.take("a name")
    if token.kind != "ident":
        hint = None
        if token.kind == "number":
            hint = "names of AOA text start with a letter or _; for other names use --rename"
        reader.blame(f"`{token.text}` stands where a name should stand", token, hint)
    name = token.text
    transposed = name.endswith(_TRANSPOSE)
    if transposed:
        name = name[: -len(_TRANSPOSE)]
    if "^" in name:
        reader.blame(f"`{token.text}`: ^T can only stand at the end of a name", token)
    if rest := re.search(r"\$[A-Z_]*", PLACEHOLDER.sub("", name)):
        known = "known: $LAYER_ID, $EXPERT_ID and $LAYER_ID_OFFSET"
        reader.blame(f"`{rest.group()}` is not a placeholder", token, known)
    if name.count("*") > 1:
        reader.blame(f"`{name}` has two *", token, "one * stands for one number; write one statement for each layer")
    if "*" in name and PLACEHOLDER.search(name):
        reader.blame(
            f"`{name}`: Paddle matches nothing when a placeholder and * stand in one name, and drops the statement",
            token,
            "write one statement for each layer: `model.layers.0.mlp.experts.*.w -> ...`",
        )
    following = reader.peek()
    if following is None or following.text != "[":
        return [Var(name, transposed, token.column)]
    return _span(reader, token, name, transposed=transposed)


def _span(reader: _TokenReader, token: _Token, name: str, *, transposed: bool) -> list[Var]:
    """``name[a:b]`` is name_a, ..., name_b-1."""
    opening = reader.take("`[`")
    if transposed or "*" in name:
        reader.blame(f"`{token.text}[...]`: neither ^T nor * can stand before [", token)
    first = reader.take("a number")
    reader.expect(":")
    last = reader.take("a number")
    for n in (first, last):
        if n.kind != "number":
            reader.blame(f"`{n.text}` stands where a number should stand", n)
    reader.expect("]")
    a, b = int(first.text), int(last.text)
    if a >= b:
        reader.blame(f"`{name}[{a}:{b}]` stands for no name", opening, "the second number is one more than the last")
    if b - a > 1 << 20:
        reader.blame(f"`{name}[{a}:{b}]` stands for {b - a:,} names", opening)
    return [Var(f"{name}_{i}", transposed=False, column=token.column) for i in range(a, b)]


def _right_side(reader: _TokenReader) -> tuple[list[Var], dict[str, tuple[_Token, str | int]]]:
    """Targets, and attributes by key; a macro is an attribute without a value."""
    right = list(_name(reader))
    attributes: dict[str, tuple[_Token, str | int]] = {}
    while (comma := reader.peek()) is not None:
        if comma.text != ",":
            reader.blame(f"`{comma.text}` stands where `,` should stand", comma)
        reader.next += 1
        token = reader.peek()
        if token is None:
            reader.wrong("the statement ends with `,`", comma.column)
        following = reader.peek(1)
        is_pair = following is not None and following.text == "="
        if not is_pair and token.text not in MACROS:
            if attributes:
                reader.blame(f"`{token.text}` stands behind the attributes", token, "targets stand right behind `->`")
            right += _name(reader)
            continue
        reader.next += 1
        if token.text in attributes:
            reader.blame(f"`{token.text}` is given twice", token)
        if not is_pair:
            attributes[token.text] = (token, "")
            continue
        reader.expect("=")
        attributes[token.text] = (token, _value(reader, token))
    return right, attributes


def _value(reader: _TokenReader, key: _Token) -> str | int:
    value = reader.take("a value")
    if key.text in _NUMBERS:
        if value.kind != "number":
            reader.blame(f"`{key.text}` needs a number, not `{value.text}`", value)
        return int(value.text)
    if key.text in _STRINGS:
        if value.kind != "string":
            reader.blame(f"`{key.text}` needs a string in quotes, not `{value.text}`", value)
        return value.text[1:-1]
    known = ", ".join((*MACROS, *_NUMBERS, *_STRINGS))
    return reader.blame(f"`{key.text}` is not an attribute", key, f"known: {known}")


def _statement(reader: _TokenReader, left: list[Var], right: list[Var], attributes: _Attributes) -> Statement:
    """Check what can be checked without a checkpoint."""

    def number(key: str) -> int | None:
        return int(attributes[key][1]) if key in attributes else None

    _check_names(reader, left, right)
    macros = [m for m in MACROS if m in attributes]
    if len(macros) > 1:
        reader.blame("a statement can have one fused_... only", attributes[macros[1]][0])
    macro = macros[0] if macros else None
    statement = Statement(
        tuple(left),
        tuple(right),
        reader.text,
        reader.place,
        axis=number("axis"),
        permute=_permutation(reader, *attributes["permute"]) if "permute" in attributes else None,
        cast=_cast(reader, attributes),
        macro=macro,
        num_heads=number("num_heads") or 0,
        num_key_value_groups=number("num_key_value_groups") or 0,
    )
    if NOTHING in (left[0].name, right[0].name):
        if attributes:
            reader.blame("a statement with `_` has no attributes", next(iter(attributes.values()))[0])
        return statement
    operators = [k for k in ("permute", "dtype", "src_dtype") if k in attributes]
    many = len(left) > 1 or len(right) > 1
    unknown = any("*" in v.name for v in left)
    if operators and (macro or many or unknown or "axis" in attributes or len(operators) > 1):
        what = f"`{operators[-1]}` cannot be combined with what else the statement does"
        hint = "one operation per statement: give the result a name and use it in a second statement"
        reader.blame(what, attributes[operators[-1]][0], hint)
    if macro:
        _check_macro(reader, statement, attributes, unknown=unknown)
        return statement
    for key in ("num_heads", "num_key_value_groups"):
        if key in attributes:
            reader.blame(f"`{key}` belongs to fused_qkv", attributes[key][0])
    if len(right) > 1 and (len(left) > 1 or unknown):
        reader.blame(
            f"{'several' if unknown else len(left)} sources and {len(right)} targets: one side must have one name",
            right[1],
            "join the sources under a name of your own, then take that apart in a second statement",
        )
    if (many or unknown) and "axis" not in attributes:
        reader.wrong("joining and taking apart need `axis=`", len(reader.text) + 1, hint="add `, axis=0`")
    spans = any(t.text == "[" for t in reader.tokens)  # with one element it is a join all the same
    if not many and not unknown and "axis" in attributes and not spans:
        reader.blame("`axis` has no effect in a statement with one source and one target", attributes["axis"][0])
    return statement


def _check_names(reader: _TokenReader, left: list[Var], right: list[Var]) -> None:
    for v in right:
        if v.transposed:
            hint = f"first `... -> {v.name}`, then `{v.name}^T -> {v.name}`"
            reader.blame(f"`{v}` cannot be a target: ^T is a way to read a tensor", v, hint)
        if "*" in v.name:
            hint = "Paddle looks them up in the model that it loads into; here write the names out"
            reader.blame(f"`{v.name}`: nothing says how many targets * stands for", v, hint, UnsupportedError)
    names = [v.name for v in right]
    for i, v in enumerate(right):
        if v.name in names[:i]:
            reader.blame(f"`{v.name}` is a target twice", v)
    for v in (*left, *right):
        if v.name == NOTHING and (len(left) > 1 or len(right) > 1 or v.transposed):
            reader.blame(
                "`_` must stand alone on its side and face one name", v, "give the part a name and drop it afterwards"
            )
    if left[0].name == NOTHING == right[0].name:
        reader.blame("`_ -> _` says nothing", left[0])
    if right[0].name == NOTHING and left[0].transposed:
        reader.blame("a tensor that is dropped needs no ^T", left[0])
    if right[0].name == NOTHING and "*" in left[0].name:
        reader.blame("* stands for the sources of a join", left[0], "to drop by a pattern use --remove-keys")
    wanted = {p for v in (*left, *right) for p in PLACEHOLDER.findall(v.name)}
    if {"$LAYER_ID", "$LAYER_ID_OFFSET"} <= wanted:
        bad = next(v for v in (*left, *right) if "$LAYER_ID_OFFSET" in v.name)
        reader.blame("$LAYER_ID and $LAYER_ID_OFFSET cannot stand in one statement", bad)
    for v in (*left, *right):
        missing = sorted(wanted - set(PLACEHOLDER.findall(v.name)))
        if missing and v.name != NOTHING:
            reader.blame(f"`{v.name}` lacks {missing[0]}: every name of the statement must have it", v)


def _check_macro(reader: _TokenReader, s: Statement, attributes: _Attributes, *, unknown: bool) -> None:
    token = attributes[str(s.macro)][0]
    sides = (len(s.left), len(s.right))
    allowed = {
        "fused_ffn": {(1, 1): "ffn -> ffn", (2, 1): "gate, up -> ffn", (1, 2): "ffn -> gate, up"},
        "fused_qkv": {(3, 1): "q, k, v -> qkv", (1, 3): "qkv -> q, k, v"},
        "fused_qkv_old": {(1, 1): "qkv -> qkv", (3, 1): "q, k, v -> qkv", (1, 3): "qkv -> q, k, v"},
    }[str(s.macro)]
    if unknown or sides not in allowed:
        forms = "; ".join(f"`{form}`" for form in allowed.values())
        reader.blame(f"{s.macro} cannot join {sides[0]} and {sides[1]} names", token, f"its forms are {forms}")
    for key in ("num_heads", "num_key_value_groups"):
        given = key in attributes
        if s.macro == "fused_ffn":
            if given:
                reader.blame(f"`{key}` belongs to fused_qkv", attributes[key][0])
        elif not given or not attributes[key][1]:
            at = attributes[key][0] if given else token
            reader.blame(f"{s.macro} needs `{key}=`, a number above 0", at)
    if s.num_key_value_groups and s.num_heads % s.num_key_value_groups:
        what = f"num_heads={s.num_heads} is not a multiple of num_key_value_groups={s.num_key_value_groups}"
        reader.blame(what, attributes["num_heads"][0], "num_key_value_groups is the number of key/value heads")


def _permutation(reader: _TokenReader, key: _Token, value: str | int) -> tuple[int, ...]:
    m = re.fullmatch(r"\s*\[\s*(\d+(?:\s*,\s*\d+)*)?\s*,?\s*\]\s*", str(value))
    order = tuple(int(n) for n in m.group(1).split(",")) if m and m.group(1) else ()
    if m is None or sorted(order) != list(range(len(order))):
        reader.blame(
            f"permute=`{value}` is not an order of axes", key, 'for example permute="[2,0,1]"; "[]" reverses all'
        )
    return order


def _cast(reader: _TokenReader, attributes: _Attributes) -> Cast | None:
    given = [k for k in ("dtype", "src_dtype", "dst_dtype") if k in attributes]
    if not given:
        return None
    if given not in (["dtype"], ["src_dtype", "dst_dtype"]):
        reader.blame(
            f"`{' and '.join(given)}`: a cast says `dtype`, or `src_dtype` and `dst_dtype`", attributes[given[-1]][0]
        )
    for key in given:
        if attributes[key][1] not in DTYPES:
            token, dtype = attributes[key]
            hint = f"it can cast between {', '.join(DTYPES)}"
            reader.blame(f"AOA text cannot cast to or from `{dtype}`", token, hint, UnsupportedError)
    if given == ["dtype"]:
        return Cast(str(attributes["dtype"][1]))
    return Cast(str(attributes["dst_dtype"][1]), str(attributes["src_dtype"][1]))
