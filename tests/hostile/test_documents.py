"""Configs, indexes, tokenizers, recipes and AOA texts made to do harm: JSON, YAML, patterns, templates."""

from __future__ import annotations

import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.patterns import bounded, compile_pattern, matching
from ckpttool.errors import UsageError
from ckpttool.storage import json_file as _json
from tests.helpers.command import ckpttool
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import save_hf
from tests.hostile.court import COMMANDS, EVERYTHING, SAMPLE, Court

pytestmark = SAMPLE

LLAMA = MODELS["llama"]
CONFIG: dict[str, Any] = dict(LLAMA.config)
OPEN = json.dumps(CONFIG)[:-1]

SIZES: list[Any] = [0, -1, 10**9, 10**12, 2**70, 10**4000, 1.5, "8", None, [], {}, True]
OTHERS: list[Any] = [0, -1, 10**12, 10**4000, "x", [], {"a": "\x1b[2J"}]

CONFIGS: dict[str, bytes] = {
    "brackets": b"[" * 100_000,
    "brackets in a field": (OPEN + ',"x":' + "[" * 100_000 + "]" * 100_000 + "}").encode(),
    "65 levels": (OPEN + ',"x":' + "[" * 64 + "]" * 64 + "}").encode(),
    "a million digits": (OPEN + ',"x":' + "1" * 10**6 + "}").encode(),
    "4,300 digits": (OPEN + ',"x":' + "1" * 4300 + "}").encode(),
    "1e999": (OPEN + ',"x":1e999}').encode(),
    "NaN": (OPEN + ',"x":NaN}').encode(),
    "a key twice": (OPEN + ',"hidden_size":7}').encode(),
    "half a character": (OPEN + ',"x\\ud800":"\\udfff"}').encode(),
    "a mark at the start": b"\xef\xbb\xbf" + json.dumps(CONFIG).encode(),
    "UTF-16": json.dumps(CONFIG).encode("utf-16"),
    "not UTF-8": OPEN.encode() + b',"x":"\xff"}',
    "nothing": b"",
    "zeros": bytes(1000),
    "null": b"null",
    "a list": b"[]",
    "steering": json.dumps({**CONFIG, "architectures": ["\x1b[2J\u202e"], "model_type": "\x9b31m"}).encode(),
    "no names": json.dumps({**CONFIG, "architectures": [["x"]], "model_type": {"a": 1}}).encode(),
    "a path": json.dumps({**CONFIG, "architectures": [], "model_type": "../../../etc/passwd"}).encode(),
    "a call": json.dumps(
        {**CONFIG, "auto_map": {"AutoModel": "os--system.touch"}, "_name_or_path": "$(touch x)"}
    ).encode(),
    **{
        f"{field} {value!r:.20}": json.dumps({**CONFIG, field: value}).encode()
        for field in ("num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "hidden_size")
        for value in SIZES
    },
    **{
        f"{field} {value!r:.20}": json.dumps({**CONFIG, field: value}).encode()
        for field in (
            "n_routed_experts",
            "num_experts",
            "num_nextn_predict_layers",
            "tie_word_embeddings",
            "torch_dtype",
        )
        for value in OTHERS
    },
    **{
        f"quantized {i}": json.dumps({**CONFIG, "quantization_config": q}).encode()
        for i, q in enumerate(
            [
                *([], "x", 5, {"quant_method": "\x1b[2J"}, {"quant_method": ["fp8"]}),
                {"quant_method": "fp8", "weight_block_size": [2**80, 1]},
                {"quant_method": "fp8", "weight_block_size": [0, 0]},
                {"quant_method": "fp8", "modules_to_not_convert": ["re:("]},
                {"quant_method": "fp8", "modules_to_not_convert": ["re:" + "(" * 3000 + ")" * 3000]},
                {"quant_method": "fp8", "modules_to_not_convert": ["re:(a{60000}){60000}"]},
                {"quant_method": "fp8", "modules_to_not_convert": ["{" * 3000 + "*"]},
                {"quant_method": "compressed-tensors", "config_groups": {str(i): {} for i in range(1000)}},
                {"quant_method": "modelopt", "quant_algo": "../x"},
            ]
        )
    },
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(tmp_path: Path, case: str) -> None:
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors())
    (court.src / "config.json").write_bytes(CONFIGS[case])
    for _ in court.try_all(COMMANDS if EVERYTHING else ("reshard",)):
        pass
    for options in (("--tp-out", 2), ("--tp-out", 2, "--pp-out", 2), ("--to", "vllm", "--tp-out", 2)):
        if EVERYTHING:
            court.run("reshard", court.src, court.dst, *options)
    court.run("size", court.src / "config.json")


def test_a_deep_config_does_not_grow(tmp_path: Path) -> None:
    """Indented, every line has as many spaces as there are levels: a megabyte would become a gigabyte."""
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors())
    for levels, code in ((_json.MAX_DEPTH - 1, 0), (_json.MAX_DEPTH, 1)):
        text = OPEN + ',"x":' + "[" * levels + "]" * levels + "}"
        (court.src / "config.json").write_text(text)
        done = court.run("reshard", court.src, court.dst, "--tp-out", 2)
        assert done.code == code, done.err
        assert ("nested deeper than 64 levels" in done.err) == (code == 1)


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    monkeypatch.setattr(_json, "MAX_CONFIG", len(json.dumps(LLAMA.config)) - 1)
    for words in (("reshard", court.src, court.dst, "--tp-out", 2), ("inspect", court.src, "--check")):
        done = court.run(*words)
        assert "config.json is too large: it has more than" in done.out + done.err
    assert "the config is too large" in court.run("size", court.src / "config.json").err
    monkeypatch.setattr(_json, "MAX_CONFIG", len(json.dumps(LLAMA.config)))
    assert court.run("reshard", court.src, court.dst, "--tp-out", 2).code == 0


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("config.json", _json.MAX_CONFIG),
        ("generation_config.json", _json.MAX_CONFIG),
        ("adapter_config.json", _json.MAX_CONFIG),
        ("tokenizer_config.json", _json.MAX_BYTES),
        ("tokenizer.json", _json.MAX_BYTES),
        ("model.safetensors.index.json", _json.MAX_BYTES),
    ],
)
def test_how_large_a_file_may_be(tmp_path: Path, name: str, most: int) -> None:
    """A hole behind the text is not read."""
    path = tmp_path / name
    path.write_bytes(b'{"a": 1}')
    assert _json.load_json(path) == {"a": 1}
    with path.open("r+b") as f:
        f.truncate(1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(_json.TooLargeError, match=f"more than {most:,} bytes"):
            _json.load_json(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * most + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [b"[],", b"{},", b"1,", b'"",'])
def test_values_of_few_bytes_are_counted_first(value: bytes) -> None:
    """3 bytes are an object of 64: what is beyond the limit makes none."""
    text = b'{"x":[' + value * 3_000_000 + b"[]]}"
    assert len(_json.parse_json(text)["x"]) == 3_000_001
    with pytest.raises(_json.TooLargeError, match="more than 8,000,000 values"):
        _json.parse_json(b'{"x":[' + value * 8_000_000 + b"[]]}")


# -- recipes

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
BASE = "models: [{model: SRC, parameters: {weight: 1}}]\nmerge_method: linear\n"
YAML: dict[str, str | bytes] = {
    "a billion laughs": LAUGHS,
    "brackets": "[" * 100_000,
    "braces": "{a: " * 50_000,
    "indented": "".join(" " * i + "a:\n" for i in range(1000)),
    "python/object/apply": "!!python/object/apply:os.system ['touch CANARY']\n",
    "python/object/new": "- !!python/object/new:os.system ['touch CANARY']\n",
    "python/name": "a: !!python/name:os.system\n",
    "python/module": "a: !!python/module:os\n",
    "own tag": "%TAG ! tag:evil,2000:\n---\n!x a\n",
    "two documents": BASE + "---\n" + BASE,
    "a merge of itself": "a: &a\n  <<: *a\n",
    "a list of itself": "a: &a [*a]\n",
    "merge keys that laugh": "a: &a {x: 1}\n"
    + "".join(f"b{i}: &b{i} {{<<: [{','.join(['*a'] * 1000)}]}}\n" for i in range(50)),
    "digits": "merge_method: " + "1" * 100_000 + "\n",
    "hexadecimal": "merge_method: 0x" + "f" * 100_000 + "\n",
    "sexagesimal": "merge_method: " + ":".join(["59"] * 5000) + "\n",
    "1e999": BASE.replace("weight: 1", "weight: 1e999"),
    ".inf": BASE.replace("weight: 1", "weight: .inf"),
    ".nan": BASE.replace("weight: 1", "weight: .nan"),
    "1e308": BASE.replace("weight: 1", "weight: 1.0e+308"),
    "half a character": 'merge_method: "\\ud800"\n',
    "a bell": "a: \x07\n",
    "steering": '"\\x1b[2J": 1\nmerge_method: "\\x9b31m\\u202e"\n',
    "a mark at the start": "\ufeff" + BASE,
    "UTF-16": BASE.encode("utf-16"),
    "not UTF-8": b"a: \xff\n",
    "a long text": "a: " + "x" * 1_000_000,
    "a binary": "a: !!binary aGVsbG8=\n",
    "a set": "? a\n? b\n",
    "a key that is a list": "? [a, b]\n: 1\n",
    "a date": "merge_method: 2001-99-99\n",
    "a key twice": "merge_method: linear\nmerge_method: linear\n",
    "paths up": BASE.replace("SRC", "../stranger"),
    "a device": BASE.replace("SRC", "/dev/zero"),
    "a URL": BASE.replace("SRC", "http://127.0.0.1:1/x"),
    "a repository": BASE.replace("SRC", "org/model"),
    "a command": BASE.replace("SRC", "$(touch CANARY)"),
    "a home": BASE.replace("SRC", "~root"),
    "a path that steers": BASE.replace("SRC", '"a\\n\\x1b[2J"'),
    "a path with a zero": BASE.replace("SRC", '"a\\0b"'),
    "a long path": BASE.replace("SRC", "x" * 5000),
    "a dash": BASE.replace("SRC", "-rf"),
    "a tokenizer elsewhere": BASE + "tokenizer_source: /etc\n",
    "a template": BASE + "chat_template: '{{ cycler.__init__.__globals__.os.system(\"touch CANARY\") }}'\n",
    "a template of a file": BASE + "chat_template: ../stranger/id_rsa\n",
    "a billion layers": "slices: [{sources: [{model: SRC, layer_range: [0, 1000000000]}]}]\nmerge_method: linear\n",
    "many slices": "slices:\n"
    + "- sources: [{model: SRC, layer_range: [0, 1]}]\n" * 200
    + "merge_method: passthrough\n",
    "many values": BASE + "parameters: {t: [" + ",".join(["1"] * 20_000) + "]}\n",
    "tabs": "\ta: 1\n",
    "nothing": "",
    "a number": "5\n",
}


@pytest.mark.parametrize("case", YAML)
def test_recipes(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(tmp_path)
    monkeypatch.chdir(court.src)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    text = YAML[case]
    data = text if isinstance(text, bytes) else text.replace("SRC", str(court.src)).encode()
    (court.src / "recipe.yaml").write_bytes(data)
    court.run("merge", court.src / "recipe.yaml", "-o", court.dst)


JSON: dict[str, Any] = {
    "brackets": "[" * 100_000,
    "digits": '{"merge_method":' + "1" * 100_000 + "}",
    "a key twice": '{"merge_method":"linear","merge_method":"linear"}',
    "NaN": {"weight_list": [float("nan")]},
    "1e308": {"weight_list": [1e308]},
    "half a character": {"merge_method": "\ud800"},
    "steering": {"merge_method": "\x1b[2J\u202e", "\x9b31m": 1},
    "paths up": {"model_path_list": ["../stranger", "/dev/zero"]},
    "output elsewhere": {"output_path": "/etc/ckpttool"},
    "base elsewhere": {"base_model_path": "../stranger"},
    "a long path": {"model_path_list": ["x" * 5000]},
}


@pytest.mark.parametrize("case", JSON)
def test_merge_configs(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(tmp_path)
    monkeypatch.chdir(court.src)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    base = {"merge_method": "linear", "model_path_list": [str(court.src)], "output_path": "x"}
    text = JSON[case] if isinstance(JSON[case], str) else json.dumps(base | JSON[case])
    (court.src / "merge_config.json").write_text(text)
    court.run("merge", court.src / "merge_config.json", "-o", court.dst)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "a -> " * 50_000,
        "a -> b\n" * 1000,
        "\x1b[2J -> \u202e",
        "x" * 10**6,
        "a[",
        '{"aoa_statements": ["a"], "aoa_statements": []}',
        "$LAYER_ID." * 1000 + " -> a",
        "a." * 3000 + "*.* -> *.*",
        "'" * 9999,
    ],
    ids=lambda t: t[:10].encode("unicode_escape").decode(),
)
def test_aoa(tmp_path: Path, text: str) -> None:
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    path = tmp_path / "dst-aoa"
    path.write_text(text)
    court.run("reshard", court.src, court.dst, "--aoa", path)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 10_000, marks=pytest.mark.thorough),
        "[" * 1_000,
        LAUGHS,
        "!!python/object/apply:os.system ['touch CANARY']",
        "\x1b[2J: 1",
        "a: \ud800",
        "rules: [{a: b}]",
        "family: " + "x" * 10**5,
        "rules:\n" + "  '*': row\n" * 3,
        "5",
        "sizes: {layers: 99999999999999999999}",
    ],
    ids=lambda t: t[:10].encode("unicode_escape").decode(),
)
def test_family_files(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(tmp_path)
    monkeypatch.chdir(court.src)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    path = tmp_path / "dst-family.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    court.run("reshard", court.src, court.dst, "--tp-out", 2, "--family", path)


# -- patterns

EXPLOSIVE = "re:^(([a-z0-9_.])+.?)+!$"
PATTERNS = {
    "repetition of repetitions": EXPLOSIVE,
    "many stars": "*a*e*l*a*e*r*o*" * 10,
    "alternatives of stars": "{*,*}" * 20 + "q",
    "groups": "re:" + "(" * 3000 + ")" * 3000,
    "a hundred groups": "re:" + "(.*)" * 99 + "Q",
    "a repetition too many": "re:(a{60000}){60000}",
    "open braces": "{" * 3000,
    "an open bracket": "[",
    "recursion": "re:(?R)",
    "a backslash": "re:\\",
    "a name twice": "re:(?P<a>x)(?P<a>y)",
    "long": "a" * 100_000,
    "stars": "*" * 5000,
    "steering": "\x1b[2J*",
}


@pytest.mark.parametrize("case", PATTERNS)
def test_patterns(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.core.patterns.PATIENCE", 0.05)
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    pattern = PATTERNS[case]
    court.run("drop-keys", court.src, court.dst, pattern)
    court.run("inspect", court.src, "--filter", pattern)
    court.run("reshard", court.src, court.dst, "--rename", f"{pattern}=x")
    if case != "repetition of repetitions":  # not bounded while rules are placed: only a user writes these
        court.run("reshard", court.src, court.dst, "--tp-out", 2, "--split", f"{pattern}=none")
        court.run("reshard", court.src, court.dst, "--tp-out", 2, "--split", f"{pattern}=0")
    court.run("quantize", court.src, court.dst, "--keep", pattern)
    court.run("size", court.src, "--keep", pattern)


def test_a_pattern_has_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.core.patterns.PATIENCE", 0.05)
    with pytest.raises(UsageError, match="takes more than"):
        matching([EXPLOSIVE], ["model.layers.0.self_attn.q_proj.weight_scale_inv"], option="--x")
    assert matching(["re:q_proj"], ["q_proj"], option="--x") == {"q_proj"}
    # The more names there are, the longer it may take, or a large model would be refused.
    with pytest.raises(UsageError, match=r"takes more than 0\.1 s"), bounded("x", 10_000):
        compile_pattern(EXPLOSIVE).search("model.layers.0.self_attn.q_proj.weight_scale_inv")
    # Elsewhere than in the main thread there are no signals, and nothing is bounded.
    found = []

    def other() -> None:
        with bounded("x"):
            found.append(compile_pattern("a*").search("ab") is not None)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [True]


def test_a_config_with_an_explosive_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``modules_to_not_convert`` of somebody's config.json, on the way to sizes."""
    monkeypatch.setattr("ckpttool.core.patterns.PATIENCE", 0.05)
    court = Court(tmp_path)
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [EXPLOSIVE]}
    save_hf(court.src, LLAMA.tensors(), {**LLAMA.config, "quantization_config": quant})
    done = court.run("size", court.src / "config.json")
    assert done.code == 2
    assert "takes more than 0.05 s" in done.err
    for _ in court.try_all(COMMANDS if EVERYTHING else ("size",)):
        pass


TEMPLATES = "{{ self.__init__.__globals__.__builtins__.open('CANARY','w') }}"


def test_templates_are_carried_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(tmp_path)
    monkeypatch.chdir(court.src)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    (court.src / "chat_template.jinja").write_text(TEMPLATES)
    (court.src / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATES}))
    for _ in court.try_all(COMMANDS if EVERYTHING else ("reshard", "merge")):
        pass
    assert ckpttool("reshard", court.src, court.dst, "--to", "hf", "-q").code == 0
    assert (court.dst / "chat_template.jinja").read_text() == TEMPLATES
