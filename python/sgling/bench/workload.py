"""From bench flags to prompts: which data set, which lengths, which template."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from sgling.bench.dataset_files import FileLimits, as_chat, openai_prompts, sharegpt_prompts, sharegpt_texts
from sgling.bench.dataset_shared import SharedPrefixShape, shared_prefix_prompts
from sgling.bench.datasets import Prompt, RandomShape, packaged_texts, random_id_prompts, random_text_prompts
from sgling.bench.scenarios import ALL_SCENARIOS, SCENARIOS, scenario_prompt, scenario_samples
from sgling.bench.target import BenchError
from sgling.bench.tokenizer import BenchTokenizer
from sgling.srt.config.bench_args import CPU_SCALE, GPU_SCALE, BenchServingArgs
from sgling.srt.parser.chat_template import ChatTemplate, ChatTemplateError

RANDOM_LABEL = "random prompts: accept length is a property of the workload, not of the server"


def with_scale(args: BenchServingArgs, server_info: dict) -> BenchServingArgs:
    """Fill in counts and lengths the command line left open: upstream's, or a small run for a server on a CPU."""
    on_cpu = server_info.get("device") == "cpu"
    names = ("num_prompts", "random_input_len", "random_output_len")
    scale = dict(zip(names, CPU_SCALE if on_cpu else GPU_SCALE, strict=True))
    missing = {name: value for name, value in scale.items() if getattr(args, name) is None}
    used = [name for name in missing if args.is_random or name == "num_prompts"]
    if used and on_cpu:
        chosen = ", ".join(f"--{name.replace('_', '-')} {missing[name]}" for name in used)
        print(f"the server runs on a CPU: {chosen}", file=sys.stderr)
    return dataclasses.replace(args, **missing)


def load_template(directory: Path) -> ChatTemplate | None:
    """The tokenizer directory's chat template; None when it has none."""
    try:
        return ChatTemplate.from_dir(directory)
    except ChatTemplateError:
        return None


def _needed(template: ChatTemplate | None, why: str) -> ChatTemplate:
    if template is None:
        raise BenchError(f"the tokenizer has no chat template, which {why} needs")
    return template


def make_prompts(
    args: BenchServingArgs, tokenizer: BenchTokenizer, template: ChatTemplate | None = None
) -> list[Prompt]:
    """The prompts the flags ask for (counts and lengths filled in)."""
    prompts = _data_set(args, tokenizer, template)
    if args.apply_chat_template:
        prompts = as_chat(prompts, _needed(template, "--apply-chat-template"), tokenizer)
    if args.tokenize_prompt:
        prompts = [prompt._replace(text=None) for prompt in prompts]
    return prompts


def _data_set(args: BenchServingArgs, tokenizer: BenchTokenizer, template: ChatTemplate | None) -> list[Prompt]:
    if args.is_scenario:
        return _scenarios(args, tokenizer, template)
    if args.dataset_name in ("sharegpt", "custom", "openai"):
        return _from_file(args, tokenizer, template)
    if args.dataset_name == "generated-shared-prefix":
        shape = SharedPrefixShape(
            args.gsp_num_groups,
            args.gsp_prompts_per_group,
            args.gsp_system_prompt_len,
            args.gsp_question_len,
            args.gsp_output_len,
            args.seed,
        )
        return shared_prefix_prompts(shape, tokenizer)
    shape = RandomShape(
        args.num_prompts, args.random_input_len, args.random_output_len, args.random_range_ratio, args.seed
    )
    if args.dataset_name == "random-ids":
        return random_id_prompts(shape, tokenizer, args.tokenize_prompt)
    texts = sharegpt_texts(args.dataset_path) if args.dataset_path else packaged_texts()
    return random_text_prompts(shape, tokenizer, texts, args.tokenize_prompt)


def _from_file(args: BenchServingArgs, tokenizer: BenchTokenizer, template: ChatTemplate | None) -> list[Prompt]:
    limits = FileLimits(args.num_prompts, args.sharegpt_output_len, args.sharegpt_context_len, args.seed)
    if args.dataset_name != "openai":
        return sharegpt_prompts(args.dataset_path, tokenizer, limits)
    if not args.backend.endswith("-chat"):
        template = _needed(template, "an openai data set on this back end")
    return openai_prompts(args.dataset_path, template, tokenizer, limits)


def _scenarios(args: BenchServingArgs, tokenizer: BenchTokenizer, template: Any) -> list[Prompt]:
    names = SCENARIOS if args.dataset_name == ALL_SCENARIOS else (args.dataset_name,)
    if not args.raw_prompts and not args.backend.endswith("-chat"):
        template = _needed(template, "a built-in scenario (without --raw-prompts)")
    samples = scenario_samples(names, args.num_prompts, args.seed)
    used = None if args.raw_prompts else template
    return [scenario_prompt(sample, used, tokenizer, args.scenario_output_len) for sample in samples]
