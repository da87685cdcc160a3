"""The correctness gate: greedy answers are exact, whatever happened before and whoever is served beside.

Checks, each named in the report: ``golden`` (byte comparison with a stored answer), ``accept_length``, ``state``
(greedy again after interleaved temperature requests), ``speculation`` (on and off agree), ``company`` (concurrent and
alone agree), ``argmax`` (every token is the target's best when the answer is fed as a prompt, so that a verdict that
accepts wrong drafts is seen even where no golden exists).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sgling.bench.backends import RequestOptions
from sgling.bench.datasets import Prompt
from sgling.bench.gate.golden import Golden, GoldenAnswer, facts_of, first_difference
from sgling.bench.metrics import accept_length
from sgling.bench.result import RequestResult
from sgling.bench.target import BenchError, Target

GREEDY = RequestOptions()
PLAIN = RequestOptions(extra={"speculative": {"enabled": False}})
_NOISY_NEIGHBOURS = 3
_TOP = 2  # alternatives asked for: the best, and the runner-up for the lead


class Check(NamedTuple):
    """One check's outcome: "pass", "fail" or "skip", with what was seen."""

    name: str
    status: str
    detail: str


class Limits(NamedTuple):
    """Tolerances: accept length, and nats below the best that rounding may cause."""

    accept_tolerance: float = 0.05
    argmax_margin: float = 0.1


DEFAULT_LIMITS = Limits()


async def ask(target: Target, prompts: Sequence[Prompt], options: RequestOptions, at_once: bool) -> list[RequestResult]:
    """Answers in prompt order, one after the other or all at once. Raises :class:`BenchError` for a failed one."""
    if at_once:
        results = list(await asyncio.gather(*(target.request(prompt, options) for prompt in prompts)))
    else:
        results = [await target.request(prompt, options) for prompt in prompts]
    for prompt, result in zip(prompts, results, strict=True):
        if not result.success:
            raise BenchError(f"a greedy request ({prompt.label or 'no label'}) failed: {result.error}")
    return results


def compare_answers(name: str, expected: Sequence[GoldenAnswer], results: Sequence[RequestResult], what: str) -> Check:
    """Ids and text must be equal, byte for byte."""
    for number, (answer, result) in enumerate(zip(expected, results, strict=True)):
        difference = first_difference(answer.output_ids, result.output_ids)
        if difference is None and answer.text is not None and answer.text.encode() != result.text.encode():
            difference = "same ids, other text"
        if difference:
            return Check(name, "fail", f"{what}: answer {number} ({answer.label}): {difference}")
    tokens = sum(len(answer.output_ids) for answer in expected)
    return Check(name, "pass", f"{what}: {len(results)} answers, {tokens} tokens, equal")


def as_answers(prompts: Sequence[Prompt], results: Sequence[RequestResult]) -> list[GoldenAnswer]:
    """Results in the form they are compared in."""
    return [
        GoldenAnswer(prompt.label, prompt.ids, result.output_ids, result.text)
        for prompt, result in zip(prompts, results, strict=True)
    ]


def check_accept_length(expected: float | None, results: Sequence[RequestResult], tolerance: float) -> Check:
    """Accept length against the golden's: a drafter that became worse, or a golden that is out of date."""
    found = accept_length(results)
    if expected is None or found is None:
        missing = "the golden" if expected is None else "this server"
        return Check("accept_length", "skip", f"{missing} has none")
    status = "pass" if abs(found - expected) <= tolerance else "fail"
    return Check("accept_length", status, f"{found:.3f}, recorded {expected:.3f}, allowed difference {tolerance}")


async def check_state(target: Target, prompts: Sequence[Prompt], alone: Sequence[GoldenAnswer]) -> Check:
    """Greedy again after temperature requests have run between and beside the greedy ones."""
    for number, prompt in enumerate(prompts):
        noisy = [
            replace(GREEDY, temperature=1.0, sampling={"sampling_seed": 100 * number + i})
            for i in range(_NOISY_NEIGHBOURS)
        ]
        await asyncio.gather(target.request(prompt, GREEDY), *(target.request(prompt, options) for options in noisy))
    again = await ask(target, prompts, GREEDY, at_once=False)
    return compare_answers("state", alone, again, "greedy after interleaved temperature requests")


async def check_speculation(
    target: Target, plain: Target | None, prompts: Sequence[Prompt], alone: Sequence[GoldenAnswer]
) -> Check:
    """The same answers without speculation: per request, or from a server that has none."""
    what = "speculation on and off"
    if plain is not None:
        return compare_answers("speculation", alone, await ask(plain, prompts, GREEDY, at_once=False), what)
    if not is_speculating(await target.info()):
        return Check("speculation", "skip", "speculation is off on this server")
    results = await ask(target, prompts, PLAIN, at_once=False)
    if not all(ran_plain(result) for result in results):
        return Check("speculation", "skip", "this server cannot turn speculation off per request; give --plain-url")
    return compare_answers("speculation", alone, results, what)


def is_speculating(server_info: dict) -> bool:
    """Whether the server speculates (an unknown server is taken to)."""
    return server_info.get("speculative_algorithm", "unknown") is not None


def ran_plain(result: RequestResult) -> bool:
    """Whether a request that asked for no speculation got none: every step was one row wide."""
    widths = result.meta_info.get("spec_width_histogram")
    return widths is not None and not any(widths[1:])


async def leads(target: Target, answer: GoldenAnswer) -> list[tuple[float, float]]:
    """Per output token: (nats below the best token, lead over the runner-up), by feeding the answer as a prompt."""
    prompt = Prompt(answer.input_ids + answer.output_ids, None, 1, label=answer.label)
    extra = {"return_logprob": True, "logprob_start_len": len(answer.input_ids), "top_logprobs_num": _TOP}
    (result,) = await ask(target, [prompt], replace(GREEDY, extra=extra), at_once=False)
    tokens, tops = result.meta_info.get("input_token_logprobs"), result.meta_info.get("input_top_logprobs")
    if not tokens or not tops:
        raise BenchError("the server returned no prompt logprobs")
    found = []
    for (logprob, _id, _text), top in zip(tokens, tops, strict=True):
        found.append((top[0][0] - logprob, top[0][0] - top[1][0]))
    return found


async def check_argmax(target: Target, alone: Sequence[GoldenAnswer], margin: float) -> Check:
    """No token scores more than ``margin`` nats below the target's best token at its place."""
    worst = 0.0
    for number, answer in enumerate(alone):
        for position, (below, _lead) in enumerate(await leads(target, answer)):
            if below > margin:
                detail = f"answer {number} ({answer.label}): token {position} is {below:.2f} nats below the best"
                return Check("argmax", "fail", detail)
            worst = max(worst, below)
    return Check("argmax", "pass", f"every token is the target's best (worst {worst:.4f} nats below, allowed {margin})")


async def check_all(
    target: Target, golden: Golden, plain: Target | None = None, limits: Limits = DEFAULT_LIMITS
) -> list[Check]:
    """All checks, in order. Raises :class:`BenchError` when greedy requests fail."""
    prompts = [answer.prompt() for answer in golden.answers]
    results = await ask(target, prompts, GREEDY, at_once=False)
    alone = as_answers(prompts, results)
    first = compare_answers("golden", golden.answers, results, "stored golden")
    facts = {name: value for name, value in facts_of(await target.info()).items() if value != golden.facts.get(name)}
    if first.status == "fail" and facts:
        recorded = {name: golden.facts.get(name) for name in facts}
        first = first._replace(detail=f"{first.detail} (recorded with {recorded}, this server has {facts})")
    together = await ask(target, prompts, GREEDY, at_once=True)
    return [
        first,
        check_accept_length(golden.accept_length, results, limits.accept_tolerance),
        await check_state(target, prompts, alone),
        await check_speculation(target, plain, prompts, alone),
        compare_answers("company", alone, together, "concurrent and alone"),
        await check_argmax(target, alone, limits.argmax_margin),
    ]


async def record(target: Target, model: str, prompts: Sequence[Prompt], tie_margin: float = 0.0) -> Golden:
    """Record a golden: answers without speculation, accept length with it.

    Answers are cut before the first token whose lead over the runner-up is below ``tie_margin`` (if that is above 0),
    so that another machine's rounding cannot turn it. Raises :class:`BenchError` when speculation changes an answer.
    """
    plain = await ask(target, prompts, PLAIN, at_once=False)
    if is_speculating(await target.info()) and not all(map(ran_plain, plain)):
        raise BenchError("this server cannot turn speculation off per request; record on one that runs without it")
    answers = as_answers(prompts, plain)
    spoken = compare_answers("speculation", answers, await ask(target, prompts, GREEDY, at_once=False), "recording")
    if spoken.status == "fail":
        raise BenchError(f"speculation changes the answers, nothing is recorded: {spoken.detail}")
    if tie_margin > 0:
        answers = [await _cut_at_tie(target, answer, tie_margin) for answer in answers]
    again = await ask(target, [answer.prompt() for answer in answers], GREEDY, at_once=False)
    final = as_answers([answer.prompt() for answer in answers], again)
    return Golden(model, final, accept_length(again), facts_of(await target.info()))


async def _cut_at_tie(target: Target, answer: GoldenAnswer, tie_margin: float) -> GoldenAnswer:
    close = (i for i, (_below, lead) in enumerate(await leads(target, answer)) if lead < tie_margin)
    end = max(next(close, len(answer.output_ids)), 1)
    return replace(answer, output_ids=answer.output_ids[:end])
