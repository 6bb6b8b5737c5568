"""SGLang's chat completions, with parts put into the rendered prompt (entrypoints/openai/serving_chat.py)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from cb_sglang.chat import Insert, spliced
from cb_sglang.seam.engine import overrides


async def complete_chat(
    body: dict[str, Any], request: Request, *, inserts: Sequence[Insert], namespace: str | None
) -> Any:
    """SGLang's own answer to ``body``, streaming or not, with ``inserts`` in its prompt.

    namespace: the radix namespace of the prompt. Raises RequestValidationError for what SGLang would refuse to parse.
    """
    from sglang.srt.entrypoints.http_server import model_json_response
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    try:
        parsed = ChatCompletionRequest(**body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(), body=body) from error
    # A copy, so that the change of prompt below is this request's alone.
    serving = copy.copy(request.app.state.openai_serving_chat)
    render = serving._convert_to_internal_request

    def render_with_inserts(parsed: Any, raw_request: Any = None) -> tuple[Any, Any]:
        adapted, processed = render(parsed, raw_request)
        if inserts:
            if not isinstance(adapted.input_ids, list):
                raise ValueError("messages as token ids need a text model; ask for encoding text")
            prompt = spliced(serving.tokenizer_manager.tokenizer, adapted.input_ids, inserts)
            adapted.input_ids = prompt.input_ids
            adapted.positional_embed_overrides = overrides(prompt.rows)
        if namespace is not None:
            adapted.extra_key = namespace
        return adapted, processed

    serving._convert_to_internal_request = render_with_inserts
    return model_json_response(await serving.handle_request(parsed, request))
