"""SIGTERM: new calls are refused, those under way end, then we close, and then SGLang goes on to its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mounted_app import call, mounted_app

from cb_server.context import _finish
from cb_server.open_calls import OpenCalls
from cb_sglang.seam import draining


@pytest.fixture(autouse=True)
def nothing_to_finish() -> Iterator[None]:
    yield
    draining._finishing.clear()


def sglang_manager(*, gracefully_exit: bool = True) -> Any:
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    return SimpleNamespace(gracefully_exit=gracefully_exit, server_status=ServerStatus.Up)


def test_new_calls_are_refused() -> None:
    app = mounted_app(SimpleNamespace())
    app.state.cacheback_service.stopping = True
    for method, path in (("POST", "/v1/senders"), ("GET", "/v1/capacity"), ("PUT", "/v1/senders/snd_1/pin")):
        answer = call(app, method, path, **({"json": {"prompt": "a"}} if method == "POST" else {}))
        assert answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]
        assert answer.headers["Retry-After"]


def test_calls_under_way_end_before_the_store_is_closed_and_sglang_goes_on() -> None:
    events: list[str] = []

    class Service:
        async def close(self) -> None:
            events.append("closed")

    async def sglang(manager: Any) -> None:
        events.append("sglang")

    async def test() -> None:
        calls, manager = OpenCalls(), sglang_manager(gracefully_exit=False)
        service: Any = Service()
        draining.before_exit(lambda: _finish(calls, service))
        watchdog = asyncio.create_task(draining.finish_ours_first(sglang, manager))
        with calls.one():
            with calls.one():
                await asyncio.sleep(0.3)
                assert events == []
                manager.gracefully_exit = True
                await asyncio.sleep(0.3)
            assert events == []
            events.append("answered")
        await watchdog
        assert events == ["answered", "closed", "sglang"]

    asyncio.run(asyncio.wait_for(test(), 20))


def test_what_fails_at_the_end_does_not_keep_sglang() -> None:
    async def fails() -> None:
        raise RuntimeError("disk full")

    async def test() -> None:
        draining.before_exit(fails)
        done = []

        async def sglang(manager: Any) -> None:
            done.append(manager)

        manager = sglang_manager()
        await draining.finish_ours_first(sglang, manager)
        assert done == [manager]

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("how", ["unhealthy", "forced"])
def test_a_dead_engine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async def test() -> None:
        draining.before_exit(asyncio.Event().wait)  # type: ignore[arg-type]
        manager = sglang_manager()
        done = []

        async def sglang(manager: Any) -> None:
            done.append(manager)

        watchdog = asyncio.create_task(draining.finish_ours_first(sglang, manager))
        await asyncio.sleep(0.3)
        assert not done
        if how == "forced":
            monkeypatch.setenv("SGL_FORCE_SHUTDOWN", "true")
        else:
            manager.server_status = type(manager.server_status).UnHealthy
        await watchdog
        assert done == [manager]

    asyncio.run(asyncio.wait_for(test(), 20))


def test_the_wait_for_a_call_that_never_ends_is_bounded() -> None:
    async def test() -> None:
        calls = OpenCalls()
        with calls.one():
            await calls.ended(0.05)

    asyncio.run(asyncio.wait_for(test(), 20))
