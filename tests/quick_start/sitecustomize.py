"""Less to do at the start of a process, and nothing is tested by it.

Full collections of garbage are rare: imports make a million objects, of which next to none
is garbage, and looking at all of them again and again is a seventh of the time that
importing vLLM takes. For the rest see `quick_imports`.
"""

import gc

import quick_imports

gc.set_threshold(*gc.get_threshold()[:2], 1000)
quick_imports.install()
