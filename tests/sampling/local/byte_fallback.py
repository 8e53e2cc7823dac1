"""A tokenizer that spells unknown characters byte by byte, as those of Gemma, Llama 2 and Phi-3 do."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

WORDS = ["▁", "a", "b", "▁x", "▁world", "€"]


def byte_tokens(data: bytes) -> list[str]:
    """The tokens that spell these bytes."""
    return [f"<0x{byte:02X}>" for byte in data]


def byte_fallback_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token for each byte, and one for each of the words."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", *byte_tokens(bytes(range(256))), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces, start = decoders.Replace("▁", " "), decoders.Strip(content=" ", left=1)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), start])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
