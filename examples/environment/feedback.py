"""An environment that wants facts as JSON, and says so once: 1 for a right answer, half of that after feedback."""

import json
import sys

for line in sys.stdin:
    item = json.loads(line)
    answer = item["conversation"][-1]["content"]
    try:
        facts = json.loads(answer)
        right = all(facts.get(key) == item["row"][key] for key in ("name", "city"))
        reply = {"reward": float(right) / item["turn"], "reason": f"JSON in turn {item['turn']}"}
    except (ValueError, AttributeError):
        if item["is_last"]:
            reply = {"reward": 0.0, "reason": "no JSON"}
        else:
            reply = {"messages": [{"role": "user", "content": "As JSON."}]}
    print(json.dumps({"id": item["id"], **reply}), flush=True)
