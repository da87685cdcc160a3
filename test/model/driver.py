"""Drives a loaded model by hand, one request per driver: the smallest prefill, decode and verify loops that are right.

No scheduler: pools are made here for two requests. Request row r (1 or 2) has its KV slots in shuffled order and state
slot 3 - r, so a mix-up of positions, slots, rows and state slots shows.
"""

from __future__ import annotations

import torch

from sgling.srt.config.load_config import LoadConfig
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode, ModelOutput
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.mem_cache.kv_pool import MLATokenToKVPool
from sgling.srt.mem_cache.linear_state_pool import LinearStatePool, LinearStateShape, replay_ring, staged_buffers
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling.srt.model_loader import LoadedModel, get_model
from sgling_kernel.kda import StagedBuffers, commit_replay, commit_staged

_ROWS = 2


def load(path, parallel: ParallelState | None = None, with_nextn: bool = False, **options) -> LoadedModel:
    """Load a checkpoint directory in fp32 on the CPU; options: load_format, tap_layers, dtype."""
    dtype = options.pop("dtype", torch.float32)
    load_format = LoadConfig(str(path), options.pop("load_format", "auto"))
    group = parallel or ParallelState.single()
    return get_model(ModelConfig.from_dir(path), load_format, group, dtype, "cpu", with_nextn, **options)


def make_pools(config: ModelConfig, heads: int, length: int, width: int, rollback: str, dtype=torch.float32):
    """Pools for two requests of up to ``length`` positions each."""
    slots = _ROWS * length
    req_to_token = torch.zeros(_ROWS + 1, length, dtype=torch.int64)
    req_to_token[1:] = (torch.randperm(slots, generator=torch.Generator().manual_seed(7)) + 1).view(_ROWS, length)
    state = LinearStatePool(LinearStateShape(config.kda_layer_ids, heads, config.head_dim, 3), 3, dtype, "cpu")
    ring = 1 << (2 * width - 1).bit_length()
    return MemoryPools(
        req_to_token=req_to_token,
        kv=MLATokenToKVPool(config.mla_layer_ids, slots, config.kv_row_dim, dtype, "cpu"),
        draft_kv=MLATokenToKVPool((config.nextn_layer_id,), slots, config.kv_row_dim, dtype, "cpu"),
        state=state,
        rollback=staged_buffers(state, width) if rollback == "staged" else replay_ring(state, ring),
    )


class Driver:
    """One request on one rank's model; ``length`` counts the committed tokens.

    ``beside`` puts this request into another driver's pools, as row 2.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        length: int = 512,
        width: int = 4,
        rollback: str = "replay",
        dtype: torch.dtype = torch.float32,
        beside: Driver | None = None,
    ):
        self.target, self.nextn = loaded.target, loaded.nextn
        config, parallel = self.target.config, self.target.embed_tokens.parallel
        heads = config.num_attention_heads // parallel.size
        self.pools = beside.pools if beside else make_pools(config, heads, length, width, rollback, dtype)
        self.row = 2 if beside else 1
        self.capacity = length
        self.length = 0

    def batch(self, mode: ForwardMode, ids: list[int], start: int | None = None) -> ForwardBatch:
        """Rows at positions start .. start + len(ids) - 1 (default: right after the committed tokens)."""
        start = self.length if start is None else start
        positions = torch.arange(start, start + len(ids))
        return ForwardBatch(
            mode=mode,
            input_ids=torch.tensor(ids),
            positions=positions,
            out_cache_loc=self.pools.req_to_token[self.row, positions],
            req_pool_indices=torch.tensor([self.row]),
            seq_lens=torch.tensor([start]),
            state_slots=torch.tensor([3 - self.row]),
            width=len(ids),
            prefix_len=start if mode.is_prefill else 0,
            kv_bound=self.capacity,
        )

    def prefill(self, ids: list[int], chunk: int = 10**9) -> ModelOutput:
        """Prefill in chunks; outputs of all rows."""
        outputs = []
        for at in range(0, len(ids), chunk):
            part = ids[at : at + chunk]
            outputs.append(self.target.forward(self.batch(ForwardMode.EXTEND, part), self.pools))
            self.length += len(part)
        taps = None if outputs[0].taps is None else torch.cat([out.taps for out in outputs])
        return ModelOutput(torch.cat([out.hidden for out in outputs]), taps)

    def decode(self, token: int) -> ModelOutput:
        """One plain decode step."""
        output = self.target.forward(self.batch(ForwardMode.DECODE, [token]), self.pools)
        self.length += 1
        return output

    def verify(self, ids: list[int]) -> ModelOutput:
        """Verify rows after the committed tokens; nothing is committed."""
        return self.target.forward(self.batch(ForwardMode.TARGET_VERIFY, ids), self.pools)

    def commit(self, accept: int, width: int) -> None:
        """Commit the first ``accept`` of the last verify's rows."""
        state, slots = self.pools.state, torch.tensor([3 - self.row])
        pools, accepted = (state.conv, state.temporal, self.pools.rollback), torch.tensor([accept])
        if isinstance(self.pools.rollback, StagedBuffers):
            commit_staged(*pools, slots, accepted)
        else:
            commit_replay(*pools, slots, torch.tensor([self.length]), accepted, width)
        self.length += accept

    def greedy(self, prompt: list[int], steps: int) -> list[int]:
        """Prefill, then ``steps`` greedy tokens by plain decode."""
        token = int(self.target.logits(self.prefill(prompt).hidden[-1:]).argmax())
        tokens = [token]
        for _ in range(steps - 1):
            token = int(self.target.logits(self.decode(token).hidden).argmax())
            tokens.append(token)
        return tokens


def padded_row(width: int, capacity: int, mode: ForwardMode) -> ForwardBatch:
    """A request that is not there: dummy row, slots and state, as a padded graph would carry it."""
    zeros, one = torch.zeros(width, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return ForwardBatch(mode, zeros, zeros, zeros, one, one, one, width, 0, capacity)


def join(*batches: ForwardBatch) -> ForwardBatch:
    """One batch of several requests of equal mode and width."""
    joined = {
        name: torch.cat([getattr(batch, name) for batch in batches])
        for name, value in batches[0]._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    return batches[0]._replace(**joined)


def prompt_ids(length: int, vocab: int = 512, seed: int = 0) -> list[int]:
    """Random prompt."""
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
