"""OpenAI's client against the server at the address that is given."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
[model] = [model.id for model in client.models.list()]
messages = [{"role": "user", "content": "the quick"}]
asked = {"model": model, "messages": messages, "seed": 3, "max_completion_tokens": 8, "temperature": 0.9, "top_p": 0.95}
whole = client.chat.completions.create(**asked, n=2, logprobs=True, extra_body={"top_k": 50, "min_p": 0.01})
assert len(whole.choices) == 2 and whole.usage.completion_tokens > 2, whole
assert all(choice.finish_reason in ["stop", "length"] for choice in whole.choices), whole
assert all(token.logprob < 0 for token in whole.choices[0].logprobs.content), whole

text = client.chat.completions.create(**asked).choices[0].message.content
stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
parts = list(stream)
assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text, (parts, text)
assert parts[-1].usage.completion_tokens > 0, parts[-1]

done = client.completions.create(model=model, prompt=["the quick", "over"], max_tokens=4, seed=1, logprobs=1)
assert [choice.index for choice in done.choices] == [0, 1], done
assert len(done.choices[1].logprobs.token_logprobs) <= 4, done

try:
    client.chat.completions.create(model="another", messages=messages)
    raise SystemExit("another model was served")
except openai.NotFoundError as error:
    assert "is not served here" in str(error), error
try:
    client.chat.completions.create(**asked, presence_penalty=1)
    raise SystemExit("a penalty was ignored")
except openai.BadRequestError as error:
    assert error.param == "presence_penalty", error
print("all is well")
