"""Over HTTP, speculation changes nothing but the time: penalties, seeds, stops, limits, logprobs (cases B and C)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from model.tiny_model import write_tiny_checkpoint
from server.real_server import real_server
from server.serving_helpers import small_tokenizer
from sgling.srt.managers.text_codec import TextCodec

WIDTHS = (2, 3, 5, 8)
EOS = 2
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=4)


@pytest.fixture(scope="module")
def on(model_dir):
    server = real_server(model_dir, speculative_num_steps=7, enable_deterministic_inference=True).start()
    server.manager.preparer._limits = server.manager.preparer._limits._replace(max_width=8)  # the front end's own flag
    with server.client() as client:
        yield client
    server.stop()


@pytest.fixture(scope="module")
def off(model_dir):
    server = real_server(model_dir, speculative_algorithm="none", enable_deterministic_inference=True).start()
    with server.client() as client:
        yield client
    server.stop()


def ask(client: httpx.Client, width: int | None = None, **params) -> dict:
    """Final answer of one native request."""
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, **params}}
    body |= {"return_logprob": True, "top_logprobs_num": 2}
    if width is not None:
        body["speculative"] = {"max_width": width}
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, **params) -> list[dict]:
    """Every chunk of one native stream."""
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "ignore_eos": True, **params}, "stream": True}
    body |= {"return_logprob": True, "top_logprobs_num": 2}
    lines = client.post("/generate", json=body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def facts(answer: dict) -> tuple:
    """What must not depend on speculation."""
    meta = answer["meta_info"]
    return answer["text"], answer["output_ids"], meta["finish_reason"], meta["completion_tokens"]


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": -2, "repetition_penalty": 0.5, "logit_bias": {"40": 3}},
        {"temperature": 1.0, "top_p": 0.95, "sampling_seed": 42},
        {"temperature": 1.5, "top_k": 5, "min_p": 0.1, "sampling_seed": -1, "presence_penalty": 1},
        {"temperature": 1.5, "min_p": 1.0, "sampling_seed": 3},
        {"logit_bias": {"40": 100}},
        {"temperature": 1.0, "top_k": 1},
    ],
    ids=lambda params: "-".join(params),
)
def test_sampling_parameters_act_on_every_row_of_a_window(on, off, params):
    """Cases B01, B02, B03, B05."""
    want = facts(ask(off, **params))
    for width in WIDTHS:
        assert facts(ask(on, width, **params)) == want
    if params.get("min_p") == 1.0 or params.get("top_k") == 1:
        assert want[1] == ask(off)["output_ids"]
    if "logit_bias" in params and len(params) == 1:
        assert want[1] == [40] * 24


def test_a_seeded_request_says_the_same_alone_and_among_others(on):
    """Case B03."""
    params = {"temperature": 1.0, "top_p": 0.95}
    alone = ask(on, sampling_seed=42, **params)["output_ids"]
    with ThreadPoolExecutor(8) as pool:
        seeds = [42 if i == 5 else i for i in range(8)]
        answers = list(pool.map(lambda seed: ask(on, sampling_seed=seed, **params)["output_ids"], seeds))
    assert answers[5] == alone
    assert len({tuple(ids) for ids in answers}) == 8


def test_every_token_has_its_logprob_streamed_or_not(on, off):
    """Case B04."""
    want = ask(off)["meta_info"]
    for width in WIDTHS:
        answer = ask(on, width)
        meta = answer["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
        assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 24
        for got, expected in zip(meta["output_token_logprobs"], want["output_token_logprobs"], strict=True):
            assert got[0] == pytest.approx(expected[0], abs=1e-3)
    assert stream(on, max_new_tokens=24)[-1]["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]


def test_a_stop_wins_inside_the_budget_and_the_budget_outside(on, off):
    """Cases C01, C02: every budget up to 24, stop strings and stop ids from the output itself."""
    full = ask(off)
    text, ids = full["text"], full["output_ids"]
    early, late = len(text) // 3, 2 * len(text) // 3
    texts = ({"stop": text[early : early + 2]}, {"stop": ["never", text[late : late + 3]]})
    stops = (*texts, {"stop_token_ids": ids[11:12]})
    for limit in range(1, 25):
        stop = stops[limit % 3]
        want = facts(ask(off, max_new_tokens=limit, **stop))
        assert facts(ask(on, WIDTHS[limit % 4], max_new_tokens=limit, **stop)) == want
        if limit % 4 == 0:
            assert facts(stream(on, max_new_tokens=limit, **stop)[-1]) == want


@pytest.mark.parametrize("minimum", [0, 1, 2, 3, 7, 8, 9, 12])
def test_no_end_before_the_minimum_and_the_end_at_once_behind_it(on, off, minimum):
    """Case C03."""
    params = {"logit_bias": {str(EOS): 100}, "min_new_tokens": minimum, "ignore_eos": False, "max_new_tokens": 40}
    want = ask(off, **params)
    assert want["meta_info"]["completion_tokens"] == minimum + 1
    for width in WIDTHS:
        assert facts(ask(on, width, **params)) == facts(want)
    assert len(ask(on, logit_bias={str(EOS): 100}, max_new_tokens=20)["output_ids"]) == 20


def test_streamed_text_is_never_taken_back_and_adds_up(on):
    """Case C04: over random ids, so with characters cut anywhere."""
    codec = TextCodec(small_tokenizer())
    for seed in range(2):
        params = {"temperature": 1.0, "sampling_seed": seed, "max_new_tokens": 48}
        chunks = stream(on, **params)
        texts = [chunk["text"] for chunk in chunks]
        assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
        assert texts[-1] == codec.decode(chunks[-1]["output_ids"]) == ask(on, **params)["text"]
