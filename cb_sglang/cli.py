"""The ``cb-sglang`` command."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from cb_sglang.errors import CacheBackError
from cb_sglang.templates import DEFAULT_TEMPLATE

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
    from cb_sglang.service import Settings

    try:
        settings = Settings(query_template=query_template, max_senders=max_senders)
        launch(context.args, settings, allowed_selectors=allow_selector or [])
    except CacheBackError as error:
        typer.secho(f"cb-sglang: {error}", err=True, fg=typer.colors.RED)
        sys.stderr.flush()
        # SGLang may have left non-daemon threads; a plain exit would wait for them.
        os._exit(1)


if __name__ == "__main__":
    app()
