"""Token counts of a response, and the details behind them that clients may ask for."""

from __future__ import annotations

from typing import Any

SPEC_SUMS = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")


def usage_body(prompt: int, completion: int, reasoning: int, cached: int | None) -> dict[str, Any]:
    """The ``usage`` object; ``cached`` None leaves the prompt's details out."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "reasoning_tokens": reasoning,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning} if reasoning else None,
    }


class UsageCounter:
    """Keeps the latest ``meta_info`` of every choice of one request.

    ``choices_per_prompt`` choices share a prompt, which counts once. ``cache_report``: fill ``prompt_tokens_details``.
    """

    def __init__(self, choices_per_prompt: int, cache_report: bool) -> None:
        self._n = choices_per_prompt
        self._cache_report = cache_report
        self._latest: dict[int, dict[str, Any]] = {}

    def update(self, index: int, meta: dict[str, Any]) -> None:
        """Note a native answer of choice ``index``."""
        self._latest[index] = meta

    def of(self, index: int) -> dict[str, Any]:
        """Usage of one choice so far (``continuous_usage_stats``)."""
        meta = self._latest[index]
        cached = meta["cached_tokens"] if self._cache_report else None
        return usage_body(meta["prompt_tokens"], meta["completion_tokens"], meta.get("reasoning_tokens", 0), cached)

    def total(self) -> dict[str, Any]:
        """Usage of the whole request."""
        prompts = {index // self._n: meta for index, meta in sorted(self._latest.items(), reverse=True)}
        cached = sum(meta["cached_tokens"] for meta in prompts.values()) if self._cache_report else None
        return usage_body(
            sum(meta["prompt_tokens"] for meta in prompts.values()),
            sum(meta["completion_tokens"] for meta in self._latest.values()),
            sum(meta.get("reasoning_tokens", 0) for meta in self._latest.values()),
            cached,
        )

    def extension(self, spec: bool, cached: bool) -> dict[str, Any] | None:
        """The ``sglext`` object: details of speculation and of the prefix cache; None when nothing was asked for."""
        found: dict[str, Any] = {}
        if spec:
            found["spec_tokens_details"] = self._spec_details()
        if cached:
            first = self._latest[min(self._latest)]
            found["cached_tokens_details"] = first.get("cached_tokens_details")
        return found or None

    def _spec_details(self) -> dict[str, Any] | None:
        """Speculation counters summed over all choices; None when speculation is off."""
        metas = [meta for meta in self._latest.values() if "spec_verify_ct" in meta]
        if not metas:
            return None
        verify, correct, proposed = (sum(meta[name] for meta in metas) for name in SPEC_SUMS)
        emitted = sum(meta["completion_tokens"] for meta in metas)
        return {
            "verify_ct": verify,
            "num_correct_drafts": correct,
            "num_proposed_drafts": proposed,
            "accept_length": emitted / verify if verify else 0.0,
            "accept_rate": correct / proposed if proposed else 0.0,
        }
