"""Labels of points: near their own, beside lines and other labels, inside the frame."""

import math

import numpy as np
import pytest

from dpamoe.labels import DISTANCES, NEAR, Label, along, arrange, on_markers

FRAME = np.array([(0.0, 0.0), (200.0, 150.0)])
NOTHING = np.empty((0, 2))


def boxes(labels, placed):
    halves = [np.array(label.size) / 2 for label in labels]
    return [(middle - half, middle + half) for half, (middle, _) in zip(halves, placed, strict=True)]


def overlap(first, second):
    return bool((np.minimum(first[1], second[1]) > np.maximum(first[0], second[0])).all())


def test_alone_a_label_stands_below_left_of_its_point_without_a_line():
    (label,) = labels = [Label((100.0, 75.0), (10.0, 6.0))]
    ((middle, distance),) = arrange(labels, NOTHING, FRAME)
    direction = np.array([math.cos(math.radians(225)), math.sin(math.radians(225))])
    np.testing.assert_allclose(middle, np.array(label.place) + (np.array([5.0, 3.0]) + DISTANCES[0]) * direction)
    assert distance == DISTANCES[0] <= NEAR


def test_a_label_avoids_what_is_drawn():
    line = along(np.array([(80.0, 55.0), (100.0, 75.0)]))  # comes from below left, where the label would stand
    (box,) = boxes(labels := [Label((100.0, 75.0), (10.0, 6.0))], arrange(labels, line, FRAME))
    assert not ((line > box[0]) & (line < box[1])).all(1).any()


@pytest.mark.parametrize("place", [(0.0, 0.0), (200.0, 150.0), (0.0, 150.0), (200.0, 0.0)])
def test_a_label_stays_inside_the_frame(place):
    ((low, high),) = boxes(labels := [Label(place, (30.0, 8.0))], arrange(labels, NOTHING, FRAME))
    assert (low >= FRAME[0]).all() and (high <= FRAME[1]).all()


def test_crowded_labels_are_apart_and_each_is_nearest_to_its_own_point():
    places = [(90.0, 80.0), (92.0, 74.0), (98.0, 76.0), (100.0, 70.0), (96.0, 82.0)]
    labels = [Label(place, (28.0, 8.0)) for place in places]
    placed = arrange(labels, on_markers(np.array(places)), FRAME)
    apart = boxes(labels, placed)
    assert not any(overlap(apart[a], apart[b]) for a in range(5) for b in range(a))
    for number, (low, high) in enumerate(apart):
        if placed[number][1] <= NEAR:  # no line says whose it is
            gaps = [np.hypot(*(np.clip(place, low, high) - place)) for place in np.array(places)]
            assert np.argmin(gaps) == number


def test_reach_bounds_the_distance_and_the_result_is_always_the_same():
    crowd = on_markers(np.stack(np.meshgrid(np.arange(80, 121, 4), np.arange(55, 96, 4)), -1).reshape(-1, 2).astype(float))
    near, far = Label((100.0, 75.0), (10.0, 6.0), reach=8), Label((104.0, 75.0), (10.0, 6.0))
    first, second = (arrange([near, far], crowd, FRAME) for _ in range(2))
    assert first[0][1] <= 8 and first[1][1] > 20  # the second flees the crowd
    np.testing.assert_array_equal([middle for middle, _ in first], [middle for middle, _ in second])
    assert arrange([], crowd, FRAME) == []


def test_points_along_a_line_are_at_most_2_apart_and_keep_its_corners():
    path = np.array([(0.0, 0.0), (7.0, 0.0), (7.0, 3.0)])
    points = along(path)
    steps = np.hypot(*np.diff(points, axis=0).T)
    assert steps.max() <= 2 and steps.sum() == pytest.approx(10)
    assert all((points == corner).all(1).any() for corner in path)
    assert len(along(path[:1])) == 1


def test_markers_are_covered_corner_to_corner():
    points = on_markers(np.array([(10.0, 20.0), (0.0, 0.0)]))
    assert len(points) == 18
    np.testing.assert_array_equal([points[:9].min(0), points[:9].max(0)], [(8, 18), (12, 22)])
