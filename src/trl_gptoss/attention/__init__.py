"""`attn_implementation="sink_fa3"`."""


def register() -> None:
    """Register `sink_fa3` with transformers. Cheap: no kernel is loaded here."""
