"""Evaluations: upstream's extraction and prompt, the built-in sets, and what is printed."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest

from sgling.bench.evals import gsm8k, tools
from sgling.bench.evals.gsm8k import INVALID, Question, answer_value, builtin_questions, few_shot_prompt, score
from sgling.bench.gate.subject import OpenSubject
from sgling.bench.result import RequestResult
from sgling.bench.tokenizer import FastTokenizer
from sgling.bench.workload import load_template
from sgling.srt.config.model_path import ASSETS_DIR

PICO = ASSETS_DIR / "ling3-pico"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so it is 18", 18),
        ("#### 1,234", 1234),
        ("first 3, then 45 apples.", 45),
        ("costs $12.50", 50),  # no decimals, as upstream
        ("-7", 7),  # no sign, as upstream
        ("007", INVALID),
        ("0", 0),
        ("none", INVALID),
    ],
)
def test_extraction_is_upstreams(text, value):
    assert answer_value(text) == value


def test_few_shot_prompt():
    shots = [Question("1 + 1?", "#### 2")]
    expected = "Question: 1 + 1?\nAnswer: #### 2\n\nQuestion: 2 + 2?\nAnswer:"
    assert few_shot_prompt(shots, Question("2 + 2?", "#### 4")) == expected


def test_score_by_hand():
    questions = [Question("", f"#### {i}") for i in range(4)]
    assert score(questions, ["is 0", "is 1", "is 9", "nothing"]) == (0.5, 0.25)


def test_builtin_set_is_fixed_and_scoreable():
    questions = builtin_questions(20)
    assert questions == builtin_questions(20)
    assert len({question.question for question in questions}) > 15
    assert all(answer_value(question.answer) == question.sample.check["value"] for question in questions)


class Answering:
    """Answers every prompt with what ``reply`` makes of it; remembers the requests."""

    def __init__(self, reply):
        self.reply, self.asked = reply, []

    async def request(self, prompt, options):
        self.asked.append((prompt, options))
        meta = {"finish_reason": {"type": "stop"}, "spec_verify_ct": 5, "spec_num_correct_drafts": 5}
        text = self.reply(prompt)
        return RequestResult(
            1, 1, success=text is not None, error="down", text=text or "", output_len=10, meta_info=meta
        )


def use(monkeypatch, module, target: Answering) -> None:
    @asynccontextmanager
    async def opened(_args, _backend="sglang"):
        yield OpenSubject(target, "m", FastTokenizer(PICO), load_template(PICO))

    monkeypatch.setattr(module, "open_subject", opened)


def test_gsm8k_prints_upstreams_lines(monkeypatch, tmp_path, capsys):
    file = tmp_path / "test.jsonl"
    lines = [{"question": f"What is {i}?", "answer": f"It is\n#### {i}"} for i in range(4)]
    file.write_text("\n".join(map(json.dumps, lines)))
    target = Answering(lambda prompt: " It is 1")
    use(monkeypatch, gsm8k, target)
    out = tmp_path / "out.json"
    argv = ["--data-path", str(file), "--num-shots", "2", "--json", str(out), "--disable-tqdm"]
    assert gsm8k.main(argv) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["Accuracy: 0.250", "Invalid: 0.000"]
    assert shown[2].startswith("Latency: ") and shown[2].endswith(" s")
    assert shown[3].startswith("Output throughput: ") and shown[3].endswith(" token/s")
    prompt, options = target.asked[0]
    assert prompt.text.count("Question:") == 3  # the first lines are examples and scored, as upstream
    assert options.sampling == {"stop": ["Question", "Assistant:", "<|separator|>"]}
    assert not options.ignore_eos
    assert json.loads(out.read_text())["accept_length"] == 2.0


def test_gsm8k_builtin_goes_through_the_chat_template(monkeypatch, capsys):
    target = Answering(lambda prompt: "#### 1")
    use(monkeypatch, gsm8k, target)
    assert gsm8k.main(["--num-questions", "3", "--disable-tqdm"]) == 0
    assert all("<role>" in prompt.text for prompt, _ in target.asked)
    assert all(options.sampling == {} for _, options in target.asked)
    assert gsm8k.main(["--num-questions", "3", "--prompt", "few-shot", "--disable-tqdm"]) == 0
    assert target.asked[-1][0].text.startswith("Question:")
    capsys.readouterr()


def test_a_failed_question_is_no_score(monkeypatch, capsys):
    use(monkeypatch, gsm8k, Answering(lambda prompt: None))
    assert gsm8k.main(["--num-questions", "2", "--disable-tqdm"]) == 1
    assert "2 of 2 questions failed; the first: down" in capsys.readouterr().err


def test_bad_files_and_flags(monkeypatch, tmp_path, capsys):
    use(monkeypatch, gsm8k, Answering(lambda prompt: "1"))
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "x"}')
    assert gsm8k.main(["--data-path", str(file)]) == 1
    assert "entry 1 needs question and answer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gsm8k.main(["--num-questions", "0"])


def call_text(prompt) -> str:
    """The call a perfect model writes."""
    text = ""
    for call in prompt.sample.check["calls"]:
        spoken = {k: v if isinstance(v, str) else json.dumps(v) for k, v in call["arguments"].items()}
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in spoken.items())
        text += f"<tool_call>{call['name']}\n{pairs}</tool_call>"
    return text


def test_tools_scores(monkeypatch, tmp_path, capsys):
    replies = iter([call_text, call_text, lambda prompt: "<tool_call>unknown</tool_call>", lambda prompt: "no"])
    target = Answering(lambda prompt: next(replies)(prompt))
    use(monkeypatch, tools, target)
    out = tmp_path / "out.json"
    assert tools.main(["--num-questions", "4", "--json", str(out), "--disable-tqdm"]) == 0
    shown = capsys.readouterr().out
    assert "Exact calls: 0.500\nInvalid calls: 0.250\nEnded: 1.000\n" in shown
    assert "Accept length: 2.000" in shown
    assert json.loads(out.read_text())["exact"] == 0.5
    assert all(options.sampling == {"skip_special_tokens": False} for _, options in target.asked)
