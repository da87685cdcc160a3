"""Heads of a DSpark drafter: the sequential Markov correction of a block's logits, and the acceptance estimate."""

from __future__ import annotations

import torch
from torch.nn import functional

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.layers.weights import WeightSource
from sgling_kernel.confidence import confidence_logits
from sgling_kernel.linear import linear, linear_fp32
from sgling_kernel.pointwise import sigmoid


class MarkovHead:
    """Adds W2 · m(x_{k-1}) to the logits of row k (docs/dspark.md §1.4); W2 is sharded with the vocabulary.

    Vanilla: m is the embedding of the previous token. :class:`GatedMarkovHead` and :class:`RnnMarkovHead` shape it by
    the row's hidden state.

    Attributes:
        vanilla: the correction depends on the previous token alone, so a whole block is one operator
            (:func:`sgling_kernel.markov.markov_chain`).
    """

    vanilla = True

    def __init__(self, source: WeightSource, config: DSparkConfig):
        self.rank = config.markov_rank
        self.w1 = source.full("markov_head.markov_w1.weight")
        self.w2 = source.shard("markov_head.markov_w2.weight", dim=0)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., rank]."""
        return functional.embedding(tokens, self.w1)

    def start(self, batch: int) -> torch.Tensor:
        """State before the first row, [bs, rank] (only the rnn head reads it)."""
        return self.w1.new_zeros(batch, self.rank)

    def step(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bias of one row.

        Args:
            previous: int64 [bs], the token before the one that is drafted.
            hidden: [bs, d], the row's output after the final norm.
            state: [bs, rank].

        Returns:
            (bias fp32 [bs, V_local], next state).
        """
        mixed, state = self.mix(self.embed(previous), hidden, state)
        return linear_fp32(mixed, self.w2), state

    def mix(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what W2 reads [bs, rank], next state)."""
        return embedded, state


class GatedMarkovHead(MarkovHead):
    """The embedding under a gate computed from the hidden state and itself."""

    vanilla = False

    def __init__(self, source: WeightSource, config: DSparkConfig):
        super().__init__(source, config)
        self.weight = source.full("markov_head.gate_proj.weight")
        self.bias = source.full("markov_head.gate_proj.bias")

    def mix(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`MarkovHead.mix`."""
        gate = linear(torch.cat((hidden, embedded), dim=-1), self.weight) + self.bias
        return embedded * sigmoid(gate.float()).to(embedded.dtype), state


class RnnMarkovHead(MarkovHead):
    """A gated recurrence along the block; its state starts at zero."""

    vanilla = False

    def __init__(self, source: WeightSource, config: DSparkConfig):
        super().__init__(source, config)
        self.weight = source.full("markov_head.joint_proj.weight")
        self.bias = source.full("markov_head.joint_proj.bias")

    def mix(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`MarkovHead.mix`."""
        joint = linear(torch.cat((state, embedded, hidden), dim=-1), self.weight) + self.bias
        keep, new, out = joint.float().chunk(3, dim=-1)
        keep = sigmoid(keep)
        state = (keep * state.float() + (1 - keep) * new.tanh()).to(state.dtype)
        return out.tanh().to(state.dtype), state


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}


class ConfidenceHead:
    """Logit of "this draft is accepted if all before it are", fp32 (docs/dspark.md §1.5)."""

    def __init__(self, source: WeightSource, config: DSparkConfig):
        self.with_markov = config.confidence_with_markov
        self.weight = source.full("confidence_head.proj.weight", dtype=torch.float32)
        self.bias = source.full("confidence_head.proj.bias", dtype=torch.float32)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """hidden [bs, rows, d], embedded predecessors [bs, rows, rank] -> raw logits fp32 [bs, rows]."""
        rows = embedded.flatten(0, 1) if self.with_markov else None
        return confidence_logits(hidden.flatten(0, 1), rows, self.weight, self.bias).view(hidden.shape[:2])
