"""Replaces this process with the binary ``tandem``."""

import os
import sys
import sysconfig


def find_binary() -> str:
    """Returns the path of the binary that was installed with this module."""
    name = "tandem" + (sysconfig.get_config_var("EXE") or "")
    schemes = [None, sysconfig.get_preferred_scheme("user")] if hasattr(sysconfig, "get_preferred_scheme") else [None]
    folders = [sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts") for scheme in schemes]
    # `pip install --target FOLDER` puts scripts beside the module.
    folders.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin"))
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    sys.exit(f"the binary {name} is in none of {', '.join(folders)}: install tandem-align again")


if __name__ == "__main__":
    binary = find_binary()
    # Signals reach the binary itself.
    os.execv(binary, [binary, *sys.argv[1:]])
