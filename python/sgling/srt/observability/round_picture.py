"""One decode round as a picture in a page of its own: lanes of host and device, seams, idle, and a table of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from sgling.srt.observability.rounds import SLEEP, WAIT, Node, Round, mean_nodes, summary, typical_round
from sgling.srt.observability.step_trace import DEVICE, HOST, Span

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 1180, 90, 34, 26, 30
_COLOURS = {
    "draft": "#7aa6da",
    "verify": "#e0995e",
    "extend": "#7fbf7f",
    "commit": "#c792c7",
    "decode": "#e0995e",
    "prefill": "#b0b0b0",
    WAIT: "#f4f4f4",
    SLEEP: "#f4f4f4",
}
_NESTED, _HOST_COLOUR, _IDLE = "#f2d3b3", "#c9ced6", "#d9534f"
_STYLE = """body{font:14px system-ui,sans-serif;margin:24px;max-width:1240px;color:#222}
table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg{border:1px solid #ddd}.note{color:#666}"""


class Calibration(NamedTuple):
    """What recording costs: milliseconds per round of the same work without and with it."""

    unprofiled_ms: float
    profiled_ms: float

    @property
    def inflation(self) -> float:
        """Share by which recorded rounds are longer."""
        return self.profiled_ms / self.unprofiled_ms - 1

    @property
    def verdict(self) -> str:
        """The inflation in words; recording cannot make a round shorter, the machine's other load can."""
        if self.inflation < 0:
            return f"the difference ({self.inflation:+.1%}) is noise, the machine is busy"
        return f"recording adds {self.inflation:+.1%}"


def _depths(spans: Sequence[Span]) -> list[int]:
    """Nesting depth of every span within its lane."""
    open_ends: dict[str, list[int]] = {HOST: [], DEVICE: []}
    depths = []
    for span in spans:
        ends = open_ends[span.lane]
        while ends and ends[-1] <= span.begin:
            ends.pop()
        depths.append(len(ends))
        ends.append(span.end)
    return depths


def _idle_gaps(entry: Round) -> list[tuple[int, int]]:
    """Intervals of the round in which the device has nothing to do."""
    gaps, reached = [], entry.begin
    for span in sorted((s for s in entry.spans if s.lane == DEVICE), key=lambda s: s.begin):
        if span.begin > reached:
            gaps.append((reached, span.begin))
        reached = max(reached, span.end)
    if reached < entry.end:
        gaps.append((reached, entry.end))
    return gaps


def _box(x: float, y: int, width: float, colour: str, text: str, title: str) -> str:
    label = f'<text x="{x + 3:.1f}" y="{y + 15}" font-size="11">{escape(text)}</text>' if width > 7 * len(text) else ""
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.1f}" y="{y}" width="{max(width, 0.6):.1f}" height="{_ROW - 4}" '
        f'fill="{colour}" stroke="#555" stroke-width="0.4"/>{label}</g>'
    )


def round_svg(entry: Round) -> str:
    """The round, lanes one below the other; what is nested stands in rows below what contains it."""
    scale = (_WIDTH - _LEFT - _RIGHT) / entry.duration
    depths = _depths(entry.spans)
    rows = {
        lane: 1 + max((d for s, d in zip(entry.spans, depths, strict=True) if s.lane == lane), default=0)
        for lane in (HOST, DEVICE)
    }
    first_row = {HOST: 0, DEVICE: rows[HOST]}
    height = _TOP + _ROW * (rows[HOST] + rows[DEVICE] + 1) + 10
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif">']
    for tick in range(11):
        x = _LEFT + tick / 10 * (_WIDTH - _LEFT - _RIGHT)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height - 8}" stroke="#eee"/>')
        shown = tick / 10 * entry.duration / 1e6
        parts.append(f'<text x="{x:.1f}" y="16" font-size="10" text-anchor="middle">{shown:.2f} ms</text>')
    for lane in (HOST, DEVICE):
        parts.append(f'<text x="8" y="{_TOP + _ROW * first_row[lane] + 15}" font-size="13">{lane}</text>')
    for span, depth in zip(entry.spans, depths, strict=True):
        begin, end = max(span.begin, entry.begin), min(span.end, entry.end)
        y = _TOP + _ROW * (first_row[span.lane] + depth)
        colour = _COLOURS.get(span.name, _NESTED if span.lane == DEVICE else _HOST_COLOUR)
        title = f"{span.name}: {(span.end - span.begin) / 1e3:.1f} us"
        parts.append(_box(_LEFT + (begin - entry.begin) * scale, y, (end - begin) * scale, colour, span.name, title))
    idle_y = _TOP + _ROW * (rows[HOST] + rows[DEVICE])
    parts.append(f'<text x="8" y="{idle_y + 15}" font-size="13">device idle</text>')
    for begin, end in _idle_gaps(entry):
        title = f"seam: {(end - begin) / 1e3:.1f} us"
        parts.append(_box(_LEFT + (begin - entry.begin) * scale, idle_y, (end - begin) * scale, _IDLE, "", title))
    return "".join([*parts, "</svg>"])


def node_table(nodes: Sequence[Node], predicted: Mapping[str, float]) -> str:
    """Mean own time per round of every node; a predicted column where there are predictions (microseconds)."""
    heads = ["node", "lane", "calls", "measured us", *(["predicted us", "gap us"] if predicted else [])]
    rows = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for node in nodes:
        measured = node.nanoseconds / 1e3
        cells = [escape(node.name), node.lane, f"{node.calls:.1f}", f"{measured:.1f}"]
        if predicted:
            value = predicted.get(node.name)
            cells += ["-", "-"] if value is None else [f"{value:.1f}", f"{measured - value:+.1f}"]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def figures_text(rounds: Sequence[Round], calibration: Calibration) -> list[str]:
    """The headline figures, one a line."""
    figures = summary(rounds)
    return [
        f"{figures['rounds']} rounds of width {typical_round(rounds).width}: mean {figures['mean_ms']:.3f} ms, "
        f"median {figures['median_ms']:.3f} ms",
        f"device idle {figures['device_idle']:.1%}, host idle {figures['host_idle']:.1%} (waiting for results)",
        f"calibration: {calibration.unprofiled_ms:.3f} ms per round unprofiled, {calibration.profiled_ms:.3f} ms "
        f"profiled: {calibration.verdict}",
    ]


def round_page(
    rounds: Sequence[Round], facts: Mapping, calibration: Calibration, predicted: Mapping[str, float]
) -> str:
    """The whole HTML page, no external assets."""
    lines = figures_text(rounds, calibration)
    if facts.get("device") == "cpu":
        lines.append("on a CPU the device steps run on the host's thread: the device lane is what it computes for them")
    title = f"{facts.get('model')}: one decode round"
    notes = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{notes}{round_svg(typical_round(rounds))}"
        f'<p class="note">Red: the device has nothing to do. Hover for times.</p>'
        f"<h2>Mean over all rounds, own time of each node</h2>{node_table(mean_nodes(rounds), predicted)}</html>\n"
    )
