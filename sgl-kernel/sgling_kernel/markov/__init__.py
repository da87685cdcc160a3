"""The sequential part of a block drafter: a low-rank correction of each draft's logits by the draft before it."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.markov import reference
from sgling_kernel.markov.reference import DraftNoise

__all__ = ["DraftNoise", "markov_chain"]


def markov_chain(base: Tensor, w1: Tensor, w2: Tensor, anchor: Tensor, noise: DraftNoise | None, out: Tensor) -> None:
    """Choose the drafts of a block; see reference.markov_chain."""
    if dispatch.use_triton(base):
        from sgling_kernel.markov import cuda, kernel

        if dispatch.usable("markov.cuda", cuda.why_not_chain(base, w1, w2)):
            cuda.markov_chain(base, w1, w2, anchor, noise, out)
            return
        if dispatch.usable("markov.chain", kernel.why_not_chain(base, w1, w2)):
            kernel.markov_chain(base, w1, w2, anchor, noise, out)
            return
    reference.markov_chain(base, w1, w2, anchor, noise, out)
