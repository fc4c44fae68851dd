"""The CPU kernels' ABI for ctypes: argument structs by field name, for tests and benchmarks.

Tensors become pointers; strides and counts are given as they are. The runtime does not use this:
there the kernels are called from the AOTInductor package.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}

# Field names in the order of the C struct; the letter is the type: pointer, int64, int32, float.
LINEAR = (
    "p:x l:x_stride i:x_dtype l:tokens l:n l:k p:weight i:weight_dtype p:scale p:bias i:prologue "
    "p:norm_weight f:eps f:norm_offset i:epilogue i:activation p:residual l:residual_stride p:out "
    "l:out_stride i:out_dtype"
)
EMBEDDING = "p:ids l:tokens l:vocab l:hidden p:weight i:weight_dtype p:scale p:out i:out_dtype"
RMS_NORM = (
    "p:x l:x_stride i:dtype l:tokens l:hidden p:weight f:eps f:offset p:out l:out_stride "
    "i:centred p:bias l:weight_rows"
)
ATTENTION = (
    "p:q p:k p:v l:q_stride_token l:q_stride_head l:k_stride_token l:k_stride_head "
    "l:v_stride_token l:v_stride_head i:dtype p:cos p:sin l:cos_stride i:rotary_dim i:rope_style "
    "p:k_cache p:v_cache i:kv_dtype i:page_tokens l:page_stride l:num_pages p:block_table "
    "l:block_table_stride p:query_start p:context_len l:seqs l:tokens i:q_heads i:kv_heads "
    "i:head_dim i:v_head_dim f:scale f:softcap i:window p:sinks p:out l:out_stride"
)

MOE = (
    "p:x l:x_stride i:x_dtype l:tokens l:hidden l:inter l:experts p:logits l:logits_stride "
    "i:logits_dtype p:correction i:top_k i:scoring i:groups i:group_top i:normalise f:scaling "
    "p:gate_up p:gate_up_scale p:gate_up_bias p:down p:down_scale p:down_bias i:weight_dtype "
    "i:activation f:alpha f:limit p:residual l:residual_stride p:out l:out_stride l:first l:held"
)


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    pairs = [field.split(":") for field in fields.split()]
    return type(
        name, (ctypes.Structure,), {"_fields_": [(key, _TYPES[code]) for code, key in pairs]}
    )


class CpuKernels:
    """One loaded kernel library. Each kernel takes its struct's fields by name, returns the code.

    A field that is left out is 0 or NULL; a tensor is passed by its address, a dtype by its code.
    """

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self._structs: dict[str, type[ctypes.Structure]] = {}
        self.library.sitsc_cpu_error.restype = ctypes.c_char_p
        self.library.sitsc_cpu_isa.restype = ctypes.c_char_p
        self.library.sitsc_cpu_workspace_bytes.restype = ctypes.c_int64
        self.library.sitsc_cpu_workspace_bytes.argtypes = [ctypes.c_int64] * 7
        self.library.sitsc_cpu_set_workspace.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self.linear = self._kernel("linear", LINEAR)
        self.embedding = self._kernel("embedding", EMBEDDING)
        self.rms_norm = self._kernel("rms_norm", RMS_NORM)
        self.attention = self._kernel("attention", ATTENTION)
        self.moe = self._kernel("moe", MOE)

    def _kernel(self, name: str, fields: str) -> Callable[..., int]:
        self._structs[name] = _struct(name, fields)

        def call(**values: Any) -> int:
            return self.bind(name, **values)()

        return call

    def bind(self, name: str, **values: Any) -> Callable[[], int]:
        """The call of kernel `name` with its struct filled in once; keeps the tensors alive."""
        struct = self._structs[name](**{key: _plain(value) for key, value in values.items()})
        function, pointer = getattr(self.library, f"sitsc_cpu_{name}"), ctypes.byref(struct)

        def call(_keep: Any = (struct, values)) -> int:
            return function(pointer)

        return call

    def select_isa(self, name: str | None) -> bool:
        """Choose a variant (None: the best); False if this CPU does not run it."""
        code = None if name is None else name.encode()
        return self.library.sitsc_cpu_select_isa(code) == 0

    def isa(self) -> str:
        """The variant in use."""
        return self.library.sitsc_cpu_isa().decode()

    def error(self, code: int) -> str:
        """What an error code means."""
        return self.library.sitsc_cpu_error(code).decode()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return _CODES[value] if isinstance(value, torch.dtype) else value
