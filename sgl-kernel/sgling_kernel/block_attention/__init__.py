"""Attention of a draft block: its rows see the cached context and each other."""

from sgling_kernel.block_attention.reference import block_attention

__all__ = ["block_attention"]
