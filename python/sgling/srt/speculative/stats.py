"""Acceptance and throughput counters of a scheduler."""

from __future__ import annotations

import time


class SpecStats:
    """Lifetime averages (reset by a cache flush) and the figures of the decode log line."""

    def __init__(self) -> None:
        self.verify_ct = 0
        self.accepted_tokens = 0
        self.proposed_drafts = 0
        self.generated_tokens = 0
        self.last_gen_throughput = 0.0
        self._interval_start = time.perf_counter()
        self._interval_tokens = 0
        self._interval_verify = 0
        self._interval_accepted = 0
        self._interval_proposed = 0

    def reset(self) -> None:
        """Forget the lifetime averages."""
        self.verify_ct = self.accepted_tokens = self.proposed_drafts = 0

    def add(self, accepted: int, width: int) -> None:
        """Book one request's verify: ``accepted`` tokens (bonus included) out of a window of ``width``."""
        self.verify_ct += 1
        self.accepted_tokens += accepted
        self.proposed_drafts += width - 1
        self._interval_verify += 1
        self._interval_accepted += accepted
        self._interval_proposed += width - 1

    def add_tokens(self, count: int) -> None:
        """Book emitted tokens."""
        self.generated_tokens += count
        self._interval_tokens += count

    @property
    def avg_accept_length(self) -> float:
        """Tokens per verify since the last reset; 0 before the first verify."""
        return self.accepted_tokens / self.verify_ct if self.verify_ct else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted drafts / proposed drafts since the last reset; 0 when none was proposed."""
        correct = self.accepted_tokens - self.verify_ct
        return correct / self.proposed_drafts if self.proposed_drafts else 0.0

    def take_interval(self) -> tuple[float, float, float]:
        """(tokens/s, accept length, accept rate) since the previous call."""
        now = time.perf_counter()
        seconds = max(now - self._interval_start, 1e-9)
        verify, accepted, proposed = self._interval_verify, self._interval_accepted, self._interval_proposed
        self.last_gen_throughput = self._interval_tokens / seconds
        self._interval_start = now
        self._interval_tokens = self._interval_verify = self._interval_accepted = self._interval_proposed = 0
        accept_length = accepted / verify if verify else 0.0
        return self.last_gen_throughput, accept_length, (accepted - verify) / proposed if proposed else 0.0
