"""Server arguments behind the OpenAI routes: sampling defaults, templates, parsers, names, special markup, tokenize."""

import dataclasses
from types import SimpleNamespace

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from server.openai_helpers import END, chat_tokenizer, scripted_server, stream_events
from server.serving_helpers import server_args, small_model_config
from sgling.srt.config.model_config import GenerationDefaults
from sgling.srt.entrypoints.openai.chat import ChatJob
from sgling.srt.entrypoints.openai.completions import CompletionJob
from sgling.srt.entrypoints.openai.context import ServingContext
from sgling.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sgling.srt.managers.generate_req import RequestError
from sgling.srt.managers.text_codec import TextCodec
from sgling.srt.parser.chat_template import ChatTemplateError

GENERATION = GenerationDefaults(temperature=0.6, top_p=0.95, top_k=0, repetition_penalty=1.1)
USER = [{"role": "user", "content": "hi"}]


def context(tokenizer=None, generation=GENERATION, **changes):
    manager = SimpleNamespace(
        server_args=server_args(**{"reasoning_parser": "auto", "tool_call_parser": "auto", **changes}),
        model_config=dataclasses.replace(small_model_config(), generation=generation),
        codec=TextCodec(tokenizer or chat_tokenizer()),
    )
    return ServingContext.create(manager)


def chat_params(found, **body):
    request = ChatCompletionRequest.model_validate({"messages": USER, **body})
    return ChatJob(found, request).native.sampling_params


def test_chat_defaults_come_from_the_model():
    params = chat_params(context())
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.95, -1, 1.1)
    params = chat_params(context(), temperature=0.0, top_p=None, top_k=3)
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.95, 3)
    params = chat_params(context(sampling_defaults="openai"))
    assert (params.temperature, params.top_p, params.repetition_penalty) == (1.0, 1.0, 1.0)
    params = chat_params(context(preferred_sampling_params={"temperature": 0.2, "min_p": 0.1}))
    assert (params.temperature, params.min_p, params.top_p) == (0.2, 0.1, 0.95)


def test_completion_defaults_do_not():
    request = CompletionRequest.model_validate({"prompt": "x"})
    params = CompletionJob(context(), request).native.sampling_params
    assert (params.temperature, params.top_p, params.max_new_tokens) == (1.0, 1.0, 16)
    params = CompletionJob(context(preferred_sampling_params={"temperature": 0.2}), request).native.sampling_params
    assert params.temperature == 0.2


def test_special_markup_is_kept_where_a_parser_needs_it():
    tokenizer = Tokenizer.from_str(chat_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in ("<think>", "</think>", "<tool_call>")])
    thinking, tools = {"chat_template_kwargs": {"enable_thinking": True}}, [{"function": {"name": "f"}}]
    assert chat_params(context(tokenizer)).skip_special_tokens
    assert not chat_params(context(tokenizer), **thinking).skip_special_tokens
    assert not chat_params(context(tokenizer), tools=tools).skip_special_tokens
    assert chat_params(context(tokenizer), skip_special_tokens=True, **thinking).skip_special_tokens
    assert chat_params(context(), tools=tools, **thinking).skip_special_tokens


def test_reasoning_is_counted_to_its_end_marks():
    request = ChatCompletionRequest.model_validate(
        {"messages": USER, "chat_template_kwargs": {"enable_thinking": True}}
    )
    ids = {chat_tokenizer().token_to_id(tag) for tag in ("</think>", "<tool_call>")}
    assert set(ChatJob(context(), request).native.reasoning_end_ids) == ids
    assert ChatJob(context(reasoning_parser=None), request).native.reasoning_end_ids == ()


def test_templates(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("file {{ messages[0].content }}")
    request = ChatCompletionRequest.model_validate({"messages": USER})
    assert ChatJob(context(chat_template=str(file)), request).native.text == "file hi"
    inline = context(
        chat_template="inline {{ messages[0].content }} {{ mood }}", default_chat_template_kwargs={"mood": 1}
    )
    assert ChatJob(inline, request).native.text == "inline hi 1"
    assert inline.reasoning_parser is None and inline.tool_call_parser is None
    with pytest.raises(ChatTemplateError, match="neither a file nor a template"):
        context(chat_template="nowhere.jinja")
    without = dataclasses.replace(context(), template=None)
    with pytest.raises(RequestError, match="no chat template"):
        ChatJob(without, request)


def test_model_names():
    found = context(served_model_name="org/name:v1")
    assert found.model_name(None) == found.model_name("org/name:v1") == "org/name:v1"
    assert found.model_name("gpt-x") == "gpt-x"
    with pytest.raises(RequestError):
        found.model_name("base:adapter")


@pytest.fixture(scope="module")
def server():
    found = scripted_server(stream_response_default_include_usage=True, reasoning_parser="none").start()
    yield found
    found.stop()


def test_default_usage_chunk(server):
    body = {"messages": USER}
    assert stream_events(server, "/v1/chat/completions", body)[-1]["usage"]
    body["stream_options"] = {"include_usage": False}
    assert stream_events(server, "/v1/chat/completions", body)[-1]["usage"] is None
    assert stream_events(server, "/v1/completions", {"prompt": "x"})[-1]["usage"]


def test_without_a_reasoning_parser_thinking_is_content(server):
    server.scheduler.answers = ["a</think>b"]
    body = {"messages": USER, "chat_template_kwargs": {"enable_thinking": True}}
    message = httpx.post(f"{server.base_url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("a</think>b", None)


def test_tokenize_messages(server):
    body = {"messages": USER, "chat_template_kwargs": {"enable_thinking": True}, "tools": [{"function": {"name": "f"}}]}
    found = httpx.post(f"{server.base_url}/v1/tokenize", json=body).json()
    text = chat_tokenizer().decode(found["tokens"], skip_special_tokens=False)
    assert found["count"] == len(found["tokens"]) and '{"function": {"name": "f"}}' in text
    assert text.endswith("<role>ASSISTANT</role>\n<think>")
    found = httpx.post(f"{server.base_url}/v1/tokenize", json={"messages": USER, "add_generation_prompt": False}).json()
    assert chat_tokenizer().decode(found["tokens"], skip_special_tokens=False).endswith(f"hi{END}")
    assert httpx.post(f"{server.base_url}/v1/tokenize", json={"messages": "hi"}).status_code == 400
