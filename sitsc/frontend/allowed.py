"""Names given to `--allow-unknown-key` must be there and unknown, or the option would do nothing.

In: an opened checkpoint and the names. Out: nothing, or OptionError with the keys that are unknown.
"""

from typing import Any

from sitsc.core.errors import OptionError
from sitsc.frontend.checkpoint_types import Checkpoint
from sitsc.frontend.encoder import is_encoder
from sitsc.frontend.encoder_checks import declared_keys, key_use
from sitsc.frontend.lint import key_uses
from sitsc.frontend.nested import outer_uses
from sitsc.frontend.safe_files import shown

_MEANT = ("unknown", "refused")


def check_allowed(checkpoint: Checkpoint, allow: frozenset[str]) -> None:
    """Raises OptionError for a name that lets nothing pass."""
    if not allow:
        return
    if checkpoint.program is not None:
        raise OptionError(
            "--allow-unknown-key: no key beside an ONNX graph says what is computed",
            hint="leave it out",
        )
    uses = _uses(checkpoint)
    if not uses:  # a family nobody knows, which is the error that follows
        return
    unknown = [shown(key)[1:-1] for key, use in sorted(uses.items()) if use in _MEANT]
    hint = f"unknown: {', '.join(unknown)}" if unknown else "every key is known: leave it out"
    for name in sorted(allow):
        if uses.get(name) in _MEANT or _lies_deeper(checkpoint.config, name):
            continue
        why = f"is {uses[name]}, not unknown" if name in uses else "is no key of the model"
        raise OptionError(f"--allow-unknown-key: {shown(name)} {why}", hint=hint)


def _uses(checkpoint: Checkpoint) -> dict[str, str]:
    """The use of every key; of a nested decoder those around it, too."""
    config, nested = checkpoint.config, checkpoint.nested
    if is_encoder(checkpoint):
        declared = declared_keys(config["model_type"])
        return {key: key_use(key, value, declared) for key, value in config.items()}
    inner = {found.key: found.use for found in key_uses(config, frozenset())}
    if nested is None or not inner:
        return inner
    outer = outer_uses(nested)
    return outer | {k: use for k, use in inner.items() if outer.get(k) not in _MEANT}


def _lies_deeper(config: Any, name: str) -> bool:
    """Whether `name` is a key with dots, as those of a rope scaling are told."""
    value, parts = config, name.split(".")
    for part in parts:
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return len(parts) > 1
