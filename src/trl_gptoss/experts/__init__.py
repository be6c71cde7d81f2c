"""`experts_implementation="gptoss_fused"`."""


def register() -> None:
    """Register `gptoss_fused` with transformers. Cheap: no kernel is loaded here."""
