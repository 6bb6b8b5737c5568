"""One real server with the embedded model for the tests that ask for it; it starts once and is gone at the end.

SGLang itself checks, whenever its scheduler idles, that every pool slot is accounted for, and ends the process if
one is not. So ``alive``, which looks at the process after every test, is the leak check of all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served_api import ServedApi, excerpt

from cb_loadtest.served import ServerProcess, free_port, serve_command
from cb_sglang.client import CacheBack, Sender

START_SECONDS = 900.0  # the first start on a machine builds the embedded model
# Chunks shorter than most prompts, so that long work can be left in the middle; a pool that long senders overflow.
ARGUMENTS = ["--max-total-tokens", "8192", "--chunked-prefill-size", "512", "--mem-fraction-static", "0.5"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApi]:
    port, log = free_port(), tmp_path_factory.mktemp("server") / "server.log"
    leash = [sys.executable, str(Path(__file__).with_name("leash.py"))]
    with ServerProcess([*leash, *serve_command(port), *ARGUMENTS], log) as process:
        url = f"http://127.0.0.1:{port}"
        # A transport of its own and trust_env keep environment proxies away from the loopback address.
        with (
            CacheBack(url, timeout=300.0, transport=httpx.HTTPTransport()) as client,
            httpx.Client(base_url=url, timeout=300.0, trust_env=False) as http,
        ):
            client.wait_until_ready(START_SECONDS, on_wait=lambda _: process.check())
            yield ServedApi(url, process, client, http)


@pytest.fixture(autouse=True)
def alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shows the end of the server's log when a test has brought it down."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").process.check()


@pytest.fixture
def client(server: ServedApi) -> CacheBack:
    return server.client


@pytest.fixture
def http(server: ServedApi) -> httpx.Client:
    return server.http


@pytest.fixture
def sender(client: CacheBack) -> Sender:
    """Some 700 positions of real prose. Registered anew for each test; only the first prefills it."""
    return client.create_sender(prompt=excerpt("polk_1848"))
