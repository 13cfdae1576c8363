"""Full collections of garbage are rare, and nothing is tested by it.

Imports make a million objects, of which next to none is garbage: looking at all of
them again and again is a seventh of the time that importing vLLM takes.
"""

import gc

gc.set_threshold(*gc.get_threshold()[:2], 1000)
