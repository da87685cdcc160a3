"""Tiny real engines with a known drafter and planted faults, for the gates' tests."""

from __future__ import annotations

import torch

from sgling import Engine
from sgling.srt.managers.scheduler import Scheduler
from sgling.srt.managers.scheduler_job import create_scheduler


class KnownDrafter:
    """Drafts answers it was told; from ``wrong_from`` on (0 = all) its candidates are wrong.

    ``truth`` maps a prompt to its greedy answer.
    """

    def __init__(self, scheduler: Scheduler, truth: dict[tuple[int, ...], list[int]], wrong_from: int = 2):
        self.scheduler, self.truth, self.wrong_from = scheduler, truth, wrong_from

    def __call__(self, step) -> None:
        worker = self.scheduler.worker
        view = worker.buffers.views(len(step.req_pool_indices), step.width).draft_tokens
        owners = {req.req_pool_idx: req for req in self.scheduler.core.decode.running}
        lengths = worker.runner.future.new_seq_lens[step.req_pool_indices].tolist()
        for i, row in enumerate(step.req_pool_indices.tolist()):
            req = owners[row]
            ids = self.truth.get(tuple(req.input_ids), [])
            for j in range(step.width - 1):
                index = lengths[i] + j + 1 - req.prompt_len
                token = ids[index] if index < len(ids) else 0
                view[i, j] = (token + 1) % 512 if j >= self.wrong_from else token


def leak_state(scheduler: Scheduler) -> None:
    """Fault: once a sampled request has run, new requests start from a state that is not empty."""
    worker, state, sampled = scheduler.worker, scheduler.core.runner.pools.state, []
    judge, clear = worker.judge, state.clear

    def watch(window, step):
        sampled.extend([True] * bool(step.flags.sampled))
        return judge(window, step)

    def leave_something(slot) -> None:
        clear(slot)
        if sampled:
            state.temporal[:, slot] += 0.5

    worker.judge, state.clear = watch, leave_something


def accept_first_draft(scheduler: Scheduler) -> None:
    """Fault: the verdict takes the first draft of every window, right or wrong."""
    worker = scheduler.worker
    judge = worker.judge

    def lossy(window, step):
        verdict = judge(window, step)
        if window.candidates.shape[1] == 1:
            return verdict
        ids = verdict.target_ids.clone()
        ids[:, 0] = window.candidates[:, 1]
        lens = verdict.accept_lens.clamp_min(2)
        return verdict._replace(target_ids=ids, accept_lens=lens, bonus=ids.gather(1, lens.unsqueeze(1) - 1).squeeze(1))

    worker.judge = lossy


class faulty_engine:
    """Context manager: an engine of a tiny model whose scheduler was changed before it ran."""

    def __init__(self, model_path, truth: dict | None = None, wrong_from: int = 2, fault=None, **server_args):
        self._truth, self._wrong_from, self._fault = truth, wrong_from, fault
        self._args = {"model_path": str(model_path), "device": "cpu", "random_seed": 0, "log_level": "error"}
        self._args |= {"speculative_algorithm": "NEXTN", "max_running_requests": 8, **server_args}

    def _create(self, job, channel, parallel):
        torch.set_num_threads(1)
        scheduler = create_scheduler(job, channel, parallel)
        if self._truth is not None:
            scheduler.worker.draft = KnownDrafter(scheduler, self._truth, self._wrong_from)
        if self._fault is not None:
            self._fault(scheduler)
        return scheduler

    def __enter__(self) -> Engine:
        self.engine = Engine(scheduler_factory=self._create, **self._args)
        return self.engine

    def __exit__(self, *_exc) -> None:
        self.engine.shutdown()
