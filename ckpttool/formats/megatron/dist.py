"""dist_checkpointing of Megatron Core: ``--ckpt-format torch_dist``, the default of Megatron-LM, NeMo and Bridge.

The tensors of a save do not depend on the mesh that trained: the metadata says which box of which tensor each chunk
is, as in torch.distributed.checkpoint, whose files these are. What Megatron adds is in common.pt (``dist_place``), in
the keys (``dist_names``) and in the forms of the optimizer's state (``dist_optimizer``).
Source: megatron/core/dist_checkpointing of Megatron Core 0.6 to 0.16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from ckpttool.containers.pickle import PickledObject, opened, printable
from ckpttool.containers.plain import Numbers
from ckpttool.containers.torch_pickle import TORCH_DTYPE
from ckpttool.containers.torch_zip import read_torch
from ckpttool.core.catalog import Catalog, Key, Piece, whole_tensor
from ckpttool.core.geometry import whole
from ckpttool.core.mesh import Mesh
from ckpttool.core.optimizer_states import STEP
from ckpttool.core.words import count, some
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.config import whole_number
from ckpttool.formats.megatron import dist_zarr, nemo, run
from ckpttool.formats.megatron.args import MULTIPLE, model_config, plain_args
from ckpttool.formats.megatron.dist_buckets import (
    Buffers,
    ModelParameters,
    Placer,
    buffers_of,
    is_grouped,
    put_joined,
    sizes_of,
)
from ckpttool.formats.megatron.dist_fsdp import translated
from ckpttool.formats.megatron.dist_names import (
    VOCABULARY,
    DistCatalogBuilder,
    DistTensor,
    check_layers,
    natural_order,
    part_of,
)
from ckpttool.formats.megatron.dist_optimizer import (
    MASTERS,
    ParameterState,
    group_of,
    is_joined,
    is_optimizers,
    state_of,
    unflattened,
)
from ckpttool.formats.megatron.dist_place import BACKEND, COMMON, find, holds_save
from ckpttool.formats.megatron.dist_write import write_dist
from ckpttool.formats.megatron.groups import SavedOptimizer, counters, optimizers_of, placed
from ckpttool.formats.megatron.names import TARGETS, canonical
from ckpttool.formats.megatron.sizes import check_sizes
from ckpttool.formats.torch import (
    CLASS,
    MAX_OBJECT,
    METADATA,
    ChunkFiles,
    DcpEntry,
    DcpTensor,
    NotPlainError,
    Span,
    entries_of,
    plain_value,
    read_pickle,
)
from ckpttool.storage.listing import Listing

_METADATA_CLASSES = (CLASS, "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata")
_BACKEND = "torch_dist"
_STATES = ("master_weights", "optimizer")


class MegatronDist:
    """Directories of dist_checkpointing."""

    name = "megatron-dist"
    dialect = "megatron"
    capabilities = base.Capabilities(
        components=("model", "master_weights", "optimizer"),
        meshes="any; its files hold all stages",
        targets=TARGETS,
        vocab_multiple=MULTIPLE,
        vocab_multiple_per_tp=True,
        fp32_masters="dropped",
        float32=("*.mlp.router.expert_bias",),
        one_dtype=True,
        counts_steps=True,
        own_files=r"common\.pt|.*\.distcp",
        states="torch",
        default_target=True,
        views=True,
        free_padding=True,
    )

    def detect(self, listing: Listing) -> int:
        return 2 * holds_save(listing)

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (a file or chunk is missing), CorruptError (the metadata and the files contradict each
        other), ConflictError (chunks overlap), UnsupportedError (another backend), and what reading its pickles raises.
        """
        return _DistReader(self.name, find(listing)).read()

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        """A save has a file for each rank of one stage, and Megatron cuts what it holds for any mesh."""
        return replace(asked, pp=1, layout=())

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        """Raises UnsupportedError for quantized weights, and for an optimizer that is not Adam."""
        return write_dist(request)


class _DistReader:
    """One save that is being read."""

    def __init__(self, name: str, save: run.MegatronSave) -> None:
        self.name, self.save, self.where = name, save, str(save.listing.root)
        self.chunks = ChunkFiles()
        self.files = self.chunks.files
        self.notes: list[str] = [*save.notes]
        self.common, self.left = self._common()
        self.args = plain_args(self.common.pop("args", None))
        self.notes += run.other_iteration(save.listing, self.common.get("iteration"))
        self.original: dict[str, tuple[int, ...]] = {}
        """Shapes in the metadata of states that are saved in runs."""
        self.arrays: dict[str, DistTensor] = {}
        """Tensors that are files of zarr."""
        self.refused: dict[str, CkptError] = {}

    def _common(self) -> tuple[dict[str, Any], list[str]]:
        """common.pt, and the names of what in it is not plain and not carried."""
        if COMMON not in self.save.listing.names:
            return {}, []
        torch = read_torch(self.save.listing.path(COMMON))
        if not isinstance(torch.value, dict):
            raise CorruptError(f"{COMMON} does not hold a dict", where=str(torch.info.place))
        out: dict[str, Any] = {}
        left = []
        with opened(torch.info.place) as file:
            for key, value in torch.value.items():
                if key == "args":
                    out[key] = value
                    continue
                known = self._without_scale(value) if key == "optimizer" else value
                try:
                    out[key] = plain_value(known, file, torch)
                except NotPlainError:
                    left.append(f"{COMMON}: {printable(str(key))}")
        return out, left

    def _without_scale(self, optimizer: Any) -> Any:
        """The values of one optimizer, or of several by their numbers, but the scale of the loss: it is a tensor."""
        if not isinstance(optimizer, dict):
            return optimizer
        out = {k: self._without_scale(v) if type(k) is int else v for k, v in optimizer.items()}
        if out.pop("grad_scaler", None) is not None:
            self.notes.append("the scale of the loss (`grad_scaler`, of float16 training) is left out")
        return out

    def read(self) -> base.StoredCheckpoint:
        sorted_ = self._sorted(self._entries())
        nemo.refuse_adapters(sorted_.model, self.where)
        if not self.args:
            self.args = self._other_arguments(sorted_.model)
        config, notes = model_config(self.save.beside, self.args)
        self.notes += notes
        held = self._held({**sorted_.model, **{f: t for f, (_, t) in sorted_.states.items()}, **sorted_.flat})
        layers = whole_number(config, "num_hidden_layers") or self.args.get("num_layers") or 0
        layers = layers if type(layers) is int else 0
        parts = {fqn: part_of(fqn, t.shape, layers) for fqn, t in sorted_.model.items()}
        check_layers(parts, layers, self.where)
        builder = DistCatalogBuilder(self.files, self._vocabulary(config, sorted_.model))
        for fqn in sorted_.model:
            builder.add("model", "", parts[fqn], held.pop(fqn))
        own = 0
        for fqn, (state, _) in sorted_.states.items():
            if state.key not in sorted_.model:
                raise CorruptError(
                    f"the save has the state `{printable(fqn)}`, and no weight `{printable(state.key)}`",
                    where=self.where,
                )
            weight = sorted_.model[state.key]
            if state.component == "master_weights" and weight.dtype == "F32":
                own += 1
                continue
            flat = unflattened(fqn, held.pop(fqn), weight.shape, self.original.get(fqn))
            builder.add(state.component, state.name, parts[state.key], flat)
        if own:
            self.notes.append("float32 weights are their own master weights: the copies are left out")
        if sorted_.flat or any(map(is_joined, sorted_.objects)):
            self._buckets(builder, {f: held[f] for f in sorted_.flat}, sorted_.objects, layers)
        catalog = Catalog(self.files, builder.tensors(natural_order(builder.keys)))
        model = ((t.key.name, t.shape) for t in catalog if t.key.component == "model")
        check_sizes(config, model, self.where)
        return self._stored(config, catalog, self._training(catalog, self._optimizers(sorted_.objects)))

    def _buckets(
        self, builder: DistCatalogBuilder, flat: Mapping[str, DistTensor], objects: Mapping[str, Span], layers: int
    ) -> None:
        """The state in flat buffers; what is refused is so only where it is asked for."""
        held = builder.model()
        model = ModelParameters(
            {n: shape for n, (_, shape, _) in held.items()},
            {n: TORCH_DTYPE.get(dtype, dtype) for n, (dtype, _, _) in held.items()},
            {n: boxes for n, (_, _, boxes) in held.items()},
            layers,
        )
        try:
            target = str(self.args.get("transformer_impl"))
            grouped = is_grouped(self.args)
            buffers = buffers_of(flat)
            for fqn, span in objects.items():
                if is_joined(fqn):
                    self._joined(buffers, fqn, span)
            found = Placer(buffers, model, sizes_of(self.args), target, grouped=grouped).run()
        except UnsupportedError as e:
            self.refused |= dict.fromkeys(_STATES, e)
            self.notes.append(f"the optimizer is not read: {e.what}")
            return
        for state, name, box, stored in found:
            master = state in MASTERS
            if master and held[name][0] == "F32":
                continue
            key = Key(name, *(("master_weights", "") if master else ("optimizer", state)))
            named = stored._replace(name=name, component=key.component, state=key.state)
            builder.put(key, Piece(named, whole(named.shape), box))

    def _joined(self, buffers: Buffers, fqn: str, span: Span) -> None:
        with opened(self.files[span[0]].place) as file:
            held = self.chunks.slice(file, fqn, span)
        value = held.value[0] if isinstance(held.value, list) and held.value else held.value
        put_joined(buffers, fqn, value, lambda t: held.place(t, fqn, span[0]))

    def _optimizers(self, objects: Mapping[str, Span]) -> list[SavedOptimizer]:
        """The optimizers in common.pt, or the same of each optimizer's first group of ranks."""
        if found := optimizers_of(self.common.get("optimizer")):
            return found
        first: dict[int, tuple[int, str]] = {}
        for fqn in objects:
            if (owner := group_of(fqn)) is not None:
                first[owner[0]] = min(first.get(owner[0], (owner[1], fqn)), (owner[1], fqn))
        for _, (_, fqn) in sorted(first.items()):
            span = objects[fqn]
            with opened(self.files[span[0]].place) as file, suppress(NotPlainError):
                held = self.chunks.slice(file, fqn, span)
                found += optimizers_of(plain_value(held.value, file, held)) if span[2] <= MAX_OBJECT else []
        return found

    def _other_arguments(self, model: Mapping[str, DcpTensor]) -> dict[str, Any]:
        """The arguments that NeMo or Bridge keep beside a save; {} where there are none."""
        args, where = nemo.find_arguments(self.save.listing, self.save.beside)
        if args:
            self.notes.append(f"sizes of the model are those of {where}")
            args.setdefault("padded_vocab_size", _rows(model))
        return args

    def _entries(self) -> list[DcpEntry]:
        path = self.save.listing.path(METADATA)
        if METADATA not in self.save.listing.names:
            said = self.save.listing.json(BACKEND).get("sharded_backend")
            if said == dist_zarr.BACKEND:
                self.arrays = dist_zarr.read_arrays(self.save.listing, self.files)
                return [DcpEntry(k, (k,), DcpTensor(h.dtype, h.shape, ())) for k, h in self.arrays.items()]
            if isinstance(said, str) and said != _BACKEND:
                raise UnsupportedError(
                    f"the tensors are stored by the backend {printable(said)}",
                    where=str(self.save.listing.path(BACKEND)),
                    hint=f"load it with Megatron and save it with --ckpt-format {_BACKEND}",
                )
            raise IncompleteError(
                f"the save was not finished, or not copied whole: {METADATA} is missing",
                where=self.where,
                hint="take an earlier save: `ckpttool inspect RUN --checkpoints` shows which are complete",
                finding="save-unfinished",
            )
        value = read_pickle(path)
        said = value.fields.get("mcore_data") if type(value) is PickledObject else None
        for fqn, about in said.items() if isinstance(said, dict) else ():
            shape = about.get("nd_reformulated_orig_global_shape") if isinstance(about, dict) else None
            if isinstance(shape, tuple):
                self.original[fqn] = shape
        entries = entries_of(value, path, partial(self.chunks.number, self.save.listing), *_METADATA_CLASSES)
        return entries if COMMON in self.save.listing.names else self._of_fsdp(entries)

    def _of_fsdp(self, entries: Sequence[DcpEntry]) -> list[DcpEntry]:
        """The entries of a save that has common.pt's values among them."""
        found = translated(entries)
        for fqn, span in found.values:
            with opened(self.files[span[0]].place) as file, suppress(NotPlainError):
                held = self.chunks.slice(file, fqn, span)
                self.common[fqn] = held.value if fqn == "args" else plain_value(held.value, file, held)
        self.args = plain_args(self.common.pop("args", None))
        steps = set()
        for fqn, span in found.steps:
            with opened(self.files[span[0]].place) as file, suppress(NotPlainError):
                held = self.chunks.slice(file, fqn, span)
                steps.add(plain_value(held.value, file, held))
        if len(steps) == 1 and type(step := steps.pop()) in (int, float):
            self.common["optimizer"] = {"param_groups": [], "state": {"common_step": step}}
        elif found.steps:
            self.notes.append("the optimizer's steps differ from parameter to parameter, and are left out")
        return found.entries

    def _sorted(self, entries: Sequence[DcpEntry]) -> _Sorted:
        """Sort entries by kind; values that are not read are noted."""
        out = _Sorted({}, {}, {}, {})
        extra, unread = 0, []
        for e in entries:
            if not canonical(e.fqn):
                extra += 1
            elif is_optimizers(e.fqn):
                if not isinstance(e.value, DcpTensor):
                    out.objects[e.fqn] = e.value
                elif (state := state_of(e.fqn)) is not None:
                    out.states[e.fqn] = state, e.value
                else:
                    out.flat[e.fqn] = e.value
            elif isinstance(e.value, DcpTensor):
                out.model[e.fqn] = e.value
            else:
                unread.append(e.fqn)
        if extra:
            self.notes.append(f"skipped: _extra_state (FP8's scaling history), {count(extra, 'entry', 'entries')}")
        self.left += sorted({u.partition("/")[0] for u in unread})
        return out

    def _held(self, described: Mapping[str, DcpTensor]) -> dict[str, DistTensor]:
        """The tensors, of which the head of each chunk is read, file by file."""
        out = {f: self.arrays.get(f) or DistTensor(t.dtype, t.shape, []) for f, t in described.items()}
        todo = sorted((c.span, f, j) for f, t in described.items() for j, c in enumerate(t.chunks) if c.box.volume)
        for number, group in groupby(todo, key=lambda item: item[0][0]):
            with opened(self.files[number].place) as file:
                for span, fqn, j in group:
                    t = described[fqn]
                    box = t.chunks[j].box
                    stored = self.chunks.chunk(file, fqn, Key(fqn), span, t.dtype, box.shape)
                    out[fqn].chunks.append((box, stored))
        return out

    def _vocabulary(self, config: Mapping[str, Any], model: Mapping[str, DcpTensor]) -> int:
        """Rows of tokens; 0 where nobody says them. Raises ConflictError where there are fewer rows."""
        rows = _rows(model)
        said = whole_number(config, "vocab_size")
        if said is None or said < 1:
            return 0
        if rows and said > rows:
            raise ConflictError(
                f"the vocabulary has {said:,} tokens by the model's configuration, and {rows:,} rows in the files",
                where=self.where,
                hint="check vocab_size in config.json",
            )
        if rows and not self.save.beside.json("config.json") and not self.args.get("vocab_size"):
            self.notes.append(f"nothing says how many of the {rows:,} rows of the vocabulary are padding; all are kept")
        return said

    def _training(self, catalog: Catalog, optimizers: Sequence[SavedOptimizer]) -> base.TrainingState | None:
        """Everything else that a trainer resumes from; steps become tensors of the catalog."""
        plain = nemo.progress(self.common, self.save.listing) | counters(self.common, self.args)
        stateful = {k.name for k in catalog.tensors if k.component in _STATES}
        model = {k.name: t.shape for k, t in catalog.tensors.items() if k.component == "model"}
        shapes = {n: shape for n, shape in model.items() if n in stateful or not stateful}
        groups, steps, every = placed(optimizers, shapes)
        if shapes and any(o.groups for o in optimizers) and not every:
            self.notes.append(
                "the save does not record which parameters are in which group of the optimizer: the groups are left out"
            )
        if stateful:
            self._steps(catalog, steps)
        if not groups and not plain and not self.left:
            return None
        taken = {*steps.values()} if not stateful else set()
        step = int(taken.pop()) if len(taken) == 1 else None
        return base.TrainingState(tuple(groups), step, plain, tuple(self.left))

    def _steps(self, catalog: Catalog, steps: Mapping[str, float]) -> None:
        if not steps:
            return
        numbers = Numbers(self.files)
        said_by = COMMON if COMMON in self.save.listing.names else METADATA
        info = base.file_now(self.save.listing.path(said_by))
        for name, step in steps.items():
            key = Key(name, "optimizer", STEP)
            stored = numbers.place(step, info)._replace(name=name, component=key.component, state=key.state)
            catalog.tensors[key] = whole_tensor(stored, key)

    def _stored(
        self, config: dict[str, Any], catalog: Catalog, training: base.TrainingState | None
    ) -> base.StoredCheckpoint:
        listing = self.save.listing
        own = [COMMON, BACKEND, *(f.place.name for f in self.files)]
        root, carried, notes = nemo.small_files(listing) or run.small_files(self.save, own)
        if self.left:
            notes.append(f"skipped, not plain data: {some(self.left)}")
        target = self.args.get("transformer_impl")
        return base.StoredCheckpoint(
            self.name,
            root,
            self.files,
            [p.stored for t in catalog for p in (*t.pieces, *t.replicas)],
            Mesh(),
            "megatron" if config else "hf",
            config=config,
            companions=carried,
            recorded=catalog,
            notes=[*self.notes, *notes],
            native=self.args,
            training=training,
            indexes=(listing.path(METADATA),) if METADATA in listing.names else (),
            version=target if target in TARGETS else "",
            refused=self.refused,
        )


def _rows(model: Mapping[str, DcpTensor]) -> int:
    """Rows of the vocabulary, padding included; 0 where there is none."""
    return next((t.shape[0] for f, t in model.items() if canonical(f) in VOCABULARY and t.shape), 0)


class _Sorted(NamedTuple):
    """The entries of a save by kind."""

    model: dict[str, DcpTensor]
    states: dict[str, tuple[ParameterState, DcpTensor]]
    """States of the optimizer, by parameter."""
    flat: dict[str, DcpTensor]
    """Flat buffers of the optimizer."""
    objects: dict[str, Span]
    """Places of the optimizer's values that are not tensors."""
