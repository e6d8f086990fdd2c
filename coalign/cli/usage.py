"""What the command line says of mistakes: one line that names the option, the value and what would be right."""

from __future__ import annotations

import re
from collections.abc import Iterable

from coalign.config.errors import find_nearest

# Keys of the configurations that commands build from their options, and these options. Longer keys stand first.
_OPTIONS = (
    (r"configuration: (?=\S)", ""),
    (r"models\.\*\.load\b", "MODEL"),
    (r"^model:", "MODEL:"),
    (r"\bdata\.train(\[\d+\])?\.path\b", "--input"),
    (r"\bdata\.chat_template_kwargs\b", "--chat-template-kwargs"),
    (r"\bdata\.chat_template\b", "--chat-template"),
    (r"\bdata\.prompt_key\b", "--key"),
    (r"\bdata\.images\b", "--images"),
    (r"^device:", "--device:"),
    (r"\bsampling\.([a-z_]+)\b", None),
    (r"\breward_(model|template|score_at)\b", None),
)
_WORDS = {
    "Value error, ": "",
    "Input should be": "expected",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
WITH_OPTIONS = ("generate", "score", "chat", "serve", "serve-reward")  # commands whose settings are options


def name_options(text: str) -> str:
    """Replace the keys in a message by the options that a command has for them."""
    for key, option in _OPTIONS:
        text = re.sub(key, option if option is not None else _spell_option, text, flags=re.MULTILINE)
    return text


def _spell_option(match: re.Match[str]) -> str:
    return "--" + match[0].removeprefix("sampling.").replace("_", "-")


def describe_usage(message: str, path: str, commands: Iterable[str]) -> str:
    """Describe a command line that cannot be read, in one line.

    ``message`` is what the parser says, ``path`` the command (`coalign generate`), ``commands`` are all of them.
    """
    text = re.sub(r"^Invalid value for (.+?): ", lambda match: f"{_join(match[1])}: ", " ".join(message.split()))
    text = re.sub(r"^Missing (?:option|argument|parameter):? (.+?)\.?$", lambda m: f"{_join(m[1])}: missing", text)
    text = re.sub(r"^No such option:? (\S+?)\.?(?: \(Possible options: (.+)\))?$", _correct_option, text)
    text = re.sub(r"^No such command '(.+?)'\..*$", lambda match: _correct_command(match[1], commands), text)
    for said, meant in _WORDS.items():
        text = text.replace(said, meant)
    text = text.removesuffix(".")
    if options := re.search(r"'(.*)' is not one of (.+)$", text):
        nearest = find_nearest(options[1], re.findall(r"'([^']+)'", options[2]), 0.5)
        text += f"; did you mean '{nearest}'?" if nearest else ""
    return f"{text} (`{path} --help` shows what there is)"


def _join(names: str) -> str:
    """Return `--input (-i)` for `'--input' / '-i'`."""
    first, *aliases = re.findall(r"'([^']+)'", names) or [names]
    return f"{first} ({', '.join(aliases)})" if aliases else first


def _correct_option(match: re.Match[str]) -> str:
    return f"{match[1]}: there is no such option" + (f"; did you mean {match[2]}?" if match[2] else "")


def _correct_command(name: str, commands: Iterable[str]) -> str:
    nearest = find_nearest(name, commands)
    return f"there is no command '{name}'" + (f"; did you mean '{nearest}'?" if nearest else "")
