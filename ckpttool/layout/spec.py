"""The schema of a family file: its keys, and the types of their values. docs/layouts/ explains each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ckpttool.formats.config import config_places
from ckpttool.layout.files import inner_config
from ckpttool.layout.sizes import Default, SizeSpec


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FusionSpec(_Strict):
    """``parts`` joined on the output axis are ``whole``."""

    whole: str
    parts: list[str]
    units: list[str] = []
    """Size that each part is a multiple of; [] when all parts are equal."""
    groups: str = ""
    """Interleaved: the axis is ``groups`` times (share of part 1, share of part 2, ...). "" is one after the other."""
    only_named: bool = False
    """Used by namings, and not by --fuse and --unfuse."""

    @model_validator(mode="after")
    def _has_units_of_all_parts(self) -> FusionSpec:
        if self.units and len(self.units) != len(self.parts):
            raise ValueError(f"{len(self.parts)} parts need as many `units`, or none where they are equal")
        return self


class CopySpec(_Strict):
    """A tensor that holds the same as another one."""

    of: str
    """The other one's name."""
    beside: str
    """Pattern of a tensor: where there is such a one, there is the copy."""


class OpSpec(_Strict):
    """One statement of a naming; exactly one key is set."""

    rename: dict[str, str] | None = None
    fuse: str | None = None
    unfuse: str | None = None
    stack: dict[str, str] | None = None
    """whole pattern: part pattern with {expert}."""
    unstack: dict[str, str] | None = None
    """The same, and the whole becomes its parts."""
    transpose: list[str] | None = None
    """Patterns of tensors whose last two axes are exchanged."""
    rotary_pairs: dict[str, str] | None = None
    """Pattern: size that counts the heads. The rows of a head that rotary embeddings turn together lie side by side."""
    squeeze: list[str] | None = None
    """Patterns of tensors without their first axis, which has one element."""
    rules: dict[str, str] | None = None
    """Pattern: rule, for tensors that this naming's owner holds in another way than the family."""
    refuse: dict[str, str] | None = None
    """Pattern: why tensors with such names cannot be brought into this naming."""
    drop_layers_from: str | None = None
    """Layers numbered from this size on do not exist in this naming (MTP)."""
    drop: list[str] | None = None
    """Patterns of tensors that do not exist in this naming."""
    copies: dict[str, CopySpec] | None = None
    """Patterns of tensors that do not exist in this naming, because each is a copy of another one."""
    own: list[str] | None = None
    """Patterns of tensors that exist in this naming only; every rank holds them whole."""
    shapes: dict[str, list[str]] | None = None
    """Pattern: a size for each axis. Files are told to have this naming by tensors of these shapes, not by names."""
    read_as: dict[str, str] | None = None
    """other name: name in this naming. Files may have the other one; only the way back knows it."""
    tie: dict[str, str] | None = None
    """name: owner. With tie_word_embeddings this naming stores a copy of the owner under the name."""
    tie_as: dict[str, str] | None = None
    """name: owner. With tie_word_embeddings this naming stores the owner under the name; with pipeline stages, where
    the first and the last one need it, under both."""
    tie_staged: dict[str, str] | None = None
    """name: owner. With tie_word_embeddings this naming stores the owner only; with pipeline stages, where the first
    and the last one need it, a copy under the name, too."""
    only_for: list[str] = []
    """Model types for which the statement holds; [] is all."""


class LayersSpec(_Strict):
    """The rules of a layer; names continue ``prefix``, which has {layer}."""

    prefix: str
    rules: dict[str, str]


class StackSpec(_Strict):
    """Layers of another stack than ``layers``: an encoder, a tower."""

    prefix: str
    rules: dict[str, str]


class ExtendsSpec(_Strict):
    """The family that this one is like; layout/files.py has put both together."""

    family: str
    namings: list[str] = []
    """Namings of that family that also hold here."""


class InsideSpec(_Strict):
    """The language model in a model, which another family describes; layout/files.py puts both together."""

    config: list[str] = []
    """Parts of the config that are the language model's, the first that is there."""
    family: str = ""
    """"" is what that part names."""
    default: str = ""
    """Default for a part that names none."""
    names: dict[str, str] = {}
    """Prefix of a name in that family: prefix here. The first that fits."""
    namings: list[str] = []
    """Namings of that family that also hold here."""


class TensorStackSpec(_Strict):
    """The tensors of the layers of another stack."""

    count: int | str
    """How many layers are numbered."""
    prefix: str = ""
    """Prefix of a layer's tensors; default: that of the rules."""
    tensors: dict[str, Any]


class TensorsSpec(_Strict):
    """The tensors of a model; layout/shapes.py reads it, and checks what stands below first, layers and last."""

    defaults: dict[str, Default] = {}
    """Config fields that may be missing: what they mean then. A text is an expression."""
    names: dict[str, str] = {}
    """Expressions that are used more than once."""
    refuse: dict[str, str] = {}
    """Condition: why the tensors of a model for which it holds are not known."""
    mtp: int | str = 0
    """How many multi-token-prediction layers there are."""
    count: int | str = "layers"
    """How many layers are numbered."""
    prefix: str = ""
    """Prefix of a layer's tensors, where the rules allow several."""
    first: dict[str, Any] = {}
    """Pattern: shape or {shape, dtype}; ``if CONDITION``: more of these."""
    layers: dict[str, Any] = {}
    stacks: dict[str, TensorStackSpec] = {}
    """Other stacks of layers; they stand behind ``first``."""
    last: dict[str, Any] = {}


class CacheSpec(_Strict):
    """The state that a model's layers keep of the tokens they have read; layout/cache.py reads it."""

    defaults: dict[str, Default] = {}
    """Config fields that may be missing: what they mean then, before those of ``tensors``."""
    names: dict[str, str] = {}
    """Expressions that are used more than once, before those of ``tensors``."""
    listed: list[str] = ["layer_types"]
    """Config fields with a word for each layer; the first that is there counts, before ``kinds``."""
    words: dict[str, str] = {}
    """Words of these fields, or of ``kinds``: the kinds of layers that they are."""
    kinds: str = "'unknown' if window else 'full_attention'"
    """Kind of the layer, in transformers' words; ``unknown`` where the config does not tell."""
    window: str = "sliding_window if use_sliding_window else 0"
    """How many tokens layers with a window keep; 0 is all."""
    refuse: dict[str, str] = {}
    """Condition: why it is not known what the layers of a model for which it holds keep."""
    borrowed: str = "0"
    """Whether the layer has the keys and values of another one, and none of its own."""
    attentions: int = 1
    """How many of them are in one layer."""
    tokens: dict[str, Any] = {
        "if kv_lora_rank": {"latent": ["1", "kv_lora_rank"], "rotary": ["1", "qk_rope_head_dim"]},
        "if not kv_lora_rank": {"keys": ["kv_heads", "head_dim"], "values": ["kv_heads", "v_head_dim"]},
        "if kind == 'indexed_attention' and indexes": {
            "indexer": ["1", "index_head_dim"],
            "if fp8": {"indexer_scales": ["1", "(index_head_dim + 127) // 128 * 4"]},
        },
    }
    """The values that an attention keeps of a token: [how many are shared out over the ranks, sizes of each]. A rank
    has at least one. ``if CONDITION``: more of these."""
    state: dict[str, Any] = {}
    """The same of what layers keep of a sequence, however long it is: a list, or {shape, dtype}."""


class StackFieldsSpec(_Strict):
    """Fields of config.json about the layers of another stack."""

    counts: list[str] = []
    """Fields that count layers, beside those in the section ``tensors``."""
    each: list[str] = []
    numbers: list[str] = []
    apart: list[str] = []


class SlicesSpec(_Strict):
    """Fields of config.json that number layers; layout/slices.py reads it, and has those of all families.

    A field may be a path: ``linear_attn_config.kda_layers``.
    """

    each: list[str] = []
    """An entry for each layer: a list, a text with a character or a word for each, or a map by number."""
    numbers: list[str] = []
    """Numbers of layers: a list, or a text (``1,2,3``)."""
    from_one: list[str] = []
    """The same, and the first layer is 1."""
    apart: list[str] = []
    """Fields that look like one of these but are not about layers of this stack."""
    kinds: dict[str, str] = {}
    """Name: expression. What tells layers apart beside their tensors and what they keep."""
    rules: list[dict[str, int | str]] = []
    """Fields that say it for many layers, and what they become: ``number`` is any that says the same, another text an
    expression, whose values of all layers become the list. ``if``: a condition of the numbers."""
    stacks: dict[str, StackFieldsSpec] = {}


class FamilySpec(_Strict):
    """A family file."""

    family: str
    about: str = ""
    model_types: list[str] = []
    architectures: list[str] = []
    orientation: str = "out_in"
    tied: bool = False
    """Default of tie_word_embeddings."""
    sizes: dict[str, SizeSpec | str | Annotated[list[str], Field(min_length=1)]] = {}
    first: dict[str, str] = {}
    layers: LayersSpec
    stacks: dict[str, StackSpec] = {}
    """Other stacks of layers, which live on the first stage."""
    last: dict[str, str] = {}
    extends: ExtendsSpec | None = None
    inside: InsideSpec | None = None
    base: str = ""
    """Prefix that checkpoints of the model without its head may omit."""
    ties: dict[str, str] = {}
    """name: owner, of which it is a copy with tie_word_embeddings."""
    shared: dict[str, str] = {}
    """The same, whatever the config says of the head."""
    no_pipeline: str = ""
    """Reason why the model's layers cannot be distributed over pipeline stages; "" where they can."""
    fusions: dict[str, FusionSpec] = {}
    namings: dict[str, list[OpSpec]] = {}
    hf_namings: list[str] = []
    """Namings that checkpoints in the Hugging Face format have too."""
    trainer_namings: list[str] = []
    """Namings that are told by the names alone, in files of formats that say nothing about names."""
    tensors: TensorsSpec | None = None
    cache: CacheSpec | None = None
    """None: what its layers keep is not known."""
    slices: SlicesSpec = SlicesSpec()
    parameters: list[str] = []
    """Modules of a layer, and parameters that are none of one, in the order in which the model has them in memory."""

    def places(self, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The places of a config's fields, the first that has one counts."""
        inner = inner_config(self.inside.config, config) if self.inside else {}
        return [inner, config] if inner else config_places(config)
