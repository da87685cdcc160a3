"""Decides the sizes of the pools before anything is loaded, and refuses what cannot fit.

budget = free memory x ``mem_fraction_static``; weights and states come first, the rest is KV. All sizes are bytes of
one tensor-parallel rank; free memory is the smallest of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs

_DUMMY_SLOTS = 1  # slot 0
SHORTEST_REQUEST = 2  # tokens: a prompt of one and an output of one; a pool that cannot hold it serves nothing


class MemoryPlanError(ServerArgsError):
    """The model or its caches cannot fit; the message gives the numbers and the flags to change."""


class MemoryPlan(NamedTuple):
    """Sizes of everything that is allocated once.

    Attributes:
        max_running_requests: request rows (row 0 comes on top).
        max_total_tokens: KV slots, a multiple of the page size.
        page_size: tokens per page.
        context_len: longest prompt plus output, tokens.
        row_width: columns of ``req_to_token``: the context plus the speculative reservation.
        weight_bytes, state_bytes, kv_bytes_per_token: where the memory goes.
        budget_bytes: what was available.
    """

    max_running_requests: int
    max_total_tokens: int
    page_size: int
    context_len: int
    row_width: int
    weight_bytes: int
    state_bytes: int
    kv_bytes_per_token: int
    budget_bytes: int


class DraftKVShape(NamedTuple):
    """The drafter's cache on one rank: it shares slot numbers with the target's.

    Attributes:
        layer_ids: names of its layers in the pool.
        row_dim: values per token and layer.
    """

    layer_ids: tuple[int, ...]
    row_dim: int


def draft_kv_shape(config: ModelConfig, args: ServerArgs) -> DraftKVShape:
    """Cache of the NEXTN layer (a latent row) or of every DSPARK layer; no layers without a drafter."""
    drafter = args.spec.drafter
    if drafter is not None:
        return DraftKVShape(tuple(range(drafter.num_hidden_layers)), drafter.local_kv_row_dim(args.tp_size))
    return DraftKVShape((config.nextn_layer_id,) if args.spec.enabled else (), config.kv_row_dim)


def kv_bytes_per_token(config: ModelConfig, args: ServerArgs) -> int:
    """Cache bytes of one token on one rank: the latent rows of all MLA layers, and the drafter's rows."""
    draft = draft_kv_shape(config, args)
    values = len(config.mla_layer_ids) * config.kv_row_dim + len(draft.layer_ids) * draft.row_dim
    return values * getattr(torch, args.dtype).itemsize


def state_bytes_per_slot(config: ModelConfig, args: ServerArgs, dtype: torch.dtype) -> int:
    """KDA state, conv window and rollback store of one request on one rank."""
    heads, dim = config.num_attention_heads // args.tp_size, config.head_dim
    layers, channels = len(config.kda_layer_ids), 3 * heads * dim
    conv = (config.short_conv_kernel_size - 1) * channels * dtype.itemsize
    temporal = heads * dim * dim * 4
    spec = args.spec
    if not spec.enabled:
        rollback = 0
    elif spec.rollback == "staged":
        rollback = spec.width * (conv + temporal)
    else:
        entry = (channels + 2 * heads * dim) * dtype.itemsize + 4 * heads * (dim + 1)
        rollback = spec.ring_length * entry
    return layers * (conv + temporal + rollback)


def make_plan(config: ModelConfig, args: ServerArgs, weight_bytes: int, free_bytes: int) -> MemoryPlan:
    """Sizes for one rank; raises :class:`MemoryPlanError` when weights, states or a single request do not fit."""
    dtype = getattr(torch, args.dtype)
    budget = int(free_bytes * args.mem_fraction_static)
    context_len = args.context_length or config.context_length
    if context_len > config.context_length:
        raise MemoryPlanError(f"--context-length {context_len}: the model covers {config.context_length} positions")
    window = 2 * args.spec.window
    row_width = -(-(context_len + window) // args.page_size) * args.page_size
    states = (args.max_running_requests + _DUMMY_SLOTS) * state_bytes_per_slot(config, args, dtype)
    per_token = kv_bytes_per_token(config, args)
    rest = budget - weight_bytes - states
    wanted = args.max_total_tokens or min(max(rest, 0) // per_token, args.max_running_requests * row_width)
    tokens = wanted // args.page_size * args.page_size
    least = -(-(args.page_size + window + SHORTEST_REQUEST) // args.page_size) * args.page_size
    if rest < least * per_token or tokens * per_token > rest:
        raise MemoryPlanError(
            f"does not fit: weights {weight_bytes / 1e9:.2f} GB + KDA states {states / 1e9:.2f} GB + "
            f"{max(tokens, least)} KV tokens of {per_token} B against {budget / 1e9:.2f} GB "
            f"(--mem-fraction-static {args.mem_fraction_static} of {free_bytes / 1e9:.2f} GB free); "
            "lower --max-running-requests, --max-total-tokens or --context-length, or raise --tp-size"
        )
    if tokens < least:
        raise MemoryPlanError(f"--max-total-tokens {wanted}: at least {least} are needed")
    return MemoryPlan(
        max_running_requests=args.max_running_requests,
        max_total_tokens=tokens,
        page_size=args.page_size,
        context_len=context_len,
        row_width=row_width,
        weight_bytes=weight_bytes,
        state_bytes=states,
        kv_bytes_per_token=per_token,
        budget_bytes=budget,
    )


def free_memory(device: str) -> int:
    """Free bytes of the current GPU, or of the host (``MemAvailable``)."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise MemoryPlanError("/proc/meminfo has no MemAvailable line")
