"""Mounting our routes in SGLang's FastAPI app: same process, same port, every SGLang endpoint as it is."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import FastAPI

from cb_server import chat_route
from cb_server.access import TenantAccess
from cb_server.observe import AccessLog
from cb_server.open_calls import OpenCalls
from cb_server.routes import router
from cb_sglang.settings import Settings
from cb_sglang.tenants import Tenants, namespace


def mount(app: FastAPI, settings: Settings, tenants: Tenants, secret: bytes) -> None:
    """Add our routes to ``app``. The engine is looked up on first use, when SGLang has started."""
    app.state.cacheback_secret = secret
    app.state.cacheback_settings = settings
    app.state.cacheback_tenants = tenants
    app.state.cacheback_service = None
    app.state.cacheback_starting = asyncio.Lock()
    app.state.cacheback_open_calls = calls = OpenCalls()
    app.include_router(router)
    chat_route.mount(app)
    if tenants.has_keys:
        app.add_middleware(TenantAccess, tenants=tenants, namespace_of=partial(namespace, secret))
    # Outermost: it sees every answer of ours.
    app.add_middleware(AccessLog, calls=calls)
