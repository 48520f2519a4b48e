"""Prefixes and infixes that wrappers and trainers put into the names of parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpttool.core.words import some
from ckpttool.errors import ConflictError

_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
"""Modules that hold another one and nothing else: torch.compile, FSDP1, activation checkpointing, Lightning."""
_DATA_PARALLEL = "module."
"""DistributedDataParallel and DeepSpeed's engine. A model's own module may have that name too, below others."""
_EMBEDDING = re.compile(
    r"(?:(?:model|gpt_neox|gpt_neox_japanese|biogpt|(?:model\.)?(?:decoder|language_model))\.)?(?:embed_tokens|embed_in)\.weight"
    r"|(?:transformer\.)?wte\.weight|tok_embeddings\.weight"
    r"|(?:transformer\.)?embedding\.word_embeddings\.weight|token_embd\.weight"
)
"""The embedding of every family, as a model or trainer names it: what is in front of that is not the model's."""
_ADAPTER = re.compile(r"(?<![^.])(?:lora_|base_layer\.|modules_to_save\.|original_module\.)")
"""Parts of names that only models with adapters have."""


def strip_prefixes(names: Iterable[str], where: str = "", *, wrapped: bool = True) -> tuple[dict[str, str], str]:
    """Each name -> the name that the model itself gives the parameter, and a note ("" when all are the same). Not
    ``wrapped``, they are these names.

    Left out are the wrappers wherever they are, ``module.`` in front of all names, and what else is in front of all
    names down to the one that the embedding is known by (``app.model.``, ``policy.``, ``base_model.model.`` of merged
    adapters, ``model.`` twice). Names of a model with adapters that are not merged stay as they are. Raises
    ConflictError where two names would become one.
    """
    olds = list(names)
    if not wrapped:
        return {old: old for old in olds}, ""
    mapping = {old: _WRAPPERS.sub("", old) for old in olds}
    left_out = {m[0] for old in olds for m in _WRAPPERS.finditer(old)}
    if not any(map(_ADAPTER.search, olds)):
        prefix = _in_front(list(mapping.values()))
        mapping = {old: name.removeprefix(prefix) for old, name in mapping.items()}
        left_out |= {prefix} - {""}
    whose: dict[str, str] = {}
    for old, new in mapping.items():
        if whose.setdefault(new, old) != old:
            raise ConflictError(
                f"without their prefixes `{whose[new]}` and `{old}` are both called `{new}`",
                where=where or (),
                hint="one of them is a second copy: save the model again without it",
            )
    note = f"left out of the names: {some([f'`{p}`' for p in sorted(left_out)])}" if left_out else ""
    return mapping, note


def _in_front(names: list[str]) -> str:
    """The common prefix of all names that is not part of the model's; "" for none."""
    common = ""
    while names and (first := names[0].removeprefix(common).partition("."))[1]:
        longer = common + first[0] + "."
        if not all(n.startswith(longer) for n in names):
            break
        common = longer
    data_parallel = ""
    while common.startswith(data_parallel + _DATA_PARALLEL):
        data_parallel += _DATA_PARALLEL
    # The shortest of them behind which a model's embedding is called as it should be.
    at = -1
    while True:
        prefix = common[: at + 1]
        if any(n.startswith(prefix) and _EMBEDDING.fullmatch(n, len(prefix)) for n in names):
            return prefix
        if (at := common.find(".", at + 1)) < 0:
            return data_parallel
