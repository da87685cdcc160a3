"""The scheduler of one tensor-parallel rank: requests in, device steps out, results applied one step late.

The class holds the verbs; their order is the event loop (``overlap.py``), the host-side state they act on is
``scheduler_core.py``. Rank 0 owns the channel and broadcasts what it receives, so every rank plans the same steps.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.managers import internal_state
from sgling.srt.managers.channel import SchedulerChannel
from sgling.srt.managers.inbox import Inbox
from sgling.srt.managers.intake import RequestIntake
from sgling.srt.managers.io_struct import SchedulerReady
from sgling.srt.managers.launched import Launched
from sgling.srt.managers.overlap import event_loop_normal, event_loop_overlap
from sgling.srt.managers.profiler import SchedulerProfiler
from sgling.srt.managers.scheduler_core import SchedulerCore
from sgling.srt.managers.step_builder import StepBuilder
from sgling.srt.model_executor.graph_runner import capture_graphs
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.model_executor.prefill_warm_up import warm_up_prefill
from sgling.srt.speculative.budget_registry import create_budget
from sgling.srt.speculative.depth_registry import create_depth_policy
from sgling.srt.speculative.registry import create_worker


class Scheduler:
    """Plans, launches and applies steps.

    Args:
        server_args: resolved arguments.
        model_config: the model's shape.
        channel: where rank 0 receives requests and sends outputs.
        parallel: tensor-parallel group.
        tokenizer: for stop strings, or None (then requests with stop strings are refused).
    """

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        channel: SchedulerChannel,
        parallel: ParallelState,
        tokenizer: Tokenizer | None = None,
    ):
        runner = ModelRunner(server_args, model_config, parallel)
        self.worker = create_worker(server_args.spec, runner)
        self.prefill_warm_up_s = warm_up_prefill(runner, self.worker, server_args.chunked_prefill_size)
        self.graphs = capture_graphs(server_args, runner, self.worker)
        stepper = self.graphs or self.worker
        depth = create_depth_policy(server_args.spec, runner, stepper)
        self.core = SchedulerCore(server_args, runner, Inbox(channel, parallel, server_args.random_seed), depth)
        self.core.graph_bytes = self.graphs.report.pool_bytes if self.graphs else 0
        self.intake = RequestIntake(self.core, tokenizer, SchedulerProfiler(self))
        budget = create_budget(server_args.spec, runner, self.worker)
        self.steps = StepBuilder(runner, stepper, self.core.clock, budget)
        self._last_was_prefill = False

    def start_info(self) -> SchedulerReady:
        """What this scheduler can serve."""
        plan = self.core.runner.plan
        return SchedulerReady(
            max_total_num_tokens=plan.max_total_tokens,
            max_req_input_len=self.intake.max_prompt_len,
            max_running_requests=plan.max_running_requests,
            context_len=plan.context_len,
            info=internal_state.static_info(self.core, self.graphs) | {"prefill_warm_up_s": self.prefill_warm_up_s},
        )

    def run(self) -> None:
        """Serve until a :class:`ShutdownReq` arrives."""
        loop = event_loop_overlap if self.overlaps else event_loop_normal
        with torch.inference_mode(), self.core.runner.on_forward_stream():
            loop(self)

    @property
    def overlaps(self) -> bool:
        """Whether a step is launched before the previous result is known: not when the host needs exact lengths."""
        return not (self.core.args.disable_overlap_schedule or self.core.runner.needs_cpu_seq_lens)

    @property
    def stopped(self) -> bool:
        """Whether a shutdown was ordered."""
        return self.core.stopped

    def receive(self) -> None:
        """Take what has arrived and act on it: admit, abort, answer questions."""
        core = self.core
        for message in core.inbox.receive(lambda: core.deadlines.overdue(core.live_requests)):
            self.intake.handle(message)
        self.intake.answer_flushes()

    def launch_next(self, in_flight: bool) -> Launched | None:
        """Plan and enqueue one step; prefill chunks and decode steps alternate when both are waiting.

        A decode step that needs a result first keeps its turn: nothing is launched until that result is processed.
        """
        if self._last_was_prefill:
            launched = self._launch_decode(in_flight)
            if launched is None and self.core.decode.awaits_result:
                return None
            launched = launched or self._launch_prefill()
        else:
            launched = self._launch_prefill() or self._launch_decode(in_flight)
        self._last_was_prefill = launched is not None and launched.chunk is not None
        return launched

    def _launch_prefill(self) -> Launched | None:
        prefill, running = self.core.prefill, self.core.decode.running
        chunk = prefill.next_chunk(running)
        if chunk is None:
            return None
        launched = self.steps.prefill(chunk)
        prefill.launched(chunk, running)
        return launched

    def _launch_decode(self, in_flight: bool) -> Launched | None:
        batch = self.core.decode.next_batch(in_flight)
        if not batch:
            return None
        width = self.core.depth.width_for([req.depth for req in batch])
        launched = self.steps.decode(batch, width)
        for req in batch:
            req.launched_steps += 1
        in_graph = self.graphs is not None and not self.graphs.ran_eagerly
        self.core.count_decode_step(width, eager=self.core.runner.device == "cuda" and not in_graph)
        if self.core.decode_steps % self.core.args.decode_log_interval == 0:
            internal_state.log_decode(self.core, len(batch), in_graph)
        return launched

    def process(self, launched: Launched) -> None:
        """Apply a result and send what became due."""
        self.core.results.process(launched)
        self.core.send_outputs()

    def idle(self) -> None:
        """Nothing to launch and nothing in flight: check once that nothing leaked, then sleep until a message comes."""
        if not self.core.is_idle:
            return
        self.core.clock.pause()
        if not self.core.integrity_checked:
            self.core.resources.check_idle()
            self.core.integrity_checked = True
        self.core.inbox.wait()
