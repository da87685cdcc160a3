"""Chat templates: equal to transformers' rendering, and ling3-pico's template against the Ling-3.0 block grammar."""

import json
import subprocess
import sys

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sgling.srt.config.model_path import ASSETS_DIR
from sgling.srt.parser.chat_template import ChatTemplate, ChatTemplateError, with_parsed_arguments
from sgling.srt.parser.registry import resolve_reasoning_parser, resolve_tool_call_parser
from sgling.srt.parser.tool_call_parser import parse_tool_calls

PICO = ChatTemplate.from_file(ASSETS_DIR / "ling3-pico" / "chat_template.jinja")
TOOL = {"type": "function", "function": {"name": "add", "description": "Ä <b> & 'c'", "parameters": {"type": "object"}}}
ON, OFF = "detailed thinking on", "detailed thinking off"
PROMPT_ON, PROMPT_OFF = "<role>ASSISTANT</role>\n<think>", "<role>ASSISTANT</role>\n<think></think>"


def block(role, text):
    return f"<role>{role}</role>{text}<|role_end|>"


def say(role, content, **fields):
    return {"role": role, "content": content, **fields}


def calls(*pairs):
    return [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in pairs]


CONVERSATIONS = {
    "one turn": [say("user", "2+2?")],
    "system": [say("system", "Be brief."), say("user", "hi")],
    "directive": [say("system", f"Be brief. {ON}"), say("user", "hi")],
    "two turns": [say("user", "a"), say("assistant", "b"), say("user", "c")],
    "reasoning": [say("user", "a"), say("assistant", "\n\nb", reasoning_content="\nr\n"), say("user", "c")],
    "other name": [say("user", "a"), say("assistant", "b", reasoning="r", tool_calls=None), say("user", "c")],
    "inline": [say("user", "a"), say("assistant", "<think>r</think>s</think>\nb"), say("user", "c")],
    "late system": [say("user", "a"), say("system", "now"), say("user", "b")],
    "calls": [
        say("user", "a"),
        say(
            "assistant", None, tool_calls=calls(("add", {"x": 1, "s": "é\n", "o": {"k": [1, None, True]}}), ("now", {}))
        ),
        say("tool", "2"),
        say("tool", "3"),
        say("assistant", "five", tool_calls=calls(("now", {}))),
        say("tool", "4"),
    ],
    "parts": [say("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    "empty": [],
}
CHATML = """{{ bos_token }}{% for message in messages %}
  {%- if message.role == 'skip' %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>
{% endfor %}
{% if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ flag }}{{ strftime_now('%%') }}"""


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]])
@pytest.mark.parametrize("source", [PICO.source, CHATML], ids=["pico", "chatml"])
@pytest.mark.parametrize("prompt", [False, True])
def test_equal_to_transformers(messages, tools, source, prompt):
    for thinking in (None, False, True):
        extra = {"enable_thinking": thinking, "bos_token": "<s>", "flag": 1}
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        expected = render_jinja_template(
            [plain], tools=tools, chat_template=source, add_generation_prompt=prompt, **extra
        )[0][0]
        assert ChatTemplate(source).render(messages, tools, prompt, **extra) == expected


def test_block_grammar():
    hi = block("HUMAN", "hi")

    def render(messages, tools=None, **options):
        return PICO.render([*messages, say("user", "hi")], tools, True, **options)

    assert render([]) == block("SYSTEM", OFF) + hi + PROMPT_OFF
    assert render([], enable_thinking=True) == block("SYSTEM", ON) + hi + PROMPT_ON
    assert render([say("system", "S")], enable_thinking=True) == block("SYSTEM", f"S\n{ON}") + hi + PROMPT_ON
    # a directive in the system text suppresses the appended one; the prompt still follows enable_thinking
    assert render([say("system", f"S {ON}")], enable_thinking=False) == block("SYSTEM", f"S {ON}") + hi + PROMPT_OFF
    assert render([say("system", "")]) == block("SYSTEM", OFF) + hi + PROMPT_OFF
    with_tools = render([say("system", "S")], [TOOL, TOOL])
    listed = f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>"
    assert with_tools.startswith("<role>SYSTEM</role>S\n# Tools\n") and listed in with_tools
    assert with_tools.endswith(f"</tool_call>\n{OFF}<|role_end|>{hi}{PROMPT_OFF}")
    assert render([], [TOOL]).startswith("<role>SYSTEM</role># Tools\n")
    assert render([say("system", f"S {OFF}")], [TOOL]).endswith(f"</tool_call>\n<|role_end|>{hi}{PROMPT_OFF}")


def test_history_blocks():
    def last(message):
        text = PICO.render([say("user", "q"), message])
        return text.removeprefix(block("SYSTEM", OFF) + block("HUMAN", "q"))

    assert last(say("assistant", "\n\na")) == block("ASSISTANT", "\n<think></think>a")
    assert last(say("assistant", "a", reasoning_content="\nr\n")) == block("ASSISTANT", "\n<think>r</think>a")
    assert last(say("assistant", "<think>r</think>\n\na")) == block("ASSISTANT", "\n<think>r</think>a")
    assert last(say("system", "x")) == block("SYSTEM", "x")
    one = "<tool_call>f<arg_key>k</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    two = "<tool_call>g\n</tool_call>"
    with_calls = say("assistant", "", tool_calls=calls(("f", {"k": "3"}), ("g", {})))
    assert last(with_calls) == block("ASSISTANT", f"\n<think></think>{one}\n{two}")
    assert last({**with_calls, "content": "a"}) == block("ASSISTANT", f"\n<think></think>a\n{one}\n{two}")
    results = PICO.render([say("tool", "1"), say("tool", "2")])
    inner = "\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert results.endswith(block("OBSERVATION", inner))


def test_rendered_calls_parse_back():
    arguments = {"s": 'a "b"\n<c>', "n": 3, "x": 1.5, "flag": False, "list": [1, {"k": None}], "none": None}
    text = PICO.render([say("assistant", "Text.", tool_calls=calls(("add", arguments), ("add", {})))])
    schema = {"properties": {"s": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    parsed = parse_tool_calls(text.partition("</think>")[2].removesuffix("<|role_end|>"), tools)
    assert parsed.text == "Text."
    assert [json.loads(call.arguments) for call in parsed.calls] == [arguments, {}]


def test_continue_final_message():
    messages = [say("user", "q"), say("assistant", "half ")]
    assert PICO.render(messages, continue_final_message=True).endswith("<role>ASSISTANT</role>\n<think></think>half ")
    messages[-1] = say("assistant", "", reasoning_content="half\n")
    assert PICO.render(messages, continue_final_message=True).endswith("<think>half\n")
    with pytest.raises(ChatTemplateError):
        PICO.render([], continue_final_message=True)
    with pytest.raises(ChatTemplateError):
        ChatTemplate("no messages").render(messages, continue_final_message=True)


def test_errors_are_the_templates_own():
    with pytest.raises(ChatTemplateError, match="unknown message role"):
        PICO.render([say("wizard", "x")])
    with pytest.raises(ChatTemplateError, match="arguments must be an object"):
        PICO.render([say("assistant", "", tool_calls=calls(("f", '{"a": 1}')))])
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}")
    with pytest.raises(ChatTemplateError, match="may not set"):
        ChatTemplate("{% set ns = namespace() %}{% set ns.__x__ = 1 %}").render([])
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}").render([])


def test_arguments_text_becomes_objects():
    message = say("assistant", None, tool_calls=calls(("f", '{"a": [1]}'), ("g", ""), ("h", {"b": 1}), ("i", None)))
    found = [call["function"]["arguments"] for call in with_parsed_arguments(message)["tool_calls"]]
    assert found == [{"a": [1]}, {}, {"b": 1}, {}]
    for bad in ("{", "[1]", "3"):
        with pytest.raises(ChatTemplateError):
            with_parsed_arguments(say("assistant", None, tool_calls=calls(("f", bad))))


def test_directories(tmp_path):
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate.from_dir(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_dir(tmp_path).render([]) == "<s></s>"
    config["chat_template"] = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    named = ChatTemplate.from_dir(tmp_path)
    assert (named.render([]), named.render([], [TOOL])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert ChatTemplate.from_dir(tmp_path).render([]) == "file <s>"


def test_parser_choice_by_template():
    assert resolve_reasoning_parser("auto", PICO.source) == resolve_tool_call_parser("auto", PICO.source) == "ling3"
    assert resolve_reasoning_parser("auto", CHATML) is resolve_tool_call_parser("auto", CHATML) is None
    roles_only = "<role>SYSTEM</role><role>ASSISTANT</role><|role_end|>"
    assert resolve_reasoning_parser("auto", roles_only) == "ling3"
    assert resolve_tool_call_parser("auto", roles_only) is None
    assert resolve_reasoning_parser(None, PICO.source) is None and resolve_tool_call_parser("ling3", "") == "ling3"
    with pytest.raises(ValueError, match="known: auto, ling3"):
        resolve_reasoning_parser("qwen", PICO.source)


def test_needs_no_web_stack():
    blocked = "; ".join(
        f"sys.modules['{name}'] = None" for name in ("fastapi", "pydantic", "torch", "transformers", "zmq")
    )
    code = f"import sys; {blocked}; import sgling.srt.parser.chat_template, sgling.srt.parser.registry"
    subprocess.run([sys.executable, "-c", code], check=True)
