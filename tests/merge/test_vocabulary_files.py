"""Tokenizer files: what is read from them, and what is written for a merged model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest

from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.vocabulary import read as reading
from ckpttool.vocabulary.chat import BUILTIN, chat_template
from ckpttool.vocabulary.merge import Input, merge_vocabularies
from ckpttool.vocabulary.read import TOKENIZER_FILES, Added, Vocabulary, read_vocabulary
from ckpttool.vocabulary.write import tokenizer_files

PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def entry(token: str, number: int, **settings: bool) -> dict[str, Any]:
    return {"id": number, "content": token} | PLAIN | settings


def bpe(own: Sequence[str], added: Sequence[str] = (), merges: Sequence[Any] = ()) -> dict[str, Any]:
    """tokenizer.json of a BPE vocabulary."""
    return {
        "version": "1.0",
        "added_tokens": [entry(t, len(own) + i) for i, t in enumerate(added)],
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(own)}, "merges": list(merges)},
    }


def write(root: Path, **files: Any) -> Path:
    """Files by name, with __ for the dot; anything but bytes and text as JSON."""
    root.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = root / name.replace("__", ".")
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return root


def merged_files(*vocabularies: Vocabulary, rows: int | None = None, **how: Any) -> dict[str, bytes]:
    models = [Input(v.directory.name, v, rows or max(v.tokens.values()) + 1) for v in vocabularies]
    return tokenizer_files(merge_vocabularies(models, 0, **how))


# -- reading


def test_bpe(tmp_path: Path) -> None:
    found = read_vocabulary(write(tmp_path, tokenizer__json=bpe("ab", ["<s>", "a"][:1]), tokenizer_config__json={}))
    assert found.tokens == {"a": 0, "b": 1, "<s>": 2}
    assert found.own == {"a", "b"}
    assert found.added == {"<s>": Added("<s>", normalized=False, special=True)}
    assert found.names == ("tokenizer.json", "tokenizer_config.json")
    assert found.follow == 3


def test_unigram_and_wordpiece(tmp_path: Path) -> None:
    unigram = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581a", -1.5]]}}
    assert read_vocabulary(write(tmp_path / "u", tokenizer__json=unigram)).tokens == {"<unk>": 0, "\u2581a": 1}
    pieces = {"model": {"type": "WordPiece", "vocab": {"[UNK]": 1, "##a": 0}}}
    assert list(read_vocabulary(write(tmp_path / "w", tokenizer__json=pieces)).tokens) == ["##a", "[UNK]"]


def test_added_tokens_may_be_in_the_vocabulary(tmp_path: Path) -> None:
    data = bpe(["<s>", "a", "b"])
    data["added_tokens"] = [entry("<s>", 0), entry("", 9), entry("<t>", 3)]
    found = read_vocabulary(write(tmp_path, tokenizer__json=data))
    assert found.tokens == {"<s>": 0, "a": 1, "b": 2, "<t>": 3}
    assert list(found.added) == ["<s>", "<t>"]


def test_the_config_adds_tokens_and_settings(tmp_path: Path) -> None:
    decoder = {"3": entry("<y>", 3), "2": entry("<x>", 2, lstrip=True)}
    write(tmp_path, tokenizer__json=bpe("ab", ["<x>"]), tokenizer_config__json={"added_tokens_decoder": decoder})
    found = read_vocabulary(tmp_path)
    assert found.tokens == {"a": 0, "b": 1, "<x>": 2, "<y>": 3}
    assert found.added["<x>"].lstrip


def test_holes(tmp_path: Path) -> None:
    data = bpe([])
    data["model"]["vocab"] = {"b": 7, "a": 0}
    found = read_vocabulary(write(tmp_path, tokenizer__json=data))
    assert found.tokens == {"a": 0, "b": 7}
    assert found.follow == 2
    data["added_tokens"] = [entry("<s>", 8)]
    with pytest.raises(ConflictError, match="has id 8, and tokenizer libraries give it 2"):
        read_vocabulary(write(tmp_path, tokenizer__json=data))


def test_vocab_json(tmp_path: Path) -> None:
    write(tmp_path, vocab__json={"a": 0, "b": 1}, merges__txt="#version: 0.2\n", added_tokens__json={"<s>": 2, "a": 0})
    found = read_vocabulary(tmp_path)
    assert found.tokens == {"a": 0, "b": 1, "<s>": 2}
    assert list(found.added) == ["<s>", "a"]


def piece(text: bytes, kind: int = 1) -> bytes:
    """One piece of a sentencepiece model: name, score, type."""
    body = b"\x0a" + bytes([len(text)]) + text + b"\x15\x00\x00\x80\xbf" + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(body)]) + body


def test_sentencepiece(tmp_path: Path) -> None:
    model = b"".join([piece(b"<unk>", 2), piece("\u2581a".encode()), piece(b"b")]) + b"\x12\x02\x18\x01\x59" + bytes(8)
    decoder = {"3": entry("<x>", 3)}
    write(tmp_path, tokenizer__model=model, tokenizer_config__json={"added_tokens_decoder": decoder})
    assert read_vocabulary(tmp_path).tokens == {"<unk>": 0, "\u2581a": 1, "b": 2, "<x>": 3}


@pytest.mark.parametrize(
    "data", [b"", b"IQ== 0\nIg== 1\n", piece(b"a")[:-1], b"\xff" * 40, b"\x0a\x00", piece(b"\xff")]
)
def test_other_models_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UnsupportedError, match="not a sentencepiece model"):
        read_vocabulary(write(tmp_path, tokenizer__model=data))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="no tokenizer files"):
        read_vocabulary(tmp_path)
    with pytest.raises(UnsupportedError, match=r"tekken\.json"):
        read_vocabulary(write(tmp_path, tekken__json={}))


HOSTILE: list[Any] = [
    "",
    "[]",
    "nul",
    b"\xff\xfe",
    "[" * 100_000,
    '{"a": ' + "9" * 5000 + "}",
    {},
    {"model": []},
    {"model": {"vocab": None}},
    {"model": {"vocab": {"a": "0"}}},
    {"model": {"vocab": {"a": True}}},
    {"model": {"vocab": {"a": -1}}},
    {"model": {"vocab": {"a": 1 << 40}}},
    {"model": {"vocab": {"a": 0, "b": 0}}},
    {"model": {"vocab": [["a", 0], "b"]}},
    {"model": {"vocab": [[]]}},
    {"model": {"vocab": {}}, "added_tokens": {"a": 1}},
    {"model": {"vocab": {}}, "added_tokens": [3]},
    {"model": {"vocab": {}}, "added_tokens": [{"content": "a"}]},
    {"model": {"vocab": {}}, "added_tokens": [{"content": "a", "id": 0, "lstrip": "no"}]},
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files(tmp_path: Path, data: Any) -> None:
    with pytest.raises(CorruptError, match=r"tokenizer\.json"):
        read_vocabulary(write(tmp_path, tokenizer__json=data))


@pytest.mark.parametrize("decoder", [[1], {"x": {"content": "a"}}, {"1": 2}, {"\u0661": {"content": "a"}}])
def test_hostile_configs(tmp_path: Path, decoder: Any) -> None:
    config = {"added_tokens_decoder": decoder}
    with pytest.raises(CorruptError, match=r"tokenizer_config\.json"):
        read_vocabulary(write(tmp_path, tokenizer__json=bpe("a"), tokenizer_config__json=config))


def test_huge_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", 10)
    with pytest.raises(CorruptError, match="larger"):
        read_vocabulary(write(tmp_path, tokenizer__json=bpe("a")))


# -- writing


def test_unchanged_tokenizers_are_carried_byte_for_byte(tmp_path: Path) -> None:
    text = json.dumps(bpe("ab"), indent=7)
    a = read_vocabulary(write(tmp_path / "a", tokenizer__json=text, tokenizer__model=b"x", merges__txt="a b"))
    b = read_vocabulary(write(tmp_path / "b", tokenizer__json=bpe("abc")))
    assert merged_files(a, b, source="base") == {
        "tokenizer.json": text.encode(),
        "merges.txt": b"a b",
        "tokenizer.model": b"x",
    }
    assert merged_files(a, b, source=1) == {"tokenizer.json": (tmp_path / "b/tokenizer.json").read_bytes()}
    assert set(merged_files(a, a)) <= set(TOKENIZER_FILES)


def test_union_adds_tokens(tmp_path: Path) -> None:
    config = {
        "model_max_length": 64,
        "added_tokens_decoder": {"2": {k: v for k, v in entry("<s>", 2).items() if k != "id"}},
    }
    files = {"tokenizer__json": bpe("ab", ["<s>"]), "tokenizer_config__json": config, "added_tokens__json": {"<s>": 2}}
    a = read_vocabulary(write(tmp_path / "a", **files))
    b = read_vocabulary(write(tmp_path / "b", tokenizer__json=bpe("ac", ["<t>", "b"])))
    out = merged_files(a, b)
    data = json.loads(out["tokenizer.json"])
    ids = {t["content"]: t["id"] for t in data["added_tokens"]}
    assert list(ids.items()) == [("b", 1), ("<s>", 2), ("c", 3), ("<t>", 4)]
    assert data["model"] == bpe("ab")["model"]
    c = next(t for t in data["added_tokens"] if t["content"] == "c")
    assert (c["normalized"], c["special"]) == (True, False)
    written = json.loads(out["tokenizer_config.json"])
    assert list(written["added_tokens_decoder"]) == ["1", "2", "3", "4"]
    assert written["model_max_length"] == 64
    assert json.loads(out["added_tokens.json"]) == ids
    again = read_vocabulary(write(tmp_path / "out", **{n.replace(".", "__"): d for n, d in out.items()}))
    assert again.tokens == {"a": 0, "b": 1, "<s>": 2, "c": 3, "<t>": 4}


def test_union_without_tokenizer_json(tmp_path: Path) -> None:
    a = read_vocabulary(write(tmp_path / "a", vocab__json={"a": 0, "b": 1}, merges__txt="#"))
    b = read_vocabulary(write(tmp_path / "b", tokenizer__json=bpe("ac")))
    out = merged_files(a, b)
    assert sorted(out) == ["added_tokens.json", "merges.txt", "tokenizer_config.json", "vocab.json"]
    again = read_vocabulary(write(tmp_path / "out", **{n.replace(".", "__"): d for n, d in out.items()}))
    assert again.tokens == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize("joined", [True, False])
def test_tokens_without_a_row_leave_bpe_with_their_merges(tmp_path: Path, joined: bool) -> None:
    pairs = [["a", "b"], ["ab", "c"], ["a", "c"], ["ac", "b"]]
    merges = [" ".join(p) for p in pairs] if joined else pairs
    data = bpe(["a", "b", "c", "ab", "ac", "acb", "abc"], ["<s>"], merges)
    a = read_vocabulary(write(tmp_path, tokenizer__json=data, tokenizer__model=b"x"))
    out = merged_files(a, rows=5)
    assert list(out) == ["tokenizer.json"]
    left = json.loads(out["tokenizer.json"])
    assert left["model"]["merges"] == [merges[0], merges[2]]
    assert list(left["model"]["vocab"]) == ["a", "b", "c", "ab", "ac"]
    assert left["added_tokens"] == []


def test_tokens_without_a_row_leave_unigram(tmp_path: Path) -> None:
    data = {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}
    a = read_vocabulary(write(tmp_path, tokenizer__json=data))
    assert json.loads(merged_files(a, rows=1)["tokenizer.json"])["model"]["vocab"] == [["a", 0.0]]


def test_other_files_cannot_be_shortened(tmp_path: Path) -> None:
    a = read_vocabulary(write(tmp_path, vocab__json={"a": 0, "b": 1}))
    with pytest.raises(UnsupportedError, match="shortened"):
        merged_files(a, rows=1)


@pytest.mark.parametrize("merge", [3, "a", ["a"], ["a", 1], None])
def test_hostile_merges(tmp_path: Path, merge: Any) -> None:
    a = read_vocabulary(write(tmp_path, tokenizer__json=bpe("abc", merges=[merge])))
    with pytest.raises(CkptError, match="a merge is"):
        merged_files(a, rows=2)


def test_lone_surrogates_survive(tmp_path: Path) -> None:
    a = read_vocabulary(write(tmp_path / "a", tokenizer__json=bpe(["\ud800", "\u00e9"])))
    b = read_vocabulary(write(tmp_path / "b", tokenizer__json=bpe("b")))
    out = merged_files(a, b)["tokenizer.json"]
    assert list(json.loads(out)["model"]["vocab"]) == ["\ud800", "\u00e9"]


# -- chat templates


CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
RENDERED = {
    "alpaca": "S\n\n### Instruction:\nU\n\n### Response:\nA\n\n### Instruction:\nV\n\n### Response:\n",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "exaone": "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n[|user|]V\n[|assistant|]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s> [INST] S\n\nU [/INST] A</s> [INST] V [/INST]",
}


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_templates(name: str) -> None:
    text = chat_template(name, [])
    assert text is not None
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)  # noqa: S701 - prompts
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    found = environment.from_string(text).render(messages=CHAT, add_generation_prompt=True, **special)
    assert found == RENDERED[name]


def test_auto_takes_the_template_that_most_have(tmp_path: Path) -> None:
    def of(name: str, **files: Any) -> Vocabulary:
        return read_vocabulary(write(tmp_path / name, tokenizer__json=bpe("a"), **files))

    named = [{"name": "tool_use", "template": "{t}"}, {"name": "default", "template": "{x}\n"}]
    models = [
        of("none"),
        of("jinja", chat_template__jinja="{y}", tokenizer_config__json={"chat_template": "{x}"}),
        of("named", tokenizer_config__json={"chat_template": named}),
        of("plain", tokenizer_config__json={"chat_template": " {x}"}),
        of("wrong", tokenizer_config__json={"chat_template": 3}),
    ]
    assert chat_template("auto", models) == "{x}"
    assert chat_template("auto", models[:3]) == "{y}"
    assert chat_template("auto", models[:1]) is None
    assert chat_template("{{ z }}", models) == "{{ z }}"
    with pytest.raises(UsageError, match="neither"):
        chat_template("chatlm", models)


def test_a_template_replaces_the_donors(tmp_path: Path) -> None:
    config = {"chat_template": "{old}", "bos_token": "a"}
    a = read_vocabulary(write(tmp_path, tokenizer__json=bpe("a"), tokenizer_config__json=config))
    merged = merge_vocabularies([Input("a", a, 1)], 0)
    out = tokenizer_files(merged, "{new}")
    assert out["chat_template.jinja"] == b"{new}"
    assert json.loads(out["tokenizer_config.json"]) == {"bos_token": "a"}
    assert out["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
