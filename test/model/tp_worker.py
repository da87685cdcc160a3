"""What one of several tensor-parallel test ranks does; results go to a file that the test reads."""

from __future__ import annotations

import torch

from model.driver import Driver, load, prompt_ids
from sgling.srt.core.forward_batch import ForwardMode
from sgling.srt.distributed.parallel_state import ParallelState, init_parallel
from sgling.srt.distributed.vocab_reduce import VocabShardReduce
from sgling.srt.model_loader import LoadedModel

PROMPT = prompt_ids(40)


def run_rank(rank: int, size: int, directories: dict[str, str], results: str) -> None:
    """Entry point of a spawned rank."""
    torch.set_num_threads(1)
    parallel = init_parallel(rank, size, f"file://{results}/rendezvous", "gloo")
    loaded = {variant: load(directory, parallel, with_nextn=True) for variant, directory in directories.items()}
    outcome = {variant: forwards(model) for variant, model in loaded.items()}
    outcome["collectives"] = collectives(parallel)
    torch.save(outcome, f"{results}/rank{rank}.pt")
    parallel.barrier()
    parallel.close()


def forwards(loaded: LoadedModel) -> dict:
    """Hidden states and local logits of prefill, decode, verify and NEXTN, and what the rank holds."""
    target, nextn = loaded.target, loaded.nextn
    driver = Driver(loaded)
    hidden = [driver.prefill(PROMPT).hidden, driver.decode(5).hidden, driver.verify([6, 7, 8]).hidden]
    batch = driver.batch(ForwardMode.DRAFT_PREFILL, [*PROMPT[1:], 5], 0)
    draft = nextn.forward(batch, hidden[0], driver.pools)
    hidden = torch.cat(hidden)
    moe, kda, mla = target.layers[3].mlp, target.layers[0].attention, target.layers[3].attention
    shapes = {
        "w13": moe.experts.w13, "w2": moe.experts.w2, "shared_w2": moe.shared.w2, "o_proj": kda.o_proj.weight,
        "w_kc": mla.w_kc, "dense": mla.dense.weight, "gate": moe.gate,
        "head": target.logits_processor.weight, "embedding": target.embed_tokens.weight,
    }  # fmt: skip
    return {
        "hidden": hidden,
        "logits": target.logits(hidden),
        "draft": draft,
        "draft_logits": nextn.logits(draft),
        "vocab_range": target.vocab_range,
        "shapes": {name: tuple(tensor.shape) for name, tensor in shapes.items()} | {"kda_in": (kda.in_proj.rows,)},
        "weight_bytes": loaded.report.weight_bytes,
    }


def collectives(parallel: ParallelState) -> dict:
    """Results that must be the same on every rank."""
    reduce, rank = VocabShardReduce(parallel), parallel.rank
    scores = torch.tensor([[1.0, 5.0, 2.0, float("nan")], [3.0, 5.0, 2.0, -7.0]])[rank]
    ids = torch.tensor([[10, 11, 12, 13], [300, 301, 302, 303]])[rank]
    sent = [bytes(range(7)), b"", bytes(70_000)]
    values = torch.tensor([1e8, 1.0, 0.1], dtype=torch.float32) * (1 if rank == 0 else -0.99999)
    return {
        "best": reduce.best(scores, ids),
        "max": reduce.max(torch.tensor([[1.0, 9.0], [4.0, 2.0]])[rank]),
        "sum": reduce.sum(torch.tensor([2**40 + 1, 3]) * (rank + 1)),
        "all_reduce": parallel.all_reduce(values),
        "all_reduce_bf16": parallel.all_reduce(values.to(torch.bfloat16)),
        "scalar": parallel.all_gather(torch.tensor(float(rank))),
        "bytes": [parallel.broadcast_bytes(data if rank == 0 else None) for data in sent] == sent,
        "from_rank_1": parallel.broadcast_bytes(b"hello" if rank == 1 else None, source=1),
    }
