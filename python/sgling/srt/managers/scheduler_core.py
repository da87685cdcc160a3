"""The parts of a scheduler and the questions several of them ask: who is alive, is it idle."""

from __future__ import annotations

from sgling.srt.config.environ import read_environ
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.managers.deadlines import RequestDeadlines
from sgling.srt.managers.decode import DecodePlanner
from sgling.srt.managers.inbox import Inbox
from sgling.srt.managers.io_struct import FinishReason
from sgling.srt.managers.output import OutputStreamer
from sgling.srt.managers.prefill import PrefillPlanner
from sgling.srt.managers.request import Req
from sgling.srt.managers.resources import RequestResources
from sgling.srt.managers.results import ResultProcessor
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.observability.step_clock import StepClock
from sgling.srt.speculative.depth import DepthPolicy
from sgling.srt.speculative.stats import SpecStats


class SchedulerCore:
    """Host-side state of one rank's scheduler."""

    def __init__(self, args: ServerArgs, runner: ModelRunner, inbox: Inbox, depth: DepthPolicy):
        self.args = args
        self.runner = runner
        self.inbox = inbox
        self.depth = depth
        self.deadlines = RequestDeadlines(read_environ())
        self.stats = SpecStats()
        self.clock = StepClock()
        self.resources = RequestResources(runner)
        chunk = args.chunked_prefill_size
        self.prefill = PrefillPlanner(self.resources, None if chunk == -1 else chunk)
        self.decode = DecodePlanner(self.resources, self.prefill)
        self.streamer = OutputStreamer(args.stream_interval, args.spec.enabled)
        self.results = ResultProcessor(self.resources, self.streamer, self.stats, depth)
        self.decode_steps = self.decode_steps_width1 = self.decode_steps_eager = self.decode_steps_fallback = 0
        self.graph_bytes = 0  # device memory that CUDA graphs hold
        self.integrity_checked = True
        self.stopped = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is alive."""
        return not self.live_requests()

    def live_requests(self) -> list[Req]:
        """Every request that has not ended."""
        return [req for req in [*self.prefill.live(), *self.decode.running] if not req.finished]

    def add(self, req: Req) -> None:
        """Queue a new request."""
        self.prefill.waiting.append(req)
        self.integrity_checked = False

    def abort(self, req: Req, message: str, status_code: int | None = None) -> None:
        """End a request now, wherever it is; a step of it that is still in flight will be ignored.

        ``status_code``: HTTP status when the server is the cause; None when the end was asked for.
        """
        self.prefill.drop(req)
        self.results.finish(req, FinishReason(type="abort", message=message, status_code=status_code))

    def count_decode_step(self, width: int, eager: bool) -> None:
        """Book a launched decode step and its fallbacks: width 1 although speculation is on; on a GPU, no graph."""
        narrow = width == 1 and self.args.spec.enabled
        self.decode_steps += 1
        self.decode_steps_width1 += narrow
        self.decode_steps_eager += eager
        self.decode_steps_fallback += narrow or eager

    def send_outputs(self) -> None:
        """Send queued increments (rank 0)."""
        message = self.streamer.take()
        if message is not None:
            self.inbox.send(message)
