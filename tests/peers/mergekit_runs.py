"""Runs mergekit once for a list of recipes: ``python mergekit_runs.py RUNS.json``. Importing it takes seconds.

RUNS.json is a list of {"recipe": PATH, "out": DIR, "tokenizer": BOOL}; the current directory is where the recipes'
paths count from. A recipe that fails ends the run. The names of mergekit's methods are left in methods.json.

Sorts of whole tensors are made stable. mergekit's own are not, so that which of two equal magnitudes it keeps depends
on the machine, and nothing else could be held against it bit by bit. Those of rows stay as they are: ckpttool sorts
rows with torch, too, when it is asked for mergekit's draws.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

SEED = 42


def stable(function: Any) -> Any:
    """The same sort, stable where no axis is named."""

    @functools.wraps(function)
    def sort(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options, **({} if "dim" in options else {"stable": True}))

    return sort


def main() -> None:
    """Run the list."""
    import torch
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.merge_methods.registry import registered_methods
    from mergekit.options import MergeOptions

    torch.set_num_threads(1)
    torch.sort = stable(torch.sort)
    torch.argsort = stable(torch.argsort)
    Path("methods.json").write_text(json.dumps([m.spec.name for m in registered_methods()]), encoding="utf-8")
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        text = Path(job["recipe"]).read_text(encoding="utf-8")
        options = MergeOptions(
            random_seed=SEED,
            copy_tokenizer=job["tokenizer"],
            lora_merge_cache=str(Path(job["out"]).parent / "adapted"),
            quiet=True,
            write_model_card=False,
        )
        run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), job["out"], options, text)


if __name__ == "__main__":
    main()
