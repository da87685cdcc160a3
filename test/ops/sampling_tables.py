"""Builds SamplingTables for operator tests."""

import torch

from sgling_kernel.sampling import SamplingTables


def make_tables(rows, vocab_size, vocab_start=0, **columns):
    """Neutral tables of ``rows`` request rows; ``columns`` override whole tables."""

    def full(value, dtype):
        return torch.full((rows,), value, dtype=dtype)

    values = {
        "temperature": full(0.0, torch.float32),
        "top_k": full(-1, torch.int64),
        "top_p": full(1.0, torch.float32),
        "min_p": full(0.0, torch.float32),
        "seed": full(0, torch.int64),
        "frequency_penalty": full(0.0, torch.float32),
        "presence_penalty": full(0.0, torch.float32),
        "repetition_penalty": full(1.0, torch.float32),
        "min_len_limit": full(0, torch.int64),
        "vocab_start": vocab_start,
        "counts": torch.zeros(rows, vocab_size, dtype=torch.int32),
        "prompt_seen": torch.zeros(rows, vocab_size, dtype=torch.bool),
        "bias": torch.zeros(rows, vocab_size),
        "stop_mask": torch.zeros(rows, vocab_size, dtype=torch.bool),
    }
    return SamplingTables(**{**values, **columns})


def shard_tables(tables, start, size):
    """The vocabulary shard [start, start + size) of full tables."""
    wide = {name: getattr(tables, name)[:, start : start + size] for name in ("counts", "prompt_seen", "bias")}
    return tables._replace(vocab_start=start, stop_mask=tables.stop_mask[:, start : start + size], **wide)
