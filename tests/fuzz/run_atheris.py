"""Coverage-guided fuzzing of one reader: python -m tests.fuzz.run_atheris KIND [SECONDS] [FOLDER].

KIND is safetensors, gguf, onnx or folder (config, index and tokenizer files). Needs `pip install
atheris`. New inputs and crashers lie in FOLDER (default .fuzz/KIND); a crasher becomes a test by
adding its bytes to tests/frontend/test_fuzz_crashers.py.
"""

import resource
import sys
from pathlib import Path
from typing import Any

import atheris  # pyright: ignore[reportMissingImports]

watched: Any = atheris
with watched.instrument_imports(include=["sitsc.frontend"], enable_loader_override=False):
    from sitsc.frontend import (  # noqa: F401
        checkpoint,
        config_knowledge,
        config_lint,
        gguf_config,
        gguf_families,
        gguf_header,
        gguf_reader,
        gguf_tokenizer,
        lint,
        onnx_attention,
        onnx_call,
        onnx_checkpoint,
        onnx_file,
        onnx_host,
        onnx_module,
        onnx_ops,
        onnx_program,
        onnx_rows,
        onnx_shape_ops,
        onnx_trace,
        onnx_values,
        range_lint,
        rope_lint,
        safe_files,
        safetensors_reader,
        tensor_lint,
        tokenizer_files,
        tokenizer_lint,
    )
from tests.fuzz.seeds import KINDS, seeds  # noqa: E402  (after what is instrumented)
from tests.fuzz.targets import run_one  # noqa: E402

ADDRESS_SPACE_GIB = 8
WORDS = ("dtype", "shape", "data_offsets", "weight_map", "rope_scaling", "../", "general.")


def main() -> None:
    """Fuzz until the time is over; the exit code is libFuzzer's (77 for a crasher)."""
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    if kind not in KINDS:
        sys.exit(__doc__)
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 600
    root = Path(sys.argv[3] if len(sys.argv) > 3 else f".fuzz/{kind}")
    corpus = root / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(kind)):
        (corpus / f"seed-{number}").write_bytes(seed)
        run_one(kind, seed)  # what is imported late is imported before the guard matters
    words = root / "words.dict"
    words.write_text("".join(f'"{w}"\n' for w in WORDS))

    def one(data: bytes) -> None:
        run_one(kind, data)

    limit = ADDRESS_SPACE_GIB << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
            f"-max_total_time={seconds}",
            "-timeout=10",
            "-rss_limit_mb=3072",
            "-max_len=32768",
            f"-dict={words}",
            f"-artifact_prefix={root}/",
            "-print_final_stats=1",
        ],
        one,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
