"""An agent that sorts words with a model behind OpenAI's API, and writes its answer to answer.txt."""

import json
import os
import sys
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    """Ask the model, and add its answer to the messages."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ.get("OPENAI_MODEL", "policy"), "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        messages.append(json.load(reply)["choices"][0]["message"])
    return messages[-1]["content"]


words = sys.argv[1].split()
history = [{"role": "user", "content": f"Write these words in alphabetical order: {' '.join(words)}"}]
answer = ask(history)
if missing := [word for word in words if word not in answer]:
    history.append({"role": "user", "content": f"{', '.join(missing)} is missing. Try again."})
    answer = ask(history)
with open("answer.txt", "w") as file:
    file.write(answer)
