"""Small tokenizers of the common kinds, built from a few words: nothing is fetched."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = "hello world, how are you today? привет, мир! 你好 世界 🙂🙃 don't stop    now\n\n"


def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and SmolLM2: byte-level BPE, a BOS by its post-processor."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([WORDS] * 3, trainer)
    made.add_tokens([AddedToken("<my tool>"), AddedToken("né—"), AddedToken("Ġdé")])
    made.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 0)])
    return made


def byte_fallback(decoder: decoders.Decoder | None) -> Tokenizer:
    """As Llama 2 and Gemma: pieces with ▁ for a space, raw bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁hello", "▁wor", "ld", "lo", "h", "e", "l", "o", "é", "你", "n't", ","]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.add_special_tokens(["<s>", "</s>"])
    if decoder is not None:
        made.decoder = decoder
    return made


def _pieces(*steps: decoders.Decoder) -> Tokenizer:
    return byte_fallback(decoders.Sequence(list(steps)))


def all_kinds() -> dict[str, Tokenizer]:
    """Name → tokenizer; "llama2" strips the first space, "none" has no decoder."""
    space, fallback, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    return {
        "byte_level": byte_level(),
        "llama2": _pieces(space, fallback, fuse, decoders.Strip(" ", 1, 0)),
        "gemma": _pieces(space, fallback, fuse),
        "metaspace": byte_fallback(decoders.Metaspace()),
        "wordpiece": byte_fallback(decoders.WordPiece()),
        "none": byte_fallback(None),
    }
