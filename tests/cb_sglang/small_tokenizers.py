"""Real tokenizers made on the spot, of the kinds that models have; merges reach across every border that they can."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS = "<bos>"
PART_ID = 1
"""The id of a special token, <part>, that no text has."""
_CORPUS = [
    "User: [Message 1 of 2, from snd_0]\n<cacheback-0123456789abcdef-1>\n[End of message 1]\n\n[Message 2 of 2]\n",
    "]\n<cacheback-]\n<cacheback-1>\n[End of message 1]\n\n1>\n[End of message 2]\n\n",
    "user system assistant tool secret message the key of the door is under the green stone 4711\n\n\n   \t\n",
] * 4


def _trained(tokenizer: Tokenizer, alphabet: list[str], special: list[str]) -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False, max_token_length=16
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    bos = tokenizer.token_to_id(BOS)
    single = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    earlier = tokenizer.post_processor
    tokenizer.post_processor = single if earlier is None else processors.Sequence([earlier, single])
    # Byte tokens are ordinary ones; the trainer takes none of several characters but special ones.
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [each for each in described["added_tokens"] if not each["content"].startswith("<0x")]
    ready = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=ready, bos_token=BOS, clean_up_tokenization_spaces=False)


def byte_level(*, trim_offsets: bool, across_words: bool = False) -> PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's and Qwen's: bytes in words; a character can be several tokens.

    trim_offsets: offsets leave out white space, as GPT-2's and Llama 3's do.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not across_words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return _trained(tokenizer, sorted(pre_tokenizers.ByteLevel.alphabet()), [BOS, "<part>"])


def sentencepiece(*, prefix: bool) -> PreTrainedTokenizerFast:
    """As Gemma's (no pre-tokenizer at all) or, with ``prefix``, Llama 2's, which puts a space before every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    restored = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*restored, decoders.Strip(" ", 1, 0)] if prefix else restored)
    characters = [chr(code) for code in range(33, 127)]
    byte_tokens = [f"<0x{code:02X}>" for code in range(256)]
    return _trained(tokenizer, characters, ["<unk>", "<part>", BOS, *byte_tokens])


TOKENIZERS = {
    "byte_level": byte_level(trim_offsets=False),
    "byte_level_trimmed": byte_level(trim_offsets=True),
    "byte_level_across_words": byte_level(trim_offsets=False, across_words=True),
    "sentencepiece": sentencepiece(prefix=False),
    "sentencepiece_prefix": sentencepiece(prefix=True),
}
