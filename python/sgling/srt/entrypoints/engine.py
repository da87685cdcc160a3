"""``sgling.Engine``: the serving engine as a library, without HTTP.

One rank runs the scheduler in a thread of this process; several ranks run in processes of their own. Requests take the
same way as in the server (:class:`TokenizerManager`), on an event loop in a background thread.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

from sgling.srt.config.server_args import ServerArgs
from sgling.srt.managers.generate_req import GenerateReqInput
from sgling.srt.managers.profile_req import start_request
from sgling.srt.managers.response import one_or_list
from sgling.srt.managers.scheduler_host import ProcessHost, SchedulerHost, ThreadHost
from sgling.srt.managers.scheduler_job import SchedulerFactory, create_scheduler, make_job
from sgling.srt.managers.text_codec import load_tokenizer
from sgling.srt.managers.tokenizer_manager import TokenizerManager

_END = object()


class Engine:
    """A loaded model that answers prompts.

    Keyword arguments are the server's flags by underscore name (``Engine(model_path="ling3-pico", tp_size=1)``).
    Methods may be called from any thread. Use as a context manager, or call :meth:`shutdown`.

    Raises ServerArgsError for arguments that cannot be served, RuntimeError when the scheduler does not start.
    """

    def __init__(self, *, scheduler_factory: SchedulerFactory = create_scheduler, **server_args: Any):
        self._job = make_job(ServerArgs.from_kwargs(**server_args))
        self.server_args = self._job.server_args
        self._open = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sgling-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        host = ThreadHost if self.server_args.tp_size == 1 else ProcessHost
        self._host: SchedulerHost = host(self._job, scheduler_factory)
        self.tokenizer_manager: TokenizerManager | None = None
        try:
            self._call(self._start())
        except BaseException:
            self.shutdown()
            raise

    async def _start(self) -> None:
        job = self._job
        tokenizer = None if job.tokenizer_dir is None else load_tokenizer(job.tokenizer_dir)
        manager = TokenizerManager(self.server_args, job.model_config, self._host.tokenizer_side(), tokenizer)
        self.tokenizer_manager = manager
        self._host.start(lambda message: self._loop.call_soon_threadsafe(manager.scheduler_died, message))
        await manager.start()
        manager.ready = True

    def _call(self, work: Coroutine) -> Any:
        """Run a coroutine on the engine's loop and wait for its result."""
        if not self._open:
            work.close()
            raise RuntimeError("the engine is shut down")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # does nothing to a finished call; an interrupted one is aborted

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict | list[dict] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> dict | list[dict] | Iterator[dict]:
        """Answer prompts.

        Args:
            prompt: text or list of texts.
            sampling_params: as in ``/generate``; one for all prompts, or a list.
            input_ids: token ids instead of text.
            stream: return an iterator of cumulative answers, one per scheduler step.
            options: further fields of ``/generate`` (``rid``, ``return_logprob``, ``top_logprobs_num``, ...).

        Returns:
            ``{"text", "output_ids", "meta_info"}``; a list for a batch or n > 1; an iterator when ``stream``.
            Closing the iterator early aborts the request.

        Raises:
            RequestError: the request is refused, or the engine fails.
        """
        obj = _request(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._iterate(obj)
        return one_or_list(self._call(self.tokenizer_manager.generate_once(obj)))

    def _iterate(self, obj: GenerateReqInput) -> Iterator[dict]:
        """Answers of a stream, handed over from the engine's loop."""
        if not self._open:
            raise RuntimeError("the engine is shut down")
        answers: queue.SimpleQueue = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(self._pump(obj, answers.put), self._loop)
        try:
            while (answer := answers.get()) is not _END:
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            future.cancel()

    async def _pump(self, obj: GenerateReqInput, put: Callable[[Any], None]) -> None:
        """Hand every answer to another thread, then ``_END`` or the error."""
        try:
            async with aclosing(self.tokenizer_manager.generate_request(obj)) as source:
                async for answer in source:
                    put(answer)
            put(_END)
        except BaseException as error:
            put(error)
            raise

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict | list[dict] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> dict | list[dict] | AsyncIterator[dict]:
        """:meth:`generate` for a caller with an event loop of its own."""
        obj = _request(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._async_iterate(obj)
        work = self.tokenizer_manager.generate_once(obj)
        return one_or_list(await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop)))

    async def _async_iterate(self, obj: GenerateReqInput) -> AsyncIterator[dict]:
        loop, answers = asyncio.get_running_loop(), asyncio.Queue()

        def hand_over(entry: Any) -> None:
            loop.call_soon_threadsafe(answers.put_nowait, entry)

        future = asyncio.run_coroutine_threadsafe(self._pump(obj, hand_over), self._loop)
        try:
            while (answer := await answers.get()) is not _END:
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            future.cancel()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End a request early (or all of them); its answer so far is returned where it was asked for."""

        async def abort() -> None:
            self.tokenizer_manager.abort_request(rid, abort_all)

        self._call(abort())

    def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Reset caches and statistics; False when requests are still running."""
        return self._call(self.tokenizer_manager.flush_cache(timeout_s))[0]

    def start_profile(self, **options: Any) -> None:
        """Record scheduler steps; options are the fields of ``/start_profile``. Raises RuntimeError when refused."""
        answer = self._call(self.tokenizer_manager.start_profile(start_request(options)))
        if not answer.success:
            raise RuntimeError(answer.message)

    def stop_profile(self) -> list[str]:
        """End the recording; returns rank 0's files. Raises RuntimeError when nothing was recorded."""
        answer = self._call(self.tokenizer_manager.stop_profile())
        if not answer.success:
            raise RuntimeError(answer.message)
        return answer.files

    def get_server_info(self) -> dict:
        """Resolved arguments, limits and the scheduler's state, as ``/server_info`` shows them."""
        return self._call(self.tokenizer_manager.server_info())

    def shutdown(self) -> None:
        """Stop the scheduler; running requests end as aborted. Safe to call twice."""
        if not self._open:
            return
        atexit.unregister(self.shutdown)
        self._host.expect_end()
        if self.tokenizer_manager is not None:
            self._call(self.tokenizer_manager.close())
        self._call(self._finish_callers())
        self._open = False
        self._host.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish_callers(self) -> None:
        """Let every waiting caller get its result before the loop stops."""
        callers = asyncio.all_tasks() - {asyncio.current_task()}
        if callers:
            _, pending = await asyncio.wait(callers, timeout=1.0)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _request(prompt, sampling_params, input_ids, stream: bool, options: dict) -> GenerateReqInput:
    """The native request; unknown options are TypeErrors."""
    known = set(GenerateReqInput.__dataclass_fields__)
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}")
    body = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream, **options}
    return GenerateReqInput.from_json(body)
