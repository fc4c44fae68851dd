"""Widths of attention's keys and values, by the config: what a target has no kernels for.

In: a decoder's config. Raises UnsupportedModelError; says it before anything is traced.
"""

from typing import Any

from sitsc.core.errors import UnsupportedModelError

_KEYS, _VALUES = ("qk_nope_head_dim", "qk_rope_head_dim"), "v_head_dim"


def check_head_widths(config: dict[str, Any], target: str) -> None:
    """Refuse latent attention whose values are not as wide as its keys, but for narrower on CPUs.

    `page_attention` checks the same of any graph.
    """
    sizes = [size for name in (*_KEYS, _VALUES) if isinstance(size := config.get(name), int)]
    if len(sizes) < len((*_KEYS, _VALUES)):  # attention of another kind, or for the lint to refuse
        return
    *parts, values = sizes
    keys = sum(parts)
    if values == keys or (values < keys and target.startswith("cpu")):
        return
    raise UnsupportedModelError(
        f"attention has keys of {keys} elements a head ({' + '.join(_KEYS)}) and values of "
        f"{values} ({_VALUES}), for which {target} has no kernels",
        where="config.json",
        hint="--target cpu" if values < keys else "no target takes values wider than keys",
    )
