"""Sends a run to Comet.

    [logging]
    command = ["python3", "tools/trackers/comet.py"]

Comet's own variables set the rest: COMET_API_KEY, COMET_WORKSPACE, COMET_PROJECT_NAME.

Untried: no test runs this script.
"""

import json
import sys

import comet_ml

experiment = None
for line in sys.stdin:
    message = json.loads(line)
    kind = message.pop("kind")
    if kind == "start":
        # Comet's keys have 32 to 50 characters.
        key = message["id"] * 2
        experiment = comet_ml.start(experiment_key=key, mode="get_or_create")
        experiment.set_name(message["run"])
        experiment.log_parameters(message["config"])
    elif kind == "record":
        step, split = message.pop("step"), message.pop("split")
        values = {f"{split}/{name}": value for name, value in message.items() if value is not None}
        experiment.log_metrics(values, step=step, epoch=message.get("epoch"))
    elif kind == "advice":
        experiment.log_text(f"{message['finding']}. {message['remedy']}", step=message["step"])
    elif kind == "end":
        experiment.log_other("outcome", message["outcome"])
        experiment.end()
