"""``cb-sglang serve``: SGLang's own server, with our seams checked and our routes mounted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.resources import files

from cb_sglang.custom_selectors import allow
from cb_sglang.errors import InvalidRequestError
from cb_sglang.settings import Settings
from cb_sglang.tenants import Tenants, load_or_create_secret

_UNSUPPORTED = {
    "--disable-radix-cache": "messages are read from the radix cache",
    "--skip-tokenizer-init": "queries and text need the tokenizer",
}


def launch(arguments: Sequence[str], settings: Settings, *, allowed_selectors: Sequence[str] = ()) -> None:
    """Run until SGLang's server ends.

    Raises SeamError when this SGLang or the model it has loaded does not fit, InvalidRequestError on flags.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from cb_sglang.seam.check import check_seams
    from cb_sglang.seam.pins import allow_pins
    from cb_sglang.seam.readiness import require_scorable_model

    check_seams(server=True)
    tenants = Tenants.configured(settings.tenant_keys)
    secret = load_or_create_secret(None if settings.data_dir is None else settings.data_dir / "secret")
    allow(allowed_selectors)
    allow_pins()
    require_scorable_model()
    load_plugins()
    server_args = prepare_server_args(complete(arguments, with_tenants=tenants.has_keys))
    if server_args.tokenizer_worker_num > 1:
        raise InvalidRequestError("--tokenizer-worker-num must be 1: the sender registry lives in one process")

    from sglang.srt.entrypoints.http_server import app, launch_server

    from cb_server.app import mount
    from cb_server.observe import write_to_stderr

    write_to_stderr()
    mount(app, settings, tenants, secret)
    try:
        server_args.resolve_once()
        launch_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def complete(arguments: Sequence[str], *, with_tenants: bool = False) -> list[str]:
    """SGLang's arguments with what the operator left open filled in. Raises InvalidRequestError on flags."""
    from cb_sglang.seam.platform import activate

    given = {argument.partition("=")[0] for argument in arguments}
    for flag, reason in _UNSUPPORTED.items():
        if flag in given:
            raise InvalidRequestError(f"{flag} cannot be used with cb-sglang: {reason}")
    completed = list(arguments)
    if with_tenants:
        if given & {"--api-key", "--admin-api-key"}:
            raise InvalidRequestError("tenants' keys take the place of --api-key and --admin-api-key; give one of them")
        if any("grpc" in flag for flag in given):
            raise InvalidRequestError("gRPC knows no tenants; leave its flags out with tenants' keys")
        # SGLang warms up over HTTP, where it has no key.
        completed += ["--skip-server-warmup"]
    if "--enable-metrics" not in given:
        completed += ["--enable-metrics"]
    if not given & {"--model-path", "--model"}:
        from cb_sglang.embedded_model import ensure_embedded_model

        completed += ["--model-path", str(ensure_embedded_model()), "--served-model-name", "gemma-3-270m"]
        if "--chat-template" not in given:
            # A base model has none; this one is plain text with the roles' names.
            completed += ["--chat-template", str(files("cb_sglang.embedded_model") / "chat.jinja")]
    if activate() is not None and "--device" not in given:
        # SGLang 0.5.23 cannot read the device's name off an out-of-tree platform (arg_groups/serving_hook.py).
        completed += ["--device", "cpu"]
    if activate() is not None and "--sleep-on-idle" not in given:
        # An idle scheduler would poll on a core that the others need.
        completed += ["--sleep-on-idle"]
    return completed
