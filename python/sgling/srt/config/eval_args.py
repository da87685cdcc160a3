"""Flags of ``sgling eval``; those of gsm8k are upstream's few-shot script's."""

from __future__ import annotations

from dataclasses import dataclass

from sgling.srt.config.bench_args import BACKENDS
from sgling.srt.config.flags import flag
from sgling.srt.config.gate_args import Subject

PROMPT_FORMATS = ("few-shot", "chat")


@dataclass(frozen=True, kw_only=True)
class EvalArgs(Subject):
    """What every evaluation has."""

    num_questions: int = flag(200, "questions to ask")
    max_new_tokens: int = flag(512, "tokens per answer, at most")
    parallel: int = flag(128, "questions in flight, at most")
    temperature: float = flag(0.0, "0 = greedy")
    json: str | None = flag(None, "file for the machine-readable result, answers included")
    disable_tqdm: bool = flag(False, "no progress bar")

    def error(self) -> str | None:
        """What is wrong with the flags together."""
        if min(self.num_questions, self.max_new_tokens, self.parallel) <= 0:
            return "--num-questions, --max-new-tokens and --parallel must be positive"
        return None


@dataclass(frozen=True, kw_only=True)
class Gsm8kArgs(EvalArgs):
    """Grade-school mathematics, few-shot over the completion API; prints what upstream's script prints."""

    data_path: str | None = flag(None, "JSONL of {question, answer}; default: the built-in arithmetic set")
    num_shots: int = flag(5, "worked examples before a question (few-shot)")
    prompt: str | None = flag(
        None,
        "few-shot = raw text, chat = the chat template; default: few-shot for a file, chat for the built-in set",
        choices=PROMPT_FORMATS,
    )

    def error(self) -> str | None:
        """What is wrong with the flags together."""
        return "--num-shots must not be negative" if self.num_shots < 0 else super().error()

    @property
    def prompt_format(self) -> str:
        """The format used."""
        return self.prompt or ("few-shot" if self.data_path else "chat")


@dataclass(frozen=True, kw_only=True)
class ToolsArgs(EvalArgs):
    """Tool calls of the built-in scenario: exact, well-formed, offered."""

    num_questions: int = flag(100, "prompts to send")
    max_new_tokens: int = flag(192, "tokens per answer, at most")
    seed: int = flag(1, "which held-out prompts")
    backend: str = flag(
        "sglang", "sglang = native text, sglang-oai-chat = calls as the server parses them", choices=BACKENDS
    )


@dataclass(frozen=True, kw_only=True)
class PicoArgs(EvalArgs):
    """The gates of the embedded model: held-out prompts through the serving path; exit status 1 names those missed."""

    num_questions: int = flag(24, "prompts per scenario made of held-out words")
    family_questions: int = flag(12, "prompts per scenario from families never trained on")
    width_questions: int = flag(6, "held-out prompts per scenario that are asked again at every other verify width")
    max_new_tokens: int = flag(1024, "tokens per answer, at most; an answer must end before")
    parallel: int = flag(8, "questions in flight, at most")
    seed: str = flag("eval", "which prompts")
    report_only: bool = flag(False, "exit status 0 even when gates are missed")
    json: str | None = flag(None, "file for the machine-readable result")

    def error(self) -> str | None:
        """What is wrong with the flags together."""
        if not 0 < self.width_questions <= self.num_questions or self.family_questions <= 0:
            return "--family-questions must be positive, --width-questions in 1 ... --num-questions"
        return super().error()


@dataclass(frozen=True, kw_only=True)
class DraftersArgs(EvalArgs):
    """Drafters of one target side by side: accept length by scenario and position, TPOT; held-out prompts."""

    drafters: list[str] | None = flag(None, "DSPARK drafters, names or directories; default: the embedded ones")
    num_questions: int = flag(12, "held-out prompts per scenario")
    max_new_tokens: int = flag(768, "tokens per answer, at most")
    parallel: int = flag(1, "questions in flight; 1 is what TPOT is meant for")
    widths: list[int] | None = flag(None, "NEXTN verify widths; default: 2 ... 8")
    seed: str = flag("eval", "which prompts")
    report_only: bool = flag(False, "exit status 0 even when the first drafter does not beat NEXTN")

    def error(self) -> str | None:
        """What is wrong with the flags together."""
        if self.is_live:
            return "the engines are started here: --base-url and --port do not apply"
        if self.widths is not None and (not self.widths or min(self.widths) < 2):
            return "--widths must be at least 2"
        return super().error()
