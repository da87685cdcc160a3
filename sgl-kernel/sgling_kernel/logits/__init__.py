"""Arg-max over scores with the project's tie rule."""

from sgling_kernel.logits.reference import argmax_lowest

__all__ = ["argmax_lowest"]
