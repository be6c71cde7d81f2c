"""A GPT-OSS of about a million parameters that already calls tools, for trying everything out on two cores.

tokenizer.py, vocabulary.py  the small tokenizer, and which ids matter
model.py                     the architecture
demonstrations.py            conversations by a demonstrator that is unreliable on purpose
warm_start.py                the supervised steps
cache.py                     made once, found again by content
make.py, command.py          all of it together, and its command
"""

from .make import make_tiny_model

__all__ = ["make_tiny_model"]
