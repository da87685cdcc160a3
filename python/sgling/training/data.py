"""Token blocks for training: documents tokenised, marked and packed in worker processes, the same for any worker count.

Block ``i`` of a run is a pure function of (seed, i), so a resumed run sees the same data.
"""

from __future__ import annotations

import multiprocessing as mp
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from .generator.mix import PICO_DIR, documents, stdlib_pieces

MAX_DOCUMENT = 4096


class Block(NamedTuple):
    """``tokens`` int32 [N]; ``answer`` bool [N], True on tokens of the assistant; ``starts`` int32, document starts."""

    tokens: np.ndarray
    answer: np.ndarray
    starts: np.ndarray


class Marks(NamedTuple):
    """Ids needed to find assistant turns."""

    role: int
    role_close: int
    role_end: int
    assistant: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Marks:
        ids = [tokenizer.token_to_id(text) for text in ("<role>", "</role>", "<|role_end|>")]
        return cls(*ids, tuple(tokenizer.encode("ASSISTANT").ids))


def assistant_mask(ids: list[int], marks: Marks) -> np.ndarray:
    """True from the first token behind ``<role>ASSISTANT</role>`` to the closing ``<|role_end|>``, inclusive."""
    mask = np.zeros(len(ids), dtype=bool)
    close = len(marks.assistant)
    inside = False
    for index, token in enumerate(ids):
        if inside:
            mask[index] = True
            inside = token != marks.role_end
        elif token == marks.role_close and tuple(ids[index - close : index]) == marks.assistant:
            inside = True
    return mask


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PICO_DIR / "tokenizer.json"))


def make_block(tokenizer: Tokenizer, seed: str, index: int, length: int) -> Block:
    """Packs documents into one stream of ``length`` tokens; the last document is cut."""
    marks = Marks.of(tokenizer)
    tokens = np.zeros(length, dtype=np.int32)
    answer = np.zeros(length, dtype=bool)
    starts: list[int] = []
    encoded: list[list[int]] = []

    def length_of(text: str) -> int:
        encoded.append(tokenizer.encode(text, add_special_tokens=False).ids[:MAX_DOCUMENT])
        return len(encoded[-1])

    position = 0
    for document in documents(f"{seed}:{index}", length_of):
        ids = encoded.pop()[: length - position]
        starts.append(position)
        tokens[position : position + len(ids)] = ids
        if document.scenario != "stdlib":
            answer[position : position + len(ids)] = assistant_mask(ids, marks)
        position += len(ids)
        if position == length:
            return Block(tokens, answer, np.array(starts, dtype=np.int32))
    raise AssertionError("the document stream is endless")


def _worker(queue: mp.Queue, seed: str, first: int, step: int, length: int) -> None:
    tokenizer = load_tokenizer()
    index = first
    try:
        while True:
            queue.put(make_block(tokenizer, seed, index, length))
            index += step
    except Exception as error:
        queue.put(RuntimeError(f"block {index}: {error!r}"))


class BlockStream:
    """Blocks ``start``, ``start + 1``, ... in order, from ``workers`` processes (0: made in this process)."""

    def __init__(self, seed: str, length: int, workers: int, start: int = 0, ahead: int = 6) -> None:
        self.seed, self.length, self.index = seed, length, start
        self.processes: list[mp.Process] = []
        self.queues: list[mp.Queue] = []
        self.tokenizer = load_tokenizer() if workers == 0 else None
        stdlib_pieces()  # read once here, not once a worker
        context = mp.get_context("fork")
        for worker in range(workers):
            queue = context.Queue(maxsize=ahead)
            process = context.Process(target=_worker, args=(queue, seed, start + worker, workers, length), daemon=True)
            process.start()
            self.processes.append(process)
            self.queues.append(queue)
        self._turn = 0

    def next(self) -> Block:
        """The next block in index order. Raises RuntimeError when a worker failed to make it."""
        if self.tokenizer is not None:
            block = make_block(self.tokenizer, self.seed, self.index, self.length)
        else:
            block = self.queues[self._turn].get()
            if isinstance(block, RuntimeError):
                raise block
            self._turn = (self._turn + 1) % len(self.queues)
        self.index += 1
        return block

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()
