"""One chain: a model, and up to five commands, each drawn from those that its last output allows."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from tests.walk import bits, names, paddle
from tests.walk.bits import Wrong
from tests.walk.forms import leaves
from tests.walk.judge import PADDLE, State, judge
from tests.walk.models import Model, build, untied
from tests.walk.names import Missing, Style, Table, Unclear
from tests.walk.ranks import Grid, Indivisible, whole
from tests.walk.run import Ended, ckpttool

WORKS, REFUSED, EITHER, UNCLEAR = "works", "refused", "either", "unclear"
"""Of a step: it must work, it must be refused, it may be refused and must be right if it is not, and what cannot be
right and so must be refused."""


@dataclass
class Step:
    """One command, and what must come of it."""

    words: list[str]
    """Between SRC and DST before, and the options behind."""
    state: State
    expect: str = WORKS
    why: str = ""
    limit: int = 0
    command: str = "reshard"


@dataclass
class Told:
    """What a chain has to tell."""

    seed: int
    steps: Counter[str] = field(default_factory=Counter)
    """works, refused as it must be, refused unclear, killed, ..."""
    refusals: Counter[str] = field(default_factory=Counter)
    """By message, without names and numbers."""
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(family, format) of what was written and judged."""
    traits: Counter[str] = field(default_factory=Counter)
    wrong: str = ""
    log: list[str] = field(default_factory=list)


def write_source(folder: Path, model: Model, state: State, r: Random) -> None:
    """The checkpoint that a chain begins with, as Hugging Face's software writes it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n", encoding="utf-8")
    for name, data in state.beside.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    tensors = whole(model, state.table)
    if r.random() < 0.6:
        bits.write(folder / "model.safetensors", tensors)
        return
    order = list(tensors)
    if r.random() < 0.5:
        r.shuffle(order)
    count = r.choice([2, 3, 5])
    shards = [order[i::count] for i in range(count)]
    shards = [s for s in shards if s]
    where: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        bits.write(folder / name, {n: tensors[n] for n in shard})
        where |= dict.fromkeys(shard, name)
    total = sum(t.bits.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def first_state(model: Model, r: Random) -> State:
    """In one of the forms that the model may have, with files beside it."""
    stacked = model.experts and model.family != "gpt_oss" and r.random() < 0.3
    style = Style("stacked" if stacked else "apart", "", model.family in ("gpt2", "gpt_neox") and r.random() < 0.3)
    if r.random() < 0.12:
        style = replace(style, fused=r.choice(["fuse", "unfuse"]))
    table = names.plain(model)
    try:
        table = names.hugging_face(model, table, style)
        whole(model, table)
    except Unclear:
        style = Style()
        table = names.hugging_face(model, names.plain(model), style)
    if style != Style():
        model.traits.add(f"form {style.experts} {style.fused}".strip())
    return State(model, table, style=style, beside=_beside(model, r))


def _beside(model: Model, r: Random) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    if r.random() < 0.5:
        out["tokenizer_config.json"] = b'{"model_max_length": 16}\n'
        out["generation_config.json"] = b'{"eos_token_id": 2, "transformers_version": "5.0.0"}'
    if r.random() < 0.2:
        out["chat_template.jinja"] = b"{{ messages }}\n"
        out["vocab.txt"] = bytes(range(256))
    if r.random() < 0.12:
        out["1_Pooling/config.json"] = b'{"pooling_mode_mean_tokens": true}'
        out["additional_chat_templates/tool.jinja"] = b"{{ tools }}\n"
        model.traits.add("subdirectories")
    return out


# -- drawing steps


def _grid(r: Random, state: State, formats: str) -> Grid:
    """Sizes, mostly ones that may work. Stages whose layers are not asked for stay as they are."""
    grid, before, model = _sizes(r, state.model, formats), state.grid, state.model
    known = state.format == "ranks" or model.layers % before.pp
    if grid.pp > 1 and not grid.chunks and grid.pp == before.pp and before.chunks and known:
        return replace(grid, chunks=before.chunks)
    return grid


def _sizes(r: Random, model: Model, formats: str) -> Grid:
    divisors = [n for n in range(1, 9) if model.heads % n == 0]
    tp = r.choice(divisors) if r.random() < 0.75 else r.choice([1, 2, 3, 4, 5, 8])
    if formats == "deepseek":
        if r.random() < 0.7:
            tp = r.choice([n for n in divisors if model.experts % n == 0])
        return Grid(tp, 1, tp, 1)
    pp = r.choice([1, 1, 1, 2, 2, 3])
    chunks: tuple[int, ...] = ()
    if pp > 1 and (model.layers % pp or r.random() < 0.4):
        if model.layers < pp:
            pp = 1 if r.random() < 0.8 else pp
        else:
            cuts = sorted(r.sample(range(1, model.layers), pp - 1))
            chunks = tuple(b - a for a, b in zip([0, *cuts], [*cuts, model.layers], strict=True))
            if model.layers % (2 * pp) == 0 and r.random() < 0.3:
                chunks = (model.layers // (2 * pp),) * (2 * pp)
    ep, etp = 1, tp
    if model.experts:
        if formats == "vllm":
            ep = r.choice([1, tp])
            etp = 1 if ep > 1 else tp
        elif formats == "trtllm":
            ep = r.choice([n for n in range(1, tp + 1) if tp % n == 0])
            etp = tp // ep
        elif formats == "ranks" and r.random() < 0.7:
            ep = r.choice([1, 2, 3, 4])
            etp = r.choice([1, 1, tp, 2])
        elif formats in PADDLE and formats != "flex":
            ep = r.choice([1, 1, tp, 2 * tp])
            etp = 1 if ep > 1 else tp  # without expert parallelism Paddle cuts experts as it cuts the rest
    grid = Grid(tp, pp, ep, etp, chunks, ep_fastest=formats == "trtllm")
    return grid if grid.world <= 24 else Grid(tp, 1, 1, tp, ep_fastest=formats == "trtllm")


def _grid_words(model: Model, grid: Grid, formats: str) -> list[str]:
    words = ["--tp-out", str(grid.tp)]
    if formats == "deepseek":
        return words
    words += ["--pp-out", str(grid.pp)]
    if grid.chunks:
        words += ["--pp-layout", ",".join(map(str, grid.chunks))]
    if model.experts:
        words += ["--ep-out", str(grid.ep), "--etp-out", str(grid.etp)]
    return words


def _run_words(r: Random) -> list[str]:
    words = []
    if r.random() < 0.3:
        words.append("--verify")
    if r.random() < 0.15:
        words.append("--manifest")
    if r.random() < 0.25:
        words += ["--workers", r.choice(["1", "2", "3"])]
    if r.random() < 0.15:
        words += ["--memory", r.choice(["4MiB", "16MiB"])]
    return words


def _recast(model: Model, dtype: str) -> Model:
    tensors = {n: replace(t, raw=bits.cast(t.raw, dtype)) for n, t in model.tensors.items()}
    return replace(model, tensors=tensors)


def _selected(state: State, r: Random) -> tuple[list[str], Table] | None:
    """Patterns that leave some tensors out, and what stays."""
    if state.naming in ("vllm", "trtllm") and state.model.tied:
        return None  # the one embedding has several names there
    table = state.table
    candidates = ["*norm*", "*.bias", "*attn*", "*mlp*", "*.0.*", "*head*", "re:.*\\.1\\..*", "re:^lm_head"]
    pattern = r.choice([*candidates, r.choice(list(table))])
    keep = not pattern.startswith("re:") and r.random() < 0.3
    if pattern.startswith("re:"):
        regex = re.compile(pattern[3:])
        hit = {n for n in table if regex.search(n)}
    else:
        hit = {n for n in table if fnmatch.fnmatchcase(n, pattern)}
    left = {n: f for n, f in table.items() if (n in hit) == keep}
    layers = {state.model.tensors[x].layer for f in left.values() for x in leaves(f)}
    if not hit or not left or len(left) == len(table) or not layers.issuperset(range(state.model.layers)):
        return None  # with a whole layer gone it is another model
    return ["--keep-keys" if keep else "--remove-keys", pattern], left


Draw = Callable[[Random, State], "Step | None"]


def _judged(step: Step, before: State) -> Step:
    """With what must come of it, as far as cuts and fusions tell."""
    step.state = step.state.staged
    if before.stripped:
        step.expect, step.why = EITHER, "model_meta.json was deleted"
    if "head_dim unsaid" in step.state.model.traits and "hybrid" in (step.state.format, before.format):
        step.expect, step.why = EITHER, "nothing says which heads are whole"
    try:
        if step.state.format in ("hf", "unified"):
            whole(step.state.model, step.state.table)
        else:
            step.state.ranks()
    except Indivisible as e:
        step.expect, step.why = REFUSED, str(e)
    except Unclear as e:
        step.expect, step.why = UNCLEAR, str(e)
    return step


def _published(state: State) -> Style:
    """The form in which a checkpoint comes back to Hugging Face: ranks of a fused one come back published."""
    style = state.style if state.naming == "hf" else Style()
    return style if state.format == "hf" else replace(style, fused="")


def _to_hf(r: Random, state: State) -> Step:
    words = ["--to", "hf"]
    return _renamed(r, state, words, "hf", "hf", _published(state), Grid())


def _to_ranks(r: Random, state: State) -> Step:
    grid = _grid(r, state, "ranks")
    words = ["--to", "ranks", *_grid_words(state.model, grid, "ranks")]
    return _renamed(r, state, words, "ranks", state.naming, state.style, grid)


def _renamed(r: Random, state: State, words: list[str], format_: str, naming: str, style: Style, grid: Grid) -> Step:
    """A target whose names are those of Hugging Face, or the source's."""
    fused = r.choice(["fuse", "unfuse"]) if r.random() < 0.2 and naming == "hf" else ""
    expect, why = WORKS, ""
    if fused:
        words.append("--" + fused)
        style = replace(style, fused=fused)
    table = state.table
    model = state.model
    changes: dict[str, object] = {}
    if naming != state.naming or style != state.style:
        try:
            table = state.named(naming, style)
        except Missing as e:
            if not fused:
                return Step(words, state, UNCLEAR, str(e))
            # Nobody knows what should become of the other parts: not asked.
            words.remove("--" + fused)
            style = state.style
        except Unclear as e:
            expect, why = UNCLEAR, str(e)
    if r.random() < 0.15 and expect == WORKS and naming == state.naming and style == state.style:
        selected = _selected(state, r)
        if selected:
            words += selected[0]
            table = selected[1]
    if r.random() < 0.2 and "fp8 blocks" not in model.traits:
        dtype = r.choice(["F32", "BF16", "F16"])
        words += ["--dtype", {"F32": "f32", "BF16": "bf16", "F16": "f16"}[dtype]]
        model = _recast(model, dtype)
        changes["dtype"] = dtype
    if format_ == "ranks":
        multiple = r.choice([1, 1, 1, 2, 3, 8, 64])
        if multiple > 1:
            words += ["--vocab-multiple", str(multiple)]
        changes["multiple"] = multiple
    limit = 0
    if format_ == "hf" and r.random() < 0.3:
        limit = r.choice([1000, 3000, 10000])
        words += ["--max-shard-size", str(limit)]
    new = replace(state, model=model, table=table, format=format_, naming=naming, style=style, grid=grid, **changes)  # type: ignore[arg-type]
    step = Step(words, new, expect, why, limit)
    return step if expect != WORKS else _judged(step, state)


def _to_engine(engine: str) -> Draw:
    def draw(r: Random, state: State) -> Step | None:
        model, was = state.model, state.model.tie
        grid = _grid(r, state, engine)
        words = ["--to", engine, *_grid_words(model, grid, engine)]
        limit = 0
        if engine == "vllm" and r.random() < 0.2:
            limit = r.choice([1000, 4000])
            words += ["--max-shard-size", str(limit)]
        if engine == "trtllm" and len(grid.chunks) > grid.pp:
            return Step(words, state, REFUSED, "TensorRT-LLM numbers a stage's layers from 0, and has one run of them")
        if engine == "trtllm" and "fp8 blocks" in model.traits:
            return Step(words, state, REFUSED, "TensorRT-LLM's scales are others")
        optional = state.optional
        plain = state.plain()
        if model.tie == "differs" and model.output not in plain:
            model = replace(model, tie="absent")
            state = replace(state, model=model)
        if model.tie == "differs":
            # Engines believe the flag: with it as it is they would lose the head.
            model = untied(model) if engine != "deepseek" and model.kind != "gemma2" else model
            state = replace(state, model=model)
        if model.tie == "equal" and model.output in plain:
            optional = frozenset({model.output})
        try:
            table = state.named(engine, Style())
        except Missing:
            return None
        except Unclear as e:
            return Step(words, state, UNCLEAR, str(e))
        new = replace(
            state, table=table, format=engine, naming=engine, style=Style(), grid=grid, optional=optional,
            config_kept=state.config_kept and engine != "trtllm", sizes_only=state.sizes_only or engine == "trtllm",
        )  # fmt: skip
        step = _judged(Step(words, new, limit=limit), state)
        if was == "differs" and model.tie == "no" and step.expect == WORKS:
            step.expect, step.why = EITHER, "said to be tied, and is not"
        return step

    return draw


def _square_head(model: Model) -> bool:
    shape = model.tensors[model.embedding].raw.bits.shape
    return not model.tied and shape[0] == shape[1]


def to_paddle(r: Random, state: State) -> Step | None:
    """Names stay those of a Paddle source, and are else those of --target."""
    model = state.model
    format_ = r.choice(["unified", "hybrid", "hybrid", "flex"])
    target = r.choice(paddle.VERSIONS) if format_ != "flex" else "paddleformers-1.2"
    new = replace(state, target=target)
    words = ["--to", format_]
    if state.naming == "paddle":
        if format_ != "flex" and r.random() < 0.4:
            words.append("--native-names")
            new = replace(new, version=target)
        else:
            new = replace(new, target=state.version or target)
    else:
        new = replace(new, version=target)
    if format_ != "flex":
        words += ["--target", new.target]
    grid, shards = Grid(), state.shards if state.format == format_ == "hybrid" else 1
    if format_ != "unified":
        grid = _grid(r, state, format_)
        grid = replace(grid, chunks=grid.chunks[: grid.pp] if len(grid.chunks) > grid.pp else grid.chunks)
        if grid.chunks and sum(grid.chunks) != model.layers:
            grid = replace(grid, chunks=())
        words += _grid_words(model, grid, format_)
        if r.random() < 0.4:
            shards = r.choice([2, 4])
            first = format_ == "hybrid" and r.random() < 0.3
            words += ["--sharding-out", f"{shards}:v1" if first else str(shards)]
    new = replace(
        new, format=format_, naming="paddle", style=Style(), grid=grid, shards=shards, config_kept=False,
    )  # fmt: skip
    try:
        new = replace(new, table=new.named("paddle", Style()))
    except Unclear:
        return None
    if model.kv % grid.tp and model.family != "phi3" and any("qkv_proj" in n for n in new.table):
        return Step(words, new, REFUSED, "a fused query, key and value is cut between groups of heads")
    step = _judged(Step(words, new), state)
    if grid.ep > 1 and format_ == "hybrid" and step.expect == WORKS:
        step.expect, step.why = EITHER, "experts over ranks"
    if state.naming == "paddle" and new.version != new.target and not model.tied and step.expect == WORKS:
        step.expect, step.why = EITHER, "names of one version for another"
    if state.naming == "paddle" and format_ == "flex" and _square_head(model) and step.expect == WORKS:
        step.expect, step.why = EITHER, "nothing says which way round a square head lies"
    if model.tie == "differs" and step.expect == WORKS:
        step.expect, step.why = EITHER, "said to be tied, and is not"
    return step


def _drop_keys(r: Random, state: State) -> Step | None:
    selected = _selected(state, r)
    if selected is None or state.format in PADDLE:
        return None
    (flag, pattern), table = selected
    words = [pattern] if flag == "--remove-keys" else [flag, pattern]
    if r.random() < 0.3 and state.format == "hf":
        words.append("--link")
    # Rank files are written anew, without padding that tp does not ask for.
    return _judged(Step(words, replace(state, table=table, multiple=1), command="drop-keys"), state)


def _merge(r: Random, state: State) -> Step | None:
    """With itself: nothing changes, but that tied tensors are written once."""
    if "fp8 blocks" in state.model.traits or state.format in PADDLE:
        return None
    style = state.style if state.format == "hf" else Style()
    try:
        table = state.table if state.format == "hf" else state.named("hf", style)
    except Unclear:
        return None
    if state.model.tie in ("absent", "equal"):
        table = names.once(state.model, table)
    new = replace(state, table=table, format="hf", naming="hf", style=style, grid=Grid())
    words = ["--to", "hf", *r.choice([["--weights", "0.5,0.5"], ["--method", "average"], ["--weights", "0.25,0.75"]])]
    held = {leaf for form in table.values() for leaf in leaves(form)}
    if state.model.tie == "differs" and held.issuperset({state.model.output, state.model.embedding}):
        return Step(words, new, REFUSED, "tied to each other, and different", command="merge")
    return _judged(Step(words, new, command="merge"), state)


def _draw(r: Random, state: State, *, final: bool) -> Step | None:
    if final:
        return _to_hf(r, state)
    model = state.model
    draws: list[tuple[Draw, int]] = [
        (_to_hf, 3),
        (_to_ranks, 6),
        (_to_engine("vllm"), 4),
        (_drop_keys, 1),
        (_merge, 1),
    ]
    if state.naming == "paddle":
        draws = [(d, n) for d, n in draws if d is not _to_ranks]
    if "fp8 blocks" not in model.traits:
        draws.append((to_paddle, 5))
    if model.family == "deepseek":
        draws.append((_to_engine("deepseek"), 5))
    if model.family in ("llama", "qwen2", "mixtral"):
        draws.append((_to_engine("trtllm"), 4))
    (draw,) = r.choices([d for d, _ in draws], [n for _, n in draws])
    return draw(r, state)


# -- running


def _kind(err: str) -> str:
    """A message without what differs from case to case."""
    line = next((x for x in err.splitlines() if x.startswith("error: ")), err[:80])
    return re.sub(r"\[[\d, ]+\]", "[..]", re.sub(r"\d+", "N", re.sub(r"`[^`]*`", "`..`", line)))[:150]


def check_end(ended: Ended, folder: Path, dst: Path, others: set[str]) -> None:
    """Raises Wrong unless a command that was not killed ended as it is documented to."""
    if "Traceback (most recent call last)" in ended.err or ended.code < 0:
        raise Wrong(f"exit {ended.code}: {ended.err.strip()[-1500:]}")
    left = {p.name for p in folder.iterdir()} - others - {"stdout", "stderr", "tmp"}
    if scratch := list((folder / "tmp").iterdir()):
        raise Wrong(f"in TMPDIR: {[p.name for p in scratch][:5]}")
    if ended.code == 0:
        if left != {dst.name}:
            raise Wrong(f"success left {sorted(left)}")
    elif ended.code in (1, 2):
        if left:
            raise Wrong(f"a refusal left {sorted(left)}: {ended.err[-300:]}")
        if ended.err.count("error: ") != 1:
            raise Wrong(f"not one error: {ended.err[-800:]}")
    else:
        raise Wrong(f"exit {ended.code}: {ended.err[-800:]}")


def execute(step: Step, src: Path, dst: Path, folder: Path, r: Random, told: Told) -> Ended:
    """Run a step, killed and resumed now and then."""
    if step.command == "merge":
        shutil.copytree(src, twin := folder / "twin")
        words = ["merge", src.name, twin.name, "-o", dst.name, *step.words]
    else:
        words = [step.command, src.name, dst.name, *step.words]
    words += _run_words(r)
    others = {src.name, "twin"}
    if r.random() < 0.25:
        call = int(2 ** r.uniform(0, 7))
        ended = ckpttool(words, folder, call)
        told.log.append(f"ckpttool {' '.join(words)}   # killed at call {call}: {ended.code}")
        if ended.code != -9 and "a worker process ended: killed" not in ended.err:
            check_end(ended, folder, dst, others)
            return ended
        told.steps["killed"] += 1
        shutil.rmtree(folder / "tmp", ignore_errors=True)
        partial = folder / (dst.name + ".partial")
        if dst.exists():
            if partial.exists() and any(partial.iterdir()):
                raise Wrong("killed behind the end, and something is left beside DST")
            words.append("--force")
        elif r.random() < 0.7 or not partial.exists():
            if partial.exists():
                words.append("--resume")
            told.steps["resumed"] += 1
        else:
            words.append("--force")
    ended = ckpttool(words, folder)
    told.log.append(f"ckpttool {' '.join(words)}   # {ended.code}")
    check_end(ended, folder, dst, others)
    return ended


def _times(path: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in path.rglob("*") if p.is_file()}


def walk(seed: int, folder: Path) -> Told:
    """Walk one chain in an empty folder."""
    told = Told(seed)
    r = Random(f"chain {seed}")  # noqa: S311  # chance that can be repeated is what is wanted
    model = build(seed)
    state = first_state(model, r)
    src = folder / "s0"
    write_source(src, model, state, r)
    told.traits.update([model.kind, *model.traits])
    told.log.append(f"# {model.kind}, {', '.join(sorted(model.traits))}")
    told.log.append(f"# {json.dumps(model.config)}")
    steps = r.randint(1, 5)
    for i in range(steps + 1):
        if i == steps and state.format == "hf":
            break
        step = _draw(r, state, final=i == steps)
        if step is None:
            continue
        dst = folder / f"s{i + 1}"
        before = _times(src)
        try:
            ended = execute(step, src, dst, folder, r, told)
            shutil.rmtree(folder / "twin", ignore_errors=True)
            if _times(src) != before:
                raise Wrong("the source has changed")
            outcome = weigh(step, ended, told)
            if outcome:
                judge(dst, step.state, limit=step.limit)
        except Wrong as e:
            told.wrong = str(e)
            return told
        except (KeyError, ValueError, OSError) as e:  # what the judge did not find at all
            told.wrong = f"{type(e).__name__}: {e}"
            return told
        if outcome:
            told.pairs[model.family, step.state.format] += 1
            shutil.rmtree(src)
            src, state = dst, replace(step.state, stripped=False)
            meta = src / "model_meta.json"
            if meta.exists() and r.random() < 0.25:
                meta.unlink()
                told.log.append(f"rm {src.name}/{meta.name}")
                state = replace(state, stripped=True)
    return told


def weigh(step: Step, ended: Ended, told: Told) -> bool:
    """Whether there is an output to judge. Raises Wrong where a step should have ended otherwise."""
    if ended.code == 0:
        told.steps["worked"] += 1
        if step.expect == REFUSED:
            raise Wrong(f"should have been refused: {step.why}")
        if step.expect == UNCLEAR:
            raise Wrong(f"worked, though unclear: {step.why}")
        return True
    told.refusals[f"{step.expect}: {_kind(ended.err)}"] += 1
    told.steps["refused"] += 1
    told.log.append("    " + ended.err.strip().replace("\n", "\n    "))
    if step.expect == WORKS:
        raise Wrong(f"should have worked: {ended.err.strip()}")
    return False
