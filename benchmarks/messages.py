"""The messages that a rank waits for, one after another, in a sum on the host: counted by a simulation of all ranks.

python -m benchmarks.messages
"""

import math

from tests.core.parallel.test_tree import simulated

if __name__ == "__main__":
    print("| ranks | ring | pairs | bound, 2 * log2(N) |")
    for size in (2, 8, 64, 512):
        _, depths = simulated(size)
        print(f"| {size} | {2 * (size - 1)} | {max(depths)} | {2 * math.log2(size):.0f} |")
