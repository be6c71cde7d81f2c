"""What the pinned versions need until they are fixed: each entry names the cause and when it can go."""

import warnings


def silence_renamed_attributes() -> None:
    """TRL 1.16 reads `model.is_gradient_checkpointing` around every generation (trl/models/utils.py), a name that
    transformers 5.24 deprecates with a warning each time. Users can do nothing about it. Goes with TRL 1.17's pin, once
    TRL reads `is_activation_checkpointing`.
    """
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
