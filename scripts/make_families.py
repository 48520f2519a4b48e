"""Makes ``ckpttool/layout/families/transformers/``: families as transformers cuts, read off its own plans.

    python -m scripts.make_families [MODEL_TYPE ...] [--out DIR] [--all]

needs the peers' environment. A model type gets a file if all of this holds; else a line says why not:

- every stored tensor has a rule, and on 2 and on 4 ranks each rank holds what the plan gives it, element for element;
- where a cut must not tear a head the rule has that unit, and heads exchanged between ranks leave the logits as they
  are (scripts/family_rules.py); what transformers gathers again after each layer may be cut anywhere;
- no family that is written by hand cuts the same tensors in the same way.

The file of a model type that is refused is taken away. scripts/family_tensors.py adds the section ``tensors:``, for
``size`` of a config.json, to models that no family written by hand is for; if what it finds declares exactly what
transformers makes of random configs. The sections ``cache:`` and ``slices:``, which stand last, are written by hand,
and kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.peers.families.__main__ import quiet

quiet()

import numpy as np  # noqa: E402 - transformers reads its environment when it is imported
import transformers  # noqa: E402
import yaml  # noqa: E402

from ckpttool.core.mesh import Mesh  # noqa: E402
from ckpttool.layout.family import Family, find_family, load_family  # noqa: E402
from ckpttool.layout.files import FAMILIES  # noqa: E402
from ckpttool.layout.partition import Partitioner  # noqa: E402
from ckpttool.layout.rules import IndivisibleError, PartitionContext  # noqa: E402
from scripts.family_rules import PREDICTION, SIDE, Kind, Reading, Refused, builder, joined, lengths, read, walk  # noqa: E402
from scripts.family_tensors import tensors_section  # noqa: E402
from tests.peers.families import plans  # noqa: E402
from tests.peers.families.tiny import Architecture, architectures, find  # noqa: E402

OUT = FAMILIES / "transformers"
CACHE = "\n# What its layers keep of the tokens that they have read\n"
SLICES = "\n# Fields that say by number what each layer is\nslices:"
EARLY = re.compile(r"(embed|per_layer|altup_projections|latent_|lerope|^wte)")
"""What works in front of the layers, wherever a class has it."""
ROUTER = re.compile(r"(^|[._])(gate|router|classifier)\.")
"""What every software holds whole."""


# --- the file ---


def stage_of(kind: Kind, reading: Reading) -> str:
    """``first`` or ``last``, for a tensor that is in no layer."""
    name = kind.pattern
    if PREDICTION.search(name):
        return "last"
    if SIDE.search(name) or (EARLY.search(name) and not re.search(r"embedding_norm|unembed", name)):
        return "first"
    if re.match(r"(head|cls|output)\.", name) or re.search(r"(^|[._])(lm_head|hc_head|embed_out)\b", name):
        return "last"
    model = reading.prefix.partition("layers.{layer}")[0]
    own = name.removeprefix(model)
    final = kind.behind or re.match(r"(norm|final|ln_f)", own) is not None
    return "last" if final and name.startswith(model) else "first"


def own_kind(reading: Reading, name: str) -> Kind:
    """The kind of a tensor that is in no layer."""
    return next(k for k in reading.kinds if k.section != "layers" and (name in k.names or name == k.pattern))


def quoted(text: str) -> str:
    """As a key of YAML."""
    return f'"{text}"' if text[0] in "{*&!%@`" or ": " in text else text


def modules(kinds: Iterable[Kind]) -> list[tuple[str, str]]:
    """(pattern, rule) with weight and bias of a module in one."""
    found: dict[str, list[Kind]] = {}
    for kind in kinds:
        module, _, leaf = kind.pattern.rpartition(".")
        found.setdefault(module if leaf in ("weight", "bias") and module else kind.pattern, []).append(kind)
    out = []
    for module, members in found.items():
        if members[0].pattern == module:
            out.append((module, members[0].rule))
            continue
        rules = {k.pattern.rpartition(".")[2]: k.rule for k in members}
        main = rules.get("weight", "")
        verb = main.split()[0] if main else ""
        same = rules.get("bias", main) == main or (verb == "row" and rules["bias"] == "replicate")
        if main and same and (verb != "replicate" or "bias" in rules):
            out.append((f"{module}.*", main))
        else:
            out += [(k.pattern, k.rule) for k in members]
    return out


def outside(reading: Reading, stage: str) -> list[tuple[str, str]]:
    """Rules of what is in no layer: a tower that is whole has one line."""
    mine = [k for k in reading.kinds if k.section != "layers" and stage_of(k, reading) == stage]
    others = [k for k in reading.kinds if k not in mine]
    start = reading.prefix.partition("{layer}")[0]
    out: dict[str, str] = {}
    rest: list[Kind] = []
    for kind in mine:
        words = kind.pattern.split(".")
        heads = [".".join(words[:i]) + "." for i in range(1, len(words))]
        whole = next(
            (
                h
                for h in heads
                if not start.startswith(h)
                and not any(k.pattern.startswith(h) for k in others if k.section != "layers")
                and all(k.rule == "replicate" for k in mine if k.pattern.startswith(h))
                and sum(k.pattern.startswith(h) for k in mine) > 2
            ),
            None,
        )
        if whole:
            out[f"{whole}*"] = "replicate"
        else:
            rest.append(kind)
    return [*joined(modules(rest)), *joined(list(out.items()))]


def lines_of(rules: Sequence[tuple[str, str]], indent: str) -> list[str]:
    """Rules as lines of YAML."""
    return [f"{indent}{quoted(p)}: {r}" for p, r in rules]


def layer_lines(reading: Reading) -> list[str]:
    """The rules of a layer, those of matrices that stay whole with a word about it."""
    kinds = [k for k in reading.kinds if k.section == "layers"]
    order = {name: i for i, name in enumerate(dict.fromkeys(k.pattern.split(".")[0] for k in kinds))}
    kinds.sort(key=lambda k: (order[k.pattern.split(".")[0]],))
    gathered = [k for k in kinds if k.gathered]
    cut = [k for k in kinds if k.cut.parts and not k.gathered]
    matrix = {k.pattern.rpartition(".")[0] for k in kinds if len(reading.shapes[k.names[0]]) > 1}
    whole = [k for k in kinds if not k.cut.parts]
    # The bias of a row-parallel layer goes by the rule of its weight.
    of_cut = {k.pattern.rpartition(".")[0] for k in cut + gathered if k.pattern.endswith(".weight")}
    beside = [k for k in whole if k.pattern.endswith(".bias") and k.pattern.rpartition(".")[0] in of_cut]
    large = [
        k for k in whole if k.pattern.rpartition(".")[0] in matrix and k not in beside and not ROUTER.search(k.pattern)
    ]
    small = [k for k in whole if k not in beside and k not in large]
    out: list[str] = []
    in_gathered = {k.pattern.rpartition(".")[0] for k in gathered}
    of_gathered = [k for k in beside if k.pattern.rpartition(".")[0] in in_gathered]
    out += lines_of(joined(modules([*cut, *(k for k in beside if k not in of_gathered)])), "    ")
    if gathered:
        out.append("    # transformers puts their results together at once: the cut may fall anywhere")
        out += lines_of(joined(modules([*gathered, *of_gathered])), "    ")
    if large:
        out.append("    # The plan leaves them whole")
        out += lines_of(joined(modules(large)), "    ")
    return out + lines_of(joined(modules(small)), "    ")


def size_lines(sizes: Mapping[str, Any]) -> list[str]:
    """Sizes as lines of YAML."""
    out = []
    for name, value in sizes.items():
        if isinstance(value, dict):
            shown = f"{{from: [{', '.join(value['from'])}], default: {value['default']}, shared: true}}"
        else:
            shown = value if isinstance(value, str) else f"[{', '.join(value)}]"
        out.append(f"  {name}: {shown}")
    return out


def written(reading: Reading) -> str:
    """The text of a family file."""
    kind = reading.architecture
    names = [a.cls for a in architectures() if a.model_type == kind.model_type and a.cls == kind.cls]
    version = transformers.__version__
    out = [
        f"family: transformers/{kind.model_type}",
        f"about: {kind.model_type}, as transformers {version} cuts it; generated by scripts/make_families.py",
        f"model_types: [{kind.model_type}]",
        f"architectures: [{', '.join(dict.fromkeys(names))}]",
    ]
    if reading.tied:
        out.append("tied: true")
    if reading.base:
        out.append(f'base: "{reading.base}"')
    turns = [k for k in reading.kinds if k.section != "layers" and "*" in k.pattern and not SIDE.search(k.pattern)]
    if any(k.cut.parts for k in turns):
        out.append("no_pipeline: it has several stacks of layers, through which its computation goes in turn")
    if reading.ties:
        out += ["", "ties:", *[f"  {k}: {v}" for k, v in reading.ties.items()]]
    out += ["", "sizes:", *size_lines(reading.sizes)]
    out += ["", "first:", *lines_of(outside(reading, "first"), "  ")]
    out += ["", "layers:", f'  prefix: "{reading.prefix}"', "  rules:", *layer_lines(reading)]
    out += ["", "last:", *lines_of(outside(reading, "last"), "  ")]
    return "\n".join(out) + "\n"


# --- what must hold ---


def ours(family: Family, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], mesh: Mesh) -> plans.Owners:
    """Which rank holds what, by a family's rules."""
    from ckpttool.layout.partition import WholeTensor

    class Stored:
        def __init__(self, name: str) -> None:
            self.name, self.dtype, self.shape = name, "F32", shapes[name]

    wholes: list[WholeTensor] = [Stored(n) for n in shapes]
    cutting = PartitionContext(mesh, family.sizes, optional=frozenset())
    found = {n: np.zeros(s, np.int64) for n, s in shapes.items()}
    for rank, tensors in enumerate(Partitioner(family, (), cutting, config).run(wholes)):
        for t in tensors:
            for _, box in t.boxes:
                at = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
                found[t.key][at] |= 1 << rank
    return found


def check_owners(reading: Reading, file: Path) -> None:
    """Raises Refused when a rank holds something else than by the plan."""
    kv_heads = [n for n, v in walk(reading.config) if n.rpartition(".")[2] == "num_key_value_heads" and v == 2]
    build = builder(reading.architecture, dict.fromkeys(kv_heads, 4))
    try:
        shapes = lengths(build)
    except Exception:  # noqa: BLE001 - a class that wants other numbers of heads
        build = builder(reading.architecture)
        shapes = lengths(build)
    config = json.loads(build().config.to_json_string(use_diff=False))
    family = load_family(str(file), config)
    runs = [(Mesh(tp=n, etp=n), n, False) for n in (2, 4)]
    if build().ep_plan:
        runs.append((Mesh(tp=2, ep=2), 2, True))
    for mesh, ways, experts in runs:
        theirs = plans.owners(build, ways, experts=experts)
        try:
            mine = ours(family, shapes, config, mesh)
        except IndivisibleError as e:
            raise Refused(str(e)) from e
        differ = sorted(n for n in shapes if (mine[n] != theirs[n]).any())
        if differ:
            raise Refused(f"{mesh}: {len(differ)} tensors are not cut as by the plan: {', '.join(differ[:3])}")


def same_by_hand(reading: Reading) -> str:
    """The family written by hand that cuts this model in the same way; "" for none."""
    build = builder(reading.architecture)
    config = json.loads(build().config.to_json_string(use_diff=False))
    config["architectures"] = [reading.architecture.cls]
    name = find_family(config)
    if name is None or "/" in name:
        return ""
    shapes = lengths(build)
    try:
        family = load_family(name, config)
        hand = ours(family, shapes, config, Mesh(tp=2, etp=2))
    except Exception:  # noqa: BLE001 - a family that does not fit what transformers saves is another one
        return ""
    theirs = plans.owners(build, 2)
    return name if all((hand[n] == theirs[n]).all() for n in shapes) else ""


def own_sections(name: str) -> str:
    """What stands in the built-in file on what layers keep, and on fields that speak of layers by number: written by
    hand, as no plan of transformers says it."""
    file = OUT / name
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = re.search(f"{re.escape(CACHE)}|{re.escape(SLICES)}", text)
    return text[found.start() :] if found else ""


def make(architecture: Architecture, out: Path, *, all_of_them: bool = False) -> tuple[Path, list[str]]:
    """Read, write and check the file of an architecture; also returns notes. Raises Refused, and leaves no file."""
    reading = read(architecture)
    if not all_of_them and (name := same_by_hand(reading)):
        raise Refused(f"family {name} cuts it in the same way")
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{architecture.model_type}.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch, file.name)
        draft.write_text(written(reading), encoding="utf-8")
        yaml.safe_load(draft.read_text(encoding="utf-8"))
        check_owners(reading, draft)
        text = draft.read_text(encoding="utf-8")
        try:
            if (other := find_family(reading.config | {"architectures": [architecture.cls]})) and "/" not in other:
                raise Refused(f"{other} has them")
            section = tensors_section(reading, text, lambda n: stage_of(own_kind(reading, n), reading), Path(scratch))
        except Refused as e:
            reading.notes.append(f"no section `tensors`: {e}")
        else:
            text += (
                f"\n# What a model holds, by its config.json: found by trying, defaults as in transformers\n{section}"
            )
        file.write_text(text + own_sections(file.name), encoding="utf-8")
    return file, reading.notes


def chosen(words: Sequence[str]) -> list[list[Architecture]]:
    """The architectures to look at by model type; the first for which it works gives the file."""
    found = [a for w in words for a in find(w)] if words else architectures()
    types: dict[str, set[str]] = {}
    for a in architectures():
        types.setdefault(a.cls, set()).add(a.model_type)
    out: dict[str, list[Architecture]] = {}
    for a in found:
        # A class that several model types have is that of the one whose config it takes.
        several = len(types[a.cls]) > 1
        own = getattr(transformers, a.cls).config_class.model_type if several else a.model_type
        if own == a.model_type or own not in types[a.cls]:
            out.setdefault(a.model_type, []).append(a)
    return list(out.values())


def report(several: Sequence[Architecture], out: Path, *, all_of_them: bool) -> bool:
    """Make the file of a model type and say what came out."""
    why = ""
    for architecture in several:
        try:
            made, notes = make(architecture, out, all_of_them=all_of_them)
        except Refused as e:
            why = str(e)
        except Exception as e:  # noqa: BLE001 - transformers' classes raise what they like
            why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        else:
            print("; ".join([f"made {made.name}", *notes]), flush=True)
            return True
    print(f"refused {several[0].model_type}: {why}", flush=True)
    (out / f"{several[0].model_type}.yaml").unlink(missing_ok=True)
    return False


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m scripts.make_families", description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--all", action="store_true", help="also what a family written by hand cuts in the same way")
    said = parser.parse_args()
    made = sum(report(several, said.out, all_of_them=said.all) for several in chosen(said.model_types))
    print(f"{made} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
