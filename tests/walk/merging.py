"""A chain of merges: layers dropped, doubled and reordered, and averages of models whose dtypes and ties differ."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np

from tests.walk import bits, numbered
from tests.walk.bits import Raw, Wrong
from tests.walk.chain import Told, check_end
from tests.walk.run import Ended, ckpttool

_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BESIDE = {
    "tokenizer_config.json": b'{"model_max_length": 16}\n',
    "chat_template.jinja": b"{{ messages }}\n",
    "generation_config.json": b'{"eos_token_id": 2}',
}

_UNTIED = {"tie_word_embeddings": False}
"""Of models that have a head of their own, which families that are tied by default are refused with."""


@dataclass
class Source:
    """A checkpoint in Hugging Face's form."""

    config: dict[str, Any]
    tensors: dict[str, Raw]

    def write(self, path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")
        for name, data in _BESIDE.items():
            (path / name).write_bytes(data)
        bits.write(path / "model.safetensors", self.tensors)


def read(path: Path) -> Source:
    """What a command has written. Raises Wrong where config.json is not true of the tensors, or a file is missing."""
    tensors: dict[str, Raw] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= bits.read(file)
    for name, data in _BESIDE.items():
        if not (path / name).exists() or (path / name).read_bytes() != data:
            raise Wrong(f"{name} is not that of the source")
    found = Source(json.loads((path / "config.json").read_text(encoding="utf-8")), tensors)
    judge_config(found)
    return found


def judge_config(source: Source) -> None:
    """Raises Wrong unless config.json is true of the tensors: dtype, rows, layers, and a tie."""
    config, tensors = source.config, source.tensors
    count = Counter[str]()
    for raw in tensors.values():
        if raw.dtype in bits.FLOATS:
            count[raw.dtype] += raw.bits.size
    said = _DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))))
    if said and said not in count:
        raise Wrong(f"config.json says {said}, and the tensors are {dict(count)}")
    embedding, head = tensors.get(_EMBEDDING), tensors.get(_HEAD)
    if embedding and len(embedding.bits) != config["vocab_size"]:
        raise Wrong(f"config.json says {config['vocab_size']} rows, and there are {len(embedding.bits)}")
    if config.get("tie_word_embeddings") and embedding and head and not _same(embedding, head):
        raise Wrong("config.json says that embeddings are tied, and they differ")
    if config.get("tie_word_embeddings") is False and embedding and not head:
        raise Wrong("config.json says that embeddings are not tied, and there is no head")
    layers = {int(name.split(".")[2]) for name in tensors if ".layers." in name}
    if layers != set(range(config["num_hidden_layers"])):
        raise Wrong(f"config.json says {config['num_hidden_layers']} layers, and there are {sorted(layers)}")


def _same(a: Raw, b: Raw) -> bool:
    return a.dtype == b.dtype and a.bits.shape == b.bits.shape and bool(np.array_equal(a.bits, b.bits))


class _Chain:
    """The commands of one chain, run and noted."""

    def __init__(self, folder: Path, r: Random, told: Told) -> None:
        self.folder, self.r, self.told = folder, r, told

    def merge(self, sources: dict[str, Source], words: list[str]) -> Source | None:
        """What comes of it; None where it is refused. The files of the sources are removed afterwards."""
        for name, source in sources.items():
            source.write(self.folder / name)
        dst = self.folder / "out"
        ended = self._run(["merge", *words, "-o", dst.name], {*sources, "recipe.yml"}, dst)
        for name in sources:
            shutil.rmtree(self.folder / name)
        if ended.code:
            self.told.steps["refused"] += 1
            self.told.refusals[f"merge: {ended.err.split('error: ')[-1].splitlines()[0][:100]}"] += 1
            return None
        self.told.steps["worked"] += 1
        out = read(dst)
        shutil.rmtree(dst)
        return out

    def _run(self, words: list[str], others: set[str], dst: Path) -> Ended:
        r = self.r
        parts = r.random() < 0.2
        killed = r.random() < 0.25
        if parts:
            first, second = r.sample(["1/2", "2/2"], 2)
            ended = self._once([*words, "--part", first])
            if not ended.code:
                ended = self._once([*words, "--part", second])
            check_end(ended, self.folder, dst, others)
            return ended
        if killed and self._once(words, int(2 ** r.uniform(0, 7))).code == -9:
            self.told.steps["killed"] += 1
            shutil.rmtree(self.folder / "tmp", ignore_errors=True)
            if dst.exists():
                words = [*words, "--force"]
            elif dst.with_name("out.partial").exists():
                self.told.steps["resumed"] += 1
                words = [*words, "--resume"]
        elif killed:
            words = [*words, "--force"]
        if r.random() < 0.3:
            words = [*words, "--verify"]
        ended = self._once(words)
        check_end(ended, self.folder, dst, others)
        return ended

    def _once(self, words: list[str], kill_at: int = 0) -> Ended:
        ended = ckpttool(words, self.folder, kill_at)
        note = f" killed at call {kill_at}" if kill_at else ""
        self.told.log.append(f"ckpttool {' '.join(words)}   #{note} {ended.code} {ended.err.strip()[-300:]}")
        return ended


Start: TypeAlias = Callable[[_Chain], object]
"""What a chain does."""


def stack(chain: _Chain, models: list[Source], slices: list[tuple[int, int, int]]) -> Source | None:
    """Slices (model, from, to) of models of one kind. Raises Wrong unless each layer is what it was, or refused."""
    recipe = [{"sources": [{"model": f"m{m}", "layer_range": [a, b]}]} for m, a, b in slices]
    (chain.folder / "recipe.yml").write_text(json.dumps({"merge_method": "passthrough", "slices": recipe}))
    chain.told.log.append(f"# {json.dumps([m.config for m in models])}\n# slices {slices}")
    out = chain.merge({f"m{i}": m for i, m in enumerate(models)}, ["recipe.yml"])
    if out is None:
        return None
    order = [(models[m], layer) for m, a, b in slices for layer in range(a, b)]
    wanted = [numbered.kinds(m.config)[layer] for m, layer in order]
    try:
        found = numbered.kinds(out.config)
    except (KeyError, ValueError, IndexError, TypeError) as e:
        raise Wrong(f"config.json cannot be read: {type(e).__name__} {e}: {out.config}") from e
    if found != wanted:
        raise Wrong(f"layers were {wanted}, and config.json says {found}: {json.dumps(out.config)}")
    for i, (model, layer) in enumerate(order):
        if not _same(
            out.tensors[numbered.layer_name(out.config, i)], model.tensors[numbered.layer_name(model.config, layer)]
        ):
            raise Wrong(f"layer {i} is not layer {layer} of its model")
    if out.config.get("eos_token_id") != models[slices[0][0]].config.get("eos_token_id"):
        raise Wrong(f"eos_token_id is {out.config.get('eos_token_id')}")
    return out


def _stacks(chain: _Chain) -> None:
    r = chain.r
    kind = r.choice(list(numbered.ARCHITECTURES))
    chain.told.traits[f"slices of {kind}"] += 1
    config = numbered.config(kind, r.randint(3, 7), r) | _UNTIED
    models = [Source(config, numbered.tensors(config, i + 1)) for i in range(2)]
    for _ in range(r.randint(1, 3)):
        slices = []
        for _ in range(r.randint(1, 3)):
            a, b = sorted(r.sample(range(models[0].config["num_hidden_layers"] + 1), 2))
            slices.append((r.randrange(2), a, b))
        if len({m for m, _, _ in slices}) == 1:
            slices = [(0, a, b) for _, a, b in slices]
        out = stack(chain, models if any(m for m, _, _ in slices) else models[:1], slices)
        if out and len(out.tensors) < 30:
            models = [out, Source(out.config, numbered.tensors(out.config, r.randint(3, 9)))]
            if "lm_head.weight" not in out.tensors:
                return


METHODS = ("linear", "average", "slerp", "dare_linear", "dare_ties", "ties", "task_arithmetic", "della", "breadcrumbs")


def tied_model(ident: int, dtype: str, stored: str, rows: int = 6) -> Source:
    """A Llama of two layers. ``stored``: embedding, head, or both with the same elements; apart: untied."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": {v: k for k, v in _DTYPES.items()}[dtype],
        "hidden_size": 4,
        "vocab_size": rows,
        "num_hidden_layers": 2,
        "tie_word_embeddings": stored != "apart",
    }
    embedding = bits.made(100 * ident, dtype, (rows, 4))
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": bits.made(100 * ident + 9 + i, dtype, (8, 4)) for i in range(2)}
    if stored != "head":
        tensors[_EMBEDDING] = embedding
    if stored == "apart":
        tensors[_HEAD] = bits.made(100 * ident + 1, dtype, (rows, 4))
    elif stored != "embedding":
        tensors[_HEAD] = embedding
    return Source(config, tensors)


def average(chain: _Chain, models: list[Source], words: list[str]) -> Source | None:
    """A merge of models of ``tied_model``. Raises Wrong where tied ones are refused, and where the result is wrong."""
    chain.told.log.append(f"# {[(m.config['dtype'], sorted(m.tensors)[:2]) for m in models]}")
    names = [f"m{i}" for i in range(len(models))]
    out = chain.merge(dict(zip(names, models, strict=True)), [*names[:2], *words])
    if out is None and all(m.config["tie_word_embeddings"] for m in models) and "--remove-keys" not in words:
        raise Wrong(f"should have worked: {chain.told.log[-1]}")
    if out and not {_EMBEDDING, _HEAD}.intersection(out.tensors):
        raise Wrong("neither an embedding nor a head is left")
    if out and "average" in words and len(names) == 2:
        for name, raw in out.tensors.items():
            if all(name in m.tensors and m.tensors[name].bits.shape == raw.bits.shape for m in models):
                _judge_average(name, raw, [m.tensors[name] for m in models])
    return out


def _judge_average(name: str, found: Raw, parts: list[Raw]) -> None:
    wide = [bits.cast(p, "F64").bits.view("<f8") for p in parts]
    wanted = bits.cast(Raw("F64", ((wide[0] + wide[1]) / 2).view("<u8")), found.dtype)
    if not _same(found, wanted):
        raise Wrong(f"`{name}` is not the average")


def _ties(chain: _Chain) -> None:
    r = chain.r
    method = r.choice(METHODS)
    based = method not in ("linear", "average", "slerp")
    stored = ["embedding", "head", "both"] if r.random() < 0.8 else ["apart", "both", "embedding"]
    dtypes = r.choice([["BF16"], ["F16"], ["F32"], ["F16", "BF16"], ["F32", "BF16"]])
    models = [tied_model(i + 1, r.choice(dtypes), r.choice(stored)) for i in range(3 if based else 2)]
    words = ["--method", method]
    if method == "linear" or (based and method != "ties"):
        words += ["--weights", "0.25,0.75"]
    if method == "ties":
        words += ["--param", "weight=1"]
    if based:
        words += ["--base", "m2", "--seed", str(r.randrange(9))]
    if method.startswith(("dare", "della", "ties")):
        words += ["--param", "density=0.5"]
    if method == "slerp":
        words += ["--base", "m0", "--param", "t=0.3"]
    if r.random() < 0.3 and (based or method == "slerp"):
        words += ["--missing", "base"]
    if r.random() < 0.2:
        words += ["--dtype", r.choice(["f32", "bf16", "f16"])]
    chain.told.traits[f"{method} of {'+'.join(dtypes)}"] += 1
    average(chain, models, words)


_DROPPED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "gemma2": ({}, [0, 1, 3, 4]),
    "gemma3_text": ({"sliding_window_pattern": 3}, [0, 1, 3, 4, 5]),
    "cohere2": ({}, [0, 1, 2, 4, 5]),
    "exaone4": ({"sliding_window": 8}, [0, 1, 3, 4]),
    "smollm3": ({"use_sliding_window": False}, [2, 3, 4]),
    "llama4_text": ({"interleave_moe_layer_step": 2, "moe_layers": [1, 3, 5]}, [0, 3, 4]),
    "jamba": (
        {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4},
        [0, 2, 3, 4],
    ),
    "bamba": ({"attn_layer_indices": [1, 4]}, [0, 2, 4, 5]),
    "lfm2": ({"full_attn_idxs": [2, 5]}, [0, 2, 3]),
    "nemotron_h": ({"hybrid_override_pattern": "M-M*E-"}, [0, 3, 4]),
    "qwen3_next": ({"full_attention_interval": 3}, [0, 2, 3]),
    "deepseek_v3": ({"first_k_dense_replace": 1, "eos_token_id": [0, 1, 2, 3, 4, 5]}, [0, 2, 3]),
    "ernie4_5_moe": ({"moe_layer_start_index": 1, "moe_layer_end_index": 5, "moe_layer_interval": 2}, [0, 2, 3, 4]),
}
"""Of each kind that a merge had got wrong: what its config said, and the layers that were left of six."""


def _dropped(kind: str) -> Start:
    said, kept = _DROPPED[kind]
    config = numbered.config(kind, 6, Random(0)) | _UNTIED | {"eos_token_id": 2} | said  # noqa: S311
    for optional in ("moe_layers", "no_rope_layer_interval", "interleave_moe_layer_step", "sliding_window_pattern"):
        if optional not in said:
            config.pop(optional, None)
    model = Source(config, numbered.tensors(config, 1))
    return lambda chain: stack(chain, [model], [(0, layer, layer + 1) for layer in kept])


def _tied(first: str, second: str, *words: str, dtypes: tuple[str, str] = ("BF16", "BF16"), rows: int = 6) -> Start:
    models = [tied_model(1, dtypes[0], first, rows), tied_model(2, dtypes[1], second), tied_model(3, "BF16", "both")]
    based = "--base" in words
    return lambda chain: average(chain, models if based else models[:2], list(words))


_DARE = ("--method", "dare_linear", "--base", "m2", "--weights", "0.5,0.5", "--param", "density=0.5", "--seed", "1")
START: dict[str, Start] = {
    **{f"slices of {kind}": _dropped(kind) for kind in _DROPPED},
    "a mask for each name of a tied weight": _tied("both", "both", *_DARE),
    "a filter on the head": _tied("both", "both", "--weights", "0.5,0.5", "--remove-keys", "lm_head*"),
    "the embedding left out": _tied("both", "both", "--weights", "0.5,0.5", "--remove-keys", "*embed_tokens*"),
    "one stores the head": _tied("both", "embedding", "--method", "average"),
    "the head is the base's": _tied("embedding", "embedding", *_DARE, "--missing", "base"),
    "F16 and BF16": _tied("embedding", "embedding", "--method", "average", dtypes=("F16", "BF16")),
    "F32 and BF16": _tied("embedding", "embedding", "--method", "average", dtypes=("BF16", "F32")),
    "a tied model and an untied one": _tied("both", "apart", "--method", "average"),
    "the larger vocabulary": _tied("embedding", "embedding", "--method", "average", "--vocab", "max", rows=8),
}
"""One chain for each defect that was found: what must not come back."""


def walk_start(name: str, folder: Path) -> Told:
    """One chain of the start set."""
    return _told(Told(-1, log=[f"# {name}"]), folder, Random(name), START[name])  # noqa: S311


def walk_merges(seed: int, folder: Path) -> Told:
    """One chain of merges in an empty folder."""
    r = Random(f"merges {seed}")  # noqa: S311  # chance that can be repeated is what is wanted
    return _told(Told(seed), folder, r, r.choice([_stacks, _ties]))


def _told(told: Told, folder: Path, r: Random, start: Start) -> Told:
    try:
        start(_Chain(folder, r, told))
    except Wrong as e:
        told.wrong = str(e)
    except (KeyError, ValueError, OSError) as e:  # what the judge did not find at all
        told.wrong = f"{type(e).__name__}: {e}"
    return told
