"""Silence for libraries that warn and log while they trace or compile."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(level: int) -> Iterator[None]:
    """No warnings, and no log records up to `level`, inside; as it was before, after."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
