"""Flags: memory, scheduling, and the names of kernels and graphs."""

from __future__ import annotations

from dataclasses import dataclass

from sgling.srt.config.flags import flag, hint, not_built

_ONE_KERNEL = "every operator picks its kernel by device and shape"
_NO_GRAPHS = "decode steps are captured whole, prefill never is"


@dataclass(frozen=True, kw_only=True)
class MemoryArgs:
    """Sizes of pools."""

    mem_fraction_static: float | None = flag(None, "share of device memory for weights and caches; default 0.85")
    max_total_tokens: int | None = flag(None, "tokens in the KV pool; default: from the free memory")
    max_running_requests: int | None = flag(
        None, "requests decoded together; default: as many as 160 rows of a step allow, at most 48; on the CPU 16"
    )
    page_size: int | None = flag(None, "tokens per KV page, 1 to 64; default 1")
    disable_radix_cache: bool = flag(False, "no prefix cache (there is none yet)")
    mamba_radix_cache_strategy: str = hint(
        "auto", "there is no prefix cache yet", choices=("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
    )
    mamba_full_memory_ratio: float = hint(0.9, "one recurrent state per running request, the rest is KV")
    max_mamba_cache_size: int | None = hint(None, "one recurrent state per running request")


@dataclass(frozen=True, kw_only=True)
class ScheduleArgs:
    """Order and size of the steps."""

    chunked_prefill_size: int | None = flag(
        None, "tokens per prefill chunk, -1 = whole prompts; default 8192, on the CPU 2048"
    )
    max_prefill_tokens: int = hint(16384, "prefill takes one request at a time")
    schedule_policy: str = not_built("fcfs", "a schedule policy other than first come, first served")
    disable_overlap_schedule: bool = flag(False, "finish each step before preparing the next")
    num_continuous_decode_steps: int = hint(1, "the overlap loop already hides the host")
    enable_mixed_chunk: bool = hint(False, "prefill and decode never share a step")
    sleep_on_idle: bool = hint(False, "an idle scheduler always sleeps")


@dataclass(frozen=True, kw_only=True)
class KernelArgs:
    """Back-end names users copy, all mapped to this build's kernels."""

    attention_backend: str | None = hint(
        None, f"{_ONE_KERNEL}, except flashinfer (opt-in, extra flashinfer): it pins the host", neutral=("flashinfer",)
    )
    decode_attention_backend: str | None = hint(None, _ONE_KERNEL)
    prefill_attention_backend: str | None = hint(None, _ONE_KERNEL)
    linear_attn_backend: str = hint("triton", _ONE_KERNEL)
    linear_attn_decode_backend: str | None = hint(None, _ONE_KERNEL)
    linear_attn_prefill_backend: str | None = hint(None, _ONE_KERNEL)
    linear_attn_verify_backend: str | None = hint(None, _ONE_KERNEL)
    sampling_backend: str | None = hint(None, _ONE_KERNEL, choices=("flashinfer", "pytorch"))
    moe_runner_backend: str = hint("auto", _ONE_KERNEL)
    disable_shared_experts_fusion: bool = hint(False, "shared experts are never fused into the routed ones")
    flashinfer_allreduce_fusion_backend: str | None = hint(
        None, "no fused all-reduce yet", choices=("auto", "trtllm", "mnnvl", "cutedsl")
    )
    enable_flashinfer_allreduce_fusion: bool = hint(False, "no fused all-reduce yet (deprecated flag)")
    disable_custom_all_reduce: bool = hint(False, "no custom all-reduce yet")
    enable_torch_compile: bool = hint(False, "the kernels are written by hand")


@dataclass(frozen=True, kw_only=True)
class GraphArgs:
    """CUDA graph flags."""

    disable_cuda_graph: bool = flag(False, "run decode steps without CUDA graphs")
    disable_decode_cuda_graph: bool = flag(False, "run decode steps without CUDA graphs")
    disable_prefill_cuda_graph: bool = hint(False, _NO_GRAPHS)
    disable_cuda_graph_padding: bool = hint(False, _NO_GRAPHS)
    cuda_graph_max_bs_decode: int | None = flag(None, "largest captured batch; default --max-running-requests")
    cuda_graph_max_bs_prefill: int | None = hint(None, _NO_GRAPHS)
    cuda_graph_bs_decode: list[int] | None = flag(None, "captured batch sizes; default 1, 2, 4, 8, 16, ...")
    cuda_graph_bs_prefill: list[int] | None = hint(None, _NO_GRAPHS)
    cuda_graph_all_widths: bool = flag(
        False,
        "capture every verify width, not only the widest: where requests narrow their steps; auto depth always does",
    )
    cuda_graph_relay: str = flag(
        "merged", "a decode step is one graph, or three (draft, verify, extend)", choices=("merged", "three")
    )
    cuda_graph_metadata: str | None = flag(
        None,
        "where slots and positions of a step are worked out: in its graph (default), in a glue graph, eagerly",
        choices=("in_graph", "glue", "eager"),
    )
    cuda_graph_backend_decode: str | None = hint(None, _NO_GRAPHS, choices=("full", "breakable", "disabled"))
    cuda_graph_backend_prefill: str | None = hint(None, _NO_GRAPHS, choices=("full", "breakable", "disabled"))
    cuda_graph_config: dict | None = hint(None, _NO_GRAPHS)


@dataclass(frozen=True, kw_only=True)
class ParallelArgs:
    """Parallel and distributed modes."""

    pp_size: int = not_built(1, "pipeline parallelism", "--pipeline-parallel-size", "--pp")
    dp_size: int = not_built(1, "data parallelism", "--data-parallel-size", "--dp")
    ep_size: int = not_built(1, "expert parallelism", "--expert-parallel-size", "--ep")
    enable_dp_attention: bool = not_built(False, "data-parallel attention")
    moe_a2a_backend: str | None = not_built(None, "expert parallelism", neutral=("none",))
    nnodes: int = not_built(1, "multi-node serving")
    node_rank: int = not_built(0, "multi-node serving")
    dist_init_addr: str | None = not_built(None, "multi-node serving")
    disaggregation_mode: str = not_built("null", "prefill/decode disaggregation")
    enable_lora: bool = not_built(False, "LoRA adapters")
    lora_paths: list[str] | None = not_built(None, "LoRA adapters")
    max_loras_per_batch: int | None = not_built(None, "LoRA adapters")
    enable_hierarchical_cache: bool = not_built(False, "a prefix cache in host memory")
