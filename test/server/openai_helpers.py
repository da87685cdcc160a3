"""A server whose model says what a test tells it to: the real routes, parsers and tokenizer manager over loopback.

The scheduler is scripted with texts; everything between the HTTP client and the token ids is what users get.
"""

from __future__ import annotations

import json
import time
from functools import cache

import httpx
from tokenizers import AddedToken, Tokenizer

from server.fake_scheduler import FakeRequest, FakeScheduler
from server.live_server import LiveServer
from server.serving_helpers import small_tokenizer
from sgling.srt.managers.finish import FinishChecker
from sgling.srt.managers.io_struct import FinishReason, RequestOutput, SchedulerReady, TokenizedGenerateReqInput
from sgling.srt.managers.text_codec import TextCodec

CONTEXT_LEN = 2048
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<role>", "</role>"]
END = "<|role_end|>"


@cache
def chat_tokenizer() -> Tokenizer:
    """The small tokenizer with chat markup as single tokens, of which only the end mark is special."""
    tokenizer = Tokenizer.from_str(small_tokenizer().to_str())
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in MARKUP])
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


class ScriptedRequest(FakeRequest):
    """Gives out the tokens of a text, then the end token, ``run`` tokens a step."""

    def __init__(self, recv: TokenizedGenerateReqInput, text: str, run: int):
        super().__init__(recv)
        tokenizer = chat_tokenizer()
        end = tokenizer.token_to_id(END)
        self.ids = [*tokenizer.encode(text).ids, end]
        self.run = run
        room, asked = CONTEXT_LEN - len(recv.input_ids), recv.sampling_params.max_new_tokens
        self.limit = room if asked is None else min(asked, room)
        self.checker = FinishChecker(recv.sampling_params, self.limit, frozenset([end]), TextCodec(tokenizer))

    def step(self) -> RequestOutput:
        """The next increment."""
        new_ids: list[int] = []
        reason = FinishReason(type="length", length=0) if self.limit == 0 else None
        while len(new_ids) < self.run and reason is None:
            new_ids.append(self.ids[self.sent % len(self.ids)])
            self.sent += 1
            reason = self.checker.check(new_ids[-1], self.sent)
        self.verify_ct += 1
        return self.output(new_ids, reason)


class ScriptedScheduler(FakeScheduler):
    """Answers every request with the next text of ``answers`` (the last one repeats).

    ``step_s``: seconds a step takes. ``fail_after``: steps after which requests fail with a server error; None: never.
    """

    def __init__(self, channel):
        super().__init__(channel)
        self.reset()

    def reset(self) -> None:
        """Forget the last test."""
        self.answers = ["ok"]
        self.run_len = 3
        self.fail_after: int | None = None
        self.step_s = 0.0
        self.received: list[TokenizedGenerateReqInput] = []
        self.aborted.clear()

    def start_info(self) -> SchedulerReady:
        """Limits."""
        return SchedulerReady(1 << 16, CONTEXT_LEN - 1, 8, CONTEXT_LEN, {"device": "scripted"})

    def admit(self, recv: TokenizedGenerateReqInput) -> None:
        """Take a request."""
        self.received.append(recv)
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.live[recv.rid] = ScriptedRequest(recv, text, self.run_len)

    def iterate(self) -> None:
        """One step of every request, or their failure."""
        for rid, request in list(self.live.items()):
            if self.fail_after is not None and request.verify_ct >= self.fail_after:
                self.finish(rid, FinishReason("abort", None, None, "out of memory", 500, "InternalServerError"))
        if self.live and self.step_s:
            time.sleep(self.step_s)
        super().iterate()


def scripted_server(**arg_changes) -> LiveServer:
    """A server with both parsers on whose ``scheduler`` is a :class:`ScriptedScheduler`."""
    changes = {"reasoning_parser": "auto", "tool_call_parser": "auto", **arg_changes}
    return LiveServer(tokenizer=chat_tokenizer(), scheduler_type=ScriptedScheduler, **changes)


def wait_for(condition, timeout_s: float = 3.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def prompt_of(server: LiveServer, position: int = -1) -> str:
    """Prompt text of a request the scheduler has received."""
    return chat_tokenizer().decode(server.scheduler.received[position].input_ids, skip_special_tokens=False)


def stream_events(server: LiveServer, path: str, body: dict) -> list[dict]:
    """JSON bodies of all events of a raw stream, after checking its framing."""
    answer = httpx.post(server.base_url + path, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: {") and "\n" not in block for block in blocks[:-2])
    return [json.loads(block[6:]) for block in blocks[:-2]]
