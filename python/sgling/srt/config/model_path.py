"""Finds the directory of a model: an embedded name, a directory, or a hub id."""

from __future__ import annotations

from pathlib import Path

from sgling.srt.config.flags import ServerArgsError

ASSETS_DIR = Path(__file__).resolve().parents[2] / "assets"
EMBEDDED_MODELS = ("ling3-pico",)
EMBEDDED_DRAFTERS = ("ling3-pico-dspark-b8", "ling3-pico-dspark-b16")
DEFAULT_MODEL = "ling3-pico"


def is_embedded(model_path: str) -> bool:
    """Whether the path names a model that ships with the package, by name or by its directory."""
    if model_path in EMBEDDED_MODELS:
        return True
    resolved = Path(model_path).expanduser().resolve()
    return any(resolved == ASSETS_DIR / name for name in EMBEDDED_MODELS)


def resolve_model_path(model_path: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Directory with the model's files.

    Order: embedded name, existing directory, hub id (downloaded, or found in the hub's cache). Raises
    :class:`ServerArgsError` that names the path and everything tried.
    """
    if model_path in (*EMBEDDED_MODELS, *EMBEDDED_DRAFTERS):
        directory = ASSETS_DIR / model_path
        if not (directory / "config.json").is_file():
            raise ServerArgsError(f"embedded model {model_path!r} is missing from this installation: no {directory}")
        return directory
    directory = Path(model_path).expanduser()
    if directory.is_dir():
        return directory.resolve()
    tried = [f"embedded models ({', '.join((*EMBEDDED_MODELS, *EMBEDDED_DRAFTERS))})", f"directory {directory}"]
    if directory.exists():
        raise ServerArgsError(f"model {model_path!r} is a file; give the directory that holds config.json")
    return _from_hub(model_path, revision, download_dir, tried)


def _from_hub(model_path: str, revision: str | None, download_dir: str | None, tried: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model_path, revision=revision, cache_dir=download_dir))
    except HFValidationError:
        tried.append("hub (not a valid hub id)")
        cause = None
    except Exception as error:  # the hub client raises its own, HTTP and OS errors alike; all mean "not available"
        at = f" at revision {revision}" if revision else ""
        tried.append(f"hub id {model_path}{at} ({type(error).__name__}: {str(error).splitlines()[0]})")
        cause = error
    raise ServerArgsError(f"model {model_path!r} not found; tried: {'; '.join(tried)}") from cause
