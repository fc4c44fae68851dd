"""A scatter plot as a PNG file, by the standard library alone: no plotting package is needed.

In: series of points with names. Out: bytes of a PNG with axes, numbers and a legend.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

WIDTH, HEIGHT = 960, 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 250, 40, 70
_WHITE, _BLACK, _GREY = (255, 255, 255), (40, 40, 40), (222, 222, 222)
_COLOURS = (
    *((31, 119, 180), (214, 39, 40), (44, 160, 44), (255, 127, 14), (148, 103, 189)),
    *((140, 86, 75), (227, 119, 194), (90, 90, 90), (188, 189, 34), (23, 190, 207)),
)
_SCALE = 2
# Glyphs of 3 x 5 dots, a row an octal digit from the top.
_GLYPHS = {
    **{"0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717"},
    **{"6": "74757", "7": "71111", "8": "75757", "9": "75717", ".": "00002", ",": "00024"},
    **{"-": "00700", "/": "11244", ":": "02020", "%": "51245", "(": "12221", ")": "42224"},
    **{"A": "25755", "B": "65656", "C": "34443", "D": "65556", "E": "74647", "F": "74644"},
    **{"G": "34553", "H": "55755", "I": "72227", "J": "11152", "K": "55655", "L": "44447"},
    **{"M": "57755", "N": "65555", "O": "25552", "P": "65644", "Q": "25561", "R": "65655"},
    **{"S": "34216", "T": "72222", "U": "55557", "V": "55552", "W": "55775", "X": "55255"},
    **{"Y": "55222", "Z": "71247", "+": "02720", "=": "07070", "_": "00007", "×": "00525"},
}


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name; `marked` ones are joined by a line."""

    name: str
    points: tuple[tuple[float, float], ...]
    marked: bool = False


class _Canvas:
    def __init__(self) -> None:
        self.rows = [bytearray(_WHITE * WIDTH) for _ in range(HEIGHT)]

    def dot(self, x: int, y: int, colour: tuple[int, int, int]) -> None:
        if 0 <= x < WIDTH and 0 <= y < HEIGHT:
            self.rows[y][3 * x : 3 * x + 3] = bytes(colour)

    def box(self, x: int, y: int, w: int, h: int, colour: tuple[int, int, int]) -> None:
        for row in range(y, y + h):
            for column in range(x, x + w):
                self.dot(column, row, colour)

    def line(self, a: tuple[int, int], b: tuple[int, int], colour: tuple[int, int, int]) -> None:
        steps = max(abs(a[0] - b[0]), abs(a[1] - b[1]), 1)
        for i in range(steps + 1):
            x, y = (round(p + (q - p) * i / steps) for p, q in zip(a, b, strict=True))
            self.box(x, y, 2, 2, colour)

    def text(self, x: int, y: int, text: str, colour: tuple[int, int, int] = _BLACK) -> None:
        for letter in text.upper():
            for row, digit in enumerate(_GLYPHS.get(letter, "00000")):
                for column in range(3):
                    if int(digit) >> (2 - column) & 1:
                        self.box(x + _SCALE * column, y + _SCALE * row, _SCALE, _SCALE, colour)
            x += 4 * _SCALE

    def png(self) -> bytes:
        raw = b"".join(b"\0" + bytes(row) for row in self.rows)
        head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", head), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def scatter(series: Sequence[Series], title: str, x_name: str, y_name: str) -> bytes:
    """A PNG of all series on axes from zero."""
    canvas = _Canvas()
    points = [p for one in series for p in one.points]
    x_most, y_most = (_round_up(max((p[i] for p in points), default=1.0)) for i in (0, 1))
    wide, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[int, int]:
        return round(_LEFT + wide * x / x_most), round(_TOP + high * (1 - y / y_most))

    for i in range(6):
        x, y = place(x_most * i / 5, y_most * i / 5)
        canvas.box(x, _TOP, 1, high, _GREY)
        canvas.box(_LEFT, y, wide, 1, _GREY)
        canvas.text(x - 12, _TOP + high + 10, _number(x_most * i / 5))
        canvas.text(8, y - 5, _number(y_most * i / 5))
    canvas.box(_LEFT, _TOP, 2, high, _BLACK)
    canvas.box(_LEFT, _TOP + high, wide, 2, _BLACK)
    canvas.text(_LEFT + wide // 3, 14, title)
    canvas.text(_LEFT + wide // 3, HEIGHT - 30, x_name)
    canvas.text(8, _TOP - 24, y_name)
    for index, one in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        places = [place(x, y) for x, y in one.points]
        if one.marked:
            for a, b in pairwise(places):
                canvas.line(a, b, colour)
        for x, y in places:
            canvas.box(x - 3, y - 3, 7, 7, colour)
        canvas.box(WIDTH - _RIGHT + 16, _TOP + 20 * index, 10, 10, colour)
        canvas.text(WIDTH - _RIGHT + 32, _TOP + 20 * index, one.name)
    return canvas.png()


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    size = 10 ** math.floor(math.log10(value))
    return next(
        size * n
        for n in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
        if size * n >= value * (1 - 1e-9)
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
