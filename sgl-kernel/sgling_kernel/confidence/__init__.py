"""From confidence logits of drafts to the number of rows each request's verify gets."""

from sgling_kernel.confidence.reference import allocate_rows, survival

__all__ = ["allocate_rows", "survival"]
