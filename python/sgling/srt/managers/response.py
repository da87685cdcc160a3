"""Builds the native answer of one completion: text, ids and ``meta_info``, cumulative over scheduler increments."""

from __future__ import annotations

import time
from typing import NamedTuple

from sgling.srt.managers.detokenizer import IncrementalDetokenizer
from sgling.srt.managers.io_struct import FinishReason, RequestLogprobs, RequestOutput, SpecCounters, TokenLogprob
from sgling.srt.managers.text_codec import TextCodec

WEIGHT_VERSION = "default"


class ResponseOptions(NamedTuple):
    """What one completion's answer carries beside text and ids.

    Attributes:
        rid: the client's request id (``meta_info.id``).
        index: position in a batch or among n choices, None for a single completion.
        top_logprobs, token_ids_logprobs: whether those lists were asked for.
        logprob_text: fill the third element of logprob triples.
        reasoning_end_ids: the completion counts as reasoning until one of these ids.
        prompt_token_ids: ids to echo in ``meta_info``, or None.
        speculative: whether ``spec_*`` fields are reported.
    """

    rid: str
    index: int | None
    return_logprob: bool
    top_logprobs: bool
    token_ids_logprobs: bool
    logprob_text: bool
    reasoning_end_ids: frozenset[int]
    prompt_token_ids: list[int] | None
    speculative: bool


class ResponseBuilder:
    """Accumulates the increments of one completion."""

    def __init__(
        self, options: ResponseOptions, codec: TextCodec | None, detokenizer: IncrementalDetokenizer | None, now: float
    ):
        self.options = options
        self._codec = codec if options.logprob_text else None
        self._detokenizer = detokenizer
        self._created = now
        self._text = ""
        self._ids: list[int] = []
        self._reasoning_tokens = 0
        self._reasoning_open = bool(options.reasoning_end_ids)
        self._input_logprobs = self._triples("input", RequestLogprobs())
        self._output_logprobs = self._triples("output", RequestLogprobs())
        self._accepted_runs: list[int] = []

    def apply(self, output: RequestOutput) -> dict:
        """Append one increment; returns the answer so far (shares nothing that later increments change)."""
        self._ids.extend(output.new_ids)
        if self._detokenizer is not None:
            self._text = self._detokenizer.push(output.new_ids, output.finished_reason)
        self._count_reasoning(output.new_ids)
        if output.spec is not None:
            self._accepted_runs.extend(output.spec.run_lengths)
        if self.options.return_logprob:
            self._collect_logprobs(output)
        answer = {"text": self._text, "output_ids": self._ids.copy(), "meta_info": self._meta_info(output)}
        if self.options.index is not None:
            answer["index"] = self.options.index
        return answer

    def _count_reasoning(self, new_ids: list[int]) -> None:
        """Reasoning tokens are those up to and including the end marker, counted on emitted tokens only."""
        for token_id in new_ids:
            if not self._reasoning_open:
                return
            self._reasoning_tokens += 1
            self._reasoning_open = token_id not in self.options.reasoning_end_ids

    def _meta_info(self, output: RequestOutput) -> dict:
        reason = output.finished_reason
        meta = {
            "id": self.options.rid,
            "finish_reason": None if reason is None else reason.to_json(),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "reasoning_tokens": self._reasoning_tokens,
            "cached_tokens": output.cached_tokens,
            "cached_tokens_details": {"device": output.cached_tokens, "host": 0},
            "weight_version": WEIGHT_VERSION,
            "num_retractions": output.num_retractions,
            "dp_rank": None,
        }
        if self.options.prompt_token_ids is not None:
            meta["prompt_token_ids"] = self.options.prompt_token_ids
        if self.options.return_logprob:
            meta.update(self._input_logprobs)
            meta.update({name: entries.copy() for name, entries in self._output_logprobs.items()})
            meta["output_token_logprobs_length"] = len(self._output_logprobs["output_token_logprobs"])
        if reason is not None:
            now = time.time()
            meta["e2e_latency"] = now - self._created
            meta["response_sent_to_client_ts"] = now
            if self.options.speculative:
                meta.update(_spec_fields(output, self._accepted_runs))
        return meta

    def _collect_logprobs(self, output: RequestOutput) -> None:
        if output.input_logprobs is not None:
            self._input_logprobs = self._triples("input", output.input_logprobs)
        if output.logprobs is not None:
            for name, entries in self._triples("output", output.logprobs).items():
                self._output_logprobs[name].extend(entries)

    def _triples(self, side: str, logprobs: RequestLogprobs) -> dict[str, list]:
        """Upstream's lists: ``{side}_token_logprobs`` and, where asked for, ``_top_`` and ``_token_ids_``."""
        found: dict[str, list] = {f"{side}_token_logprobs": [self._triple(entry) for entry in logprobs.tokens]}
        if self.options.top_logprobs:
            found[f"{side}_top_logprobs"] = self._rows(logprobs.top)
        if self.options.token_ids_logprobs:
            found[f"{side}_token_ids_logprobs"] = self._rows(logprobs.token_ids)
        return found

    def _rows(self, rows: list[list[TokenLogprob]]) -> list:
        """One list of triples per token; null where there is none (first prompt token)."""
        return [[self._triple(entry) for entry in row] if row else None for row in rows]

    def _triple(self, entry: TokenLogprob) -> list:
        text = None if self._codec is None else self._codec.decode([entry.token_id], skip_special_tokens=False)
        return [entry.logprob, entry.token_id, text]


def _spec_fields(output: RequestOutput, accepted_runs: list[int]) -> dict:
    """Upstream's speculation fields of the last chunk, plus ours: tokens of each step, widths and their reason."""
    spec = output.spec or SpecCounters()
    return {
        "spec_verify_ct": spec.verify_ct,
        "spec_accept_length": output.completion_tokens / spec.verify_ct if spec.verify_ct else 0.0,
        "spec_num_correct_drafts": spec.correct_drafts,
        "spec_num_proposed_drafts": spec.proposed_drafts,
        "spec_accept_rate": spec.correct_drafts / spec.proposed_drafts if spec.proposed_drafts else 0.0,
        "spec_correct_drafts_histogram": list(spec.accept_histogram),
        "spec_accepted_runs": list(accepted_runs),
        "spec_width_histogram": list(spec.width_histogram),
        "spec_depth_reason": spec.depth_reason,
    }


def is_failure(reason: FinishReason | None) -> bool:
    """Whether a finish is an error of the server (an abort with a status), not an end the client asked for."""
    return reason is not None and reason.type == "abort" and reason.status_code is not None


def one_or_list(answers: list[dict]) -> dict | list[dict]:
    """The answer of a single completion, or the list of a batch (in order, so without ``index``)."""
    if "index" not in answers[0]:
        return answers[0]
    return [{name: value for name, value in answer.items() if name != "index"} for answer in answers]
