"""The Markov chain of a block in CUDA C++ (chain.cu): one node for all drafts, w2 read once."""

from functools import cache

import torch
from torch import Tensor

from sgling_kernel import cuda
from sgling_kernel.markov.reference import DraftNoise

MAX_BATCH, MAX_DRAFTS, MAX_CTAS = 8, 16, 192
RANKS = (32, 64, 128, 256, 512)
_TILE, _PAD, _STATIC = 16, 64, 2048  # rows per warp, bytes between rows and of static shared memory
_EMULATED_CTAS, _EMULATED_SHARED = 3, 1 << 15  # a pretended GPU: several CTAs, and shared memory that can be too small


@cache
def _workspace(device: torch.device) -> Tensor:
    """The words that CTAs hand each other; zero once, marked by the chain's number ever after."""
    return torch.zeros(1 + MAX_DRAFTS * MAX_BATCH * MAX_CTAS * 2, dtype=torch.int64, device=device)


def _limits(device: torch.device) -> tuple[int, int]:
    """(CTAs that are on the device at the same time, bytes of shared memory of each)."""
    if device.type != "cuda":
        return _EMULATED_CTAS, _EMULATED_SHARED
    properties = torch.cuda.get_device_properties(device)
    return min(properties.multi_processor_count, MAX_CTAS), properties.shared_memory_per_block_optin - _STATIC


def markov_chain(base: Tensor, w1: Tensor, w2: Tensor, anchor: Tensor, noise: DraftNoise | None, out: Tensor) -> None:
    """reference.markov_chain; on a GPU one node, in the emulation (CTAs one after another) one call per draft."""
    (bs, drafts, vocab), rank = base.shape, w2.shape[1]
    ctas, shared = _limits(base.device)
    tiles = -(-vocab // _TILE)
    rows = -(-tiles // ctas) * _TILE
    resident = rows * (rank * w2.element_size() + _PAD) <= shared
    function, words = cuda.function("markov/chain.cu", "markov_chain"), _workspace(base.device)
    phases = [(0, drafts)] if base.is_cuda else [(phase, phase) for phase in range(drafts + 1)]
    for first, last in phases:
        cuda.launch(
            function, out, words, base, w1, w2, anchor, *(noise or (None,) * 4), out.stride(0), *base.stride()[:2],
            bs, drafts, vocab, rank, rows, first, last, int(resident),
        )  # fmt: skip


def why_not_chain(base: Tensor, w1: Tensor, w2: Tensor) -> str | None:
    """Reason why the kernel cannot take these operands, or None."""
    if (reason := cuda.why_not()) is not None:
        return reason
    if w1.dtype != torch.bfloat16 or w2.dtype != torch.bfloat16:
        return f"the CUDA chain takes bf16 factors, not {w2.dtype}"
    if base.shape[0] > MAX_BATCH or base.shape[1] > MAX_DRAFTS:
        return f"the CUDA chain takes at most {MAX_BATCH} requests of {MAX_DRAFTS} drafts, not {tuple(base.shape[:2])}"
    if w2.shape[1] not in RANKS:
        return f"the CUDA chain takes ranks {RANKS}, not {w2.shape[1]}"
    if base.stride(-1) != 1 or not (w1.is_contiguous() and w2.is_contiguous()):
        return "logits and factors must be contiguous"
    return None
