"""`report.html`: one self-contained page that shows a training run. Imports nothing else of this package.

run.py       reads the run directory
sections.py  decides which metric goes into which chart
charts.py    draws a chart as SVG
page.py      puts the page together; style.py is its style sheet
"""

from pathlib import Path

from .page import render_page
from .run import read_run


def make_report(run_dir: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of a run and return its path.

    Args:
        run_dir (`str` or `Path`): output directory of a TRL run; metrics it lacks are simply absent from the page.
        output (`str` or `Path`, *optional*): file to write; `run_dir/report.html` if not given.

    Raises:
        `FileNotFoundError`: `run_dir` does not exist or holds no trainer_state.json. `ValueError`: one of its JSON files
            was not written to its end.
    """
    run_dir = Path(run_dir)
    output = run_dir / "report.html" if output is None else Path(output)
    page = render_page(read_run(run_dir))
    output.write_text(page, encoding="utf-8")
    return output
