"""Server flags: every published launch line parses; refusals, corrections and defaults are the documented ones."""

from __future__ import annotations

import json
import logging
import pickle
import shlex

import pytest

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.flags import Kind, ServerArgsError, flag_fields, option_name
from sgling.srt.config.generate_args import GenerateArgs
from sgling.srt.config.server_args import INVARIANT_ROWS, ServerArgs
from sgling_kernel.dispatch import SMALL_ROWS

LING = "--model-path inclusionAI/Ling-3.0-flash"
COOKBOOK = f"{LING} --tp 4 --mem-fraction-static 0.8 --host 0.0.0.0 --port 30000"
BLOG = f"{LING} --tp-size 4 --trust-remote-code --attention-backend trtllm_mla"
DRAFT = "--speculative-draft-model-path inclusionAI/Ling-3.0-flash-dspark"
YARN = json.dumps({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
SERVED = {
    "cookbook": (f"{COOKBOOK} --speculative-algorithm NEXTN", (3, 4)),
    "blog": (
        f"{BLOG} --speculative-algorithm NEXTN --speculative-num-steps 5 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 6 --flashinfer-allreduce-fusion-backend auto --mem-fraction-static 0.85",
        (5, 6),
    ),
    "model card": (
        f"{LING} --tp-size 4 --trust-remote-code --speculative-algorithm NEXTN --mem-fraction-static 0.8 "
        f"--json-model-override-args '{YARN}' --reasoning-parser ling3 --tool-call-parser ling3",
        (3, 4),
    ),
    "project CI": (
        f"{LING} --trust-remote-code --tp-size 4 --mem-fraction-static 0.55 --max-running-requests 4",
        (0, 1),
    ),
}
DSPARK = {
    "cookbook DSPARK": (
        f"{COOKBOOK} --speculative-algorithm DSPARK {DRAFT} --enable-linear-replayssm-spec "
        "--linear-replayssm-cache-len 32"
    ),
    "blog DSPARK": (
        f"{BLOG} --speculative-algorithm DSPARK {DRAFT} --flashinfer-allreduce-fusion-backend auto "
        "--disable-radix-cache"
    ),
}
PUBLIC_DRAFTER = {
    "architectures": ["LingDSparkModel"], "vocab_size": 157184, "hidden_size": 2560, "num_hidden_layers": 5,
    "num_attention_heads": 32, "head_dim": 128, "intermediate_size": 6144, "rope_theta": 6e6, "block_size": 8,
    "max_position_embeddings": 262144, "target_layer_ids": [1, 11, 23, 29, 35], "mask_token_id": 157183,
    "markov_rank": 256, "markov_head_type": "vanilla",
}  # fmt: skip
REFUSED = {
    "cookbook fp8": (f"{COOKBOOK} --speculative-algorithm NEXTN --ep-size 4", "--ep-size 4: not built yet"),
}


def resolve(line: str) -> ServerArgs:
    return ServerArgs.from_cli(shlex.split(f"--device cpu {line}"))


@pytest.mark.parametrize("name", SERVED)
def test_published_lines_are_served(name):
    line, (steps, width) = SERVED[name]
    args = resolve(line)
    assert args.tp_size == 4
    assert (args.spec.num_steps, args.spec.width) == (steps, width)


@pytest.mark.parametrize("name", REFUSED)
def test_published_lines_of_missing_features_parse_and_say_so(name):
    line, message = REFUSED[name]
    assert ServerArgs.parse(shlex.split(line)).tp_size == 4
    with pytest.raises(ServerArgsError, match=message):
        resolve(line)


@pytest.mark.parametrize("name", DSPARK)
def test_published_dspark_lines_resolve_and_are_completed_by_the_drafter(name, monkeypatch):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "static")
    args = resolve(DSPARK[name])
    assert (args.spec.algorithm, args.spec.drafter, args.tp_size) == ("DSPARK", None, 4)
    args = args.with_drafter(DSparkConfig.from_dict(PUBLIC_DRAFTER))
    assert (args.spec.width, args.spec.num_steps, args.speculative_num_draft_tokens) == (9, 1, 9)
    assert args.spec.ring_length >= 2 * args.spec.width


@pytest.mark.parametrize("flags", ["--speculative-draft-model-path d", "--speculative-dspark-block-size 4",
                                   "--speculative-use-rejection-sampling"])  # fmt: skip
@pytest.mark.parametrize("algorithm", ["NEXTN", "none"])
def test_dspark_flags_need_dspark(algorithm, flags):
    with pytest.raises(ServerArgsError, match="only with --speculative-algorithm DSPARK"):
        resolve(f"--speculative-algorithm {algorithm} {flags}")


def test_defaults_on_the_cpu():
    args = resolve("")
    assert (args.model_path, args.tokenizer_path, args.served_model_name) == ("ling3-pico",) * 3
    assert (args.device, args.dtype, args.page_size) == ("cpu", "float32", 1)
    assert (args.max_running_requests, args.chunked_prefill_size) == (16, 2048)
    assert (args.host, args.port, args.decode_log_interval) == ("127.0.0.1", 30000, 40)
    assert args.random_seed >= 0
    assert args.notices == ()


@pytest.mark.parametrize(
    ("flags", "requests"),
    [
        ("--speculative-algorithm none", 48),
        ("--speculative-num-steps 2", 48),
        ("--speculative-num-steps 5", 26),
        ("--speculative-algorithm DSPARK", 9),  # blocks of 16, until the drafter is read
        ("--speculative-num-steps 7 --max-running-requests 64", 64),
    ],
)
def test_by_default_no_step_of_a_gpu_exceeds_the_row_invariant_kernels(monkeypatch, flags, requests):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve(f"{flags} --device cuda").max_running_requests == requests
    assert INVARIANT_ROWS == SMALL_ROWS


def test_speculation_is_on_for_the_embedded_model_only():
    embedded, other = resolve(""), resolve("--model-path some/model")
    assert embedded.spec.enabled
    assert (embedded.spec.num_steps, embedded.spec.topk, embedded.spec.width) == (3, 1, 4)
    assert embedded.speculative_algorithm == "NEXTN"
    assert not other.spec.enabled
    assert other.speculative_algorithm is None
    off = resolve("--speculative-algorithm none")
    assert not off.spec.enabled
    assert (off.spec.num_steps, off.spec.width) == (0, 1)


@pytest.mark.parametrize("name", ["NEXTN", "nextn", "EAGLE", "eagle"])
def test_algorithm_names(name):
    assert resolve(f"--model-path m --speculative-algo {name}").spec.algorithm == "NEXTN"


@pytest.mark.parametrize("name", ["eagle3", "STANDALONE", "NGRAM", "DFLASH", "UNO"])
def test_algorithms_not_built(name):
    with pytest.raises(ServerArgsError, match=f"{name.upper()} is not built yet"):
        resolve(f"--speculative-algorithm {name}")


def test_unknown_algorithm():
    with pytest.raises(ServerArgsError, match="MEDUSA: unknown"):
        resolve("--speculative-algorithm MEDUSA")


@pytest.mark.parametrize("steps", range(8))
def test_every_width_from_1_to_8(steps):
    spec = resolve(f"--speculative-num-steps {steps}").spec
    assert (spec.enabled, spec.num_steps, spec.width, spec.num_draft_tokens) == (True, steps, steps + 1, steps + 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--speculative-num-draft-tokens 4", "--speculative-num-steps must be set"),
        ("--speculative-eagle-topk 1", "--speculative-num-steps must be set"),
        ("--speculative-num-steps 3 --speculative-eagle-topk 4", "trees are refused"),
        ("--speculative-num-steps 8", "must be 0 to 7"),
        ("--speculative-num-steps -1", "must be 0 to 7"),
        ("--speculative-algorithm none --speculative-num-steps 3", "--speculative-num-steps: only with"),
        ("--model-path m --speculative-num-steps 3", "only with --speculative-algorithm"),
        ("--linear-replayssm-cache-len 24", "power of two"),
        ("--linear-replayssm-cache-len 0", "power of two"),
        ("--speculative-num-steps 7 --linear-replayssm-cache-len 8", "at least 16, twice the verify width 8"),
        ("--linear-rollback staged --enable-linear-replayssm-spec", "contradicts"),
        ("--linear-rollback staged --linear-replayssm-cache-len 16", "contradicts"),
    ],
)
def test_speculation_refusals(line, message):
    with pytest.raises(ServerArgsError, match=message):
        resolve(line)


def test_draft_tokens_are_corrected_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        args = resolve("--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6")
    assert (args.spec.width, args.speculative_num_draft_tokens) == (3, 3)
    assert "corrected to 3" in caplog.text


def test_rollback_schemes():
    default = resolve("")
    assert (default.spec.rollback, default.linear_rollback) == ("staged", "staged")  # on a CPU
    assert resolve("--linear-rollback replay").spec.rollback == "replay"
    ring = resolve("--enable-linear-replayssm-spec").spec
    assert (ring.rollback, ring.ring_length) == ("replay", 16)
    assert resolve("--linear-rollback staged").spec.rollback == "staged"
    assert resolve("--enable-linear-replayssm-spec --linear-replayssm-cache-len 32").spec.ring_length == 32


@pytest.mark.parametrize(
    "line",
    [
        "--quantization fp8",
        "--kv-cache-dtype fp8_e4m3",
        "--pp-size 2",
        "--dp 2",
        "--ep 2",
        "--nnodes 2",
        "--enable-lora",
        "--disaggregation-mode prefill",
        "--grammar-backend xgrammar",
        "--speculative-accept-threshold-single 0.5",
        "--mamba-ssm-dtype bfloat16",
        "--tokenizer-worker-num 2",
        "--schedule-policy lpm",
    ],
)
def test_missing_features_are_start_up_errors(line):
    with pytest.raises(ServerArgsError, match="not built yet") as caught:
        resolve(line)
    given = ServerArgs.parse(line.split())
    (field,) = [f for f, _ in flag_fields(ServerArgs) if getattr(given, f.name) != getattr(ServerArgs(), f.name)]
    assert option_name(field.name) in str(caught.value)


@pytest.mark.parametrize("line", ["--mamba-ssm-dtype float32", "--grammar-backend none", "--kv-cache-dtype bf16"])
def test_values_that_ask_for_nothing_are_accepted(line):
    assert resolve(line).notices == ()


def test_hints_are_accepted_with_a_notice(caplog):
    with caplog.at_level(logging.WARNING):
        args = resolve("--attention-backend fa3 --enable-torch-compile --cuda-graph-bs-prefill 1 2 --trust-remote-code")
    assert args.attention_backend == "fa3"
    assert args.cuda_graph_bs_prefill == [1, 2]
    assert [notice.split(" accepted")[0] for notice in args.notices] == [
        "--attention-backend fa3",
        "--enable-torch-compile",
        "--cuda-graph-bs-prefill [1, 2]",
    ]
    assert all(notice in caplog.text for notice in args.notices)
    assert resolve("--disable-radix-cache --trust-remote-code").notices == ()


def test_what_to_capture_is_noted_where_nothing_is_captured():
    assert [notice.split()[0] for notice in resolve("--cuda-graph-bs-decode 1 2 --cuda-graph-all-widths").notices] == [
        "--cuda-graph-bs-decode",
        "--cuda-graph-all-widths",
    ]


def test_keywords():
    args = ServerArgs.from_kwargs(
        model_path="m", device="cpu", tp_size=2, mem_fraction_static=0.5, json_model_override_args='{"a": 1}'
    )
    assert (args.tp_size, args.mem_fraction_static, args.json_model_override_args) == (2, 0.5, {"a": 1})
    with pytest.raises(TypeError, match="'tp'"):
        ServerArgs.from_kwargs(tp=2)
    for wrong in ({"tp_size": "2"}, {"tp_size": True}, {"model_path": None}, {"cuda_graph_bs_decode": 1}):
        with pytest.raises(TypeError, match=repr(next(iter(wrong)))):
            ServerArgs.from_kwargs(**wrong)
    with pytest.raises(ServerArgsError, match="--dtype"):
        ServerArgs.from_kwargs(dtype="int8")


def test_report_is_plain_json_and_hides_keys():
    args = resolve("--api-key secret --admin-api-key other --attention-backend triton")
    shown = json.dumps(args.to_dict())
    assert "secret" not in shown
    assert "other" not in shown
    report = json.loads(shown)
    for name in ("model_path", "tp_size", "dtype", "random_seed", "attention_backend", "speculative_num_steps"):
        assert name in report
    assert report["notices"] == list(args.notices)


def test_resolved_arguments_are_frozen_and_travel_to_other_processes():
    args = resolve("")
    with pytest.raises(AttributeError):
        args.port = 1
    assert pickle.loads(pickle.dumps(args)) == args


def test_every_flag_is_unique_and_explained():
    names = [name for field, spec in flag_fields(ServerArgs) for name in (option_name(field.name), *spec.aliases)]
    assert len(names) == len(set(names))
    assert all(spec.help for _, spec in flag_fields(ServerArgs))
    assert {spec.kind for _, spec in flag_fields(ServerArgs)} == set(Kind)


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as caught:
        ServerArgs.parse(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--speculative-num-draft-tokens" in shown
    assert "[not built] quantised weights" in shown


def test_generate_takes_server_flags_too():
    args = GenerateArgs.from_argv(["hello there", "--tp", "2", "--max-new-tokens", "7", "--chat"])
    assert (args.prompt, args.chat, args.given()) == ("hello there", True, {"tp_size": 2})
    assert args.sampling_params()["max_new_tokens"] == 7
    with pytest.raises(SystemExit) as caught:
        GenerateArgs.from_argv(["--tp", "2"])
    assert caught.value.code == 2
