"""SamplingParams: defaults, readers, ranges; every bad input names its field."""

import msgspec
import pytest

from sgling.srt.sampling.sampling_params import SamplingParams, SamplingParamsError

V = 100
TOKENIZER = object()


def build(body, tokenizer=TOKENIZER):
    params = SamplingParams.from_dict(body)
    params.normalize(tokenizer)
    params.verify(V)
    return params


def test_defaults():
    params = build({})
    assert params == SamplingParams(max_new_tokens=128)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.n) == (1.0, 1.0, -1, 0.0, 1)
    assert not params.is_greedy and params.skip_special_tokens and params.spaces_between_special_tokens
    assert SamplingParams.from_dict({}, default_max_new_tokens=None).max_new_tokens is None


def test_null_means_default_for_every_key():
    assert build(dict.fromkeys(SamplingParams.__struct_fields__)) == build({})


def test_full_body():
    params = build(
        {
            "max_new_tokens": 0,
            "temperature": 2,
            "top_p": 1,
            "top_k": 10**9,
            "min_p": 1,
            "frequency_penalty": -2,
            "presence_penalty": 2.0,
            "repetition_penalty": 2,
            "n": 3,
            "stop": ["b", "a", "b"],
            "stop_token_ids": [5, 0, 99, 5],
            "stop_regex": r"\d+",
            "logit_bias": {"7": -100, 8: 0.5},
            "sampling_seed": -(2**63),
            "ignore_eos": True,
            "custom_params": {"x": 1},
            "stream_interval": 1,
            "beam_width": 1,
        }
    )
    assert params.stop == ["b", "a"] and params.stop_token_ids == [0, 5, 99] and params.stop_regex == [r"\d+"]
    assert params.logit_bias == {7: -100.0, 8: 0.5} and params.sampling_seed == -(2**63)


@pytest.mark.parametrize("body", [{"temperature": 0}, {"temperature": 1e-12}, {"top_k": 1}, {"temperature": -0.0}])
def test_greedy_spellings_are_equal(body):
    params = build({**body, "top_p": 0.5, "min_p": 0.1})
    assert params.is_greedy and params == SamplingParams(max_new_tokens=128, temperature=0.0)


def test_smallest_sampled_temperature():
    assert not build({"temperature": 1e-6}).is_greedy and build({"temperature": 1e9}).temperature == 1e9


@pytest.mark.parametrize("stop", [[], None])
def test_no_stop(stop):
    assert build({"stop": stop}).stop == []


NAN, INF = float("nan"), float("inf")
BAD = [
    *[("temperature", value) for value in (-1, -1e-12, NAN, INF, 1e10, True, "1", [1], 10**400)],
    *[("top_p", value) for value in (0, -0.1, 1.5, NAN, False, "0.9")],
    *[("top_k", value) for value in (0, -2, 2.5, True, 2**63, "5")],
    *[("min_p", value) for value in (-0.1, 1.1, NAN, INF)],
    *[("repetition_penalty", value) for value in (0, -1, 2.1, NAN)],
    *[("frequency_penalty", value) for value in (100, -2.1, NAN, -INF)],
    *[("presence_penalty", value) for value in (2.01, NAN, {})],
    *[("n", value) for value in (0, -1, 1.0, True, 10**9)],
    *[("max_new_tokens", value) for value in (-1, 1.5, "7", True, 2**63)],
    *[("min_new_tokens", value) for value in (-1, 129, True)],
    *[("stop", value) for value in ("", ["a", ""], [None], 5, {}, [["a"]], [str(i) for i in range(33)], ["a"] * 33)],
    *[("stop_token_ids", value) for value in ([-5], [V], [2**40], ["1"], [1.0], [True], 3, [2**64])],
    *[("stop_regex", value) for value in ("(", "", ["a", 1])],
    *[("logit_bias", value) for value in ({"99999999": 1}, {"-1": 1}, {"x": 1}, {1.5: 1}, {V: 1}, {"1": NAN})],
    *[("logit_bias", value) for value in ({"1": "2"}, {"1": True}, {"1": 1e10}, [1], {"9" * 50: 1})],
    *[("sampling_seed", value) for value in (2**63, -(2**63) - 1, 1.5, "1", False)],
    *[("ignore_eos", value) for value in (1, "true", 0)],
    *[("skip_special_tokens", 0), ("spaces_between_special_tokens", "no"), ("no_stop_trim", [])],
    *[("json_schema", "{}"), ("regex", "a+"), ("ebnf", "root ::= x"), ("structural_tag", "{}"), ("json_schema", {})],
    *[("custom_params", 3), ("stream_interval", 0), ("stream_interval", 1.5), ("beam_width", 2)],
]


@pytest.mark.parametrize("name,value", BAD)
def test_bad_value_names_its_field(name, value):
    with pytest.raises(SamplingParamsError, match=name) as caught:
        build({name: value})
    assert caught.value.field == name and len(str(caught.value)) < 250


@pytest.mark.parametrize("name,value", [("top_p", 1.5), ("temperature", -1), ("min_p", NAN), ("top_k", 0)])
def test_greedy_rewrite_does_not_hide_bad_filters(name, value):
    with pytest.raises(SamplingParamsError, match=name):
        build({"temperature": 0, "top_k": 1, name: value})


def test_message_shows_the_value():
    with pytest.raises(SamplingParamsError, match=r"top_p must be in \(0, 1\], got 1.5"):
        build({"top_p": 1.5})
    with pytest.raises(SamplingParamsError, match=r"token id 99999999 is outside the vocabulary \[0, 100\)"):
        build({"logit_bias": {"99999999": 1}})


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_body_must_be_an_object(body):
    with pytest.raises(SamplingParamsError, match="must be an object"):
        SamplingParams.from_dict(body)


def test_unknown_key():
    with pytest.raises(SamplingParamsError, match="unknown sampling parameter 'foo'"):
        build({"foo": 1})


def test_structured_output_says_what_is_missing():
    with pytest.raises(SamplingParamsError, match="ebnf: structured output is not built yet"):
        build({"ebnf": "root ::= x"})


def test_min_tokens_against_the_limit():
    assert build({"min_new_tokens": 4, "max_new_tokens": 4}).min_new_tokens == 4
    params = SamplingParams(min_new_tokens=10**6)  # no limit of its own
    params.verify(V)
    with pytest.raises(SamplingParamsError, match=r"min_new_tokens must be at most max_new_tokens \(3\), got 4"):
        build({"min_new_tokens": 4, "max_new_tokens": 3})


def test_verify_catches_what_was_set_directly():
    for name, value in (("temperature", NAN), ("presence_penalty", INF), ("n", 0)):
        with pytest.raises(SamplingParamsError, match=name):
            SamplingParams(**{name: value}).verify(V)


def test_stop_strings_need_a_tokenizer():
    assert build({"stop_token_ids": [3]}, tokenizer=None).stop_token_ids == [3]
    with pytest.raises(SamplingParamsError, match="stop needs a tokenizer"):
        build({"stop": "x"}, tokenizer=None)


def test_survives_the_wire():
    params = build({"logit_bias": {"5": 1.5}, "stop": "x", "custom_params": {"a": [1]}, "sampling_seed": 2**63 - 1})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
