"""A game with a world and a score of its own: `harness_command="python examples/harnesses/guess_the_app.py"`.

The model guesses which app is meant, gets a hint if it is wrong, and may guess once more. The reward is 1 for the first
guess, 0.5 for the second, and 0.1 for naming any app at all.
"""

import json
import os
import random
import sys

from openai import APIStatusError, OpenAI


def find_guess(text: str, apps: list[str]) -> str | None:
    """The app that is named first."""
    places = {text.find(app): app for app in apps if app in text}
    return places[min(places)] if places else None


def report(result: dict[str, object]) -> None:
    """Send the result where nothing that this program starts could replace it."""
    os.write(int(os.environ["CUA_RESULT_FD"]), json.dumps(result).encode())


def main() -> int:
    """Play one game; the exit status is 0 whether or not it was won."""
    apps = json.load(sys.stdin)["apps"]
    secret = random.Random(int(os.environ["CUA_SEED"])).choice(apps)  # the same for every member of a group
    question = f"{os.environ['CUA_INSTRUCTION']} {', '.join(apps)}"
    messages: list[dict[str, str]] = [{"role": "user", "content": question}]
    model = OpenAI(max_retries=0, timeout=None)  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    guesses: list[str | None] = []
    while secret not in guesses and len(guesses) < min(2, int(os.environ["CUA_MAX_TURNS"])):
        try:
            answer = model.chat.completions.create(model=os.environ["CUA_MODEL"], messages=messages)  # type: ignore[arg-type]
        except APIStatusError as error:
            # what the gateway refuses it judges itself; the status only says that the game was not finished
            print(error, file=sys.stderr)
            return 1
        text = answer.choices[0].message.content or ""
        guesses.append(find_guess(text, apps))
        # sent back as it came: then the next prompt extends this one, and both turns are one training sequence
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"No. It begins: {secret[0]}"}]
    print(f"secret {secret}, guesses {guesses}")  # into logs/agents
    tried = 0.0 if guesses == [None] * len(guesses) else 0.1
    reward = {1: 1.0, 2: 0.5}[len(guesses)] if secret in guesses else tried
    metrics = {"guesses": len(guesses), "unreadable": guesses.count(None)}
    report({"reward": reward, "success": secret in guesses, "metrics": metrics, "answer": guesses[-1], "fault": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
