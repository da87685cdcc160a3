"""A DSPARK scheduler over the tiny target, and what tests ask of it: drafts by hand, block outputs, target features."""

from __future__ import annotations

from pathlib import Path

import torch

from model.driver import Driver, load
from model.tiny_drafter import write_tiny_drafter
from sgling.srt.core.step import StepInput
from sgling_kernel.sampling import SamplingFlags
from spec.harness import Harness

VOCAB = 512
BLOCK_SIZES = range(1, 17)


def dspark(target: Path, drafter: Path, **kwargs) -> Harness:
    """Keyword arguments are server arguments."""
    return Harness(target, speculative_algorithm="DSPARK", speculative_draft_model_path=str(drafter), **kwargs)


def drafters(base: Path, **overrides) -> dict[int, Path]:
    """A random drafter of every block size."""
    return {
        size: write_tiny_drafter(base / f"b{size}", seed=size, block_size=size, **overrides) for size in BLOCK_SIZES
    }


def use_drafts(harness: Harness, drafter) -> None:
    """Replace the drafts, not the draft step: that also fills the schedule of a step with a budget. None: keep them."""
    worker = harness.scheduler.worker
    draft = worker.draft

    def drafted(step: StepInput) -> None:
        draft(step)
        drafter(worker, step)

    if drafter is not None:
        worker.draft = drafted


class InjectedFeatures:
    """Records what is written into the drafter's cache: position -> features, of a harness that serves one request."""

    def __init__(self, harness: Harness):
        self.by_position: dict[int, torch.Tensor] = {}
        drafter = harness.scheduler.worker.drafter
        inject = drafter.inject

        def recording(taps, positions, locs, pools):
            for position, tap in zip(positions[locs > 0].tolist(), taps[locs > 0], strict=True):
                assert position not in self.by_position, f"position {position} was injected twice"
                self.by_position[position] = tap.clone()
            inject(taps, positions, locs, pools)

        drafter.inject = recording

    def up_to(self, length: int) -> torch.Tensor:
        """Features [length, m * H]; every position must have been injected, and none behind."""
        assert sorted(self.by_position) == list(range(length))
        return torch.stack([self.by_position[position] for position in range(length)])


@torch.inference_mode()
def target_taps(target: Path, layers: tuple[int, ...], ids: list[int]) -> torch.Tensor:
    """Features [S, m * H] of a sequence, from one clean prefill."""
    return Driver(load(target, tap_layers=layers), length=len(ids) + 1).prefill(ids).taps


def step_of(harness: Harness, req, width: int | None = None) -> StepInput:
    """The greedy step the scheduler would launch for one request."""
    runner = harness.core.runner
    assert harness.core.resources.reserve_step(req)
    bound = min(512, runner.req_to_token.width)
    return StepInput(torch.tensor([req.req_pool_idx]), width or runner.max_width, bound, SamplingFlags(), None)


@torch.inference_mode()
def block_outputs(harness: Harness, req) -> torch.Tensor:
    """[block, d] of the block that would be drafted next."""
    worker, step = harness.scheduler.worker, step_of(harness, req)
    anchor = worker.runner.future.bonus(step.req_pool_indices)
    return worker.block_hidden(step, worker.metadata.at_start(step), anchor)[0]
