"""What grows over rounds: a leak of 1 MiB an hour, seen from ten minutes on."""

import statistics

# Rounds until what is allocated once has been, and the shortest time in seconds for which a slope says something.
FIRST = 3
LEAST = 600
# KiB an hour that are a leak, and the growth in KiB within a shorter time that is one.
SLOPE = 1024
COARSE = 8 << 10
# A slope is one where it has moved the values further than they scatter.
SCATTER = 3


class Growth:
    """Values of so many things after each round, in KiB or in numbers of descriptors."""

    def __init__(self):
        self.series = {}

    def add(self, seconds, values):
        for name, value in values.items():
            self.series.setdefault(name, []).append((seconds, value))

    def ends(self):
        return {name: [points[0][1], points[-1][1]] for name, points in self.series.items()}

    def slopes(self):
        """KiB an hour of each thing that was looked at for long enough."""
        return {name: round(slope(points)) for name, points in self.settled().items() if lasted(points) >= LEAST}

    def settled(self):
        return {name: points[FIRST:] for name, points in self.series.items() if len(points) >= FIRST + 4}

    def leaks(self):
        """A line for each leak."""
        found = []
        for name, points in self.series.items():
            values = [value for _, value in points]
            if values[-1] - values[0] > COARSE:
                found.append(f"{name}: from {values[0]} to {values[-1]} KiB in {lasted(points):.0f} s")
        for name, points in self.settled().items():
            each_hour = slope(points)
            left = [value - each_hour * at / 3600 for at, value in points]
            middle = statistics.median(left)
            scatter = statistics.median(abs(value - middle) for value in left)
            grown = each_hour * lasted(points) / 3600
            if lasted(points) >= LEAST and each_hour > SLOPE and grown > SCATTER * scatter:
                found.append(f"{name}: {each_hour:.0f} KiB an hour over {lasted(points):.0f} s ({points})")
        return found


def lasted(points):
    return points[-1][0] - points[0][0]


def slope(points):
    """The median slope of all pairs (Theil and Sen), which single values that stand out do not move; an hour's."""
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    return 3600 * statistics.median(pairs)
