"""What the kernels between ranks do, by torch on the arenas of all ranks.

In: for each rank the arguments of one launch by name (memory from where a pointer points on), and
the shape that the planner asked for. Out: the arenas as the kernels leave them. Their text is PTX
that no interpreter knows; the heads of codegen/templates/cuda_*.py.j2 say what they do.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sitsc.core.weights import DTYPES

_TYPES = {"bf16": "bfloat16", "fp32": "float32"}
_SHARE, _LANES = 256, 64  # a call as programs count it; programs of every send and receive
_UP = 1 << 30  # ids on their way are moved up
Values = dict[str, Any]


def all_reduce(shape: Values, ranks: Sequence[Values]) -> None:
    """sum = x + the sums of all ranks, in their order and as they travel; then the norm."""
    columns, rows = shape["columns"], ranks[0]["num_rows"]
    travelling = [_travelling(shape, one, rows, columns) for one in ranks]
    total = travelling[0]
    for sums in travelling[1:]:
        total = total + sums
    for one in ranks:
        _has_room(one, rows * columns * _bytes(shape["payload"]))
        _are_apart(shape, one, rows, columns)
        result, out = total, _rows(one["sum_ptr"], rows, columns)
        if shape["residual"]:
            result = result + _rows(one["x_ptr"], rows, columns).float()
        assert out.dtype == DTYPES[_TYPES[shape["x_dtype"]]]
        out.copy_(result)
        if shape["norm"]:
            _norm(shape, one, out if out.dtype == torch.bfloat16 else result)
        _called(one)


def all_gather(shape: Values, ranks: Sequence[Values]) -> None:
    """y [rows, ranks, inner] = x [rows, inner] of every rank."""
    rows, inner = ranks[0]["num_rows"], shape["inner_bytes"]
    x = torch.stack([_raw(one["x_ptr"], rows * inner).view(rows, inner) for one in ranks], 1)
    for one in ranks:
        _raw(one["y_ptr"], x.numel()).copy_(x.flatten())
        _called(one)


def share_ids(shape: Values, ranks: Sequence[Values]) -> None:
    """The ids of rank 0 on all."""
    count = ranks[0]["num_sequences"]
    ids = ranks[0]["ids_ptr"][:count].clone()
    for one in ranks:
        _has_room(one, count * 16)
        one["ids_ptr"][:count] = ids
        _called(one)


def send(shape: Values, values: Values, places: "Places") -> None:
    """Rows to the mail of the next stage, into one of its two slots in turn."""
    mail, flags, slot_bytes = values["links_ptr"][:3].tolist()
    calls, nbytes = _called(values), values["num_rows"] * shape["inner_bytes"]
    assert nbytes <= slot_bytes
    assert (values["acks_ptr"][:_LANES] >= calls - 1).all(), "the slot was not read the last time"
    slot = mail + (calls & 1) * slot_bytes
    places.bytes_at(slot, nbytes).copy_(_raw(values["x_ptr"], nbytes))
    places.bytes_at(flags, 4 * _LANES).view(torch.int32).fill_(calls + 1)


def receive(shape: Values, values: Values, places: "Places") -> None:
    """Rows out of the mail."""
    acks, slot_bytes = values["links_ptr"][:2].tolist()
    calls, nbytes = _called(values), values["num_rows"] * shape["inner_bytes"]
    assert (values["flags_ptr"][:_LANES] >= calls + 1).all(), "nothing was sent"
    slot = values["mail_ptr"][(calls & 1) * slot_bytes :]
    _raw(values["y_ptr"], nbytes).copy_(_raw(slot, nbytes))
    places.bytes_at(acks, 4 * _LANES).view(torch.int32).fill_(calls + 1)


def send_ids(shape: Values, values: Values, places: "Places") -> None:
    """Sampled ids and the number of their step to the mail of the first stage."""
    steps, count, rows = _called(values), values["num_sequences"], shape["rows"]
    at = int(values["links_ptr"][0]) + steps % shape["slots"] * rows * 16
    mail = places.bytes_at(at, rows * 16).view(torch.int32).view(rows, 4)
    mail[:count, 0::2] = values["ids_ptr"][:count, None].int() + _UP
    mail[:count, 1::2] = steps + 1


def place_sent(shape: Values, values: Values) -> None:
    """Ids out of that mail to where they belong."""
    steps, rows = int(values["calls_ptr"][0]) // _SHARE, shape["rows"]
    mail = values["mail_ptr"].view(-1)[: shape["slots"] * rows * 4].view(-1, rows, 4)
    for pair in range(values["num_sequences"]):
        since, row = divmod(int(values["token_sources_ptr"][pair]), rows)
        word, tag, again, same = mail[(steps - 1 - since) % shape["slots"], row].tolist()
        assert (tag, again, same) == (steps - since, word, tag), "this step was not sampled"
        values["token_ids_ptr"][int(values["token_places_ptr"][pair])] = max(word - _UP, 0)


class Places:
    """Finds memory of any rank by its address."""

    def __init__(self, arenas: Sequence[Tensor]) -> None:
        self._arenas = arenas

    def bytes_at(self, address: int, count: int) -> Tensor:
        """So many bytes of the arena that has them all."""
        for arena in self._arenas:
            at = address - arena.data_ptr()
            if 0 <= at <= len(arena) - count:
                return arena[at : at + count]
        raise AssertionError(f"no rank has {count} bytes at {address}")


def _travelling(shape: Values, one: Values, rows: int, columns: int) -> Tensor:
    """The sum of a rank [rows, columns] as the others get it, in fp32."""
    count = shape["parts"]
    parts = _rows(one["parts_ptr"], count * rows, columns).view(count, rows, columns).float()
    own = parts[0]
    for part in parts[1:]:
        own = own + part
    return own.to(DTYPES[_TYPES[shape["payload"]]]).float()


def _norm(shape: Values, one: Values, total: Tensor) -> None:
    """y, complete or without 1 / rms, then with the sums of squares of each of several blocks."""
    x = total.float()
    rows, columns = x.shape
    y, blocks = _rows(one["y_ptr"], rows, columns), shape["blocks"]
    weight = one["norm_ptr"][:columns].float() if shape["weight"] else torch.ones(columns)
    offset = shape["offset"]
    if blocks > 1:
        y.copy_(x * (offset + weight))
        squares = torch.zeros(rows, blocks)
        squares[:, 0] = (x * x).sum(-1)  # which of the blocks has what says the kernel
        _rows(one["squares_ptr"], rows, blocks).copy_(squares)
        return
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + shape["eps"])
    if shape["weight"] and not offset:
        normed = normed.bfloat16().float()
    y.copy_(normed * (offset + weight))


def _are_apart(shape: Values, one: Values, rows: int, columns: int) -> None:
    """What is written is nothing that programs may still read: others' rows, their own twice."""
    cells, norm = rows * columns, shape["norm"]
    read = {"parts_ptr": shape["parts"] * cells} | ({"x_ptr": cells} if shape["residual"] else {})
    written = {"sum_ptr": cells} | ({"y_ptr": cells} if norm else {})
    written |= {"squares_ptr": rows * shape["blocks"]} if norm and "squares_ptr" in one else {}
    spans = {name: _span(one[name], count) for name, count in (read | written).items()}
    for name in written:
        for other in spans:
            low, high = spans[other]
            same = name == other or ((name, other) == ("sum_ptr", "x_ptr"))
            same = same and spans[name][0] == low
            assert same or spans[name][1] <= low or high <= spans[name][0], (name, other)


def _span(memory: Tensor, count: int) -> tuple[int, int]:
    return memory.data_ptr(), memory.data_ptr() + count * memory.element_size()


def _has_room(one: Values, nbytes: int) -> None:
    """A slot of rows from one rank is as large as peers_ptr says, and has room for these."""
    slot_bytes = int(one["peers_ptr"][one["num_ranks"] + 1])
    assert nbytes <= slot_bytes, f"{nbytes} bytes in a slot of {slot_bytes}"


def _called(one: Values) -> int:
    """Count a call; how many there were."""
    calls = int(one["calls_ptr"][0]) // _SHARE
    one["calls_ptr"][0] += _SHARE
    assert one["calls_ptr"][1] == 0, "an error was noted"
    return calls


def _rows(memory: Tensor, rows: int, columns: int) -> Tensor:
    return memory[: rows * columns].view(rows, columns)


def _raw(memory: Tensor, nbytes: int) -> Tensor:
    return memory.view(torch.uint8)[:nbytes]


def _bytes(kind: str) -> int:
    return DTYPES[_TYPES[kind]].itemsize
