"""What cannot be served is refused before anything starts, with a message that names it (launch cases)."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from types import SimpleNamespace

import pytest

from model.tiny_drafter import drafter_config, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.acceptance import read_acceptance
from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.model_path import ASSETS_DIR
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.entrypoints.http_server import launch_server
from sgling.srt.managers.io_struct import SchedulerDied
from sgling.srt.managers.scheduler_job import make_job, serve_scheduler
from sgling.srt.managers.text_codec import load_tokenizer
from sgling.srt.model_executor.memory_plan import MemoryPlanError
from sgling.srt.model_loader.checkpoint import stored_tensors
from sgling.srt.model_loader.errors import ModelLoadError
from sgling.srt.parser.chat_template import ChatTemplate, ChatTemplateError
from spec.harness import Harness, request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)


def args(model_dir, **changes) -> ServerArgs:
    return ServerArgs.from_kwargs(model_path=str(model_dir), device="cpu", port=0, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 4096}, "--context-length 4096: the model covers 2048"),
        ({"preferred_sampling_params": {"temperature": -1}}, "--preferred-sampling-params: temperature"),
        ({"preferred_sampling_params": {"top_kk": 1}}, "--preferred-sampling-params: unknown sampling parameter"),
        ({"preferred_sampling_params": {"stop_token_ids": [512]}}, "--preferred-sampling-params: stop_token_ids"),
        ({"context_length": 1}, "--context-length 1: must be at least 2"),
        ({"context_length": 5, "speculative_algorithm": "NEXTN"}, "--context-length 5: must be at least 6"),
        ({"tp_size": 7}, "--tp-size 7: config.json: "),
        ({"tokenizer_path": "/nowhere"}, "--tokenizer-path: model '/nowhere' not found"),
        ({"tokenizer_path": str(ASSETS_DIR)}, "--tokenizer-path .*: .* has no tokenizer.json"),
        ({"json_model_override_args": {"vocab_size": 0}}, "--json-model-override-args .*: config.json: vocab_size=0"),
    ],
)
def test_arguments_that_only_the_model_can_judge(model_dir, changes, message):
    """Case E06: a preferred parameter out of range let the server start and then failed every request."""
    with pytest.raises(ServerArgsError, match=message):
        make_job(args(model_dir, **changes))


@pytest.mark.parametrize(
    "name", ["SGLANG_HEALTH_CHECK_TIMEOUT", "SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_REQ_RUNNING_TIMEOUT"]
)
def test_an_environment_variable_that_cannot_be_read(model_dir, monkeypatch, name):
    """Case F04: it was found by the first health probe, which then failed for ever."""
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ServerArgsError, match=name):
        make_job(args(model_dir))


def test_a_probe_that_cannot_wait_is_refused(model_dir, monkeypatch):
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "0")
    with pytest.raises(ServerArgsError, match="SGLANG_HEALTH_CHECK_TIMEOUT must be above 0"):
        make_job(args(model_dir))


@pytest.mark.parametrize("path", ["/nowhere", str(ASSETS_DIR), __file__])
def test_a_model_that_is_not_there_is_refused_by_its_flag(path):
    with pytest.raises(ServerArgsError, match="^--model-path"):
        make_job(args(path))


@pytest.mark.parametrize("values", [{"temperature": -1}, {"top_p": "x"}, {"repetition_penalty": 0}, {"top_k": [1]}])
def test_sampling_defaults_of_the_model_that_no_request_could_use(model_dir, tmp_path, values):
    """Every chat request was refused for a value its client had not sent."""
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ServerArgsError, match=f"generation_config.json: {next(iter(values))}"):
        make_job(args(tmp_path))
    make_job(args(tmp_path, sampling_defaults="openai"))


def test_an_override_that_changes_nothing_says_so(model_dir, caplog):
    make_job(args(model_dir, json_model_override_args={"rms_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5}))
    said = [record.message for record in caplog.records if "changes nothing" in record.message]
    assert said == ["--json-model-override-args: rms_norm_epsilon changes nothing here"]


@pytest.mark.parametrize("key", ["architectures", "layer_types", "mlp_layer_types", "eos_token_id", "num_hidden_layers",
                                 "rms_norm_eps", "rope_theta", "kda_lower_bound", "routed_scaling_factor"])  # fmt: skip
@pytest.mark.parametrize("value", [True, 0, -1, 10**40, math.nan, math.inf, "x", {"a": 1}, [[]], [None]])
def test_no_value_in_a_config_is_a_traceback(model_dir, key, value):
    """Some were TypeErrors, a huge layer count filled the memory."""
    raw = json.loads((model_dir / "config.json").read_text())
    with contextlib.suppress(ModelConfigError):
        config = ModelConfig.from_dict({**raw, key: value})
        assert math.isfinite(config.rms_norm_eps + config.rope_theta + config.kda_lower_bound)
        assert config.rms_norm_eps > 0


@pytest.mark.parametrize("template", ["{% for", "/nowhere/template.jinja"])
def test_a_chat_template_that_does_not_compile_or_exist(model_dir, template):
    """It was found after the weights had been loaded."""
    with pytest.raises(ServerArgsError, match="template"):
        launch_server(args(model_dir, chat_template=template))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 256, "mask_token_id": 255}, "drafter vocab_size=256: the target has"),
        ({"mask_token_id": 9999}, "mask_token_id=9999: must be one of"),
        ({"target_layer_ids": [0, 99]}, "the last usable layer"),
        (None, "not found; tried"),
        ("{", "not valid JSON"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_its_flag(model_dir, tmp_path, changes, message):
    """``config.json: mask_token_id=...`` did not say which of the two config.json was meant."""
    folder = tmp_path / "drafter"
    if changes is not None:
        folder.mkdir()
        content = changes if isinstance(changes, str) else json.dumps(drafter_config(**changes))
        (folder / "config.json").write_text(content)
    with pytest.raises(ServerArgsError, match=f"--speculative-draft-model-path.*{message}"):
        make_job(args(model_dir, speculative_algorithm="DSPARK", speculative_draft_model_path=str(folder)))


def test_cut_off_drafter_weights_are_refused_by_their_flag(model_dir, tmp_path):
    weights = write_tiny_drafter(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"--speculative-draft-model-path .*model\.safetensors: .*cut off"):
        Harness(model_dir, speculative_algorithm="DSPARK", speculative_draft_model_path=str(tmp_path))


def test_damaged_tokenizer_files_are_named(tmp_path):
    """Case H01: the tokenizer library and the JSON reader say what is wrong, but not where."""
    (tmp_path / "tokenizer.json").write_text("{bad")
    with pytest.raises(ValueError, match="tokenizer.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    for content in ("{bad", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ChatTemplateError, match=r"tokenizer_config\.json"):
            ChatTemplate.from_dir(tmp_path)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_smallest_pool_that_starts_serves_a_request(model_dir, page_size):
    """Case F02: a pool of one window started and could take no prompt at all."""
    options = {"page_size": page_size, "max_running_requests": 2}
    with pytest.raises(MemoryPlanError, match="at least") as refusal:
        Harness(model_dir, max_total_tokens=page_size, **options)
    least = int(str(refusal.value).split("at least ")[1].split()[0])
    with pytest.raises(MemoryPlanError):
        Harness(model_dir, max_total_tokens=least - 1, **options)
    harness = Harness(model_dir, max_total_tokens=least, **options)
    outcomes = harness.run(*(request(f"r{i}", [5], max_new_tokens=50) for i in range(3)))
    assert all(outcome.reason.type == "length" and outcome.ids for outcome in outcomes.values())


@pytest.mark.parametrize("refusal", [MemoryPlanError, ModelLoadError])
def test_what_cannot_be_served_is_refused_without_a_traceback(caplog, refusal):
    def refuse(*_):
        raise refusal("--max-total-tokens 3: at least 9 are needed")

    sent: list = []
    channel = SimpleNamespace(send=sent.append)
    assert not serve_scheduler(None, channel, ParallelState.single(), refuse)
    assert sent == [SchedulerDied(f"{refusal.__name__}: --max-total-tokens 3: at least 9 are needed")]
    assert [record.exc_info for record in caplog.records] == [None]


JUNK = [None, True, 0, -1, 2.5, 10**40, "", "x", [], [None], ["x"], {}, {"a": 1}, [[]]]
DAMAGED = {
    "model.safetensors.index.json": [*JUNK, *({"weight_map": value} for value in JUNK), {"weight_map": {"t": 5}}],
    "tokenizer_config.json": [
        {"chat_template": value} for value in (*JUNK, [{"name": "default"}], [{"name": [], "template": "x"}])
    ],
    "acceptance.json": [*JUNK, *({"prompts": value, "accept_lengths": value} for value in JUNK)],
    "config.json": [{"dspark_config": value} for value in JUNK] + [{"num_hidden_layers": 10**9, "block_size": 8}],
}
READERS = {
    "model.safetensors.index.json": stored_tensors,
    "tokenizer_config.json": ChatTemplate.from_dir,
    "acceptance.json": read_acceptance,
    "config.json": DSparkConfig.from_dir,
}
REFUSALS = (ServerArgsError, ChatTemplateError, ModelConfigError)


@pytest.mark.parametrize("name", DAMAGED)
def test_no_damaged_file_is_a_traceback(tmp_path, name):
    """Cases H01, H02: every reader of a file refuses by name what it cannot use."""
    for content in DAMAGED[name]:
        (tmp_path / name).write_text(json.dumps(content))
        with contextlib.suppress(*REFUSALS):
            READERS[name](tmp_path)
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(REFUSALS, match="config.json|index.json|acceptance.json"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("entry", [5, {}, {"dtype": "F32", "shape": 5, "data_offsets": [0, 4]},
                                   {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]},
                                   {"dtype": "F32", "shape": [1], "data_offsets": [0]},
                                   {"dtype": "F32", "shape": [1], "data_offsets": ["a", "b"]}])  # fmt: skip
def test_a_damaged_header_names_its_file(tmp_path, entry):
    header = json.dumps({"t": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelLoadError, match="model.safetensors: damaged header"):
        stored_tensors(tmp_path)


def test_a_damaged_tokenizer_ends_the_start_with_one_line(tmp_path, caplog):
    (tmp_path / "tokenizer.json").write_text("{")

    def build(*_):
        load_tokenizer(tmp_path)

    assert not serve_scheduler(None, None, ParallelState.single(), build)
    assert [record.exc_info for record in caplog.records] == [None]
    assert "tokenizer.json: not a tokenizer" in caplog.records[0].message
