"""Runs requests through a real scheduler in this thread, with a choice of drafters, and collects what came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from sgling.srt.config.draft_model import complete_args
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.core.step import StepInput
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.managers.channel import QueueChannel
from sgling.srt.managers.io_struct import (
    FinishReason,
    RequestOutput,
    SpecCounters,
    TokenizedGenerateReqInput,
    TokenLogprob,
)
from sgling.srt.managers.scheduler import Scheduler
from sgling.srt.sampling.sampling_params import SamplingParams
from sgling.srt.speculative.chain_worker import ChainWorker


@dataclass
class Outcome:
    """Everything one request received."""

    ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    top: list[list[TokenLogprob]] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    spec: SpecCounters | None = None
    retractions: int = 0

    def add(self, output: RequestOutput) -> None:
        """Append one increment."""
        self.ids += output.new_ids
        self.reason = output.finished_reason
        self.spec = output.spec
        self.retractions = output.num_retractions
        if output.logprobs is not None:
            self.logprobs += output.logprobs.tokens
            self.top += output.logprobs.top
        if output.input_logprobs is not None:
            self.input_logprobs += output.input_logprobs.tokens
        assert len(self.ids) == output.completion_tokens


def request(rid: str, prompt: list[int], *, logprobs: int | None = None, **params) -> TokenizedGenerateReqInput:
    """A tokenised request; greedy and blind to EOS unless ``params`` say otherwise."""
    values = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 24, "sampling_seed": len(rid), **params}
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=prompt,
        sampling_params=SamplingParams(**values),
        return_logprob=logprobs is not None,
        top_logprobs_num=logprobs or 0,
    )


def random_prompt(length: int, seed: int, vocab: int = 512) -> list[int]:
    """Token ids without special meaning."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocab, (length,), generator=generator).tolist()


class Harness:
    """One scheduler over a model directory. Keyword arguments are server arguments."""

    def __init__(self, model_path: str | Path, tokenizer=None, parallel: ParallelState | None = None, **kwargs):
        kwargs.setdefault("speculative_algorithm", "NEXTN")
        kwargs.setdefault("max_running_requests", 5)
        kwargs.setdefault("random_seed", 0)
        kwargs.setdefault("device", "cpu")
        spec = kwargs.pop("spec", None)  # replaces fields of the resolved speculation (widths that no flag gives)
        args = complete_args(ServerArgs.from_kwargs(model_path=str(model_path), **kwargs))
        if spec:
            args = replace(args, spec=replace(args.spec, **spec))
        self.channel = QueueChannel()
        self.side = self.channel.tokenizer_side()
        config = ModelConfig.from_dir(model_path, args.json_model_override_args)
        self.scheduler = Scheduler(args, config, self.channel, parallel or ParallelState.single(), tokenizer)
        self.core = self.scheduler.core
        self.outcomes: dict[str, Outcome] = {}
        self.messages: list = []
        self._pending = None

    def send(self, *messages) -> None:
        """Queue messages for the scheduler."""
        for message in messages:
            self.side.send(message)

    @torch.inference_mode()
    def step(self) -> bool:
        """One iteration of the configured loop; False when idle."""
        overlap = self.scheduler.overlaps
        self.scheduler.receive()
        launched = self.scheduler.launch_next(in_flight=self._pending is not None)
        finished, self._pending = (self._pending, launched) if overlap else (launched, None)
        if finished is not None:
            self.scheduler.process(finished)
        self._collect()
        return finished is not None or launched is not None or not self.core.is_idle

    def _collect(self) -> None:
        while self.channel._up:
            message = self.channel._up.popleft()
            for output in getattr(message, "outputs", ()):
                self.outcomes.setdefault(output.rid, Outcome()).add(output)
            self.messages.append(message)

    def run(self, *requests, limit: int = 20_000) -> dict[str, Outcome]:
        """Send requests, step until idle, check that nothing leaked, return what came out."""
        self.send(*requests)
        for _ in range(limit):
            if not self.step():
                self.core.resources.check_idle()
                return self.outcomes
        raise AssertionError(f"not idle after {limit} steps")

    def use_drafter(self, drafter: Callable[[ChainWorker, StepInput], None] | None) -> None:
        """Replace the draft step; ``drafter`` fills ``worker.buffers.draft_tokens``. None keeps the model's own."""
        if drafter is not None:
            worker = self.scheduler.worker
            worker.draft = lambda step: drafter(worker, step)
            if self.scheduler.graphs is not None:
                self.scheduler.graphs.run_eagerly("draft")


def draft_view(worker: ChainWorker, step: StepInput) -> torch.Tensor:
    """int64 [bs, W-1], where a drafter writes its candidates."""
    return worker.buffers.views(len(step.req_pool_indices), step.width).draft_tokens


def random_drafter(vocab: int, seed: int = 0):
    """Drafts without any knowledge."""
    generator = torch.Generator().manual_seed(seed)

    def draft(worker: ChainWorker, step: StepInput) -> None:
        view = draft_view(worker, step)
        view.copy_(torch.randint(0, vocab, view.shape, generator=generator))

    return draft


class Oracle:
    """Drafts the known continuation, with one planted error so that every accept length 1..W occurs in turn.

    ``truth`` maps rid to (prompt length, output ids). ``lengths`` counts the accept lengths that were planned.
    """

    def __init__(
        self, harness: Harness, truth: dict[str, tuple[int, list[int]]], vocab: int, always_wrong: bool = False
    ):
        self.harness, self.truth, self.vocab, self.always_wrong = harness, truth, vocab, always_wrong
        self.turn = 0

    def __call__(self, worker: ChainWorker, step: StepInput) -> None:
        rows = step.req_pool_indices
        owners = {req.req_pool_idx: req.rid for req in self.harness.core.decode.running}
        lengths = worker.runner.future.new_seq_lens[rows].tolist()
        drafts = [self._drafts(owners[row], lengths[i], step.width) for i, row in enumerate(rows.tolist())]
        draft_view(worker, step).copy_(torch.tensor(drafts, dtype=torch.int64).view(len(rows), -1))

    def _drafts(self, rid: str, length: int, width: int) -> list[int]:
        self.turn += 1
        wrong_at = 0 if self.always_wrong else self.turn % width
        prompt_len, ids = self.truth[rid]
        first = length + 1 - prompt_len
        tokens = (ids[first : first + width - 1] + [0] * width)[: width - 1]
        return [(token + 1) % self.vocab if j == wrong_at else token for j, token in enumerate(tokens)]
