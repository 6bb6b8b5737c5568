"""A model that cannot be scored, or not as it is served: who needs messages is told at start, others are served."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import engine_host
import tiny_models
from engine_cases import on_engines, random_ask
from engine_client import START_SECONDS, EngineClient, fork_server

REASON = "full-attention layers with a logit soft cap cannot be scored yet"


@on_engines("capped")
def test_sglang_serves_what_cannot_be_scored(engine: EngineClient) -> None:
    """The log says so once; that ordinary requests are right is for test_engine_decode.py."""
    for _ in range(2):
        ((result, _),) = engine.ask(random_ask(60, 10, seed=1, budget=20))
        assert result == {"error": REASON}
    log = engine.log.read_text()
    assert log.count(f"cb-sglang: messages are not available: {REASON}") == 1


def test_cb_sglang_serve_refuses_to_start(tmp_path: Path) -> None:
    """With one line that names the flag, and nothing left behind."""
    tiny_models.write_qwen3(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    log = tmp_path / "log"
    flags = ["--model-path", str(tmp_path), "--kv-cache-dtype", "fp8_e4m3", "--max-total-tokens", "1024"]
    process = fork_server().Process(target=engine_host.run_command, args=(log, ["serve", *flags]))
    process.start()
    process.join(START_SECONDS)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode == 1, log.read_text()
    lines = log.read_text().splitlines()
    assert lines[-1] == (
        "cb-sglang: the KV cache is torch.float8_e4m3fn; scoring needs --kv-cache-dtype auto or bfloat16"
    )
    assert not any("Traceback" in line for line in lines)
