"""Lines of YOLO files that are longer than a box: polygons, or boxes with keypoints, whose first numbers differ."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.errors import DataError

_FEW_LINES = 3  # lines that are needed to suspect keypoints without visibility
_NEAR = 0.01  # of the image: keypoints may be outside their box by this much


class YoloLines:
    """The lines with more than a box: polygons, or boxes with keypoints (a pose).

    Args:
        keypoints: the number of keypoints, and of the numbers of each. None: the lines are polygons.
    """

    def __init__(self, keypoints: tuple[int, int] | None) -> None:
        self.keypoints = keypoints
        self.after_box = None if keypoints is None else keypoints[0] * keypoints[1]
        self.lengths: set[int] = set()
        self.shapes = {2, 3}
        """How many numbers each keypoint has, if every line is a box with keypoints."""
        self.lines = 0
        self.first = ""

    @property
    def expected(self) -> str:
        """What a line may contain."""
        longer = f", or {5 + self.after_box} with the keypoints of kpt_shape" if self.after_box else ""
        return f"write five: class x y width height, as fractions of the image{longer}"

    def is_pose(self, values: Sequence[float], where: str) -> bool:
        """True if the numbers after the class are a box with keypoints."""
        if self.after_box is not None:
            return len(values) == 4 + self.after_box
        self.lines, self.first = self.lines + 1, self.first or where
        self.lengths.add(len(values))
        self.shapes = (
            {each for each in self.shapes if _could_be_pose(values, each)} if len(self.lengths) == 1 else set()
        )
        return False

    def check(self) -> None:
        """Raise DataError if all lines look like boxes with keypoints, which were not declared."""
        if not self.lines or not self.shapes or (self.shapes == {2} and self.lines < _FEW_LINES):
            return
        each = max(self.shapes)
        points = (next(iter(self.lengths)) - 4) // each
        what = f"these lines look like boxes with {points} keypoints, not like polygons"
        remedy = (
            f"write `kpt_shape: [{points}, {each}]` into data.yaml. If they are polygons, write `kpt_shape: [0, 2]`"
        )
        raise DataError(what, where=self.first, remedy=remedy)


def _could_be_pose(values: Sequence[float], each: int) -> bool:
    """True if the first four numbers are a box that contains the points after it, and flags are 0, 1 or 2."""
    rest = values[4:]
    if not rest or len(rest) % each:
        return False
    x, y, width, height = values[:4]
    seen = [(px, py) for px, py in zip(rest[::each], rest[1::each], strict=True) if (px, py) != (0, 0)]
    inside = all(abs(px - x) <= width / 2 + _NEAR and abs(py - y) <= height / 2 + _NEAR for px, py in seen)
    return inside and (each == 2 or all(flag in (0, 1, 2) for flag in rest[2::3]))
