"""The tests' side of an engine process (engine_host.py)."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import engine_host
import psutil

from cb_sglang.seam import pins
from cb_sglang.spec import WIRE_KEY, ScoringSpec

# Importing these takes some 20 s of CPU, in each of an engine's three processes: several times all else they do.
PRELOADED = ["sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler", "sglang.srt.models.registry"]
# What is read at import. Scores are compared in float32, so CPU engines are what is tested, also where a GPU is
# present; the interpreter runs what is Triton only; tiny matrices gain nothing from compilers and second threads.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    pins.VARIABLE: "a token of the tests",
}
START_SECONDS = 300.0
ANSWER_SECONDS = 120.0
STOP_SECONDS = 30.0


class EngineDied(RuntimeError):
    """The engine process ended, or did not answer."""


@dataclass(frozen=True)
class Ask:
    """One query over one sender. ``stop`` None: all rows from ``start`` on vote."""

    sender: tuple[int, ...]
    query: tuple[int, ...]
    budget: int
    start: int = 0
    stop: int | None = None
    selector: str = "cacheback"
    latent_len: int = 0

    @property
    def ids(self) -> list[int]:
        return [*self.sender, *self.query]

    @property
    def spec(self) -> ScoringSpec:
        return ScoringSpec(
            sender_len=len(self.sender),
            vote_start=self.start,
            vote_stop=len(self.query) if self.stop is None else self.stop,
            budget=self.budget,
            latent_len=self.latent_len,
            selector=self.selector,
            want_scores=True,
        )

    @property
    def sampling(self) -> dict[str, Any]:
        return {"max_new_tokens": 1, "temperature": 0, "custom_params": self.spec.to_wire()}


class EngineClient:
    """Starts an engine in a process group of its own; ``close`` leaves nothing of it behind."""

    def __init__(self, log: Path, environment: Mapping[str, str], **arguments: Any) -> None:
        self.log = log
        self.page_size: int = arguments.get("page_size", 1)
        self.chunk: int = arguments["chunked_prefill_size"]
        ours, theirs = socket.socketpair()
        log.touch()
        with Connection(theirs.detach()) as connection:
            self._process = fork_server().Process(
                target=engine_host.main, args=(connection, log, dict(environment), arguments)
            )
            self._process.start()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        try:
            if not self._connection.poll(START_SECONDS):
                raise EngineDied(f"engine not ready after {START_SECONDS:.0f} s\n{self.log_tail()}")
            self._connection.recv()
        except BaseException as error:
            self.close()
            if isinstance(error, EOFError | ConnectionError):
                raise EngineDied(f"engine died while starting\n{self.log_tail()}") from None
            raise
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def submit(self, method: str, **kwargs: Any) -> Future[Any]:
        """Call without waiting."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            try:
                self._connection.send((number, method, kwargs))
            except OSError:
                raise EngineDied("the engine died earlier; see the first test that failed") from None
        return future

    def call(self, method: str, **kwargs: Any) -> Any:
        return self.wait(self.submit(method, **kwargs))

    def wait(self, future: Future[Any]) -> Any:
        try:
            return future.result(ANSWER_SECONDS)
        except TimeoutError:
            raise EngineDied(f"no answer within {ANSWER_SECONDS:.0f} s\n{self.log_tail()}") from None

    def generate(self, **kwargs: Any) -> Any:
        return self.call("generate", **kwargs)

    def greedy(self, ids: Sequence[int], count: int) -> dict[str, Any]:
        return self.generate(input_ids=list(ids), sampling_params=greedy_params(count))  # type: ignore[no-any-return]

    def prefill(self, sender: Sequence[int]) -> dict[str, Any]:
        """Put a sender into the radix tree; its meta_info."""
        answer = self.generate(input_ids=list(sender), sampling_params={"max_new_tokens": 0})
        return answer["meta_info"]  # type: ignore[no-any-return]

    def ask(self, *asks: Ask) -> list[tuple[dict[str, Any], int]]:
        """All queries in one call: (result, cached tokens) of each."""
        return [scored(answer) for answer in self.wait(self.submit_asks(*asks))]

    def ask_at_once(self, *asks: Ask) -> list[tuple[dict[str, Any], int]]:
        """As ``ask``, with all queries in the queue before the first is scheduled."""
        self.call("hold_prefill", requests=len(asks))
        return self.ask(*asks)

    def submit_asks(self, *asks: Ask) -> Future[Any]:
        return self.submit("generate", input_ids=[a.ids for a in asks], sampling_params=[a.sampling for a in asks])

    def ours(self, call: str, *arguments: Any) -> Any:
        """A call of cb_sglang.seam.engine.Engine, in the engine's own process."""
        return self.call("ours", call=call, arguments=arguments)

    def flush(self) -> None:
        assert self.call("flush"), "the engine refused to flush its cache"

    def counters(self) -> dict[str, Any]:
        return self.call("counters")  # type: ignore[no-any-return]

    def settled_counters(self) -> dict[str, Any]:
        """Counters once nothing waits or runs any more."""
        return self.until(lambda c: not (c["waiting"] or c["decoded"] or c["chunked"] or c["protected"]))

    def until(self, condition: Any, seconds: float = 20.0) -> dict[str, Any]:
        """Poll the counters until ``condition(counters)``; they are returned."""
        deadline = time.monotonic() + seconds
        while True:
            counters = self.counters()
            if condition(counters):
                return counters
            assert time.monotonic() < deadline, f"not reached within {seconds} s: {counters}"
            time.sleep(0.01)

    def cached(self, sender: Sequence[int]) -> int:
        """How many tokens of a cached sender can be found again: whole pages only."""
        return len(sender) // self.page_size * self.page_size

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Stop the engine and fail if any process of it survives."""
        assert self._process.pid is not None
        family = _family(self._process.pid)
        # Closing alone would wait for the reader thread; this ends its read and the engine's.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._connection.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
        _, alive = psutil.wait_procs(family, timeout=5.0)
        for process in alive:
            process.kill()
        assert not alive, f"processes outlived the engine: {alive}"

    def _read(self) -> None:
        while True:
            try:
                number, outcome, value = self._connection.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed meanwhile
                break
            future = self._waiting.pop(number)
            if outcome == "ok":
                future.set_result(value)
            else:
                future.set_exception(RuntimeError(value))
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(EngineDied(f"the engine died\n{self.log_tail()}"))


@cache
def fork_server() -> ForkServerContext:
    """A process that imports SGLang once; all engines are forked from it, and end before it does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def greedy_params(count: int) -> dict[str, Any]:
    return {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}


def scored(answer: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The one result of a scoring request, and its cached tokens."""
    meta = answer["meta_info"]
    (result,) = meta[WIRE_KEY]
    return result, meta["cached_tokens"]


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
