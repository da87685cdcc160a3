"""What one request did, and the one place where arrivals become TTFT, latency and inter-token gaps."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RequestResult:
    """One request. Times are seconds of ``perf_counter``; lengths are tokens.

    Attributes:
        input_len: asked prompt length; the server's count is ``meta_info["prompt_tokens"]``.
        label: scenario the prompt belongs to, "" for none.
        streamed: False for one-shot answers, which have no TTFT, TPOT and ITL.
        start: immediately before the request was sent.
        ttft: start to the first line with text (an answer that decodes to no text at all: with a token).
        latency: start to the last line, ``[DONE]`` included.
        itl: one gap per token after the first line; a line's gap is split evenly over its tokens.
        output_len: tokens as the server counted them; ``len_estimated`` where it counted none and text was tokenised.
        text, reasoning, tool_calls: the answer; ``output_ids`` where the server returns ids.
        meta_info: facts of the last line in native spelling (``prompt_tokens``, ``finish_reason``, ``spec_*``).
    """

    input_len: int
    requested_output_len: int
    label: str = ""
    streamed: bool = True
    success: bool = False
    error: str = ""
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_len: int = 0
    len_estimated: bool = False
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    meta_info: dict = field(default_factory=dict)
    last_arrival: float = 0.0

    def line_arrived(self, now: float) -> None:
        """Any non-empty line of the answer ends the latency so far."""
        self.latency = now - self.start

    def tokens_arrived(self, now: float, total: int) -> None:
        """Text arrived and the answer has ``total`` tokens; text without new tokens moves no clock."""
        if not self.ttft:
            self.ttft = now - self.start
        elif new := total - self.output_len:
            self.itl += [(now - self.last_arrival) / new] * new
        else:
            return
        self.last_arrival, self.output_len = now, total

    def judge(self) -> None:
        """Decide success: the request ran to its end and produced a token."""
        reason = self.meta_info.get("finish_reason")
        if not reason:
            self.error = "the stream ended before the request did"
        elif reason["type"] == "abort":
            self.error = f"aborted: {reason.get('message')}"
        elif not self.output_len:
            self.error = "the answer has no token"
        else:
            self.success = True
