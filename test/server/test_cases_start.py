"""What cannot be served is refused before anything starts, with a message that names it (launch cases)."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from model.tiny_drafter import drafter_config, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.entrypoints.http_server import launch_server
from sgling.srt.managers.io_struct import SchedulerDied
from sgling.srt.managers.scheduler_job import make_job, serve_scheduler
from sgling.srt.managers.text_codec import load_tokenizer
from sgling.srt.model_executor.memory_plan import MemoryPlanError
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
