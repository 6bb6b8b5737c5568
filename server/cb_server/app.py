"""Mounting our routes in SGLang's FastAPI app: same process, same port, every SGLang endpoint as it is."""

from __future__ import annotations

from fastapi import FastAPI

from cb_server.routes import router
from cb_sglang.service import Settings


def mount(app: FastAPI, settings: Settings) -> None:
    """Add our routes to ``app``. The engine is looked up on first use, when SGLang has started."""
    app.state.cacheback_settings = settings
    app.state.cacheback_service = None
    app.include_router(router)
