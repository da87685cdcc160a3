"""``sgling eval tools``: the tool-calling scenario: are calls exact, well-formed and offered?"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sgling.bench.backends import RequestOptions
from sgling.bench.contract.measure import has_invalid_call
from sgling.bench.datasets import Prompt
from sgling.bench.evals.runner import Answers, answer_all
from sgling.bench.gate.correctness_command import ERRORS
from sgling.bench.gate.subject import open_subject
from sgling.bench.scenarios import judge_answer, scenario_prompt, scenario_samples
from sgling.bench.target import BenchError
from sgling.srt.config.eval_args import ToolsArgs


async def evaluate(args: ToolsArgs) -> tuple[list[Prompt], Answers]:
    """Ask everything."""
    is_chat = args.backend.endswith("-chat")
    sampling = {} if is_chat else {"skip_special_tokens": False}
    async with open_subject(args, args.backend) as subject:
        if is_chat and (await subject.target.info()).get("tool_call_parser", "unknown") is None:
            raise BenchError("this server finds no tool calls: start it with --tool-call-parser auto")
        samples = scenario_samples(("tool_calling",), args.num_questions, args.seed)
        template = subject.template if is_chat else subject.need_template()
        prompts = [scenario_prompt(sample, template, subject.tokenizer, args.max_new_tokens) for sample in samples]
        options = RequestOptions(args.temperature, ignore_eos=False, model=subject.model, sampling=sampling)
        return prompts, await answer_all(subject.target, prompts, options, args)


def scores(prompts: Sequence[Prompt], answers: Answers) -> dict[str, float | None]:
    """Shares of all prompts."""
    pairs = list(zip(prompts, answers.results, strict=True))
    judged = [judge_answer(prompt, result) for prompt, result in pairs]
    count = len(pairs)
    return {
        "exact": sum(results["exact"] for results in judged) / count,
        "invalid_calls": sum(has_invalid_call(prompt, result) for prompt, result in pairs) / count,
        "ended": sum(results["ended"] for results in judged) / count,
        "latency": answers.latency,
        "output_throughput": answers.throughput,
        "accept_length": answers.accept_length,
    }


def main(argv: Sequence[str]) -> int:
    """Command-line entry."""
    args = ToolsArgs.read(argv, "sgling eval tools")
    try:
        prompts, answers = asyncio.run(evaluate(args))
    except ERRORS as error:
        print(f"sgling eval tools: error: {error}", file=sys.stderr)
        return 1
    found = scores(prompts, answers)
    accept = "-" if found["accept_length"] is None else f"{found['accept_length']:.3f}"
    print(f"Exact calls: {found['exact']:.3f}")
    print(f"Invalid calls: {found['invalid_calls']:.3f}")
    print(f"Ended: {found['ended']:.3f}")
    print(f"Latency: {found['latency']:.3f} s")
    print(f"Output throughput: {found['output_throughput']:.3f} token/s")
    print(f"Accept length: {accept}")
    if args.json:
        texts = [result.text for result in answers.results]
        Path(args.json).write_text(json.dumps({**found, "answers": texts}, ensure_ascii=False, indent=1) + "\n")
    return 0
