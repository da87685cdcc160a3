"""FlashInfer attention, opt-in (``--attention-backend flashinfer``, extra ``flashinfer``): plans fed from the host.

A FlashInfer wrapper plans before it runs, and a plan over device tensors copies them to the host, which waits for the
device. Lengths are arithmetic consequences of what the host already knows, so every plan here gets host tensors; only
the page indices are made on the device. The price stays: exact lengths on the host mean that a step is launched after
the result of the one before (``needs_cpu_seq_lens``), and plans cannot be captured in graphs.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.core.forward_batch import ForwardBatch
from sgling.srt.layers.attention.base import MLAMetadata
from sgling.srt.layers.attention.block import BlockAttnBackend
from sgling.srt.layers.attention.mla import MLAAttnBackend
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling_kernel.cache_locs import context_locs
from sgling_kernel.mla import PagedContext, expand_v, head_gate

_WORKSPACE_BYTES = 128 << 20


class FlashInferMissingError(RuntimeError):
    """The optional package is not installed."""


class HostPlan(NamedTuple):
    """What a wrapper plans with.

    Attributes:
        qo_indptr, kv_indptr: int32 [bs + 1] on the host, first query row and first page index of each request.
        kv_lens: int32 [bs] on the host, attended length of each request.
        kv_indices: int32 [sum of kv_lens] on the device, cache slots (pages of one token).
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    kv_indices: torch.Tensor


def host_plan(batch: ForwardBatch, req_to_token: torch.Tensor) -> HostPlan:
    """Plan inputs of a batch of ``width`` rows per request; raises ValueError without exact lengths on the host."""
    if batch.seq_lens_cpu is None:
        raise ValueError("the flashinfer backend needs exact lengths on the host (ForwardBatch.seq_lens_cpu)")
    lens = [length + batch.width for length in batch.seq_lens_cpu]
    ends = [0, *accumulate(lens)]
    device = req_to_token.device
    kv_indptr = _host(ends, device)
    indices = context_locs(req_to_token, batch.req_pool_indices, kv_indptr.to(device, non_blocking=True), ends[-1])
    rows = [batch.width * i for i in range(len(lens) + 1)]
    return HostPlan(_host(rows, device), kv_indptr, _host(lens, device), indices)


def _host(values: list[int], device: torch.device) -> torch.Tensor:
    """int32 on the host, pinned when it is going to a GPU."""
    tensor = torch.tensor(values, dtype=torch.int32)
    return tensor.pin_memory() if device.type == "cuda" else tensor


class FlashInferMLABackend(MLAAttnBackend):
    """Latent decode and verify attention through the paged MLA wrapper; prefill as in :class:`MLAAttnBackend`."""

    needs_cpu_seq_lens = True

    def __init__(self, scale: float, sizes: tuple[int, int, int], dtype: torch.dtype, device: str):
        """``sizes``: local heads, latent, rope."""
        super().__init__(scale)
        self._sizes, self._dtype = sizes, dtype
        self._wrapper = _import_wrappers()[0](_workspace(device))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch, pools: MemoryPools) -> MLAMetadata:
        """Also plans, once for all layers of the forward."""
        if not batch.mode.is_prefill:
            plan, (heads, latent, rope) = host_plan(batch, pools.req_to_token), self._sizes
            self._wrapper.plan(
                qo_indptr=plan.qo_indptr,
                kv_indptr=plan.kv_indptr,
                kv_indices=plan.kv_indices,
                kv_len_arr=plan.kv_lens,
                num_heads=heads,
                head_dim_ckv=latent,
                head_dim_kpe=rope,
                page_size=1,
                causal=True,
                sm_scale=self.scale,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        return super().init_forward_metadata_in_graph(batch, pools)

    def decode_gated(
        self,
        queries: tuple[torch.Tensor, torch.Tensor],
        kv_pool: torch.Tensor,
        output: tuple[torch.Tensor, torch.Tensor],
        context: PagedContext,
    ) -> torch.Tensor:
        """See :class:`MLAAttnBackend`."""
        (q_nope, q_pe), (w_vc, gate), pages = queries, output, kv_pool.unsqueeze(1)
        keys = {"ckv_cache": pages[..., : self._sizes[1]], "kpe_cache": pages[..., self._sizes[1] :]}
        return head_gate(expand_v(self._wrapper.run(q_nope=q_nope, q_pe=q_pe, **keys), w_vc), gate)


class FlashInferBlockBackend(BlockAttnBackend):
    """Dense draft blocks through the paged prefill wrapper, one plan per kind of layer (window, causality)."""

    needs_cpu_seq_lens = True

    def __init__(self, config: DSparkConfig, tp_size: int, dtype: torch.dtype, device: str):
        wrapper, workspace = _import_wrappers()[1], _workspace(device)
        self._shape, self._tp_size, self._dtype = config.attention, tp_size, dtype
        self._wrappers = {tuple(layer): wrapper(workspace, "NHD") for layer in dict.fromkeys(config.layers)}

    def init_forward_metadata_in_graph(self, batch: ForwardBatch, pools: MemoryPools) -> PagedContext:
        """Also plans, once per kind of layer."""
        plan, shape = host_plan(batch, pools.req_to_token), self._shape
        for (causal, window), wrapper in self._wrappers.items():
            wrapper.plan(
                qo_indptr=plan.qo_indptr,
                paged_kv_indptr=plan.kv_indptr,
                paged_kv_indices=plan.kv_indices,
                paged_kv_last_page_len=torch.ones_like(plan.kv_lens),
                num_qo_heads=shape.heads // self._tp_size,
                num_kv_heads=shape.kv_heads // self._tp_size,
                head_dim_qk=shape.head_dim,
                page_size=1,
                causal=causal,
                sm_scale=shape.head_dim**-0.5,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        return super().init_forward_metadata_in_graph(batch, pools)

    def forward(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        context: PagedContext,
        visibility: tuple[bool, int | None],
        scale: float,
    ) -> torch.Tensor:
        """See :class:`BlockAttnBackend`."""
        return self._wrappers[visibility].run(q, (keys.unsqueeze(1), values.unsqueeze(1)))


def _workspace(device: str) -> torch.Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _import_wrappers() -> tuple[type, type]:
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError as error:
        raise FlashInferMissingError(
            f"--attention-backend flashinfer: install the extra, pip install 'sgling[flashinfer]' ({error})"
        ) from error
    return BatchMLAPagedAttentionWrapper, BatchPrefillWithPagedKVCacheWrapper
