"""The sweep of sweep.py from a plain script: no event loop, no `await`, one configuration after another.

    python examples/blocking.py --configurations 100

`import eagle.sync as eagle` gives the same names as eagle itself, and calls that wait block. A long run still uses
every core; what is lost is the overlap of the short ones. Ctrl-C leaves within some milliseconds.
"""

import sys
import time

import numpy as np
from sweep import Bar, configuration, grid, options_of, report, shake, share_inside, starts

import eagle.sync as eagle


def main() -> None:
    options = options_of(__doc__.partition("\n")[0])
    omegas, forces = grid(options.configurations)
    start = starts(options.starts)
    inside = np.zeros((forces.size, omegas.size))
    began = time.perf_counter()
    bar = Bar(inside.size)
    try:
        for row, force in enumerate(forces):
            for column, omega in enumerate(omegas):
                planes = {name: plane.copy() for name, plane in start.items()}
                result = eagle.simulate(shake, **planes, **configuration(float(omega), float(force)))
                inside[row, column] = share_inside(result)
                bar.advance()
    except eagle.BackendUnavailable as error:
        sys.exit(f"blocking.py cannot run here: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\nstopped by Ctrl-C after {bar.done:,} configurations")
    report(omegas, forces, inside, began, options.plot)


if __name__ == "__main__":
    main()
