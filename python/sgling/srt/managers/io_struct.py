"""Messages between the tokenizer process and the scheduler (msgspec structs; never pickled).

Requests flow down (tokenizer -> scheduler), outputs flow up. Every struct is tagged, so one decoder reads them all.
Token ids in outputs are increments: what the scheduler committed since its previous message about that request.
"""

from __future__ import annotations

import msgspec

from sgling.srt.sampling.sampling_params import SamplingParams


class TokenizedGenerateReqInput(msgspec.Struct, tag=True):
    """One request, tokenised and validated. ``sampling_params`` is normalised (:meth:`SamplingParams.normalize`)."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1  # -1: no prompt logprobs; else logprobs of prompt tokens from this index on
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = []
    speculative_max_width: int | None = None  # widest verify step of this request; None: the server's


class AbortReq(msgspec.Struct, tag=True):
    """Abort one request, or all of them. ``status_code``: the end is a failure of the server with this HTTP status."""

    rid: str = ""
    abort_all: bool = False
    message: str = "Aborted by the client"
    status_code: int | None = None


class FlushCacheReqInput(msgspec.Struct, tag=True):
    """Reset caches and the accept-length average; only done when idle (waits up to ``timeout`` seconds)."""

    req_id: str
    timeout: float = 0.0


class GetInternalStateReq(msgspec.Struct, tag=True):
    """Ask for the scheduler's internal state (``/server_info``, ``/metrics``)."""

    req_id: str


class ProfileReq(msgspec.Struct, tag=True):
    """Start (``stop`` false) or stop a profile; see :class:`sgling.srt.managers.profiler.SchedulerProfiler`."""

    req_id: str
    stop: bool = False
    output_dir: str | None = None
    start_step: int = 0
    num_steps: int | None = None  # None: until stopped
    activities: list[str] = []
    profile_prefix: str | None = None
    record_shapes: bool = False
    with_stack: bool = False


class ShutdownReq(msgspec.Struct, tag=True):
    """Stop the scheduler loop. Running requests are aborted; draining is the sender's business."""


class FinishReason(msgspec.Struct):
    """Why a request ended. ``type``: stop | length | abort; ``matched``: token id or stop string."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None

    def to_json(self) -> dict:
        """The ``finish_reason`` object of upstream's ``/generate``."""
        keep = {"stop": ("matched",), "length": ("length",), "abort": ("message", "status_code", "err_type")}
        return {"type": self.type, **{name: getattr(self, name) for name in keep[self.type]}}


class TokenLogprob(msgspec.Struct, array_like=True):
    """Logprob of one token."""

    logprob: float | None
    token_id: int


class RequestLogprobs(msgspec.Struct):
    """Logprobs of one increment: entry i belongs to the i-th new token."""

    tokens: list[TokenLogprob] = []
    top: list[list[TokenLogprob]] = []  # empty lists when top_logprobs_num == 0
    token_ids: list[list[TokenLogprob]] = []  # token_ids_logprob, in the order asked


class SpecCounters(msgspec.Struct):
    """Speculation counters of one request (cumulative).

    ``accept_histogram[i]`` counts verify steps in which exactly i drafts were accepted (0..W-1).
    """

    verify_ct: int = 0
    correct_drafts: int = 0
    proposed_drafts: int = 0
    accept_histogram: list[int] = []
    run_lengths: list[int] = []  # tokens committed by each step of THIS increment (for showing accepted runs)
    width_histogram: list[int] = []  # entry i: steps that were i + 1 rows wide
    depth_reason: str = ""  # why they were; set when the request ends


class RequestOutput(msgspec.Struct):
    """Increment of one request.

    ``new_ids`` are emitted tokens only (through the stop, never past it). ``completion_tokens`` is cumulative.
    When a stop string ended the request, the ids go through the matching token and the detokenizer cuts the text before
    the match (``finished_reason.matched``) unless ``no_stop_trim``.
    """

    rid: str
    new_ids: list[int]
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    num_retractions: int = 0
    finished_reason: FinishReason | None = None
    logprobs: RequestLogprobs | None = None
    input_logprobs: RequestLogprobs | None = None  # sent once, with the first increment
    spec: SpecCounters | None = None


class BatchTokenIDOutput(msgspec.Struct, tag=True):
    """Increments of one scheduler step."""

    outputs: list[RequestOutput]


class FlushCacheReqOutput(msgspec.Struct, tag=True):
    """Answer to :class:`FlushCacheReqInput`."""

    req_id: str
    success: bool
    message: str = ""


class GetInternalStateReqOutput(msgspec.Struct, tag=True):
    """Answer to :class:`GetInternalStateReq`: plain JSON, see ``internal_state.snapshot``."""

    req_id: str
    state: dict


class ProfileReqOutput(msgspec.Struct, tag=True):
    """Answer to :class:`ProfileReq`; ``files`` are rank 0's."""

    req_id: str
    success: bool
    message: str = ""
    files: list[str] = []


class SchedulerReady(msgspec.Struct, tag=True):
    """First message of a scheduler: what it can serve."""

    max_total_num_tokens: int
    max_req_input_len: int
    max_running_requests: int
    context_len: int
    info: dict = {}


class SchedulerDied(msgspec.Struct, tag=True):
    """Last message of a scheduler that failed; every waiting request gets ``message``."""

    message: str


SchedulerInput = (
    TokenizedGenerateReqInput | AbortReq | FlushCacheReqInput | GetInternalStateReq | ProfileReq | ShutdownReq
)
ControlOutput = FlushCacheReqOutput | GetInternalStateReqOutput | ProfileReqOutput
SchedulerOutput = BatchTokenIDOutput | ControlOutput | SchedulerReady | SchedulerDied
