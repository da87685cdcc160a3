"""Target distribution of sampling: adjusted logits, filters, logprobs; exact over vocabulary shards."""

from sgling_kernel.sampling.adjust import adjust_logits, commit_counts
from sgling_kernel.sampling.logprobs import log_normalizer, token_logprobs, top_logprobs
from sgling_kernel.sampling.reference import target_scores
from sgling_kernel.sampling.types import AdjustInputs, SamplingFlags, SamplingTables, ShardReduce, SingleShard

__all__ = [
    "AdjustInputs",
    "SamplingFlags",
    "SamplingTables",
    "ShardReduce",
    "SingleShard",
    "adjust_logits",
    "commit_counts",
    "log_normalizer",
    "target_scores",
    "token_logprobs",
    "top_logprobs",
]
