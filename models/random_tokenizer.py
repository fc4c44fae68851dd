"""A small byte-level BPE tokenizer for random checkpoints, with a chat template.

In: a folder and a config. Out: tokenizer.json and tokenizer_config.json. All 256 bytes are tokens,
so any text can be encoded; special tokens sit at the config's ids; the same config, same bytes.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = """A plan is a file that people read, compare and check. The compiler writes it down before
anything runs: which kernel, which tile, which buffer, and how long each of them should take.
When the model runs, the times are measured and put beside the times that were predicted.
Once upon a time there was a small model that could count: one, two, three, four, five, six.
What is the capital of France? Paris. What is two plus two? Four. Hello, how are you today?
"""
BOS, EOS, USER = "<|bos|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MAX_MERGES = 256


def write_tokenizer(out: Path, config: dict[str, Any]) -> None:
    """Write the tokenizer; ValueError when 256 bytes and 3 special tokens exceed the vocabulary."""
    num_tokens = config["vocab_size"]
    if num_tokens < 259:
        raise ValueError(f"a vocabulary of {num_tokens} cannot hold 256 bytes and 3 special tokens")
    special = _special_ids(config)
    trained = _trained(min(256 + MAX_MERGES, num_tokens - len(special)))
    ids = _free_ids(set(special.values()), len(trained["vocab"]))
    ordered = sorted(trained["vocab"], key=lambda token: trained["vocab"][token])
    vocab = dict(zip(ordered, ids, strict=True)) | special
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m) for m in trained["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted(special, key=lambda token: special[token]))
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": config.get("max_position_embeddings", 2048),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _special_ids(config: dict[str, Any]) -> dict[str, int]:
    """The config's bos and eos ids, and the smallest free ids for whatever it does not give."""
    given: dict[str, int] = {}
    for token, key in ((BOS, "bos_token_id"), (EOS, "eos_token_id")):
        value = config.get(key)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and value not in given.values():
            given[token] = value
    missing = [token for token in (BOS, EOS, USER) if token not in given]
    return given | dict(zip(missing, _free_ids(set(given.values()), len(missing)), strict=True))


def _free_ids(taken: set[int], count: int) -> list[int]:
    return [i for i in range(count + len(taken)) if i not in taken][:count]


def _trained(num_tokens: int) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return json.loads(tokenizer.to_str())["model"]
