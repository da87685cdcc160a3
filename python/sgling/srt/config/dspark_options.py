"""What DSPARK's flags, its environment switch and the drafter's config come to."""

from __future__ import annotations

from dataclasses import dataclass

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.dspark_tables import SpsTable, read_sps_table, read_temperatures
from sgling.srt.config.environ import read_environ
from sgling.srt.config.flags import ServerArgsError

VERIFY_MODES = ("static", "compact", "cap-accept")
DSPARK_ONLY = (
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_load_format",
    "speculative_dspark_block_size",
    "speculative_use_rejection_sampling",
    "speculative_dspark_sps_table_path",
    "speculative_dspark_confidence_sts_path",
    "speculative_dspark_align_verify_tokens_to_graph_tier",
)


@dataclass(frozen=True)
class DSparkOptions:
    """The block drafter's part of the resolved speculation.

    Attributes:
        drafter: its shape.
        drafts: drafts used of each block, 1 .. block size.
        rejection_sampling: p/q rejection instead of sampled verify.
        verify_mode: "static" (all drafts), "compact" (a budget of packed rows) or "cap-accept" (the same budget, all
            rows run); above batch 1.
        scheduled: whether confidences are computed and steps carry a budget.
        temperatures: calibration of the confidence, one per used draft.
        sps_table: cost of rounds, None = measured at start when it is needed.
        align: spend the rows up to the next multiple of the width.
    """

    drafter: DSparkConfig
    drafts: int
    rejection_sampling: bool
    verify_mode: str
    scheduled: bool
    temperatures: tuple[float, ...]
    sps_table: SpsTable | None
    align: bool


def read_verify_mode() -> str:
    """``SGLANG_RAGGED_VERIFY_MODE``; raises :class:`ServerArgsError` for an unknown one."""
    mode = read_environ().ragged_verify_mode
    if mode not in VERIFY_MODES:
        raise ServerArgsError(f"SGLANG_RAGGED_VERIFY_MODE={mode}: known are {', '.join(VERIFY_MODES)}")
    return mode


def dspark_options(args, drafter: DSparkConfig) -> DSparkOptions:
    """Options of resolved ``args``; raises :class:`ServerArgsError` for a flag that contradicts the drafter."""
    asked, size = args.speculative_dspark_block_size, drafter.block_size
    drafts = size if asked is None else asked
    if not 1 <= drafts <= size:
        raise ServerArgsError(
            f"--speculative-dspark-block-size {drafts}: must be 1 to {size}, the drafter's block size"
        )
    mode = read_verify_mode()
    by_confidence = [f"SGLANG_RAGGED_VERIFY_MODE={mode}"] if mode != "static" else []
    by_confidence += ["--speculative-depth confidence"] if args.speculative_depth == "confidence" else []
    if by_confidence and not drafter.confidence:
        raise ServerArgsError(f"{by_confidence[0]}: the drafter has no confidence head")
    path = args.speculative_dspark_confidence_sts_path
    temperatures = read_temperatures(path, size) if path else (1.0,) * size
    table = args.speculative_dspark_sps_table_path
    return DSparkOptions(
        drafter=drafter,
        drafts=drafts,
        rejection_sampling=args.speculative_use_rejection_sampling,
        verify_mode=mode,
        scheduled=bool(by_confidence),
        temperatures=temperatures[:drafts],
        sps_table=read_sps_table(table) if table else None,
        align=args.speculative_dspark_align_verify_tokens_to_graph_tier,
    )


def refuse_dspark_flags(args) -> None:
    """Raise for a flag of the block drafter when another algorithm runs."""
    for name in DSPARK_ONLY:
        value = getattr(args, name)
        if value is not None and value is not False:  # 0 asks for something too
            raise ServerArgsError(f"--{name.replace('_', '-')}: only with --speculative-algorithm DSPARK")
