"""What one rank of a tensor-parallel test does; a module of its own, so that spawned processes can import it."""

from __future__ import annotations

import json
import os

from sgling.srt.distributed.parallel_state import init_parallel
from sgling.srt.managers.io_struct import ShutdownReq
from sgling.srt.model_executor import model_runner
from spec.harness import Harness, random_prompt, request

TP = 2
FREE_BYTES = (5_000_000, 4_000_000)  # of each rank's device: too little for the largest pool, and unequal


def requests():
    return [
        request("g", random_prompt(21, 1), logprobs=2),
        request("ss", random_prompt(40, 2), temperature=1.0, top_p=0.8, top_k=30, min_p=0.01),
        request("ppp", random_prompt(9, 3), frequency_penalty=0.7, repetition_penalty=1.3, logit_bias={300: 4.0}),
        request("mmmm", random_prompt(5, 4), min_new_tokens=6, ignore_eos=False, logit_bias={2: 100.0}),
    ]


def rank_main(rank: int, port: int, model_dir: str, kwargs: dict, out: str) -> None:
    parallel = init_parallel(rank, TP, f"tcp://127.0.0.1:{port}", "gloo")
    model_runner.free_memory = lambda device: FREE_BYTES[rank]
    harness = Harness(model_dir, parallel=parallel, tp_size=TP, **kwargs)
    runner = harness.core.runner
    result = {"bytes": runner.load_report.weight_bytes, "plan": runner.plan._asdict()}
    if rank == 0:
        outcomes = harness.run(*requests())
        result["ids"] = {rid: outcome.ids for rid, outcome in outcomes.items()}
        result["logprobs"] = [entry.logprob for entry in outcomes["g"].logprobs]
        harness.send(ShutdownReq())
        harness.step()
    else:
        while not harness.scheduler.stopped:
            harness.step()
    with open(f"{out}/{rank}.json", "w", encoding="utf-8") as file:
        json.dump(result, file)
    parallel.barrier()
    os._exit(0)  # as scheduler processes end: the model still holds the group, which cannot be torn down in order
