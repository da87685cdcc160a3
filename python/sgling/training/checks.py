"""Judges answers of held-out samples: code that runs, exact tool calls, exact numbers, figures that reappear."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from typing import Any

from .generator.base import Sample

CODE_BLOCK = re.compile(r"```python\n(.*?)```", re.S)
EXAMPLE = re.compile(r"`(\w+\(.*\))`(?: returns |返回)`(.*)`")
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\n<arg_value>(.*?)</arg_value>", re.S)


def content_of(text: str) -> str:
    """The answer without reasoning."""
    return text.rsplit("</think>", 1)[-1]


def parse_calls(text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Tool calls of an answer with typed arguments, None where one does not parse or names no offered tool."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
    calls = []
    for body in CALL.findall(text):
        name = re.split(r"[\n<]", body, maxsplit=1)[0]
        if name not in schemas:
            return None
        arguments: dict[str, Any] = {}
        for key, value in PAIR.findall(body):
            if key not in schemas[name]:
                return None
            if schemas[name][key]["type"] != "string":
                try:
                    value = json.loads(value)
                except ValueError:
                    return None
            arguments[key] = value
        calls.append({"name": name, "arguments": arguments})
    return calls


def run_tests(code: str, tests: list[tuple[str, str]]) -> bool:
    """Whether the code gives the expected results, in a separate isolated interpreter with a time limit."""
    lines = [f"assert {call} == {result}" for call, result in tests]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code + "\n" + "\n".join(lines)],
            capture_output=True,
            timeout=10,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def judge_code(text: str, check: dict[str, Any]) -> dict[str, bool]:
    """parses: valid Python; passes: right results for the test calls; example: the result it states is its own."""
    blocks, examples = CODE_BLOCK.findall(text), EXAMPLE.findall(text)
    try:
        ast.parse(blocks[0])
    except (IndexError, SyntaxError):
        return {"parses": False, "passes": False, "example": False}
    results = {"parses": True, "passes": run_tests(blocks[0], check["run"])}
    if examples or "class " not in blocks[0]:
        results["example"] = bool(examples) and run_tests(blocks[0], examples[:1])
    return results


def judge(sample: Sample, text: str, ended: bool) -> dict[str, bool]:
    """Named yes / no results of one answer; ``ended`` says whether the end token came within the limit."""
    check = sample.check or {}
    results = {"ended": ended}
    kind = check.get("kind")
    if kind == "code":
        results |= judge_code(content_of(text), check)
    elif kind == "number":
        found = re.findall(r"#### (-?\d+)", text)
        results["exact"] = bool(found) and int(found[-1]) == check["value"]
    elif kind == "tool":
        calls = parse_calls(text, sample.tools or [])
        results["parses"] = calls is not None
        results["exact"] = calls == check["calls"]
    elif kind == "report":
        results["all_figures"] = all(re.search(rf"(?<!\d){figure}(?!\d)", text) for figure in check["figures"])
    elif kind == "zh":
        results["clean"] = "\ufffd" not in text and bool(re.search(r"[\u4e00-\u9fff]", text))
    return results
