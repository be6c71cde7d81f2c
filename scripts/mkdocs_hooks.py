"""What the site needs beyond the chapters: README as its home page, the files that chapters link to outside of docs/ (rows of
benchmarks, notes of the kernels) as pages or downloads of the site, chapters that the navigation does not name, commands.

Links stay as they are in the repository, where people read them, too; here they are rewritten.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "repository"  # where the files from outside of docs/ are in the site
HOME = "index.md"
LINK = re.compile(r"(?<!!)(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))|(!\[[^\]]*\]\()([^)\s#]+)(\))")
CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the chapters that the navigation forgets."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    forgotten = sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name not in named)
    if forgotten:
        config.nav.insert(-1, {"More": forgotten})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README and everything that is linked, from page to page."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    seen: set[Path] = set()
    for recipe in sorted((ROOT / "configs" / "recipes").glob("*.yaml")):
        seen.add(recipe)
        files.append(File.generated(config, f"{OUTSIDE}/{recipe.relative_to(ROOT)}", abs_src_path=str(recipe)))
    while pages:
        page = pages.pop()
        for target in _targets(page):
            if (
                target in seen
                or not target.is_file()
                or target.is_relative_to(ROOT / "docs")
                or target == ROOT / "README.md"
            ):
                continue
            seen.add(target)
            uri = f"{OUTSIDE}/{target.relative_to(ROOT)}"
            files.append(File.generated(config, uri, abs_src_path=str(target)))
            if target.suffix == ".md":
                pages.append(target)
    files.append(File.generated(config, HOME, abs_src_path=str(ROOT / "README.md")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the relative links of a page for its place in the site."""
    for marker, table in (("<!-- commands -->", _commands), ("<!-- recipes -->", _recipes)):
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    source = _source_of(page.file.src_uri)
    blocks: list[str] = []

    def hide(match: re.Match[str]) -> str:
        # "```python notest" is for the tests; superfences takes such a line for text
        blocks.append(re.sub(r"^([`~]{3,}\w+)[ \t].*", r"\1", match[0], count=1))
        return f"\0{len(blocks) - 1}\0"

    def rewrite(match: re.Match[str]) -> str:
        before, target, anchor, after = (
            match[1] or match[5],
            match[2] or match[6],
            match[3] or "",
            match[4] or match[7],
        )
        if re.match(r"[a-z]+:", target):
            return match[0]
        place = (source.parent / target).resolve()
        if place.is_dir():  # GitHub lists a folder; a site cannot
            return match[0][match[0].index("[") + 1 : match[0].index("](")]
        return f"{before}{os.path.relpath(_uri_of(place), Path(page.file.src_uri).parent)}{anchor}{after}"

    hidden = CODE.sub(hide, markdown)
    return re.sub("\0(\\d+)\0", lambda m: blocks[int(m[1])], LINK.sub(rewrite, hidden))


def _commands() -> str:
    """The table of the command line, from the one place that knows it."""
    from trl_gptoss.cli import COMMANDS

    rows = [f"| `trl-gptoss {name}` | {command.help} |" for name, command in COMMANDS.items()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def _recipes() -> str:
    """The table of the recipes, from the comment that each begins with."""
    rows = []
    for path in sorted((ROOT / "configs" / "recipes").glob("*.yaml")):
        comment = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))
        first = " ".join(line.strip("# ") for line in comment[0].splitlines()) if comment else ""
        rows.append(
            f"| [{path.name}](../configs/recipes/{path.name}) | {first.split('accelerate launch')[0].strip()} |"
        )
    return "\n".join(["| recipe | what it is |", "|---|---|", *rows])


def _targets(page: Path) -> list[Path]:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    found = (match[2] or match[6] for match in LINK.finditer(text))
    return [(page.parent / target).resolve() for target in found if not re.match(r"[a-z]+:", target)]


def _source_of(uri: str) -> Path:
    """The file in the repository that a page of the site is made from."""
    if uri == HOME:
        return ROOT / "README.md"
    return ROOT / uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else ROOT / "docs" / uri


def _uri_of(place: Path) -> str:
    """The page or file of the site that a file of the repository becomes."""
    if place == ROOT / "README.md":
        return HOME
    docs = ROOT / "docs"
    return str(place.relative_to(docs)) if place.is_relative_to(docs) else f"{OUTSIDE}/{place.relative_to(ROOT)}"


def on_post_build(config: MkDocsConfig, **kwargs: Any) -> None:
    """Say where it is."""
    print(f"documentation: {config.site_dir}/index.html")
