"""Paddle's formats, and what others may use of them: its programs, and what its configs and names say."""

from ckpttool.formats.paddle.config import (
    TARGETS,
    TRANSPOSED,
    base_prefix,
    fp8_dtype,
    is_linear,
    module_of,
    software,
    target_config,
)
from ckpttool.formats.paddle.flex import Flex
from ckpttool.formats.paddle.hybrid import Hybrid, ZeroCost
from ckpttool.formats.paddle.names import match_names, read_names
from ckpttool.formats.paddle.pdiparams import head_fits
from ckpttool.formats.paddle.pdparams import PdparamsFile
from ckpttool.formats.paddle.pir import VOID_WRITTEN, looks_like_pir, read_pir
from ckpttool.formats.paddle.program import (
    INFO,
    LEGACY,
    PARAMS,
    Native,
    PaddleProgram,
    check_artifact,
    layout_program,
    native_of,
    open_alone,
    open_program,
    parameter_file,
    params_name,
    program_of,
    refuse_others,
    stored_tensor,
)
from ckpttool.formats.paddle.program_parts import Program
from ckpttool.formats.paddle.unified import Unified

__all__ = [
    "INFO",
    "LEGACY",
    "PARAMS",
    "TARGETS",
    "TRANSPOSED",
    "VOID_WRITTEN",
    "Flex",
    "Hybrid",
    "Native",
    "PaddleProgram",
    "PdparamsFile",
    "Program",
    "Unified",
    "ZeroCost",
    "base_prefix",
    "check_artifact",
    "fp8_dtype",
    "head_fits",
    "is_linear",
    "layout_program",
    "looks_like_pir",
    "match_names",
    "module_of",
    "native_of",
    "open_alone",
    "open_program",
    "parameter_file",
    "params_name",
    "program_of",
    "read_names",
    "read_pir",
    "refuse_others",
    "software",
    "stored_tensor",
    "target_config",
]  # fmt: skip
