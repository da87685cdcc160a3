"""Device state of a running request, and what it is under plain decoding: the yardstick of the state parity tests."""

from __future__ import annotations

from pathlib import Path

import torch

from spec.harness import Harness, request

EXACT = {"enable_deterministic_inference": True, "disable_overlap_schedule": True}


def advance(harness: Harness, prompt: list[int], count: int, **params):
    """Run one request until it has ``count`` tokens; returns its host object."""
    harness.send(request("r", prompt, max_new_tokens=200, **params))
    while True:
        harness.step()
        running = harness.core.decode.running
        if running and len(running[0].output_ids) >= count:
            return running[0]


def snapshot(harness: Harness, req) -> dict[str, torch.Tensor]:
    """Device state of a request up to its committed length."""
    runner = harness.core.runner
    length = int(runner.future.new_seq_lens[req.req_pool_idx])
    slots = runner.pools.req_to_token[req.req_pool_idx, :length]
    return {
        "length": torch.tensor(length),
        "bonus": runner.future.output_tokens[req.req_pool_idx].clone(),
        "conv": runner.pools.state.conv[:, req.state_slot].clone(),
        "temporal": runner.pools.state.temporal[:, req.state_slot].clone(),
        "kv": runner.pools.kv.buffer[:, slots].clone(),
    }


def plain_states(model_dir: Path, prompt: list[int], count: int) -> tuple[dict[int, dict], list[int]]:
    """States of plain decoding by committed length, until ``count`` tokens; and those tokens."""
    harness = Harness(model_dir, speculative_algorithm="none", **EXACT)
    req = advance(harness, prompt, 1)
    states = {}
    while len(req.output_ids) < count:
        state = snapshot(harness, req)
        states[int(state["length"])] = state
        harness.step()
    return states, list(req.output_ids)


def rounds_equal_to_plain(harness: Harness, req, states: dict[int, dict], steps: int) -> int:
    """Run rounds; before each the state is that of plain decoding at the same length. How many were compared."""
    for seen in range(steps):
        state = snapshot(harness, req)
        length = int(state["length"])
        if length not in states:
            return seen
        for name, value in state.items():
            assert torch.equal(value, states[length][name]), (name, length)
        harness.step()
    return steps
