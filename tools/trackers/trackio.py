"""Sends a run to trackio: to this machine, or to a Space of the Hugging Face hub.

    [logging]
    command = ["python3", "tools/trackers/trackio.py"]

TRACKIO_PROJECT names the project; trackio's own variables set the rest: TRACKIO_SPACE_ID, TRACKIO_DIR. `trackio show`
draws the curves.
"""

import json
import os
import sys

# This file has the package's name.
sys.path = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
import trackio  # noqa: E402

for line in sys.stdin:
    message = json.loads(line)
    kind = message.pop("kind")
    if kind == "start":
        trackio.init(project=os.environ.get("TRACKIO_PROJECT", "tandem"), name=f"{message['run']}-{message['id'][:6]}",
                     resume="allow", config=message["config"])
    elif kind == "record":
        step, split = message.pop("step"), message.pop("split")
        trackio.log({f"{split}/{name}": value for name, value in message.items() if value is not None}, step=step)
    elif kind == "advice":
        trackio.alert(title=message["finding"], text=message["remedy"])
    elif kind == "end":
        trackio.finish()
