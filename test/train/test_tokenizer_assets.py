"""The embedded model's tokenizer and chat template."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from tokenizers import Tokenizer

from sgling.training.generator import mix
from sgling.training.tokenizer import BPE_SIZE, EOS_ID, PAD_ID, SPECIAL_TOKENS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(mix.PICO_DIR / "tokenizer.json"))


def test_special_tokens_are_single_and_last(tokenizer):
    for index, text in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [BPE_SIZE + index]
    config = json.loads((mix.PICO_DIR / "config.json").read_text())
    assert tokenizer.get_vocab_size() == BPE_SIZE + len(SPECIAL_TOKENS) <= config["vocab_size"]
    assert (config["eos_token_id"], config["pad_token_id"]) == (EOS_ID, PAD_ID)


def test_round_trip(tokenizer):
    texts = [document.text for document in islice(mix.documents("round", len), 150)]
    texts += ["naïve café 🙂 \x00\ttab", "龘靐齉 零壹", "   leading", "a\r\nb\n\n\nc ", "١٢٣ ½ ¹"]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_one_digit_a_token_and_short_han(tokenizer):
    assert len(tokenizer.encode("12345", add_special_tokens=False).ids) == 5
    pieces = [tokenizer.decode([index]) for index in range(BPE_SIZE)]
    assert not [piece for piece in pieces if sum("\u4e00" <= char <= "\u9fff" for char in piece) > 2]
    assert not [piece for piece in pieces if sum(char.isdigit() for char in piece) > 1]


def test_loads_with_auto_tokenizer():
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(mix.PICO_DIR)
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (EOS_ID, PAD_ID, BPE_SIZE + len(SPECIAL_TOKENS))
    prompt = loaded.apply_chat_template(
        [{"role": "user", "content": "2+2?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == mix.template().render([{"role": "user", "content": "2+2?"}], add_generation_prompt=True)


OFF = "<role>SYSTEM</role>detailed thinking off<|role_end|>"


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        (
            [{"role": "user", "content": "2+2?"}],
            {"add_generation_prompt": True},
            OFF + "<role>HUMAN</role>2+2?<|role_end|><role>ASSISTANT</role>\n<think></think>",
        ),
        (
            [{"role": "user", "content": "2+2?"}],
            {"add_generation_prompt": True, "enable_thinking": True},
            OFF.replace("off", "on") + "<role>HUMAN</role>2+2?<|role_end|><role>ASSISTANT</role>\n<think>",
        ),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}],
            {},
            "<role>SYSTEM</role>Be brief.\ndetailed thinking off<|role_end|><role>HUMAN</role>a<|role_end|>",
        ),
        (
            [{"role": "system", "content": "x detailed thinking off"}, {"role": "user", "content": "a"}],
            {"enable_thinking": True, "add_generation_prompt": True},
            OFF.replace("</role>", "</role>x ") + "<role>HUMAN</role>a<|role_end|><role>ASSISTANT</role>\n<think>",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}],
            {},
            OFF + "<role>HUMAN</role>a<|role_end|><role>SYSTEM</role>s<|role_end|>",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nt\n</think>\n\nb"}],
            {},
            OFF + "<role>HUMAN</role>a<|role_end|><role>ASSISTANT</role>\n<think>t</think>b<|role_end|>",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "\nt\n"}],
            {},
            OFF + "<role>HUMAN</role>a<|role_end|><role>ASSISTANT</role>\n<think>t</think>b<|role_end|>",
        ),
    ],
)
def test_template_grammar(messages, options, expected):
    assert mix.template().render(messages, **options) == expected


def test_template_tools():
    calls = [
        {"function": {"name": "add", "arguments": {"x": 3, "tag": "3"}}},
        {"function": {"name": "now", "arguments": {}}},
    ]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "加 <x>"}}]
    text = mix.template().render(messages, tools)
    assert '\n<tools>\n{"type": "function", "function": {"name": "add", "description": "加 <x>"}}\n</tools>\n' in text
    assert text.split("<role>HUMAN</role>")[0].endswith("\ndetailed thinking off<|role_end|>")
    assert text.endswith(
        "<role>ASSISTANT</role>\n<think></think>hm\n<tool_call>add<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n<arg_key>tag</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call><|role_end|><role>OBSERVATION</role>\n<tool_response>\n5\n"
        "</tool_response>\n<tool_response>\n6\n</tool_response><|role_end|>"
    )
