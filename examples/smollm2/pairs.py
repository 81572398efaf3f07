#!/usr/bin/env python3
"""Writes pairs.jsonl: the first sentence of the model's own answer is chosen, all of it is rejected.

    examples/smollm2/pairs.py target/release/tandem
"""
import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
TOPICS = """rain;the moon;glass;salt;bees;bread;magnets;tides;a compass;a lighthouse;paper;soap;thunder;a glacier;yeast
a volcano;steel;cotton;the liver;a vaccine;gravity;an echo;a rainbow;rust;coffee;a canal;silk;a desert;a telescope;a seed
copper;a bridge;honey""".replace("\n", ";").split(";")
QUESTIONS = ["What is {}?", "Why does {} matter?", "How would you explain {} to a child?"]

prompts = [question.format(topic) for question in QUESTIONS for topic in TOPICS]
command = [sys.argv[1], "generate", str(HERE / "smollm2.gguf"), "--max-new-tokens", "80"]
text = subprocess.run(command, input="\n".join(prompts), capture_output=True, text=True, check=True).stdout
pairs = []
for index, prompt in enumerate(prompts):
    start = text.index(f"> {prompt}\n") + len(prompt) + 3
    end = text.index(f"\n> {prompts[index + 1]}\n", start) if index + 1 < len(prompts) else len(text)
    answer = text[start:end].strip()
    first = re.match(r".+?[.!?](?=\s|$)", answer, re.DOTALL)
    if first and first.end() < len(answer):
        sides = {"chosen": first.group(), "rejected": answer}
        sides = {side: [{"role": "assistant", "content": content}] for side, content in sides.items()}
        pairs.append({"prompt": [{"role": "user", "content": prompt}], **sides})
(HERE / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
print(f"{len(pairs)} pairs of {len(prompts)} prompts")
