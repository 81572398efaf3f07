"""Sends a run to Aim: to the repository .aim in the current folder, or to the one that AIM_REPO names.

    [logging]
    command = ["python3", "tools/trackers/aim.py"]

Untried: no test runs this script.
"""

import json
import os
import sys

# This file has the package's name.
sys.path = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
import aim  # noqa: E402

run = None
for line in sys.stdin:
    message = json.loads(line)
    kind = message.pop("kind")
    if kind == "start":
        run = aim.Run(run_hash=message["id"], repo=os.environ.get("AIM_REPO"), experiment="tandem")
        run.name = message["run"]
        run["config"] = message["config"]
    elif kind == "record":
        step, split = message.pop("step"), message.pop("split")
        for name, value in message.items():
            if value is not None:
                run.track(value, name=name, step=step, context={"subset": split})
    elif kind == "advice":
        run.log_warning(f"{message['finding']}. {message['remedy']}")
    elif kind == "end":
        run["outcome"] = message["outcome"]
        run.close()
