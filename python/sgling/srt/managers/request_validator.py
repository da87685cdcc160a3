"""Checks of a request against the model's and the server's limits, before anything is scheduled.

Statuses and rules are upstream's: only what upstream refuses is refused. Every message names the value or both numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sgling.srt.config.spec_config import SpecConfig
from sgling.srt.managers.generate_req import RequestError, RequestItem, show
from sgling.srt.managers.io_struct import TokenizedGenerateReqInput
from sgling.srt.managers.text_codec import TextCodec
from sgling.srt.sampling.sampling_params import SamplingParams, SamplingParamsError

SURELY_TOKENISED = 100_000  # characters; a text that short is not judged by its length
MAX_TOP_LOGPROBS = 1024  # documented maximum of top_logprobs_num on every route (or the vocabulary, if smaller)


class RequestLimits(NamedTuple):
    """What bounds a request.

    Attributes:
        vocab_size: rows of the embedding; ids must be below.
        context_len: prompt plus output, tokens.
        max_req_input_len: longest prompt the KV pool can take, tokens.
        reserve: tokens kept free for draft tokens (:func:`context_reserve`).
        max_width: widest verify step of the server, 1 without speculation.
    """

    vocab_size: int
    context_len: int
    max_req_input_len: int
    reserve: int
    max_width: int

    @property
    def longest_prompt(self) -> int:
        """Most tokens a prompt may have."""
        return min(self.context_len - self.reserve - 1, self.max_req_input_len)


def context_reserve(spec: SpecConfig) -> int:
    """Tokens upstream keeps free behind the last one: max(topk * steps, draft tokens) with NEXTN, else 0."""
    return max(spec.topk * spec.num_steps, spec.num_draft_tokens) if spec.algorithm == "NEXTN" else 0


def read_params(
    entry: dict | SamplingParams, preferred: dict | None, codec: Any | None, vocab_size: int
) -> SamplingParams:
    """Verified parameters of a ``sampling_params`` entry; raises :class:`RequestError` (400).

    ``preferred`` fills keys that a dict leaves unset or null (``--preferred-sampling-params``).
    """
    try:
        if isinstance(entry, dict) and preferred:
            entry = {**preferred, **{name: value for name, value in entry.items() if value is not None}}
        params = entry if isinstance(entry, SamplingParams) else SamplingParams.from_dict(entry)
        params.normalize(codec)
        params.verify(vocab_size)
    except SamplingParamsError as error:
        # upstream sends an unknown key's message as a bare string
        raise RequestError(str(error), plain=str(error).startswith("unknown sampling parameter")) from error
    return params


def tokenized_request(
    item: RequestItem, input_ids: list[int], stream: bool, limits: RequestLimits
) -> TokenizedGenerateReqInput:
    """The scheduler's form of one item; raises :class:`RequestError` when it breaks a limit."""
    _check_lengths(item, input_ids, limits)
    _check_vocabulary("input_ids", input_ids, limits.vocab_size)
    _check_logprobs(item, len(input_ids), limits.vocab_size)
    if item.speculative is not None and item.speculative > limits.max_width:
        raise RequestError(f"speculative.max_width must be in [1, {limits.max_width}], got {item.speculative}")
    return TokenizedGenerateReqInput(
        rid=item.rid,
        input_ids=input_ids,
        sampling_params=item.sampling_params,
        stream=stream,
        return_logprob=item.return_logprob,
        logprob_start_len=item.logprob_start_len if item.return_logprob else -1,
        top_logprobs_num=item.top_logprobs_num if item.return_logprob else 0,
        token_ids_logprob=item.token_ids_logprob if item.return_logprob else [],
        speculative_max_width=item.speculative,
    )


def refuse_hopeless(text: str, codec: TextCodec, limits: RequestLimits) -> None:
    """Refuse a text that is too long however it is tokenised: tokenising tens of megabytes takes minutes."""
    if len(text) <= SURELY_TOKENISED:
        return
    most = codec.most_chars_per_token
    if most is not None and len(text) > most * limits.longest_prompt:
        raise RequestError(_too_long(-(-len(text) // most), limits, "at least "))


def _check_vocabulary(name: str, ids: list[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name}: token id {show(token_id)} is outside the vocabulary [0, {vocab_size})")


def _check_lengths(item: RequestItem, input_ids: list[int], limits: RequestLimits) -> None:
    """Apply the length rules."""
    if not input_ids:
        raise RequestError("The prompt is empty")
    if len(input_ids) > limits.longest_prompt:
        raise RequestError(_too_long(len(input_ids), limits))
    wanted = item.sampling_params.max_new_tokens
    total = len(input_ids) + limits.reserve + (wanted or 0)
    if total > limits.context_len and item.max_new_tokens_given:
        reserve = f" and {limits.reserve} reserved for draft tokens" if limits.reserve else ""
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {limits.context_len} tokens: "
            f"{total} tokens are {len(input_ids)} of the prompt and {wanted} of the completion{reserve}"
        )


def _too_long(length: int, limits: RequestLimits, about: str = "") -> str:
    if length + limits.reserve >= limits.context_len:
        reserve = f" plus {limits.reserve} tokens reserved for drafts" if limits.reserve else ""
        return (
            f"The input ({about}{length} tokens{reserve}) is longer than the model's maximum context length "
            f"({limits.context_len} tokens)"
        )
    return f"The input ({about}{length} tokens) exceeds the maximum allowed length ({limits.max_req_input_len} tokens)"


def _check_logprobs(item: RequestItem, prompt_len: int, vocab_size: int) -> None:
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    if item.top_logprobs_num > most:
        raise RequestError(f"top_logprobs_num must be in [0, {most}], got {item.top_logprobs_num}")
    _check_vocabulary("token_ids_logprob", item.token_ids_logprob, vocab_size)
    if item.return_logprob and item.logprob_start_len > prompt_len:
        raise RequestError(
            f"logprob_start_len ({item.logprob_start_len}) is larger than the prompt ({prompt_len} tokens)"
        )
