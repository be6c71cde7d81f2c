"""README and docs: links and anchors resolve, chapters are reachable, blocks that are not run at least name what exists."""

import ast
import importlib
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import trl_gptoss

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + CHAPTERS
NOTES = sorted([*(ROOT / "kernels").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
FENCE = re.compile(r"^(`{3,}|~{3,})([^\n]*)\n(.*?)^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them from headings; repeated headings get numbers."""
    found: dict[str, int] = {}
    result = set()
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=name)
def test_links_resolve(page):
    broken = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        place = (page.parent / target).resolve() if target else page
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place)):
            broken.append(link)
    assert not broken, broken


def test_the_checker_finds_broken_links(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A *title*, twice\n# A title twice\n```\n# no heading [x](y)\n```\n`[x](y)` [z](gone.md)\n")
    assert anchors(page) == {"a-title-twice", "a-title-twice-1"}
    assert LINK.findall(without_code(page.read_text())) == ["gone.md"]


def test_every_chapter_is_in_the_readme_or_reference():
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    missing = [name(p) for p in (ROOT / "docs").glob("*.md") if name(p) not in {link.split("#")[0] for link in linked}]
    assert not missing, missing


def python_blocks():
    for page in PAGES[:1] + CHAPTERS:
        for _, info, code in FENCE.findall(page.read_text(encoding="utf-8")):
            if info.split()[:1] == ["python"]:
                yield page, info, code


@pytest.mark.parametrize(
    ("page", "code"),
    [(p, c) for p, info, c in python_blocks() if "notest" in info],
    ids=lambda x: "" if isinstance(x, str) else name(x),
)
def test_blocks_that_are_not_run_compile_and_import_what_exists(page, code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl_gptoss":
            module = importlib.import_module(node.module)
            missing = [a.name for a in node.names if not _importable(module, a.name)]
            assert not missing, (name(page), missing)


def _importable(module: ModuleType, attribute: str) -> bool:
    try:
        getattr(module, attribute)
    except AttributeError:
        return False
    except ModuleNotFoundError:  # a dependency that is not installed here, such as triton
        return attribute in module.__all__
    return True


def test_most_blocks_are_run():
    """`notest` is for what needs the network, a GPU or an hour; everything else runs in `make test`."""
    kinds = ["notest" in info for _, info, _ in python_blocks()]
    assert kinds.count(True) <= 0.4 * len(kinds), f"{kinds.count(True)} of {len(kinds)} blocks are not run"


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs/recipes").glob("*.yaml")), ids=name)
def test_recipes_begin_with_what_they_are(recipe):
    """The site lists them by this comment."""
    assert re.match(r"# .{20,}\n", recipe.read_text(encoding="utf-8"))


def test_public_names_are_in_the_reference():
    """Each name that `trl_gptoss` exports, by itself or within a module that is shown whole."""
    shown = set(
        re.findall(
            r"^::: (\S+)", "\n".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md")), re.MULTILINE
        )
    )
    missing = []
    for public in trl_gptoss.__all__:
        value = getattr(trl_gptoss, public)
        if not {value.__module__, f"{value.__module__}.{value.__qualname__}"} & shown:
            missing.append(f"{public} ({value.__module__})")
    assert not missing, missing


def test_the_reference_names_what_exists():
    for page in (ROOT / "docs/reference").glob("*.md"):
        for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            module, _, attribute = path.rpartition(".")
            try:
                importlib.import_module(path)
            except ModuleNotFoundError:
                assert attribute in dir(importlib.import_module(module)), path


def test_navigation_names_chapters_that_exist():
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    named = re.findall(r"[\w/]+\.md", str(yaml.safe_load(text)["nav"]))
    assert [n for n in named if n != "index.md" and not (ROOT / "docs" / n).is_file()] == []


@pytest.mark.slow
def test_figures_are_those_of_the_rows():
    command = [sys.executable, str(ROOT / "benchmarks/figures.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_articles_fixes_name_settings_that_exist(tmp_path):
    """docs/reproduction.md: the second column of its first table, and the defaults of the third."""
    from trl import ModelConfig

    text = (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")
    rows = re.search(r"\| what the article says \|[^\n]*\n\|[-|]*\n((?:\|.*\n)+)", text)[1].splitlines()
    assert len(rows) >= 13
    of_the_model = {f.name for f in fields(ModelConfig)} | {"experts_implementation"}  # arguments of from_pretrained
    of_the_trainer = {f.name: f for f in fields(trl_gptoss.GptOssGRPOConfig)}
    values = {}
    for row in rows:
        setting, default = row.strip("|").rsplit("|", 2)[1:]
        code = [part for part in re.findall(r"`([^`]+)`", setting) if not re.search(r"[(/]", part)]
        names = [part.split(":")[0] for part in code if part not in ("auto",)]
        assert names or "SglangBackend" in row or "the same" in setting, row
        for name in names:
            assert name in of_the_model or name in of_the_trainer, name
        values |= {name: value for part in code if ":" in part for name, value in yaml.safe_load(part).items()}
        if len(names) == 1 and names[0] in of_the_trainer and default.strip():
            found = of_the_trainer[names[0]].default
            assert default.strip(" `") == str(found).lower(), row
    trainer = {name: value for name, value in values.items() if name in of_the_trainer}
    assert trainer["on_policy"] == "force" and len(trainer) >= 6
    args = trl_gptoss.GptOssGRPOConfig(str(tmp_path), use_vllm=True, use_cpu=True, bf16=False, **trainer)
    assert {name: getattr(args, name) for name in trainer} == trainer


def test_the_site_builds_and_its_links_resolve(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    broken = []
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "```" not in text, f"{page.name}: a code block was not recognised"
        for link in re.findall(r'(?:href|src)="?([^"\s>]+)', text):
            if re.match(r"[a-z]+:|//|#|/", link) or page.name == "404.html":
                continue
            if not (page.parent / link.split("#")[0].split("?")[0]).resolve().exists():
                broken.append((page.name, link))
    assert not broken, broken[:10]
    recipes = (tmp_path / "recipes.html").read_text(encoding="utf-8")
    assert all(path.name in recipes for path in (ROOT / "configs/recipes").glob("*.yaml"))
    assert "trl-gptoss export" in (tmp_path / "reference/cli.html").read_text(encoding="utf-8")
    assert "max_rollout_tokens" in (tmp_path / "reference/trainers.html").read_text(encoding="utf-8")
