"""Formats of inference engines: one file for each rank."""

from ckpttool.formats.engines.deepseek import DeepSeek
from ckpttool.formats.engines.trtllm import TensorRTLLM
from ckpttool.formats.engines.vllm import VLLM

__all__ = ["VLLM", "DeepSeek", "TensorRTLLM"]
