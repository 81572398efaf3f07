"""Writes `chat/`: transformers' renders of conversations with TRL's chat templates.

Every template that TRL ships, with every conversation of `CASES`, with and without the generation
prompt. Where TRL has a training variant (`{% generation %}`), its text and the assistant's ranges.
`strftime_now` writes its format in `@`, so that the goldens hold on every day.

Made with transformers 5.23.0 and trl 1.16.0:

    python goldens/chat_golden.py
"""

import json
import pathlib
import shutil
import sys

import transformers.utils.chat_template_utils as utils
import trl

HERE = pathlib.Path(__file__).parent
OUT = HERE / "chat"
TEMPLATES = pathlib.Path(trl.__file__).parent / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Reports the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city, \"quoted\" or not."},
                "days": {"type": "integer", "description": "Days ahead.", "default": 1},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "places": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time <now>.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments):
    return {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}


def tool(text):
    return {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": text}


def parts(message):
    """Content as a list of parts, which templates of vision models expect."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


ONE = [user("What colour is the sky?"), assistant("Blue.")]
SEVERAL = [
    *ONE,
    user("  And grass — größer\nthan 'this' \"that\"? "),
    assistant(" Green,\n\nI <b>think</b>. \n"),
    user("Thanks"),
    assistant("Blue."),
]
THINKING = [
    user("What is 2 + 2?"),
    assistant("Four.", reasoning_content="Two and two.\nThat is four."),
    user("And 3 + 3?"),
    assistant("Six.", reasoning_content="Three and three."),
]
INLINE = [
    user("What is 2 + 2?"),
    assistant("<think>\nTwo and two.\n</think>\n\nFour."),
    user("And 3 + 3?"),
    assistant("<think>\nThree and three.\n</think>\n\nSix."),
]
ARGUMENTS = {"city": "Zürich \"ZH\"", "days": 2, "dry": True, "at": None, "places": [1.5, 47]}
STEPS = [
    user("Weather in Zürich?"),
    assistant("", tool_calls=[call("weather", ARGUMENTS)]),
    tool('{"rain": false, "degrees": 21}'),
    assistant("Dry, 21 degrees."),
    user("And tomorrow?"),
    assistant("Let me look.", tool_calls=[call("weather", {"city": "Zürich", "days": 1})]),
    tool("wet"),
    assistant("Wet."),
]
LONG_STEPS = [
    user("Weather in Zürich, and the time?"),
    assistant("", reasoning_content="I need both.", tool_calls=[call("weather", {"city": "Zürich"})]),
    tool("dry"),
    assistant("", reasoning_content="Now the time.", tool_calls=[call("clock", {})]),
    tool("12:00"),
    assistant("Dry at noon.", reasoning_content="Both are known."),
]
TWO_CALLS = [
    user("Zürich and Bern?"),
    assistant("Both.", tool_calls=[call("weather", {"city": "Zürich"}), call("weather", {"city": "Bern"})]),
    tool("dry"),
    tool("wet"),
    assistant("Dry, wet."),
]


def as_text(messages):
    """Arguments of tool calls as JSON text, which some templates expect."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for each in message.get("tool_calls", []):
            each["function"]["arguments"] = json.dumps(each["function"]["arguments"], ensure_ascii=False)
    return messages


def without_content(messages):
    """Messages with tool calls have no content, as many data sets have it."""
    return [{k: v for k, v in m.items() if k != "content" or "tool_calls" not in m} for m in messages]


TOOLS = [WEATHER, CLOCK]
CASES = {
    "one": {"messages": ONE},
    "several": {"messages": SEVERAL},
    "system": {"messages": [system("Be brief."), *SEVERAL]},
    "system_empty": {"messages": [system(""), *ONE]},
    "assistant_first": {"messages": [assistant("Hello."), *ONE]},
    "user_last": {"messages": SEVERAL[:-1]},
    "empty_answer": {"messages": [user("Say nothing."), assistant(""), user("Again"), assistant("No.")]},
    "same_text": {"messages": [user("Blue."), assistant("Blue."), user("Blue."), assistant("Blue.")]},
    "parts": {"messages": [parts(m) for m in SEVERAL[:4]]},
    "thinking": {"messages": THINKING},
    "thinking_inline": {"messages": INLINE},
    "thinking_one": {"messages": THINKING[:2]},
    "thinking_off": {"messages": THINKING, "kwargs": {"enable_thinking": False}},
    "tools": {"messages": STEPS, "tools": TOOLS},
    "tools_text": {"messages": as_text(STEPS), "tools": TOOLS},
    "tools_bare": {"messages": without_content(STEPS), "tools": TOOLS},
    "tools_system": {"messages": [system("Be brief."), *STEPS], "tools": TOOLS},
    "tools_thinking": {"messages": LONG_STEPS, "tools": TOOLS},
    "tools_two_calls": {"messages": TWO_CALLS, "tools": TOOLS},
    "tools_unused": {"messages": [system("Be brief."), *ONE], "tools": TOOLS},
}


def render(template, case, add_generation_prompt=False, ranges=False):
    """Returns text and ranges, or the error's text alone."""
    try:
        texts, indices = utils.render_jinja_template(
            conversations=[case["messages"]],
            tools=case.get("tools"),
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=ranges,
            **SPECIAL,
            **case.get("kwargs", {}),
        )
        return texts[0], [list(r) for r in indices[0]] if ranges else None
    except Exception as error:  # noqa: BLE001: whatever a template raises is its refusal
        return None, f"{type(error).__name__}: {error}"[:200]


def difference(text, base):
    """Returns `text` as [length of the common prefix, middle, length of the common suffix]."""
    start = 0
    while start < min(len(text), len(base)) and text[start] == base[start]:
        start += 1
    end = 0
    while end < min(len(text), len(base)) - start and text[-1 - end] == base[-1 - end]:
        end += 1
    return [start, text[start : len(text) - end], end]


def main():
    # The format instead of the date.
    class Clock:
        @staticmethod
        def now():
            return Clock()

        def strftime(self, form):
            return f"@{form}@"

    utils.datetime = Clock
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    (OUT / "cases.json").write_text(json.dumps(CASES, ensure_ascii=False, indent=1) + "\n")
    lines = []
    for path in sorted(TEMPLATES.glob("*.jinja")):
        name = path.stem
        source = path.read_text()
        base = name.removesuffix("_training")
        for key, case in CASES.items():
            ranges = name != base
            text, extra = render(source, case, ranges=ranges)
            row = {"template": name, "case": key}
            if text is None:
                row["error"] = extra
                lines.append(row)
                continue
            if ranges:
                # Rendered texts are large: the variant's text is stored as its difference.
                row["ranges"] = extra
                original, _ = render((TEMPLATES / f"{base}.jinja").read_text(), case)
                row["difference"] = difference(text, original or "")
            else:
                prompt, failed = render(source, case, add_generation_prompt=True)
                row["text"] = text
                row["with_prompt"] = None if prompt is None else difference(prompt, text)
            lines.append(row)
    with (OUT / "renders.jsonl").open("w") as out:
        for row in lines:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    refused = [(r["template"], r["case"], r["error"]) for r in lines if "error" in r]
    print(len(lines), "renders,", len(refused), "refused")
    for each in refused:
        print(*each, file=sys.stderr)


if __name__ == "__main__":
    main()
