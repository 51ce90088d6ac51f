"""A tokenizer that needs no download: one token a word of a made-up language."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

WORDS = 1000


def tokenizer() -> PreTrainedTokenizerFast:
    """Words ``w0`` to ``w999``."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<unk>", "<s>", "</s>", *(f"w{i}" for i in range(WORDS))])}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>")
