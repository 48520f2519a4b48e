"""Paddle's formats."""
