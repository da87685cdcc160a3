"""Whatever arrives on any route is answered: never a 500, never a dead scheduler, never a leak (cases E01 to E06)."""

from __future__ import annotations

import json
import math

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.tiny_model import write_tiny_checkpoint
from server.real_server import pool, real_server, wait_idle

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 3, -1, 511, 512, 2**31, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30]),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e-300, 1e-12, 1e300, math.nan, math.inf, -math.inf]),
    st.sampled_from(["", "a", "\ud800", "\udfff\ud800", "\x00", "é", "👩\u200d👧", "(", "a{2}", "5", "-1", "x" * 300]),
    st.text(max_size=6),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
NATIVE_SAMPLING = (
    "max_new_tokens temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty min_new_tokens "
    "stop stop_token_ids stop_regex ignore_eos skip_special_tokens no_stop_trim logit_bias sampling_seed json_schema "
    "stream_interval custom_params beam_width nonsense"
).split()
NATIVE = (
    "text input_ids rid return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs "
    "return_prompt_token_ids speculative lora_path priority session_params stream"
).split()
OPENAI = (
    "model prompt messages max_tokens min_tokens temperature top_p top_k min_p frequency_penalty presence_penalty "
    "repetition_penalty stop stop_token_ids stop_regex ignore_eos logit_bias seed logprobs top_logprobs echo suffix "
    "rid stream stream_options response_format tools tool_choice chat_template_kwargs reasoning_effort input_ids regex "
    "user return_token_ids return_meta_info continue_final_message parallel_tool_calls"
).split()
OTHER = {
    "/abort_request": ("rid", "abort_all"),
    "/v1/tokenize": ("prompt", "messages", "tools"),
    "/v1/detokenize": ("tokens", "skip_special_tokens"),
    "/separate_reasoning": ("text", "reasoning_parser"),
    "/parse_function_call": ("text", "tools", "tool_call_parser"),
    "/start_profile": ("num_steps", "start_step", "activities", "profile_prefix", "with_stack"),
}


def with_junk(base: dict, names) -> st.SearchStrategy[dict]:
    """A body that works, with one to three of its fields replaced."""
    return st.dictionaries(st.sampled_from(names), JUNK, min_size=1, max_size=3).map(lambda junk: {**base, **junk})


STOPS = list(range(0, 512, 2))  # bound the length of a request that gives no limit
SAMPLING = {"max_new_tokens": 3, "temperature": 0}
CALLS = st.one_of(
    with_junk(SAMPLING, NATIVE_SAMPLING).map(lambda sp: ("/generate", {"text": "hello", "sampling_params": sp})),
    with_junk({"text": "hello", "sampling_params": SAMPLING}, NATIVE).map(lambda body: ("/generate", body)),
    with_junk({"prompt": "hello", "max_tokens": 3}, OPENAI).map(lambda body: ("/v1/completions", body)),
    with_junk({"input_ids": [5, 6], "max_tokens": 3}, OPENAI).map(lambda body: ("/v1/chat/completions", body)),
    with_junk({"input_ids": [5, 6], "stop_token_ids": STOPS}, OPENAI).map(lambda b: ("/v1/chat/completions", b)),
    *(with_junk({}, names).map(lambda body, route=route: (route, body)) for route, names in OTHER.items()),
    st.tuples(st.sampled_from(["/generate", "/v1/completions", "/v1/chat/completions", *OTHER]), JUNK),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = real_server(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)).start()
    yield server
    server.stop()


def check_call(server, route: str, body) -> None:
    """Post and judge the answer."""
    content = json.dumps(body).encode()
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        response = client.post(route, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), f"{route} {body!r}: {response.status_code} {response.text[:300]}"
    if response.status_code == 400 and response.headers["content-type"].startswith("application/json"):
        error = response.json()
        assert error.get("message") or error.get("error"), error


@given(call=CALLS)
@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_body_is_a_500_or_kills_the_scheduler(server, call):
    """Cases E01, E02, E04, E06: junk in any field of any route."""
    check_call(server, *call)


def test_the_fuzzed_server_still_serves_and_leaked_nothing(server):
    """Runs after the fuzz on the same server."""
    with server.client() as client:
        client.post("/stop_profile")
        client.post("/abort_request", json={"abort_all": True})
        wait_idle(client)
        assert client.get("/health").status_code == 200
        assert client.post("/generate", json={"text": "a", "sampling_params": SAMPLING}).status_code == 200
        free_rows = pool(client)[1:]
        assert free_rows == (8, 8)
        assert client.post("/flush_cache").status_code == 200


@pytest.mark.exhaustive
@given(call=CALLS)
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_more_bodies(server, call):
    """The same with fresh examples every time."""
    check_call(server, *call)
