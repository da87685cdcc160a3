"""Weights: what a checkpoint must hold, where each tensor comes from, and the models built from it."""

from sgling.srt.model_loader.errors import ModelLoadError
from sgling.srt.model_loader.loader import LoadedModel, LoadReport, get_model

__all__ = ["LoadReport", "LoadedModel", "ModelLoadError", "get_model"]
