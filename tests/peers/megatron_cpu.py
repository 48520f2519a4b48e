"""megatron-core on CPU: a copy of the installed package in which what asks for a GPU asks for none.

No line that lays out, cuts, names or writes data is another than NVIDIA's. Transformer Engine needs CUDA: its modules
are those of tests/peers/transformer_engine_cpu.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from tests.peers import transformer_engine_cpu

SUBSTITUTIONS = {
    r"torch\.cuda\.(\w*Tensor\b)": r"torch.\1",
    r"torch\.cuda\.(current_device|current_stream|set_device|stream|synchronize|Stream)\b": r"torch.cpu.\1",
    r"torch\.cuda\.default_stream\b": "torch.cpu.current_stream",
    r"(?<=torch\.device\()(['\"])cuda\1": r"\1cpu\1",
    r"(device(?:_type)?=)(['\"])cuda\2": r"\1\2cpu\2",
    r"\.cuda\(torch\.\w+\.current_device\(\)\)": ".cpu()",
    r"\.cuda\(": '.to("cpu", ',
    r"\.is_cuda\b": ".is_cpu",
    # Saves are not asynchronous here: no process of its own has to hand over what was written.
    r"\bctx\.Manager\(\)\.Queue\(\)": "queue.Queue()",
    # Tensor parallelism of experts is for speed refused without sequence parallelism, which torch's norms refuse.
    r"if self\.training and self\.attn_tp_group\.size\(\) > 1 and not self\.config\.sequence_parallel:": "if False:",
}
ADDED = {
    # There is one generator of random numbers here, and nothing drops out.
    "tensor_parallel/random.py": """
CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
""",
    # It compiles small functions for as long as the tests take.
    "jit.py": """
disable_jit_fuser()
""",
    # Values of another width than the keys, as latent attention has them, are Transformer Engine's alone.
    "transformer/dot_product_attention.py": """
_plain = DotProductAttention.__init__


def _with_channels(self, config, *args, k_channels=None, v_channels=None, **options):
    _plain(self, config, *args, **options)
    if v_channels:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


DotProductAttention.__init__ = _with_channels
""",
}
MODULES = [
    "parallel_state",
    "dist_checkpointing",
    "distributed",
    "distributed.finalize_model_grads",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "optimizer_param_scheduler",
    "pipeline_parallel",
    "tensor_parallel",
    "transformer",
]
"""What the ranks use: imported before they are forked."""


def install(folder: Path) -> None:
    """Make ``megatron.core`` the copy in ``folder``, and import it. Processes that share the folder share the copy."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    if not (folder / "megatron").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        patch(Path(found.origin).parent, scratch / "megatron" / "core")
        try:
            scratch.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    sys.path.insert(0, str(folder))
    for name in ("megatron", "megatron.core"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    with warnings.catch_warnings(), transformer_engine_cpu.importable():
        warnings.simplefilter("ignore")  # of what is missing here: Apex
        for name in MODULES:
            module = importlib.import_module(f"megatron.core.{name}")
            assert str(module.__file__).startswith(str(folder))


def patch(source: Path, target: Path) -> None:
    """Copy a package. Raises ValueError where nothing is left to replace: it is another version then."""
    used = dict.fromkeys(SUBSTITUTIONS, 0)
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(source)
        for pattern, by in SUBSTITUTIONS.items():
            text, times = re.subn(pattern, by, text)
            used[pattern] += times
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + ADDED.get(str(name), ""), encoding="utf-8")
    missing = [k for k, times in used.items() if not times]
    missing += [k for k in ADDED if not (target / k).exists()]
    if missing:
        raise ValueError(f"megatron-core has nothing of: {missing}")
