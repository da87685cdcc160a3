"""What requests own: a row, a KDA state slot and KV pages. One place allocates, frees, swaps out and counts."""

from __future__ import annotations

import torch

from sgling.srt.managers.request import Req, ReqStage, SwappedState
from sgling.srt.mem_cache.allocator import OutOfSlotsError, SlotAllocator, TokenToKVPoolAllocator
from sgling.srt.model_executor.model_runner import ModelRunner


class IntegrityError(RuntimeError):
    """Idle, and yet something is owned: a leak or a double free."""


class RequestResources:
    """Ownership of request rows, state slots and KV slots; host arithmetic only.

    ``window`` is the reservation ahead of the known committed length: twice what a round touches, once for the step in
    flight and once for the step being launched.
    """

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self.window = 2 * runner.window
        self.kv = TokenToKVPoolAllocator(runner.plan.max_total_tokens, runner.plan.page_size)
        self.rows = runner.req_to_token.rows
        self.state_slots = SlotAllocator(runner.pools.state.num_slots)

    # -- admission -------------------------------------------------------------------------------------------------
    def fits(self, length: int, running: int) -> bool:
        """Whether a request of ``length`` known tokens can join while ``running`` others keep room to grow."""
        if not (self.rows.available and self.state_slots.available):
            return False
        pages = self.kv.pages_needed(0, length + self.window)
        headroom = running * self.kv.pages_needed(0, self.window)
        return (pages + headroom) * self.kv.page_size <= self.kv.available or (
            running == 0 and pages * self.kv.page_size <= self.kv.available
        )

    def admit(self, req: Req) -> None:
        """Give a request its row, its (zeroed) state slot and KV for its prompt and the first steps."""
        self._take_row(req)
        self._runner.pools.state.clear(req.state_slot)
        self.reserve(req, req.prompt_len + self.window)
        self._runner.set_sampling_row(req.req_pool_idx, req.params, req.input_ids)

    def _take_row(self, req: Req) -> None:
        req.req_pool_idx = self.rows.alloc()
        req.state_slot = self.state_slots.alloc()
        self._runner.future.state_slot[req.req_pool_idx] = req.state_slot

    # -- growth ----------------------------------------------------------------------------------------------------
    def reserve(self, req: Req, length: int) -> None:
        """Own KV slots for positions below ``length``; raises :class:`OutOfSlotsError`, then nothing has changed."""
        length = min(length, self._runner.req_to_token.width)
        pages = self.kv.pages_needed(len(req.kv_slots), length)
        if pages == 0:
            return
        slots = self.kv.alloc_pages(pages)
        self._runner.req_to_token.write(req.req_pool_idx, len(req.kv_slots), slots)
        req.kv_slots.extend(slots)

    def reserve_step(self, req: Req) -> bool:
        """KV for the next step of a running request; False when the pool is exhausted."""
        try:
            self.reserve(req, req.kv_committed_len + self.window)
        except OutOfSlotsError:
            return False
        return True

    # -- release ---------------------------------------------------------------------------------------------------
    def release(self, req: Req) -> None:
        """Give everything back. Steps still in flight are harmless: later writers are behind them in stream order."""
        if req.req_pool_idx == 0:
            return
        self._runner.sampling.clear_row(req.req_pool_idx)
        self.kv.free_slots(req.kv_slots)
        self.rows.free(req.req_pool_idx)
        self.state_slots.free(req.state_slot)
        req.kv_slots = []
        req.req_pool_idx = req.state_slot = 0

    # -- retraction ------------------------------------------------------------------------------------------------
    def swap_out(self, req: Req) -> None:
        """Copy KV, states and relay of a request to host memory and release it; no step may be in flight."""
        if req.launched_steps:
            raise RuntimeError(f"request {req.rid} has steps in flight and cannot be retracted")
        pools, row = self._runner.pools, req.req_pool_idx
        slots = torch.tensor(req.kv_slots[: req.kv_committed_len], device=pools.kv.buffer.device)
        req.swapped = SwappedState(
            kv=pools.kv.buffer[:, slots].to("cpu"),
            draft_kv=pools.draft_kv.buffer[:, slots].to("cpu") if pools.draft_kv else None,
            conv=pools.state.conv[:, req.state_slot].to("cpu", copy=True),
            temporal=pools.state.temporal[:, req.state_slot].to("cpu", copy=True),
            relay=self._runner.future.snapshot_row(row),
            sampling=self._runner.sampling.snapshot_row(row),
        )
        self.release(req)
        req.stage = ReqStage.RETRACTED
        req.num_retractions += 1

    def swap_in(self, req: Req) -> None:
        """Bring a retracted request back exactly as it was; its row and slots may be others than before."""
        saved, pools = req.swapped, self._runner.pools
        self._take_row(req)
        self.reserve(req, req.known_len + self.window)
        slots = torch.tensor(req.kv_slots[: req.kv_committed_len], device=pools.kv.buffer.device)
        pools.kv.buffer[:, slots] = saved.kv.to(pools.kv.buffer.device, non_blocking=True)
        if pools.draft_kv:
            pools.draft_kv.buffer[:, slots] = saved.draft_kv.to(pools.kv.buffer.device, non_blocking=True)
        pools.state.conv[:, req.state_slot].copy_(saved.conv, non_blocking=True)
        pools.state.temporal[:, req.state_slot].copy_(saved.temporal, non_blocking=True)
        self._runner.future.restore_row(req.req_pool_idx, saved.relay)
        self._runner.sampling.restore_row(req.req_pool_idx, saved.sampling)
        req.swapped = None
        req.stage = ReqStage.RUNNING if req.prefilled_len == req.prompt_len else ReqStage.PREFILL

    # -- integrity -------------------------------------------------------------------------------------------------
    def check_idle(self) -> None:
        """With no request alive everything must be free; raises :class:`IntegrityError` naming what is not."""
        used = {"rows": self.rows.used, "state slots": self.state_slots.used, "KV slots": self.kv.used}
        leaked = {name: count for name, count in used.items() if count}
        if leaked:
            raise IntegrityError(f"idle, but still owned: {leaked}")
