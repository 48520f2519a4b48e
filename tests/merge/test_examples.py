"""Every kind of recipe that mergekit's examples, pages and tests show: it runs, or is refused by what it asks for.

The recipes are rewritten over tiny models, with one thing of each kind. What they compute is checked elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import read_all
from tests.merge.models import finetuned, llama, llama_config, merge, refused, save

FIXTURES = Path(__file__).parents[2] / "fixtures" / "merge"
LAYERS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, three models made of it, two of a kind with a picture encoder, and two of GPT-2's kind."""
    work = tmp_path_factory.mktemp("examples")
    config = llama_config(layers=LAYERS)
    base = llama(layers=LAYERS)
    save(work / "origin", base, config, shards=3)
    for i, name in enumerate(("poet", "coder", "doctor"), 1):
        save(work / name, finetuned(base, i), config, shards=1 + i % 2)
    pictures = {
        "model_type": "llava",
        "text_config": llama_config(layers=2),
        "architectures": ["LlavaForConditionalGeneration"],
    }
    seeing = {f"language_model.{n}": r for n, r in llama(layers=2).items()}
    seeing |= {n.replace("model.", "vision_tower.encoder."): r for n, r in llama(layers=4, seed=1).items()}
    for i, name in enumerate(("seeing_a", "seeing_b"), 1):
        save(work / name, finetuned(seeing, i), pictures)
    gpt2 = {n.replace("model.layers.", "transformer.h."): r for n, r in llama(layers=4).items()}
    gpt2 = {
        n.replace("model.embed_tokens", "transformer.wte").replace("model.", "transformer."): r
        for n, r in gpt2.items()
        if n != "lm_head.weight"
    }
    for i, name in enumerate(("gpt_a", "gpt_b"), 1):
        config = {"model_type": "gpt2", "n_layer": 4, "vocab_size": 32, "tie_word_embeddings": False}
        save(work / name, finetuned(gpt2, i), config)
    return work


# name: (recipe, layers of the output, dtype of the output)
RUNS: dict[str, tuple[str, int, str]] = {
    "fusion": (
        """
        models:
          - model: poet
          - model: coder
        merge_method: arcee_fusion
        base_model: poet
        dtype: bfloat16
        """,
        LAYERS,
        "BF16",
    ),
    "ties_of_two_with_a_mask_dtype": (
        """
        models:
          - model: poet
            parameters:
              density: 0.4
              weight: 0.6
          - model: doctor
            parameters:
              density: 0.7
              weight: 0.3
        merge_method: ties
        base_model: origin
        parameters:
          normalize: false
          int8_mask: true
        dtype: float16
        """,
        LAYERS,
        "F16",
    ),
    "slerp_by_slices_with_gradients": (
        """
        slices:
          - sources:
              - model: poet
                layer_range: [0, 6]
              - model: coder
                layer_range: [0, 6]
        merge_method: slerp
        base_model: poet
        parameters:
          t:
            - filter: self_attn
              value: [0, 0.4, 0.2, 0.8, 1]
            - filter: mlp
              value: [1, 0.6, 0.8, 0.2, 0]
            - value: 0.45 # everything else
        dtype: float16
        """,
        LAYERS,
        "F16",
    ),
    "slerp_by_models_with_gradients": (
        """
        models:
          - model: poet
          - model: coder
        merge_method: slerp
        base_model: poet
        parameters:
          t:
            - filter: self_attn
              value: [0, 0.4, 0.2, 0.8, 1]
            - filter: mlp
              value: [1, 0.6, 0.8, 0.2, 0]
            - value: 0.45
        dtype: float16
        """,
        LAYERS,
        "F16",
    ),
    "linear_of_three": (
        """
        models:
          - model: poet
            parameters:
              weight: 1.0
          - model: coder
            parameters:
              weight: 0.25
          - model: doctor
            parameters:
              weight: 0.6
        merge_method: linear
        dtype: float16
        """,
        LAYERS,
        "F16",
    ),
    "stacked_layers": (
        """
        slices:
          - sources:
            - model: poet
              layer_range: [0, 4]
          - sources:
            - model: coder
              layer_range: [2, 6]
        merge_method: passthrough
        dtype: float16
        """,
        8,
        "F16",
    ),
    "ties_with_gradients_and_filters": (
        """
        models:
          - model: poet
            parameters:
              density: [1, 0.6, 0.2] # a density for the first, the middle and the last layer
              weight: 1.0
          - model: coder
            parameters:
              density: 0.4
              weight: [0, 0.2, 0.6, 1]
          - model: doctor
            parameters:
              density: 0.3
              weight:
                - filter: mlp
                  value: 0.6
                - value: 0
        merge_method: ties
        base_model: origin
        parameters:
          normalize: true
          int8_mask: true
        dtype: float16
        """,
        LAYERS,
        "F16",
    ),
    "defaults_of_all_models_at_the_top": (
        """
        merge_method: linear
        models:
          - model: poet
          - model: doctor
        parameters:
          weight: 0.5
        """,
        LAYERS,
        "BF16",
    ),
    "dare_of_a_base_that_is_listed": (
        """
        models:
          - model: origin
          - model: coder
            parameters: {density: 0.6, weight: 0.5}
          - model: doctor
            parameters: {density: 0.8, weight: 0.5}
        merge_method: dare_ties
        base_model: origin
        parameters: {int8_mask: true}
        dtype: bfloat16
        """,
        LAYERS,
        "BF16",
    ),
    "last_layers_scaled": (
        """
        slices:
          - sources:
            - model: poet
              layer_range: [0, 3]
          - sources:
            - model: poet
              layer_range: [2, 6]
              parameters:
                scale:
                  - filter: o_proj
                    value: 0.0
                  - filter: down_proj
                    value: 0.0
                  - value: 1.0
        merge_method: passthrough
        dtype: bfloat16
        """,
        7,
        "BF16",
    ),
    "a_slice_of_two_beside_slices_of_one": (
        """
        merge_method: linear
        slices:
          - sources:
              - {model: poet, layer_range: [0, 2], parameters: {weight: 1.0}}
          - sources:
              - {model: poet, layer_range: [2, 4], parameters: {weight: 0.7}}
              - {model: coder, layer_range: [1, 3], parameters: {weight: 0.3}}
          - sources:
              - {model: coder, layer_range: [4, 6], parameters: {weight: 1.0}}
        dtype: bfloat16
        """,
        LAYERS,
        "BF16",
    ),
    "stock": (
        """
        merge_method: model_stock
        base_model: origin
        models: [{model: poet}, {model: coder}]
        parameters: {filter_wise: true}
        dtype: bfloat16
        """,
        LAYERS,
        "BF16",
    ),
    "nuslerp_by_rows": (
        """
        merge_method: nuslerp
        models:
          - {model: poet, parameters: {weight: 0.5}}
          - {model: coder, parameters: {weight: 0.4}}
        parameters: {nuslerp_row_wise: true, nuslerp_flatten: false}
        dtype: bfloat16
        """,
        LAYERS,
        "BF16",
    ),
    "models_that_see": (
        """
        merge_method: task_arithmetic
        base_model: seeing_a
        models:
          - {model: seeing_a}
          - {model: seeing_b, parameters: {weight: [{filter: vision_tower, value: 0}, {value: 0.5}]}}
        dtype: bfloat16
        """,
        0,
        "BF16",
    ),
    "stacked_gpt": (
        """
        merge_method: passthrough
        slices:
          - sources: [{model: gpt_a, layer_range: [0, 3]}]
          - sources: [{model: gpt_b, layer_range: [1, 4]}]
        dtype: bfloat16
        """,
        6,
        "BF16",
    ),
}

REFUSED: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "several_merges_in_one_file": (
        """
        name: half-way
        merge_method: linear
        models:
          - model: poet
          - model: coder
        parameters:
          weight: 0.5
        ---
        merge_method: dare_ties
        base_model: origin
        models:
          - model: half-way
            parameters: {density: 0.6, weight: 0.5}
        """,
        1,
        ("this file holds several recipes",),
    ),
    "experts_out_of_dense_models": (
        """
        base_model: origin
        gate_mode: hidden
        dtype: bfloat16
        experts_per_token: 2
        experts:
          - source_model: poet
            positive_prompts: ["Write a poem"]
          - source_model: coder
            positive_prompts: ["Write a program"]
        """,
        1,
        ("building a mixture of experts out of dense models is not supported", "`gate_mode`", "`experts`"),
    ),
    "a_search_for_weights": (
        """
        genome:
          models: [poet, coder]
          merge_method: dare_ties
          base_model: origin
          layer_granularity: 2
        tasks:
          - {name: a_task, weight: 1.0}
        """,
        1,
        ("searching for the best merge is not supported", "`genome`"),
    ),
    "parts_with_slices_of_their_own": (
        """
        merge_method: linear
        modules:
          language_model:
            models:
              - {model: seeing_a, parameters: {weight: 0.5}}
              - {model: seeing_b, parameters: {weight: 0.5}}
        """,
        1,
        ("slices for each part of a model of several parts are not supported", "`modules`"),
    ),
    "a_method_from_a_plugin": (
        """
        merge_method: weighted_average
        models:
          - {model: poet, parameters: {weight: 0.3}}
          - {model: coder, parameters: {weight: 0.7}}
        parameters: {normalize: true}
        """,
        2,
        ("there is no merge method `weighted_average`",),
    ),
    "layers_by_themselves": (
        """
        layer_slices:
          - {model: poet, start: 0, end: 4}
          - {model: coder, start: 2, end: 6, scale: 0.5}
        embedding_source: poet
        """,
        2,
        ("unknown key `layer_slices`", "unknown key `embedding_source`"),
    ),
    "a_model_on_the_hub": (
        """
        merge_method: linear
        models:
          - {model: somebody/a-model-7B, parameters: {weight: 0.5}}
          - {model: poet, parameters: {weight: 0.5}}
        """,
        1,
        ("there is no `somebody/a-model-7B` here", "hf download somebody/a-model-7B"),
    ),
    "a_revision": (
        """
        merge_method: linear
        models:
          - {model: poet@v1.1, parameters: {weight: 0.5}}
          - {model: coder, parameters: {weight: 0.5}}
        """,
        1,
        ("`poet@v1.1` names the revision `v1.1`", "drop `@v1.1`"),
    ),
    "another_architecture": (
        """
        merge_method: linear
        models:
          - {model: {model: poet, override_architecture: MistralForCausalLM}, parameters: {weight: 0.5}}
          - {model: coder, parameters: {weight: 0.5}}
        """,
        1,
        ("`override_architecture` is not supported",),
    ),
    "residual_weight": (
        """
        merge_method: linear
        slices:
          - sources: [{model: poet, layer_range: [0, 6], parameters: {weight: 1}}]
            residual_weight: 0.1
        """,
        1,
        ("`residual_weight` is not supported",),
    ),
    "an_fp8_output": (
        """
        merge_method: linear
        models:
          - {model: poet, parameters: {weight: 0.5}}
          - {model: coder, parameters: {weight: 0.5}}
        out_dtype: float8_e4m3fn
        """,
        1,
        ("a merge does not write float8_e4m3fn",),
    ),
}

TOKENS: dict[str, str] = {
    "union": "tokenizer: {source: union}",
    "the_older_key": "tokenizer_source: union",
    "the_vocabulary_of_a_model": "tokenizer: {source: tokB}",
    "padded": "tokenizer: {source: base, pad_to_multiple_of: 16}",
    "rules": """
        tokenizer:
          source: union
          tokens:
            a: {source: tokB}
            b: {source: tokA, force: true}
            c: {source: {kind: model_token, model: tokA, token: d}}
            d: {source: {kind: model_token, model: tokB, token_id: 3}}
            e: {source: {kind: zero}}
    """,
}


def written(path: Path, text: str) -> Path:
    """The recipe in a file, without the indent that it has here."""
    lines = text.strip("\n").splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    path.write_text("\n".join(line[indent:] for line in lines) + "\n", encoding="utf-8")
    return path


def complete(out: Path) -> None:
    """The config is there, and the index says what the files hold."""
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))
    found = read_all(out)
    index = out / "model.safetensors.index.json"
    if index.exists():
        data = json.loads(index.read_text(encoding="utf-8"))
        assert data["weight_map"].keys() == found.keys()
        assert data["metadata"]["total_size"] == sum(r.bits.nbytes for r in found.values())


@pytest.mark.sample(
    "slerp_by_slices_with_gradients",
    "ties_with_gradients_and_filters",
    "dare_of_a_base_that_is_listed",
    "a_slice_of_two_beside_slices_of_one",
    "models_that_see",
    "stacked_gpt",
)
@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    text, layers, dtype = RUNS[name]
    out = tmp_path / "out"
    merge(written(tmp_path / "recipe.yml", text), "-o", out)
    complete(out)
    found = read_all(out)
    assert {r.dtype for r in found.values()} == {dtype}
    if not layers:
        assert found.keys() == read_all(models / "seeing_a").keys()
        return
    source = read_all(models / ("gpt_a" if "gpt" in name else "origin"))
    stack = "transformer.h" if "gpt" in name else "model.layers"
    kinds = [n.removeprefix(f"{stack}.0.") for n in source if n.startswith(f"{stack}.0.")]
    assert found.keys() == {n for n in source if not n.startswith(stack)} | {
        f"{stack}.{i}.{kind}" for i in range(layers) for kind in kinds
    }
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config.get("num_hidden_layers", config.get("n_layer")) == layers


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    text, code, fragments = REFUSED[name]
    error = refused(tmp_path / "out", written(tmp_path / "recipe.yml", text), code=code)
    for fragment in fragments:
        assert fragment in error


@pytest.mark.sample("union", "the_vocabulary_of_a_model", "padded", "rules")
@pytest.mark.parametrize("name", TOKENS)
def test_tokenizers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES / "inputs")
    recipe = written(tmp_path / "recipe.yml", TOKENS[name])
    head = """\
merge_method: linear
models:
- {model: tokA, parameters: {weight: 0.5}}
- {model: tokB, parameters: {weight: 0.5}}
base_model: tokA
dtype: bfloat16
"""
    recipe.write_text(head + recipe.read_text(encoding="utf-8"), encoding="utf-8")
    out = tmp_path / "out"
    merge(recipe, "-o", out)
    complete(out)
    rows = {r.bits.shape[0] for n, r in read_all(out).items() if n in ("model.embed_tokens.weight", "lm_head.weight")}
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert rows == {config["vocab_size"]}
    assert name != "padded" or config["vocab_size"] % 16 == 0
    assert (out / "tokenizer.json").is_file()


@pytest.mark.parametrize("template", ["chatml", "auto", "{{ messages }}"])
def test_chat_templates(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES / "inputs")
    recipe = written(
        tmp_path / "recipe.yml",
        f"""
        merge_method: linear
        models:
        - {{model: tokA, parameters: {{weight: 1}}}}
        chat_template: {json.dumps(template)}
        """,
    )
    done = ckpttool("merge", recipe, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    told = (tmp_path / "out" / "tokenizer_config.json").read_text(encoding="utf-8")
    jinja = tmp_path / "out" / "chat_template.jinja"
    assert (("chat_template" in told) or jinja.exists()) == (template != "auto")  # neither source has one
