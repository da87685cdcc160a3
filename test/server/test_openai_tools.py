"""Tool calls over HTTP: whole and streamed answers agree for every run length (cases D02 and the reported bugs)."""

import json
import re

import httpx
import openai
import pytest

from server.openai_helpers import prompt_of, scripted_server, stream_events

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather in Oslo, and add 3."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather — now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
CALL = (
    '<tool_call>weather<arg_key>city</arg_key>\n<arg_value>Oslo\n"x"</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
CALL_JSON = '{"city": "Oslo\\n\\"x\\"", "days": 3}'
TWO = f"I will look.\n{CALL}\n<tool_call>now\n</tool_call>"


@pytest.fixture(scope="module")
def running():
    found = scripted_server().start()
    yield found
    found.stop()


@pytest.fixture
def server(running):
    running.scheduler.reset()
    return running


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def ask(client, **options):
    return client.chat.completions.create(model="m", messages=USER, tools=TOOLS, **options)


def streamed(server, **body):
    """(content, {index: [id, name, arguments]}, finish reasons) of a streamed answer."""
    content, calls, reasons = "", {}, []
    for chunk in stream_events(server, PATH, {"messages": USER, "tools": TOOLS, **body}):
        choice = chunk["choices"][0]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            function = call["function"]
            if call["index"] not in calls:
                assert re.fullmatch("call_[0-9a-f]{24}", call["id"]) and function["arguments"] == ""
                calls[call["index"]] = [call["id"], function["name"], ""]
            else:
                assert call["id"] is None and function["name"] is None
                calls[call["index"]][2] += function["arguments"]
    return content, calls, reasons


def test_two_calls_whole(server, client):
    server.scheduler.answers = [TWO]
    choice = ask(client).choices[0]
    assert (choice.finish_reason, choice.matched_stop) == ("tool_calls", None)
    assert choice.message.content == "I will look." and choice.message.reasoning_content is None
    calls = [(call.index, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [(0, "weather", CALL_JSON), (1, "now", "{}")]
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in choice.message.tool_calls)
    prompt = prompt_of(server)
    assert f"<tools>\n{json.dumps(WEATHER, ensure_ascii=False)}\n{json.dumps(NOW)}\n</tools>" in prompt
    server.scheduler.answers = [CALL]
    assert ask(client).choices[0].message.content == ""


@pytest.mark.parametrize("run_len", [1, 2, 3, 4, 7, 200])
def test_two_calls_streamed(server, run_len):
    server.scheduler.answers, server.scheduler.run_len = [TWO], run_len
    content, calls, reasons = streamed(server)
    assert content == "I will look." and reasons == ["tool_calls"]
    assert [call[1:] for call in calls.values()] == [["weather", CALL_JSON], ["now", "{}"]]
    assert list(calls) == [0, 1] and calls[0][0] != calls[1][0]


def test_official_streaming_helper(server, client):
    server.scheduler.answers = [TWO]
    with client.chat.completions.stream(model="m", messages=USER, tools=[NOW, WEATHER]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    found = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert found == [("weather", CALL_JSON), ("now", "{}")]


def test_call_after_thinking(server, client):
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    for text in (f"Need it.\n</think>\n\n{CALL}", f"Need it.\n{CALL}"):
        server.scheduler.answers = [text]
        message = ask(client, extra_body=thinking).choices[0].message
        assert (message.reasoning_content, message.content) == ("Need it.", "")
        assert message.tool_calls[0].function.arguments == CALL_JSON
        content, calls, reasons = streamed(server, **thinking)
        assert (content, calls[0][1:], reasons) == ("", ["weather", CALL_JSON], ["tool_calls"])


def test_call_cut_by_the_budget_is_no_call(server, client):
    server.scheduler.answers = [CALL]
    choice = ask(client, max_tokens=60).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content and CALL.startswith(choice.message.content)
    content, calls, reasons = streamed(server, max_tokens=60)
    assert content == "" and reasons == ["length"] and CALL_JSON.startswith(calls[0][2])


@pytest.mark.parametrize(
    "text", ["<tool_call>weather {}</tool_call>", "<tool_call>nope</tool_call>", "<tool_call></tool_call>"]
)
def test_malformed_envelopes_stay_text(server, client, text):
    server.scheduler.answers = [text]
    choice = ask(client).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    assert streamed(server) == (text, {}, ["stop"])


def test_choice_none_keeps_markup(server, client):
    server.scheduler.answers = [CALL]
    choice = ask(client, tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert "<tools>" not in prompt_of(server)


def test_one_call_at_a_time(server, client):
    server.scheduler.answers = [TWO]
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert list(streamed(server, parallel_tool_calls=False)[1]) == [0]


BAD = {
    "required": ({"tool_choice": "required"}, "not built"),
    "named": ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "not built"),
    "unknown name": ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "'f'"),
    "required without tools": ({"tool_choice": "required", "tools": None}, "needs tools"),
    "required and format": ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    "choice": ({"tool_choice": "maybe"}, "tool_choice"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "name"),
    "type": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}}]},
        "strange",
    ),
    "properties": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
        "properties",
    ),
    "parameters": ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "parameters"),
}


@pytest.mark.parametrize("change, names", BAD.values(), ids=BAD)
def test_bad_tools_are_400(server, change, names):
    answer = httpx.post(server.base_url + PATH, json={"messages": USER, "tools": TOOLS, **change})
    assert answer.status_code == 400 and names in answer.json()["message"], answer.text


def test_parser_routes(server):
    answer = httpx.post(
        f"{server.base_url}/separate_reasoning", json={"text": "<think>a</think>b", "reasoning_parser": "ling3"}
    )
    assert answer.json() == {"reasoning_text": "a", "text": "b"}
    answer = httpx.post(
        f"{server.base_url}/parse_function_call", json={"text": TWO, "tools": TOOLS, "tool_call_parser": "ling3"}
    )
    assert answer.json()["normal_text"] == "I will look."
    assert answer.json()["calls"] == [
        {"tool_index": 0, "name": "weather", "parameters": CALL_JSON},
        {"tool_index": 1, "name": "now", "parameters": "{}"},
    ]
    answer = httpx.post(f"{server.base_url}/parse_function_call", json={"text": "", "tool_call_parser": "none such"})
    assert answer.status_code == 400 and "ling3" in answer.json()["message"]
