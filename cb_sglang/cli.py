"""The ``cb-sglang`` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cb_sglang.admission import AdmissionLimits
from cb_sglang.errors import CacheBackError
from cb_sglang.registry import Amounts, SenderLimits
from cb_sglang.settings import Settings
from cb_sglang.templates import DEFAULT_TEMPLATE
from cb_sglang.tenants import VARIABLE, new_key
from cb_sglang.wire import MAX_TTL

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _main() -> None:
    """CacheBack for SGLang: messages between agents out of a live KV cache."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    query_template: Annotated[
        str,
        typer.Option(help="Wrapper around every query; holds {query} once. Only the query's own rows vote."),
    ] = DEFAULT_TEMPLATE,
    max_senders: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most senders held at once.")] = 4_096,
    ttl: Annotated[
        float | None,
        typer.Option(min=1.0, max=MAX_TTL, help="Seconds without a query that end a sender; without it, none does."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps senders, the audit record and the secret over a restart (mode 0700)."),
    ] = None,
    tenant_keys: Annotated[
        Path | None,
        typer.Option(
            help=f"File of tenant:sha256 lines (see `cb-sglang key`); also as {VARIABLE}. Closes every route."
        ),
    ] = None,
    tenant_share: Annotated[
        float,
        typer.Option(min=0.01, max=1.0, help="Share of queue, registry, pool and audit that a tenant may hold."),
    ] = 0.5,
    max_running_rows: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Query rows in the engine at once; fewer keep chats fluent.")
    ] = 4_096,
    max_waiting: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Requests that may wait for a turn or for room.")
    ] = 1_024,
    deadline: Annotated[
        float, typer.Option(min=0.1, max=3_600.0, help="Seconds that a request may wait for a turn.")
    ] = 30.0,
    max_audit: Annotated[int, typer.Option(min=1, max=10_000_000, help="Records of sent messages kept.")] = 200_000,
    allow_selector: Annotated[
        list[str] | None,
        typer.Option(help="package.module:function of a selector of yours that clients may name; repeatable."),
    ] = None,
) -> None:
    """Serve SGLang with the CacheBack endpoints.

    Every other argument goes to SGLang (``sglang serve --help`` lists them). Without --model-path the embedded
    default model is served.
    """
    from cb_sglang.launch import launch

    try:
        settings = Settings(
            query_template=query_template,
            senders=SenderLimits(
                total=Amounts(senders=max_senders, positions=64_000_000, row_bytes=4 << 30),
                tenant_share=tenant_share if tenant_keys is not None or VARIABLE in os.environ else 1.0,
                default_ttl=ttl,
            ),
            admission=AdmissionLimits(
                max_running_rows=max_running_rows,
                max_waiting=max_waiting,
                tenant_share=tenant_share if tenant_keys is not None or VARIABLE in os.environ else 1.0,
                default_deadline=deadline,
            ),
            data_dir=data_dir,
            tenant_keys=tenant_keys,
            max_audit=max_audit,
        )
        launch(context.args, settings, allowed_selectors=allow_selector or [])
    except CacheBackError as error:
        typer.secho(f"cb-sglang: {error}", err=True, fg=typer.colors.RED)
        sys.stderr.flush()
        # SGLang may have left non-daemon threads; a plain exit would wait for them.
        os._exit(1)


@app.command()
def key(tenant: Annotated[str, typer.Argument(help="The tenant's name; `admin` may reach every route.")]) -> None:
    """Make an API key: the key for the tenant goes to stderr, the line for --tenant-keys to stdout.

    ``cb-sglang key team-a >> keys.txt`` appends the line and shows the key once; it is kept nowhere.
    """
    try:
        made, line = new_key(tenant)
    except CacheBackError as error:
        typer.secho(f"cb-sglang: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from None
    typer.echo(f"the key of {tenant}: {made}", err=True)
    typer.echo(line)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    context: typer.Context,
    data_dir: Annotated[Path | None, typer.Option(help="A data folder to look into; it is not changed.")] = None,
    tenant_keys: Annotated[Path | None, typer.Option(help="A file of tenants' keys to check.")] = None,
) -> None:
    """Say whether `serve` would start with these arguments, and what to change. Starts nothing."""
    from rich.console import Console

    from cb_sglang.doctor import examine, render

    findings = examine(context.args, data_dir=data_dir, tenant_keys=tenant_keys)
    render(findings, Console())
    raise typer.Exit(1 if any(each.status == "fail" for each in findings) else 0)


if __name__ == "__main__":
    app()
