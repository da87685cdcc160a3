"""Model paths: embedded name, directory, hub id; a clear error names the path and what was tried."""

from __future__ import annotations

import huggingface_hub
import pytest

from sgling.srt.config import model_path
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_path import is_embedded, resolve_model_path


def test_embedded_model(tmp_path, monkeypatch):
    monkeypatch.setattr(model_path, "ASSETS_DIR", tmp_path)
    with pytest.raises(ServerArgsError, match="missing from this installation"):
        resolve_model_path("ling3-pico")
    (tmp_path / "ling3-pico").mkdir()
    (tmp_path / "ling3-pico" / "config.json").write_text("{}")
    assert resolve_model_path("ling3-pico") == tmp_path / "ling3-pico"
    assert is_embedded("ling3-pico")
    assert is_embedded(str(tmp_path / "ling3-pico"))
    assert not is_embedded("inclusionAI/Ling-3.0-flash")


def test_directory_wins_over_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    assert resolve_model_path(str(tmp_path)) == tmp_path.resolve()


def test_file_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ServerArgsError, match="is a file"):
        resolve_model_path(str(file))


def test_hub_id_is_downloaded(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append((name, options)) or str(tmp_path)
    )
    assert resolve_model_path("org/name", "v1", "/cache") == tmp_path
    assert asked == [("org/name", {"revision": "v1", "cache_dir": "/cache"})]


def test_failed_download_names_everything_tried(monkeypatch):
    def offline(*_args, **_options):
        raise ConnectionError("no route\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ServerArgsError) as caught:
        resolve_model_path("org/name", "v1")
    message = str(caught.value)
    for part in ("'org/name'", "ling3-pico", "directory org/name", "at revision v1", "ConnectionError: no route"):
        assert part in message
    assert "long story" not in message


def test_no_hub_id():
    with pytest.raises(ServerArgsError, match="not a valid hub id"):
        resolve_model_path("/no/such/directory")
