"""One architecture, judged: cut and put together, exchanged, declared."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.helpers.command import ckpttool
from tests.helpers.stored_names import Stored, kept
from tests.peers.families import forward, swap
from tests.peers.families.by_number import BY_NUMBER, exchange_tensors, exchanging
from tests.peers.families.remote import REMOTE
from tests.peers.families.tiny import VOCAB, Architecture, kinds, meta_model, parameters, save

TOLERANCE = 2e-5
"""Largest difference of logits, beside the largest: sums in another order."""
ENGINES = ("vllm", "trtllm", "deepseek")


@dataclass
class Found:
    """What came out for an architecture. A text in ``wrong`` is a failure; ``refused`` is none, but no success."""

    architecture: Architecture
    params: int = 0
    not_made: str = ""
    family: str = ""
    refused: str = ""
    back: dict[str, str] = field(default_factory=dict)
    """By parallelism (``tp 2``): "ok", or why it is refused."""
    by_number: str = ""
    """Why more was exchanged than what is cut."""
    swapped: dict[str, float] = field(default_factory=dict)
    """By parallelism the largest difference of the logits."""
    plan: str = ""
    """At which sizes each rank holds what transformers' plan gives it."""
    not_run: str = ""
    cut: list[str] = field(default_factory=list)
    """Kinds of tensors that are cut at tp 2, those of the vocabulary left out."""
    whole: list[str] = field(default_factory=list)
    """Kinds of matrices that every rank holds whole."""
    unseen: list[str] = field(default_factory=list)
    """Kinds that are cut, and the logits do not tell whether they are exchanged."""
    declared: str = ""
    """ "ok", or what differs."""
    targets: dict[str, str] = field(default_factory=dict)
    varied: list[str] = field(default_factory=list)
    """Switches that were turned round, too."""
    varied_wrong: list[str] = field(default_factory=list)
    """What is wrong with them; the table is about models without."""
    stored: Stored | None = None
    """What fast tests look at."""
    wrong: list[str] = field(default_factory=list)

    @property
    def logits_equal(self) -> bool:
        """They were compared, with something exchanged."""
        return any(0 <= v <= TOLERANCE for v in self.swapped.values())

    @property
    def passed(self) -> bool:
        return bool(self.params) and not self.refused and not self.wrong


def error_of(text: str) -> str:
    """First line of an error, and the first of its details."""
    lines = [x.strip() for x in text[text.find("error: ") :].splitlines() if x.strip()]
    details = [x for x in lines[1:] if not x.startswith("hint")]
    return " | ".join([lines[0].removeprefix("error: "), *details[:2]])[:300] if lines else text[:300]


def judge(
    architecture: Architecture,
    folder: Path,
    family: str = "",
    changes: dict[str, Any] | None = None,
    *,
    covered_only: bool = False,
    brief: bool = False,
) -> Found:
    """Make it tiny, cut it, judge it; files lie under ``folder``.

    ``covered_only``: only if a family names it. ``brief``: two ranks only.
    """
    found = Found(architecture)
    if not family and not changes and covered_only and not named(architecture):
        found.refused = "no family names it"
        return found
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole"
    try:
        remote = REMOTE.get(architecture.cls) if architecture.group == "remote" else None
        found.params = remote.save(whole) if remote else parameters(save(architecture, whole, changes))
    except Exception as e:  # noqa: BLE001 - whatever transformers raises
        found.not_made = f"{type(e).__name__}: {e}".replace("\n", " ")[:300]
        return found
    one = _Judge(found, whole, folder, ("--family", family) if family else (), changes)
    one.brief = brief
    one.all()
    return found


def named(architecture: Architecture) -> bool:
    """Whether a family is chosen by such a model's config.json."""
    from ckpttool.layout.family import find_family

    return find_family({"model_type": architecture.model_type, "architectures": [architecture.cls]}) is not None


SWITCHES = (
    *("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "bias", "use_qk_norm", "qk_layernorm"),
    *("tie_word_embeddings", "attention_out_bias", "conv_bias", "use_conv_bias", "add_qkv_bias"),
)
"""Fields of configs that add or take away tensors."""


def variations(architecture: Architecture, folder: Path) -> Iterator[tuple[str, Found]]:
    """The same architecture with each switch of its language model turned round, where that makes another model."""
    from tests.peers.families.tiny import tiny_config

    plain = _names(architecture, {})
    if architecture.group == "remote" or plain is None:
        return
    config = tiny_config(architecture.model_type, group=architecture.group)
    parts = {"": config} | {f"{n}.": getattr(config, n) for n in ("text_config",) if hasattr(config, n)}
    for at, part in parts.items():
        for switch in SWITCHES:
            value = vars(part).get(switch)
            if not isinstance(value, bool):
                continue
            changes = {f"{at}{switch}": not value}
            if _names(architecture, changes) in (None, plain):
                continue
            said = f"{at}{switch}={str(not value).lower()}"
            yield said, judge(architecture, folder / said, "", changes, brief=True)


def _names(architecture: Architecture, changes: dict[str, Any]) -> list[str] | None:
    """What such a model stores; None where it cannot be made."""
    import torch

    try:
        with torch.device("meta"):
            model = meta_model(architecture, changes)
    except Exception:  # noqa: BLE001 - whatever transformers raises
        return None
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return sorted(n for n in model.state_dict() if n not in tied)


class Runner(Protocol):
    """A model that can be run with the weights of several checkpoints."""

    want: Any
    """What it computes with those of the whole model."""

    def compute(self, folder: Path) -> Any:
        """What it computes with those of a checkpoint."""

    def unseen(self, folder: Path) -> list[str]:
        """Kinds of tensors that, taken alone from the checkpoint, change nothing of that."""


def runner(architecture: Architecture, whole: Path) -> Runner:
    """Raises whatever transformers raises."""
    if architecture.group == "remote":
        return _FromFiles(REMOTE[architecture.cls].compute, whole)
    import transformers

    return _InMemory(getattr(transformers, architecture.cls), whole)


class _InMemory:
    """One of transformers' models."""

    def __init__(self, cls: type, whole: Path) -> None:
        self.model = forward.load(cls, whole)
        self.given = forward.inputs(forward.runnable(self.model))
        self.want = forward.compute(forward.runnable(self.model), self.given)
        self.other: Any = None

    def compute(self, folder: Path) -> Any:
        self.other = forward.load(type(self.model), folder)
        return forward.compute(forward.runnable(self.other), self.given)

    def unseen(self, folder: Path) -> list[str]:
        import torch

        other = self.other or forward.load(type(self.model), folder)
        mine, theirs = dict(self.model.named_parameters()), dict(other.named_parameters())
        out = []
        with torch.no_grad():
            changed = [n for n in mine if not torch.equal(mine[n], theirs[n])]
            for kind, names in kinds(changed):
                kept = {n: mine[n].clone() for n in names}
                for n in names:
                    mine[n].copy_(theirs[n])
                if (
                    forward.difference(self.want, forward.compute(forward.runnable(self.model), self.given))
                    <= TOLERANCE
                ):
                    out.append(kind)
                for n in names:
                    mine[n].copy_(kept[n])
        return out


class _FromFiles:
    """A model that has only a function of its files."""

    def __init__(self, compute: Callable[[Path], Any], whole: Path) -> None:
        self.run = compute
        self.whole = whole
        self.want = compute(whole)

    def compute(self, folder: Path) -> Any:
        return self.run(folder)

    def unseen(self, folder: Path) -> list[str]:
        from safetensors.numpy import save_file

        mine, theirs = swap.read_all(self.whole), swap.read_all(folder)
        mixed = folder.with_suffix(".mixed")
        mixed.mkdir()
        shutil.copy(self.whole / "config.json", mixed)
        out = []
        for kind, names in kinds(swap.same(mine, theirs)):
            save_file(mine | {n: theirs[n] for n in names}, mixed / "model.safetensors", {"format": "pt"})
            if forward.difference(self.want, self.run(mixed)) <= TOLERANCE:
                out.append(kind)
        return out


class _Judge:
    def __init__(
        self, found: Found, whole: Path, folder: Path, options: tuple[str, ...], changes: dict[str, Any] | None
    ) -> None:
        self.found = found
        self.whole = whole
        self.folder = folder
        self.options = options
        self.tensors = swap.read_all(whole)
        self.config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
        if (said := BY_NUMBER.get(str(self.config.get("model_type")))) is not None:
            found.by_number = said.reason
        self._runner: Runner | None = None
        self.changes = changes
        self.brief = False
        self.gathered: frozenset[str] = frozenset()
        """What transformers' plan cuts anywhere, because the results are gathered."""

    def all(self) -> None:
        first = self.cut("tp 2", ["--tp-out", 2])
        self.family()
        if first is None:
            self.found.refused = self.found.back.pop("tp 2")
            return
        self.list_kinds(first)
        if self.found.family.startswith("transformers/"):
            self.compare_with_plan(first, 2)
        if self.brief:
            self.swap(first, "tp 2")
            self.declared()
            return
        self.swap(first, "tp 2", kinds_too=True)
        for tp in (4, 16):
            if (cut := self.cut(f"tp {tp}", ["--tp-out", tp])) is not None:
                if tp == 4 and self.found.family.startswith("transformers/"):
                    self.compare_with_plan(cut, tp)
                self.swap(cut, f"tp {tp}")
        if any("expert" in n or ("moe" in n and t.ndim > 2) for n, t in self.tensors.items()):
            cut = self.cut("ep 2", ["--tp-out", 2, "--ep-out", 2])
            if cut is not None:
                self.whole_experts(cut)
        self.cut("pp 2", ["--pp-out", 2])
        self.declared()

    def wrong(self, text: str) -> None:
        self.found.wrong.append(text)

    def vocabulary(self, name: str) -> bool:
        # Mllama embeds eight tokens more than it foretells.
        return not {VOCAB, VOCAB + 8}.isdisjoint(self.tensors[name].shape)

    def cut(self, label: str, sizes: list[Any]) -> Path | None:
        """Cut and put together again; None where the tool refuses."""
        ranks = self.folder / label.replace(" ", "")
        done = ckpttool("reshard", self.whole, ranks, "--to", "ranks", *sizes, *self.options)
        if done.code != 0:
            self.found.back[label] = f"refused: {error_of(done.err)}"
            return None
        back = self.together(ranks, ranks.with_suffix(".back"))
        if back is None:
            return None
        if differ := swap.same(self.tensors, swap.read_all(back)):
            self.found.back[label] = "differs"
            self.wrong(f"{label} and back: {len(differ)} tensors differ: {', '.join(differ[:3])}")
        else:
            self.found.back[label] = "ok"
        return ranks

    def whole_experts(self, ranks: Path) -> None:
        """Every expert is whole on one of the two ranks, the first half of them on the first."""
        for r, path in enumerate(swap.rank_files(ranks)):
            mine = swap.read(path)[0]
            for name, whole in self.tensors.items():
                numbered = re.search(r"\.experts\.(\d+)\.", name)
                stacked = ".experts" in name and numbered is None and name in mine and whole.ndim > 1
                part = whole
                if stacked and 2 * mine[name].shape[0] == whole.shape[0]:
                    part = np.split(whole, 2)[r]
                elif numbered is None or name not in mine:
                    continue
                if mine[name].tobytes() != part.tobytes():
                    self.wrong(f"ep 2: rank {r} holds something else of {name}")
                    return

    def together(self, ranks: Path, out: Path) -> Path | None:
        done = ckpttool("reshard", ranks, out, "--to", "hf", "--tp-out", 1, *self.options)
        if done.code != 0:
            self.wrong(f"{ranks.name} and back: {error_of(done.err)}")
            return None
        return out

    def list_kinds(self, ranks: Path) -> None:
        parts = swap.read(swap.rank_files(ranks)[0])[0]
        names = [n for n in self.tensors if not self.vocabulary(n)]
        cut = {n for n in names if n in parts and parts[n].shape != self.tensors[n].shape}
        self.found.cut = [k for k, _ in kinds(sorted(cut))]
        self.found.whole = [k for k, _ in kinds([n for n in names if n not in cut and self.tensors[n].ndim > 1])]

    def compare_with_plan(self, ranks: Path, tp: int) -> None:
        """Each rank holds what transformers' own plan gives it, element for element."""
        plans = importlib.import_module("tests.peers.families.plans")
        from tests.peers.families.tiny import tiny_model

        def build() -> Any:
            return tiny_model(self.found.architecture, self.changes)

        self.gathered = plans.gathered(build())
        held = plans.owners(build, tp)
        for r, path in enumerate(swap.rank_files(ranks)):
            mine = swap.read(path)[0]
            for name, masks in held.items():
                if self.vocabulary(name) or name not in mine:
                    continue
                share = self.tensors[name][masks >> r & 1 == 1]
                # With fewer key heads than ranks the plan tears them; ours are whole, and copied.
                torn = mine[name].size > share.size and np.isin(share, mine[name]).all()
                if not torn and not np.array_equal(share, mine[name].ravel()):
                    self.wrong(f"tp {tp}: rank {r} of transformers' plan holds another part of {name}")
                    return
        self.found.plan += f"{', ' if self.found.plan else ''}tp {tp}"

    def reference(self) -> Runner | None:
        """The whole model; None where it cannot be run."""
        if self._runner is None and not self.found.not_run:
            try:
                self._runner = runner(self.found.architecture, self.whole)
            except Exception as e:  # noqa: BLE001 - whatever transformers raises
                self.found.not_run = f"{type(e).__name__}: {e}".replace("\n", " ")[:300]
                return None
            if not float(self._runner.want.std()) > 1e-2:
                self.found.not_run = "its logits are all alike"
                self._runner = None
        return self._runner

    def swap(self, ranks: Path, label: str, *, kinds_too: bool = False) -> None:
        reference = self.reference()
        if reference is None:
            return
        swapped = ranks.with_suffix(".swapped")
        shutil.copytree(ranks, swapped)
        exchanged = swap.swap(swapped, lambda n: self.vocabulary(n) or n in self.gathered)
        back = self.together(swapped, swapped.with_suffix(".exchanged"))
        if back is None:
            return
        if not exchanged or not swap.same(self.tensors, swap.read_all(back)):
            self.found.swapped[label] = -1.0
            return
        kind, ranks_in_all = str(self.config.get("model_type")), len(swap.rank_files(ranks))
        try:
            if not self.gathered:  # else heads are not what is cut
                exchange_tensors(back, kind, self.config, ranks_in_all)
            with exchanging(kind, heads_of(self.config), ranks_in_all):
                apart = self.found.swapped[label] = forward.difference(reference.want, reference.compute(back))
        except Exception as e:  # noqa: BLE001 - whatever transformers raises
            self.wrong(f"{label} exchanged: {type(e).__name__}: {e}"[:300])
            return
        if not apart <= TOLERANCE:
            self.wrong(f"{label}: with ranks 0 and 1 exchanged the logits differ by {apart:.2g}")
        if kinds_too:
            self.found.unseen = reference.unseen(back)

    def family(self) -> None:
        from ckpttool.layout.family import pick_family

        try:
            family = pick_family(self.options[1] if self.options else "", "", self.config)
        except Exception as e:  # noqa: BLE001 - the reshard has said it
            self.found.family = f"? {e}"[:60]
            return
        self.found.family = family.name
        names = [some[0] for _, some in kinds(sorted(self.tensors))]
        self.found.stored = Stored(kept(self.config), family.name, names)
        for engine in () if self.brief else ENGINES:
            if engine in family.spec.namings:
                dropped = [p for spec in family.spec.namings[engine] for p in spec.drop or ()]
                self.target(engine, dropped)

    def target(self, engine: str, dropped: list[str]) -> None:
        """There and back; ``dropped`` are patterns of what the engine does not have, as derived buffers."""
        from ckpttool.layout.statements import matches

        out = self.folder / engine
        done = ckpttool("reshard", self.whole, out, "--to", engine, "--tp-out", 2, *self.options)
        if done.code != 0:
            self.found.targets[engine] = f"refused: {error_of(done.err)}"
            return
        self.found.targets[engine] = "no way back"
        if self.found.architecture.group == "base":
            return  # an engine's config.json may not say which model it was
        back = self.together(out, self.folder / f"{engine}.back")
        if back is None:
            return
        there = swap.read_all(back)
        wanted = {n: t for n, t in self.tensors.items() if n in there or not matches(dropped, n)}
        differ = swap.same(wanted, there)
        if differ:
            theirs = {self.published(n): t for n, t in self.tensors.items()}
            theirs = {n: t for n, t in theirs.items() if n in there or not matches(dropped, n)}
            if swap.same(theirs, there) == [] or swap.contents(wanted) == swap.contents(there):
                differ = []
        if not differ and swap.same(wanted, there):
            differ, self.found.targets[engine] = [], "ok, with other names"
        elif differ:
            self.found.targets[engine] = f"differs: {', '.join(differ[:3])}"
            self.wrong(f"to {engine} and back: {len(differ)} tensors differ: {', '.join(differ[:3])}")
        else:
            self.found.targets[engine] = "ok"

    def published(self, name: str) -> str:
        """The name in the family's own form, where renaming leads there."""
        from ckpttool.layout.family import pick_family
        from ckpttool.layout.statements import Rename

        family = pick_family(self.options[1] if self.options else "", "", self.config)
        naming, _ = family.published_form(self.tensors, lambda: {n: t.shape for n, t in self.tensors.items()})
        for op in reversed(family.statements(naming) if naming else ()):
            if isinstance(op, Rename):
                name = op.backward(name)
        return name

    def declared(self) -> None:
        from ckpttool.errors import CkptError
        from ckpttool.layout.family import pick_family
        from ckpttool.layout.shapes import declared_tensors
        from ckpttool.layout.statements import Rename

        family = pick_family(self.options[1] if self.options else "", "", self.config)
        if family.spec.tensors is None:
            self.found.declared = "none"
            return
        try:
            naming, _ = family.published_form(self.tensors, lambda: {n: t.shape for n, t in self.tensors.items()})
            renamed = family.statements(naming) if naming else ()
            ours = {}
            for t in declared_tensors(family, self.config, mtp=False):
                name = t.name
                for op in (o for o in renamed if isinstance(o, Rename)):
                    name = op.forward(name)
                ours[name] = list(t.shape)
        except CkptError as e:
            self.found.declared = f"error: {e}"[:200]
            self.wrong(f"tensors: {e}"[:300])
            return
        theirs = {n: list(t.shape) for n, t in self.tensors.items()}
        if self.found.architecture.group == "base" and not ours.keys() & theirs:
            ours = {n.partition(".")[2]: s for n, s in ours.items()}  # the prefix that a model with a head has
        differ = sorted(
            f"{n}: declared {ours.get(n)}, saved {theirs.get(n)}"
            for n in ours.keys() | theirs
            if ours.get(n) != theirs.get(n)
        )
        self.found.declared = "ok" if not differ else "differs"
        if differ:
            self.wrong(f"tensors: {len(differ)} differ: {'; '.join(differ[:4])}")


def heads_of(config: dict[str, Any]) -> int:
    """How many heads a model has."""
    return next((config[n] for n in ("num_attention_heads", "n_head", "n_heads", "num_heads") if n in config), 0)
