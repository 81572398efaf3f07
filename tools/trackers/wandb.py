"""Sends a run to Weights & Biases.

    [logging]
    command = ["python3", "tools/trackers/wandb.py"]

W&B's own variables set the rest: WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline. A resumed run goes on
under its id; W&B ignores steps that it has.
"""

import json
import os
import sys

# This file has the package's name.
sys.path = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
import wandb  # noqa: E402

run = None
for line in sys.stdin:
    message = json.loads(line)
    kind = message.pop("kind")
    if kind == "start":
        run = wandb.init(project=os.environ.get("WANDB_PROJECT", "tandem"), name=message["run"], id=message["id"],
                         resume="allow", config=message["config"], dir=message["folder"])
    elif kind == "record":
        step, split = message.pop("step"), message.pop("split")
        run.log({f"{split}/{name}": value for name, value in message.items() if value is not None}, step=step)
    elif kind == "advice":
        run.alert(title=message["finding"], text=message["remedy"])
    elif kind == "end":
        run.summary["outcome"] = message["outcome"]
        run.finish(exit_code=int(message["outcome"] == "failed"))
