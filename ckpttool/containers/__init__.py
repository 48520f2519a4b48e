"""Bytes of one file, whoever wrote it: safetensors, pickles, JSON."""
