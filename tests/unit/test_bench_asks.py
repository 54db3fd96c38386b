from xml.etree import ElementTree

from benchmarks import asks, chart


def test_every_hundred_requests_hold_each_kind_at_its_share_and_are_always_the_same() -> None:
    made = asks.make(asks.TALL, 300)
    for start in range(0, 300, 100):
        assert sum(one.max_tokens == 256 for one in made[start : start + 100]) == 20
    assert made == asks.make(asks.TALL, 300)
    assert len({one.id for one in made}) == len({one.text for one in made}) == 300
    assert asks.make(asks.TALL, 1, "warm-up")[0].text != made[0].text


def test_chart_is_wellformed_and_keeps_points_inside_its_axes() -> None:
    series = {"a & b": [(0.0, 0.0), (10.0, 64.0), (20.0, 90.0)], "empty": []}
    root = ElementTree.fromstring(chart.lines("<title>", "seconds", series, top=64))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in lines[0].attrib["points"].split()]
    assert points[0][0] < points[1][0] < points[2][0] <= chart.WIDTH
    assert points[0][1] > points[1][1] == points[2][1] > 0
    assert lines[1].attrib["points"] == ""
