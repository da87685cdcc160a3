"""A step that has been enqueued: what the host needs to process its result later."""

from __future__ import annotations

from typing import NamedTuple

from sgling.srt.core.step import LogprobRequest
from sgling.srt.managers.prefill import PrefillChunk
from sgling.srt.managers.request import Req
from sgling.srt.model_executor.result_copy import ResultHandle


class Launched(NamedTuple):
    """One enqueued step.

    Attributes:
        reqs: requests in row order; one for a prefill chunk.
        result: the packed result on its way to the host.
        width: rows per request (1 for prefill).
        chunk: the prefill chunk, None for a decode step.
        logprobs: what the step was asked to return.
    """

    reqs: list[Req]
    result: ResultHandle
    width: int
    chunk: PrefillChunk | None
    logprobs: LogprobRequest | None
