"""The trained drafter on the CUDA C++ and Triton kernels, emulated, in bf16: it drafts what the plain operators draft.

Losslessness hides a drafter that drafts badly. Here the embedded pair decides: weights that mean something, at a shape
of its own (heads of 64, Markov rank 32, taps of four layers).
"""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from gpu.gpu_case import CHAT, QUESTIONS
from sgling.srt.config.model_path import EMBEDDED_DRAFTERS, resolve_model_path
from sgling.srt.model_loader.file_source import FileWeightSource
from sgling_kernel import dispatch
from spec.harness import Harness, draft_view, request
from spec.test_triton_engine import use_kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test/gpu runs the kernels themselves")
SERVING = {"linear.cuda", "norm.cuda", "moe.cuda", "kda.cuda", "block_attention.paged", "markov.cuda"}


def align_weights(monkeypatch) -> None:
    """Weights begin where an allocator puts them, as on a GPU; on a CPU they are views of a file."""
    convert = FileWeightSource._convert
    monkeypatch.setattr(FileWeightSource, "_convert", lambda *args: convert(*args).clone())


def one_round(drafter: str) -> tuple[list[int], list[int]]:
    """(output ids, drafts) of a prompt and one round behind it."""
    path = resolve_model_path("ling3-pico")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompt = tokenizer.encode(CHAT.format(QUESTIONS[0]), add_special_tokens=False).ids
    kwargs = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": drafter, "dtype": "bfloat16"}
    kwargs |= {"context_length": 256, "max_total_tokens": 512, "max_running_requests": 1}
    harness = Harness(path, disable_overlap_schedule=True, **kwargs)  # no round behind the last
    worker, drafts = harness.scheduler.worker, []
    draft = worker.draft

    def recorded(step):
        draft(step)
        drafts.extend(draft_view(worker, step)[0].tolist())

    worker.draft = recorded
    block = worker.config.block_size
    ids = harness.run(request("r", prompt, max_new_tokens=1 + block))["r"].ids
    return ids, drafts


@pytest.mark.parametrize("name", EMBEDDED_DRAFTERS)
def test_the_kernels_draft_what_the_plain_operators_draft(name, emulated_cuda, monkeypatch):
    with monkeypatch.context() as plain:
        plain.setattr(dispatch, "use_triton", lambda x: False)
        expected = one_round(name)
    ids, drafts = expected
    assert drafts == ids[1:]  # a single round, all accepted

    served, usable = set(), dispatch.usable

    def asked(path, reason):
        served.update([path] if reason is None else [])
        return usable(path, reason)

    use_kernels(monkeypatch)
    align_weights(monkeypatch)
    monkeypatch.setattr(dispatch, "usable", asked)
    assert one_round(name) == expected
    assert served >= SERVING, SERVING - served
