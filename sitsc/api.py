"""The Python API: `sitsc.compile` makes an artifact of a path or of a module in memory.

`sitsc.load` opens an artifact: a session with an engine for decoders, a function for plain ones.
Guide: docs/python-api.md.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sitsc.core.artifact import Artifact, open_artifact
from sitsc.core.errors import OptionError
from sitsc.core.options import CompileOptions
from sitsc.core.plan import PLAIN
from sitsc.runtime.checkpoint_weights import outside_rows
from sitsc.runtime.loader import Session
from sitsc.runtime.loader import load as load_decoder
from sitsc.runtime.plain import PlainModel, load_plain

Progress = Callable[[str, float], None]


class Compiled(Artifact):
    """An artifact that knows how to load itself."""

    def load(self, **options: Any) -> Session | PlainModel:
        """The same as `sitsc.load` of its folder."""
        return load(self.root, **options)

    def export_onnx(self, out: str | Path, weights: str | Path | None = None) -> list[Path]:
        """The same as `sitsc.export_onnx` of its folder."""
        return export_onnx(self, out, weights)


def compile(
    model: str | Path | nn.Module,
    target: str = "cpu",
    example_inputs: Any = None,
    *,
    out: str | Path | None = None,
    decoder: bool | None = None,
    dynamic_shapes: Any = None,
    tokenizer: str | Path | None = None,
    eos_token_ids: Sequence[int] = (),
    dump: str | Path | None = None,
    progress: Progress = lambda phase, share: None,
    **options: Any,
) -> Compiled:
    """Compile `model` into the new folder `out` (by default NAME-TARGET.sitsc) and open it.

    `model` is a checkpoint (a folder or a .gguf file), a transformers language model, or any module
    on the CPU. With `decoder` true the module maps token ids [1, tokens] to logits [1, tokens,
    vocabulary] and serves from the engine; else it is a plain function of tensors like
    `example_inputs` (a tensor, a tuple, or a dictionary by name), whose free sizes `dynamic_shapes`
    names as torch.export takes them. `tokenizer` (a tokenizer.json) and `eos_token_ids` are for a
    decoder of one's own. `options` are those of `CompileOptions`, such as dtype="bfloat16" or
    max_context=512. Raises SitscError.
    """
    chosen = _options(target, options)
    name = type(model).__name__ if isinstance(model, nn.Module) else Path(model).resolve().name
    place = Path(out or f"{name.removesuffix('.gguf')}-{target}.sitsc")
    text = None if dump is None else Path(dump)
    if not isinstance(model, nn.Module):
        _refuse(example_inputs=example_inputs, dynamic_shapes=dynamic_shapes, tokenizer=tokenizer)
        artifact = _compile_path(model, place, chosen, progress, text)
    elif decoder is not False and _is_language_model(model):
        _refuse(example_inputs=example_inputs, dynamic_shapes=dynamic_shapes, tokenizer=tokenizer)
        artifact = _compile_transformers(model, place, chosen, progress, text)
    elif decoder:
        from sitsc.decoder_pipeline import Vocabulary, compile_decoder  # noqa: PLC0415

        _refuse(dynamic_shapes=dynamic_shapes)
        words = Vocabulary(None if tokenizer is None else Path(tokenizer), tuple(eos_token_ids))
        ids = _token_ids(example_inputs)
        artifact = compile_decoder(model, ids, words, place, chosen, progress, text)
    else:
        from sitsc.plain_pipeline import compile_plain_module  # noqa: PLC0415  (the passes)

        _refuse(tokenizer=tokenizer, eos_token_ids=eos_token_ids or None)
        args, kwargs = _example(example_inputs)
        artifact = compile_plain_module(
            model, args, kwargs, dynamic_shapes, place, chosen, progress, text
        )
    return Compiled(artifact.root, artifact.manifest, artifact.plan)


def load(artifact: str | Path | Artifact, **options: Any) -> Session | PlainModel:
    """An artifact ready to run: a `Session` (its `engine` generates), or a `PlainModel` to call.

    `options` are those of the loader: verify=False skips the checksums, weights=… names the
    checkpoint of an unpacked artifact. Raises SitscError.
    """
    root = artifact.root if isinstance(artifact, Artifact) else Path(artifact)
    if open_artifact(root).plan.kind == PLAIN:
        return load_plain(root, **options)
    return load_decoder(root, **options)


def export_onnx(
    artifact: str | Path | Artifact, out: str | Path, weights: str | Path | None = None
) -> list[Path]:
    """Write an artifact as the ONNX model `out`; the files written, that of large weights first.

    `weights` names the checkpoint of an artifact that does not hold its own. Raises SitscError.
    """
    from sitsc.export import export_onnx as write  # noqa: PLC0415  (needs onnx)

    opened = artifact if isinstance(artifact, Artifact) else open_artifact(Path(artifact))
    folder = None if weights is None else Path(weights)
    return write(opened, Path(out), outside_rows(opened, folder))


def _options(target: str, given: dict[str, Any]) -> CompileOptions:
    known = {field.name for field in fields(CompileOptions)} - {"target"}
    if unknown := sorted(set(given) - known):
        raise OptionError(
            f"compile takes no option {unknown[0]!r}", hint=f"one of {', '.join(sorted(known))}"
        )
    return CompileOptions(target=target, **given)


def _refuse(**given: Any) -> None:
    """Raise OptionError for an argument that this kind of model does not take."""
    for name, value in given.items():
        if value is not None:
            raise OptionError(f"{name} does not fit this kind of model", hint="leave it out")


def _example(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named example inputs."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    return tuple(inputs or ()), {}


def _token_ids(inputs: Any) -> Tensor | None:
    """The example of a decoder. Raises OptionError for more than one input."""
    args, kwargs = _example(inputs)
    found = [*args, *kwargs.values()]
    if len(found) > 1 or not all(isinstance(item, Tensor) for item in found):
        raise OptionError(
            f"{len(found)} example inputs: a decoder takes token ids alone",
            hint="give one int64 tensor [1, tokens], or none",
        )
    return found[0] if found else None


def _compile_path(
    model: str | Path, out: Path, options: CompileOptions, progress: Progress, dump: Path | None
) -> Artifact:
    from sitsc.pipeline import compile_model  # noqa: PLC0415  (the frontend)

    return compile_model(model, out, options, progress, dump=dump)


def _is_language_model(model: nn.Module) -> bool:
    """Whether a module is a decoder of transformers, which the family passes know."""
    ours = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    return ours and type(model).__name__.endswith("ForCausalLM")


def _compile_transformers(
    model: Any, out: Path, options: CompileOptions, progress: Progress, dump: Path | None
) -> Artifact:
    """Through a checkpoint of safetensors, so that every check of checkpoints holds here too."""
    if options.pack is False:
        raise OptionError("pack=False: weights in memory must be packed", hint="leave it out")
    out.parent.mkdir(parents=True, exist_ok=True)
    packed = replace(options, pack=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".sitsc_model_") as folder:
        place = Path(folder, "model")
        _save(model, place)
        return _compile_path(place, out, packed, progress, dump)


def _save(model: Any, folder: Path) -> None:
    """Write a model of transformers without its progress bar."""
    from transformers.utils import logging  # noqa: PLC0415  (loaded already: the model is of it)

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
