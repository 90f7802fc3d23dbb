"""NVIDIA apex: optional, and recognised by what it provides.

The package called "apex" on PyPI is another project (a web toolkit), and `pip install apex` brings it in. Nothing is imported
to tell the two apart.
"""

from importlib.machinery import PathFinder
from importlib.util import find_spec


def nvidia_apex_available() -> bool:
    """Whether `import apex.optimizers` would give NVIDIA's FusedAdam.

    Raises:
        RuntimeError: another package called apex is installed.
    """
    apex = find_spec("apex")
    if apex is None or apex.origin is None:  # the latter: just a folder of that name
        return False
    optimizers = PathFinder.find_spec("apex.optimizers", apex.submodule_search_locations)
    if optimizers is not None:
        return PathFinder.find_spec("fused_adam", optimizers.submodule_search_locations) is not None
    raise RuntimeError(
        f"The package 'apex' at {apex.origin} is not NVIDIA apex but an unrelated one from PyPI. Remove it with `pip uninstall apex`. "
        f"Training needs no apex; NVIDIA's is built from its source repository, NVIDIA/apex on GitHub."
    )
