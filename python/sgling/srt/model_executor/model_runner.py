"""Owns what a rank keeps on its device: the model, the pools, the FutureMap and the sampling tables."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from sgling.srt.config.draft_model import draft_source, drafter_dir
from sgling.srt.config.environ import kernel_switches, read_environ
from sgling.srt.config.load_config import LoadConfig
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.config.token_map import read_token_map
from sgling.srt.core.future_map import FutureMap
from sgling.srt.core.step import StepOutput
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.distributed.vocab_reduce import VocabShardReduce
from sgling.srt.mem_cache.kv_pool import MLATokenToKVPool
from sgling.srt.mem_cache.linear_state_pool import LinearStatePool, LinearStateShape, replay_ring, staged_buffers
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling.srt.mem_cache.req_to_token import ReqToTokenPool
from sgling.srt.model_executor.attention_choice import use_flashinfer
from sgling.srt.model_executor.cpu_threads import CpuThreads
from sgling.srt.model_executor.device_clock import DeviceClock
from sgling.srt.model_executor.memory_plan import DraftKVShape, draft_kv_shape, free_memory, make_plan
from sgling.srt.model_executor.result_copy import ResultHandle
from sgling.srt.model_loader.draft_inventory import draft_copy_bytes, draft_weight_bytes
from sgling.srt.model_loader.draft_loader import get_drafter
from sgling.srt.model_loader.errors import ModelLoadError
from sgling.srt.model_loader.footprint import draft_head_bytes, packed_copy_bytes, rank_weight_bytes
from sgling.srt.model_loader.loader import get_model
from sgling.srt.sampling.sampling_buffers import SamplingBuffers
from sgling.srt.sampling.sampling_params import SamplingParams
from sgling_kernel import cuda, dispatch
from sgling_kernel.linear import set_fixed_rows
from sgling_kernel.sampling import ShardReduce, SingleShard

logger = logging.getLogger(__name__)

DETERMINISTIC_ROWS = 8  # linears run in blocks of this many rows under --enable-deterministic-inference on a CPU


class ModelRunner:
    """Device-side state of one rank.

    Attributes:
        model, draft_model: target, and NEXTN layer or DSPARK drafter (None without speculation).
        pools: KV, KDA states and rollback store.
        req_to_token: page table with its row allocator.
        future: cross-step values.
        sampling: per-request sampling tables.
        reduce: reductions over vocabulary shards.
        spec: resolved speculation.
        token_map: ids the NEXTN layer may draft, ascending; empty = all.
        max_width: widest verify, W.
        window: positions a round may touch behind the committed length, >= W.
        metadata_mode: where the metadata of a step are worked out, see metadata_registry.py.
        simulated_accept: forced mean accept length of a benchmark, None = the true verdicts.
        threads: torch threads of a step on a CPU.
        forward_stream: where all device work of the scheduler runs, table writes included (None on the CPU).
        device_clock: busy and idle time of the GPU (None on the CPU).
    """

    def __init__(self, args: ServerArgs, config: ModelConfig, parallel: ParallelState):
        self.model_config = config
        self.parallel = parallel
        self.device = args.device
        self.dtype = getattr(torch, args.dtype)
        self.spec = args.spec
        self.max_width, self.window = args.spec.width, args.spec.window
        self.metadata_mode = args.cuda_graph_metadata
        simulated = read_environ().simulate_acc_len
        self.simulated_accept = simulated if simulated > 0 else None
        if self.simulated_accept is not None:
            logger.warning("SGLANG_SIMULATE_ACC_LEN=%g: accept lengths are forced, outputs are meaningless", simulated)
        if args.device == "cpu":
            set_fixed_rows(DETERMINISTIC_ROWS if args.enable_deterministic_inference else None)
        _prepare_kernels(args)
        free = parallel.smallest(free_memory(args.device))  # one plan for all ranks: it decides who is retracted
        self.token_map = _token_map(args, config)
        self.plan = make_plan(config, args, _weight_bytes(config, args, len(self.token_map)), free)
        self.threads = CpuThreads(args)
        self._load(args)
        self._allocate(args)
        self._start_streams()

    def _start_streams(self) -> None:
        """Forward and copy stream of a GPU; all writes are on one stream, so rows and slots can be reused."""
        self.forward_stream = self._copy_stream = self.device_clock = None
        if self.device != "cuda":
            return
        self.forward_stream, self._copy_stream = torch.cuda.Stream(), torch.cuda.Stream()
        if self.forward_stream == self._copy_stream:
            raise RuntimeError("the stream pool handed out one stream twice")
        self.device_clock = DeviceClock()
        torch.cuda.synchronize()

    def _load(self, args: ServerArgs) -> None:
        drafter = args.spec.drafter
        taps = drafter.target_layer_ids if drafter else ()
        with_nextn = args.spec.algorithm == "NEXTN"
        placement = (self.parallel, self.dtype, self.device)
        loaded = get_model(self.model_config, _load_config(args), *placement, with_nextn, taps)
        self.model, self.draft_model, self.load_report = loaded.target, loaded.nextn, loaded.report
        if self.token_map:
            self.draft_model.use_token_map(self.token_map)
        if drafter is not None:
            load_format = args.speculative_draft_load_format or args.load_format
            source = LoadConfig(str(drafter_dir(args)), load_format)
            try:
                self.draft_model, report = get_drafter(drafter, source, self.model)
            except ModelLoadError as error:
                raise ModelLoadError(f"{draft_source(args)}: {error}") from error
            self.load_report = self.load_report.joined(report)
        if args.attention_backend == "flashinfer":
            use_flashinfer(self.model, self.draft_model, self.dtype)

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
        self.pools = MemoryPools(
            req_to_token=self.req_to_token.table,
            kv=MLATokenToKVPool(config.mla_layer_ids, slots, row, dtype, device),
            draft_kv=self._draft_pool(draft_kv_shape(config, args)),
            state=state,
            rollback=_rollback_store(args, state),
        )
        rows = plan.max_running_requests + 1
        self.future = FutureMap(rows, config.hidden_size, dtype, device)
        vocab_start, vocab_size = self.model.vocab_range
        self.sampling = SamplingBuffers(rows, vocab_size, device, vocab_start)
        self.reduce: ShardReduce = SingleShard() if self.parallel.size == 1 else VocabShardReduce(self.parallel)

    def _draft_pool(self, shape: DraftKVShape) -> MLATokenToKVPool | None:
        if not shape.layer_ids:
            return None
        return MLATokenToKVPool(shape.layer_ids, self.plan.max_total_tokens, shape.row_dim, self.dtype, self.device)

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether any attention backend needs exact lengths on the host (one blocking read per step)."""
        return bool(self.pinning_backends)

    @property
    def pinning_backends(self) -> tuple[str, ...]:
        """Names of the attention backends that need exact lengths on the host."""
        backends = [model.attn_backend for model in (self.model, self.draft_model) if model is not None]
        parts = [part for backend in backends for part in getattr(backend, "parts", (backend,))]
        return tuple(type(part).__name__ for part in parts if part.needs_cpu_seq_lens)

    def set_sampling_row(self, row: int, params: SamplingParams, prompt_ids: list[int]) -> None:
        """Write a request's sampling parameters; below ``min_new_tokens`` no stop token can be drawn.

        Clients may ask for any minimum up to int64: no position lies beyond the row's width, so it is capped there.
        """
        limit = min(len(prompt_ids) + params.min_new_tokens, self.plan.row_width) if params.min_new_tokens else 0
        eos_ids = self.model_config.eos_token_ids
        self.sampling.set_row(row, params, prompt_ids, params.sampling_seed, eos_ids, limit)

    def to_device(self, values: list[int]) -> torch.Tensor:
        """int64 tensor on the device; asynchronous (pinned) on a GPU."""
        host = torch.tensor(values, dtype=torch.int64)
        return host if self.device == "cpu" else host.pin_memory().to(self.device, non_blocking=True)

    def on_forward_stream(self) -> AbstractContextManager:
        """Context in which the scheduler enqueues all device work."""
        return nullcontext() if self.forward_stream is None else torch.cuda.stream(self.forward_stream)

    def begin_step(self, rows: int) -> None:
        """Call before the first launch of a step over ``rows`` rows; :meth:`copy_result` ends it."""
        self.threads.for_rows(rows)
        if self.device_clock is not None:
            self.device_clock.begin()

    def copy_result(self, output: StepOutput) -> ResultHandle:
        """Start copying a step's result to the host."""
        return ResultHandle(output, self._copy_stream, self.device_clock)


def _token_map(args: ServerArgs, config: ModelConfig) -> tuple[int, ...]:
    return read_token_map(args.speculative_token_map, config.vocab_size) if args.speculative_token_map else ()


def _weight_bytes(config: ModelConfig, args: ServerArgs, mapped_tokens: int) -> int:
    """Weights of one rank, drafter and its reduced head included; on a CPU in fp32 with their packed copies."""
    dtype, drafter, with_nextn = getattr(torch, args.dtype), args.spec.drafter, args.spec.algorithm == "NEXTN"
    target = rank_weight_bytes(config, args.tp_size, dtype, with_nextn)
    if args.device == "cpu" and dtype is torch.float32:
        target += packed_copy_bytes(config, args.tp_size, with_nextn)
        target += draft_head_bytes(mapped_tokens, config, args.tp_size, dtype.itemsize)
    target += draft_head_bytes(mapped_tokens, config, args.tp_size, dtype.itemsize)
    if drafter is None:
        return target
    return target + sum(count(drafter, args.tp_size, dtype) for count in (draft_weight_bytes, draft_copy_bytes))


def _prepare_kernels(args: ServerArgs) -> None:
    """Set this process's kernel switches; on a GPU compile the CUDA C++ kernels, all at once, before the first step."""
    dispatch.set_kernel_switches(**kernel_switches())
    if args.device != "cuda":
        return
    dispatch.usable("row-invariant steps", _why_not_row_invariant(args))
    if dispatch.usable("cuda", cuda.why_not()):
        cuda.prebuild()


def _why_not_row_invariant(args: ServerArgs) -> str | None:
    """Reason why a full batch's rows may get other bits than alone, or None."""
    requests, width = args.max_running_requests, args.spec.width
    if dispatch.is_decode_sized(requests * width):
        return None
    return (
        f"--max-running-requests {requests} x {width} rows: the products of steps with more than {dispatch.SMALL_ROWS} "
        "rows are the library's, and outputs of such batches may differ from those alone"
    )


def _load_config(args: ServerArgs) -> LoadConfig:
    return LoadConfig(str(resolve_model_path(args.model_path, args.revision, args.download_dir)), args.load_format)


def _rollback_store(args: ServerArgs, state: LinearStatePool):
    """Where verify leaves what commit needs; None without speculation (plain decode updates in place)."""
    if not args.spec.enabled:
        return None
    if args.spec.rollback == "staged":
        return staged_buffers(state, args.spec.width)
    return replay_ring(state, args.spec.ring_length)
