"""``ckpttool merge``: one checkpoint out of several, or out of the shards of one.

recipe -> models opened -> tensors resolved -> computations -> the target that reshard would plan -> execute

models.py      the sources: one table of files, one dialect
adapters.py    low-rank adapters on top of them
words.py       embeddings of models whose tokenizers differ
tensors.py     what is computed from what, and what to do where the models disagree
form.py        back to the names, fusions and orientation of Paddle's models
config.py      config.json of the output
provenance.py  the record of where it comes from
origins.py     the same as groups of tensors, for people
distances.py   how far the output is from its parents
card.py        the model card
prepare.py     all of it in order; the result is executed like any plan
"""

from ckpttool.ops.merge.prepare import (
    MergeOptions,
    MergeResult,
    PreparedMerge,
    check_measurable,
    execute,
    prepare,
    prepare_one,
)

__all__ = ["MergeOptions", "MergeResult", "PreparedMerge", "check_measurable", "execute", "prepare", "prepare_one"]
