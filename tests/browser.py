"""A page as a real browser shows it. Tests that need one are skipped where there is none."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-headless-shell", "google-chrome")
_REPORT = """
<script>
addEventListener("load", () => {
  for (const image of document.images) image.dataset.shown = image.naturalWidth;
  document.body.dataset.overflow = document.documentElement.scrollWidth - innerWidth;
});
</script>
"""


def shown_page(page: Path, scratch: Path) -> str:
    """The page's HTML after a browser has laid it out.

    Every image has its width in pixels in `data-shown`, 0 for one that can't be shown; the body has
    in `data-overflow` by how many pixels it is too wide for a window of 1,400.
    """
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip(f"needs one of {', '.join(NAMES)} on the PATH")
    copy = scratch / page.name
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{_REPORT}</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]
    command += [f"--user-data-dir={scratch / 'profile'}", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def image_widths(dom: str) -> list[int]:
    return [int(width) for width in re.findall(r'data-shown="(\d+)"', dom)]


def overflow(dom: str) -> int:
    found = re.search(r'data-overflow="(-?\d+)"', dom)
    assert found is not None, "the page's script did not run"
    return int(found[1])
