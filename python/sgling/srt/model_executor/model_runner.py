"""Owns what a rank keeps on its device: the model, the pools, the FutureMap and the sampling tables."""

from __future__ import annotations

import torch

from sgling.srt.config.load_config import LoadConfig
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.core.future_map import FutureMap
from sgling.srt.core.step import StepOutput
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.distributed.vocab_reduce import VocabShardReduce
from sgling.srt.mem_cache.kv_pool import MLATokenToKVPool
from sgling.srt.mem_cache.linear_state_pool import LinearStatePool, LinearStateShape, replay_ring, staged_buffers
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling.srt.mem_cache.req_to_token import ReqToTokenPool
from sgling.srt.model_executor.memory_plan import free_memory, make_plan
from sgling.srt.model_executor.result_copy import ResultHandle
from sgling.srt.model_loader.footprint import rank_weight_bytes
from sgling.srt.model_loader.loader import get_model
from sgling.srt.sampling.sampling_buffers import SamplingBuffers
from sgling.srt.sampling.sampling_params import SamplingParams
from sgling_kernel.linear import set_fixed_rows
from sgling_kernel.sampling import ShardReduce, SingleShard

DETERMINISTIC_ROWS = 8  # linears run in blocks of this many rows under --enable-deterministic-inference on a CPU


class ModelRunner:
    """Device-side state of one rank.

    Attributes:
        model, draft_model: target and NEXTN layer (None without speculation).
        pools: KV, KDA states and rollback store.
        req_to_token: page table with its row allocator.
        future: cross-step values.
        sampling: per-request sampling tables.
        reduce: reductions over vocabulary shards.
        max_width: widest verify, W.
    """

    def __init__(self, args: ServerArgs, config: ModelConfig, parallel: ParallelState):
        self.model_config = config
        self.parallel = parallel
        self.device = args.device
        self.dtype = getattr(torch, args.dtype)
        self.max_width = args.spec.width
        if args.device == "cpu":
            set_fixed_rows(DETERMINISTIC_ROWS if args.enable_deterministic_inference else None)
        weight_bytes = rank_weight_bytes(config, parallel.size, self.dtype, with_nextn=args.spec.enabled)
        self.plan = make_plan(config, args, weight_bytes, free_memory(args.device))
        loaded = get_model(config, _load_config(args), parallel, self.dtype, args.device, args.spec.enabled)
        self.model, self.draft_model, self.load_report = loaded.target, loaded.nextn, loaded.report
        self._allocate(args)
        self._copy_stream = torch.cuda.Stream() if args.device == "cuda" else None

    def _allocate(self, args: ServerArgs) -> None:
        config, plan, device, dtype = self.model_config, self.plan, self.device, self.dtype
        self.req_to_token = ReqToTokenPool(plan.max_running_requests, plan.row_width, device)
        shape = LinearStateShape(
            config.kda_layer_ids,
            config.num_attention_heads // self.parallel.size,
            config.head_dim,
            config.short_conv_kernel_size - 1,
        )
        state = LinearStatePool(shape, plan.max_running_requests, dtype, device)
        row, slots = config.kv_row_dim, plan.max_total_tokens
        draft_layers = (config.nextn_layer_id,)
        self.pools = MemoryPools(
            req_to_token=self.req_to_token.table,
            kv=MLATokenToKVPool(config.mla_layer_ids, slots, row, dtype, device),
            draft_kv=MLATokenToKVPool(draft_layers, slots, row, dtype, device) if args.spec.enabled else None,
            state=state,
            rollback=_rollback_store(args, state),
        )
        rows = plan.max_running_requests + 1
        self.future = FutureMap(rows, config.hidden_size, dtype, device)
        vocab_start, vocab_size = self.model.vocab_range
        self.sampling = SamplingBuffers(rows, vocab_size, device, vocab_start)
        self.reduce: ShardReduce = SingleShard() if self.parallel.size == 1 else VocabShardReduce(self.parallel)

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether any attention backend needs exact lengths on the host (one blocking read per step)."""
        models = [model for model in (self.model, self.draft_model) if model is not None]
        return any(model.attn_backend.needs_cpu_seq_lens for model in models)

    def set_sampling_row(self, row: int, params: SamplingParams, prompt_ids: list[int]) -> None:
        """Write a request's sampling parameters; below ``min_new_tokens`` no stop token can be drawn."""
        limit = len(prompt_ids) + params.min_new_tokens if params.min_new_tokens else 0
        eos_ids = self.model_config.eos_token_ids
        self.sampling.set_row(row, params, prompt_ids, params.sampling_seed, eos_ids, limit)

    def to_device(self, values: list[int]) -> torch.Tensor:
        """int64 tensor on the device; asynchronous (pinned) on a GPU."""
        host = torch.tensor(values, dtype=torch.int64)
        return host if self.device == "cpu" else host.pin_memory().to(self.device, non_blocking=True)

    def copy_result(self, output: StepOutput) -> ResultHandle:
        """Start copying a step's result to the host."""
        return ResultHandle(output, self._copy_stream)


def _load_config(args: ServerArgs) -> LoadConfig:
    return LoadConfig(str(resolve_model_path(args.model_path, args.revision, args.download_dir)), args.load_format)


def _rollback_store(args: ServerArgs, state: LinearStatePool):
    """Where verify leaves what commit needs; None without speculation (plain decode updates in place)."""
    if not args.spec.enabled:
        return None
    if args.spec.rollback == "staged":
        return staged_buffers(state, args.spec.width)
    return replay_ring(state, args.spec.ring_length)
