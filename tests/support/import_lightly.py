"""Import modules in a fresh interpreter and fail at the first that loads a library it must do without.

Arguments: groups `LIBRARIES:MODULES`, both separated by commas, imported in their order.
"""

import importlib
import sys

for group in sys.argv[1:]:
    libraries, modules = (names.split(",") for names in group.split(":"))
    for module in modules:
        importlib.import_module(module)
        loaded = [library for library in libraries if library in sys.modules]
        if loaded:
            sys.exit(f"{module} loads {', '.join(loaded)}")
