"""Flags: which model, in which precision, on which device."""

from __future__ import annotations

from dataclasses import dataclass

from sgling.srt.config.flags import flag, hint, not_built
from sgling.srt.config.model_path import DEFAULT_MODEL


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Model, tokenizer, precision, device and parallel size."""

    model_path: str = flag(DEFAULT_MODEL, "model directory, hub id, or the name of an embedded model", "--model")
    tokenizer_path: str | None = flag(None, "tokenizer directory or hub id; default: the model path")
    tokenizer_mode: str = hint("auto", "the fast tokenizer is the only one", choices=("auto", "fast", "slow"))
    trust_remote_code: bool = hint(False, "no remote code is ever run", neutral=(True,))
    revision: str | None = flag(None, "branch, tag or commit of a hub model")
    download_dir: str | None = flag(None, "where hub downloads are kept; default: the hub's own cache")
    load_format: str = flag(
        "auto", "auto, safetensors, or dummy = random weights without files", choices=("auto", "safetensors", "dummy")
    )
    json_model_override_args: dict = flag({}, "JSON object merged into the model config")
    context_length: int | None = flag(None, "cap of prompt + output, in tokens; default: from the config")
    dtype: str = flag(
        "auto",
        "weights and activations; auto = float32 on the CPU, bfloat16 on a GPU",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    device: str = flag("auto", "auto = a GPU if there is one", choices=("auto", "cpu", "cuda"))
    tp_size: int = flag(1, "tensor-parallel ranks", "--tensor-parallel-size", "--tp")
    random_seed: int | None = flag(None, "seed of requests that bring none; default: drawn at start-up")
    enable_deterministic_inference: bool = flag(
        False, "on the CPU: a row's bits do not depend on how many rows ride along (the GPU's never do)"
    )
    model_type: str = hint("auto", "language models are the only kind", choices=("auto", "llm"), neutral=("llm",))
    quantization: str | None = not_built(None, "quantised weights")
    kv_cache_dtype: str = not_built("auto", "a quantised KV cache", neutral=("bf16", "bfloat16"))
    enable_fp32_lm_head: bool = hint(False, "the output head always accumulates and answers in float32")
    mamba_ssm_dtype: str | None = not_built(None, "a recurrent state that is not float32", neutral=("float32",))
