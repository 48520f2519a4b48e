"""The changes that Paddle makes to a PIR program of an earlier version while it reads it.

Versions and attributes are those of the patches inside paddle 3.3.1 (fluid/pir/serialize_deserialize/patch, version 4).
A program of version N gets the patches of N and of all later versions.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpttool.formats.paddle.pir import NEWEST
from ckpttool.formats.paddle.program_parts import Program

# "attribute type" is converted, "new attribute type = value" is added.
PATCHES: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "pd_op.lp_pool2d": ("strides i64[]", "paddings i64[]"),
        "pd_op.pool2d": ("strides i64[]", "paddings i64[]"),
        "pd_op.pool3d": ("kernel_size i64[]", "strides i64[]", "paddings i64[]"),
        "pd_op.expand_as": ("target_shape i64[]",),
    },
    3: {
        "pd_op.kthvalue": ("k i64",),
        "pd_op.repeat_interleave": ("new output_size i64 = -1",),
        "pd_op.repeat_interleave_with_tensor_index": ("new output_size i64 = -1",),
    },
    4: {
        "pd_op.leaky_relu": ("negative_slope f64",),
        "pd_op.softplus": ("beta f64", "threshold f64"),
        "onednn_op.fused_softplus": ("beta f64", "threshold f64", "fuse_alpha f64", "fuse_beta f64"),
        "pd_op.logit": ("eps f64",),
        "pd_op.pad3d": ("pad_value f64",),
        "pd_op.group_norm": ("epsilon f64",),
        "pd_op.add_group_norm_silu": ("epsilon f64",),
        "pd_op.group_norm_silu_xpu": ("epsilon f64",),
        "pd_op.top_p_sampling": ("seed i64",),
        "pd_op.bicubic_interp": ("scale f64[]",),
        "pd_op.nearest_interp": ("scale f64[]",),
        "pd_op.linear_interp": ("scale f64[]",),
        "pd_op.bilinear_interp": ("scale f64[]",),
        "pd_op.trilinear_interp": ("scale f64[]",),
        "pd_op.moe_permute": (
            "new using_ue8m0_scale bool = false",
            "new return_expert_indices bool = false",
            "new override_buffer_size i32 = -1",
        ),
        "pd_op.moe_unpermute": ("new using_ue8m0_scale bool = false", "new using_weighted_combine bool = false"),
    },
}


class Patched(NamedTuple):
    """Operators of a program that a patch touches."""

    operator: str
    times: int
    version: int
    """Version of the patch."""
    changes: tuple[str, ...]

    def __str__(self) -> str:
        many = f"{self.times} {self.operator}" if self.times > 1 else self.operator
        return f"{many}: {', '.join(self.changes)}"


def patched(program: Program) -> list[Patched]:
    """The changes that paddle 3.3.1 makes to this program; none in one of its own version."""
    if program.kind != "pir" or program.version is None or program.version >= NEWEST:
        return []
    return [
        Patched(op, program.operators[op], version, changes)
        for version, ops in PATCHES.items()
        if version >= program.version
        for op, changes in ops.items()
        if op in program.operators
    ]
