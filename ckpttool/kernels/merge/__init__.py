"""The merge methods, each a small program over chunks of float32: see ``base`` for what one is.

=============  ======================================================================================================
``linear``     element by element: linear, passthrough, nearswap, average, ema
``sphere``     by angles: slerp, nuslerp, multislerp, karcher, model_stock
``sparse``     sparse differences to a base: task_arithmetic, ties, dare, della, breadcrumbs
``pick``       picked differences to a base: sce, arcee_fusion, ram, ramplus_tl
``paddle``     PaddleFormers' own: paddle_linear, paddle_slerp, paddle_ties, paddle_dare, paddle_della
=============  ======================================================================================================

Names, parameters and defaults of the first four are those of mergekit 0.1.5, average and ema apart. A method whose
``base`` is "refused" merges every listed model; for all others the base stands apart from the list.
"""

from __future__ import annotations

from ckpttool.errors import UsageError
from ckpttool.kernels.merge import linear, paddle, pick, sparse, sphere
from ckpttool.kernels.merge.base import Method

METHODS: dict[str, Method] = {**linear.METHODS, **sphere.METHODS, **sparse.METHODS, **pick.METHODS, **paddle.METHODS}
"""Every method by name."""


def method(name: str) -> Method:
    """The method with a name. Raises UsageError when there is none, with the nearest name."""
    import difflib

    found = METHODS.get(name)
    if found is None:
        nearest = difflib.get_close_matches(name, METHODS, n=1, cutoff=0)[0]
        raise UsageError(
            f"unknown merge method `{name}`",
            hint=f"did you mean `{nearest}`? Methods: {', '.join(sorted(METHODS))}",
        )
    return found
