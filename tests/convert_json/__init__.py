"""Tests of ``ckpttool convert-json``."""
