"""Where to write the labels of a picture's points: close to them, and where they hide little; lengths in 1/72 inch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

AROUND = tuple(math.radians(degrees) for degrees in (225, 45, 200, 250, 20, 70, 180, 0, 270, 90, 315, 135, 160, 340))
DISTANCES = (4, 8, 14, 21, 30, 42)
NEAR = 8  # a label that is farther from its point needs a line to it
STARTS, SWEEPS = 24, 8
# what it costs: a drawn point hidden, or crossed by the label's line, having a line, 1 pt outside the frame, 1 pt from its
# place, 1 pt closer to the place of another label, 1 pt² shared with another label, a line that runs through another label
HIDDEN, CROSSED, LINE, OUTSIDE, AWAY, MISTAKEN, SHARED, THROUGH = 4.0, 3.0, 6.0, 100.0, 1.5, 4.0, 5.0, 8.0


@dataclass(frozen=True)
class Label:
    """A text of `size` (width, height) that belongs to the point at `place` (x, y); `reach`: farthest it may be from there."""

    place: tuple[float, float]
    size: tuple[float, float]
    reach: float = DISTANCES[-1]


@dataclass(frozen=True)
class _Choices:
    """All positions of all labels, one a row: which label, its half size and place, the middle of the text, its distance."""

    owner: np.ndarray
    half: np.ndarray
    place: np.ndarray
    middle: np.ndarray
    distance: np.ndarray

    def on_line(self) -> np.ndarray:
        """Points [4, N, 2] on the line from the place to the text; infinite where no line is needed."""
        ends = np.clip(self.place, self.middle - self.half, self.middle + self.half)
        ends[self.distance <= NEAR] = np.inf
        return self.place + np.array([0.3, 0.5, 0.7, 0.9])[:, None, None] * (ends - self.place)


def arrange(labels: Sequence[Label], busy: np.ndarray, frame: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """For each label the middle of its text, and the distance from its place; the best found from several starts.

    busy: points [N, 2] that should stay visible. frame: lower left and upper right corner [2, 2] to stay inside of.
    """
    if not labels:
        return []
    choices = _choices(labels)
    alone, pairs = _alone(choices, labels, busy, frame), _pairs(choices)
    rows = [np.flatnonzero(choices.owner == number) for number in range(len(labels))]
    random = np.random.default_rng(0)
    starts = [[held[np.argmin(alone[held])] for held in rows]]
    starts += [[random.choice(held) for held in rows] for _ in range(STARTS - 1)]
    _, chosen = min((_settle(rows, alone, pairs, start) for start in starts), key=lambda settled: settled[0])
    return [(choices.middle[row], float(choices.distance[row])) for row in chosen]


def _choices(labels: Sequence[Label]) -> _Choices:
    directions = np.array([(math.cos(angle), math.sin(angle)) for angle in AROUND])
    parts = []
    for number, label in enumerate(labels):
        distances = np.array([distance for distance in DISTANCES if distance <= label.reach], dtype=np.float64)
        half, place = np.array(label.size) / 2, np.array(label.place, dtype=np.float64)
        middle = (place + (half + distances[:, None, None]) * directions).reshape(-1, 2)
        fixed = (np.full(len(middle), number), np.tile(half, (len(middle), 1)), np.tile(place, (len(middle), 1)))
        parts.append((*fixed, middle, distances.repeat(len(AROUND))))
    return _Choices(*map(np.concatenate, zip(*parts, strict=True)))


def _alone(choices: _Choices, labels: Sequence[Label], busy: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """Cost [N] of each choice, wherever the other texts are."""
    low, high = choices.middle - choices.half - 1, choices.middle + choices.half + 1
    hidden = _within(busy, choices.middle, choices.half).sum(1)
    far, crossed = choices.distance > NEAR, np.zeros(len(low))
    crossed[far] = sum(_within(busy, points, np.full_like(points, 1)).sum(1) for points in choices.on_line()[:, far])
    outside = (np.clip(frame[0] - low, 0, None) + np.clip(high - frame[1], 0, None)).sum(1)
    closer = np.zeros(len(low))
    for number, label in enumerate(labels):
        gap = np.hypot(*np.clip(np.abs(choices.middle - label.place) - choices.half, 0, None).T)
        closer += np.clip(np.minimum(choices.distance, NEAR) + 2 - gap, 0, None) * (choices.owner != number)
    order = 0.2 * (np.arange(len(low)) % len(AROUND))
    away = AWAY * choices.distance + LINE * far
    return HIDDEN * hidden + CROSSED * crossed + OUTSIDE * outside + MISTAKEN * closer + away + order


def _pairs(choices: _Choices) -> np.ndarray:
    """Cost [N, N] of two choices together, fp32."""
    common = np.ones((len(choices.owner),) * 2, dtype=np.float32)
    for half, middle in zip(choices.half.T.astype(np.float32), choices.middle.T.astype(np.float32), strict=True):
        common *= np.clip(half[:, None] + half + 1 - np.abs(middle[:, None] - middle), 0, None)
    through = sum(_within(points, choices.middle, choices.half).astype(np.float32) for points in choices.on_line())
    pairs = SHARED * common + THROUGH * (through + through.T)
    pairs[choices.owner[:, None] == choices.owner] = 0
    return pairs


def _within(points: np.ndarray, middles: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """Whether each point is in, or less than 1 pt beside, each box, [boxes, points]."""
    across, up = (np.abs(points[:, axis] - middles[:, None, axis]) < halves[:, None, axis] + 1 for axis in (0, 1))
    return across & up


def _settle(rows: list[np.ndarray], alone: np.ndarray, pairs: np.ndarray, start: list[int]) -> tuple[float, np.ndarray]:
    """Move one label after the other to its best choice until none moves; the cost, and the choice of each label."""
    chosen = np.array(start)
    for _ in range(SWEEPS):
        before = chosen.copy()
        for number, held in enumerate(rows):
            chosen[number] = held[np.argmin(alone[held] + pairs[np.ix_(held, chosen)].sum(1))]
        if (chosen == before).all():
            break
    return float(alone[chosen].sum() + pairs[np.ix_(chosen, chosen)].sum() / 2), chosen


def along(path: np.ndarray) -> np.ndarray:
    """Points at most 2 pt apart on a line through the points of path [N, 2]."""
    pieces = [path[:1]]
    for start, end in zip(path[:-1], path[1:], strict=True):
        steps = max(1, math.ceil(np.hypot(*(end - start)) / 2))
        pieces.append(start + (end - start) * np.arange(1, steps + 1)[:, None] / steps)
    return np.concatenate(pieces)


def on_markers(path: np.ndarray) -> np.ndarray:
    """Nine points on a marker of 4 pt at each point of path [N, 2]."""
    around = np.stack(np.meshgrid((-2, 0, 2), (-2, 0, 2)), -1).reshape(-1, 2)
    return (path[:, None] + around).reshape(-1, 2)
