"""From the vocabulary in a Gemma 3 GGUF file to tokenizer.json and tokenizer_config.json.

BOS: Gemma attends badly without its beginning-of-sequence token, and the file asks for it (add_bos_token).
Both files written here ask for it too: the post-processor in tokenizer.json is what transformers follows, and
``add_bos_token`` of a GemmaTokenizer is what SGLang restores after loading. So text given to transformers or
to SGLang's own endpoints gets BOS by itself, and whoever joins pieces of text must encode all but the first
with ``add_special_tokens=False``.
"""

from __future__ import annotations

from typing import Any

from cb_sglang.embedded_model.gguf_header import GgufHeader

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # token types of llama.cpp's vocabulary
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space


def tokenizer_json(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer.json: a byte-fallback BPE, as transformers' GemmaTokenizer builds it."""
    meta = header.metadata
    # The file spells runs of spaces as they are; every other token has them as visible spaces.
    tokens = [_SPACE * len(t) if not t.strip(" ") else t for t in meta["tokenizer.ggml.tokens"]]
    types = meta["tokenizer.ggml.token_type"]
    vocab = {token: number for number, token in enumerate(tokens)}
    bos_id = meta["tokenizer.ggml.bos_token_id"]
    bos = tokens[bos_id]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(number, token, special=kind == _CONTROL)
            for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _CONTROL or (kind == _USER_DEFINED and _SPACE not in token)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special(bos, 0), _sequence("A", 0)],
            "pair": [_special(bos, 0), _sequence("A", 0), _special(bos, 1), _sequence("B", 1)],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(tokens, types, vocab),
        },
    }


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer_config.json. It is a base model: there is no chat template."""
    meta = header.metadata
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "mask_token": "<mask>",
        "model_max_length": meta["gemma3.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _merges(tokens: list[str], types: list[int], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that the vocabulary implies: every split of a token into two tokens, best first.

    Gemma's vocabulary stands in the order of its merges (its scores do not), so an earlier token is merged
    first; of the splits of one token, the one with the longer left part.
    """
    merges = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _BYTE):
            continue  # matched whole, or made by byte fallback; never by merging
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((left, right))
    return merges


def _added_token(number: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _special(token: str, type_id: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": type_id}}


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}
