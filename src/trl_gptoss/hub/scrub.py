"""Secrets and local paths in text that is about to be published: found, removed, or a reason to refuse.

A card is written from a run's settings, in which a path or a token may stand where a name was expected, so they are removed
from it. A file of the model that holds a secret is refused instead: what is in it is not ours to change.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

SECRET = "[secret removed]"
PATH = "[local path removed]"

# Forms that their issuers document; lengths are lower bounds, so that a newer, longer form is still caught.
_SECRETS = re.compile(
    r"hf_(?:[A-Za-z0-9]{16,}|(?:oauth|jwt)_[\w.-]{16,})"  # Hugging Face, users; also in the middle of a word
    r"|api_org_[A-Za-z0-9]{16,}"  # Hugging Face, organisations
    r"|\bsk-[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic
    r"|\bgh[pousr]_[A-Za-z0-9_]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|\bglpat-[A-Za-z0-9_-]{16,}"  # GitLab
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|\bAIza[A-Za-z0-9_-]{30,}"  # Google
    r"|\bxox[abeprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"  # Stripe
    r"|\bnpm_[A-Za-z0-9]{30,}|\bpypi-AgE[A-Za-z0-9_-]{16,}"  # npm, PyPI
    r"|\bwandb_v\d+_[A-Za-z0-9_]{20,}"  # Weights & Biases
    r"|\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.{,9999}?-----END [A-Z ]*PRIVATE KEY-----)?"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"  # user:password in a URL
    r"|\b[Bb]earer\s+(?=[^\s\"']{0,99}\d)[\w.~+/-]{16,}=*",  # an HTTP header
    re.DOTALL,
)
# A value that has no form of its own, by the name it is given: `WANDB_API_KEY=...`, `"aws_secret_access_key": "..."`,
# `?access_token=...`. It has a digit and a letter, so that a placeholder or a type (`password: string`) is none.
_NAMED_SECRET = re.compile(
    r"(?P<name>(?:api|access|secret|private|account|signing)[_-]?key|(?:access|auth|api|hub|hf|refresh|session)[_-]?token"
    r"|client[_-]?secret|passwd|password|x-amz-signature)"
    r"(?P<between>\\?[\"'`]?\s*(?:=|:|\|)\s*\\?[\"'`]?)"
    r"(?P<value>(?=[^\s\"'`\\,;&|]{0,99}\d)(?=[^\s\"'`\\,;&|]{0,99}[A-Za-z])[^\s\"'`\\,;&|]{8,})",
    re.IGNORECASE,
)
# An absolute path of at least two parts, one under the home directory, a file URL or a Windows path. Not the path of a URL
# (a slash or a letter stands before it), nor a fraction. In quotation marks a path may have spaces.
_END = r"\s\"'`()\[\]<>|,"
_QUOTED = r"(?:[^\"'`\n\\]|\\(?![\"']))"
_PATHS = re.compile(
    rf"file:/+[^{_END}]+"
    rf"|(?<=[\"'`])(?:~[\w.-]*/|/[^\"'`\n/<>|]+/|[A-Za-z]:\\|[A-Za-z]:/(?!/)){_QUOTED}{{,500}}(?=\\?[\"'`])"
    r"|(?<![\w/.<~)\]-])(?:~[\w.-]*(?:/[\w.@+=~%-]+)+/?|/(?:[\w.@+=~%-]+/)+[\w.@+=~%-]*)"
    rf"|(?<!\w)[A-Za-z]:(?:\\|/(?!/))[^{_END}]*"
    rf"|\\\\[\w.-]+\\[^{_END}]+"
)
_SECRET_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)S?$")
_SHORTEST_VALUE = 8  # "true", "none" and the like are no secrets, whatever the variable is called


class SecretFound(ValueError):
    """A file that was about to be published holds a secret. The message names the file, not the secret."""


def known_secrets() -> set[str]:
    """Secrets of this process, whatever their form: variables like `*_TOKEN` or `*_API_KEY`, the Hub's stored token."""
    found = {
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name.upper()) and not os.path.exists(value)
    }
    found.add(get_token() or "")
    return {value for value in found if len(value) >= _SHORTEST_VALUE}


def known_places() -> set[str]:
    """Directories of this process that must not be published even where they do not look like a path."""
    return {place for place in (str(Path.home()), os.getcwd()) if place.count("/") >= 1 and len(place) > 1}


def redact(text: str, secrets: Iterable[str] = (), places: Iterable[str] = ()) -> str:
    """`text` without secrets and local paths.

    Args:
        text (`str`): such as a card.
        secrets (`Iterable[str]`, *optional*): further secrets, besides the known forms and [`known_secrets`].
        places (`Iterable[str]`, *optional*): further directories, besides absolute paths and [`known_places`]; for one that
            is not absolute or has one part only.

    Returns:
        `str`: each replaced by a note; everything else unchanged.
    """
    text = redact_secrets(text, secrets)
    for place in sorted(known_places() | {p for p in places if p}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./-]){re.escape(place)}(?:/[^\s\"'`)\]<>]*)?(?![\w-])", PATH, text)
    return _PATHS.sub(PATH, text)


def redact_json(value: Any, secrets: Iterable[str] = (), places: Iterable[str] = ()) -> Any:
    """What `json.loads` gave with every string, keys too, redacted on its own; a path may have spaces in it."""
    if isinstance(value, str):
        return redact(f'"{value}"', secrets, places)[1:-1]
    if isinstance(value, list):
        return [redact_json(v, secrets, places) for v in value]
    if isinstance(value, dict):
        return {redact_json(k, secrets, places): redact_json(v, secrets, places) for k, v in value.items()}
    return value


def redact_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without secrets; local paths stay. Arguments as for [`redact`]."""
    for secret in sorted(known_secrets() | {s for s in secrets if s}, key=len, reverse=True):
        text = text.replace(secret, SECRET)
    text = _SECRETS.sub(SECRET, text)
    return _NAMED_SECRET.sub(rf"\g<name>\g<between>{SECRET}", text)


def check_no_secret(name: str, text: str, secrets: Iterable[str] = ()) -> None:
    """Raise if `text`, the content of the file `name`, holds a secret.

    Raises:
        [`SecretFound`]: where, in which form; never the secret itself.
    """
    clean = redact_secrets(text, secrets)
    if clean != text:
        line = next(i for i, (a, b) in enumerate(zip(text.split("\n"), clean.split("\n")), 1) if a != b)
        raise SecretFound(
            f"{name}, line {line}, holds something that looks like a secret (a token, a key or the value of a secret "
            "environment variable). Nothing was uploaded. Remove it from the file, and revoke it if it was ever public."
        )
