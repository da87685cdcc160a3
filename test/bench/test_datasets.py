"""Prompts have exactly the asked number of tokens, as text and as ids, from packaged text, a file and bare ids."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sgling.bench.dataset_files import FileLimits, openai_prompts, sharegpt_prompts, sharegpt_texts
from sgling.bench.dataset_shared import SharedPrefixShape, shared_prefix_prompts
from sgling.bench.datasets import (
    RandomShape,
    fit_text,
    packaged_texts,
    random_id_prompts,
    random_text_prompts,
)
from sgling.bench.result import RequestResult
from sgling.bench.scenarios import SCENARIOS, judge_answer, scenario_prompt, scenario_samples, success_rate
from sgling.bench.target import BenchError
from sgling.bench.tokenizer import FastTokenizer
from sgling.bench.workload import load_template, make_prompts
from sgling.srt.config.bench_args import BenchServingArgs
from sgling.srt.config.model_path import ASSETS_DIR
from sgling.training.generator.base import is_held_out_prompt
from sgling.training.generator.mix import prompt_key


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> FastTokenizer:
    """A byte-level BPE trained on a part of the packaged text, so that cuts do merge and split tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(packaged_texts()[:6], trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    bpe.save(str(directory / "tokenizer.json"))
    return FastTokenizer(directory)


def fixed(input_len: int, count: int = 8, output_len: int = 4) -> RandomShape:
    return RandomShape(count, input_len, output_len, range_ratio=1.0, seed=42)


def test_packaged_texts_are_many_and_not_empty():
    texts = packaged_texts()
    assert len(texts) >= 10
    assert all(len(text) > 100 for text in texts)


@pytest.mark.parametrize("length", [1, 2, 32, 1024, 2000])
def test_text_prompts_tokenise_to_the_exact_length(tokenizer, length):
    prompts = random_text_prompts(fixed(length, count=20), tokenizer, packaged_texts())
    assert [len(tokenizer.encode(prompt.text)) for prompt in prompts] == [length] * 20
    assert all(prompt.input_len == length and prompt.text and prompt.output_len == 4 for prompt in prompts)


@pytest.mark.parametrize("length", [1, 2, 33, 500])
def test_id_prompts_are_consecutive(tokenizer, length):
    prompts = random_id_prompts(fixed(length), tokenizer)
    for prompt in prompts:
        assert prompt.text is None
        assert len(prompt.ids) == length
        assert set(np.diff(prompt.ids)) <= {1, 1 - tokenizer.vocab_size}


def test_ids_sent_as_text_are_exact_too(tokenizer):
    prompts = random_id_prompts(fixed(16, count=4), tokenizer, as_ids=False)
    assert [len(tokenizer.encode(prompt.text)) for prompt in prompts] == [16] * 4


def test_text_as_ids_repeats_one_text(tokenizer):
    (prompt,) = random_text_prompts(fixed(1000, count=1), tokenizer, ["one two three"], as_ids=True)
    period = len(tokenizer.encode("one two three"))
    assert prompt.text is None
    assert prompt.ids[:period] == tokenizer.encode("one two three")
    assert prompt.ids[period:] == prompt.ids[:-period]


def test_same_seed_same_prompts(tokenizer):
    def make(seed: int):
        return random_text_prompts(RandomShape(6, 40, 20, 0.0, seed), tokenizer, packaged_texts(), as_ids=True)

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_lengths_follow_the_range_ratio():
    rng = np.random.default_rng(0)
    inputs, outputs = zip(*RandomShape(2000, 10, 4, 0.5, 0).lengths(rng), strict=True)
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (5, 10, 2, 4)
    inputs, _ = zip(*RandomShape(2000, 3, 1, 0.0, 0).lengths(rng), strict=True)
    assert (min(inputs), max(inputs)) == (1, 3)


def test_sharegpt_file(tmp_path):
    file = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    assert sharegpt_texts(str(file)) == ["hello"]
    file.write_text("[]")
    with pytest.raises(ValueError, match="no conversation"):
        sharegpt_texts(str(file))


def test_impossible_length_is_an_error():
    class Doubling:
        """Every text has two tokens per character, so odd counts do not exist."""

        vocab_size = 10

        def encode(self, text):
            return [1] * (2 * len(text))

        def decode(self, ids):
            return "x" * len(ids)

    with pytest.raises(ValueError, match="exactly 3 tokens"):
        fit_text(Doubling(), [1, 2], 0, 3)


def test_missing_tokenizer_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        FastTokenizer(tmp_path)


def test_sharegpt_prompts_take_the_answers_length(tmp_path, tokenizer):
    file = tmp_path / "chats.jsonl"  # JSON lines, and the spelling of custom data sets
    answers = ["yes, of course I can", "x", "a longer answer with several words"]
    lines = [{"conversations": [{"content": f"question {i}"}, {"content": answer}]} for i, answer in enumerate(answers)]
    file.write_text("\n".join(map(json.dumps, lines)))
    prompts = sharegpt_prompts(str(file), tokenizer, FileLimits(10, None, None, seed=0))
    lengths = {len(tokenizer.encode(answers[0])), len(tokenizer.encode(answers[2]))}  # the one-token answer is dropped
    assert {prompt.output_len for prompt in prompts} == lengths
    assert [p.output_len for p in sharegpt_prompts(str(file), tokenizer, FileLimits(1, 7, None, seed=0))] == [7]
    with pytest.raises(ValueError, match="within the limits"):
        sharegpt_prompts(str(file), tokenizer, FileLimits(10, None, 3, seed=0))
    file.write_text('{"conversations": []}\nnot json')
    with pytest.raises(ValueError, match="chats.jsonl:2: not JSON"):
        sharegpt_texts(str(file))


def test_openai_file(tmp_path, tokenizer):
    file = tmp_path / "chat.jsonl"
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    file.write_text(json.dumps(body))
    template = SimpleNamespace(render=lambda messages, tools, add_generation_prompt: f"<{messages[0]['content']}>")
    (prompt,) = openai_prompts(str(file), template, tokenizer, FileLimits(5, None, None, 0))
    assert (prompt.text, prompt.output_len, prompt.messages) == ("<hi>", 9, body["messages"])
    file.write_text(json.dumps({"messages": body["messages"]}))
    with pytest.raises(ValueError, match="no max_tokens"):
        openai_prompts(str(file), template, tokenizer, FileLimits(5, None, None, 0))


def test_shared_prefix_groups(tokenizer):
    prompts = shared_prefix_prompts(SharedPrefixShape(2, 3, 40, 8, 5, seed=1), tokenizer)
    assert len(prompts) == 6
    groups = {label: [p.text for p in prompts if p.label == label] for label in {p.label for p in prompts}}
    heads = {label: {text.rsplit("\n\n", 1)[0] for text in texts} for label, texts in groups.items()}
    assert all(len(head) == 1 for head in heads.values())
    assert len(set.union(*heads.values())) == 2
    assert all(len(prompt.ids) + 3 >= 40 + 8 for prompt in prompts)


PICO = ASSETS_DIR / "ling3-pico"


def flags(text: str) -> BenchServingArgs:
    return BenchServingArgs.from_cli(f"--num-prompts 8 --random-input-len 16 --random-output-len 4 {text}".split())


def test_scenarios_are_held_out_prompts_through_the_template_or_raw():
    pico, template = FastTokenizer(PICO), load_template(PICO)
    prompts = make_prompts(flags("--dataset-name scenarios"), pico, template)
    assert [prompt.label for prompt in prompts] == [*SCENARIOS, *SCENARIOS]
    assert all(is_held_out_prompt(prompt_key(prompt.sample)) for prompt in prompts)
    assert all(prompt.text.endswith("<think></think>") or "<think>" in prompt.text[-20:] for prompt in prompts)
    assert prompts[1].tools
    raw = make_prompts(flags("--dataset-name coding --raw-prompts"), pico, None)
    assert all(prompt.text == prompt.messages[-1]["content"] for prompt in raw)
    with pytest.raises(BenchError, match="no chat template"):
        make_prompts(flags("--dataset-name coding"), pico, None)


def test_chat_template_and_ids_apply_to_every_text(tokenizer):
    template = SimpleNamespace(render=lambda messages, tools, add_generation_prompt: f"[{messages[0]['content']}]")
    for prompt in make_prompts(flags("--apply-chat-template"), tokenizer, template):
        assert prompt.text.startswith("[")
        assert prompt.ids == tokenizer.encode(prompt.text)
    ids = make_prompts(flags("--apply-chat-template --tokenize-prompt"), tokenizer, template)
    assert all(prompt.text is None for prompt in ids)


def answer(text: str = "", calls: list | None = None) -> RequestResult:
    meta = {"finish_reason": {"type": "stop"}}
    return RequestResult(1, 1, success=True, text=text, tool_calls=calls or [], meta_info=meta)


def test_parsed_and_native_tool_calls_are_judged_alike():
    pico, template = FastTokenizer(PICO), load_template(PICO)
    sample = next(s for s in scenario_samples(("tool_calling",), 9, 1) if len(s.check["calls"]) == 1)
    prompt = scenario_prompt(sample, template, pico, 8)
    (call,) = sample.check["calls"]
    right = [{"name": call["name"], "arguments": json.dumps(call["arguments"])}]
    assert judge_answer(prompt, answer(calls=right)) == {"ended": True, "parses": True, "exact": True}
    assert not judge_answer(prompt, answer(calls=[{**right[0], "arguments": "{"}]))["parses"]
    assert not judge_answer(prompt, answer("no call"))["exact"]
    assert success_rate([(prompt, answer(calls=right)), (prompt, answer("no call"))]) == 0.5
    assert success_rate([]) is None
