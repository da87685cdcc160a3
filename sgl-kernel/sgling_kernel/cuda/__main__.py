"""``python -m sgling_kernel.cuda [9.0 10.0 ...]``: compile every kernel ahead of the first start.

Compiles for the GPU of this machine, or for the compute capabilities that are named.
"""

import sys

from sgling_kernel.cuda import device_capability
from sgling_kernel.cuda.build import Target, build_all


def main() -> None:
    asked = [tuple(map(int, text.split("."))) for text in sys.argv[1:]]
    for capability in asked or [device_capability()]:
        for path in build_all(Target(capability)):
            print(path)


if __name__ == "__main__":
    main()
