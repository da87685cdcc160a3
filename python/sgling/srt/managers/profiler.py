"""``/start_profile`` and ``/stop_profile`` inside a scheduler: records steps, then writes one file per rank and kind.

Without ``activities`` a step trace is recorded (named spans of the loop, the device steps and the layers). With "CPU"
or "GPU" among them torch's profiler records too, its operators under the same names.
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sgling.srt.managers.io_struct import ProfileReq, ProfileReqOutput
from sgling.srt.managers.trace_points import CudaClock, TracedScheduler, watch_scheduler
from sgling.srt.observability.step_trace import HostAsDevice, Shadows, StepTrace, chrome_trace, write_trace

logger = logging.getLogger(__name__)

_TORCH_ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA, "CUDA": ProfilerActivity.CUDA}


class ProfileError(Exception):
    """The request does not fit the state of the profiler; the message is for the client."""


class SchedulerProfiler:
    """At most one recording at a time.

    Life of a recording: armed (``start_step`` launches pass), recording (for ``num_steps`` launches, or until stopped),
    written.
    """

    def __init__(self, scheduler: TracedScheduler):
        self._scheduler = scheduler
        self._request: ProfileReq | None = None
        self._trace: StepTrace | None = None
        self._torch_profile: profile | None = None
        self._shadows = Shadows()
        self._launches = 0
        self._files: list[str] = []

    def handle(self, message: ProfileReq) -> ProfileReqOutput:
        """Start or stop; what does not fit is refused in the answer."""
        try:
            if message.stop:
                return ProfileReqOutput(message.req_id, True, "Stop profiling.", self.stop())
            self.start(message)
            return ProfileReqOutput(message.req_id, True, "Start profiling.")
        except (ProfileError, OSError, RuntimeError, ValueError) as error:
            return ProfileReqOutput(message.req_id, False, str(error))

    def start(self, request: ProfileReq) -> None:
        """Arm a recording; raises :class:`ProfileError` while another one runs."""
        if self._request is not None:
            raise ProfileError("Profiling is already in progress; call /stop_profile first")
        _directory(request).mkdir(parents=True, exist_ok=True)
        self._request, self._launches, self._files = request, 0, []
        self._count_launches()
        self._begin_when_due()

    def _count_launches(self) -> None:
        """Look at the count at the head of every iteration, while a recording is armed or running."""
        scheduler = self._scheduler
        launch_next, receive = scheduler.launch_next, scheduler.receive

        def launch_and_count(in_flight: bool):
            launched = launch_next(in_flight)
            self._launches += launched is not None
            return launched

        def look_and_receive() -> None:
            self._begin_when_due()
            last = self._request.num_steps
            if last is not None and self._launches >= self._request.start_step + last:
                self._finish_by_itself()
            receive()

        self._shadows.replace(scheduler, "launch_next", launch_and_count)
        self._shadows.replace(scheduler, "receive", look_and_receive)

    def stop(self) -> list[str]:
        """End the recording; returns the files, also those of a recording that ended by itself."""
        if self._request is None and not self._files:
            raise ProfileError("Profiling is not in progress; call /start_profile first")
        if self._request is not None:
            self._finish()
        return self._files

    def _finish_by_itself(self) -> None:
        """Nobody waits for the files, and serving must not end with a full disk."""
        try:
            self._finish()
        except (OSError, RuntimeError, ValueError):
            logger.exception("The profile could not be written")

    def _begin_when_due(self) -> None:
        if self._trace is not None or self._launches < self._request.start_step:
            return
        wanted = {_TORCH_ACTIVITIES[name] for name in self._request.activities if name in _TORCH_ACTIVITIES}
        if not torch.cuda.is_available():
            wanted -= {ProfilerActivity.CUDA}
        if wanted:
            options = {"record_shapes": self._request.record_shapes, "with_stack": self._request.with_stack}
            self._torch_profile = profile(activities=sorted(wanted, key=str), **options)
            self._torch_profile.start()
        on_gpu = self._scheduler.core.runner.device == "cuda"
        self._trace = StepTrace(CudaClock() if on_gpu else HostAsDevice(), record_function if wanted else None)
        watch_scheduler(self._trace, self._scheduler)

    def _finish(self) -> None:
        request, self._request = self._request, None
        trace, self._trace = self._trace, None
        torch_profile, self._torch_profile = self._torch_profile, None
        spans = trace.stop() if trace is not None else []
        self._shadows.remove()
        if torch_profile is not None:
            torch_profile.stop()  # before anything can fail: the next recording needs the profiler
        if trace is None:
            raise ProfileError(f"Nothing was recorded: only {self._launches} of {request.start_step} steps had passed")
        stem = self._stem(request)
        facts = {
            "model": self._scheduler.core.args.served_model_name,
            "device": self._scheduler.core.runner.device,
            "steps": self._launches - request.start_step,
            "torch_profiler": torch_profile is not None,
        }
        path = Path(f"{stem}.trace.json.gz")
        write_trace(path, chrome_trace(spans, self._scheduler.core.runner.parallel.rank, facts))
        self._files = [str(path)]
        if torch_profile is not None:
            torch_path = f"{stem}.torch.trace.json.gz"
            torch_profile.export_chrome_trace(torch_path)
            self._files.append(torch_path)
        logger.info("Profile written: %s", ", ".join(self._files))

    def _stem(self, request: ProfileReq) -> Path:
        prefix = f"{request.profile_prefix}-" if request.profile_prefix else ""
        rank = self._scheduler.core.runner.parallel.rank
        return _directory(request) / f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}-TP-{rank}"


def _directory(request: ProfileReq) -> Path:
    return Path(request.output_dir or Path(tempfile.gettempdir()) / "sgling-profile")
