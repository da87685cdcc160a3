"""``sgling eval gsm8k``: upstream's few-shot script on any JSONL of its format, or the built-in arithmetic set.

As upstream's: the first ``--num-shots`` lines are both the examples and part of the scored set, an answer is the last
run of digits (no sign, no decimals), and labels go through the same extraction.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sgling.bench.backends import RequestOptions
from sgling.bench.dataset_files import read_entries
from sgling.bench.datasets import Prompt
from sgling.bench.evals.runner import Answers, answer_all
from sgling.bench.gate.correctness_command import ERRORS
from sgling.bench.gate.subject import OpenSubject, open_subject
from sgling.bench.scenarios import first_turn, scenario_samples
from sgling.srt.config.eval_args import Gsm8kArgs
from sgling.training.generator.base import Sample

INVALID = -9999999  # upstream's mark of an answer without a number
STOPS = ["Question", "Assistant:", "<|separator|>"]
_SEED = 11


class Question(NamedTuple):
    """A question, its worked answer, and the generator's sample for built-in ones."""

    question: str
    answer: str
    sample: Sample | None = None


def answer_value(text: str) -> int:
    """The last run of digits once commas are gone; INVALID for none, or one like 007."""
    runs = re.findall(r"\d+", text.replace(",", ""))
    if not runs or (runs[-1].startswith("0") and runs[-1].strip("0")):
        return INVALID
    return int(runs[-1])


def read_questions(path: str, count: int) -> list[Question]:
    """The first ``count`` lines of a file. Raises ValueError naming an entry without question or answer."""
    questions = []
    for number, entry in enumerate(read_entries(path)[:count], 1):
        if not isinstance(entry.get("question"), str) or not isinstance(entry.get("answer"), str):
            raise ValueError(f"{path}: entry {number} needs question and answer")
        questions.append(Question(entry["question"], entry["answer"]))
    if not questions:
        raise ValueError(f"{path}: no question")
    return questions


def builtin_questions(count: int) -> list[Question]:
    """Held-out problems of the arithmetic scenario whose result is not negative (the extraction knows no sign)."""
    samples = scenario_samples(("arithmetic",), 2 * count, _SEED)
    chosen = [sample for sample in samples if sample.check["value"] >= 0][:count]
    return [Question(first_turn(sample)[-1]["content"], _worked(sample), sample) for sample in chosen]


def _worked(sample: Sample) -> str:
    reply = next(message for message in sample.messages if message["role"] == "assistant")
    return f"{reply.get('reasoning_content', '')} {reply['content']}".strip()


def few_shot_prompt(examples: Sequence[Question], question: Question) -> str:
    """Worked examples, then the open question."""
    shots = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in examples)
    return f"{shots}Question: {question.question}\nAnswer:"


def make_prompts(args: Gsm8kArgs, questions: Sequence[Question], subject: OpenSubject) -> list[Prompt]:
    """The prompts of the chosen format."""
    if args.prompt_format == "few-shot":
        texts = [few_shot_prompt(questions[: args.num_shots], question) for question in questions]
    else:
        texts = [_chat_prompt(question, subject) for question in questions]
    return [Prompt(subject.tokenizer.encode(text), text, args.max_new_tokens) for text in texts]


def _chat_prompt(question: Question, subject: OpenSubject) -> str:
    template = subject.need_template()
    if question.sample is None:
        return template.render([{"role": "user", "content": question.question}], None, add_generation_prompt=True)
    messages, thinking = first_turn(question.sample), question.sample.enable_thinking
    return template.render(messages, None, add_generation_prompt=True, enable_thinking=thinking)


class Score(NamedTuple):
    """Shares of all questions."""

    accuracy: float
    invalid: float


def score(questions: Sequence[Question], answers: Sequence[str]) -> Score:
    """Accuracy and the share of answers without a number."""
    found = [answer_value(answer) for answer in answers]
    labels = [answer_value(question.answer) for question in questions]
    count = len(questions)
    right = sum(value == label for value, label in zip(found, labels, strict=True))
    return Score(right / count, sum(value == INVALID for value in found) / count)


async def evaluate(args: Gsm8kArgs) -> tuple[list[Question], Answers]:
    """Ask everything."""
    questions = read_questions(args.data_path, args.num_questions) if args.data_path else None
    questions = questions or builtin_questions(args.num_questions)
    stops = {"stop": STOPS} if args.prompt_format == "few-shot" else {}
    options = RequestOptions(args.temperature, ignore_eos=False, sampling=stops)
    async with open_subject(args) as subject:
        prompts = make_prompts(args, questions, subject)
        return questions, await answer_all(subject.target, prompts, options, args)


def main(argv: Sequence[str]) -> int:
    """Command-line entry; prints upstream's four lines."""
    args = Gsm8kArgs.read(argv, "sgling eval gsm8k")
    try:
        questions, answers = asyncio.run(evaluate(args))
    except ERRORS as error:
        print(f"sgling eval gsm8k: error: {error}", file=sys.stderr)
        return 1
    texts = [result.text for result in answers.results]
    scored = score(questions, texts)
    print(f"Accuracy: {scored.accuracy:.3f}")
    print(f"Invalid: {scored.invalid:.3f}")
    print(f"Latency: {answers.latency:.3f} s")
    print(f"Output throughput: {answers.throughput:.3f} token/s")
    if args.json:
        facts = {"latency": answers.latency, "output_throughput": answers.throughput, "num_questions": len(questions)}
        facts |= {"accept_length": answers.accept_length, "answers": texts, "prompt": args.prompt_format}
        Path(args.json).write_text(json.dumps({**scored._asdict(), **facts}, ensure_ascii=False, indent=1) + "\n")
    return 0
