"""Experts of DeepSpeed's MoE layers, whose files lie beside those of a save.

    layer_L_expert_E_mp_rank_00_model_states.pt    {name: tensor}; E counts the experts of all ranks, as the names do
    expert_E_mp_rank_00_model_states.pt            the same of all layers, before DeepSpeed 0.5
    expp_rank_R_mp_rank_00_optim_states.pt         without ZeRO: the optimizer of a rank

``module`` and ``param_shapes`` of the model states are those of rank 0, which has ``ep_size``-th of the experts. Their
optimizer state is that of rank 0 too where each rank has all experts (``ep_size`` 1) and ZeRO shares it out.

Source: deepspeed/runtime/engine.py, _save_moe_checkpoint (DeepSpeed 0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ckpttool.containers.pickle import printable
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import read_torch
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.files import DataFile
from ckpttool.core.words import count, some
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats.torch.zero_files import ModelStates, refuse_tensor_parallel
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import read_each

_WEIGHTS = re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt\Z")
_OPTIMIZER = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt\Z")


def expert_files(save: Listing) -> list[str]:
    """Names of the files of experts, by layer and expert. Raises UnsupportedError for tensor-parallel ranks."""
    found = [m for m in map(_WEIGHTS.match, save.names) if m]
    for m in found:
        if int(m["mp"]):
            refuse_tensor_parallel(save.path(m.string))
    return [m.string for m in sorted(found, key=lambda m: (int(m["layer"] or 0), int(m["expert"])))]


def expert_weights(
    save: Listing, names: Sequence[str], states: ModelStates, files: list[DataFile]
) -> list[StoredTensor]:
    """The weights of all experts; their files are added to ``files``.

    Raises IncompleteError for experts that are missing, ConflictError for one that is in two files, CorruptError.
    """
    _check_all_there(save, names, states)
    out: dict[str, StoredTensor] = {}
    for name, torch in zip(names, read_each(read_torch, [save.path(n) for n in names]), strict=True):
        if not isinstance(torch.value, dict) or not all(isinstance(v, TorchTensor) for v in torch.value.values()):
            raise CorruptError(
                "this is not a file of an expert: it is not a dict of tensors", where=str(save.path(name))
            )
        files.append(torch.info)
        for key, tensor in torch.value.items():
            if str(key) in out or str(key) in states.module:
                raise ConflictError(
                    f"`{printable(str(key))}` is in two files",
                    where=[str(save.path(name)), states.path],
                    hint="the file of an expert lies here under the name of another one; fetch it again",
                    finding="ranks-differ",
                )
            out[str(key)] = torch.place(tensor, str(key), len(files) - 1)
    return list(out.values())


def _check_all_there(save: Listing, names: Sequence[str], states: ModelStates) -> None:
    """Raises IncompleteError where the model states count more experts than there are files."""
    said = states.file.value.get("num_experts")
    counts = [n for n in (said if isinstance(said, (list, tuple)) else [said]) if type(n) is int and n < 1 << 20]
    if names and not names[0].startswith("layer_"):
        wanted = [f"expert_{e}_" for e in range(max(counts, default=0))]
    else:
        wanted = [f"layer_{i}_expert_{e}_" for i, n in enumerate(counts) for e in range(n)]
    have = {n.partition("mp_rank_")[0] for n in names}
    if missing := [w for w in wanted if w not in have]:
        files = [f"{w}mp_rank_00_model_states.pt" for w in missing]
        raise IncompleteError(
            f"{count(len(files), 'file')} of experts {'is' if len(files) == 1 else 'are'} missing: {some(files, 4)}",
            where=str(save.root),
            hint="each node saves the experts of its own ranks: bring the files together in one directory",
            finding="rank-missing",
        )


def shared_optimizer(save: Listing, states: ModelStates, counts: Collection[int]) -> UnsupportedError | None:
    """Reason why the optimizer of a model with experts is not read; None where every rank has all experts, or there is
    none.

    ``counts`` are the numbers of ranks that ZeRO shares its groups out to; none without ZeRO.
    """
    files = [n for n in save.names if _OPTIMIZER.match(n)]
    where, why = str(save.path(files[0])) if files else states.path, ""
    if len(counts) > 1:
        why = "its state of the experts lies on several ranks (expert parallelism), and no file says whose it is"
    elif files or (not counts and states.rest.get("optimizer")):
        why = "without ZeRO it has numbers in place of the names of the experts' parameters"
    hint = "omit it with --only model, or train with ep_size 1 and ZeRO: the weights of all experts are read"
    return UnsupportedError(why, where=where, hint=hint) if why else None
