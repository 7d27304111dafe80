"""Growth over rounds: a leak of 1 MiB an hour. In values that hardly scatter, as those of a process, it is seen from
10 minutes on, in those of control groups from half an hour on."""

import math
import statistics

# In the first half of a storm, what is allocated once is. The shortest time in seconds, and the fewest values, for
# which a slope of the second half says something.
LEAST = 270
FEWEST = 8
# KiB an hour that are a leak, and the growth in KiB within a shorter time that is one.
SLOPE = 1024
COARSE = 8 << 10
# A slope is one where values grow with this certainty, in standard deviations; and where both halves have a part of it:
# not a step, as an allocator makes that has got more from the kernel.
CERTAIN = 3
PART = 4


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
        return {name: round(slope(points)) for name, points in self.settled().items()}

    def settled(self):
        halves = {name: points[len(points) // 2 :] for name, points in self.series.items()}
        return {
            name: points for name, points in halves.items() if len(points) >= FEWEST and lasted(points) >= LEAST
        }

    def leaks(self):
        """A line for each leak."""
        found = []
        for name, points in self.series.items():
            values = [value for _, value in points]
            if values[-1] - values[0] > COARSE:
                found.append(f"{name}: from {values[0]} to {values[-1]} KiB in {lasted(points):.0f} s")
        for name, points in self.settled().items():
            each_hour = slope(points)
            halves = points[: len(points) // 2], points[len(points) // 2 :]
            goes_on = all(slope(half) > SLOPE / PART for half in halves)
            if each_hour > SLOPE and certainty(points) > CERTAIN and goes_on:
                found.append(f"{name}: {each_hour:.0f} KiB an hour over {lasted(points):.0f} s ({points})")
        return found


def lasted(points):
    return points[-1][0] - points[0][0]


def slope(points):
    """The median slope of all pairs (Theil and Sen), which single values that stand out do not move; an hour's."""
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    return 3600 * statistics.median(pairs)


def certainty(points):
    """How sure it is that values grow, whatever their distribution (Mann and Kendall): pairs that grow, less those that
    shrink, in standard deviations of that number where there is no trend."""
    n = len(points)
    pairs = sum((b[1] > a[1]) - (b[1] < a[1]) for i, a in enumerate(points) for b in points[i + 1 :])
    return pairs / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
