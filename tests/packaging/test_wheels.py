"""What is published: versions, the sdist, the pure wheel in an environment of its own. Builds in isolation, so with network."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str, cwd: Path, **environment: str) -> str:
    environment = {**os.environ, "TRL_GPTOSS_BUILD_KERNELS": "0", "PYTHONPATH": "", **environment}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A clone of what is here, without its tags."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("clone") / "repository"
    run("git", "clone", "--quiet", "--no-tags", str(ROOT), str(folder), cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def built(checkout) -> Path:
    """`build` as `pipx run build` runs it: sdist, and from that the wheel, in isolated environments."""
    run(sys.executable, "-m", "build", "--outdir", "dist", cwd=checkout)
    return checkout / "dist"


def test_a_clone_without_tags_has_a_development_version(built):
    (wheel,) = built.glob("*.whl")
    assert re.fullmatch(r"trl_gptoss-0\.1\.0?\.?dev\d+\+g[0-9a-f]+(\.d\d+)?-py3-none-any\.whl", wheel.name), wheel.name


def test_a_tag_is_the_version_and_the_sdist_keeps_it(checkout, tmp_path):
    clone = tmp_path / "tagged"
    run("git", "clone", "--quiet", str(checkout), str(clone), cwd=tmp_path)
    run("git", "-c", "user.name=t", "-c", "user.email=t@t", "tag", "-m", "x", "v1.2.3", cwd=clone)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", "dist", cwd=clone)
    (sdist,) = (clone / "dist").iterdir()
    assert sdist.name == "trl_gptoss-1.2.3.tar.gz"
    with tarfile.open(sdist) as archive:  # without git: what PKG-INFO says
        archive.extractall(tmp_path, filter="data")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", "dist", cwd=tmp_path / "trl_gptoss-1.2.3")
    (wheel,) = (tmp_path / "trl_gptoss-1.2.3/dist").iterdir()
    assert wheel.name == "trl_gptoss-1.2.3-py3-none-any.whl"


def test_what_is_in_the_sdist_and_in_the_wheel(built):
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"kernels/sink_fa3/csrc/fwd_full.cu", "kernels/sink_fa3/build.toml", "configs/recipes/tiny.yaml"} <= names
    assert {"LICENSE", "README.md", "setup.py", "src/trl_gptoss/hub/card.py"} <= names
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert "trl_gptoss/attention/_kernels/sink_fa3/csrc/fwd_full.cu" in inside  # for build-kernels
    assert "trl_gptoss/attention/_kernels/sink_fa3/build.toml" in inside
    assert not [name for name in names | inside if name.endswith((".so", ".pyc")) or "/.git" in name]
    assert not [name for name in inside if name.startswith(("tests/", "docs/", "kernels/"))]


USE = """
import shutil, torch
import trl_gptoss
from transformers import AutoModelForCausalLM
from trl_gptoss.attention import active_backend
assert shutil.which("nvcc") is None and "site-packages" in trl_gptoss.__file__, trl_gptoss.__file__
assert not trl_gptoss.__version__.startswith("0+"), trl_gptoss.__version__
ids = torch.tensor([[5, 17, 99, 3, 3, 42, 110, 7, 64, 31, 12, 8]])
eager, ours = (AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation=name) for name in ("eager", "sink_fa3"))
assert ours.config._attn_implementation == "sink_fa3" and active_backend("cpu") == "reference"
torch.testing.assert_close(ours(ids).logits, eager(ids).logits, rtol=0, atol=1e-5)
ours(ids).logits.logsumexp(-1).sum().backward()
assert ours.model.layers[0].self_attn.sinks.grad.abs().sum() > 0
print("fine", trl_gptoss.__version__)
"""


def test_the_pure_wheel_in_a_fresh_environment_without_nvcc(built, tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from tiny_policy import tiny_model

    tiny_model().save_pretrained(tmp_path / "model")
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (wheel,) = built.glob("*.whl")
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path
    )
    # The dependencies are those of this environment: downloading torch again would prove nothing about the wheel.
    here = sysconfig.get_path("purelib")
    (site / "dependencies.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    code = USE.replace("MODEL", repr(str(tmp_path / "model")))
    nowhere = tmp_path / "bin"
    nowhere.mkdir()
    out = run(
        str(python), "-c", code, cwd=tmp_path, PATH=str(nowhere), CUDA_HOME=str(nowhere), CUDA_VISIBLE_DEVICES=""
    )
    assert out.startswith("fine")


def test_the_platform_wheel(checkout, tmp_path):
    """Compiles everything with nvcc; minutes. The GPU is not needed."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    run("bash", "scripts/build_wheels.sh", str(tmp_path), cwd=checkout, PYTHON=sys.executable, WHEELS="platform")
    (wheel,) = (path for path in tmp_path.glob("*.whl") if "none-any" not in path.name)
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.getinfo("trl_gptoss/attention/_kernels/libsink_fa3.so").file_size > 2**20
