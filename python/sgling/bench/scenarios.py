"""The built-in scenarios: held-out prompts of the embedded model's generator, with judges for the answers.

They are ours, seeded and machine-checkable, so accept length and task success can be measured anywhere, offline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sgling.bench.datasets import Prompt
from sgling.bench.result import RequestResult
from sgling.bench.tokenizer import BenchTokenizer
from sgling.srt.config.bench_args import SCENARIO_DATASETS
from sgling.training.checks import judge
from sgling.training.generator.base import HELD_OUT, Sample
from sgling.training.generator.mix import draw

*SCENARIOS, ALL_SCENARIOS = SCENARIO_DATASETS  # the last name stands for all of them in turn


def first_turn(sample: Sample) -> list[dict[str, Any]]:
    """The conversation up to its first answer."""
    end = next(i for i, message in enumerate(sample.messages) if message["role"] == "assistant")
    return sample.messages[:end]


def scenario_prompt(sample: Sample, template: Any, tokenizer: BenchTokenizer, output_len: int) -> Prompt:
    """A prompt of a sample: through the chat template, or raw (``template`` None): the user's words alone."""
    messages = first_turn(sample)
    kwargs = {"enable_thinking": sample.enable_thinking}
    if template is None:
        text = messages[-1]["content"]
    else:
        text = template.render(messages, sample.tools, add_generation_prompt=True, **kwargs)
    return Prompt(tokenizer.encode(text), text, output_len, messages, sample.tools, kwargs, sample.scenario, sample)


def scenario_samples(names: Sequence[str], count: int, seed: int) -> list[Sample]:
    """``count`` held-out samples, the scenarios in turn."""
    return [draw(names[i % len(names)], f"bench:{seed}:{i // len(names)}", HELD_OUT) for i in range(count)]


def judge_answer(prompt: Prompt, result: RequestResult) -> dict[str, bool]:
    """Named yes / no results of one answer. Calls that the server has parsed (chat) are taken as they are."""
    reason = result.meta_info.get("finish_reason") or {}
    ended = reason.get("type") in ("stop", "tool_calls")
    if not result.tool_calls:
        return judge(prompt.sample, result.text, ended)
    calls = parsed_calls(result)
    wanted = (prompt.sample.check or {}).get("calls", [])
    return {"ended": ended, "parses": calls is not None, "exact": calls == wanted}


def parsed_calls(result: RequestResult) -> list[dict[str, Any]] | None:
    """Calls of a chat answer with decoded arguments; None when arguments are not a JSON object."""
    calls = []
    for call in result.tool_calls:
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError:
            return None
        if not isinstance(arguments, dict):
            return None
        calls.append({"name": call["name"], "arguments": arguments})
    return calls


def passed(results: dict[str, bool]) -> bool:
    """Whether every judgement of an answer is good; the end token counts as one of them."""
    return all(results.values())


def success_rate(pairs: Iterable[tuple[Prompt, RequestResult]]) -> float | None:
    """Share of answers that pass; a failed request does not pass; None for no prompt with a judge."""
    judged = [
        result.success and passed(judge_answer(prompt, result))
        for prompt, result in pairs
        if prompt.sample is not None and prompt.sample.check is not None
    ]
    return sum(judged) / len(judged) if judged else None
